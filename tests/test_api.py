"""Whole runs in this process: what they leave, when they stop, how they resume, refusals."""

from __future__ import annotations

import gc
import json
import math
import pickle
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import manyhands as mh
from manyhands.assembly.checkpointing import Checkpointing
from manyhands.assembly.tables import rows_of_this_process
from manyhands.cli.export import export
from manyhands.plan.words import parse
from manyhands.recover.checkpoint import Checkpoints
from support.compare import same_tensors
from support.small_task import saved_weights, small_task

N = 26  # and batches of 4: seven steps an epoch, the last of two samples
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], Y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, lengths: tuple[int, ...] = (N,)):
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(
            [
                (X[i % N], Y[i % N])
                for i in range(self.lengths[min(self.epoch, len(self.lengths) - 1)])
            ]
        )


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
    )


def make(**changed: Any) -> mh.Task:
    known: dict[str, Any] = dict(
        model=model,
        loss=nn.functional.cross_entropy,
        train=(X, Y),
        test=(X, Y),
        batch=4,
        metrics={"accuracy": mh.accuracy},
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        schedule=lambda o: lr.OneCycleLR(o, 0.02, total_steps=40),
    )
    return mh.Task(**{**known, **changed})


def train(
    tmp_path: Path,
    words: Any = "",
    resume: bool = False,
    callbacks: tuple[mh.Callback, ...] = (),
    **changed: Any,
) -> mh.Result:
    return mh.train(
        lambda: make(**changed),
        words,
        directory=tmp_path / "run",
        resume=resume,
        quiet=True,
        callbacks=callbacks,
    )


def events(result: mh.Result) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for f in sorted(Path(result.directory).glob("events/*.jsonl"))
        for line in f.read_text().splitlines()
    ]


def notices(result: mh.Result) -> list[str]:
    return [e["value"] for e in events(result) if e["name"] in ("notice", "warning")]


def saved(result: mh.Result) -> dict[str, Tensor]:
    snapshot = Checkpoints(Path(result.directory) / "checkpoints").latest()
    assert snapshot is not None
    return snapshot.params


# -- what a run leaves --


def test_a_run_directory_holds_plan_events_checkpoints_and_a_picture(tmp_path: Path) -> None:
    result = train(tmp_path, "epochs=3 best=accuracy keep=2")
    folder = Path(result.directory)
    assert folder == tmp_path / "run" and (result.rounds, result.epochs, result.stopped) == (
        21,
        3.0,
        False,
    )
    assert (
        set(result.metrics) == {"loss", "accuracy", "train_loss"}
        and result.metrics["accuracy"] > 0.6
    )
    assert result.checkpoint == str(folder / "checkpoints" / "step-00000021")
    resolved = parse(str(folder / "plan.toml"))
    assert (resolved.epochs, resolved.batch, resolved.seed, resolved.keep) == (3.0, 4, 0, 2)
    assert (folder / "curves.png").stat().st_size > 1000
    seen = [e["name"] for e in events(result)]
    assert (
        seen.count("round") == 21
        and seen.count("evaluate") == 3
        and seen.count("checkpoint") == 3
        and seen[-1] == "finish"
    )
    snapshot = Checkpoints(folder / "checkpoints").latest()
    assert snapshot is not None and snapshot.position == mh.core.Position(3, 0, 21)


def test_the_reported_metrics_are_those_of_the_saved_model(tmp_path: Path) -> None:
    result = train(tmp_path, "epochs=2")
    net = mh.load(result.directory, model()).eval()
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(net(X), Y)) == pytest.approx(
            result.metrics["loss"], rel=1e-6
        )
        assert float(mh.accuracy(net(X), Y)) == pytest.approx(result.metrics["accuracy"])


def test_load_takes_the_newest_weights_or_the_best(tmp_path: Path) -> None:
    result = train(tmp_path, "epochs=4 best=-loss keep=9")
    scores = {
        p: json.loads((p / "manifest.json").read_text())["metrics"]["loss"]
        for p in (tmp_path / "run/checkpoints").glob("step-*")
    }
    best = min(scores, key=lambda p: scores[p])
    from manyhands.recover.checkpoint import load

    assert same_tensors(dict(mh.load(result.directory, model()).state_dict()), saved(result))
    assert same_tensors(
        dict(mh.load(result.directory, model(), best="-loss").state_dict()), load(best).params
    )
    with pytest.raises(mh.CheckpointError, match=r"no checkpoint of .* knows the metric 'f1'"):
        mh.load(result.directory, model(), best="f1")
    with pytest.raises(mh.CheckpointError, match="holds no checkpoint"):
        mh.load(tmp_path, model())


