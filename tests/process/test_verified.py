"""N ranks equal one process on real tasks, up to the order of summation.

What does not equal it is found out. One job for each number of ranks runs all tasks over all
kinds of groups, one after the other: starting processes is what takes time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.cli.verify import verify
from manyhands.cli.verify.comparison import Record, recorded, without_dropout
from manyhands.cli.verify.deviation import measure
from manyhands.core import Layout
from manyhands.entry import load_task, work
from manyhands.plan import words as plan_words
from manyhands.task import Task
from support.paths import EXAMPLES
from support.pooled import start

STEPS = 4
LINKS = {"shared": "aaaa", "gloo": "aaaa", "hierarchical": "aabb"}  # and each rank's host
HOSTS_OF_TWO = {**LINKS, "hierarchical": "ab"}


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


def task(name: str) -> Task:
    """The examples as they are, on fewer samples: in float64 the whole of Fashion-MNIST would be
    read for four steps.
    """
    if name == "batchnorm":
        lenet = task("lenet")
        x, y = lenet.train
        return dataclasses.replace(
            lenet,
            model=convolutions(),
            train=(x[:70], y[:70]),
            batch=11,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        )
    made = load_task(str(EXAMPLES / f"{name}.py"))
    whole = made() if callable(made) else made
    few = {"lenet": 500, "transformer": 90, "uneven_mlp": 461}[name]
    batch = {"lenet": 32, "transformer": 11, "uneven_mlp": 77}[
        name
    ]  # 461 samples and 3 x 77: the second step has 230
    return dataclasses.replace(
        whole, train=tuple(t[:few] for t in whole.train), test=None, batch=batch
    )


TASKS = ("lenet", "transformer", "uneven_mlp", "batchnorm")


def several(folder: str, hosts: dict[str, str], words: Any, options: Options) -> dict[str, Any]:
    """What every rank of the one job does: all tasks over all links."""
    for name in TASKS:
        for link in hosts:
            os.environ["MANYHANDS_HOST"] = hosts[link][int(os.environ["RANK"])]
            where = Path(folder) / f"{name}-{link}"
            where.mkdir(exist_ok=True)
            recorded = dataclasses.replace(
                options, directory=str(where / "run"), callbacks=(Record(str(where), STEPS),)
            )
            work(
                functools.partial(without_dropout, functools.partial(task, name)),
                {**words, "link": link},
                recorded,
            )
    return {}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data_dir: Path | None
) -> Any:
    size, folder = request.param, tmp_path_factory.mktemp("verified")
    with pytest.MonkeyPatch.context() as patch:
        if data_dir is not None:
            patch.setenv("MANYHANDS_DATA", str(data_dir))
        options = Options(name="verify", float64=True, quiet=True)
        hosts = HOSTS_OF_TWO if size == 2 else LINKS
        start(
            functools.partial(several, str(folder), hosts),
            f"data={size} steps={STEPS} save=off",
            options,
        )
        alone = dataclasses.replace(plan_words.parse(f"steps={STEPS} save=off"), layout=Layout())
        references = {
            name: recorded(
                functools.partial(task, name),
                alone,
                dataclasses.replace(options, stands_for=size),
                STEPS,
                folder / name,
            )
            for name in TASKS
        }
    return size, folder, references


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", TASKS)
def test_n_ranks_equal_one_process_over_every_kind_of_group(ran: Any, name: str, link: str) -> None:
    size, folder, references = ran
    ours = [load_file(folder / f"{name}-{link}" / f"rank-{r}.safetensors") for r in range(size)]
    deviation = measure(ours, references[name], rtol=1e-12 if name != "batchnorm" else 1e-11)
    assert deviation.equal, deviation
    assert len([k for k in ours[0] if k.startswith("loss/")]) == STEPS and any(
        k.startswith("gradient/") for k in ours[0]
    )


def test_the_ranks_own_shard_of_the_update_is_the_whole_update_bit_for_bit(ran: Any) -> None:
    """Over shared memory each rank updates its part of one copy, over gloo every rank all of its
    own.
    """
    size, folder, _ = ran
    if size != 2:
        return  # with more ranks the links add up in different orders
    for name in TASKS:
        a, b = (
            load_file(folder / f"{name}-{link}" / "rank-0.safetensors")
            for link in ("shared", "gloo")
        )
        clipped = (
            name == "transformer"
        )  # the norm is a sum over parts there: the same up to its order
        for key in a:
            assert (
                torch.allclose(a[key], b[key], rtol=1e-12, atol=1e-15)
                if clipped
                else torch.equal(a[key], b[key])
            ), (name, key)


# -- the command --

NORMED = """
import torch, manyhands as mh
from torch import nn

