"""Tensor parallelism: a model runs on sharded values, each operator by its sharding rule.

How a model is cut, once:

    split.tensor     derives which parameters are cut, by dry runs
    dry_run          one forward pass on fake tensors and an axis without a group
    dry_run_mode     cuts every layer it can in that pass, and notes which cuts failed
    shard_module     keeps this rank's slices in the module; its attributes read as sharded values

One forward pass, then:

    x @ self.weight           self.weight is a ShardedValue (sharded_value)
    -> __torch_function__     looks up the operator in SHARDING_RULES (sharding_rules)
    -> linear.matmul          works on local tensors; so do elementwise, views, attention, loss
    -> collectives.reduce     exchanges where it must, with its own backward pass
    -> a Tensor again, or the next ShardedValue
"""