# -- when it stops and when it saves --


@pytest.mark.parametrize(
    ("words", "changed", "rounds", "epochs"),
    [
        ("epochs=2", {}, 14, 2.0),
        ("epochs=0.5", {}, 4, 16 / 26),
        ("steps=9", {}, 9, 1 + 8 / 26),
        ("", {"steps": 5}, 5, 20 / 26),
        ("", {"epochs": 2}, 14, 2.0),
        ("epochs=1", {"steps": 100}, 7, 1.0),
        ("epochs=2 accumulate=2", {}, 8, 2.0),
        ("epochs=1 batch=100", {}, 1, 1.0),
        ("epochs=2 split=sampled", {}, 14, 2.0),
        ("epochs=2", {"train": Stream()}, 14, 2.0),
        ("epochs=3", {"train": Stream((6, 26, 10))}, 2 + 7 + 3, 3.0),
        ("epochs=1", {"train": DataLoader(Rows(), batch_size=13), "batch": None}, 2, 1.0),
        ("epochs=2 loaders=2", {"train": Rows()}, 14, 2.0),
    ],
    ids=lambda x: str(
        {k: v if isinstance(v, int) else type(v).__name__ for k, v in x.items()}
        if isinstance(x, dict)
        else x
    ),
)
def test_a_run_stops_after_its_epochs_or_steps(
    tmp_path: Path, words: str, changed: dict[str, Any], rounds: int, epochs: float
) -> None:
    result = train(tmp_path, f"{words} save=off", **changed)
    assert (result.rounds, pytest.approx(result.epochs)) == (rounds, epochs)
    assert result.checkpoint is None and not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("words", "rounds"),
    [
        ("epochs=2", [7, 14]),
        ("steps=9", [7, 9]),
        ("epochs=2 save=3", [3, 6, 9, 12, 14]),
        ("epochs=1 save=7", [7]),
        ("epochs=3 batch=26 save=2", [2, 3]),
    ],
)
def test_checkpoints_are_written_when_the_plan_says_and_at_the_end(
    tmp_path: Path, words: str, rounds: list[int]
) -> None:
    train(tmp_path, f"{words} keep=99")
    assert [int(p.name[5:]) for p in Checkpoints(tmp_path / "run" / "checkpoints").all()] == rounds


