"""Tables of a server shard: sparse and dense storage, their kernels and server optimizers."""
