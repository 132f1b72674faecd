"""Worker: the process of one rank, `python -m manyhands.launch.worker`, started by `launch.hosts`.

Variables of the environment and the payload come on standard input, which then stays open as a
`lifeline`: when the launcher ends, in any way, reading it ends and so does this process. An error
goes to the launcher over the rendezvous store, to be printed last.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback

import torch.distributed as dist

from manyhands.errors import ManyhandsError
from manyhands.launch import environment, run_token
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
    os.environ.update(json.loads(_message(channel)))
    payload = _message(channel)
    threading.Thread(
        target=_end_with_launcher, args=(channel,), name="lifeline", daemon=True
    ).start()
    here = environment.process_info()
    store = environment.store(here, timeout_s=60.0)
    try:
        work = pickle.loads(payload)  # from our own parent, over a private pipe
        del payload
        result = work()
        if environment.member() is not None:
            _tell(store, f"result/{environment.member()}", result)
        elif environment.starts() is not None:  # rank 0 may be gone
            _tell(store, f"result/{here.rank}", result)
        elif here.rank == 0:
            _tell(store, "result", result)
        code = 0
    except BaseException as e:
        if isinstance(e, SystemExit) and (e.code is None or isinstance(e.code, int)):
            code = e.code or 0  # the script's own exit code, no error
        else:
            code = 1
            member = environment.member()
            _report(store, here.rank if member is None else member, e)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _report(store: dist.Store, rank: int, e: BaseException) -> None:
    kind = type(e).__name__
    # our own errors need no stack trace; anything else does
    plain = isinstance(e, ManyhandsError | SystemExit)
    text = f"{kind}: {e}" if plain else "".join(traceback.format_exception(e))
    with contextlib.suppress(Exception):
        said = {"kind": kind, "text": text, "time": time.time()}
        _tell(store, f"error/{rank}", {**said, "ours": isinstance(e, ManyhandsError)})


def _tell(store: dist.Store, key: str, value: object) -> None:
    store.set(key, run_token.sign(run_token.of_environment(), key, json.dumps(value)))


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
