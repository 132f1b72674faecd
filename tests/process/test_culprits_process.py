"""Runs whose ranks hang or are slow: real processes, stopped and blocked."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manyhands.core import Event
from manyhands.errors import ManyhandsError
from manyhands.observe.events import read
from support.commands import CLI, ENDLESS, Command, command

STALL_S = 2.0
BUSY_S = 3.0  # that a loaded machine may take on top

# each rank does what a file named after it says, in the middle of training
BLOCKED = """
import ctypes, os, threading
from pathlib import Path
import torch, manyhands as mh
from torch import nn

RANK = os.environ["RANK"]

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        while Path(f"load-{RANK}").exists():
            threading.Event().wait(0.01)
        return torch.ones(4), 1

def wait_for_nothing():
    while Path(f"compute-{RANK}").exists():
        threading.Event().wait(0.01)

def hold_the_gil():
    while Path(f"gil-{RANK}").exists():
        ctypes.PyDLL(None).usleep(5_000_000)

class Mark(mh.Callback):
    def on_round(self, run, round, loss):
        if round == 8:
            Path(f"{run.rank}.part").write_text(str(os.getpid()))
            os.rename(f"{run.rank}.part", f"{run.rank}.pid")

def step(model, batch):
    wait_for_nothing()
    hold_the_gil()
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def task():
    return mh.Task(model=nn.Linear(4, 2), step=step, train=Rows(), batch=8, epochs=10**9,
                   callbacks=[Mark()], optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
"""


@contextmanager
def job(folder: Path, text: str, *words: str) -> Iterator[Command]:
    (folder / "job.py").write_text(text)
    line = [*CLI, "run", "job.py", "save=1000000000", f"stall_s={STALL_S}", "--dir", "run", *words]
    with command(folder, line) as running:
        yield running


def events(folder: Path, *names: str) -> list[Event]:
    try:
        return [e for e in read(folder / "run") if e.name in names]
    except ManyhandsError:
        return []


def until_said(running: Command, name: str, count: int = 1) -> str:
    running.until(lambda: len(events(running.folder, name)) >= count, f"event {name!r}")
    return str(events(running.folder, name)[-1].value)


def until_known(running: Command, ranks: int) -> list[int]:
    """Until the ranks have trained for some heartbeats, so that what is usual is known."""
    pids = running.pids(ranks)
    running.until(lambda: _trained_s(running.folder) > STALL_S, "some rounds")
    return pids


def _trained_s(folder: Path) -> float:
    times = [e.time_s for e in events(folder, "round")]
    return max(times, default=0.0) - min(times, default=0.0)


def _rounds(folder: Path) -> int:
    return max((e.round for e in events(folder, "round")), default=0)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_in_time_and_the_run_goes_on_when_it_wakes(
    tmp_path: Path, victim: int
) -> None:
    with job(tmp_path, ENDLESS, "data=3", "--quiet") as running:
        pids = until_known(running, 3)
        stopped = time.time()
        os.kill(pids[victim], signal.SIGSTOP)
        text = until_said(running, "stalled")
        named = events(tmp_path, "stalled")[0].time_s - stopped
        assert named < STALL_S + BUSY_S
        others = [r for r in range(3) if r != victim]
        assert f"rank {victim} (host " in text and f"pid {pids[victim]}) is stopped" in text
        assert f"ranks {others[0]}, {others[1]} wait for it in " in text
        running.until(lambda: "is stopped" in running.out + running.err, "line")
        before = _rounds(tmp_path)
        os.kill(pids[victim], signal.SIGCONT)
        assert f"rank {victim} (host " in until_said(running, "stall over")
        running.until(lambda: _rounds(tmp_path) > before + 10, "rounds after it woke")
        assert len(events(tmp_path, "stalled")) == 1


@pytest.mark.slow
def test_a_stopped_rank_that_hosts_the_store_is_named_by_the_next(tmp_path: Path) -> None:
    """As under srun and mpirun, where no launcher of ranks hosts it."""
    (tmp_path / "job.py").write_text(ENDLESS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ["save=1000000000", f"stall_s={STALL_S}", "--dir", str(tmp_path / "run")]
    line = [*CLI, "run", str(tmp_path / "job.py"), *words]
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with (
        command(tmp_path / "0", line, RANK="0", **where),
        command(tmp_path / "1", line, RANK="1", **where) as second,
    ):
        files = [tmp_path / str(r) / f"{r}.pid" for r in range(2)]
        second.until(lambda: all(f.exists() for f in files), "a round on every rank")
        second.until(lambda: _trained_s(tmp_path) > STALL_S, "some rounds")
        pid = int(files[0].read_text())
        os.kill(pid, signal.SIGSTOP)
        second.until(lambda: f"pid {pid}) is stopped" in second.err, "line")
        assert "rank 1 waits for it in " in second.err
        os.kill(pid, signal.SIGCONT)
        second.until(lambda: "went on after" in second.err, "end of the stall")


WHERE = {
    "compute": ("is in compute", "in wait_for_nothing"),
    "load": ("is in data loading", "in __getitem__"),
    "gil": ("hold the GIL", "in hold_the_gil"),
}


@pytest.mark.parametrize("what", [pytest.param("gil", marks=pytest.mark.slow), "compute", "load"])
def test_a_blocked_rank_is_named_with_what_it_is_in_and_its_stack(
    tmp_path: Path, what: str
) -> None:
    with job(tmp_path, BLOCKED, "data=2") as running:
        until_known(running, 2)
        block = tmp_path / f"{what}-1"
        block.touch()
        text = until_said(running, "stalled")
        for words in (*WHERE[what], "rank 1 (host", "rank 0 waits for it in "):
            assert words in text
        assert text.splitlines()[0] in running.out  # rank 0 shows it
        block.unlink()
        until_said(running, "stall over")


SLOW = """
import os, time
import torch, manyhands as mh
from torch import nn

def step(model, batch):
    time.sleep((0.004 if os.environ["RANK"] == "1" else 0.001) * len(batch[0]))
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def task():
    x = torch.randn(1024, 4)
    return mh.Task(model=nn.Linear(4, 2), step=step, train=(x, (x.sum(1) > 0).long()), batch=16,
                   epochs=10**9, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
"""


@pytest.mark.slow
def test_a_rank_that_is_slow_gets_fewer_samples(tmp_path: Path) -> None:
    with job(tmp_path, SLOW, "data=3", "straggler=rebalance") as running:
        running.until(lambda: len(events(tmp_path, "rebalance")) > 0, "shares by speed")
        shares = events(tmp_path, "rebalance")[0].value
        assert isinstance(shares, dict) and sum(shares.values()) == 3 * 16
        assert shares["1"] <= 10 < 16 < min(shares["0"], shares["2"])
        before = _rounds(tmp_path)
        running.until(lambda: _rounds(tmp_path) > before + 10, "rounds with these shares")