class Recorded(mh.Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        assert run.rank == 0 and math.isfinite(float(loss))
        self.calls.append(round)

    def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
        self.calls.append(("epoch", epoch, sorted(metrics)))

    def on_checkpoint(self, run: Any, path: str) -> None:
        self.calls.append(("checkpoint", Path(path).name))


class Failed(mh.Callback):
    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_failure(self, run: Any, error: BaseException) -> None:
        self.errors.append(type(error).__name__)


def test_callbacks_are_called_on_round_epoch_and_checkpoint_in_order(tmp_path: Path) -> None:
    ours, theirs = Recorded(), Recorded()
    train(tmp_path, "epochs=1 batch=13", callbacks=(ours,))
    assert ours.calls == [1, 2, ("epoch", 0, ["accuracy", "loss"]), ("checkpoint", "step-00000002")]
    mh.train(
        lambda: make(callbacks=(theirs,)),
        "steps=1 save=off",
        directory=tmp_path / "other",
        quiet=True,
    )
    assert theirs.calls == [1]


# -- going on --

RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "adam, one cycle, dropout, batchnorm": ("", {}),
    "in mid-epoch with accumulation": ("accumulate=2", {}),
    "sgd with multi-step": (
        "",
        {
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "schedule": lambda o: lr.MultiStepLR(o, [3, 6, 9]),
        },
    ),
    "a stream": ("", {"train": Stream((10, 26))}),
    "loader processes": ("loaders=2", {"train": Rows(), "test": Rows()}),
    "with replacement": ("split=sampled", {}),
    "fp16 with its scale": ("precision=fp16", {}),
    "bf16 and clip": ("precision=bf16 clip=0.1", {}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_ten_steps_are_five_steps_and_five_more_after_a_resume_exactly(
    tmp_path: Path, case: str
) -> None:
    words, changed = RESUMED[case]
    whole = train(tmp_path / "whole", f"steps=10 {words}", **changed)
    train(tmp_path / "halves", f"steps=5 {words}", **changed)
    torch.manual_seed(12345)  # what happens between the two must not matter
    halves = train(tmp_path / "halves", f"steps=10 {words}", resume=True, **changed)
    assert halves.rounds == 10 and any(
        text.startswith("resumed at round 5 ") for text in notices(halves)
    )
    assert same_tensors(saved(whole), saved(halves))
    a, b = (Checkpoints(tmp_path / k / "run" / "checkpoints").latest() for k in ("whole", "halves"))
    assert (
        a is not None
        and b is not None
        and a.position == b.position
        and same_tensors(a.optimizer, b.optimizer)
        and same_tensors(a.rng, b.rng)
    )
    assert a.meta["schedule"] == b.meta["schedule"] and a.meta["scaler"] == b.meta["scaler"]


def test_resuming_a_finished_run_changes_nothing_and_writes_nothing(tmp_path: Path) -> None:
    result = train(tmp_path, "epochs=1")
    assert result.checkpoint is not None
    before = (Path(result.checkpoint) / "manifest.json").stat()
    again = train(tmp_path, "epochs=1", resume=True)
    after = (Path(result.checkpoint) / "manifest.json").stat()
    assert again.rounds == 7 and (before.st_ino, before.st_mtime_ns) == (
        after.st_ino,
        after.st_mtime_ns,
    )


def test_a_damaged_checkpoint_is_passed_over_with_a_notice(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "epochs=3")
    result = train(tmp_path / "hurt", "epochs=2")
    tensors = Path(str(result.checkpoint)) / "tensors.safetensors"
    raw = bytearray(tensors.read_bytes())
    raw[len(raw) // 2] ^= 4
    tensors.write_bytes(raw)
    again = train(tmp_path / "hurt", "epochs=3", resume=True)
    said = notices(again)
    assert any("step-00000014 is damaged" in t and "using the one before it" in t for t in said)
    assert any(t.startswith("resumed at round 7") for t in said)
    assert same_tensors(saved(again), saved(whole))


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    train(tmp_path, "epochs=1")
    with pytest.raises(
        mh.CheckpointError,
        match=r"(?s)of another model:.*other shape: 0\.weight: model \(8, 6\), checkpoint \(16, "
        r"6\)",
    ):
        train(
            tmp_path,
            "epochs=2",
            resume=True,
            model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)),
        )


def adam(**given: Any) -> dict[str, Any]:
    return {"optimizer": lambda p: torch.optim.Adam(p, **{"lr": 0.01, **given}), "schedule": None}


def by_step(size: int, gamma: float = 0.5) -> dict[str, Any]:
    return adam() | {"schedule": lambda o: lr.StepLR(o, size, gamma)}


def warm_up(factor: float) -> Any:
    return lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, factor), lr.MultiStepLR(o, [3, 6])], milestones=[2]
    )


# what the run and the run that resumes it give; what the second one says
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "lr and weight decay": (
        adam(),
        adam(lr=0.5, weight_decay=0.25),
        "resumed with the checkpoint's lr 0.01, weight_decay 0, not the task's lr 0.5, "
        "weight_decay 0.25; start anew to change them",
    ),
    "betas": (
        adam(),
        adam(betas=(0.5, 0.999)),
        "resumed with the checkpoint's betas [0.9, 0.999], not the task's betas [0.5, 0.999]; "
        "start anew to change them",
    ),
    "lr under a schedule that has lowered it": (
        by_step(2),
        by_step(2) | {"optimizer": adam(lr=0.0025)["optimizer"]},
        "resumed with the checkpoint's lr 0.01, not the task's lr 0.0025; start anew to change "
        "them",
    ),
    "options of the schedule": (
        by_step(2),
        by_step(9, 0.1),
        "resumed with the checkpoint's StepLR step_size 2, StepLR gamma 0.5, not the task's "
        "StepLR step_size 9, StepLR gamma 0.1; start anew to change them",
    ),
    "options of a schedule in a schedule": (
        adam() | {"schedule": warm_up(0.1)},
        adam() | {"schedule": warm_up(0.2)},
        "resumed with the checkpoint's SequentialLR schedulers.0.start_factor 0.1, not the task's "
        "SequentialLR schedulers.0.start_factor 0.2; start anew to change them",
    ),
    "schedule added": (
        adam(),
        by_step(2),
        "the checkpoint has no schedule: the task's StepLR begins here, at lr 0.01",
    ),
    "schedule removed": (
        by_step(2),
        adam(),
        "the task has no schedule any more (StepLR before): lr stays at 0.00125",
    ),
    "another schedule": (
        by_step(2),
        adam() | {"schedule": lambda o: lr.ExponentialLR(o, 0.9)},
        "the schedule is ExponentialLR, StepLR before: it goes on from the step where that was",
    ),
    "other data": (
        adam(),
        adam() | {"train": (X[:20], Y[:20])},
        "the training data has 20 samples, 26 samples before",
    ),
}


