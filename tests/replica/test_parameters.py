"""Parameters whose memory user code replaces are trained on from their new values, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.exchange.inproc import World
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import SliceUpdate
from support.compare import assert_tensors_close
from support.replicas import Mlp, memory, mlp, rows, sgd, squared, weights

Change = Callable[[Mlp], object]


def halve_data(model: Mlp) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def halve_vector(model: Mlp) -> None:
    half = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(half, model.parameters())


def transpose(model: Mlp) -> None:
    model.middle.weight.data = model.middle.weight.data.T


def sliced(model: nn.Module, next_loss: Callable[[], MicroLoss], **options: Any) -> ModuleReplica:
    """Over ranks of one host the optimizer steps slices of the flat vectors."""
    flat = FlatParameters(model, memory, 2**20, **options)
    update = SliceUpdate(flat, model, sgd(model.parameters()), lambda v: [slice(0, len(v))])
    return ModuleReplica(flat, update, next_loss, nominal=4)


def train(model: Mlp, change: Change, **options: Any) -> ModuleReplica:
    """Like a user's own loop, which changes parameters after the window has started."""
    steps = iter([None, change, None])

    def next_loss() -> MicroLoss:
        if (now := next(steps)) is not None:
            now(model)
        return MicroLoss(squared(model, rows(4)), 4, True)

    mine = sliced(model, next_loss, **options)
    for _ in range(3):
        mine.backward()
        _ = mine.grads
        mine.step()
    return mine


@pytest.mark.parametrize("change", [halve_data, halve_vector, transpose])
def test_replaced_memory_is_trained_on_as_by_plain_torch(change: Change) -> None:
    ours, theirs = mlp(), mlp()
    mine = train(ours, change)
    optimizer = sgd(theirs.parameters())
    for step in range(3):
        if step == 1:
            change(theirs)
        optimizer.zero_grad()
        squared(theirs, rows(4)).backward()
        optimizer.step()
    assert_tensors_close(weights(ours), weights(theirs))
    assert all(v.parameter.data_ptr() == v.value.data_ptr() for v in mine.flat.views)


def test_between_rounds_a_strategy_sees_the_new_values() -> None:
    model = mlp()
    mine = sliced(model, lambda: MicroLoss(None, 0, True))
    halve_data(model)
    assert torch.equal(mine.params["float64"][:35], model.first.weight.detach().flatten())
    halve_data(model)
    with mine.holding({k: torch.zeros_like(v) for k, v in mine.flat.values.items()}):
        assert not model.first.weight.any()
    assert model.first.weight.any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.float(), "first.weight became float32 .* run trains it as float64"),
        (
            lambda m: setattr(m.last.weight, "data", torch.zeros(2, 7).double()),
            r"last.weight became float64 \(2, 7\)",
        ),
        (
            lambda m: setattr(m.last, "weight", nn.Parameter(m.last.weight.detach().clone())),
            "last.weight was replaced by another after the start",
        ),
        (
            lambda m: m.load_state_dict(weights(m), assign=True),
            "first.weight was replaced by another after the start",
        ),
    ],
    ids=["dtype", "shape", "parameter", "assign"],
)
def test_what_cannot_be_taken_over_is_refused(change: Change, says: str) -> None:
    model = mlp()
    mine = sliced(model, lambda: MicroLoss(None, 0, True))
    change(model)
    with pytest.raises(mh.TaskError, match=says):
        mine.backward()


def test_one_copy_for_several_ranks_is_changed_in_place_only() -> None:
    with pytest.raises(mh.TaskError, match="ranks share one copy of it, which only rank 0"):
        train(mlp(), halve_data, allocate_values=memory)


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_own_slices_refuse_replaced_memory(stage: int) -> None:
    def main(group: Any) -> str:
        model = mlp()
        flat = ShardedParameters(model, group, stage, allocate=memory)
        flat.take_back()
        halve_data(model)
        try:
            flat.take_back()
        except mh.TaskError as e:
            return str(e)
        return ""

    assert all("each rank trains its slice of it" in said for said in World(2).run(main))


def test_the_check_keeps_tied_weights_and_empty_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
            self.two.weight, self.none = self.one.weight, nn.Parameter(torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(self.one(x)).sum(1)
            return out

    model = Tied().double()
    mine = sliced(model, lambda: MicroLoss(squared(model, rows(4)), 4, True))
    before = weights(model)
    mine.backward()
    _ = mine.grads
    mine.step()
    assert not torch.equal(before["one.weight"], model.one.weight)
