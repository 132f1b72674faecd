"""Dataflow parallelism (cut=graph): any computation graph partitioned over ranks."""
