"""Several optimizers of one replica, each with parameters of its own (GAN, actor-critic, layers).

    named_optimizers   the composite optimizer: steps one of them, or all
    named_schedules    one learning-rate schedule each, moved when its optimizer steps
    step_losses        a step that yields: several losses and optimizer steps for one batch
    named_losses       the mean loss of each optimizer, for the progress line

Parameters of one optimizer lie together, in flat vectors and gradient buckets of their own
(`flat`). So a step of one optimizer exchanges and changes nothing of the others.
"""