def task():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=g)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(6, 8))
    model.add_module("norm", nn.BatchNorm1d(8))
    model.add_module("last", nn.Linear(8, 2))
    return mh.Task(model=model, loss=nn.functional.cross_entropy,
                   train=(x, (x.sum(1) > 0).long()), batch=5,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


def test_the_command_says_equal_for_one_batch_statistics_and_different_with_names_for_local_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(NORMED)
    assert verify(tmp_path / "job.py", ["data=2"], steps=3)
    assert "EQUAL up to the order of summation (bound 1e-12)" in capsys.readouterr().out
    assert not verify(tmp_path / "job.py", ["data=2", "batchnorm=local"], steps=3)
    said = capsys.readouterr().out
    assert (
        "DIFFERENT: more than 1e-12. By module, largest first:" in said
        and "batchnorm=sync equals one process" in said
    )
    modules = [
        line.split()[1]
        for line in said.splitlines()
        if line.startswith("  ") and "e-" in line and len(line.split()) == 2
    ]
    assert {"norm", "last"} <= set(modules)


PLAIN = NORMED.replace("nn.BatchNorm1d(8)", "nn.Tanh()").replace("lr=0.1", "lr=0.1, momentum=0.9")


def test_ranks_that_wait_for_each_other_at_servers_equal_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(PLAIN)
    assert verify(tmp_path / "job.py", ["data=2", "servers=1", "staleness=0"], steps=3)
    assert "EQUAL up to the order of summation (bound 1e-12)" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_that_do_not_wait_for_each_other_at_servers_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(PLAIN)
    assert not verify(tmp_path / "job.py", ["data=2", "servers=1", "merge=downpour"], steps=3)
    said = capsys.readouterr().out
    assert "DIFFERENT" in said and "staleness=0 waits for all and equals one process" in said


def test_a_script_without_a_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('a loop of my own')")
    with pytest.raises(
        mh.PlanError,
        match=r"job\.py defines no task\(\), which verify needs to run it twice; wrap model, data "
        r"and optimizer",
    ):
        verify(tmp_path / "job.py", ["data=2"])


# as many public models have it: float32 inside, whatever the model is; and a neighbour's module
IN_FLOAT32 = """
import torch, manyhands as mh
from torch import nn
from norms import RMSNorm

def task():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=g)
    model = nn.Sequential(nn.Linear(6, 40), RMSNorm(40), nn.Linear(40, 40), nn.Linear(40, 2))
    return mh.Task(model=model, loss=lambda o, t: nn.functional.cross_entropy(o.float(), t),
                   train=(x, (x.sum(1) > 0).long()), batch=5,
                   optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
"""
NORMS = """
import torch
from torch import nn

class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight
"""


def test_a_model_with_float32_inside_is_equal_by_its_own_precision_and_errors_are_still_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "job.py").write_text(IN_FLOAT32)
    (tmp_path / "norms.py").write_text(NORMS)
    assert verify(tmp_path / "job.py", ["data=3"], steps=3)
    said = capsys.readouterr().out
    assert "the model computes partly in float32: one rounding of every operation moves" in said
    assert "EQUAL up to rounding (bounds: loss " in said
    assert not verify(tmp_path / "job.py", ["data=2", "compress=fp16"], steps=3)
    said = capsys.readouterr().out
    assert "DIFFERENT: more than loss " in said and "(loss)" in said
    assert "compression changes the method on purpose" in said


def test_ranks_start_from_the_bits_that_one_process_with_more_threads_starts_from(
    tmp_path: Path,
) -> None:
    def task() -> Task:
        def model() -> nn.Module:
            made = nn.Linear(300, 400)
            nn.init.orthogonal_(made.weight)  # by a QR decomposition
            return made

        data = (torch.ones(8, 300), torch.ones(8, 400))
        still = lambda p: torch.optim.SGD(p, lr=0.0)
        return Task(model=model, loss=nn.functional.mse_loss, train=data, batch=2, optimizer=still)

    before, weights = torch.get_num_threads(), []
    try:
        for words in ("threads=2 steps=1", "data=2 threads=1 steps=1"):
            directory = tmp_path / words
            mh.train(task, words, directory=directory, quiet=True)
            model = nn.Linear(300, 400)
            weights.append(mh.load(directory, model).weight.detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*weights)
