"""Callbacks of a run: what they keep in its checkpoints, and whether a plan can call them.

callback_state    their state, in a checkpoint and for another trainer
merged_gradients  on_gradient: which plans have a merged gradient on every rank
"""
