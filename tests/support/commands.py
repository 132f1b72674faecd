"""Commands as a user types them, in their own processes, and waiting for files and lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import manyhands
from manyhands.exchange import segments

LIMIT_S = 90.0  # for a step to come about on a busy machine; nothing waits so long unless it fails
STOPPED_S = 2.0  # what the package promises: after a failure no other rank runs on for longer
CLI = [sys.executable, "-c", "from manyhands.cli import main; main()"]

# a job that goes on for ever and leaves each rank's pid in a file once it has trained a round
ENDLESS = """
import os, threading
from pathlib import Path
import torch, manyhands as mh
from torch import nn

class Mark(mh.Callback):
    def on_round(self, run, round, loss):
        # asynchronous ranks agree on the largest round: a late one may see no first
        if not Path(f"{run.rank}.pid").exists():
            Path(f"{run.rank}.part").write_text(str(os.getpid()))
            os.rename(f"{run.rank}.part", f"{run.rank}.pid")
        if Path("block").exists():
            threading.Event().wait()

def task():
    x = torch.randn(64, 4)
    return mh.Task(model=nn.Linear(4, 2), loss=nn.functional.cross_entropy,
                   train=(x, (x.sum(1) > 0).long()), batch=8, epochs=10**9, callbacks=[Mark()],
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
"""


def environ(**more: str) -> dict[str, str]:
    package = str(Path(manyhands.__file__).resolve().parents[1])
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([package, *sys.path[:1]]),
        "PYTHONUNBUFFERED": "1",
        **more,
    }


class Command:
    """A running command; its output goes to files in `folder`, where it also runs."""

    def __init__(self, folder: Path, command: list[str], stdin: str = "", **env: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        (folder / "stdin").write_text(stdin)
        with (
            (folder / "stdout").open("wb") as out,
            (folder / "stderr").open("wb") as err,
            (folder / "stdin").open("rb") as given,
        ):
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=given,
                stdout=out,
                stderr=err,
                env=environ(**env),
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    def until(self, what: Callable[[], bool], name: str) -> None:
        """Wait for something that the command does; its end before that is a failure."""
        deadline = time.monotonic() + LIMIT_S
        while not what():
            code = self.process.poll()
            assert code is None or what(), (
                f"ended with {code} before {name}:\n{self.out[-3000:]}\n{self.err[-3000:]}"
            )
            assert time.monotonic() < deadline, (
                f"no {name}:\n{self.out[-3000:]}\n{self.err[-3000:]}"
            )
            time.sleep(0.01)

    def pids(self, ranks: int) -> list[int]:
        files = [self.folder / f"{r}.pid" for r in range(ranks)]
        self.until(lambda: all(f.exists() for f in files), "round on every rank")
        return [int(f.read_text()) for f in files]

    def end(self) -> int:
        return self.process.wait(LIMIT_S)


@contextmanager
def command(folder: Path, line: list[str], stdin: str = "", **env: str) -> Iterator[Command]:
    """Whatever happens in the test, nothing of the command is left running."""
    job = Command(folder, line, stdin, **env)
    try:
        yield job
    finally:
        started = [job.process.pid, *descendants(job.process.pid)]
        for pid in started:
            _kill(pid)
        for file in folder.glob("*.pid"):
            if gone([int(file.read_text())]) is False:
                _kill(int(file.read_text()))
        job.process.wait()


def run(folder: Path, line: list[str], stdin: str = "", **env: str) -> Command:
    with command(folder, line, stdin, **env) as job:
        job.end()
    return job


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(path.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def gone(pids: list[int]) -> bool:
    return not any(segments.alive(pid) for pid in pids)


def wait_until_gone(pids: list[int], limit_s: float) -> float:
    started = time.monotonic()
    while not gone(pids):
        assert time.monotonic() - started < limit_s, (
            f"still running after {limit_s} s: {[p for p in pids if segments.alive(p)]}"
        )
        time.sleep(0.01)
    return time.monotonic() - started


def left_in_shared_memory(pids: list[int]) -> list[Path]:
    return [p for pid in pids for p in segments.directory().glob(f"{segments.PREFIX}{pid}-*")]
