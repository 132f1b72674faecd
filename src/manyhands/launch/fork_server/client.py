"""Fork servers of a launcher: one a host, started before the first rank there.

Nothing here needs torch: a command that knows early that it will start ranks begins its fork server
before its own imports (`begin_early`), so that both load at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from manyhands.launch.fork_server import choice
from manyhands.launch.fork_server.forked_rank import ForkedRank, NotForked

START_S = 120.0  # for a fork server to load everything and to fork its first rank
NAME = "fork server"  # of the process, as `ps` shows it
MODULE = "manyhands.launch.fork_server.process"
# of a rank that trains a task; every optimizer of torch loads dynamo, which takes longer than all
# the rest of a start
PRELOAD = ("torch._dynamo", "manyhands.entry")
# SIGIO, whose default is to end a process, comes when the launcher's end of the pipe is closed: a
# thread that waits for it would forbid the fork. Libraries must not start threads while they load.
SOURCE = """
import fcntl, json, os, runpy, sys
fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
import select
if select.select([0], [], [], 0)[0]:
    os._exit(1)  # it was closed before that
given = json.loads(sys.argv[1])
os.environ.update(dict.fromkeys(given["one_thread"], "1"))
sys.path[1:1] = given["path"]
runpy.run_module(given["module"], run_name="__main__", alter_sys=True)
"""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ForkServer:
    """One fork server process. `enter`: the command prefix that runs commands on its host; `env`:
    its variables, None: those of this process."""

    def __init__(
        self,
        preload: Sequence[str] = (),
        enter: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ):
        path = [p for p in sys.path if p]
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        given = {
            "module": MODULE,
            "path": path,
            "preload": list(preload),
            "requests": theirs.fileno(),
            "one_thread": ONE_THREAD,
        }
        with theirs:
            self.process = subprocess.Popen(
                [*enter, sys.executable, "-c", SOURCE, json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._handle = os.pidfd_open(self.process.pid)

    def start(self, env: Mapping[str, str], piped: bool) -> ForkedRank:
        """A rank with these variables; its output comes through a pipe, or goes where ours goes.
        Raises NotForked."""
        with contextlib.ExitStack() as stack:

            def closed(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            ours, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(channel.close)
            stdin, write = os.pipe()
            read, out = os.pipe() if piped else (None, None)
            rank = ForkedRank(ours, self._handle, write, read)
            outputs = [1, 2] if out is None else [closed(out), out]
            folder = closed(os.open(".", os.O_PATH))
            request = json.dumps(dict(env)).encode()
            fds = [closed(stdin), *outputs, channel.fileno(), folder]
            try:
                socket.send_fds(self._requests, [struct.pack("<Q", len(request))], fds)
                self._requests.sendall(request)
            except OSError as e:
                rank.give_up()
                raise NotForked(e.strerror or str(e)) from None
        rank.begin(START_S)
        return rank

    def close(self) -> None:
        """End it; all its ranks have ended, or end by their own pipes."""
        assert self.process.stdin is not None
        self._requests.close()
        self.process.stdin.close()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:  # stopped, or it cannot be told by its pipe
            self.process.kill()
            self.process.wait()
        os.close(self._handle)


class ForkServers:
    """Those of one launcher, by host. Where one fails, its host has none until the next launch."""

    def __init__(self) -> None:
        self._servers: dict[object, ForkServer | None] = {}
        self._failed: list[ForkServer] = []  # ranks of them may live

    def begin(
        self,
        key: object,
        preload: Sequence[str],
        enter: Sequence[str],
        env: Mapping[str, str],
        early: bool,
    ) -> None:
        """Start one for a host, if it has none; `early`: the one begun early will do."""
        if key in self._servers:
            return
        self._servers[key] = (_early.pop() if early and _early else None) or (
            None if choice.why_not() else ForkServer(preload, enter, env)
        )

    def has(self, key: object) -> bool:
        return self._servers.get(key) is not None

    def start(self, key: object, env: Mapping[str, str], piped: bool) -> ForkedRank | None:
        """A rank on that host; None: it must be started as a process of its own."""
        server = self._servers.get(key)
        if server is None:
            return None
        try:
            return server.start(env, piped)
        except NotForked as e:
            said = f"the fork server (pid {server.process.pid}) gives no ranks any more: {e}"
            print(f"manyhands: {said}; they are started without it", file=sys.stderr, flush=True)
            del self._servers[key]
            self._failed.append(server)
            return None

    def close(self) -> None:
        for server in (*filter(None, self._servers.values()), *self._failed):
            server.close()
        self._servers.clear()
        self._failed.clear()


# at most one: that of the command which this process runs
_early: list[ForkServer] = []


def begin_early(preload: Sequence[str]) -> None:
    """Start the fork server of this machine now; a launcher takes it over."""
    if not _early and not choice.why_not() and not choice.started_by_others():
        _early.append(ForkServer(preload))


@contextlib.contextmanager
def held_early() -> Iterator[None]:
    """At its end, no fork server begun early is left that nobody took over."""
    try:
        yield
    finally:
        while _early:
            _early.pop().close()
