"""Every merge strategy over real processes: the same numbers over every kind of group.

Also the same bits through a checkpoint. All strategies of a kind of group run in one job, one
after the other: starting processes costs more than any of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.core import Group
from manyhands.entry import work
from manyhands.launch.environment import process_info
from manyhands.merge import STRATEGIES
from manyhands.recover.checkpoint import Checkpoints
from support.pooled import start

SIZE, BATCH, EPOCHS = 3, 4, 3
N = (
    8 * SIZE * BATCH - 10
)  # eight steps an epoch, two blocks of four; in the last one rank 2 has no sample
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 6, generator=G, dtype=torch.float64)
Y = (X @ torch.randn(6, 3, generator=G, dtype=torch.float64)).argmax(1)
OPTIONS = {
    "streaming_diloco": {"period": 4, "fragments": 2, "tau": 1},
    "ensemble": {"period": 3, "distil": 1},
}
LINKS, RESUMED = ("shared", "gloo"), "shared"
# those over servers: test_strategies_over_servers.py; those in one memory, whose runs do not
# repeat: test_hogwild_process.py
RULES = [
    name for name, rule in STRATEGIES.items() if rule.link is Group and not rule.shares_parameters
]
every_rule = pytest.mark.parametrize("name", RULES)


def make() -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double(),
        loss=nn.functional.cross_entropy,
        train=(X, Y),
        test=(X, Y),
        metrics={"accuracy": mh.accuracy},
        batch=BATCH,
        epochs=EPOCHS,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )


def words_of(name: str) -> dict[str, Any]:
    has_period = "period" in {f.name for f in dataclasses.fields(STRATEGIES[name])}
    options: dict[str, Any] = OPTIONS.get(name, {"period": 4} if has_period else {})
    return {"merge": name, **{f"merge.{k}": v for k, v in options.items()}}


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    """Each strategy unbroken, and over one kind of group also stopped and resumed."""
    results: dict[str, Any] = {}
    for name in RULES:
        said = {**words, **words_of(name)}
        whole = dataclasses.replace(options, directory=f"{folder}/{name}/whole")
        results[name] = {"whole": work(make, said, whole)}
        if words["link"] != RESUMED:  # what is saved and read back knows no link
            continue
        halves = dataclasses.replace(options, directory=f"{folder}/{name}/halves")
        work(make, {**said, "epochs": 1}, halves)
        results[name]["halves"] = work(
            make, {**said, "epochs": EPOCHS}, dataclasses.replace(halves, resume=True)
        )
    if process_info().rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    return {}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {link: tmp_path_factory.mktemp(link) for link in LINKS}
    for link, folder in folders.items():
        start(
            functools.partial(every, str(folder)),
            f"data={SIZE} link={link} timeout_s=60",
            Options(quiet=True),
        )
    return folders


def saved(folder: Path) -> dict[str, Tensor]:
    found = Checkpoints(folder / "checkpoints").latest()
    assert found is not None
    return found.params


def result(folder: Path, name: str, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())[name][run]
    return found


def loss_of(params: dict[str, Tensor]) -> float:
    net: Any = make().model
    model = net()
    model.load_state_dict(params)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(X), Y))


@every_rule
@pytest.mark.parametrize("link", LINKS)
def test_it_learns_and_saves_the_model_that_was_evaluated(
    ran: dict[str, Path], name: str, link: str
) -> None:
    metrics = result(ran[link], name, "whole")["metrics"]
    assert metrics["loss"] < 0.8, "three classes guessed cost 1.1"
    assert loss_of(saved(ran[link] / name / "whole")) == pytest.approx(metrics["loss"], rel=1e-9)


@every_rule
def test_both_kinds_of_group_give_the_same_numbers(ran: dict[str, Path], name: str) -> None:
    shared, gloo = (saved(ran[link] / name / "whole") for link in LINKS)
    for key in shared:
        torch.testing.assert_close(
            shared[key], gloo[key], rtol=1e-9, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}"
        )


@every_rule
def test_a_run_that_was_stopped_and_resumed_ends_with_the_bits_of_one_that_was_not(
    ran: dict[str, Path], name: str
) -> None:
    whole, halves = (saved(ran[RESUMED] / name / run) for run in ("whole", "halves"))
    second = result(ran[RESUMED], name, "halves")
    assert round(second["samples_per_s"] * second["seconds"]) == (EPOCHS - 1) * N, (
        "it did go on, not begin again"
    )
    assert whole.keys() == halves.keys() and all(torch.equal(whole[k], halves[k]) for k in whole)
