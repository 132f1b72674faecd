"""Exchange between ranks: process groups that move tensors. Knows bytes and ranks, not gradients.

Groups, each with the methods of `core.Group`:

    shared            processes of one host, through shared memory (shared_vectors: allocation and
                      owners; segments: the mapped files; mailbox: messages; peer_wait: waiting)
    collective        torch.distributed: gloo, nccl, mpi
    hierarchical      shared memory inside a host, gloo between hosts
    inproc            threads of one process on a virtual clock, for tests and simulation
                      (inproc_calls: how calls match)
    solo              one rank

Wrappers, each a group around a group (wrapper):

    observed          reports what every call moved and how long it took
    compression/      compresses messages
    algorithms/       all-reduce algorithms made of point-to-point messages
    noise_scale       measures the gradient noise scale on the way

reduce_scatter makes reduce-scatter and all-gather of messages, for groups without their own.
"""
