"""Callbacks: when they are called, what they may do, and what a resumed run knows of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands.recover.checkpoint import Checkpoints
from support.small_task import saved_weights, small_data, small_task

X, Y = small_data(70)  # 16 a batch: five steps an epoch


def train(folder: Path, words: str = "", resume: bool = False, **given: Any) -> mh.Result:
    given = {"train": (X, Y), "test": (X, Y), **given}
    return mh.train(
        lambda: small_task(**given), words, directory=folder, resume=resume, quiet=True, argv=False
    )


def notices(result: mh.Result) -> list[str]:
    lines = [
        json.loads(line)
        for f in Path(result.directory).glob("events/*.jsonl")
        for line in f.read_text().splitlines()
    ]
    return [e["value"] for e in lines if e["name"] == "notice"]


class Called(mh.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, run: Any) -> None:
        self.calls.append("start")

    def on_epoch_start(self, run: Any, epoch: int) -> None:
        self.calls.append(f"epoch {epoch} starts")

    def on_gradient(self, run: Any) -> None:
        self.calls.append("gradient")

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self.calls.append(f"round {round}")

    def on_evaluate(self, run: Any, metrics: Any) -> None:
        self.calls.append("evaluate " + ",".join(metrics))

    def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
        self.calls.append(f"epoch {epoch}")

    def on_checkpoint(self, run: Any, path: str) -> None:
        self.calls.append("checkpoint")

    def on_end(self, run: Any) -> None:
        self.calls.append("end")


# -- hooks --


def test_hooks_are_called_in_this_order(tmp_path: Path) -> None:
    called = Called()
    train(tmp_path / "run", "epochs=2 batch=64", callbacks=[called])
    steps = [["gradient", f"round {i}"] for i in range(1, 5)]
    assert called.calls == [
        "start",
        "epoch 0 starts",
        *steps[0],
        *steps[1],
        "evaluate loss",
        "epoch 0",
        "checkpoint",
        "epoch 1 starts",
        *steps[2],
        *steps[3],
        "evaluate loss",
        "epoch 1",
        "checkpoint",
        "end",
    ]


def test_every_epoch_has_a_start_and_an_end_also_within_a_block(tmp_path: Path) -> None:
    class Epochs(mh.Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_epoch_start(self, run: Any, epoch: int) -> None:
            self.calls.append(f"+{epoch}")

        def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
            self.calls.append(f"-{epoch}")

    epochs = Epochs()
    train(tmp_path / "run", "epochs=3 merge=local_sgd merge.period=10", callbacks=[epochs])
    assert epochs.calls == ["+0", "-0", "+1", "-1", "+2", "-2"]


HOOKS = ["on_start", "on_epoch_start", "on_gradient", "on_round", "on_evaluate", "on_epoch"]


@pytest.mark.parametrize("hook", [*HOOKS, "on_checkpoint", "on_end"])
def test_an_exception_says_which_callback_raised_it_and_when(tmp_path: Path, hook: str) -> None:
    def raises(self: Any, *_: Any) -> None:
        raise ZeroDivisionError("mine")

    callback = type("Mine", (mh.Callback,), {hook: raises})()
    with pytest.raises(ZeroDivisionError, match="mine") as e:
        train(tmp_path / "run", "epochs=1", callbacks=[callback])
    assert any(n.startswith(f"the callback Mine.{hook} raised it, at round") for n in notes(e))


def test_what_on_failure_raises_does_not_hide_the_failure(tmp_path: Path) -> None:
    class Twice(mh.Callback):
        def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
            raise ZeroDivisionError("first")

        def on_failure(self, run: Any, error: BaseException) -> None:
            raise KeyError("second")

    with pytest.raises(ZeroDivisionError, match="first") as e:
        train(tmp_path / "run", "epochs=1", callbacks=[Twice()])
    assert any("Twice.on_failure raised KeyError" in n for n in notes(e))


def notes(e: Any) -> list[str]:
    return list(e.value.__notes__)


# -- gradients --


class Doubled(mh.Callback):
    def on_gradient(self, run: Any) -> None:
        for gradient in run.gradients().values():
            gradient.mul_(2)


def test_what_a_hook_writes_into_gradients_is_what_the_optimizer_steps_by(tmp_path: Path) -> None:
    def task(lr: float) -> dict[str, Any]:
        return {"optimizer": lambda p: torch.optim.SGD(p, lr=lr), "model": nn.Linear(8, 3)}

    torch.manual_seed(0)
    start = nn.Linear(8, 3).state_dict()
    found = []
    for name, lr, callbacks in (("a", 0.1, []), ("b", 0.05, [Doubled()])):
        given = task(lr)
        given["model"].load_state_dict(start)
        train(tmp_path / name, "epochs=1", callbacks=callbacks, **given)
        found.append(saved_weights(tmp_path / name))
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key])


def test_gradients_are_there_in_their_hook_alone(tmp_path: Path) -> None:
    class Late(Doubled):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            run.gradients()

    class Without(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            run.gradients()

    for callback in (Late(), Without()):
        with pytest.raises(mh.TaskError, match="within a callback's on_gradient"):
            train(tmp_path / type(callback).__name__, callbacks=[callback])


@pytest.mark.parametrize("merge", ["local_sgd", "easgd", "d_psgd", "hogwild"])
def test_a_gradient_hook_is_refused_where_gradients_are_not_merged(
    tmp_path: Path, merge: str
) -> None:
    with pytest.raises(mh.PlanError, match=rf"Doubled.on_gradient .* but merge={merge} never"):
        train(tmp_path / "run", f"merge={merge}", callbacks=[Doubled()])


def test_a_gradient_hook_is_refused_within_a_line_search(tmp_path: Path) -> None:
    with pytest.raises(mh.PlanError, match="LBFGS computes several gradients"):
        train(tmp_path / "run", callbacks=[Doubled()], optimizer=lambda p: mh.LBFGS(p))


# -- ends --


def test_a_run_stops_after_the_round_in_which_it_was_asked_to(tmp_path: Path) -> None:
    class Stops(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            if round == 3:
                run.stop("enough of it")

    result = train(tmp_path / "run", "epochs=100", callbacks=[Stops()])
    assert (result.rounds, result.stopped, result.stop_reason) == (3, 0, "enough of it")
    assert "loss" in result.metrics and str(result.checkpoint).endswith("step-00000003")
    assert "run.stop() ends the run after round 3: enough of it" in notices(result)
    assert train(tmp_path / "run", "epochs=1", resume=True).rounds == 5, "a resumed run goes on"


@pytest.mark.parametrize("words", ["", "merge=local_sgd merge.period=50"])
def test_a_loop_of_ones_own_ends_and_the_lines_after_it_run(tmp_path: Path, words: str) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = mh.join(f"device=cpu {words}", directory=tmp_path / "run", quiet=True, argv=False)
    model, optimizer, data = run.prepare(model, optimizer, (X, Y), batch=16)
    steps = 0
    for _ in range(100):
        for x, y in data:
            run.step(cross_entropy(model(x), y))
            steps += 1
            if steps == 7:
                run.stop("enough")
    assert run.stopped and steps == 8, "the step in which all ranks hear of it is the last one"
    with pytest.raises(SystemExit) as e:
        run.step(cross_entropy(model(X), Y))
    result = run.close()
    assert not e.value.code and result is not None and result.stop_reason == "enough"
    saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert saved is not None and saved.position.steps == 8


def test_early_stopping_waits_for_an_improvement(tmp_path: Path) -> None:
    class Values(mh.EarlyStopping):
        """As if these were the values of the evaluations."""

        def __init__(self, values: list[float], **given: Any) -> None:
            super().__init__("accuracy", **given)
            self.values = values

        def on_evaluate(self, run: Any, metrics: Any) -> None:
            super().on_evaluate(run, {"accuracy": self.values.pop(0)})

    task = {"metrics": {"accuracy": mh.accuracy}}
    values = [0.1, 0.3, 0.2, 0.31, 0.3, 0.2, 0.9]
    stopping = Values([*values], patience=2, min_delta=0.05)
    result = train(tmp_path / "a", "epochs=7", callbacks=[stopping], **task)
    assert result.epochs == 4 and stopping.values == [0.3, 0.2, 0.9], "0.31 is too little"
    assert "its best was 0.3" in str(result.stop_reason)
    # a resumed run waits on
    train(tmp_path / "b", "epochs=5", callbacks=[Values([*values[:5]], patience=2)], **task)
    again = Values(values[5:], patience=2)
    assert train(tmp_path / "b", "epochs=7", resume=True, callbacks=[again], **task).epochs == 6


@pytest.mark.parametrize(
    ("callback", "test", "says"),
    [
        (lambda: mh.EarlyStopping("accuracy"), True, "'accuracy': no such metric; the task has l"),
        (lambda: mh.EarlyStopping("-loss"), False, "nothing to evaluate, as the task has no test"),
        (lambda: mh.EarlyStopping("loss"), True, "asks for a large loss; write '-loss'"),
        (lambda: mh.EarlyStopping(patience=0), True, "patience=0, but a number of evaluations"),
        (lambda: mh.BestModel("f1"), True, "BestModel: metric='f1': no such metric"),
        (lambda: mh.EMA(1.0), True, "EMA: decay=1.0, but a number between 0 and 1"),
        (lambda: mh.SWA(0), True, "SWA: start=0, but a number of epochs"),
        (lambda: mh.SWA(5), True, "start=5 would never come, in a run of 1 epochs"),
    ],
)
def test_what_a_ready_made_callback_cannot_do_is_refused_at_the_start(
    tmp_path: Path, callback: Callable[[], mh.Callback], test: bool, says: str
) -> None:
    with pytest.raises(mh.TaskError, match=says):
        train(tmp_path / "run", callbacks=[callback()], test=(X, Y) if test else None)


def test_two_callbacks_that_show_a_model_each_are_refused(tmp_path: Path) -> None:
    for two in ([mh.EMA(0.9), mh.SWA(1)], [mh.BestModel(), mh.EarlyStopping(restore_best=True)]):
        with pytest.raises(mh.TaskError, match="but one model is"):
            train(tmp_path / "run", callbacks=two)


# -- averages and the best model --


class Weights(mh.Callback):
    """The weights that train, after every step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_start(self, run: Any) -> None:
        self.on_round(run, 0, torch.zeros(()))

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self.seen.append(next(iter(run.trainer.replica.params.values())).clone())


