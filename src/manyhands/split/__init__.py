"""Splits and schedules as pure functions: who owns what, and who computes what when.

Index arithmetic only: no devices, no peers, no files, no clocks.

data             which samples a rank computes at each step
features         columns of the data and of the first matrix (split=by_feature)
shard_spec       which slice of a global tensor a rank holds; shard_slice: a range of it (ZeRO)
tensor           which parameters are cut over the tensor axis, and along which dimension
stages           where a chain is cut into pipeline stages
schedules        which micro-batch a rank computes when: gpipe, 1f1b, interleaved, zero_bubble
graph            a computation graph over ranks; graph_placement and graph_schedule: who and when
skeleton         which units of a network a rank trains (merge=skeleton)
"""