def warnings(result: mh.Result) -> list[str]:
    return [e["value"] for e in events(result) if e["name"] == "warning"]


@pytest.mark.parametrize("case", CHANGED)
def test_what_a_resumed_run_does_not_take_from_its_task_is_said_in_one_warning(
    tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, said = CHANGED[case]
    train(tmp_path, "epochs=1", **first)
    assert warnings(train(tmp_path, "epochs=1", resume=True, **first)) == []
    result = train(tmp_path, "epochs=2", resume=True, **second)
    assert warnings(result) == [said]
    assert f"manyhands: {said}\n" in capfd.readouterr().err, "also where --quiet hides the rest"


def test_a_second_resume_says_again_what_still_does_not_hold(tmp_path: Path) -> None:
    train(tmp_path, "epochs=1", **adam())
    for epochs in (2, 3):
        said = warnings(train(tmp_path, f"epochs={epochs}", resume=True, **adam(lr=0.5)))
        assert len(said) == epochs - 1 and "lr 0.01, not the task's lr 0.5" in said[-1]


@pytest.mark.parametrize("schedule", [None, lambda o: lr.CosineAnnealingLR(o, 40)])
def test_an_older_checkpoint_without_given_values_is_compared_as_far_as_it_goes(
    tmp_path: Path, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Checkpointing._meta

    def without(self: Checkpointing, *parts: Any) -> dict[str, Any]:
        meta = keep(self, *parts)
        del meta["given"]
        return meta

    monkeypatch.setattr(Checkpointing, "_meta", without)
    train(tmp_path, "epochs=1", **adam() | {"schedule": schedule})
    again = train(tmp_path, "epochs=2", resume=True, **adam() | {"schedule": schedule})
    assert warnings(again) == []
    other = adam(weight_decay=0.25) | {"schedule": schedule}
    (said,) = warnings(train(tmp_path, "epochs=3", resume=True, **other))
    assert "the checkpoint's weight_decay 0, not the task's weight_decay 0.25" in said
    sgd = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.01), "schedule": schedule}
    train(tmp_path, "epochs=3", resume=True, **sgd)  # of which class it was, it does not say


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "epochs=1", **adam())
    with pytest.raises(
        mh.CheckpointError,
        match=r"the checkpoint's optimizer is Adam, the task's is SGD, .*; resume with Adam, or "
        r"start anew",
    ):
        train(tmp_path, "epochs=2", resume=True, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def test_a_schedule_that_cannot_take_the_checkpoints_state_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "epochs=1", **by_step(2))
    with pytest.raises(
        mh.CheckpointError,
        match=r"the task's schedule SequentialLR cannot go on from the checkpoint's .*; resume with"
        r" the schedule it was saved from, or start anew",
    ):
        train(tmp_path, "epochs=2", resume=True, **adam() | {"schedule": warm_up(0.1)})


def test_resume_without_a_checkpoint_starts_from_the_beginning_and_says_so(tmp_path: Path) -> None:
    train(tmp_path, "epochs=1 save=off")
    result = train(tmp_path, "epochs=1", resume=True)
    assert result.rounds == 7 and any(t.startswith("nothing to resume in") for t in notices(result))


# -- what it refuses, and what it says --


