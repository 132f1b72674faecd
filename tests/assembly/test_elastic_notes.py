"""Notes of an elastic run: what a process that replaces another knows after it has read one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from manyhands.assembly.callbacks.callback_state import CallbackState
from manyhands.assembly.elastic.notes import MOST_BYTES, enter, make_note
from manyhands.callbacks import EarlyStopping
from manyhands.core import Position
from manyhands.data.step_claims import StepClaims
from manyhands.split.data import DataSplit
from manyhands.trainer_parts import Milestones

START = Position()


def trainer(at: Position = START, model: torch.Tensor | None = None) -> Any:
    split = DataSplit(10, 2, 2, 0, 1)
    claims = StepClaims(split, at, lambda limit: None, lambda: None)
    held = {"w": torch.zeros(3)}
    return SimpleNamespace(
        position=at,
        limits=SimpleNamespace(claims=claims),
        round=0,
        metrics={},
        done=Milestones(0, 0, -1),
        replica=SimpleNamespace(load=lambda values: held.update(values), held=held),
        active=SimpleNamespace(consensus=lambda *_: None if model is None else {"w": model}),
        group=None,
        __post_init__=lambda: None,
    )


def waiting(evaluations: int) -> tuple[EarlyStopping, CallbackState]:
    stopping = EarlyStopping("-loss")
    state = CallbackState([stopping])  # of a run that begins
    stopping.waited = evaluations
    return stopping, state


def test_a_replacement_goes_on_where_the_others_are() -> None:
    old = trainer(Position(2, 4, 12))
    old.round, old.metrics, old.done = 9, {"accuracy": 0.5}, Milestones(3, 8, 8)
    buffers = [torch.tensor([1.0, 2.0]), torch.tensor(3)]
    note = make_note(cast(Any, old), buffers, waiting(2)[1])

    new, mine = trainer(model=torch.ones(3)), [torch.zeros(2), torch.tensor(0)]
    stopping, state = waiting(0)
    enter(cast(Any, new), note, mine, state)
    assert stopping.waited == 2
    assert new.limits.claims.position == new.limits.claims.latest == Position(2, 4, 12)
    assert (new.round, new.metrics, new.done) == (9, {"accuracy": 0.5}, Milestones(3, 8, 8))
    assert torch.equal(mine[0], buffers[0]) and int(mine[1]) == 3
    assert torch.equal(new.replica.held["w"], torch.ones(3)), "the model comes from the servers"


def test_large_buffers_stay_behind() -> None:
    large = [torch.ones(MOST_BYTES // 4 + 1)]
    note = make_note(cast(Any, trainer()), large, CallbackState([]))
    assert len(note) < 1000
    mine = [torch.zeros_like(large[0])]
    enter(cast(Any, trainer()), note, mine, CallbackState([]))
    assert not mine[0].any()
