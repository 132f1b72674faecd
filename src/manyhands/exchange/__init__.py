"""The wire: process groups, sockets, shared memory. Knows bytes and ranks, not what a gradient means."""
