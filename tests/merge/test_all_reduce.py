"""N replicas that merge by all-reduce equal one replica on the union batch (float64, 1e-12)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Group
from manyhands.exchange.inproc import World
from support.compare import assert_tensors_close, same_tensors
from support.replicas import Mlp, mlp, rows, train_alone, train_together

# samples of every rank in three steps
SHARES = [
    [(4,), (4,), (4,)],
    [(3, 3), (3, 3), (2, 1)],
    [(5, 1), (0, 6), (3, 3)],
    [(4, 4, 4), (1, 0, 7), (1, 0, 0)],
    [(2, 2, 2, 2), (0, 0, 0, 1), (5, 0, 1, 2)],
]


def shares(step: tuple[int, ...], seed: int) -> list[list[Tensor]]:
    return [[part] for part in rows(sum(step), seed=seed).split(list(step))]


@pytest.mark.parametrize("case", SHARES, ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20])
def test_n_ranks_equal_one_rank_on_the_union_batch_and_each_other_bit_for_bit(
    case: list[tuple[int, ...]], bucket_bytes: int
) -> None:
    together, _ = train_together(
        [shares(step, s) for s, step in enumerate(case)], bucket_bytes=bucket_bytes
    )
    for other in together[1:]:
        assert same_tensors(together[0], other)
    assert_tensors_close(
        together[0], train_alone([rows(sum(step), seed=s) for s, step in enumerate(case)])
    )


def test_accumulation_on_every_rank_equals_one_batch_though_the_windows_differ() -> None:
    batches = [rows(14, seed=s) for s in range(3)]
    steps = []
    for s, batch in enumerate(batches):
        a, b = batch[: 9 - s], batch[9 - s :]
        steps.append(
            [list(a.split(4)), [*b.split(2), b[:0]]]
        )  # 3 and 3 or 4 micro-batches, the last of rank 1 empty
    together, _ = train_together(steps)
    assert same_tensors(*together)
    assert_tensors_close(together[0], train_alone(batches))


def test_one_window_is_one_exchange_however_many_micro_batches_it_has() -> None:
    batch = rows(16)
    _, whole = train_together([[[batch[:8]], [batch[8:]]]])
    _, windows = train_together([[list(batch[:8].split(1)), list(batch[8:].split(2))]])
    (parameters,) = {sum(p.numel() for p in mlp().parameters())}
    for link, other in zip(whole, windows, strict=True):
        assert (link.calls, link.nbytes) == (other.calls, other.nbytes)
        assert parameters * 8 <= link.nbytes <= parameters * 8 + 2000, (
            "every gradient once, and a few counts"
        )


def test_moving_samples_between_ranks_changes_nothing() -> None:
    batch = rows(12)
    shuffled = batch[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    a, _ = train_together([[[batch[:4]], [batch[4:8]], [batch[8:]]]])
    b, _ = train_together([[[shuffled[:1]], [shuffled[1:10]], [shuffled[10:]]]])
    assert_tensors_close(a[0], b[0])


@pytest.mark.parametrize("clip", [0.02, 0.5, 1e6])
def test_clipping_after_the_reduction_is_clipping_the_union_batch(clip: float) -> None:
    case = [(3, 1, 0), (4, 4, 4), (0, 2, 5)]
    together, _ = train_together([shares(step, s) for s, step in enumerate(case)], clip=clip)
    assert same_tensors(*together[:2]) and same_tensors(*together[1:])
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for s, step in enumerate(case):
        optimizer.zero_grad()
        batch = rows(sum(step), seed=s)
        (model(batch) - batch.sum(1).sin()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    assert_tensors_close(
        together[0], {k: v.detach() for k, v in model.state_dict().items()}, rtol=1e-11
    )


def test_token_counts_of_all_ranks_are_summed_before_the_one_division() -> None:
    batch = rows(10)

    def counted(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return (model(x) - x.sum(1).sin()).square().mean(), 7 * len(
            x
        )  # as if every row were seven tokens

    together, _ = train_together([[[batch[:1], batch[1:3]], [batch[3:]]]], loss=counted)
    assert_tensors_close(together[0], train_alone([batch]))


class Routed(nn.Module):
    """Rows with a positive first entry go through `a`, others through `b`; `c` is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.trunk = Mlp()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        positive = x[:, 0] > 0
        parts = [(self.a, x[positive]), (self.b, x[~positive])]
        moved = torch.cat([layer(part) for layer, part in parts if len(part)])
        original = torch.cat([part for _, part in parts])
        return self.trunk(moved) - (original.sum(1).sin() - x.sum(1).sin())


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_a_parameter_used_on_one_rank_only_moves_on_all_of_them_alike(bucket_bytes: int) -> None:
    batch = rows(12)
    positive, rest = batch[batch[:, 0] > 0], batch[batch[:, 0] <= 0]
    before = {k: v.clone() for k, v in Routed().state_dict().items()}
    together, _ = train_together(
        [[[positive], [rest]], [[rest], [positive]]], make=Routed, bucket_bytes=bucket_bytes
    )
    assert same_tensors(*together)
    assert_tensors_close(together[0], train_alone([batch, batch], make=Routed))
    for name in before:
        assert torch.equal(before[name], together[0][name]) == name.startswith("c."), name


