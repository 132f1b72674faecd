"""The composite of several named optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.errors import TaskError
from manyhands.replica.several_optimizers.named_optimizers import (
    NamedOptimizers,
    combined,
    kind,
    members,
    named_optimizers,
    owners,
)
from manyhands.replica.update import can_slice, prime


def two() -> tuple[nn.ModuleDict, NamedOptimizers]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.Linear(2, 3)})
    made = named_optimizers(
        model, {"b": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "a": torch.optim.Adam}
    )
    return model, made


def step(model: nn.Module, optimizer: NamedOptimizers) -> dict[str, Any]:
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {k: not torch.equal(v, before[k]) for k, v in model.state_dict().items()}


def test_the_active_optimizer_steps_alone_and_none_means_all() -> None:
    model, optimizer = two()
    optimizer.active = "a"
    assert step(model, optimizer) == {
        "b.weight": False,
        "b.bias": False,
        "a.weight": True,
        "a.bias": True,
    }
    optimizer.active = None
    assert all(step(model, optimizer).values())


def test_groups_and_state_are_shared_not_copied_also_after_loading() -> None:
    model, optimizer = two()
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer)
    then = {k: v.clone() for k, v in model.state_dict().items()}
    again = copy.deepcopy(saved)
    optimizer.load_state_dict(again)
    for member in members(optimizer):
        assert member.state is optimizer.state
        for group in member.param_groups:
            assert any(group is ours for ours in optimizer.param_groups)
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.named["a"].param_groups[0]["lr"] == 0.0, "names in alphabetical order"
    moved = step(model, optimizer)
    assert moved["b.weight"] and not moved["a.weight"]
    assert not torch.equal(model.state_dict()["b.weight"], then["b.weight"])


def test_it_is_sliced_where_each_of_them_can_be() -> None:
    _, optimizer = two()
    assert can_slice(optimizer)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    other = named_optimizers(model, {"a": torch.optim.Adam, "b": torch.optim.Adagrad})
    assert not can_slice(other)
    other.load_state_dict(other.state_dict())  # Adagrad looks at all of its state


def test_state_is_made_for_all_of_them_whichever_is_active() -> None:
    model, optimizer = two()
    optimizer.active = "a"
    assert len(prime(optimizer)) == 4
    assert "momentum_buffer" in optimizer.state[model["b"].weight]


def test_it_knows_whose_a_parameter_is_and_names_all_classes() -> None:
    model, optimizer = two()
    assert owners(optimizer)[id(model["a"].bias)] == "a"
    assert owners(optimizer.named["a"]) == {}
    assert kind(optimizer) == "a: Adam, b: SGD" and kind(optimizer.named["b"]) == "SGD"


def test_a_copy_steps_like_the_original() -> None:
    _, optimizer = two()
    twin = copy.deepcopy(optimizer)
    twin.active = "b"
    assert optimizer.active is None and list(twin.named) == ["a", "b"]
    assert twin.named["a"].state is twin.state and twin.param_groups is not optimizer.param_groups


def test_every_parameter_that_trains_is_in_exactly_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sgd = torch.optim.SGD
    with pytest.raises(TaskError, match=r"1\.weight and 1 more are in none of the optimizers 0"):
        named_optimizers(model, {"0": sgd})
    with pytest.raises(TaskError, match=r"0\.weight is in two optimizers, 'x' and 'y'"):
        combined(model, {"x": sgd(model.parameters()), "y": sgd(model[0].parameters())})
    with pytest.raises(TaskError, match=r"names no part of the model; its parts are 0, 1"):
        named_optimizers(model, {"0": sgd, "2": sgd})
    model[1].requires_grad_(False)
    named_optimizers(model, {"0": sgd})
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight  # type: ignore[union-attr,assignment]
    with pytest.raises(TaskError, match=r"a\.weight is in two optimizers, 'a' and 'b'"):
        named_optimizers(tied, {"a": sgd, "b": sgd})


def test_line_searches_and_what_is_no_optimizer_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TaskError, match="'0' is LBFGS"):
        named_optimizers(model, {"0": torch.optim.LBFGS})
    with pytest.raises(TaskError, match="'0' returned a list"):
        named_optimizers(model, {"0": list})  # type: ignore[dict-item]
