"""ZeRO: optimizer state, gradients and parameters sharded over the ranks of the shard axis."""