def test_unused_names_are_said_by_each_rank_for_itself_and_once() -> None:
    batch = rows(12)
    positive, rest = batch[batch[:, 0] > 0], batch[batch[:, 0] <= 0]
    named: list[list[str]] = []
    train_together(
        [[[positive], [rest]]] * 3,
        make=Routed,
        on_first=lambda unused, views: unused and named.append(unused),
    )
    assert sorted(named) == [
        ["a.weight", "a.bias", "c.weight", "c.bias"],
        ["b.weight", "b.bias", "c.weight", "c.bias"],
    ]


def test_tied_and_frozen_parameters_merge_like_any_other() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(9)
            self.one, self.two, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
            self.two.weight = self.one.weight
            self.frozen.requires_grad_(False)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.two(self.one(x).tanh()).tanh()).sum(1)

    together, _ = train_together([shares((3, 5), 0), shares((6, 0), 1)], make=Tied)
    assert same_tensors(*together)
    assert_tensors_close(together[0], train_alone([rows(8), rows(6, seed=1)], make=Tied))


def test_float32_and_bfloat16_parameters_merge_within_their_precision() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.single, self.short = nn.Linear(5, 4), nn.Linear(4, 1).to(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.short(self.single(x.float()).bfloat16()).squeeze(-1).float()

    together, _ = train_together(
        [shares((4, 2, 2), 0), shares((1, 6, 0), 1)], make=Mixed, bucket_bytes=1
    )
    assert same_tensors(*together[:2]) and same_tensors(*together[1:])
    alone = train_alone([rows(8), rows(7, seed=1)], make=Mixed)
    for k, v in alone.items():
        torch.testing.assert_close(together[0][k], v, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("counts", list(itertools.product((0, 1, 3), repeat=2)), ids=str)
def test_a_step_without_any_sample_on_any_rank_changes_nothing(counts: tuple[int, ...]) -> None:
    def plain_sgd(p: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=0.1)  # type: ignore[arg-type]

    together, _ = train_together([shares(counts, 0)], optimizer=plain_sgd, nominal=4)
    assert same_tensors(*together)
    before = {k: v for k, v in mlp().state_dict().items()}
    assert same_tensors(before, together[0]) == (sum(counts) == 0)


def test_a_rank_that_makes_another_step_is_an_error_with_names_and_not_a_hang() -> None:
    from manyhands.errors import Deadlock

    def main(group: Group) -> None:
        for _ in range(2 + group.rank):
            group.all_reduce({"x": torch.ones(1)}).wait()

    with pytest.raises(Deadlock, match="rank 1 waits in all_reduce #2 for rank 0"):
        World(2).run(main)
