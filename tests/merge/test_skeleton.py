"""Random split with a skeleton, on a network: its limits, and that it learns.

Also which rank trains which units, and what stays.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core import EXACT, Group, Tensors
from manyhands.errors import PlanError
from manyhands.exchange.observed import ObservedGroup
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.local_sgd import LocalSGD
from manyhands.merge.skeleton import Skeleton
from manyhands.plan.words import parse
from support.compare import assert_tensors_close
from support.skeleton_networks import (
    BATCH,
    Make,
    Trained,
    Worker,
    accuracy,
    adam,
    mlp,
    momentum,
    train,
    worker,
)


def uneven(rank: int, step: int) -> int:
    """From all samples to none."""
    return (0, 3, BATCH, 7, 0, 11)[(2 * rank + step) % 6]


def assert_trained_close(a: list[Trained], b: list[Trained]) -> None:
    """Parameters and the optimizer's moments, on every rank."""
    for mine, theirs in zip(a, b, strict=True):
        assert_tensors_close(mine.params, theirs.params, rtol=1e-9, atol=1e-11)
        assert_tensors_close(mine.moments, theirs.moments, rtol=1e-9, atol=1e-11)


def agree(trained: list[Trained]) -> bool:
    return all(torch.equal(t.params[k], v) for t in trained for k, v in trained[0].params.items())


# -- its limits --


@pytest.mark.parametrize("counts", [None, uneven], ids=["full", "uneven"])
@pytest.mark.parametrize("make", [momentum, adam])
def test_where_all_units_are_in_the_skeleton_it_is_synchronous_sgd(make: Make, counts: Any) -> None:
    ours, plain = (
        train(rule, 3, 6, make=make, uneven=counts) for rule in (Skeleton(core=1.0), AllReduce())
    )
    assert_trained_close(ours, plain)
    assert agree(ours)


@pytest.mark.parametrize("counts", [None, uneven], ids=["full", "uneven"])
@pytest.mark.parametrize("moments", ["average", "keep", "reset"])
def test_with_longer_blocks_it_is_then_local_sgd(moments: Any, counts: Any) -> None:
    assert_trained_close(
        train(Skeleton(core=1.0, period=4, moments=moments), 3, 4, uneven=counts),
        train(LocalSGD(period=4, moments=moments), 3, 4, uneven=counts),
    )


def test_where_explorers_are_all_of_the_rest_it_is_synchronous_sgd_too() -> None:
    assert_trained_close(train(Skeleton(core=0.5, explore=1.0), 2, 5), train(AllReduce(), 2, 5))


def test_one_rank_to_which_all_is_assigned_is_the_plain_optimizer() -> None:
    assert_trained_close(train(Skeleton(draw="disjoint"), 1, 5), train(AllReduce(), 1, 5))


# -- who trains what --


def watch(
    rule: Skeleton, size: int, rounds: int, **options: Any
) -> tuple[list[Trained], list[list[tuple[Tensor, Tensor]]]]:
    """(core, scales) of each rank in each round."""
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(size)]

    class Watched(Skeleton):
        def _step(
            self, replica: Any, link: Group, state: Tensors, held: Tensor, scales: Tensor
        ) -> Tensor:
            seen[link.rank].append((state["core"].clone(), scales.clone()))
            return super()._step(replica, link, state, held, scales)

    return train(Watched(**vars(rule)), size, rounds, **options), seen


def test_skeleton_and_explorers_are_apart_alike_on_all_ranks_and_redrawn_when_they_should_be() -> (
    None
):
    trained, seen = watch(Skeleton(core=0.2, explore=0.2, keep=4, redraw=2), 3, 12)
    for per_rank in zip(*seen, strict=True):
        assert all(torch.equal(core, per_rank[0][0]) for core, _ in per_rank), (
            "one skeleton for all"
        )
        held = [scales > 0 for _, scales in per_rank]
        assert all((h & per_rank[0][0]).sum() == per_rank[0][0].sum() for h in held)
        assert not torch.equal(held[0], held[1]) and not torch.equal(held[1], held[2])
    cores, scales = [core for core, _ in seen[0]], [s for _, s in seen[0]]
    assert all(torch.equal(cores[i], cores[i - 1]) for i in range(12) if i % 4), "kept for 4 rounds"
    assert all(torch.equal(scales[i], scales[i - 1]) for i in range(1, 12, 2)), "explorers for 2"
    assert all(not torch.equal(scales[i], scales[i - 1]) for i in range(2, 12, 2))
    assert {int(c.sum()) for c in cores} == {8 + 6}, "a fifth of 40 and of 32"
    assert agree(trained)