def test_a_loss_that_becomes_nan_names_rank_round_and_last_good_checkpoint(tmp_path: Path) -> None:
    def step(net: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        step.calls += 1  # type: ignore[attr-defined]
        return loss * (math.nan if step.calls == 12 else 1.0)  # type: ignore[attr-defined]

    step.calls = 0  # type: ignore[attr-defined]
    failed = Failed()
    with pytest.raises(
        mh.Diverged,
        match=r"the loss of rank 0 became NaN or infinite at round 12 .*the last good checkpoint "
        r"is .*step-00000010; lower",
    ):
        train(
            tmp_path,
            "epochs=3 save=5",
            step=step,
            loss=None,
            metrics={},
            test=None,
            callbacks=(failed,),
        )
    assert failed.errors == ["Diverged"]
    good = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert (
        good is not None
        and good.round == 10
        and all(v.isfinite().all() for v in good.params.values())
    )


def test_a_loss_that_is_nan_at_once_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(mh.Diverged, match=r"at round 1 .*there is no checkpoint yet"):
        train(tmp_path, loss=lambda o, t: o.sum() * math.inf)


@pytest.mark.parametrize(
    ("words", "changed", "says"),
    [
        ("", {"train": (X[:0], Y[:0])}, "Task.train is empty"),
        ("", {"test": []}, "Task.test is empty"),
        ("best=f1", {}, "best=f1: no such metric; the task has loss, accuracy"),
        ("best=-loss", {"test": None}, "best=-loss: no such metric; the task has no test data"),
        (
            "loaders=2",
            {},
            "loaders=2 has no effect: the training data is in memory already or a stream",
        ),
        (
            "split=sampled",
            {"train": Stream()},
            "split=sampled draws samples by index, but the training data is a stream",
        ),
        (
            "",
            {"optimizer": torch.optim.LBFGS},
            "torch.optim.LBFGS evaluates the loss several times a step",
        ),
        ("device=cuda", {}, "device=cuda, but torch sees no GPU here"),
        ("ranks_per_gpu=2", {}, "ranks_per_gpu=2, but torch sees no GPU here"),
        (
            "",
            {"loss": lambda o, t: nn.functional.cross_entropy(o, t, reduction="none")},
            r"the loss has shape \(4,\)",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_do(
    tmp_path: Path, words: str, changed: dict[str, Any], says: str
) -> None:
    if "device=cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises((mh.TaskError, mh.PlanError), match=says):
        train(tmp_path, words, **changed)


def test_a_directory_with_an_earlier_run_or_a_live_one_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "steps=1")
    with pytest.raises(mh.RunBusy, match="holds an earlier run"):
        train(tmp_path, "steps=1")

    class Second(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            with pytest.raises(mh.RunBusy, match="is in use by a live run"):
                train(tmp_path, "steps=9", resume=True)

    train(tmp_path, "steps=2", resume=True, callbacks=(Second(),))


@pytest.mark.parametrize("words", ["", "merge=local_sgd merge.period=4"])
def test_the_time_left_is_that_of_steps_however_many_a_round_has(
    tmp_path: Path, words: str
) -> None:
    left: list[float] = []

    class Asks(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            at, pace = run.trainer.position, run.trainer.pace
            if at.steps == 8:
                left.append(pace.eta_s(pace.started + 10.0, at))

    train(tmp_path, f"steps=16 {words}", callbacks=(Asks(),))
    assert left == [pytest.approx(10.0)], "8 of 16 steps took 10 s"


def test_unused_parameters_are_named_in_one_notice(tmp_path: Path) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    result = train(tmp_path, "steps=3", model=Spare)
    said = [t for t in notices(result) if "without a gradient" in t]
    assert said == [
        "parameters without a gradient in the first round (left as they are): spare.weight, "
        "spare.bias"
    ]


def test_a_script_that_defines_no_task_or_cannot_be_read_is_told_apart(tmp_path: Path) -> None:
    from manyhands.entry import defines_task

    for text, expected in (
        ("def task(): ...", True),
        ("task = 3", True),
        ("from elsewhere import make as task", True),
        ("def other(): ...", False),
        ("if True:\n    def task(): ...", False),
        ("task: int = 3", True),
        ("async def task(): ...", False),
    ):
        (tmp_path / "s.py").write_text(text)
        assert defines_task(tmp_path / "s.py") is expected, text
    (tmp_path / "s.py").write_text("def task(:\n")
    with pytest.raises(mh.TaskError, match=r"s\.py, line 1"):
        defines_task(tmp_path / "s.py")
    with pytest.raises(mh.TaskError, match=r"none\.py cannot be read"):
        defines_task(tmp_path / "none.py")


# -- rows of embeddings --


class Rated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = mh.Embedding("loaded", 4, optimizer="sgd", lr=0.5, scale=0.5)
        self.last = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.rows(ids)).squeeze(-1)
        return out


def test_a_loaded_model_evaluates_as_in_the_run_and_an_exported_one_has_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, target = torch.arange(40) % 10, (torch.arange(40) % 10) / 10
    task = mh.Task(
        model=Rated,
        loss=nn.functional.mse_loss,
        train=(ids, target),
        test=(ids, target),
        batch=10,
        epochs=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    result = mh.train(task, "", directory=tmp_path / "run", quiet=True)
    loaded = mh.load(result.directory, Rated()).eval()
    with torch.no_grad():
        assert nn.functional.mse_loss(loaded(ids), target).item() == pytest.approx(
            result.metrics["loss"], rel=1e-6
        )
        rows = loaded.rows(torch.arange(10))  # type: ignore[operator]
    exported = load_file(export(Path(result.directory), tmp_path / "model.safetensors"))
    assert set(exported) == {"last.weight", "last.bias", "table/loaded/ids", "table/loaded/values"}
    assert exported["table/loaded/ids"].tolist() == list(range(10)) and torch.equal(
        exported["table/loaded/values"], rows
    )
    assert "table/NAME/ids and table/NAME/values: loaded (10 rows)" in capsys.readouterr().err


def rated_task(model: Any, **more: Any) -> mh.Task:
    ids, target = torch.arange(40) % 10, (torch.arange(40) % 10) / 10
    return mh.Task(
        model=model,
        loss=nn.functional.mse_loss,
        train=(ids, target),
        test=(ids, target),
        batch=10,
        epochs=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        **more,
    )


def loss_of(model: nn.Module, task: mh.Task) -> float:
    ids, target = task.test
    with torch.no_grad():
        return nn.functional.mse_loss(model.eval()(ids), target).item()


@pytest.mark.parametrize("words", ["", "save=off", "servers=1"])
def test_a_model_object_has_the_trained_rows_after_the_run(words: str, tmp_path: Path) -> None:
    models = [Rated(), Rated()]
    for i, model in enumerate(models if words != "servers=1" else models[:1]):
        task = rated_task(model, seed=i)
        result = mh.train(task, words, directory=tmp_path / str(i), quiet=True)
        assert loss_of(model, task) == pytest.approx(result.metrics["loss"], rel=1e-6)
    if words == "":  # rows of the first model are not those of the second, nor of a new one
        first = [loss_of(models[0], task), loss_of(mh.load(tmp_path / "0", Rated()), task)]
        assert first[0] == pytest.approx(first[1], rel=1e-6)
        mh.load(tmp_path / "1", models[0])
        assert loss_of(models[0], task) == pytest.approx(loss_of(models[1], task), rel=1e-6)


def test_rows_that_were_on_servers_and_not_saved_are_said_to_be_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mh.train(rated_task(Rated()), "servers=1 save=off", directory=tmp_path / "a", quiet=True)
    said = capsys.readouterr().err
    assert "trained, but has no rows of loaded: they were on servers, and nothing was" in said


def test_a_second_run_of_a_model_object_says_that_its_rows_start_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Rated()
    mh.train(rated_task(model), "save=off", directory=tmp_path / "a", quiet=True)
    assert "anew" not in capsys.readouterr().err
    mh.train(rated_task(model), "save=off", directory=tmp_path / "b", quiet=True)
    assert "the rows of loaded start anew" in capsys.readouterr().err


def test_rows_amid_frozen_parameters_are_trained_with_a_notice_and_frozen_rows_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, freeze in (("around", False), ("itself", True)):
        model = nn.Sequential(Rated(), nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1), nn.Flatten(0))
        tower = cast("Rated", model[0].requires_grad_(False))
        if freeze:
            tower.rows.requires_grad_(False)
        untrained = mh.Embedding("loaded", 4, optimizer="sgd", lr=0.5, scale=0.5)
        untrained.attach(rows_of_this_process())  # other tests have trained those by default
        before = untrained(torch.arange(10)).detach()
        mh.train(rated_task(model), "save=off", directory=tmp_path / name)
        text = capsys.readouterr()
        assert ("all parameters of 0 are frozen, but" in text.out + text.err) is not freeze
        assert torch.equal(tower.rows(torch.arange(10)), before) is freeze


def test_a_channels_last_model_resumes_to_the_last_bit(tmp_path: Path) -> None:
    images = (
        torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(64) % 3,
    )

    def make() -> mh.Task:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)).to(
            memory_format=torch.channels_last
        )
        return small_task(
            net, train=images, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
        )

    mh.train(make, "steps=6 save=3", directory=tmp_path / "whole", quiet=True)
    mh.train(make, "steps=3 save=3", directory=tmp_path / "half", quiet=True)
    mh.train(make, "steps=6 save=3", directory=tmp_path / "half", resume=True, quiet=True)
    for key, value in saved_weights(tmp_path / "whole").items():
        assert torch.equal(saved_weights(tmp_path / "half")[key], value), key


def test_a_finished_run_lets_go_of_its_model(tmp_path: Path) -> None:
    alive = []

    def make() -> mh.Task:
        net = nn.Linear(8, 3)
        alive.append(weakref.ref(net))
        return small_task(net)

    for i in range(2):
        mh.train(make, "steps=2", directory=tmp_path / str(i), quiet=True)
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


# -- never wrong in silence --


def test_an_epoch_in_which_no_sample_counts_is_an_error(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), 0

    with pytest.raises(mh.TaskError, match="epoch 1 has trained nothing"):
        train(tmp_path, loss=None, step=step, metrics={}, test=None, schedule=None)


def test_a_run_whose_last_checkpoint_cannot_be_saved_fails_though_it_is_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Block(mh.Callback):
        """What a full disk does: from the second epoch on nothing can be written there."""

        def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
            if epoch == 1:
                folder = Path(run.directory) / "checkpoints"
                run.trainer.checkpoints.last_good()
                folder.rename(folder.with_name("moved"))
                folder.write_text("a file in its place")

    with pytest.raises(mh.CheckpointError, match="its last checkpoint could not be saved"):
        train(tmp_path, "epochs=2", callbacks=(Block(),))
    assert "checkpoint at round 14 failed" in capfd.readouterr().err


def test_a_deleted_run_directory_is_noticed_and_made_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Delete(mh.Callback):
        def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
            if epoch == 0:
                run.trainer.checkpoints.last_good()
                shutil.rmtree(run.directory)

    result = train(tmp_path, "epochs=3", callbacks=(Delete(),))
    assert "was deleted or replaced while this run used it" in capfd.readouterr().err
    assert Path(str(result.checkpoint)).exists() and (tmp_path / "run/plan.toml").exists()
    assert train(tmp_path, "epochs=4", resume=True).epochs == 4


def test_a_damaged_checkpoint_is_named_though_the_run_is_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, "epochs=2")
    (Path(str(result.checkpoint)) / "tensors.safetensors").write_bytes(b"")
    train(tmp_path, "epochs=3", resume=True)
    assert "step-00000014 is damaged" in capfd.readouterr().err


def test_the_train_loss_is_the_mean_over_the_last_epoch(tmp_path: Path) -> None:
    losses: list[float] = []

    class Keep(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            losses.append(float(loss) * run.trainer.replica.own_count)

    result = train(tmp_path, "epochs=2", callbacks=(Keep(),))
    assert math.isclose(result.metrics["train_loss"], sum(losses[7:]) / N, rel_tol=1e-6)


class Lightning(mh.Callback):
    def on_train_epoch_end(self) -> None: ...


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"optimizer": torch.optim.SGD([nn.Parameter(X)], lr=0.1)}, "optimizer is a SGD, but a fu"),
        ({"schedule": 3}, "schedule is a int, but a function of the optimizer"),
        ({"reduction": "none"}, "reduction='none', but what loss= or step= do"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss"),
        ({"metrics": {"loss": mh.accuracy}}, "a metric is called 'loss', which is a number of"),
        ({"callbacks": mh.Callback()}, "callbacks is a Callback, but a list"),
        ({"callbacks": [print]}, "an object of a subclass of mh.Callback"),
        ({"callbacks": [Lightning()]}, "Lightning.on_train_epoch_end would never be called"),
        ({"epochs": "3"}, "epochs='3', but a number is needed"),
        ({"batch": 2.5}, "batch=2.5, but a whole number is needed"),
    ],
)
def test_objects_where_functions_are_needed_are_refused(changed: Any, says: str) -> None:
    with pytest.raises(mh.TaskError, match=says):
        make(**changed)


