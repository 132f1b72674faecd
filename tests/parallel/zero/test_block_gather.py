"""ZeRO stage 3: parameters gathered for one block at a time.

Whatever a model does with them, it computes as if they were always there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyhands.core import Group
from manyhands.exchange.inproc import World
from manyhands.parallel.zero.blocks import find_blocks
from manyhands.parallel.zero.full_state import model_state
from manyhands.replica import state
from manyhands.replica.module import ModuleReplica
from manyhands.replica.recompute import recompute
from support.compare import assert_tensors_close
from support.zero_replicas import (
    OPTIMIZERS,
    NextLosses,
    alone,
    assert_same_as_alone,
    cut,
    data_of,
    even,
    loss_of,
    model_of,
    spread,
    together,
)

LOSS = loss_of("mlp")


class Stack(nn.Module):
    """Four blocks of 12 -> 12 and a head; what is done with them is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(12, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Again(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks[:2], self.blocks[1]]:
            x = x + block(x)
        return self.head(x)


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3][0].weight = self.blocks[0][0].weight


class Functional(Stack):
    """A weight used far away from its block, before and after it ran."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.blocks[2][0].weight)
        x = super().forward(x)
        return x + self.blocks[0][0].bias[:5] * self.blocks[3][0].weight.sum()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(
        self, x: Tensor, *, scale: Tensor, rest: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        x = x.mul_(0.9)
        x = x + self.down(self.up(x).relu_()) * scale
        return x, {"skip": rest["skip"] + x}


class Structured(nn.Module):
    """Blocks that change their input in place and pass dictionaries and keywords."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.layers, self.head = (
            nn.Linear(12, 12),
            nn.ModuleList([InPlace(), InPlace(), InPlace()]),
            nn.Linear(12, 5),
        )
        self.scale = nn.Parameter(torch.ones(12))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x, rest = self.first(x), {"skip": torch.zeros_like(x)}
        for layer in self.layers:
            x, rest = layer(x, scale=self.scale, rest=rest)
        return self.head(rest["skip"])


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._two, x, use_reentrant=self.reentrant)
        return self.head(
            x + checkpoint(self.blocks[3], self.blocks[2](x), use_reentrant=self.reentrant)
        )

    def _two(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class Reentrant(Checkpointed):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.requires_grad_())


