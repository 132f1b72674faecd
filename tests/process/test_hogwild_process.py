"""Hogwild! on real processes: every sample counts once, whatever happens to the run on its way.

The model counts its samples (`support.counted_rows`). Cases of three ranks run in one job.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.core import Position, Snapshot
from manyhands.entry import work
from manyhands.errors import PlanError, TaskError
from manyhands.launch.environment import process_info
from manyhands.recover.checkpoint import Checkpoints
from support.commands import CLI, STOPPED_S, Command, command, run, wait_until_gone
from support.counted_rows import BATCH, ROWS, SAMPLES, count
from support.pooled import start

SIZE = 3
STEPS = -(-SAMPLES // (BATCH * SIZE))  # in the last one is one sample: two of its parts have none
TESTS = str(Path(__file__).resolve().parents[1])

G = torch.Generator().manual_seed(0)
X = torch.randn(96, 6, generator=G)
Y = (X @ torch.randn(6, 3, generator=G)).argmax(1)


class Replicas(mh.Callback):
    """Writes what each rank holds at the end: its parameters and its optimizer's moments."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_end(self, run: Any) -> None:
        replica = run.trainer.replica
        held = {f"param/{k}": v for k, v in replica.params.items()}
        if not replica.updates_slice:  # else each rank has the state of other elements
            held |= replica.moments
            states = enumerate(replica.optimizer.state.values())
            held |= {f"step/{i}": state["step"] for i, state in states}
        torch.save({k: v.clone() for k, v in held.items()}, self.folder / f"held-{run.rank}")


def classify(make: Any, folder: Path) -> mh.Task:
    return mh.Task(
        model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        loss=nn.functional.cross_entropy,
        train=(X, Y),
        test=(X, Y),
        metrics={"accuracy": mh.accuracy},
        batch=BATCH,
        optimizer=make,
        callbacks=[Replicas(folder)],
    )


def adagrad(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(p, lr=0.1)


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=0.01)


# name: whether gradients are sparse, and the plans that run one after the other
COUNTED: dict[str, tuple[bool, list[str]]] = {
    "whole": (True, ["merge=hogwild epochs=2"]),
    "in halves": (True, ["merge=hogwild steps=7", "merge=hogwild epochs=2"]),
    "saved on the way": (True, ["merge=hogwild epochs=2 save=5 accumulate=2"]),
    "micro": (True, ["merge=hogwild epochs=2 micro=3"]),
    "under another strategy": (
        False,
        ["merge=hogwild steps=7", "merge=all_reduce steps=14", "merge=hogwild epochs=2"],
    ),
    "hogwild, then all_reduce": (False, ["merge=hogwild then=all_reduce at=step:7 epochs=2"]),
    "all_reduce, then hogwild": (False, ["then=hogwild at=step:7 epochs=2"]),
    "changed in an epoch": (False, ["merge=hogwild then=all_reduce at=epoch:0.5 epochs=2"]),
}
LEARNT: dict[str, tuple[Any, list[str]]] = {
    "adagrad": (adagrad, ["merge=hogwild epochs=4"]),
    "adagrad, all_reduce": (adagrad, ["merge=hogwild epochs=2", "epochs=4"]),
    "adam, all_reduce": (adam, ["merge=hogwild epochs=2", "epochs=4"]),
    "adagrad, local_sgd, all_reduce": (
        adagrad,
        ["merge=local_sgd merge.period=4 epochs=2", "epochs=4"],
    ),
    "adam, then all_reduce": (adam, ["merge=hogwild then=all_reduce at=epoch:2 epochs=4"]),
}


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(SAMPLES))


class Served(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.last = mh.Embedding("users", 2), nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.users(ids)).sum()


def momentum(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=1.0, momentum=0.9)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "clip": ("merge=hogwild clip=1.0", {}, "the norm of sparse gradients is not known to torch"),
    "then": ("merge=hogwild then=all_reduce at=step:3", {}, "set sparse=False, or leave then= out"),
    "all_reduce": ("merge=all_reduce", {}, "or merge=hogwild on one host"),
    "momentum": ("merge=hogwild", {"optimizer": momentum}, "every row that ever had a gradient"),
    "stream": ("merge=hogwild", {"train": Stream()}, "the training data is a stream"),
    "servers' rows": ("merge=hogwild", {"model": Served}, "use nn.Embedding(sparse=True)"),
}


