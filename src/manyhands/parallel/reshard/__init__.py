"""Resharding: from the tensors of one layout to those of another, for checkpoints and exports.

    rank_state    the tensors of this rank, by their names here
    resharding    their shard specs -> global tensors, and back

A checkpoint is written as each rank's slices of the global tensors and read as any layout's slices.
"""