class Shown(mh.Callback):
    """The model that was left."""

    def on_end(self, run: Any) -> None:
        self.model = next(iter(run.trainer.replica.params.values())).clone()


@pytest.mark.parametrize(
    "words", ["steps=12", "steps=12 merge=easgd merge.period=1", "steps=12 merge=hogwild"]
)
def test_an_ema_is_the_exponential_average_of_the_weights_of_each_step(
    tmp_path: Path, words: str
) -> None:
    weights, shown = Weights(), Shown()
    train(tmp_path / "run", words, callbacks=[mh.EMA(0.8, start=3), weights, shown])
    if "easgd" in words:
        return  # its model is the centre, which no replica holds
    expected = weights.seen[3].clone()
    for x in weights.seen[4:]:
        expected = 0.8 * expected + 0.2 * x
    torch.testing.assert_close(shown.model, expected)
    assert not torch.allclose(shown.model, weights.seen[-1], rtol=1e-4)


def test_an_ema_counts_the_steps_of_a_block(tmp_path: Path) -> None:
    weights, shown = Weights(), Shown()
    words = "steps=10 merge=local_sgd merge.period=5"
    train(tmp_path / "run", words, callbacks=[mh.EMA(0.8), weights, shown])
    expected = weights.seen[0].clone()
    for x in weights.seen[1:]:
        expected = 0.8**5 * expected + (1 - 0.8**5) * x
    torch.testing.assert_close(shown.model, expected)


