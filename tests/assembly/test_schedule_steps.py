"""Schedules: what they are told, when they are stepped, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

import manyhands as mh
from manyhands.recover.checkpoint import Checkpoints
from support.small_task import small_data, small_task

X, Y = small_data(70)  # 16 a batch: five steps an epoch, the last with 6 samples


class Rates(mh.Callback):
    def __init__(self) -> None:
        self.after: list[float] = []  # each round

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self.after.append(run.trainer.replica.lr)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 70

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], Y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(Rows()[i] for i in range(70))


def train(folder: Path, words: str = "", resume: bool = False, **given: Any) -> mh.Result:
    given = {"train": (X, Y), **given}
    return mh.train(
        lambda: small_task(**given), words, directory=folder, resume=resume, quiet=True, argv=False
    )


def told(folder: Path, words: str, resume: bool = False, **given: Any) -> int:
    seen: list[int] = []

    def schedule(optimizer: Any, total_steps: int) -> lr.LRScheduler:
        seen.append(total_steps)
        return lr.OneCycleLR(optimizer, 0.1, total_steps=total_steps)

    train(folder, words, resume, schedule=schedule, **given)
    saved = Checkpoints(folder / "checkpoints").latest()
    assert saved is not None and (resume or saved.position.steps == seen[-1])
    return seen[-1]


class Nines(BatchSampler):
    """Batches of nine: eight an epoch, the last with seven samples."""


LOADED: dict[str, Any] = {
    "drop_last": DataLoader(Rows(), 16, drop_last=True, shuffle=True),
    "sampler": DataLoader(Rows(), 16, sampler=RandomSampler(Rows(), num_samples=40)),
    "batch sampler": DataLoader(
        Rows(), batch_sampler=Nines(RandomSampler(Rows()), 9, drop_last=False)
    ),
}


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("epochs=1", 5),
        ("epochs=3", 15),
        ("epochs=0.5", 3),
        ("epochs=2.5", 13),
        ("steps=7", 7),
        ("epochs=3 accumulate=2", 9),
        ("epochs=2 batch=100", 2),
        ("epochs=2 merge=local_sgd merge.period=3", 10),
        ("epochs=2 merge=hogwild", 10),
    ],
)
def test_a_schedule_is_told_the_optimizer_steps_of_the_run(
    tmp_path: Path, words: str, steps: int
) -> None:
    assert told(tmp_path / "run", words) == steps


@pytest.mark.parametrize(
    ("kind", "steps"), [("drop_last", 8), ("sampler", 6), ("batch sampler", 16)]
)
def test_a_loaders_own_batches_are_counted(tmp_path: Path, kind: str, steps: int) -> None:
    assert told(tmp_path / "run", "epochs=2", train=LOADED[kind]) == steps


def test_a_resumed_run_is_told_the_same_total_and_ends_with_the_same_rate(tmp_path: Path) -> None:
    rates = Rates()

    def schedule(optimizer: Any, total_steps: int) -> lr.LRScheduler:
        return lr.OneCycleLR(optimizer, 0.1, total_steps=total_steps)

    class Ends(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            if round == 7:
                run.stop()

    task: dict[str, Any] = {"schedule": schedule}
    train(tmp_path / "whole", "epochs=3", callbacks=[rates], **task)
    whole, rates.after = rates.after, []
    train(tmp_path / "halves", "epochs=3", callbacks=[Ends(), rates], **task)
    train(tmp_path / "halves", "epochs=3", resume=True, callbacks=[rates], **task)
    assert rates.after == whole and len(whole) == 15
    longer = told(tmp_path / "halves", "epochs=4", resume=True)
    assert longer == 15, "the schedule goes on as it was made, and does not raise at its end"


def test_a_stream_has_no_number_of_steps_unless_it_is_given(tmp_path: Path) -> None:
    with pytest.raises(mh.TaskError, match="a stream without length does not tell; limit the run"):
        told(tmp_path / "a", "epochs=1", train=Stream())
    assert told(tmp_path / "b", "steps=4", train=Stream()) == 4


def test_what_a_function_takes_decides_what_it_is_given(tmp_path: Path) -> None:
    def optional(optimizer: Any, warmup: int = 3) -> lr.LRScheduler:
        assert warmup == 3
        return lr.ConstantLR(optimizer)

    def named(optimizer: Any, *, total_steps: int) -> lr.LRScheduler:
        assert total_steps == 2
        return lr.ConstantLR(optimizer)

    for i, schedule in enumerate((optional, named, lr.ConstantLR)):
        train(tmp_path / str(i), "steps=2", schedule=schedule)
    for schedule, says in (
        (lr.OneCycleLR, "schedule is the class OneCycleLR, which needs max_lr; give a function"),
        (lambda o, n, k: lr.ConstantLR(o), "schedule takes o, n, k, but it is called with"),
    ):
        with pytest.raises(mh.TaskError, match=says):
            train(tmp_path / "no", "steps=2", schedule=schedule)


def test_a_schedule_by_epoch_is_stepped_where_an_epoch_ends_also_after_a_resume(
    tmp_path: Path,
) -> None:
    rates = Rates()
    task: dict[str, Any] = {
        "schedule": lambda o: lr.StepLR(o, 1, 0.5),
        "schedule_by": "epoch",
        "callbacks": [rates],
    }
    train(tmp_path / "run", "steps=7", **task)
    train(tmp_path / "run", "steps=15", resume=True, **task)
    assert rates.after == pytest.approx([0.1] * 4 + [0.05] * 5 + [0.025] * 5 + [0.0125])


def plateau(optimizer: Any) -> lr.LRScheduler:
    return lr.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


def test_a_plateau_lowers_the_rate_by_the_evaluated_loss_also_after_a_resume(
    tmp_path: Path,
) -> None:
    rates = Rates()
    task: dict[str, Any] = {"schedule": plateau, "callbacks": [rates], "test": (X, Y)}
    train(tmp_path / "whole", "epochs=4", **task)
    whole, rates.after = rates.after, []
    assert whole == pytest.approx([0.1] * 10 + [0.01] * 5 + [0.001] * 5)
    train(tmp_path / "halves", "epochs=2", **task)
    train(tmp_path / "halves", "epochs=4", resume=True, **task)
    assert rates.after == whole


def test_a_plateau_may_follow_another_metric(tmp_path: Path) -> None:
    rates = Rates()
    train(
        tmp_path / "run",
        "epochs=2",
        schedule=lambda o: lr.ReduceLROnPlateau(o, mode="max", patience=0, threshold=10.0),
        schedule_by="accuracy",
        metrics={"accuracy": mh.accuracy},
        test=(X, Y),
        callbacks=[rates],
    )
    assert rates.after[-1] == 0.1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"schedule": plateau}, "is stepped by the evaluated loss, but the task has no test data"),
        ({"schedule": plateau, "schedule_by": "f1", "test": (X, Y)}, "'f1': no such metric.* loss"),
        ({"schedule": plateau, "schedule_by": "epoch"}, "is stepped by the value of a metric; gi"),
        (
            {"schedule": lr.ConstantLR, "schedule_by": "loss", "test": (X, Y)},
            "but ConstantLR takes none",
        ),
        ({"schedule_by": "epoch"}, "schedule_by='epoch' has no effect without schedule="),
    ],
)
def test_what_cannot_step_a_schedule_is_refused_at_the_start(
    tmp_path: Path, given: Any, says: str
) -> None:
    with pytest.raises(mh.TaskError, match=says):
        train(tmp_path / "run", **given)
    assert not list(tmp_path.rglob("step-*"))


def test_a_plateau_in_a_loop_of_ones_own_is_stepped_by_the_loop(tmp_path: Path) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = mh.join("device=cpu", directory=tmp_path / "run", quiet=True, argv=False)
    with pytest.raises(mh.TaskError, match=r"step it after each evaluation, with a value that is"):
        run.prepare(model, optimizer, (X, Y), schedule=plateau(optimizer))
    run._abandon()
    run.close()
