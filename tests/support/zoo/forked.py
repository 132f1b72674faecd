"""Rank processes forked from a process that has imported everything, instead of started anew.

Importing torch and the packages of the zoo takes a rank longer than training a tiny model. What the
launcher and a rank do stays as it is, only the start of the process is another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from manyhands.launch import hosts, worker


class ForkedWorker:
    """What `launch.hosts` uses of a `subprocess.Popen` that runs `manyhands.launch.worker`."""

    def __init__(
        self,
        command: Sequence[str],
        stdin: int,
        stdout: int | None,
        stderr: int | None,
        env: Mapping[str, str],
        start_new_session: bool,
    ):
        assert command[-1] == "manyhands.launch.worker" and start_new_session
        self.returncode: int | None = None
        read, write = os.pipe()
        out = os.pipe() if stdout == subprocess.PIPE else None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_worker(read, out[1] if out else None, env)
        os.close(read)
        self.stdin: IO[bytes] = os.fdopen(write, "wb")
        self.stdout: IO[bytes] | None = None
        if out is not None:
            os.close(out[1])
            self.stdout = os.fdopen(out[0], "rb")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _become_worker(stdin: int, out: int | None, env: Mapping[str, str]) -> Any:
    code = 1
    try:
        os.setsid()
        os.dup2(stdin, 0)
        if out is not None:
            os.dup2(out, 1)
            os.dup2(out, 2)
        # among them the pipes of other ranks, which must end with the launcher
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(env)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        code = worker.main()
    finally:
        os._exit(code)


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Within the block, the launcher of this process forks its workers.

    This process must not have computed on several threads before: they do not survive a fork.
    """
    forking = types.SimpleNamespace(
        Popen=ForkedWorker, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT
    )
    hosts.subprocess = forking  # type: ignore[assignment]
    before = os.environ.get("MANYHANDS_START")
    os.environ["MANYHANDS_START"] = "exec"  # the fork server has not imported the packages
    try:
        yield
    finally:
        hosts.subprocess = subprocess
        del os.environ["MANYHANDS_START"]
        if before is not None:
            os.environ["MANYHANDS_START"] = before