def test_the_skeleton_follows_the_gradient_and_not_the_size_of_weights_alone() -> None:
    by_size, by_both = (watch(Skeleton(c=c, keep=6), 2, 12)[1][0][-1][0] for c in (0.0, 100.0))
    assert not torch.equal(by_size, by_both)


def test_assigned_to_ranks_all_units_are_trained_in_every_round() -> None:
    _, seen = watch(Skeleton(draw="disjoint"), 3, 4)
    for per_rank in zip(*seen, strict=True):
        held = torch.stack([scales > 0 for _, scales in per_rank])
        assert held.any(0).all() and (held.sum(0) <= torch.where(per_rank[0][0], 3, 1)).all()


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    runs = [watch(Skeleton(seed=seed), 2, 3)[1] for seed in (5, 5, 6)]
    same = [
        [
            torch.equal(a[1], b[1])
            for x, y in zip(left, right, strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        for left, right in ((runs[0], runs[1]), (runs[0], runs[2]))
    ]
    assert all(same[0]) and not any(same[1])


# -- what stays --


def units_of(w: Worker, rule: Skeleton, size: int, draw: int, core: Tensor) -> Tensor:
    units = w.replica.units
    return core | units.explorers(core, rule.explore, rule.seed, draw, size)


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("make", [momentum, adam])
def test_a_unit_that_nobody_holds_stays_as_it_is_with_what_is_remembered_of_it(
    make: Make, period: int
) -> None:
    rule, size = Skeleton(period=period), 2
    before: list[list[tuple[Tensors, Tensors]]] = [[], []]

    def look(w: Worker, link: Group, state: Tensors) -> None:
        before[link.rank].append(
            (w.by_name(), {k: v.clone() for k, v in w.replica.moments.items()})
        )

    trained = train(rule, size, 4, make=make, after_round=look)
    w, core = trained[0].worker, trained[0].state["core"]
    held = units_of(w, rule, size, 3, core).any(0)
    for rank in range(size):
        (params, moments), (now, now_moments) = before[rank][2], before[rank][3]
        for layer, (first, n), reader in (("0", (0, 40), "2"), ("2", (40, 32), "4")):
            left_out = ~held[first : first + n]
            assert 0 < left_out.sum() < n
            for name, rows in ((f"{layer}.weight", left_out), (f"{layer}.bias", left_out)):
                assert torch.equal(now[name][rows], params[name][rows])
                assert not (now[name][~rows] == params[name][~rows]).all()
                for k in (k for k in moments if k.startswith(f"{name}/")):
                    assert torch.equal(now_moments[k][rows], moments[k][rows]), k
            assert torch.equal(
                now[f"{reader}.weight"][:, left_out], params[f"{reader}.weight"][:, left_out]
            ), "its way out too"
        assert not torch.equal(now["4.bias"], params["4.bias"]), "the output layer is always there"
    assert agree(trained)


def test_a_held_edge_gets_the_mean_over_the_samples_of_its_holders() -> None:
    """One step of plain SGD, by hand: each rank's gradient on its own thinned network, weighed by
    samples where it holds an edge.
    """
    sgd = lambda p: torch.optim.SGD(p, lr=1.0)
    rule, size, counts = Skeleton(core=0.3, explore=0.4), 3, (20, 5, 0)
    trained = train(rule, size, 1, make=sgd, uneven=lambda rank, step: counts[rank])
    core = trained[0].state["core"]
    units = trained[0].worker.replica.units
    explorers = units.explorers(core, rule.explore, rule.seed, 0, size)
    held, scales = core | explorers, units.scales(core, explorers)
    total = {k: torch.zeros_like(v) for k, v in worker().by_name().items()}
    weight = {k: torch.zeros_like(v) for k, v in total.items()}
    for rank, n in enumerate(counts):
        w = worker(rank, size, make=sgd, counts=lambda step, n=n: n)
        w.replica.thin(scales[rank], None)
        w.replica.backward()
        own = w.by_name(units.holders(held[rank : rank + 1], torch.ones(1), w.flat.values))
        for k, g in w.by_name(w.replica.grads).items():
            total[k] += g * (
                BATCH * size
            )  # back from the share of a whole step to the sum over samples
            weight[k] += n * own[k]
    start = worker().by_name()
    for k, x in trained[1].params.items():
        expected = start[k] - torch.where(weight[k] > 0, total[k] / weight[k].clamp(min=1), 0)
        torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-12)
    assert any(((w > 0) & (w < 25)).any() for w in weight.values()), (
        "some edges have one holder only"
    )


def test_all_ranks_end_every_block_with_the_same_bits_and_moments_go_with_their_units() -> None:
    trained = train(Skeleton(period=3), 3, 5, make=adam, uneven=uneven)
    assert agree(trained)
    for k, m in trained[0].moments.items():
        assert all(torch.equal(t.moments[k], m) for t in trained), k
    kept = train(Skeleton(period=3, moments="keep"), 3, 5, make=adam)
    assert agree(kept) and any(
        not torch.equal(kept[1].moments[k], m) for k, m in kept[0].moments.items()
    )


def test_rounds_in_which_nobody_has_a_sample_change_nothing() -> None:
    for period in (1, 2):
        trained = train(Skeleton(period=period), 2, 3, uneven=lambda rank, step: 0)
        for k, v in worker().by_name().items():
            assert torch.equal(trained[0].params[k], v)
        assert all(m.isfinite().all() for t in trained for m in t.moments.values())


def test_only_what_is_held_travels() -> None:
    """Per round: the edges in the union of what ranks hold, the samples of each rank, the count,
    and importance.
    """
    rule, size = Skeleton(core=0.1, explore=0.1), 2
    edges: list[int] = []

    class Counting(ObservedGroup):
        def all_reduce(self, values: Tensors, op: Any = "sum") -> Any:
            edges.extend(
                v.numel() for k, v in values.items() if not k.startswith(EXACT) and k != "count"
            )
            return super().all_reduce(values, op)

    from manyhands.exchange.inproc import World

    def main(group: Group) -> Tensor:
        w = worker(group.rank, size)
        state = rule.init(w.replica)
        rule.round(w.replica, Counting(group, lambda event: None), state)
        held = units_of(w, rule, size, 0, state["core"])
        return (w.replica.units.holders(held, torch.ones(size), w.flat.values)["float64"] > 0).sum()

    held, _ = World(size).run(main)
    whole = sum(v.numel() for v in worker().flat.values.values())
    assert edges == [int(held)] * size and int(held) < whole / 3


# -- it learns --


@functools.cache
def synchronous() -> float:
    return accuracy(train(AllReduce(), 2, 240)[0].worker.model)


@pytest.mark.parametrize(
    "options", [{}, {"period": 4}, {"draw": "disjoint"}, {"core": 0.0, "explore": 0.3}], ids=str
)
def test_it_learns_what_synchronous_sgd_learns(options: dict[str, Any]) -> None:
    rule = Skeleton(**options)
    ours = accuracy(train(rule, 2, 240 // rule.period)[0].worker.model)
    plain, untrained = synchronous(), accuracy(mlp())
    assert plain > 0.98 and untrained < 0.5 and ours > plain - 0.03, (ours, plain)


# -- refusals --


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("merge.core=1.5", r"merge\.core=1\.5: a share of each layer's units between 0 and 1"),
        ("merge.explore=-0.1", r"merge\.explore=-0\.1"),
        (
            "merge.core=0 merge.explore=0",
            r"merge\.explore=0\.0: with merge\.core=0 a rank would hold nothing; set "
            r"merge\.explore",
        ),
        ("merge.keep=0", r"merge\.keep=0: at least 1 round"),
        ("merge.redraw=0", r"merge\.redraw=0"),
        (
            "merge.draw=disjoint merge.explore=0.3",
            r"merge\.explore=0\.3: has no effect with merge\.draw=disjoint",
        ),
        ("merge.memory=1", r"merge\.memory=1\.0"),
        ("merge.moments=keep", r"merge\.moments=keep: has no effect with merge\.period=1"),
        ("compress=topk", r"set compress=fp16 or bf16 or int8"),
    ],
)
def test_options_without_sense_are_refused(words: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        parse(f"data=2 merge=skeleton {words}")