class Dropped(Stack):
    """One block's output leads nowhere, one is not called at all, and one runs without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0](x)
        with torch.no_grad():
            x = self.blocks[1](x)
        return self.head(self.blocks[3](x))


def recomputed() -> nn.Module:
    model = model_of("gpt")
    assert recompute(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    m.__name__.lower(): m
    for m in (Stack, Again, Tied, Functional, Structured, Checkpointed, Reentrant, Dropped)
}


LOOKAHEAD = [
    pytest.param(
        name,
        lookahead,
        marks=() if lookahead or name in ("stack", "again") else (pytest.mark.slow,),
    )
    for name in MODELS
    for lookahead in (0, 1)
]


@pytest.mark.parametrize(("name", "lookahead"), LOOKAHEAD)
def test_whatever_a_model_does_with_its_blocks(name: str, lookahead: int) -> None:
    assert_same_as_alone(
        3,
        3,
        MODELS[name],
        data_of("mlp", 3, 9),
        LOSS,
        even(3, 9, 3),
        optimizer=OPTIMIZERS["adam"],
        block_bytes=10**9,
        micros=3,
        lookahead=lookahead,
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_blocks_that_are_computed_again_for_their_backward_pass(stage: int) -> None:
    assert_same_as_alone(
        2,
        stage,
        recomputed,
        data_of("gpt", 2, 6),
        loss_of("gpt"),
        even(2, 6, 2),
        optimizer=OPTIMIZERS["sgd"],
    )


def test_a_loss_that_goes_around_the_models_own_forward() -> None:
    def around(model: nn.Module, batch: Any) -> Tensor:
        x = model.blocks[0](batch[0])
        return nn.functional.cross_entropy(model.head(x) + model.head.weight.sum(), batch[1])

    assert_same_as_alone(
        2, 3, Stack, data_of("mlp", 3, 8), around, even(2, 8, 3), optimizer=OPTIMIZERS["adam"]
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_passes_that_others_drive_are_summed_at_the_end_of_the_step(stage: int) -> None:
    """As a pipeline does: two micro-batches are forward before the first goes back."""
    data = data_of("mlp", 2, 8)
    one = Stack()
    alone(one, data, LOSS, optimizer=OPTIMIZERS["adam"])

    def main(group: Group) -> Any:
        model, todo = Stack(), list(data)

        def passes(scaled: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, int]:
            mine = cut(cut(todo.pop(0), [4, 4])[group.rank], [1, 3])
            losses = [LOSS(model, m) for m in mine]
            for loss, n in zip(losses, (1, 3), strict=True):
                scaled(loss, n).backward()
            return sum(loss.detach() * n for loss, n in zip(losses, (1, 3), strict=True)), 4

        replica = spread(
            group,
            model,
            stage,
            None,
            nominal=8,
            optimizer=OPTIMIZERS["adam"],
            run_micro_batches=passes,
        )
        for _ in data:
            replica.backward()
            replica.step()
        return model_state(replica.flat)

    for got in World(2).run(main):
        assert_tensors_close(got, state.model_state(one), rtol=1e-11)


def test_between_steps_a_rank_has_only_its_slices_and_the_rest_reads_as_nan() -> None:
    def look(replica: ModuleReplica) -> Any:
        flat = replica.flat
        assert flat is not None
        assert all(s.full.untyped_storage().nbytes() == 0 for s in flat.spans)
        for p in flat.module.parameters():
            assert p.isnan().all() and p.untyped_storage().nbytes() <= 8
        return {n: tuple(p.shape) for n, p in flat.module.named_parameters()}

    steps = [[[m] for m in cut(b, [4, 4])] for b in data_of("mlp", 2, 8)]
    (_, model, shapes), _ = together(2, 3, Stack, steps, LOSS, look, optimizer=OPTIMIZERS["sgd"])
    assert (
        shapes == {n: tuple(p.shape) for n, p in Stack().named_parameters()}
        and model["head.weight"].isfinite().all()
    )


def test_while_one_block_runs_only_it_and_the_next_are_here() -> None:
    most = []

    def main(group: Group) -> None:
        model = Stack()
        next_loss = NextLosses(
            model, [[cut(b, [4, 4])[group.rank]] for b in data_of("mlp", 3, 8)], LOSS, True
        )
        mine = spread(
            group, model, 3, next_loss, nominal=8, optimizer=OPTIMIZERS["sgd"], block_bytes=10**9
        )
        flat = mine.flat
        assert flat is not None and flat.gathering is not None
        units = flat.gathering.blocks
        assert [u.name for u in units] == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
        flat.watch = lambda: most.append(
            sum(any(s.full.untyped_storage().nbytes() for s in u.spans) for u in units[1:])
        )
        for _ in range(3):
            mine.backward()
            mine.step()

    World(2).run(main)
    assert max(most) == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_matrix_work_in_bf16_is_that_of_autocast_to_the_bit(stage: int) -> None:
    """One rank, so that no sum comes in another order: gathering weights in the short type changes
    nothing.
    """

    def half(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of("gpt")(model, batch).float()

    data = [tuple(x for x in b) for b in data_of("gpt", 3, 4)]
    make = lambda: model_of("gpt").float()
    one = make()
    losses, _ = alone(one, data, half, optimizer=OPTIMIZERS["sgd"])
    ((got, model, _),) = together(
        1,
        stage,
        make,
        [[[b]] for b in data],
        half,
        optimizer=OPTIMIZERS["sgd"],
        gather_dtype=torch.bfloat16,
    )
    assert got == losses
    assert_tensors_close(model, state.model_state(one), rtol=1e-6)
    two = together(
        2,
        stage,
        make,
        [[[m] for m in cut(b, [2, 2])] for b in data],
        half,
        optimizer=OPTIMIZERS["sgd"],
        gather_dtype=torch.bfloat16,
    )
    assert two[0][0] == pytest.approx(losses, rel=2e-2)


def test_blocks_are_the_members_of_lists_and_what_is_large_beside_them() -> None:
    gpt = model_of("gpt")
    assert [n for n, _ in find_blocks(gpt, 10**9)] == ["h.0", "h.1", "h.2", "h.3"]
    assert [n for n, _ in find_blocks(gpt, 1)] == [
        "wte",
        "wpe",
        "h.0",
        "h.1",
        "h.2",
        "h.3",
        "ln_f",
        "lm_head",
    ]
    assert [n for n, _ in find_blocks(model_of("mlp"), 10**9)] == ["0", "2", "4", "6"]
    assert [n for n, _ in find_blocks(model_of("seq2seq"), 10**9)] == [
        "encoders.0",
        "encoders.1",
        "decoders.0",
        "decoders.1",
    ]
