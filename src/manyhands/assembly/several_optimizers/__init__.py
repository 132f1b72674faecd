"""Several named optimizers in a run.

named_checks    which plans can have them, and the optimizers made by name
task_losses     losses of a task: one for a batch, or several
compiled_models torch.compile of one model, or of each of several
step_agreement  ranks compare which optimizer steps next
"""
