"""ZeRO: optimizer state, gradients and parameters sharded over the ranks of the shard axis.

The way of one step:

    sharded_parameters.py   what the replica sees: this rank's slices, and the hooks of a window
    block_gather.py         stage 3: gathers the parameters of a block (blocks.py) before it runs
    gradient_reduce.py      backward: sums gradients over ranks into the owners' slices
    sharded_update.py       the optimizer on this rank's slices; its state in checkpoints
    full_state.py           whole tensors out of the slices, and back
    spans.py                vectors of which each rank owns 1/n; span_memory.py: their memory
    memory_use.py           bytes that a rank holds, counted on its tensors
"""
