"""Every merge strategy and every codec resumes from a checkpoint with each rank's own state."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.core import Group, Snapshot
from manyhands.entry import work
from manyhands.exchange.compression import CODECS
from manyhands.merge import STRATEGIES
from manyhands.recover.checkpoint import Checkpoints
from support.pooled import start

SIZE, BLOCK = 3, 4
G = torch.Generator().manual_seed(0)
X, Y = (
    torch.randn(101, 30, generator=G),
    torch.randint(3, (101,), generator=G),
)  # an uneven last batch


def blocks(rule: str) -> str:
    fields = {f.name for f in dataclasses.fields(STRATEGIES[rule])}
    short = {
        "period": BLOCK // 2 if "distil" in fields else BLOCK,
        "distil": BLOCK // 2,
        "fragments": 2,
        "tau": 1,
        "f": 0,
    }
    return " ".join([f"merge={rule}", *(f"merge.{k}={v}" for k, v in short.items() if k in fields)])


CASES = {
    name: blocks(name)
    for name, rule in STRATEGIES.items()
    if rule.link is Group and not rule.shares_parameters  # these do not repeat bit for bit
}
CASES |= {f"compress={codec}": f"compress={codec}" for codec in CODECS}
CASES |= {
    "topk of updates": "compress=topk compress.density=0.1 merge=local_sgd merge.period=4",
    "momentum codec": "compress=topk compress.density=0.1 compress.momentum=0.9",
    "ring": "algorithm=ring",
    "changed strategy": "then=easgd then.period=4 at=step:8",
}


def make(case: str) -> mh.Task:
    def optimizer(p: Any) -> torch.optim.Optimizer:
        return (
            torch.optim.SGD(p, lr=0.05)
            if case == "momentum codec"
            else torch.optim.Adam(p, lr=0.01)
        )

    model = nn.Sequential(nn.Linear(30, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 3))
    return mh.Task(
        model=model, loss=nn.functional.cross_entropy, train=(X, Y), optimizer=optimizer, batch=4
    )


def one(case: str, folder: Path, steps: int, words: dict[str, Any], options: Options) -> None:
    given = dict(word.split("=") for word in CASES[case].split())
    work(
        functools.partial(make, case),
        {**words, **given, "steps": steps},
        dataclasses.replace(options, directory=str(folder)),
    )


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    for case in CASES:
        one(case, Path(folder) / case / "whole", 4 * BLOCK, words, options)
        one(case, Path(folder) / case / "halves", 2 * BLOCK, words, options)
        one(
            case,
            Path(folder) / case / "halves",
            4 * BLOCK,
            words,
            dataclasses.replace(options, resume=True),
        )
    return {}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    start(
        functools.partial(every, str(folder)),
        f"data={SIZE} save=epoch timeout_s=60",
        Options(quiet=True),
    )
    return folder


def last(run: Path) -> Snapshot:
    found = Checkpoints(run / "checkpoints").latest()
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_half_of_the_steps_and_the_other_half_are_all_of_them_to_the_bit(
    ran: Path, case: str
) -> None:
    whole, halves = last(ran / case / "whole"), last(ran / case / "halves")
    assert whole.position == halves.position and whole.round == halves.round
    for kind in ("params", "optimizer", "state", "ranks"):
        a, b = getattr(whole, kind), getattr(halves, kind)
        assert a.keys() == b.keys(), kind
        different = [k for k in a if not torch.equal(a[k], b[k])]
        assert not different, f"{kind}: {different}"


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_alone_from_the_model_that_the_ranks_stood_for(
    ran: Path, case: str, tmp_path: Path
) -> None:
    shutil.copytree(ran / case / "whole", tmp_path / "run")
    before = last(tmp_path / "run")
    alone = Options(quiet=True, resume=True)
    one(
        case, tmp_path / "run", 4 * BLOCK, {}, alone
    )  # nothing left to do: the model is what it was
    assert all(torch.equal(v, last(tmp_path / "run").params[k]) for k, v in before.params.items())
    said = (tmp_path / "run" / "events" / "rank-0.jsonl").read_text()
    feedback = any("/codec/error/" in key for key in before.ranks)
    assert ("the error feedback in the checkpoint is dropped" in said) == feedback
    one(case, tmp_path / "run", 5 * BLOCK, {}, alone)
    after = last(tmp_path / "run")
    assert after.position.steps == 5 * BLOCK
    assert any(not torch.equal(v, after.params[k]) for k, v in before.params.items())


def test_what_differs_between_ranks_is_saved_for_each_and_what_does_not_only_once(
    ran: Path,
) -> None:
    assert not last(ran / "all_reduce" / "whole").ranks
    local = last(ran / "local_sgd" / "whole").ranks
    assert {k.split("/")[1] for k in local} == {"optimizer"}, (
        "parameters agree after a merge, Adam's averages do not"
    )
    elastic = last(ran / "easgd" / "whole")
    assert f"{SIZE - 1}/param/float32" in elastic.ranks and "*/param/float32" not in elastic.ranks
