"""Checks of what the user's code does: its losses, its optimizer steps, its buffers.

reduction_check   whether a loss looks like a sum over the batch, or like a mean
step_guard        optimizer steps and clipping that would go past the run
batch_errors      what in a batch the model or the loss could not compute with
own_buffers       buffers that a forward pass changes, on each rank for itself
"""
