"""Update by slices: never where user code would see slices for the whole, and momentum of late
gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import manyhands as mh
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import SliceUpdate, Update, WholeUpdate, can_slice
from support.compare import assert_tensors_close, same_tensors
from support.replicas import Mlp, memory, mlp, rows, sgd, squared, weights
from support.small_task import saved_weights, small_task


def clip(optimizer: Optimizer, *_: Any) -> None:
    held = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    nn.utils.clip_grad_norm_(held, 0.05)


def clipped(parameters: Any) -> Optimizer:
    made = torch.optim.SGD(parameters, lr=0.5)
    made.register_step_pre_hook(clip)
    return made


def slices(model: nn.Module, optimizer: Optimizer) -> tuple[FlatParameters, SliceUpdate]:
    flat = FlatParameters(model, memory, 2**20)
    return flat, SliceUpdate(flat, model, optimizer, lambda v: [slice(0, len(v))])


def replica(model: Mlp, flat: FlatParameters, update: Update) -> ModuleReplica:
    return ModuleReplica(
        flat, update, lambda: MicroLoss(squared(model, rows(4)), 4, True), nominal=4
    )


def train(mine: ModuleReplica, steps: int = 2) -> None:
    for _ in range(steps):
        mine.backward()
        _ = mine.grads
        mine.step()


def test_an_optimizer_with_hooks_on_its_step_is_not_given_slices() -> None:
    assert can_slice(sgd(mlp().parameters())) and not can_slice(clipped(mlp().parameters()))
    after = sgd(mlp().parameters())
    after.register_step_post_hook(clip)
    assert not can_slice(after)


def test_a_hook_that_clips_sees_the_whole_gradient_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    # wide enough that each rank would own slices
    wide = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 3))
    for ranks in (1, 2):
        mh.train(
            lambda: small_task(copy.deepcopy(wide), optimizer=clipped),
            f"data={ranks} batch={8 // ranks} steps=3 split=ordered",
            directory=tmp_path / str(ranks),
            quiet=True,
        )
    assert_tensors_close(saved_weights(tmp_path / "1"), saved_weights(tmp_path / "2"), rtol=1e-5)


def test_a_hook_where_ranks_hold_parts_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mh.LaunchError, match="the optimizer has a hook before or after its step"):
        mh.train(
            lambda: small_task(optimizer=clipped),
            "shard=2 steps=2",
            directory=tmp_path / "run",
            quiet=True,
        )


def test_a_hook_that_comes_after_the_start_is_refused() -> None:
    model = mlp()
    flat, update = slices(model, sgd(model.parameters()))
    update.optimizer.register_step_pre_hook(clip)
    with pytest.raises(mh.TaskError, match="register it before the start"):
        train(replica(model, flat, update))


def test_the_state_of_slices_is_no_state_dict_but_checkpoints_have_all_of_it() -> None:
    model, other = mlp(), mlp()
    flat, update = slices(model, sgd(model.parameters()))
    train(replica(model, flat, update))
    plain = update.optimizer.param_groups[0]["lr"]
    with pytest.raises(mh.TaskError, match="the run's checkpoints hold it"):
        update.optimizer.state_dict()
    with pytest.raises(mh.TaskError, match="call it before the start"):
        update.optimizer.load_state_dict({"state": {}, "param_groups": [{"lr": plain}]})
    saved, meta = update.save(lambda tensors: None)
    _, again = slices(other, sgd(other.parameters()))
    again.load(saved, meta)
    assert same_tensors(again.save(lambda tensors: None)[0], saved)


@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "slices"])
def test_layers_that_thaw_get_their_momentum_as_in_plain_torch(
    sliced: bool, dampening: float
) -> None:
    def made(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, dampening=dampening, weight_decay=0.01
        )

    ours, theirs = mlp(), mlp()
    if sliced:
        flat, update = slices(ours, made(ours))
    else:
        flat = FlatParameters(ours, memory, 2**20)
        update = WholeUpdate(flat, ours, made(ours))
    optimizer, mine = made(theirs), replica(ours, flat, update)
    for frozen in (True, False):
        ours.first.requires_grad_(not frozen)
        theirs.first.requires_grad_(not frozen)
        train(mine)
        for _ in range(2):
            optimizer.zero_grad()
            squared(theirs, rows(4)).backward()
            optimizer.step()
    assert_tensors_close(weights(ours), weights(theirs))
