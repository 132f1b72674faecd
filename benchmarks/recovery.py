"""Recovery: what kill -9 of a random rank costs four ranks that train LeNet on Fashion-MNIST.

Batch 64 a rank, one thread each, real processes. Every process writes a line at the end of each
step it finished and took part in; from these lines alone, for all sides alike, come

    gap       seconds from the kill to the end of the first step that the others finished without
              the dead rank
    joined    seconds from the kill until as many processes as before have finished a step
    lost      steps that are computed again

Ours is `elastic=1:4` with several merge strategies, links and layouts, each in three modes: without
a replacement (`fixed`, respawn=false), with a new process (`respawn`), and with one that waits
(`spares`, spares=1). Every claim is the gap, or with `joined_` in front that; the peer is torchft,
or torchrun where torchft is missing. What torchrun took, from step 0 and from a checkpoint of every
epoch, is in the details. torchft is looked for in this Python, or in that which
MANYHANDS_TORCHFT_PYTHON names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from common import Claim, alternate, median

from manyhands import datasets

PEERS = Path(__file__).parent / "peers"
RANKS = 4
PATIENCE_S = 90.0  # for a start, or for a recovery
PAUSE_S = (0.5, 1.5)  # of undisturbed training before a kill
STEPS_LOOKED_AT = 3  # of each survivor, after the kill
RESTARTS = 3  # and kills of a run, at most

LAYOUTS = {
    **{
        f"{merge}{suffix}": f"data=4 merge={merge} link={link}"
        for merge in ("all_reduce", "local_sgd", "diloco", "d_psgd", "robust")
        for suffix, link in (("", "shared"), ("_gloo", "gloo"))
    },
    "tensor": "data=2 tensor=2",
    "shard": "data=2 shard=2",
}
MODES = {
    "fixed": "respawn=false",
    "respawn": f"restarts={RESTARTS}",
    "spares": f"spares=1 restarts={RESTARTS}",
}
GET_TORCHFT = (
    "this Python has no torchft; make an environment with it and this torch (pip install --no-deps "
    "torchft-nightly, then what it asks for besides torch), and name its Python in "
    "MANYHANDS_TORCHFT_PYTHON"
)


# -- from lines to seconds --


class Step(NamedTuple):
    time_s: float
    step: int
    rank: int
    pid: int


class Kill(NamedTuple):
    time_s: float
    pid: int


@dataclass(frozen=True)
class Recovery:
    gap_s: float
    joined_s: float | None  # None: not (yet)
    lost: int


def recovery(steps: list[Step], kill: Kill, ranks: int, end_s: float) -> Recovery | None:
    """What a kill cost, or None as long as too few steps came after it. `steps` are of all
    processes, in order of time; `end_s` is when the next kill was.

    The step under way at the kill may end as if nothing had happened, where the dead rank had sent
    all its messages, and a rank that is no neighbour of the dead one may be a step ahead. So the
    gap is not up to the first line after the kill: it ends with the longest pause around it.
    """
    others = [s for s in steps if s.pid != kill.pid and s.time_s < end_s]
    after = next((i for i, s in enumerate(others) if s.time_s >= kill.time_s), len(others))
    looked_at = others[max(0, after - 1) : after + STEPS_LOOKED_AT * (ranks - 1)]
    if len(looked_at) < STEPS_LOOKED_AT * (ranks - 1):
        return None
    pauses = [b.time_s - a.time_s for a, b in pairwise(looked_at)]
    longest = pauses.index(max(pauses))
    first = looked_at[longest + 1]
    last = max(s.step for s in others if s.time_s < first.time_s)
    seen: set[int] = set()
    joined = None
    for step in others:
        if step.time_s >= first.time_s:
            seen.add(step.pid)
            if len(seen) == ranks:
                joined = step.time_s - kill.time_s
                break
    return Recovery(first.time_s - kill.time_s, joined, max(0, last + 1 - first.step))


# -- runs --


class StepReader:
    """What the processes of a run have written; reads only what is new."""

    def __init__(self, folder: Path):
        self.folder, self.steps = folder, list[Step]()
        self._read: dict[Path, int] = {}

    def update(self) -> list[Step]:
        """All steps so far, in order of time."""
        for path in self.folder.glob("*.steps"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")  # a line half written is left for later
            self._read[path] = self._read.get(path, 0) + len(whole[0] + whole[1])
            for line in whole[0].split(b"\n") if whole[1] else []:
                at, *numbers = line.split()
                self.steps.append(Step(float(at), *map(int, numbers)))
        self.steps.sort()
        return self.steps


class Trial:
    """One run: ranks are killed one after the other, each after the recovery from the last."""

    def __init__(self, folder: Path, command: list[str], seed: str):
        self.folder, self.chance = folder, random.Random(seed)
        self.reader, self.kills = StepReader(folder), list[Kill]()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def run(self, kills: int, replaced: bool) -> list[Recovery]:
        try:
            self._wait_until(lambda: len({s.pid for s in self.reader.update()}) >= RANKS)
            for _ in range(kills):
                time.sleep(self.chance.uniform(*PAUSE_S))
                self._kill()
                self._wait_until(lambda: self._recovered(replaced))
            return self._found()
        finally:
            self._stop()

    def _kill(self) -> None:
        latest = {s.pid: s.rank for s in self.reader.update()[-STEPS_LOOKED_AT * RANKS :]}
        pid = self.chance.choice(sorted(latest, key=lambda pid: latest[pid]))
        self.kills.append(Kill(time.time(), pid))
        os.kill(pid, signal.SIGKILL)

    def _recovered(self, replaced: bool) -> bool:
        kill = self.kills[-1]
        recent = [s for s in self.reader.update() if s.time_s > kill.time_s - PAUSE_S[0]]
        found = recovery(recent, kill, RANKS, float("inf"))
        return found is not None and (found.joined_s is not None or not replaced)

    def _found(self) -> list[Recovery]:
        steps, ends = self.reader.update(), [k.time_s for k in self.kills[1:]] + [float("inf")]
        found = [recovery(steps, k, RANKS, end) for k, end in zip(self.kills, ends, strict=True)]
        return [each for each in found if each is not None]

    def _wait_until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not there():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > deadline:
                said = (self.folder / "output").read_text(errors="replace").strip().split("\n")
                why = f"no step for {PATIENCE_S:g} s" if ended is None else f"it ended with {ended}"
                raise RuntimeError(f"{why} after {len(self.kills)} kills: {' '.join(said[-3:])}")
            time.sleep(0.05)

    def _stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in {s.pid for s in self.reader.update()} - {k.pid for k in self.kills}:
            # torchrun's workers are not of its process group; a number may be another's by now
            if str(self.folder).encode() in _command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@dataclass
class Side:
    """One way to train, and its command. A run that fails is an answer too: it says why."""

    name: str
    command: list[str]  # the folder is added
    kills: int
    replaced: bool = True
    turns: int = 0

    def run(self, data: Path) -> list[Recovery] | str:
        self.turns += 1
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(data, f"{folder}/data.pt")
            trial = Trial(Path(folder), [*self.command, folder], f"{self.name} {self.turns}")
            try:
                return trial.run(self.kills, self.replaced)
            except RuntimeError as e:
                return str(e)


def ours(layout: str, mode: str, kills: int) -> Side:
    least = 3 if "robust" in layout else 1  # merge.f=1 needs three votes
    most = 4 if "data=4" in LAYOUTS[layout] else 2
    words = f"{LAYOUTS[layout]} elastic={least}:{most} {MODES[mode]}"
    replaced = mode != "fixed"
    command = [
        *(sys.executable, "-m", "manyhands", "run", str(PEERS / "lenet_ours.py")),
        *(*words.split(), "threads=1", "device=cpu", "save=off", "--quiet", "--"),
    ]
    # without replacements only the first kill meets four ranks
    return Side(f"{layout}_{mode}", command, kills if replaced else 1, replaced)


def torchrun(kills: int, *words: str) -> Side:
    command = [
        # without this the ranks of a restart read the gloo addresses of dead ones (torch 2.13)
        *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={RANKS}", f"--max-restarts={RESTARTS}", "--monitor-interval=0.1"),
        str(PEERS / "lenet_torchrun.py"),
        *words,
    ]
    return Side(" ".join(["torchrun", *words]), command, kills)


def torchft(kills: int) -> Side | str:
    """With the Python that has it; or why there is none."""
    named = os.environ.get("MANYHANDS_TORCHFT_PYTHON", sys.executable)
    there = subprocess.run([named, "-c", "import torchft, torch"], capture_output=True, text=True)
    if there.returncode != 0:
        said = there.stderr.strip().rpartition("\n")[2]
        return f"{GET_TORCHFT} ({said})"
    return Side("torchft", [named, str(PEERS / "lenet_torchft.py"), str(RANKS)], kills)


# -- claims --


def measure(quick: bool, only: list[str]) -> list[Claim]:
    kills = 1 if quick else RESTARTS
    chosen = [
        ours(layout, mode, kills)
        for layout in LAYOUTS
        for mode in MODES
        if not only or {layout, f"{layout}_{mode}", f"joined_{layout}_{mode}"} & {*only}
    ]
    peers = [torchrun(kills), torchrun(kills, "epoch")]
    claims = []
    if isinstance(first := torchft(kills), str):
        claims.append(Claim("torchft", skipped=first))
    else:
        peers.insert(0, first)
    found = _alternated([*peers, *chosen], 1 if quick else 3)
    told = {peer.name: _told(found[peer.name]) for peer in peers}
    against = next((kills for p in peers if isinstance(kills := found[p.name], list)), None)
    for side in chosen:
        claims += _claims(side, found[side.name], against, told)
    return claims


def _alternated(sides: list[Side], turns: int) -> dict[str, list[Recovery] | str]:
    """Of each side all its kills, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.pt"
        name, train, _ = datasets.images()
        if name != "Fashion-MNIST":
            print(f"recovery: trains on {name}", file=sys.stderr)
        torch.save(train, data)
        runs = {side.name: functools.partial(side.run, data) for side in sides}
        found = alternate(runs, turns)
    failed = {name: next((r for r in of if isinstance(r, str)), None) for name, of in found.items()}
    return {name: failed[name] or [each for r in of for each in r] for name, of in found.items()}


