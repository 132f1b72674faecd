"""mh.LBFGS over real processes: N ranks take the steps of one, resume, and share the work.

One job of two processes runs all plans, one after the other: starting processes takes the time.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.cli.verify.comparison import Record, recorded
from manyhands.cli.verify.deviation import measure
from manyhands.core import Layout
from manyhands.entry import work
from manyhands.plan import words as plan_words
from manyhands.recover.checkpoint import Checkpoints
from support.pooled import start
from support.small_task import saved_weights

STEPS = 6
N = 101  # two ranks have 51 and 50 samples
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 6, generator=G), torch.randint(3, (N,), generator=G)

# what one process computes, in the micro-batches of the plan
EQUAL = {
    "shared": {},
    "gloo": {"link": "gloo"},
    "micro": {"micro": 3},
    "part": {"batch": 20},
    "balance": {"micro": 12},
    "balance over gloo": {"micro": 12, "link": "gloo"},
    "shard": {"data": 1, "shard": 2},
    "zero 1": {"data": 1, "shard": 2, "zero": 1},
    "tensor": {"data": 1, "tensor": 2},
    "pipe": {"data": 1, "pipe": 2, "micro": 4},
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def task(balance: bool = False, model: Any = network, **given: Any) -> mh.Task:
    known: dict[str, Any] = {
        "model": model(),
        "loss": cross_entropy,
        "train": (X, Y),
        "batch": N,
        "optimizer": lambda p: mh.LBFGS(p, history=4, balance=balance),
    }
    return mh.Task(**{**known, **given})


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def dropping_balanced() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared": ({}, {}),
    "gloo": ({"link": "gloo"}, {}),
    "dropout and BatchNorm": ({}, {"model": dropping}),
    "shard": ({"data": 1, "shard": 2}, {}),
    "pipe": ({"data": 1, "pipe": 2}, {}),
}


# -- a logistic regression whose optimum is known --

L2 = 1e-3


def cancer() -> tuple[Tensor, Tensor]:
    x, y = load_breast_cancer(return_X_y=True)
    return torch.tensor((x - x.mean(0)) / x.std(0)), torch.tensor(y, dtype=torch.float64)


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    margins = model(x).squeeze(-1) * (2 * y - 1)
    return softplus(-margins).mean() + L2 / 2 * model.weight.square().sum()


def regression() -> mh.Task:
    torch.manual_seed(0)
    return mh.Task(
        model=nn.Linear(30, 1).double(),
        train=cancer(),
        step=penalised,
        batch=569,
        optimizer=lambda p: mh.LBFGS(p, balance=True),
    )


def gradient_at(weights: dict[str, Tensor]) -> Tensor:
    model = nn.Linear(30, 1).double()
    model.load_state_dict(weights)
    penalised(model, cancer()).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


# -- the job --


def several(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    """What both ranks do."""
    for name, more in EQUAL.items():
        where = Path(folder) / name
        where.mkdir(exist_ok=True)
        work(
            functools.partial(task, balance=name.startswith("balance")),
            {**words, "save": "off", "steps": STEPS, **more},
            dataclasses.replace(
                options,
                float64=True,
                directory=str(where / "run"),
                callbacks=(Record(str(where), True),),
            ),
        )
    for name, (more, given) in RESUMED.items():
        whole, half = (
            dataclasses.replace(options, directory=str(Path(folder) / f"{name} {kind}"))
            for kind in ("whole", "half")
        )
        make = functools.partial(task, **given)
        given_words = {**words, **more}
        work(make, {**given_words, "steps": 12, "save": 12}, whole)
        work(make, {**given_words, "steps": 5, "save": 5}, half)
        resumed = dataclasses.replace(half, resume=True)
        work(make, {**given_words, "steps": 12, "save": 12}, resumed)
    where = dataclasses.replace(options, directory=str(Path(folder) / "optimum"))
    work(regression, {**words, "steps": 60, "save": 60, "micro": 20}, where)
    drops = dataclasses.replace(options, directory=str(Path(folder) / "balanced dropout"))
    make = functools.partial(task, balance=True, model=dropping_balanced)
    return work(make, {**words, "steps": 10, "save": 10, "micro": 20}, drops)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("lbfgs")
    start(functools.partial(several, str(found)), "data=2 threads=1", Options(quiet=True))
    return found


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_take_the_steps_of_one_process(folder: Path, tmp_path: Path, name: str) -> None:
    more = EQUAL[name]
    plan = plan_words.parse({"steps": STEPS, "save": "off", "micro": more.get("micro", 1)})
    if "batch" in more:
        plan = dataclasses.replace(plan, batch=more["batch"])
    feeds = 2 if {"data", "shard"} & more.keys() in ({"data", "shard"}, set()) else 1
    options = Options(name="verify", float64=True, quiet=True, stands_for=feeds)
    alone = dataclasses.replace(plan, layout=Layout())
    theirs = recorded(task, alone, options, True, tmp_path / "alone")
    ours = [load_file(folder / name / f"rank-{r}.safetensors") for r in range(2)]
    deviation = measure(ours, theirs, rtol=1e-12)
    assert deviation.equal, deviation
    assert len([k for k in ours[0] if k.startswith("loss/")]) == STEPS


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_with_the_same_bits(folder: Path, name: str) -> None:
    whole, half = (
        Checkpoints(folder / f"{name} {kind}" / "checkpoints").latest()
        for kind in ("whole", "half")
    )
    assert whole is not None and half is not None and whole.round == half.round == 12
    assert whole.meta["optimizer"]["groups"] == half.meta["optimizer"]["groups"]
    for kind in ("params", "optimizer", "rng"):
        ours, theirs = getattr(whole, kind), getattr(half, kind)
        assert ours.keys() == theirs.keys(), kind
        assert all(torch.equal(ours[k], theirs[k]) for k in ours), kind


@pytest.mark.parametrize("name", ["shared", "shard"])
def test_one_process_goes_on_from_the_histories_of_two(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """In float32: after some steps rounding is all that differs."""
    run, half = tmp_path / "run", folder / f"{name} half"
    shutil.copytree(half / "checkpoints" / "step-00000005", run / "checkpoints" / "step-00000005")
    shutil.copy(half / "plan.toml", run)
    words = {"data": 1, "shard": 1, "link": "auto", "steps": 12, "save": 12}
    mh.train(task, words, directory=run, resume=True, quiet=True)
    ours, theirs = saved_weights(run), saved_weights(folder / f"{name} whole")
    for key in theirs:
        assert torch.allclose(ours[key], theirs[key], rtol=1e-3, atol=1e-4), key


def test_two_ranks_that_share_the_work_reach_the_optimum(folder: Path) -> None:
    """The objective is convex: where its gradient vanishes there is its one minimum."""
    weights = saved_weights(folder / "optimum")
    assert float(gradient_at(weights).abs().max()) < 1e-6
    x, y = cancer()
    margins = x @ weights["weight"][0] + weights["bias"]
    assert np.mean((margins > 0).numpy() == y.numpy().astype(bool)) > 0.98


def test_dropout_of_shards_is_the_same_in_every_evaluation(folder: Path) -> None:
    """Else the searches would find no decrease, and the weights would stay."""
    weights = saved_weights(folder / "balanced dropout")
    model = dropping_balanced().eval()
    model.load_state_dict(weights)
    assert cross_entropy(model(X), Y).item() < 1.0


@pytest.mark.parametrize(
    ("words", "given", "says"),
    [
        ("data=2", {}, r"a step has 1 shards of 101 samples for 2 ranks .* set micro=20, for 10"),
        ("pipe=2 micro=8", {}, r"the ranks of one replica \(pipe=, tensor=, shard=\)"),
        ("data=2 micro=8 straggler=rebalance", {}, "straggler=rebalance with LBFGS"),
        ("data=2 micro=8 compile=true", {}, "compile=true with LBFGS"),
        ("data=2 micro=8", {"model": dropping}, "BatchNorm could not take statistics"),
    ],
)
@pytest.mark.slow
def test_what_does_not_go_with_claimed_shards_is_refused(
    tmp_path: Path, words: str, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(mh.LaunchError, match=says):
        make = functools.partial(task, balance=True, **given)
        mh.train(make, words + " steps=2", directory=tmp_path / "run", quiet=True)
