"""Model parallelism: one replica spread over several ranks.

tensor/             tensor parallelism: operators on sharded values
pipeline/           pipeline parallelism: stages, their executor, messages between them
dataflow/           cut=graph: any computation graph partitioned over ranks
zero/               ZeRO: optimizer state, gradients and parameters sharded over the shard axis
trace/              the forward pass of a model as a program that can be cut
reshard/            from one layout's tensors to another's, for checkpoints and exports
feature_linear.py   split=by_feature: the first Linear cut by columns
sync_batchnorm.py   BatchNorm statistics over the samples of all ranks
"""
