"""Own loops with several named models and optimizers: what they compute, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import manyhands as mh
from manyhands.own_loop import Run
from manyhands.recover.checkpoint import Checkpoints
from manyhands.replica.checks import step_guard
from support import named_loops as loops
from support import two_players
from support.two_players import NOISE, REAL

BATCH = 6
Join = Callable[..., Run]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    opened: list[Run] = []

    def joined(words: str = "", name: str = "run", **options: Any) -> Run:
        words = f"device=cpu split=ordered {words}"
        run = mh.join(words, directory=tmp_path / name, quiet=True, argv=False, **options)
        opened.append(run)
        return run

    yield joined
    for run in opened:
        run._abandon()
        run.close()
    assert not step_guard._installed


def plain(epochs: int = 2, steps_of_d: int = 1) -> dict[str, Tensor]:
    """The loop that everybody writes."""
    models = two_players.gan_models()
    made = {k: f(models[k].parameters()) for k, f in two_players.gan_optimizers().items()}
    g, d = models["g"], models["d"]
    for _, at in itertools.product(range(epochs), range(0, two_players.N, BATCH)):
        real, noise = REAL[at : at + BATCH], NOISE[at : at + BATCH]
        for _ in range(steps_of_d):
            fake = g(noise)
            loss = nn.functional.softplus(-d(real)) + nn.functional.softplus(d(fake.detach()))
            made["d"].zero_grad()
            loss.mean().backward()
            made["d"].step()
        made["g"].zero_grad()
        nn.functional.softplus(-d(g(noise) if steps_of_d > 1 else fake)).mean().backward()
        made["g"].step()
    return nn.ModuleDict(models).state_dict()


def assert_near(players: loops.Players, wanted: dict[str, Tensor]) -> None:
    for name, value in players.state().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("make", "steps_of_d"),
    [(loops.Players, 1), (loops.Gradients, 1), (loops.Closures, 1), (loops.FiveToOne, 5)],
)
def test_a_gan_trains_as_in_the_loop_that_everybody_writes(
    join: Join, make: type[loops.Players], steps_of_d: int
) -> None:
    run = join()
    players = make(run, BATCH)
    players.loop()
    assert_near(players, plain(steps_of_d=steps_of_d))
    assert run.steps == 10 and run.round == 10 * (steps_of_d + 1), "a round is an optimizer step"


def test_what_is_returned_has_the_shape_of_what_was_given(join: Join) -> None:
    run, models = join(), two_players.gan_models()
    made = {"d": SGD(models["d"].parameters(), 0.1), "g": SGD(models["g"].parameters(), 0.1)}
    given = run.prepare(models, made, (REAL, NOISE), batch=BATCH)
    assert given[0] == models and list(given[0]) == ["g", "d"] and given[1] is made
    assert len(given[2]) == 5 and len(given[2].dataset) == two_players.N


def test_models_by_name_train_with_one_optimizer_too(join: Join) -> None:
    run, models = join(), two_players.gan_models()
    first: Any = models["g"]
    optimizer = SGD([*models["g"].parameters(), *models["d"].parameters()], 0.1)
    models, _, data = run.prepare(models, optimizer, (REAL, NOISE), batch=BATCH)
    before = first[0].weight.clone()
    for _, noise in data:
        run.step(models["d"](models["g"](noise)).square().mean())
    assert run.round == 5 and not torch.equal(first[0].weight, before)


def test_each_schedule_moves_when_its_own_optimizer_steps(join: Join) -> None:
    class Watched(loops.Scheduled):
        def batch(self, real: Tensor, noise: Tensor) -> None:
            for loss, name in (self.loss_d(real, self.g(noise)), "d"), (None, "g"):
                given = self.loss_g(self.g(noise)) if loss is None else loss
                self.run.step(given, optimizer=name)
                rates.append([self.made[k].param_groups[0]["lr"] for k in "dg"])

    rates: list[list[float]] = []
    Watched(join(), BATCH, epochs=1).loop()
    assert [d for d, _ in rates] == [0.05] * 2 + [0.025] * 4 + [0.0125] * 4
    assert {g for _, g in rates} == {0.02}


@pytest.mark.parametrize("plan", ["", "merge=local_sgd merge.period=3"])
def test_a_loop_that_was_left_goes_on_with_the_next_batch(join: Join, plan: str) -> None:
    whole = loops.Scheduled(join(plan, "whole"), BATCH)
    whole.loop()
    first = loops.Scheduled(join(plan), BATCH)
    for real, noise in itertools.islice(first.batches, 3):
        first.batch(real, noise)
    first.run.close()
    again = loops.Scheduled(join(plan, resume=True), BATCH)
    again.loop()
    if not plan:  # else the block in which the loop was left is shorter
        assert all(torch.equal(v, whole.state()[k]) for k, v in again.state().items())
    assert again.run.steps == 10


def test_a_loop_that_was_left_within_a_batch_goes_on_with_the_next_one(join: Join) -> None:
    players = loops.Players(join(), BATCH)
    for real, noise in players.batches:
        players.run.step(players.loss_d(real, players.g(noise)), optimizer="d")
        break
    players.run.step(players.loss_g(players.g(noise)), optimizer="g")  # still of that batch
    assert (players.run.steps, players.run.round) == (1, 2)
    rest = [len(real) for real, noise in players.batches if players.batch(real, noise) is None]
    assert rest == [6, 6, 6, 2] and players.run.round == 10
    assert_near(players, plain(epochs=1))


def test_a_batch_of_an_iteration_that_is_over_is_refused(join: Join) -> None:
    players = loops.Players(join(), BATCH)
    with pytest.raises(mh.TaskError, match=r"needs a batch from the data .* that is over"):
        for real, noise in itertools.islice(itertools.cycle(players.batches), 9):
            players.batch(real, noise)


def test_a_run_is_saved_and_loaded_by_the_names_of_its_models(join: Join, tmp_path: Path) -> None:
    players = loops.Players(join("save=3 keep=99"), BATCH)
    players.loop()
    players.run.close()
    saved = Checkpoints(tmp_path / "run" / "checkpoints")
    rounds = [int(path.name.removeprefix("step-")) for path in saved.all()]
    assert rounds == [4, 6, 10, 12, 16, 18, 20], "between batches only: a batch has two rounds"
    fresh = nn.ModuleDict({k: m.apply(_scale) for k, m in two_players.gan_models().items()})
    mh.load(tmp_path / "run", fresh)
    assert all(torch.equal(v, fresh.state_dict()[k]) for k, v in players.state().items())


def _scale(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.mul_(3)


def test_every_optimizer_saves_and_loads_a_state_of_its_own(join: Join) -> None:
    players = loops.Players(join(), BATCH, epochs=1)
    players.loop()
    saved = {name: optimizer.state_dict() for name, optimizer in players.made.items()}
    assert [set(saved["g"]["state"][i]) for i in range(4)] == [
        {"step", "exp_avg", "exp_avg_sq"}
    ] * 4
    assert [set(entries) for entries in saved["d"]["state"].values()] == [{"momentum_buffer"}] * 4
    alone = Adam(two_players.gan_models()["g"].parameters())
    alone.load_state_dict(saved["g"])
    models = {k: v.clone() for k, v in players.state().items()}
    players.run.close()
    again = loops.Players(join(name="again"), BATCH, epochs=1)
    for name, model in again.models.items():
        own = {k.removeprefix(f"{name}."): v for k, v in models.items() if k.startswith(name)}
        model.load_state_dict(own)
        again.made[name].load_state_dict(saved[name])
    again.loop()
    assert_near(again, plain())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_models_compute_in_lower_precision_and_their_losses_do_not(
    join: Join, precision: str
) -> None:
    seen: list[torch.dtype] = []
    models: Any = {k: m.float() for k, m in two_players.gan_models().items()}
    models["d"][0].register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    run = join(f"precision={precision}")
    made = {k: SGD(m.parameters(), 0.05) for k, m in models.items()}
    models, _, data = run.prepare(models, made, (REAL.float(), NOISE.float()), batch=BATCH)
    before = {k: m[0].weight.clone() for k, m in models.items()}
    for batch in data:
        for name, loss in two_players.gan_step(nn.ModuleDict(models), batch):
            assert loss.dtype == torch.float32
            run.step(loss, optimizer=name)
    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(not torch.equal(m[0].weight, before[k]) for k, m in models.items())


# -- refused --


def gan(words: str = "") -> tuple[dict[str, nn.Module], dict[str, Any]]:
    models = two_players.gan_models()
    return models, {k: SGD(m.parameters(), 0.1) for k, m in models.items()}


def shared() -> tuple[Any, Any, Any]:
    models, made = gan()
    both = SGD([*models["d"].parameters(), *models["g"].parameters()], 0.1)
    return models, {**made, "both": both}, None


def of_another() -> tuple[Any, Any, Any]:
    models, made = gan()
    return models, made, {"g": StepLR(made["d"], 1)}


def wrapped() -> tuple[Any, Any, Any]:
    models, made = gan()
    return {**models, "g": DistributedDataParallel.__new__(DistributedDataParallel)}, made, None


GIVEN: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], str]] = {
    "a list of models": (
        lambda: (list(gan()[0].values()), gan()[1], None),
        r"given a list as model, but a torch.nn.Module is needed; several are named, \{'g': ",
    ),
    "a tuple of optimizers": (
        lambda: (gan()[0], tuple(gan()[1].values()), None),
        r"given a tuple as optimizer, but a torch.optim.Optimizer is needed; several are named",
    ),
    "another order": (
        lambda: (gan()[1]["d"], gan()[0]["d"], None),
        r"given a SGD as model, but a .* is needed; the order is run.prepare\(model, optimizer",
    ),
    "no model": (lambda: ({}, gan()[1], None), r"given no model \(\{\}\)"),
    "no optimizer": (lambda: (gan()[0], {}, None), r"given no optimizer \(\{\}\)"),
    "a function": (
        lambda: (gan()[0], {"g": SGD, "d": SGD}, None),
        r"given the class SGD as optimizer 'g', but a torch.optim.Optimizer is needed; call it",
    ),
    "a name of a dict": (
        lambda: ({"items": nn.Linear(1, 1)}, {}, None),
        r"models=\{'items': ...\}: this cannot be the name of a model",
    ),
    "a number as a name": (lambda: (gan()[0], {1: None}, None), r"a name is needed, as a string"),
    "a part that nobody trains": (
        lambda: (m := gan()[0], {"g": SGD(m["g"].parameters(), 0.1)}, None),
        r"d.0.weight and 3 more are in none of the optimizers g, so nobody would train it",
    ),
    "parameters in two": (shared, r"is in two optimizers, 'd' and 'both'"),
    "lbfgs": (
        lambda: (m := gan()[0], {k: mh.LBFGS(v.parameters()) for k, v in m.items()}, None),
        r"the optimizer 'g' is LBFGS, which evaluates the loss several times a step",
    ),
    "ddp": (wrapped, r"leave out the lines of DDP"),
    "a schedule for all": (
        lambda: (*(g := gan()), StepLR(g[1]["d"], 1)),
        r"one schedule and several optimizers \(d, g\); say whose it is: schedule=\{'d': ...\}",
    ),
    "a schedule for nobody": (
        lambda: (*(g := gan()), {"x": StepLR(g[1]["d"], 1)}),
        r"schedule=\{'x': ...\} is for an optimizer that there is not: they are d, g",
    ),
    "a schedule of another": (of_another, r"the StepLR .* for 'g' moves the learning rate of ano"),
    "a schedule that is a function": (
        lambda: (*gan(), {"d": lambda o: StepLR(o, 1)}),
        r"given a function as schedule for 'd', but one of torch.optim.lr_scheduler is needed",
    ),
    "a plateau": (
        lambda: (*(g := gan()), {"d": ReduceLROnPlateau(g[1]["d"])}),
        r"ReduceLROnPlateau is stepped by an evaluated metric",
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_models_optimizers_and_schedules_without_a_meaning_are_refused(
    join: Join, case: str
) -> None:
    make, words = GIVEN[case]
    run = join()
    models, made, schedule = make()
    with pytest.raises(mh.TaskError, match=words):
        run.prepare(models, made, (REAL, NOISE), batch=BATCH, schedule=schedule)


def test_schedules_by_name_of_one_optimizer_are_refused(join: Join) -> None:
    run, net = join(), nn.Linear(3, 1)
    optimizer = SGD(net.parameters(), 0.1)
    with pytest.raises(mh.TaskError, match=r"schedules by name and one optimizer without a name"):
        run.prepare(net, optimizer, (REAL, NOISE), schedule={"d": StepLR(optimizer, 1)})
    run.prepare(net.double(), optimizer, (REAL, NOISE), batch=BATCH)
    with pytest.raises(mh.TaskError, match=r"optimizer='d'\), but run.prepare was given one opt"):
        run.step(net(REAL).mean(), optimizer="d")


STEPS: dict[str, tuple[Callable[[loops.Players, Tensor, Tensor], object], str]] = {
    "another name": (
        lambda p, real, noise: p.run.step(p.loss_d(real, p.g(noise)), optimizer="x"),
        r"optimizer='x'\): the optimizers of run.prepare are d, g",
    ),
    "the optimizer itself": (
        lambda p, real, noise: p.run.step(p.d(real).mean(), optimizer=p.made["d"]),
        r"the optimizers of run.prepare are d, g; one of these names is needed",
    ),
    "another model's loss": (
        lambda p, real, noise: p.run.step(p.d(real).mean(), optimizer="g"),
        r"no gradient to any of the optimizer's",
    ),
    "its own step": (
        lambda p, real, noise: p.made["d"].step(),
        r"would step by this rank's gradient alone; call run.step\(loss, optimizer='d'\)",
    ),
    "another optimizer": (
        lambda p, real, noise: SGD(p.d.parameters(), 0.1),
        r"SGD was made over parameters of the run",
    ),
    "parameters added": (
        lambda p, real, noise: p.made["g"].add_param_group({"params": [nn.Parameter(real)]}),
        r"parameters were added to the optimizer after run.prepare",
    ),
    "gradients of the other one": (
        lambda p, real, noise: (p.d(real).mean().backward(), p.run.step(optimizer="g")),
        r"none of its parameters has one \(d.0.weight has\); every run.step clears all gradients",
    ),
    "gradients beside a loss": (
        lambda p, real, noise: (
            p.loss_g(p.g(noise)).backward(),
            p.run.step(p.d(real).mean(), optimizer="d"),
        ),
        r"has a gradient before run.step\(loss\)",
    ),
    "no gradient": (
        lambda p, real, noise: p.run.step(optimizer="d"),
        r"no parameter of the run has one",
    ),
    "a graph of before": (
        lambda p, real, noise: [p.run.step(x, optimizer="d") for x in (p.d(real).mean(),) * 2],
        r"modified by an inplace operation|a second time",
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_that_could_not_be_meant_are_refused(join: Join, case: str) -> None:
    step, words = STEPS[case]
    players = loops.Players(join(), BATCH)
    real, noise = next(iter(players.batches))
    with pytest.raises((mh.TaskError, RuntimeError), match=words):
        step(players, real, noise)


@pytest.mark.parametrize("words", ["accumulate=2", "micro=2"])
def test_a_step_of_several_batches_is_refused_for_one_of_the_optimizers(
    join: Join, words: str
) -> None:
    players = loops.Players(join(words), BATCH)
    with pytest.raises(mh.TaskError, match=rf"{words} makes one step of several batches, but run"):
        players.loop()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            "merge=ensemble",
            r"merge=ensemble averages the class probabilities .* several optimizers",
        ),
        ("merge=skeleton", r"merge=skeleton leaves units out .* several optimizers"),
        ("merge=downpour servers=1", r"merge=downpour is asynchronous .* several optimizers \(d,"),
    ],
)
def test_plans_that_cannot_are_refused_by_name(join: Join, plan: str, words: str) -> None:
    run = join(plan)
    with pytest.raises(mh.ManyhandsError, match=words):
        loops.Players(run, BATCH)
