"""Tensor parallelism: operators on sharded values, each with its sharding rule."""
