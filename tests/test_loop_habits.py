"""Habits in a loop of one's own, in one process: honoured, refused or warned of."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import manyhands as mh
from manyhands.errors import TaskError
from manyhands.own_loop import Run
from manyhands.own_loop.loop_data import LoopData
from manyhands.replica.checks import step_guard

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Loop:
    """A prepared loop, and what its user has at hand."""

    def __init__(self, run: Run, schedule: Callable[[Optimizer], StepLR] | None = None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = SGD(model.parameters(), lr=0.1)
        self.run = run
        self.schedule = None if schedule is None else schedule(optimizer)
        made = run.prepare(model, optimizer, (X, Y), batch=8, schedule=self.schedule)
        self.model: Any = made[0]
        self.optimizer: Any = made[1]
        self.data: LoopData = made[2]

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(a), b)

    def epoch(self, before: Callable[[], object] = lambda: None) -> None:
        for a, b in self.data:
            before()
            self.run.step(self.loss(a, b))


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    opened: list[Run] = []

    def join(words: str = "", **options: Any) -> Loop:
        opened.append(
            mh.join(f"device=cpu {words}", directory=tmp_path / "run", quiet=True, argv=False)
        )
        return Loop(opened[0], **options)

    yield join
    for run in opened:
        run._abandon()
        run.close()
    assert not step_guard._installed


def clear(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.grad = None


def zero(loop: Loop) -> None:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.zero_()


@pytest.mark.parametrize(
    "how", [lambda loop: loop.model.zero_grad(), clear, zero], ids=["zero_grad", "None", "zero_"]
)
def test_gradients_that_are_cleared_within_a_step_are_refused(
    joined: Callable[..., Loop], how: Callable[[Loop], object]
) -> None:
    loop = joined("accumulate=2")
    with pytest.raises(TaskError, match=r"was cleared or changed between the micro-batches"):
        loop.epoch(lambda: how(loop))


def test_zero_grad_between_steps_changes_nothing(joined: Callable[..., Loop]) -> None:
    loop = joined()
    loop.epoch(lambda: (loop.model.zero_grad(), loop.optimizer.zero_grad()))
    assert loop.run.trainer is not None and loop.run.trainer.round == 8


def test_a_backward_pass_beside_a_step_is_refused(joined: Callable[..., Loop]) -> None:
    loop = joined()
    a, b = next(iter(loop.data))
    loop.loss(a, b).backward()
    with pytest.raises(TaskError, match=r"0.weight has a gradient before run.step\(loss\)"):
        loop.run.step(loop.loss(a, b))


def test_gradients_that_a_script_accumulates_over_batches_are_told_what_to_do(
    joined: Callable[..., Loop], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = joined()
    for i, (a, b) in enumerate(loop.data):
        (loop.loss(a, b) / 2).backward()
        if i % 2:
            loop.run.step()
    assert loop.run.round == 4
    said = "had loss.backward() and no run.step(): the script accumulates gradients itself"
    assert capfd.readouterr().err.count(said) == 1
    monkeypatch.setattr(loop.run, "size", 2)
    with pytest.raises(TaskError, match=r"say accumulate=4 in the plan for steps of 4 batches"):
        for a, b in loop.data:
            loop.loss(a, b).backward()


def test_loops_within_loops_and_loops_that_never_step_are_refused(
    joined: Callable[..., Loop],
) -> None:
    loop = joined()
    with pytest.raises(TaskError, match=r"is being iterated over already; one loop at a time"):
        for _ in loop.data:
            next(iter(loop.data))
    with pytest.raises(TaskError, match=r"an epoch of 7 batches has trained nothing"):
        for _ in loop.data:
            pass


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_clipping_beside_a_step_is_refused_with_the_word_that_clips(
    joined: Callable[..., Loop], clip: Callable[..., object]
) -> None:
    loop = joined()
    with pytest.raises(TaskError, match=r"clip by the plan: clip=1.0"):
        for a, b in loop.data:
            loop.run.step(loop.loss(a, b))
            clip(loop.model.parameters(), 1.0)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    clip(other.parameters(), 1.0)  # gradients of somebody else


def test_an_optimizer_made_anew_and_parameters_added_are_refused(
    joined: Callable[..., Loop],
) -> None:
    loop = joined()
    with pytest.raises(TaskError, match=r"SGD was made over parameters of the run"):
        SGD(loop.model.parameters(), lr=0.0)
    with pytest.raises(TaskError, match=r"parameters were added to the optimizer after run.pre"):
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    SGD(nn.Linear(2, 2).parameters(), lr=0.1)  # of another model
    loop.epoch()


def test_a_layer_replaced_after_prepare_is_refused_by_name(joined: Callable[..., Loop]) -> None:
    loop = joined("save=2")
    loop.model[2] = nn.Linear(8, 2)
    with pytest.raises(TaskError, match=r"a layer was replaced after training began"):
        loop.epoch()


def test_a_schedule_that_the_script_steps_too_is_refused(joined: Callable[..., Loop]) -> None:
    loop = joined(schedule=lambda o: StepLR(o, 1, 0.5))
    assert loop.schedule is not None
    with pytest.raises(TaskError, match=r"the schedule was stepped by the script"):
        loop.epoch(loop.schedule.step)


def test_a_batch_again_and_again_is_refused_where_a_step_would_never_end(
    joined: Callable[..., Loop],
) -> None:
    loop = joined("accumulate=2")
    a, b = next(iter(loop.data))
    loop.run.step(loop.loss(a, b))
    with pytest.raises(TaskError, match=r"again for the same batch, but with accumulate="):
        loop.run.step(loop.loss(a, b))


def test_a_batch_again_and_again_trains_and_is_warned_of_once(
    joined: Callable[..., Loop], capfd: pytest.CaptureFixture[str]
) -> None:
    loop = joined()
    for a, b in itertools.islice(itertools.cycle(loop.data), 20):
        loop.run.step(loop.loss(a, b))
    assert loop.run.trainer is not None and loop.run.trainer.round == 20
    assert capfd.readouterr().err.count("again without a new batch from the data") == 1


@pytest.mark.parametrize(("words", "batches"), [("", 8), ("accumulate=2", 8), ("accumulate=3", 8)])
def test_the_length_of_the_data_is_the_number_of_its_batches(
    joined: Callable[..., Loop], words: str, batches: int
) -> None:
    loop = joined(words)
    assert len(loop.data) == batches
    assert sum(1 for a, b in loop.data if loop.run.step(loop.loss(a, b)) is None) == batches


def test_a_step_that_the_loop_leaves_unfinished_is_warned_of(
    joined: Callable[..., Loop], capfd: pytest.CaptureFixture[str]
) -> None:
    loop = joined("accumulate=2")
    for a, b in itertools.islice(loop.data, 3):
        loop.run.step(loop.loss(a, b))
    loop.run.close()
    assert "ended in the middle of a step (accumulate=)" in capfd.readouterr().err


def test_a_loop_that_ends_in_its_first_block_of_local_steps_reports_no_loss_of_nan(
    joined: Callable[..., Loop], tmp_path: Path
) -> None:
    loop = joined("merge=local_sgd merge.period=64")
    loop.epoch()
    loop.run.close()
    lines = (tmp_path / "run/events/rank-0.jsonl").read_text().splitlines()
    shown = [v for v in map(json.loads, lines) if v["name"] == "progress"]
    assert shown and all(v["value"].get("loss", 0.0) is not None for v in shown)


def test_a_schedule_in_the_order_of_other_trainers_is_told_its_keyword(tmp_path: Path) -> None:
    run: Any = mh.join("device=cpu", directory=tmp_path / "run", quiet=True, argv=False)
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(TaskError, match=r"given StepLR beside .* schedule=scheduler"):
        run.prepare(model, optimizer, (X, Y), StepLR(optimizer, 3), batch=8)
    run.close()


def test_attributes_that_end_other_trainers_are_refused(joined: Callable[..., Loop]) -> None:
    with pytest.raises(
        TaskError, match=r"run.should_stop = ... has no effect; end a run with run.stop"
    ):
        joined().run.should_stop = True  # type: ignore[attr-defined]


def test_a_number_or_a_tensor_is_summed_over_ranks(joined: Callable[..., Loop]) -> None:
    run = joined().run
    given = torch.ones(2, 3)
    assert float(run.sum(1.5)) == 1.5 and torch.equal(run.sum(given), given)
    assert int(run.sum(torch.tensor(3))) == 3


class Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        assert out.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return nn.functional.cross_entropy(out, y)


def test_a_model_in_lower_precision_keeps_its_methods_and_names(tmp_path: Path) -> None:
    run = mh.join("device=cpu precision=bf16", directory=tmp_path / "run", quiet=True, argv=False)
    given, seen = Stepping(), []
    given.inner.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    model, _, data = run.prepare(given, SGD(given.parameters(), lr=0.1), (X, Y), batch=32)
    assert list(model.state_dict()) == ["inner.weight", "inner.bias"]
    for a, b in data:
        run.step(model.training_step(a, b))  # type: ignore[operator]
    run.close()
    assert seen == [torch.bfloat16, torch.bfloat16]
