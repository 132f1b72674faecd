"""Tasks with several named models and optimizers: what they compute, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.assembly.several_optimizers.step_agreement import StepAgreement
from manyhands.core import Group
from manyhands.exchange.inproc import World
from manyhands.observe.progress import describe
from manyhands.observe.text import number
from manyhands.recover.checkpoint import Checkpoints
from support import two_players
from support.small_task import small_task

BATCH = 6
SGD = torch.optim.SGD


def train(folder: Path, task: mh.Task, plan: str = "", **more: Any) -> mh.Result:
    return mh.train(task, plan, directory=folder / "run", quiet=True, argv=False, **more)


def weights(folder: Path) -> dict[str, Tensor]:
    saved = Checkpoints(folder / "run" / "checkpoints").latest()
    assert saved is not None
    return saved.params


def plain_gan(epochs: int) -> dict[str, Tensor]:
    """The loop that everybody writes, in the order of split=ordered."""
    models = nn.ModuleDict(two_players.gan_models())
    made = {k: f(models[k].parameters()) for k, f in two_players.gan_optimizers().items()}
    for _ in range(epochs):
        for at in range(0, two_players.N, BATCH):
            batch = two_players.REAL[at : at + BATCH], two_players.NOISE[at : at + BATCH]
            for name, loss in two_players.gan_step(models, batch):
                made[name].zero_grad()
                loss.backward()
                made[name].step()
    return models.state_dict()


@pytest.mark.parametrize("words", ["", "accumulate=2 batch=3"])
def test_a_gan_trains_as_in_the_loop_that_everybody_writes(tmp_path: Path, words: str) -> None:
    result = train(tmp_path, two_players.gan(batch=BATCH), f"split=ordered {words}")
    assert result.rounds == 2 * 2 * 5, "a round is one optimizer step"
    for name, value in plain_gan(2).items():
        torch.testing.assert_close(weights(tmp_path)[name], value, rtol=1e-10, atol=1e-13)


def test_optimizers_of_layers_step_together_by_a_plain_loss(tmp_path: Path) -> None:
    task = two_players.layers(batch=BATCH)
    model = copy.deepcopy(task.model)
    assert isinstance(model, nn.Sequential) and isinstance(task.optimizer, dict)
    made = [f(model[int(k)].parameters()) for k, f in task.optimizer.items()]
    result = train(tmp_path, task, "split=ordered epochs=1")
    assert result.rounds == 5 and "accuracy" in result.metrics
    for x, y in zip(two_players.REAL.split(BATCH), two_players.CLASSES.split(BATCH), strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in made:
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights(tmp_path)[name], value, rtol=1e-10, atol=1e-13)


def test_a_loss_leaves_the_parameters_of_other_optimizers_without_gradients(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Look(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            named = run.trainer.evaluator.module.named_parameters()
            seen.append(sorted({n[0] for n, p in named if p.grad is not None}))

    train(tmp_path, two_players.gan(callbacks=[Look()]), "steps=2")
    assert seen == [["d"], ["g"]] * 2


def test_the_given_models_are_trained_and_functions_make_theirs(tmp_path: Path) -> None:
    models = two_players.gan_models()
    before = {k: v.clone() for k, v in models["g"].state_dict().items()}
    train(tmp_path, two_players.gan(model={**models, "d": lambda: models["d"]}))
    assert not torch.equal(models["g"].state_dict()["0.weight"], before["0.weight"])
    assert torch.equal(models["g"].state_dict()["0.weight"], weights(tmp_path)["g.0.weight"])


def test_checkpoints_come_between_batches_only(tmp_path: Path) -> None:
    """save= counts rounds, of which a batch has two here: 3, 6, 9 fall on 4, 6, 10."""
    train(tmp_path, two_players.gan(), "save=3 steps=5 keep=99")
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [int(path.name.removeprefix("step-")) for path in saved] == [4, 6, 10]


def test_each_schedule_moves_when_its_own_optimizer_steps(tmp_path: Path) -> None:
    rates: list[tuple[float, float]] = []

    class Look(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            named = run.trainer.replica.optimizer.named
            rates.append(tuple(named[k].param_groups[0]["lr"] for k in ("d", "g")))

    halved = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
    task = two_players.gan(schedule=halved, callbacks=[Look()])
    train(tmp_path / "all", task, "steps=2")
    assert rates == [(0.025, 0.02), (0.025, 0.01), (0.0125, 0.01), (0.0125, 0.005)]
    rates.clear()
    train(tmp_path / "d", two_players.gan(schedule={"d": halved}, callbacks=[Look()]), "steps=1")
    assert rates == [(0.025, 0.02), (0.025, 0.02)]


def test_test_data_is_evaluated_by_the_step_with_gradients_of_its_own(tmp_path: Path) -> None:
    def penalised(models: Any, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
        real = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(models.d(real).sum(), real, create_graph=True)
        yield "d", slope.square().mean()
        yield from two_players.gan_step(models, batch)

    test = two_players.REAL, two_players.NOISE
    result = train(tmp_path, two_players.gan(step=penalised, test=test), "steps=2")
    assert 0 < result.metrics["loss"] < 10


def test_a_graph_of_before_a_step_cannot_be_gone_back_through(tmp_path: Path) -> None:
    def twice(models: Any, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
        hidden = models.d[0](batch[0])
        score = models.d[2](hidden.tanh())
        yield "d", score.mean()
        yield "d", score.square().mean()  # of the weights before the step

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|a second time"):
        train(tmp_path, two_players.gan(step=twice))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one optimizer": ({"optimizer": SGD}, "one optimizer without a name"),
    "a yield without names": (
        {"model": nn.Linear(3, 1), "optimizer": SGD},
        "each loss that it yields is for a named optimizer",
    ),
    "no optimizer": ({"optimizer": {}}, "optimizer={} is empty"),
    "no model": ({"model": {}}, "model={} is empty"),
    "an instance": (
        {"optimizer": {"g": SGD(nn.Linear(1, 1).parameters(), 0.1)}},
        "is a SGD, but a function of the parameters",
    ),
    "a name of a dict": ({"model": {"items": nn.Linear(3, 1)}}, "cannot be the name of a model"),
    "a model that is none": ({"model": {"g": 3, "d": nn.Linear(3, 1)}}, "is a int, but a torch.nn"),
    "a schedule for nobody": ({"schedule": {"x": print}}, "they are g, d"),
    "a schedule that is none": ({"schedule": {"g": 3}}, "a function of the optimizer is needed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_names_without_a_meaning_are_refused_when_the_task_is_made(case: str) -> None:
    given, words = REFUSED[case]
    with pytest.raises(mh.TaskError, match=words):
        two_players.gan(**given)


def yielding(*values: Any) -> Any:
    def step(models: Any, batch: Any) -> Iterator[Any]:
        yield from (v(models, batch) if callable(v) else v for v in values)

    return step


def loss_of(name: str) -> Any:
    return lambda models, batch: (name, models.d(batch[0]).mean())


YIELDED: dict[str, tuple[Any, str]] = {
    "a loss alone": (yielding(lambda m, b: m.d(b[0]).mean()), "yield NAME, loss"),
    "another name": (yielding(loss_of("x")), "a loss for 'x', but the optimizers are g, d"),
    "another model's loss": (yielding(loss_of("g")), "no gradient to any of the optimizer's"),
    "a float": (yielding(("d", 0.5)), "step=.* yielded for 'd' 0.5"),
    "a bad count": (yielding(("d", torch.ones(()), -1)), "yielded for 'd' as the count -1"),
    "a generator inside": (
        lambda models, batch: two_players.gan_step(models, batch),
        "returned a generator",
    ),
}


@pytest.mark.parametrize("case", YIELDED)
def test_what_a_step_yields_is_checked(tmp_path: Path, case: str) -> None:
    step, words = YIELDED[case]
    with pytest.raises(mh.TaskError, match=words):
        train(tmp_path, two_players.gan(step=step))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("data=2 merge=downpour servers=1", "merge=downpour is asynchronous"),
        ("data=2 merge=hogwild", "merge=hogwild is asynchronous"),
        ("tensor=2", r"tensor=2 splits the model over ranks, but there are several optimizers"),
        ("shard=2", r"shard=2 splits the model over ranks, but there are several optimizers"),
        ("data=2 merge=ensemble", "merge=ensemble averages the class probabilities"),
        ("data=2 merge=skeleton", "merge=skeleton leaves units out"),
        ("data=2 elastic=1:2", "takes over the state of one optimizer"),
    ],
)
@pytest.mark.slow
def test_plans_that_cannot_are_refused_by_name(tmp_path: Path, plan: str, words: str) -> None:
    with pytest.raises(mh.ManyhandsError, match=words):
        train(tmp_path, two_players.gan(), plan)


def test_accumulated_batches_yield_alike_or_are_refused(tmp_path: Path) -> None:
    def sometimes(models: Any, batch: tuple[Tensor, Tensor]) -> Iterator[Any]:
        yield "d", models.d(batch[0]).mean()
        if float(batch[0][0, 0]) > 1:
            yield "g", models.d(models.g(batch[1])).mean()

    with pytest.raises(mh.TaskError, match="another micro-batch of the same batch"):
        train(tmp_path, two_players.gan(step=sometimes), "accumulate=3 batch=2")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("d", "g"), "rank 1 steps the optimizer 'g', but rank 0 steps the optimizer 'd'"),
        (("d", None), "rank 1 has no further optimizer step in its batch, but rank 0 steps"),
        (("", "g"), "rank 1 steps the optimizer 'g', but rank 0 steps all optimizers"),
    ],
)
def test_ranks_that_step_other_optimizers_are_named(
    names: tuple[str | None, str | None], words: str
) -> None:
    def body(group: Group) -> str:
        agree = StepAgreement(group, ["d", "g"], torch.device("cpu"))
        agree("d")
        with pytest.raises(mh.TaskError) as found:
            agree(names[group.rank])
        return str(found.value)

    assert all(words in said for said in World(2).run(body))


def test_a_composite_is_resumed_and_another_one_is_refused(tmp_path: Path) -> None:
    train(tmp_path, two_players.gan(epochs=1))
    train(tmp_path, two_players.gan(epochs=2), resume=True)
    train(tmp_path / "whole", two_players.gan(epochs=2))
    ours, whole = weights(tmp_path), weights(tmp_path / "whole")
    assert all(torch.equal(ours[k], whole[k]) for k in whole)
    other = {"g": SGD, "d": SGD}
    with pytest.raises(mh.CheckpointError, match="optimizer is d: SGD, g: Adam, the task's is d: "):
        train(tmp_path, two_players.gan(optimizer=other, epochs=3), resume=True)


def test_progress_shows_the_mean_loss_of_each_optimizer(tmp_path: Path) -> None:
    given: list[tuple[float, float]] = []

    def step(models: Any, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
        of_d, of_g = (loss for _, loss in two_players.gan_step(models, batch))
        given.append((float(of_d), float(of_g)))
        yield "d", of_d
        yield from list(two_players.gan_step(models, batch))[1:]

    train(tmp_path, two_players.gan(step=step, batch=13), "steps=1")
    lines = (tmp_path / "run" / "events" / "rank-0.jsonl").read_text().splitlines()
    shown = [e["value"] for e in map(json.loads, lines) if e["name"] == "progress"][-1]
    assert shown["loss/d"] == pytest.approx(given[0][0])
    assert 0 < shown["loss/g"] != shown["loss/d"]
    assert describe(shown)["named"] == f"d {number(shown['loss/d'])}  g {number(shown['loss/g'])}"


def test_one_optimizer_stays_as_it_was(tmp_path: Path) -> None:
    train(tmp_path, small_task(), "steps=1")
    saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert saved is not None and saved.meta["given"]["optimizer"] == "SGD"