# -- on every rank --


def given(words: dict[str, Any], plan: str) -> dict[str, Any]:
    return {**words, **dict(word.split("=") for word in plan.split())}


def in_turn(task: Any, plans: list[str], words: dict[str, Any], own: Options) -> Any:
    for number, plan in enumerate(plans):
        result = work(task, given(words, plan), dataclasses.replace(own, resume=number > 0))
    return result


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (sparse, plans) in COUNTED.items():
        own = dataclasses.replace(options, directory=f"{folder}/{name}")
        in_turn(functools.partial(count, sparse), plans, words, own)
    for name, (make, plans) in LEARNT.items():
        own = dataclasses.replace(options, directory=f"{folder}/{name}")
        found[name] = in_turn(
            functools.partial(classify, make, Path(folder, name)), plans, words, own
        )["metrics"]
    for name, (plan, task, _) in REFUSED.items():
        own = dataclasses.replace(options, directory=f"{folder}/refused {name}")
        try:
            work(functools.partial(count, **task), given(words, plan), own)
        except (PlanError, TaskError) as e:
            found[f"refused {name}"] = str(e)
    if process_info().rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    return {}


# -- what they found --


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hogwild")
    start(functools.partial(every, str(folder)), f"data={SIZE} timeout_s=60", Options(quiet=True))
    return folder


def last(run: Path) -> Snapshot:
    found = Checkpoints(run / "checkpoints").latest()
    assert found is not None
    return found


def assert_each_came(run: Path, times: int) -> None:
    saved = last(run)
    for name in ROWS:
        assert saved.params[name].unique().tolist() == [times], name
    assert bool((saved.params["unused"] == 1).all()), "it lies beside the rows in memory"


@pytest.mark.parametrize("name", COUNTED)
def test_every_sample_counts_once_an_epoch_and_no_update_of_its_rows_is_lost(
    ran: Path, name: str
) -> None:
    assert_each_came(ran / name, 2)
    steps = 2 * -(-SAMPLES // (BATCH * SIZE * 2)) if name == "saved on the way" else 2 * STEPS
    saved = last(ran / name)
    assert saved.position == Position(2, 0, steps)
    assert saved.meta["schedule"]["last_epoch"] == steps, "schedules count steps of the run"


def test_a_run_ends_after_the_steps_that_were_asked_for_with_all_their_samples(ran: Path) -> None:
    """Halfway, of which the next run went on."""
    seven = Checkpoints(ran / "in halves" / "checkpoints").all()[0]
    assert seven.is_dir()
    events = (ran / "in halves" / "events" / "rank-0.jsonl").read_text()
    assert f"epoch 0, {7 * BATCH * SIZE} samples into it" in events


@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "whole"), (1, "hogwild, then all_reduce"), (2, "micro")]
)
def test_it_goes_on_alone_and_on_two_ranks_from_what_three_have_saved(
    ran: Path, tmp_path: Path, ranks: int, name: str
) -> None:
    shutil.copytree(ran / name, tmp_path / "run")
    task = functools.partial(count, COUNTED[name][0])
    plan = f"data={ranks} merge=hogwild epochs=3 timeout_s=60"
    mh.train(task, plan, directory=tmp_path / "run", resume=True, quiet=True)
    assert_each_came(tmp_path / "run", 3)


@pytest.mark.parametrize("name", LEARNT)
def test_it_learns_and_replicas_that_agree_go_on_alike(ran: Path, name: str) -> None:
    metrics = json.loads((ran / "found.json").read_text())[name]
    assert metrics["loss"] < 1.0, "three classes guessed cost 1.1"
    first, *others = (torch.load(ran / name / f"held-{rank}") for rank in range(SIZE))
    agree = name != "adagrad"  # under hogwild optimizer state is each rank's own
    for other in others:
        assert first.keys() == other.keys()
        for key, value in first.items():
            if agree or key.startswith("param/"):
                assert torch.equal(value, other[key]), key
    if not agree:
        assert any(not torch.equal(value, others[0][key]) for key, value in first.items())
        assert {k.split("/")[1] for k in last(ran / name).ranks} == {"optimizer"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_it_refuses(ran: Path, name: str) -> None:
    said = json.loads((ran / "found.json").read_text()).get(f"refused {name}", "it ran")
    assert REFUSED[name][2] in said


# -- a run that is stopped, and one whose rank is killed --

LONG = 30_003  # samples: enough to be in the middle of an epoch when told to stop
SCRIPT = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {TESTS!r})
import torch, manyhands as mh
from support.counted_rows import Count, count

