"""Assembly, the composition root: from a task and a plan to one rank's trainer.

It may import every room; only `entry`, `own_loop`, `api` and `cli` import it.

rank_context    device, groups, directory, recorder       connect: the groups themselves
trainer         task_trainer, assemble: the steps below, in order
  resume        the snapshot to start from
  model_parallel  this rank's part of a split model       stage_cuts: where a pipeline is cut
  memory        forecast and peak
  parameters    optimizer, flat buffers                   tables: servers and embeddings
  data          batches and limits
  replica_setup   the replica and its wrappers
  checkpointing   snapshots                               own_state, sharded_snapshot: their parts
  strategies    the merge strategy with its group         evaluation: metrics over all ranks
"""
