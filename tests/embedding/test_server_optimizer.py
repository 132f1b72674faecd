"""Torch optimizers as server optimizers: servers take over their state.

Also where a parameter has had no gradient yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Table
from manyhands.embedding.server_optimizer import flat_state, named_state, server_optimizer_of
from manyhands.replica.flat import FlatParameters
from manyhands.server.local_store import LocalStore
from support.replicas import memory

MAKES = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used, self.spare = (nn.Linear(5, 2).double() for _ in range(2))

    def loss(self, step: int, both: bool) -> Tensor:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        out: Tensor = self.used(x).square().mean()
        return out + self.spare(x).square().mean() if both else out


def plain_steps(model: Spare, optimizer: Any, steps: range, both: bool) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        model.loss(step, both).backward()
        optimizer.step()


@pytest.mark.parametrize("make", MAKES)
def test_servers_take_over_momentum_where_a_parameter_has_had_no_gradient(make: str) -> None:
    torchs, ours = Spare(), Spare()
    theirs = MAKES[make](torchs.parameters())
    plain_steps(torchs, theirs, range(3), both=False)
    flat = FlatParameters(ours, memory, 2**20)
    optimizer = MAKES[make](ours.parameters())
    plain_steps(ours, optimizer, range(3), both=False)
    rule, options = server_optimizer_of(optimizer)
    (key,) = flat.values
    state = flat_state(flat, key, optimizer)
    at = {piece.name: piece.start for piece in flat.views}
    assert (
        state["momentum_buffer"][at["spare.weight"] :][:10].eq(0).all()
        and state["momentum_buffer"].abs().max() > 0
    )
    store = LocalStore()
    store.create(
        Table(
            key, length=flat.values[key].numel(), dtype="float64", optimizer=rule, options=options
        ),
        flat.values[key],
        state,
    )
    for step in range(3, 6):  # now it has some
        for p in ours.parameters():
            p.grad = None
        ours.loss(step, both=True).backward()
        gradient = torch.zeros_like(flat.values[key])
        for piece in flat.views:
            assert piece.parameter.grad is not None
            torch.as_strided(gradient, piece.value.shape, piece.value.stride(), piece.start).copy_(
                piece.parameter.grad
            )
        store.push({key: None}, {key: gradient}).wait()
        store.pull({key: None}, into=flat.values)
    plain_steps(torchs, theirs, range(3, 6), both=True)
    for (name, mine), other in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-14, atol=1e-14, msg=name)
    kept = {
        k.removeprefix("state/"): v for k, v in store.dump(key).items() if k.startswith("state/")
    }
    back = named_state(flat, optimizer, {key: kept})
    torch.testing.assert_close(
        back["spare.weight/momentum_buffer"], theirs.state[torchs.spare.weight]["momentum_buffer"]
    )


def test_an_optimizer_that_remembers_nothing_yet_gives_nothing_over() -> None:
    model = Spare()
    flat = FlatParameters(model, memory, 2**20)
    assert flat_state(flat, next(iter(flat.values)), MAKES["momentum"](model.parameters())) == {}
