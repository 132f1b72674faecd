"""Runs with embedding tables, in this process or on a server.

What a checkpoint holds of the tables, how a refused push ends a run, and what the exchange with
servers costs in the counters that groups have.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import Goal, Snapshot
from manyhands.observe.events import read
from manyhands.observe.race.results import follow
from manyhands.recover.checkpoint import Checkpoints
from support.compare import same_tensors
from support.saved_tables import assert_same_rows, saved_rows

N = 24
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 4, generator=G), torch.randn(N, 1, generator=G)


def train(directory: Path, words: str, resume: bool = False, **changed: Any) -> mh.Result:
    known: dict[str, Any] = dict(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        loss=nn.functional.mse_loss,
        train=(X, Y),
        batch=4,
        epochs=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    )
    return mh.train(
        lambda: mh.Task(**{**known, **changed}),
        words,
        directory=directory,
        resume=resume,
        quiet=True,
    )


def saved(directory: Path) -> Snapshot:
    found = Checkpoints(directory / "checkpoints").latest()
    assert found is not None
    return found


# -- checkpoints --


def test_what_adaptive_compensation_keeps_is_saved_by_parameter_and_goes_on(tmp_path: Path) -> None:
    words = "data=1 servers=1 merge=dc_asgd merge.adaptive=true"
    train(tmp_path / "whole", words)
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    last = Checkpoints(tmp_path / "halves" / "checkpoints").all()[-1]
    shutil.rmtree(last)  # as if it had ended after the first of two epochs
    half = saved(tmp_path / "halves")
    kept = {k: v for k, v in half.state.items() if k.startswith("served/")}
    assert {k: v.shape for k, v in kept.items()} == {
        f"served/compensate/mean_square/{k}": v.shape for k, v in half.params.items()
    }
    assert all(float(v.min()) >= 0 and float(v.max()) > 0 for v in kept.values())
    train(tmp_path / "halves", words, resume=True)
    whole, halves = saved(tmp_path / "whole"), saved(tmp_path / "halves")
    assert (
        same_tensors(halves.state, whole.state)
        and same_tensors(halves.params, whole.params)
        and same_tensors(halves.optimizer, whole.optimizer)
    )
    train(tmp_path / "halves", "data=1 servers=1 merge=downpour epochs=3", resume=True)
    assert not any(k.startswith("served/") for k in saved(tmp_path / "halves").state), (
        "another rule has no use for it"
    )


class Alike(nn.Module):
    """Tables of which the name of one is the beginning of the other's."""

    def __init__(self) -> None:
        super().__init__()
        names = ("a", "a/b", "a/state")
        self.tables = nn.ModuleList(
            [mh.Embedding(name, 2 + i, optimizer="adagrad", lr=0.1) for i, name in enumerate(names)]
        )
        self.last = nn.Linear(9, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([table(ids) for table in self.tables], 1))
        return out


def test_tables_whose_names_begin_alike_come_back_each_its_own(tmp_path: Path) -> None:
    task = {"model": Alike, "train": (torch.arange(N) % 7, Y)}
    train(tmp_path / "whole", "epochs=2", **task)
    train(tmp_path / "halves", "epochs=1", **task)
    train(tmp_path / "halves", "epochs=2", resume=True, **task)
    whole, halves = saved(tmp_path / "whole"), saved(tmp_path / "halves")
    assert same_tensors(halves.params, whole.params)
    rows = saved_rows(tmp_path / "whole")
    assert rows.keys() == {"a", "a/b", "a/state"}
    assert_same_rows(saved_rows(tmp_path / "halves"), rows)


# -- pushes that are refused --


class Rows(nn.Module):
    def __init__(self, rule: str = "sgd") -> None:
        super().__init__()
        self.rows, self.last = mh.Embedding("rows", 2, optimizer=rule, lr=0.1), nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.rows(ids))
        return out


def steep(outputs: Tensor, target: Tensor) -> Tensor:
    """0, and its gradient is 0 times infinity."""
    return (outputs * 0).sqrt().sum()


@pytest.mark.parametrize("words", ["servers=1 merge=downpour", "", "servers=1"])
def test_a_gradient_that_is_not_finite_ends_the_run_as_diverged(tmp_path: Path, words: str) -> None:
    """Of the model; of rows; of rows whose push nobody waits for, so that it is refused when its
    round is over.
    """
    task: dict[str, Any] = (
        {} if "merge" in words else {"model": Rows, "train": (torch.arange(N), Y)}
    )
    with pytest.raises(
        mh.Diverged, match=r"round 1: table '.*not finite.*there is no checkpoint yet"
    ):
        train(tmp_path, f"data=1 steps=1 {words}", loss=steep, **task)


class Stubborn:
    """A rule of one's own that says words which another error uses."""

    state: ClassVar[dict[str, str]] = {}

    def update(self, values: Any, grads: Any, state: Any, lr: float) -> None:
        raise ArithmeticError("the moon is not finite")


def test_any_other_refusal_is_told_as_what_it_is_whatever_its_words(tmp_path: Path) -> None:
    with pytest.raises(mh.StoreError, match="the moon is not finite"):
        train(
            tmp_path,
            "data=1",
            model=lambda: Rows(f"{__name__}:Stubborn"),
            train=(torch.arange(N), Y),
        )


# -- what it costs --


def test_bytes_and_waits_of_servers_are_in_the_accounts_of_a_race_and_in_the_progress(
    tmp_path: Path,
) -> None:
    words = "data=1 servers=1 merge=downpour save=off steps=6"
    result = train(tmp_path, words, test=(X, Y))
    course = follow(tmp_path, 0, Goal("loss", 0.1, at_most=True), N)
    numbers = 32 + 16 + 16 + 16  # four parameters, each to the end of a cache line
    assert result.rounds == 6 and course.sent_bytes == 6 * 2 * 4 * numbers, (
        "the model pulled and a gradient pushed, each step"
    )
    assert 0 < course.wait_share < 1
    names = {e.name for e in read(tmp_path) if e.nbytes or e.seconds}
    assert {"pull", "push", "deal"} <= names
    shares = [
        e.value["exchange_share"]
        for e in read(tmp_path)
        if e.name == "progress" and isinstance(e.value, dict)
    ]
    assert shares and max(shares) > 0


def test_rows_of_embeddings_are_counted_too_also_those_fetched_ahead(tmp_path: Path) -> None:
    train(tmp_path, "data=1 servers=1 save=off", model=Rows, train=(torch.arange(N), Y))
    events = read(tmp_path)
    row = 2 * 4 + 8  # and its id
    assert sum(e.nbytes for e in events if e.name == "push") == 2 * N * row
    assert sum(e.nbytes for e in events if e.name == "pull") == (2 * N + 4) * row, (
        "with a batch for the step after the last"
    )
