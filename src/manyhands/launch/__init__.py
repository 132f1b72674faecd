"""Launch: start the processes of a job, watch them, and pass signals on. Knows no tensors.

    hosts          HostsLauncher: starts the workers of a job, on this machine or on several hosts
    worker         the process of one rank
    lifeline       its first lines: it ends with its launcher
    fork_server    one process a host that has loaded torch, and forks the workers there
    environment    the only reader of environment variables: ranks, rendezvous, servers
    signals        SIGTERM, SIGUSR1, Ctrl-C and a file as a request to save and stop
    block_stop     which step that is, within a block of local steps
    grace          what is said when ranks are asked to stop, and when they do not in time
    restarts       the whole run again, from its last checkpoint, within a `restart_budget`
    lab            hosts made of network namespaces on one machine (namespaces), and `launcher`
    servers        processes of parameter servers
    elastic        runs whose ranks may die: who takes part, and who takes a dead rank's place
    malloc         settings of the C library's allocator

What happens when a rank is killed (kill -9): its peers notice it in their next exchange
(`exchange/peer_wait.py`, or gloo's closed socket) and raise `PeerLost`, which `worker` reports over
the rendezvous store. `hosts` sees the first process end, waits SETTLE_S for reports, kills the rest
(`_end`), and names the cause (`_raise_cause`): the killed rank, since `PeerLost` marks a victim.
The next run resumes from the last checkpoint (`recover/`), with restarts= by itself (`restarts`).
Of an elastic job, `hosts` starts another process instead, while enough ranks are at work
(`elastic`).
"""
