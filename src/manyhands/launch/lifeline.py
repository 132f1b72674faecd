"""Lifeline of a worker: it ends with its launcher, also while it is still being imported.

Standard input is a pipe from the launcher. Importing torch takes seconds, so the first lines of the
process, before any import of ours, start a thread that waits for the other end of it to close.
"""

from __future__ import annotations

import os
import select
import threading

WORKER = "manyhands.launch.worker"
SOURCE = """
import os, runpy, select, sys, threading

def watch(pipe):
    hung_up = select.poll()
    hung_up.register(pipe, 0)  # its end is told without being asked for
    hung_up.poll()
    os._exit(1)

threading.Thread(target=watch, args=(os.dup(0),), name="lifeline", daemon=True).start()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
COMMAND = ("-c", SOURCE, WORKER)


def begin() -> None:
    """The same in a process that was forked and has everything imported."""
    threading.Thread(target=_watch, args=(os.dup(0),), name="lifeline", daemon=True).start()


def _watch(pipe: int) -> None:
    hung_up = select.poll()
    hung_up.register(pipe, 0)
    hung_up.poll()
    os._exit(1)