def _claims(
    side: Side, found: list[Recovery] | str, peer: list[Recovery] | None, told: dict[str, str]
) -> list[Claim]:
    names = [side.name, *([f"joined_{side.name}"] if side.replaced else [])]
    if isinstance(found, str) or peer is None:
        why = f"failed: {found}" if isinstance(found, str) else "every peer failed"
        return [Claim(name, skipped=why, detail=dict(told)) for name in names]
    claims = []
    for name, seconds in zip(names, (_gaps, _joined), strict=False):
        mine, theirs = median(seconds(found)), median(seconds(peer))
        detail = {"plan": " ".join(side.command[5:]), "ours": _told(found), **told}
        claims.append(Claim(name, mine, theirs, "s", theirs / mine, 1.0, detail))
    return claims


def _gaps(found: list[Recovery]) -> list[float]:
    return [r.gap_s for r in found]


def _joined(found: list[Recovery]) -> list[float]:
    return [r.joined_s for r in found if r.joined_s is not None]


def _told(found: list[Recovery] | str) -> str:
    if isinstance(found, str):
        return f"failed: {found}"
    lists = {"gap": _gaps(found), "joined": _joined(found)}
    told = [
        f"{name} {median(each):.2f} s ({' '.join(f'{x:.2f}' for x in each)})"
        for name, each in lists.items()
        if each
    ]
    return ", ".join([*told, f"{median([r.lost for r in found]):g} steps lost"])