def test_a_split_word_and_a_sampler_of_the_loaders_own_contradict_each_other(
    tmp_path: Path,
) -> None:
    sampler = WeightedRandomSampler([1.0] * N, N)
    with pytest.raises(mh.PlanError, match="split=sampled and the DataLoader's Weighted"):
        train(tmp_path, "split=sampled", train=DataLoader(Rows(), 4, sampler=sampler))


def test_a_drop_last_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mh.PlanError, match="drop_last=True leaves nothing: 26 samples"):
        train(tmp_path, "batch=30", train=DataLoader(Rows(), 30, drop_last=True))


def test_the_batches_of_a_batch_sampler_are_computed_as_they_are(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Buckets(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1, 2], [3], [4, 5, 6, 7, 8]])

    class Numbered(Rows):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
            seen.append(indices)
            return [self[i] for i in indices]

    loader = DataLoader(Numbered(), batch_sampler=Buckets())
    result = train(
        tmp_path, train=loader, batch=None, test=None, metrics={}, model=lambda: nn.Linear(6, 2)
    )
    assert seen == [[0, 1, 2], [3], [4, 5, 6, 7, 8]] and result.rounds == 3
    with pytest.raises(mh.PlanError, match="batch=4 has no effect: the DataLoader's Buckets"):
        train(tmp_path / "b", "batch=4", train=loader)


