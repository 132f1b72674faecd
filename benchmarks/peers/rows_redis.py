"""Rows and their squares as values in redis: MGET, Adagrad at the worker, MSET; a unix socket.

The protocol's records have a fixed size here, so commands and answers are made and read by numpy as
whole arrays. `waited_s` counts the time in the socket, from the first byte of a command to the last
of its answer: what is left of a round is the worker's own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

LR, EPS = 0.01, np.float32(1e-10)


def missing() -> str | None:
    return None if shutil.which("redis-server") else "redis-server is not installed"


class Rows:
    def __init__(self, rows: int, dim: int, core: int | None):
        self.dim, self._folder = dim, tempfile.TemporaryDirectory()
        self.waited_s = 0.0
        path = Path(self._folder.name) / "redis"
        self._server = subprocess.Popen(
            [
                "redis-server",
                "--port",
                "0",
                "--unixsocket",
                str(path),
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
                self._folder.name,
            ],
            stdout=subprocess.DEVNULL,
        )
        if core is not None:
            os.sched_setaffinity(self._server.pid, {core})
        self._socket = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + 30
        while True:
            try:
                self._socket.connect(str(path))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        nbytes = 2 * dim * 4
        self._key = np.dtype([("size", "S4"), ("key", "<i8"), ("end", "S2")])
        self._value = np.dtype(
            [("size", f"S{len(f'${nbytes}') + 2}"), ("numbers", "<f4", (2 * dim,)), ("end", "S2")]
        )
        self._pair = np.dtype([("key", self._key), ("value", self._value)])
        self._size = f"${nbytes}\r\n".encode()
        for first in range(0, rows, 50_000):
            ids = np.arange(first, min(rows, first + 50_000))
            self._set(ids, np.full((ids.size, 2 * dim), 1e-3, np.float32))

    def _keys(self, into: np.ndarray, ids: np.ndarray) -> None:
        into["size"], into["key"], into["end"] = b"$8\r\n", ids, b"\r\n"

    def _get(self, ids: np.ndarray) -> np.ndarray:
        command = np.empty(ids.size, self._key)
        self._keys(command, ids)
        start = time.perf_counter()
        self._socket.sendall(f"*{ids.size + 1}\r\n$4\r\nMGET\r\n".encode())
        self._socket.sendall(command.data)
        head = f"*{ids.size}\r\n".encode()
        answer = bytearray(len(head) + ids.size * self._value.itemsize)
        view, got = memoryview(answer), 0
        while got < len(answer):
            got += self._socket.recv_into(view[got:])
        self.waited_s += time.perf_counter() - start
        return np.frombuffer(answer, self._value, ids.size, len(head))["numbers"]

    def _set(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        command = np.empty(ids.size, self._pair)
        self._keys(command["key"], ids)
        command["value"]["size"], command["value"]["numbers"], command["value"]["end"] = (
            self._size,
            numbers,
            b"\r\n",
        )
        start = time.perf_counter()
        self._socket.sendall(f"*{2 * ids.size + 1}\r\n$4\r\nMSET\r\n".encode())
        self._socket.sendall(command.data)
        assert self._socket.recv(64) == b"+OK\r\n"
        self.waited_s += time.perf_counter() - start

    def round(self, ids: np.ndarray, grads: np.ndarray) -> np.ndarray:
        distinct, where = np.unique(ids, return_inverse=True)
        numbers = self._get(distinct).copy()
        rows, squares = numbers[:, : self.dim], numbers[:, self.dim :]
        found = rows[where]
        summed = np.zeros_like(rows)
        np.add.at(summed, where, grads) if distinct.size < ids.size else np.copyto(
            summed, grads[np.argsort(where)]
        )
        squares += summed * summed
        rows -= LR * summed / (np.sqrt(squares) + EPS)
        self._set(distinct, numbers)
        return found

    def close(self) -> None:
        self._socket.close()
        self._server.terminate()
        self._server.wait()
        self._folder.cleanup()
