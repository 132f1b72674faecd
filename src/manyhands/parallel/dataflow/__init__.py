"""Dataflow parallelism (cut=graph): any computation graph partitioned over ranks.

The way of one model, then of one step:

    common_subexpressions.py   drops nodes that compute what an earlier node has computed
    graph_nodes.py             groups traced nodes that may not be separated; measures their costs
    partition.py               places graph nodes on ranks (split) and makes each rank's module
    segment_programs.py        cuts each rank's nodes into segments, with edges between them
    graph_executor.py          runs a step: this rank's segments, forward and backward
    peer_transfers.py          sends values and gradients along the edges
"""
