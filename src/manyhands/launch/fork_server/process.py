"""Fork server process: loads what every rank needs, then forks a rank for each request.

It has one thread, because a fork copies only the thread that calls it: locks that others hold would
stay locked in the rank. A request is a length and as many bytes, the rank's variables as JSON, with
five files: standard input, output and error, the rank's channel (`forked_rank`), its folder.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from manyhands.launch import environment, lifeline, process_state, worker
from manyhands.launch.fork_server.client import NAME

FILES = 5
# a scheduler sends them to every process of a job; Ctrl-C is for the launcher alone, also later
FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
BLAS = ("openblas_set_num_threads", "openblas_set_num_threads64_")


class ForkServerProcess:
    """`path`: what sys.path has behind the entries of PYTHONPATH."""

    def __init__(self, requests: socket.socket, path: Sequence[str]):
        self._requests, self._path = requests, list(path)
        self._ranks: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid and channel

    def serve(self) -> None:
        """Until the launcher closes its end."""
        while True:
            waiting = select.poll()
            for fd in (self._requests.fileno(), *self._ranks):
                waiting.register(fd, select.POLLIN)
            for fd, _ in waiting.poll():
                if fd in self._ranks:
                    self._reap(fd)
                elif not self._answer():
                    return

    def _reap(self, pidfd: int) -> None:
        pid, channel = self._ranks.pop(pidfd)
        _tell(channel, {"status": os.waitpid(pid, 0)[1]})
        channel.close()
        os.close(pidfd)

    def _answer(self) -> bool:
        """One request; False: there will be no more."""
        head, fds, _, _ = socket.recv_fds(self._requests, 8, FILES, socket.MSG_CMSG_CLOEXEC)
        if len(head) < 8 or len(fds) < FILES:
            return False
        (length,) = struct.unpack("<Q", head)
        body = bytearray()
        while len(body) < length:
            if not (part := self._requests.recv(length - len(body))):
                return False
            body += part
        channel = socket.socket(fileno=fds[3])
        try:
            self._fork(fds, channel, json.loads(body))
        finally:
            for fd in (*fds[:3], fds[4]):
                os.close(fd)
        return True

    def _fork(self, fds: Sequence[int], channel: socket.socket, env: Mapping[str, str]) -> None:
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            _tell(
                channel, {"refused": f"a library that it has loaded started {threads - 1} threads"}
            )
            return channel.close()
        begun, alive = os.pipe()
        try:
            pid = os.fork()
        except OSError as e:
            _tell(channel, {"refused": f"fork: {e.strerror}"})
            os.close(begun)
            os.close(alive)
            return channel.close()
        if pid == 0:
            self._become_rank(fds, channel, env, (begun, alive))
        os.close(alive)
        os.read(begun, 1)  # ends when the rank has a session of its own, which can be killed
        os.close(begun)
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd] = pid, channel
        _tell(channel, {"pid": pid}, [pidfd])

    def _become_rank(
        self,
        fds: Sequence[int],
        channel: socket.socket,
        env: Mapping[str, str],
        pipe: tuple[int, int],
    ) -> None:
        """Never returns."""
        code = 1
        try:
            for number in FOR_RANKS[1:]:
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for standard, fd in enumerate(fds[:3]):
                os.dup2(fd, standard)
            os.fchdir(fds[4])
            for fd in (*fds[:3], fds[4], self._requests.fileno(), *self._ranks):
                os.close(fd)
            for _, other in self._ranks.values():
                other.close()
            for fd in pipe:  # it lives, in a session of its own
                os.close(fd)
            lifeline.begin()
            sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
            environment.replace(env)
            search = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
            sys.path[:] = ["", *search, *self._path]
            importlib.invalidate_caches()
            np.random.seed()  # else alike in all ranks
            follow_threads(env)
            code = _worker()
            _tell(channel, {"left": code})
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(code)


def _worker() -> int:
    """Its exit code, also where what it loads calls sys.exit()."""
    try:
        return worker.main()
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr, flush=True)
        return 1


def follow_threads(env: Mapping[str, str]) -> None:
    """Threads of torch's and numpy's operators as these variables say: both have read those of the
    fork server, which has one."""
    common = env.get("OMP_NUM_THREADS", "").split(",")[0]
    torch.set_num_threads(_positive(env.get("MKL_NUM_THREADS")) or _positive(common) or _cores())
    count = _positive(env.get("OPENBLAS_NUM_THREADS")) or _positive(common) or _cores()
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.split(maxsplit=5)[-1]
        if "openblas" in os.path.basename(file):
            return _set_openblas(file, min(count, _cores()))


def _set_openblas(file: str, count: int) -> None:
    library = ctypes.CDLL(file)
    for name in (prefix + name for prefix in ("scipy_", "") for name in BLAS):
        if hasattr(library, name):
            return getattr(library, name)(count)


def _positive(text: str | None) -> int:
    return int(text) if text and text.strip().isdecimal() else 0


def _cores() -> int:
    return environment.cores()


def _tell(channel: socket.socket, what: Mapping[str, object], fds: Sequence[int] = ()) -> None:
    try:
        socket.send_fds(channel, [json.dumps(what).encode()], fds)
    except OSError:
        pass  # the launcher does not listen any more


def main() -> None:
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.argv[1])
    for module in given["preload"]:
        importlib.import_module(module)
    process_state.name_this_process(NAME)
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # a standard stream was closed: what a rank is given must not come in its place
    os.close(fd)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to every page of what is shared
    path = sys.path[1 + len(given["path"]) :]
    ForkServerProcess(socket.socket(fileno=given["requests"]), path).serve()


if __name__ == "__main__":
    main()
