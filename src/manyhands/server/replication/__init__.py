"""Replication: every shard is held by a chain of servers, so that the loss of one loses nothing.

    placement     which servers hold which shard: the first chains, and what follows when a server
                  is lost, added or drained (decided by the coordinator)
    chain         one server's part in a chain: what it has applied, what all after it have
    replicator    the same with threads and connections: hands changes on and waits for them
    follower      receives changes from the server before it, and applies them in the same order
    copying       a whole shard to a server that has nothing of it, while pushes go on

The way of one push over the chain A, B, C: A gives it a number, hands it to B and applies it; B
hands it to C and applies it; C applies it and acknowledges it to B, B to A, and A to the worker. So
what a worker knows to be pushed is on all three; what it reads has been acknowledged by all three.
All of it is a function of the order of changes, so the three have the same bits.

A server takes changes only from the one before it in the newest chain it knows. The coordinator
tells the servers of a new chain before it tells workers. Therefore a server that was cut off and
replaced can acknowledge nothing: the next in its chain does not listen to it any more.

Papers: van Renesse and Schneider 2004 (chain replication, OSDI).
"""
