"""Rank state of ZeRO: slices gathered and scattered again, the same bits on every stage."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.core import Group, Tensors
from manyhands.exchange.inproc import World
from manyhands.exchange.shared import SharedGroup, shard_memory
from manyhands.parallel.reshard.rank_state import SlicedState
from manyhands.parallel.reshard.resharding import Resharding
from manyhands.parallel.zero.full_state import model_state
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.split.shard_spec import ShardSpec

ALIASES = {"last.weight": "first.weight"}


class Tied(nn.Module):
    """Blocks, tied weights, a scalar, a frozen parameter, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6)])
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)


@functools.cache
def made() -> Tied:
    torch.manual_seed(5)
    one = Tied()
    one.blocks[1].running_mean.normal_()  # type: ignore[union-attr, operator]
    return one


def model() -> Tied:
    return copy.deepcopy(
        made()
    )  # threads that draw at the same time would draw from each other's seed


def gradient(name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.arange(like.numel()).view(like.shape) + len(name))


def truth() -> tuple[Tensors, Tensors]:
    """Whole model and state after two steps of an optimizer that works element by element."""
    whole = model()
    optimizer = adam(p for p in whole.parameters() if p.requires_grad)
    for _ in range(2):
        for n, p in whole.named_parameters():
            p.grad = gradient(n, p) if p.requires_grad else None
        optimizer.step()
    names = {id(p): n for n, p in whole.named_parameters()}
    moments = {
        f"{names[id(p)]}/{k}": v
        for p, entries in optimizer.state.items()
        for k, v in entries.items()
    }
    return {k: v.clone() for k, v in whole.state_dict().items()}, moments


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1, foreach=False, fused=False)


def held(group: Group, stage: int) -> tuple[SlicedState, Resharding]:
    module = model()
    parts = {n: ShardSpec(n, tuple(v.shape)) for n, v in module.state_dict().items()}
    allocate, common = shard_memory(group)
    flat = ShardedParameters(module, group, stage, allocate=allocate, common=common, block_bytes=1)
    slices = SlicedState(
        flat, ShardUpdate(flat, adam(p for p in module.parameters() if p.requires_grad))
    )
    return slices, Resharding(slices.shard_specs(parts), group, ALIASES)


def stepped(slices: SlicedState) -> None:
    for _ in range(2):
        for piece in slices.flat.views:
            shape = dict(model().named_parameters())[piece.name]
            start, stop = slices.flat.owned()[piece.name]
            piece.parameter.grad = (
                gradient(piece.name, shape).view(-1)[start:stop] if stop > start else None
            )
        slices.update.optimizer.step()


def in_world(size: int, main: Callable[[Group], None]) -> None:
    World(size).run(main)


def in_shared_memory(size: int, main: Callable[[Group], None]) -> None:
    """Where stage 3 has one copy of the parameters for all ranks."""
    store, errors = dist.HashStore(), []

    def body(rank: int) -> None:
        try:
            group = SharedGroup(rank, size, store, timeout_s=20.0)
            try:
                main(group)
            finally:
                group.close()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=body, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("on", [in_world, in_shared_memory])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_slices_of_every_stage_make_the_whole_and_are_taken_out_of_it(
    stage: int, on: Callable[[int, Callable[[Group], None]], None]
) -> None:
    params, moments = truth()
    found: dict[str, Tensors] = {}

    def save(group: Group) -> None:
        slices, resharding = held(group, stage)
        stepped(slices)
        whole, state = resharding.gather(slices.model()), resharding.gather(slices.optimizer()[0])
        if group.rank == 0:
            found["params"], found["moments"] = whole, state
        slices.flat.close()

    on(3, save)
    assert found["params"].keys() == params.keys() and found["moments"].keys() == moments.keys()
    for name, value in {**params, **moments}.items():
        got = found["moments" if name in moments else "params"][name]
        assert got.shape == value.shape and torch.equal(got, value), name

    def load(group: Group) -> None:
        slices, resharding = held(group, stage)
        stepped(slices)  # there is something to forget
        for values in slices.flat.values.values():
            values.zero_()
        here = slices.model()
        slices.load_model({k: v for k, v in resharding.extract(params).items() if k in here})
        meta = slices.optimizer()[1]
        slices.load_optimizer(resharding.extract(moments), meta)
        again = resharding.gather(slices.model()), resharding.gather(slices.optimizer()[0])
        with slices.flat.holding(None):
            whole = model_state(slices.flat)
        if group.rank == 0:
            assert all(torch.equal(again[0][k], v) for k, v in params.items())
            assert all(
                torch.equal(again[1][k], v) and again[1][k].shape == v.shape
                for k, v in moments.items()
            )
        assert all(
            torch.equal(whole[k], v) for k, v in params.items()
        )  # also as the module sees it
        slices.flat.close()

    on(2, load)