@pytest.mark.parametrize(
    ("words", "changed", "says"),
    [
        ("", {"optimizer": lambda p: ([torch.optim.SGD(p, lr=0.1)], [])}, "returned a tuple, but"),
        ("", {"schedule": lambda o: None}, "returned a NoneType, but a schedule"),
        ("evaluate=2", {"test": None, "metrics": {}}, "evaluate=2 has no effect"),
        ("until=loss:0.3", {}, "asks for a large loss; write until=-loss:0.3"),
        ("best=loss", {}, "asks for a large loss; write best=-loss"),
        ("", {"metrics": {"odd": lambda o, t: {}}}, "metric odd returned a dict"),
        ("", {"train": "data/train.csv"}, "is a path or text"),
        ("", {"train": {"x": [1, 2], "y": [3, 4]}}, "is a dict of list; tensors or arrays"),
        ("", {"train": [X[i] for i in range(6)]}, "a list of 6 tensors, which may be columns"),
        ("", {"metrics": {"a": lambda o, t: mh.accuracy(o[:, :1], t)}}, "one for each sample"),
    ],
)
def test_habits_that_once_did_nothing_or_failed_without_a_reason_are_refused(
    tmp_path: Path, words: str, changed: Any, says: str
) -> None:
    with pytest.raises(mh.ManyhandsError, match=says):
        train(tmp_path, words, **changed)


