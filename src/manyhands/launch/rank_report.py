"""Rank report: a rank does its work, and tells the launcher its result, or the error that ended it.

Over the rendezvous store, signed; the launcher prints the error last.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from manyhands.errors import ManyhandsError
from manyhands.launch import environment, run_token
from manyhands.user_traceback import trim

FAILED_ROUND = "failed_round"  # attribute of an error: the round that it ended


def run_as_rank(work: Callable[[], object]) -> int:
    """Do a rank's work; its result or error goes to the launcher. The exit code of the process."""
    here = environment.process_info()
    member = environment.member()
    store = environment.store(here, timeout_s=60.0)
    try:
        result = work()
        if member is not None:
            _tell(store, f"result/{member}", result)
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
            _report(store, here.rank if member is None else member, e)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _report(store: dist.Store, rank: int, e: BaseException) -> None:
    kind = type(e).__name__
    # our own errors need no stack trace; anything else does
    plain = isinstance(e, ManyhandsError | SystemExit)
    if not environment.full_traceback():
        trim(e)
    text = f"{kind}: {e}" if plain else "".join(traceback.format_exception(e))
    with contextlib.suppress(Exception):
        said = {"kind": kind, "text": text, "time": time.time()}
        said["round"] = getattr(e, FAILED_ROUND, None)
        _tell(store, f"error/{rank}", {**said, "ours": isinstance(e, ManyhandsError)})


def _tell(store: dist.Store, key: str, value: object) -> None:
    store.set(key, run_token.sign(run_token.of_environment(), key, json.dumps(value)))
