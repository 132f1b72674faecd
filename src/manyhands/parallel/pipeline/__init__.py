"""Pipeline parallelism: stages, the executor of their schedule, and the messages between them.

The way of one step:

    node_costs.py        before training: what every node of the traced model costs
    stage_modules.py     cuts the traced model into stages (stage_program.py), with parameters
    step_executor.py     reads the micro-batches of a step, sums the loss; base of both executors
    executor.py          runs this rank's actions: forward, backward, weight gradients
    transfers.py         sends values and gradients between stages; message_format.py: the bytes
    received_tensor.py   makes a received value part of this rank's autograd graph
    split_backward.py    a backward pass in two parts, for zero-bubble schedules
    tied_weights.py      sums the gradients of weights that several stages hold
"""
