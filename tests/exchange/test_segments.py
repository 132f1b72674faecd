"""Shared memory segments that a killed process has left."""

from __future__ import annotations

import os
import signal

from manyhands.exchange import segments


def test_a_sweep_removes_what_the_named_dead_have_left_and_nothing_else() -> None:
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, str(segments.create(4096)[0]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    path = os.read(read, 4096).decode()
    os.close(read)
    os.close(write)
    os.waitpid(pid, 0)
    mine, _ = segments.create(4096)
    try:
        assert segments.sweep({os.getpid()}) == [] and os.path.exists(path)
        assert segments.sweep({pid, os.getpid()}) == [os.path.basename(path)]
        assert not os.path.exists(path) and mine.exists()
    finally:
        mine.unlink()
