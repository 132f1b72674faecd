"""Requests to a run under way: how `manyhands scale` and `manyhands join` reach its launcher.

The launcher of an elastic run leaves RUN/rendezvous.json, readable for this user alone: where its
rendezvous store listens, the run's token, and what a process must have to take part. A request and
its answer are signed values of the store.

    requests         how many there were
    request/<n>      what is asked
    answer/<n>       what the launcher says
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manyhands.errors import LaunchError
from manyhands.launch import run_token
from manyhands.launch.elastic.worker_replacements import run_keys

FILE = "rendezvous.json"
ANSWER_S = 30.0
Handle = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Rendezvous:
    """Where a run is reached, and what its processes have."""

    address: str
    port: int
    token: str
    launcher: int  # its process
    # version, torch, words, script, digest, arguments, options: of every process
    needs: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def left_in(directory: Path, rendezvous: Rendezvous) -> Iterator[None]:
    """Leave the file while the run lasts."""
    path = directory / FILE
    path.unlink(missing_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(rendezvous), file)
    except OSError as e:
        raise LaunchError(
            f"{path} cannot be written ({e.strerror}); make room in the run directory"
        ) from e
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find(directory: Path) -> Rendezvous:
    try:
        return Rendezvous(**json.loads((directory / FILE).read_text()))
    except FileNotFoundError:
        raise LaunchError(
            f"{directory} is no elastic run under way: it has no {FILE}; give the directory of a "
            "run that was started with elastic=, while it trains",
            2,
        ) from None
    except (OSError, ValueError, TypeError) as e:
        raise LaunchError(f"{directory / FILE} cannot be read ({e})", 2) from e


class RequestDesk:
    """The launcher's side."""

    def __init__(self, keys: dist.Store, token: str):
        self._keys, self._token, self._next = keys, token, 1

    def serve(self, handle: Handle) -> None:
        """Answer what was asked since the last call."""
        while self._keys.check([f"request/{self._next}"]):
            key, number = f"request/{self._next}", self._next
            self._next += 1
            text = run_token.verify(self._token, key, bytes(self._keys.get(key)))
            if text is not None:
                reply = f"answer/{number}"
                said = json.dumps(handle(json.loads(text)))
                self._keys.set(reply, run_token.sign(self._token, reply, said))


def connect(found: Rendezvous) -> dist.Store:
    try:
        store = dist.TCPStore(
            found.address,
            found.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
        )
    except RuntimeError as e:
        raise LaunchError(
            f"the run does not answer at {found.address}:{found.port}: it has ended, or this "
            "machine does not reach it",
            2,
        ) from e
    return run_keys(store)


def ask(found: Rendezvous, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the launcher, and return its answer. Raises LaunchError where it refuses."""
    keys = connect(found)
    number = keys.add("requests", 1)
    key, reply = f"request/{number}", f"answer/{number}"
    keys.set(key, run_token.sign(found.token, key, json.dumps(request)))
    deadline = time.monotonic() + ANSWER_S
    while not keys.check([reply]):
        if time.monotonic() > deadline:
            raise LaunchError(f"the run gave no answer within {ANSWER_S:g} s", 2)
        time.sleep(0.02)
    text = run_token.verify(found.token, reply, bytes(keys.get(reply)))
    answer: dict[str, Any] = json.loads(text or '{"refused": "its answer was forged"}')
    if "refused" in answer:
        raise LaunchError(f"refused: {answer['refused']}", 2)
    return answer


def difference(run: dict[str, Any], here: dict[str, Any]) -> str:
    """In which way a process is not as the run needs it; "": it is."""
    names = {
        "version": "manyhands",
        "torch": "torch",
        "python": "Python",
        "words": "the plan",
        "digest": "the task file",
    }
    found = [
        f"{name} is {here[key]}, the run's {run[key]}"
        for key, name in names.items()
        if key in here and here[key] != run.get(key)
    ]
    return "; ".join(found)
