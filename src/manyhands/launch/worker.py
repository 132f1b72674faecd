"""Worker: the process of one rank, `python -m manyhands.launch.worker`, started by `launch.hosts`.

Variables of the environment and the payload come on standard input, which then stays open as a
`lifeline`: when the launcher ends, in any way, reading it ends and so does this process. An error
goes to the launcher over the rendezvous store, to be printed last.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import struct
import threading

from manyhands.launch import environment, process_state
from manyhands.launch.rank_report import run_as_rank
from manyhands.launch.signals import Stop


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    # from here on SIGTERM is for the training loop, also before that has started
    with Stop(interrupt=False):
        return _work()


def _work() -> int:
    channel = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # user code that reads standard input finds it empty
    for module in environment.preload():
        importlib.import_module(module)
    environment.update(json.loads(_message(channel)))
    process_state.name_this_process(f"rank {environment.variables().get('RANK', '')}")
    payload = _message(channel)
    threading.Thread(
        target=_end_with_launcher, args=(channel,), name="lifeline", daemon=True
    ).start()
    return run_as_rank(pickle.loads(payload))  # from our own parent, over a private pipe


def _message(channel: object) -> bytes:
    (length,) = struct.unpack("<Q", _exactly(channel, 8))
    return _exactly(channel, length)


def _exactly(channel: object, n: int) -> bytes:
    data = channel.read(n)  # type: ignore[attr-defined]
    if len(data) < n:
        os._exit(1)  # the launcher died while we were starting
    return bytes(data)


def _end_with_launcher(channel: object) -> None:
    channel.read(1)  # type: ignore[attr-defined]
    os._exit(1)


if __name__ == "__main__":
    # skip module teardown: a thread of a dead process group can hang there for minutes
    code = main()
    os._exit(code)
