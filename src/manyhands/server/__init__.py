"""Parameter server: tables of rows that any rank pulls and pushes, updated where the rows are.

The way of one push:

    client/            the worker splits it by shard and composes one request per shard
    protocol/frame     header, message (`messages`), rows (`row_encoding`); or an `arena` both map
    network/listener   accepted the connection and checked its handshake
    network/request_loop    receives the request, decodes it, and calls the shard
    shard              under its lock: first `dedup` skips a push that was applied before, then all
                       of the push is checked before any of it is applied
    pending            keeps a pending push until a commit; `clock` decides on commits
    tables/            sums repeated ids, finds or makes rows (`sparse`, `dense`), and runs the
                       optimizer's kernel on them (`optimizers`, `update_kernels`)
    request_loop       acknowledges it with a RowsReply, with rows where the request also pulls

`process` runs shards, and in one server of a run the `coordinator`: membership, the slot map
(`slots`), the workers' `clock` and their `step_counter`. `namespaces/` keeps several runs, and
clients without a rank, apart on one server. `local_store` and `inproc_store` use shards and clock
without servers. `snapshots/` saves tables to files while pushes go on; `replication/` keeps copies
of shards on other servers; `elastic/` leases steps to workers that may die and be replaced.
"""
