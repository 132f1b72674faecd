"""Replica: one copy of the model with its optimizer. It knows no other replica.

The way of one batch through the files:

    forward            takes a batch and computes the mean loss of a micro-batch
    module             scales the loss and calls backward, for each micro-batch of the step
    gradient_window    copies gradients into flat vectors, gives full buckets to the strategy
    optimizer_step     divides by the merged count, clips, steps, moves the schedule
    update             gives the optimizer whole parameters, or the slices that this rank owns

`parameters` and `flat` hold the vectors. `state` turns it all into named tensors for checkpoints.
Around a replica: `captured` (CUDA graphs), `distillation` (learning from other models), `thinned`
(leaving out the units that `units` finds); `wrapper` is their base. `recompute` saves memory,
`cast` lowers precision. `checks/` look at what the user's code does.
"""