class Slow(Count):
    def forward(self, ids):
        time.sleep(0.002)
        if not Path(f"{{os.environ.get('RANK', '0')}}.pid").exists() and self.training:
            self.begun = getattr(self, "begun", 0) + 1
            if self.begun == 20:
                Path(f"{{os.environ.get('RANK', '0')}}.pid").write_text(str(os.getpid()))
        return super().forward(ids)

def task():
    return count(model=Slow({LONG}), train=(torch.arange({LONG}),))
"""


def long_run(folder: Path, words: str) -> list[str]:
    (folder / "counting.py").write_text(SCRIPT)
    return [*CLI, "run", "counting.py", *words.split(), "merge=hogwild", "--dir", "run"]


def at_work(job: Command, ranks: int) -> None:
    job.until(
        lambda: all((job.folder / f"{r}.pid").exists() for r in range(ranks)), "step on every rank"
    )


@pytest.mark.slow
def test_a_run_told_to_stop_ends_between_two_steps_with_each_sample_so_far_counted_once(
    tmp_path: Path,
) -> None:
    with command(tmp_path, long_run(tmp_path, "data=2 epochs=1")) as job:
        at_work(job, 2)
        job.process.send_signal(signal.SIGINT)
        job.end()
    assert job.process.returncode == 128 + signal.SIGINT, job.err
    saved = last(tmp_path / "run")
    at = saved.position
    assert at.steps > 0 and at.offset == at.steps * BATCH * 2 < LONG
    for name in ROWS:
        assert float(saved.params[name].reshape(LONG, -1)[:, 0].sum()) == at.offset
        assert saved.params[name].unique().tolist() == [0, 1]


def test_a_rank_that_is_killed_ends_the_run_and_holds_nobody_up(tmp_path: Path) -> None:
    """Also one that has the lock of the step counter."""
    with command(tmp_path, long_run(tmp_path, "data=3 epochs=9 save=20")) as job:
        at_work(job, 3)
        job.until(lambda: any((tmp_path / "run/checkpoints").glob("step-*/*")), "save")
        pids = job.pids(3)
        os.kill(pids[1], signal.SIGKILL)
        wait_until_gone(pids, STOPPED_S)
        job.end()
    assert job.process.returncode == 128 + signal.SIGKILL, job.err
    assert "rank 1" in job.err and "was killed by SIGKILL" in job.err
    saved = last(tmp_path / "run")
    assert float(saved.params["vector"].sum()) == saved.position.offset > 0


# -- a loop of one's own --

OWN = f"""
import sys
sys.path.insert(0, {TESTS!r})
import torch, manyhands as mh
from support.counted_rows import BATCH, SAMPLES, Count

run = mh.join()
model = Count()
data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer, data = run.prepare(model, optimizer, data, batch=BATCH)
for epoch in range(2):
    for (ids,) in data:
        run.step(-model(ids), reduction="sum")
    with run.merged():  # no rank goes on before all have looked
        print("SEEN", run.rank, model.vector.unique().tolist(), flush=True)
try:
    run.sum(1.0)
except mh.TaskError as e:
    print("SUM", e, flush=True)
"""


def test_an_own_loop_gets_each_sample_once_and_evaluates_a_model_that_stands_still(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    line = [*CLI, "run", "own.py", "data=2", "merge=hogwild", "--dir", "run"]
    job = run(tmp_path, line)
    assert job.process.returncode == 0, job.err
    for rank in range(2):
        for epoch in range(2):
            assert f"SEEN {rank} [{epoch + 1}.0]" in job.out + job.err
    assert "under merge=hogwild each goes on at its own pace" in job.out
    assert_each_came(tmp_path / "run", 2)