def test_a_metric_that_is_no_mean_over_samples_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hits = lambda outputs, target: int((outputs.argmax(1) == target).sum())
    train(tmp_path, "epochs=2", metrics={"accuracy": mh.accuracy, "hits": hits})
    assert capfd.readouterr().err.count("the metric hits is no mean over samples") == 1


def test_a_model_in_eval_mode_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, model=lambda: model().eval())
    assert "the model is in eval mode" in capfd.readouterr().err


def test_random_numbers_and_threads_of_the_caller_are_its_own_after_a_run(tmp_path: Path) -> None:
    drawn = []
    for i in range(2):
        drawn.append(float(torch.rand(())))
        train(tmp_path / str(i), "threads=1", schedule=None)
    assert drawn[0] != drawn[1] != float(torch.rand(()))
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train(tmp_path / "last", "threads=1")
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_leaving_in_the_middle_of_a_task_is_an_error(tmp_path: Path) -> None:
    def leave(model: nn.Module, batch: Any) -> Tensor:
        raise SystemExit(0)

    with pytest.raises(mh.TaskError, match=r"called sys.exit\(\) in the middle of training"):
        train(tmp_path, loss=None, step=leave, metrics={})


def test_torchs_own_batch_sampler_gives_the_batch_size(tmp_path: Path) -> None:
    batches = BatchSampler(SequentialSampler(Rows()), 8, True)
    result = train(tmp_path, train=DataLoader(Rows(), batch_sampler=batches), batch=None)
    assert result.rounds == 3, "26 samples in complete batches of 8"


def test_a_task_that_refers_to_the_package_can_be_sent_to_other_processes() -> None:
    def task() -> Any:
        return package.Task  # cloudpickle sends what a script's function refers to

    package = mh
    again = pickle.loads(cloudpickle.dumps(task))
    assert again() is mh.Task
