"""Fixtures of every test: one thread a process, the data folder, and a guard against leaks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; child processes inherit it

import pytest
import torch
import torch.distributed as dist

from manyhands.exchange import segments

pytest.register_assert_rewrite("support")  # its assertions show their values too
torch.set_num_threads(1)

GRACE_S = 3.0  # a process or thread that was told to end may need a moment
# set by libraries on import or first use, or by pytest, not by a test
NOT_OURS = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "MPL", "TF_", "CUDA_MODULE_LOADING")


@pytest.fixture(scope="session")
def data_dir() -> Path | None:
    """A folder with real data sets, or None: data sets then fall back on what needs no file."""
    named = os.environ.get("MANYHANDS_DATA")
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(named) if named else beside if beside.is_dir() else None


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    children, threads, shared, variables = _children(), _threads(), _segments(), _variables()
    handlers = _handlers()
    yield
    leaks = []
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("an initialised torch.distributed process group: call destroy_process_group")
    deadline = time.monotonic() + GRACE_S
    # segments: of a process killed on purpose by a test that runs beside this
    while time.monotonic() < deadline and (
        _children().keys() - children.keys() or _threads() - threads or _segments() - shared
    ):
        time.sleep(0.01)
    living = _children()
    leaks += [f"child process {pid}: {line}" for pid, line in living.items() if pid not in children]
    leaks += [f"thread {thread.name!r}, which is no daemon" for thread in _threads() - threads]
    for path in _segments() - shared:
        path.unlink(missing_ok=True)
        leaks.append(f"shared memory {path}")
    after = _variables()
    for name in sorted(variables.keys() | after.keys()):
        if variables.get(name) != after.get(name):
            leaks.append(
                f"environment variable {name}: {variables.get(name)!r} became {after.get(name)!r}"
            )
            os.environ.pop(name, None)
            if name in variables:
                os.environ[name] = variables[name]
    for number, handler in _handlers().items():
        if handler != handlers[number]:  # the next Ctrl-C would go to a run that is over
            signal.signal(number, handlers[number])
            leaks.append(f"a handler of {number.name}: {handler}")
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _children() -> dict[int, str]:
    """Living child processes and what they run, less those that Python's multiprocessing keeps for
    itself.
    """
    try:  # looks without taking: whoever started a child still gets its exit code
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (
        ChildProcessError
    ):  # none at all, which is so for most tests and far cheaper to ask than to read /proc
        return {}
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent, *_ = _read(f"/proc/{pid}/stat").rpartition(")")[2].split(maxsplit=2)
            if int(parent) != os.getpid() or state == "Z":
                continue
            line = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        except OSError:  # it ended while we looked
            continue
        if (
            "multiprocessing.resource_tracker" not in line
            and "multiprocessing.forkserver" not in line
        ):
            found[int(pid)] = line[:200]
    return found


def _read(path: str) -> str:
    handle = os.open(
        path, os.O_RDONLY
    )  # a third of the cost of a file object, and there is one for every process
    try:
        return os.read(handle, 4096).decode(errors="replace")
    finally:
        os.close(handle)


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()}


def _segments() -> set[Path]:
    """Segments made by this process or by one that is dead; those of other live processes are
    another run's.
    """
    found = set()
    for path in segments.directory().glob(f"{segments.PREFIX}*"):
        pid = path.name.removeprefix(segments.PREFIX).split("-")[0]
        if not pid.isdigit() or int(pid) == os.getpid() or not segments.alive(int(pid)):
            found.add(path)
    return found


def _handlers() -> dict[signal.Signals, Any]:
    return {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


def _variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}