def test_swa_is_the_mean_of_the_weights_after_epochs(tmp_path: Path) -> None:
    weights, shown = Weights(), Shown()
    train(tmp_path / "run", "epochs=5", callbacks=[mh.SWA(1, every=2), weights, shown])
    expected = (weights.seen[5] + weights.seen[15] + weights.seen[25]) / 3
    torch.testing.assert_close(shown.model, expected)


AVERAGES: dict[str, Callable[[], mh.Callback]] = {
    "ema": lambda: mh.EMA(0.9),
    "late ema": lambda: mh.EMA(0.9, start=12),
    "swa": lambda: mh.SWA(1),
    "best": lambda: mh.BestModel(),
    "early": lambda: mh.EarlyStopping(patience=3, restore_best=True),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_what_is_evaluated_is_saved_loaded_and_left(tmp_path: Path, name: str) -> None:
    model = nn.Linear(8, 3)
    result = train(tmp_path / "run", "epochs=4", model=model, callbacks=[AVERAGES[name]()])
    loaded = mh.load(result.directory, nn.Linear(8, 3))
    for found in (model, loaded):
        with torch.no_grad():
            loss = float(cross_entropy(found(X), Y))
        assert loss == pytest.approx(result.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("name", AVERAGES)
def test_a_resumed_run_trains_and_averages_as_if_it_had_never_stopped(
    tmp_path: Path, name: str
) -> None:
    def run(folder: str, words: str, resume: bool = False) -> mh.Result:
        task: dict[str, Any] = {"optimizer": lambda p: torch.optim.Adam(p, lr=0.05)}
        return train(
            tmp_path / folder, words, resume, callbacks=[AVERAGES[name]()], test=(X, 2 - Y), **task
        )

    whole = run("whole", "epochs=4")
    run("halves", "steps=13")  # 2.6 epochs
    halves = run("halves", "epochs=4", resume=True)
    assert halves.metrics["loss"] == whole.metrics["loss"]
    left, right = saved_weights(tmp_path / "whole"), saved_weights(tmp_path / "halves")
    assert all(torch.equal(left[k], right[k]) for k in left)


def test_the_best_model_comes_back_with_its_buffers(tmp_path: Path) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    result = train(
        tmp_path / "run",
        "epochs=6",
        model=normed,
        test=(X, 2 - Y),
        callbacks=[mh.BestModel()],
    )
    model = mh.load(result.directory, normed()).eval()
    with torch.no_grad():
        loss = float(cross_entropy(model(X), 2 - Y))
    assert loss == pytest.approx(result.metrics["loss"], rel=1e-5)


def test_an_average_of_a_model_whose_rows_are_in_tables_is_refused(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(mh.EmbeddingBag("rows", 4), nn.Linear(4, 3))

    data = torch.randint(20, (32, 2)), torch.randint(3, (32,))
    with pytest.raises(mh.TaskError, match="the callback EMA copies the model of this rank, but"):
        train(tmp_path / "run", model=model, train=data, test=None, callbacks=[mh.EMA()])


# -- state --


class Counts(mh.Callback):
    def __init__(self, state: Any = None) -> None:
        self.state: dict[str, Any] = {"n": 0, "sums": [torch.zeros(2)]} if state is None else state

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self.state["n"] += 1
        self.state["sums"][0] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_the_state_of_callbacks_is_in_checkpoints_by_their_names(tmp_path: Path) -> None:
    train(tmp_path / "run", "steps=3", callbacks=[Counts(), Counts()])
    first, second = Counts(), Counts()
    second.state["n"] = 50
    train(tmp_path / "run", "steps=5", resume=True, callbacks=[first, second])
    assert first.state["n"] == second.state["n"] == 5
    assert torch.equal(first.state["sums"][0], torch.full((2,), 5.0))
    result = train(tmp_path / "run", "steps=6", resume=True)
    assert "callbacks that are no longer there: Counts, Counts#2" in notices(result)


def test_a_state_that_cannot_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(mh.TaskError, match=r"the callback Counts has a set at Counts/seen"):
        train(tmp_path / "run", callbacks=[Counts({"seen": {1, 2}})])
