"""Break the ranks of an elastic run, again and again, and prove that nothing is lost.

    python tests/support/break_ranks.py data=4 elastic=1:4 merge=local_sgd --kills 20
    python tests/support/break_ranks.py data=3 elastic=1:4 --minutes 30 --faults kill,stop,slow,join

A real run of a small MLP in real processes. Each fault comes when the ranks are complete again
after the one before. Printed, as one line of JSON: seconds from a kill to the next finished round
and until the ranks were complete again (median, largest), how often each sample was computed, and
what was left behind. The exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from manyhands import membership
from manyhands.cli.chaos.rank_history import count_intervals, present_ranks, read_history, trace
from manyhands.exchange import segments
from manyhands.membership.rank_epochs import RankEpoch, decode

WAIT_S = 60.0  # for the ranks to be complete
SAMPLES = 1920
TASK = f"""
import time
from pathlib import Path
import torch, manyhands as mh
from torch import nn

def slow_loss(out, y):
    time.sleep(0.003)
    return nn.functional.cross_entropy(out, y)

def enough(out, y):
    return torch.full((len(out),), float(Path("enough").exists()))

def task():
    g = torch.Generator().manual_seed(0)
    x = torch.randn({SAMPLES}, 32, generator=g)
    y = (x @ torch.randn(32, 4, generator=g)).argmax(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                          nn.Linear(64, 4))
    return mh.Task(model=model, loss=slow_loss, train=(x, y), test=(x, y), batch=8, epochs=10**6,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
                   metrics={{"enough": enough}})
"""
CLI = [sys.executable, "-m", "manyhands"]


class Run:
    """One run, and what is done to it."""

    def __init__(self, folder: Path, words: list[str], seed: int):
        self.folder, self.directory = folder, folder / "run"
        self.chance = random.Random(seed)
        (folder / "task.py").write_text(TASK)
        env = {**os.environ, "MANYHANDS_CHAOS": "{}", "OMP_NUM_THREADS": "1"}
        line = [*CLI, "run", "task.py", *words, "until=enough:1", "device=cpu", "--dir", "run"]
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(line, cwd=folder, stdout=out, stderr=err, env=env)
        self.env = env
        self.kills: list[tuple[float, int, int]] = []  # when, in which epoch, of so many
        self.outside: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()
        self.counts: dict[str, int] = {}

    def epoch(self) -> RankEpoch | None:
        with membership.open(self.directory, "ranks") as keeper:
            text = keeper.load() if self.directory.exists() else None
        return None if text is None else decode(text.decode())

    def until_complete(self, data: int, after: int) -> RankEpoch:
        deadline = time.monotonic() + WAIT_S
        while True:
            found = self.epoch()
            if found is not None and found.number > after and found.data >= data:
                return found
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"not complete again: {found}\n{(self.folder / 'err').read_text()[-3000:]}"
                )
            time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """Rank -> pid, of those that have finished a round of the present epoch."""
        found = {rank: part.pid for rank, part in present_ranks(self.directory).items()}
        self.pids |= set(found.values())
        return {rank: pid for rank, pid in found.items() if segments.alive(pid)}

    def one_fault(self, kind: str, data: int) -> None:
        now = self.epoch()
        assert now is not None
        ranks = self.ranks()
        deadline = time.monotonic() + WAIT_S
        while len(ranks) < len(now.members) and time.monotonic() < deadline:
            time.sleep(0.05)
            ranks = self.ranks()
        if len(ranks) < len(now.members):
            said = (self.folder / "err").read_text()[-3000:]
            raise RuntimeError(f"ranks {sorted(ranks)} of {now} have ended a round:\n{said}")
        pid = self.chance.choice(sorted(ranks.values()))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "kill":
            self.kills.append((time.time(), now.number, len(now.members)))
            os.kill(pid, signal.SIGKILL)
            self.until_complete(data, now.number)
        elif kind == "stop":
            _stopped(pid, self.chance.uniform(0.5, 4.0))
        elif kind == "slow":
            for _ in range(20):
                _stopped(pid, 0.1)
                time.sleep(0.03)
        elif kind == "join":
            self._join(now, data)

    def _join(self, now: RankEpoch, data: int) -> None:
        """A process from outside takes part, and is killed later; then as many as before."""
        with (self.folder / "joined").open("ab") as out:
            joiner = subprocess.Popen(
                [*CLI, "join", "run"], cwd=self.folder, stdout=out, stderr=out, env=self.env
            )
        self.outside.append(joiner)
        self.pids.add(joiner.pid)
        larger = self.until_complete(data + 1, now.number)
        time.sleep(self.chance.uniform(0.5, 2.0))
        joiner.kill()
        joiner.wait()
        self.until_complete(data, larger.number)
        scaled = subprocess.run(
            [*CLI, "scale", "run", f"data={data}"],
            cwd=self.folder,
            env=self.env,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        assert scaled.returncode == 0

    def end(self) -> int:
        (self.folder / "enough").touch()
        return self.process.wait(120.0)


def _stopped(pid: int, seconds: float) -> None:
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
    except ProcessLookupError:
        return
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


def times(run: Run) -> tuple[list[float], list[float]]:
    """Of each kill: seconds to the next finished round, and until the ranks were complete."""
    rounds = [
        (record.time_s, epoch.first.epoch, len(epoch.first.members))
        for epoch in read_history(run.directory)
        for part in epoch.parts
        for record in part.rounds
    ]
    gaps, joined = [], []
    for at, number, size in run.kills:
        later = [(t, n) for t, e, n in rounds if e > number and t > at]
        gaps += [min(t for t, _ in later) - at] if later else []
        whole = [t for t, n in later if n >= size]
        joined += [min(whole) - at] if whole else []
    return gaps, joined


def verdict(run: Run, code: int, left: list[int], shm: list[str]) -> dict[str, Any]:
    history = trace(read_history(run.directory))
    epochs = sorted({e for e, _, _ in history.intervals})
    # a block of local steps may end the run in the middle of its last epoch
    end = max((stop for e, _, stop in history.intervals if e == epochs[-1]), default=0)
    whole = [(e, 0, end if e == epochs[-1] else SAMPLES) for e in epochs]
    counted = count_intervals(whole, history.intervals)
    gaps, joined = times(run)
    return {
        "exit": code,
        "faults": run.counts,
        "gap_s": _spread(gaps),
        "joined_s": _spread(joined),
        "epochs": len(epochs),
        "once": sum(c.once for c in counted),
        "twice": sum(c.twice for c in counted),
        "never": sum(c.never for c in counted),
        "problems": history.problems[:5],
        "processes_left": left,
        "segments_left": shm,
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {
        "n": len(seconds),
        "median": round(statistics.median(seconds), 3),
        "max": round(max(seconds), 3),
    }


def memory_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return round(int(fields[0]) / 1024, 1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="+")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--faults", default="kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", default="0.2,0.8", help="seconds between two faults")
    given = parser.parse_args()
    words = [*given.words]
    if not any(w.startswith("restarts=") for w in words):
        words.append("restarts=100000")
    data = int(next(w for w in words if w.startswith("data=")).removeprefix("data="))
    least, most = map(float, given.pause.split(","))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(Path(folder), words, given.seed)
        ended = threading.Event()
        first = launcher = 0.0
        try:
            run.until_complete(data, 0)
            time.sleep(1.0)
            first = memory_mb(run.process.pid)
            until = time.monotonic() + (given.minutes or 1e9) * 60
            number = 0
            while time.monotonic() < until and (given.minutes or number < given.kills):
                ended.wait(run.chance.uniform(least, most))
                run.one_fault(run.chance.choice(given.faults.split(",")), data)
                number += 1
            launcher = memory_mb(run.process.pid)
            code = run.end()
        finally:
            if run.process.poll() is None:
                run.process.kill()
            for joiner in run.outside:
                joiner.kill()
                joiner.wait()
        time.sleep(1.0)
        left = [p for p in run.pids if segments.alive(p)]
        shm = [p.name for p in segments.directory().glob(f"{segments.PREFIX}*")]
        found = verdict(run, code, left, [n for n in shm if _of(n, run.pids)])
        found["launcher_mb"] = [first, launcher]
    print(json.dumps({"words": " ".join(given.words), **found}), flush=True)
    wrong = code or found["twice"] or found["never"] or found["problems"] or left
    return 1 if wrong or found["segments_left"] else 0


def _of(name: str, pids: set[int]) -> bool:
    return name.removeprefix(segments.PREFIX).split("-")[0] in map(str, pids)


if __name__ == "__main__":
    sys.exit(main())
