"""Gossip: what mixing conserves, how fast it contracts, and its limits.

No ranks wait for each other in a circle.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core import Group, Tensors
from manyhands.errors import PlanError
from manyhands.exchange import compression
from manyhands.exchange.inproc import World
from manyhands.merge.ad_psgd import ADPSGD, partners
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.building_blocks import gossip, topology
from manyhands.merge.building_blocks.topology import Turn
from manyhands.merge.d_psgd import DPSGD
from manyhands.merge.sgp import SGP
from support.compare import assert_close
from support.quadratic import Outcome, Problem, Rank, run, sgd

LR = sgd([torch.zeros(1, requires_grad=True)]).defaults["lr"]
GOSSIP = [
    DPSGD(),
    DPSGD(order="atc"),
    DPSGD("exponential"),
    DPSGD("one_peer", order="atc"),
    ADPSGD(),
    SGP(),
    SGP("star"),
]


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def mixed_only(rule: Any, size: int, rounds: int) -> list[list[tuple[Tensor, Tensors]]]:
    """What each rank holds after every round of mixing alone, from places of its own; the places
    come first.
    """

    def main(link: Group) -> list[tuple[Tensor, Tensors]]:
        me = Rank(Problem(size), link.rank, still)
        for x in me.replica.params.values():
            x.copy_(
                torch.randn(
                    x.shape, generator=torch.Generator().manual_seed(link.rank), dtype=x.dtype
                )
            )
        state = rule.init(me.replica)
        seen = [(me.point(), {k: v.clone() for k, v in state.items()})]
        for _ in range(rounds):
            rule.round(me.replica, link, state)
            seen.append((me.point(), {k: v.clone() for k, v in state.items()}))
        return seen

    rule.check(size)
    return World(size).run(main)


def mean(points: list[Tensor]) -> Tensor:
    return torch.stack(points).mean(0)


@pytest.mark.parametrize("rule", GOSSIP, ids=str)
@pytest.mark.parametrize("size", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_mixing_alone_brings_all_ranks_to_the_mean_they_began_with(rule: Any, size: int) -> None:
    seen = mixed_only(rule, size, 120)
    start = mean([rank[0][0] for rank in seen])
    for rank in seen:
        assert_close(rank[-1][0], start, 1e-6)


@pytest.mark.parametrize(
    "graph", ["ring", "exponential", "star", "complete", "0-1,1-2,2-3,3-4,4-5"]
)
@pytest.mark.parametrize("order", ["cta", "atc"])
def test_the_distance_from_the_mean_shrinks_by_the_gap_every_round(graph: str, order: Any) -> None:
    seen = mixed_only(DPSGD(graph, order), 6, 8)
    (w,) = topology.schedule(graph, 6)
    bound = 1 - topology.spectral_gap(w)
    apart = []
    for points in zip(*([x for x, _ in rank] for rank in seen), strict=True):
        apart.append(float((torch.stack(points) - mean(list(points))).norm()))
    for before, after in itertools.pairwise(apart):
        assert after <= bound * before + 1e-12
    assert apart[-1] < apart[0]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_peer_agrees_exactly_after_log_n_rounds_of_a_power_of_two(size: int) -> None:
    rounds = (size - 1).bit_length()
    for rule in (DPSGD("one_peer", order="atc"), SGP()):
        seen = mixed_only(rule, size, rounds)
        start = mean([rank[0][0] for rank in seen])
        assert not torch.allclose(seen[0][rounds - 1][0], start, rtol=1e-3)
        for rank in seen:
            assert_close(rank[-1][0], start, 1e-14)


def test_the_mean_of_all_replicas_moves_by_the_mean_of_their_gradients() -> None:
    problem, size = Problem(5, mixed=0.5), 5
    for rule in (DPSGD(), DPSGD(order="atc"), DPSGD("one_peer"), ADPSGD(), SGP()):
        before, after = (run(rule, problem, rounds) for rounds in (3, 4))
        gradient = mean([problem.A[r] @ before[r].x - problem.b[r] for r in range(size)])
        assert_close(mean([o.x for o in after]), mean([o.x for o in before]) - LR * gradient)


def test_combine_then_adapt_takes_the_gradient_where_it_has_not_mixed_yet() -> None:
    problem = Problem(4, mixed=0.5)
    (w,) = topology.schedule("ring", 4)
    before, after = run(DPSGD(), problem, 2), run(DPSGD(), problem, 3)
    x = torch.stack([o.x for o in before])
    for r in range(4):
        assert_close(after[r].x, w[r] @ x - LR * (problem.A[r] @ x[r] - problem.b[r]))


def test_adapt_then_combine_mixes_what_has_stepped() -> None:
    problem = Problem(4, mixed=0.5)
    (w,) = topology.schedule("ring", 4)
    rule = DPSGD(order="atc")
    before, after = run(rule, problem, 2), run(rule, problem, 3)
    stepped = torch.stack(
        [o.x - LR * (problem.A[r] @ o.x - problem.b[r]) for r, o in enumerate(before)]
    )
    for r in range(4):
        assert_close(after[r].x, w[r] @ stepped)


def test_on_the_complete_graph_adapt_then_combine_is_sync_sgd_and_combine_then_adapt_is_not() -> (
    None
):
    problem = Problem(4, mixed=0.5)
    together = run(AllReduce(), problem, 10)[0].x
    for o in run(DPSGD("complete", order="atc"), problem, 10):
        assert_close(o.x, together)
    assert all((o.x - together).norm() > 1e-3 for o in run(DPSGD("complete"), problem, 10))


def test_pushing_over_doubly_stochastic_parts_is_adapt_then_combine_with_weights_of_one() -> None:
    problem = Problem(6, mixed=0.5)
    for graph in ("one_peer", "exponential", "complete"):
        pushed, mixed = (
            run(SGP(graph), problem, 10, make=momentum),
            run(DPSGD(graph, order="atc"), problem, 10, make=momentum),
        )
        for a, b in zip(pushed, mixed, strict=True):
            assert_close(a.x, b.x)
            assert_close(a.state["v"], torch.ones((), dtype=torch.float64))


UNEVEN = "0>1,1>2,2>3,3>0,0>2,0>3"


def test_pushing_over_an_uneven_graph_conserves_both_sums() -> None:
    seen = mixed_only(SGP(UNEVEN), 4, 60)
    sums = []
    for now in zip(*seen, strict=True):
        assert float(sum(state["v"] for _, state in now)) == pytest.approx(4, abs=1e-12)
        sums.append(sum(state["v"] * z for z, state in now))
    for total in sums:
        assert_close(total, sums[0])
    weights = [float(rank[-1][1]["v"]) for rank in seen]
    assert max(weights) > 1.2 > 0.9 > min(weights), "or nothing was uneven"
    for rank in seen:
        assert_close(rank[-1][0], sums[0] / 4, 1e-9)


def test_pushing_over_an_uneven_graph_steps_where_x_is() -> None:
    """sum x moves by the sum of the steps taken at z, whatever the weights."""
    problem = Problem(4, mixed=0.5)
    before, after = run(SGP(UNEVEN), problem, 7), run(SGP(UNEVEN), problem, 8)

    def total(outcomes: list[Outcome]) -> Tensor:
        return torch.stack([o.state["v"] * o.x for o in outcomes]).sum(0)

    steps = torch.stack(
        [LR * (problem.A[r] @ o.x - problem.b[r]) for r, o in enumerate(before)]
    ).sum(0)
    assert_close(total(after), total(before) - steps)
    assert_close(after[0].consensus, total(after) / 4)
    assert max(abs(float(o.state["v"]) - 1) for o in after) > 0.1


def test_partners_choose_each_other_and_everybody_meets_everybody() -> None:
    for size in (1, 2, 5, 8):
        met = set()
        for t in range(200):
            found = partners(0, t, size)
            assert all(found[found[r]] == r for r in range(size))
            assert sum(found[r] == r for r in range(size)) == size % 2
            met |= {(r, p) for r, p in enumerate(found) if r != p}
        assert len(met) == size * (size - 1)
    assert partners(0, 1, 8) != partners(1, 1, 8)


def test_a_pair_conserves_its_sum_and_ends_with_the_same_bits() -> None:
    seen = mixed_only(ADPSGD(seed=3), 5, 6)
    for t in range(6):
        for r, p in enumerate(partners(3, t, 5)):
            before, after = (seen[r][t][0] + seen[p][t][0], seen[r][t + 1][0] + seen[p][t + 1][0])
            assert_close(after, before, 1e-15)
            if p != r:
                assert torch.equal(seen[r][t + 1][0], seen[p][t + 1][0])
            else:
                assert torch.equal(seen[r][t + 1][0], seen[r][t][0])


@pytest.mark.parametrize("rule", GOSSIP, ids=str)
def test_no_schedule_makes_ranks_wait_in_a_circle_or_changes_what_they_compute(rule: Any) -> None:
    problem, size = Problem(5, mixed=0.5), 5

    def main(link: Any) -> Tensor:
        me = Rank(problem, link.rank)
        state = rule.init(me.replica)
        for t in range(12):
            link.world.spend(link.rank, delay(link.rank, t))
            rule.round(me.replica, link, state)
        return me.point()

    ends = []
    for slow in range(3):
        delay = lambda rank, t, slow=slow: 1000.0 if (rank + t * slow) % size == 0 else 0.1 * rank
        cost = lambda what, nbytes, peers, slow=slow: [0.0, 1e-3 * nbytes, 50.0][slow]
        ends.append(torch.stack(World(size, cost).run(main)))  # a deadlock would raise
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_a_slow_rank_holds_up_its_neighbours_and_not_the_whole_ring() -> None:
    def clocks(rule: Any) -> list[float]:
        def main(link: Any) -> None:
            me = Rank(Problem(8), link.rank)
            state = rule.init(me.replica)
            link.world.spend(link.rank, 1000.0 if link.rank == 0 else 1.0)
            rule.round(me.replica, link, state)

        world = World(8, lambda what, nbytes, peers: 1.0)
        world.run(main)
        return world.now

    assert [now > 500 for now in clocks(DPSGD())] == [True, True, *[False] * 5, True]
    assert sum(now > 500 for now in clocks(ADPSGD())) == 2
    assert all(now > 500 for now in clocks(AllReduce()))


def test_parameters_travel_while_the_gradient_is_computed() -> None:
    """cta and ad_psgd hide an exchange behind a gradient of the same length; atc, which steps
    first, cannot.
    """

    def seconds(rule: Any) -> float:
        def main(link: Any) -> None:
            me = Rank(Problem(4), link.rank)
            state, backward = rule.init(me.replica), me.replica.backward

            def slow(on_ready: Any = None) -> Tensor:
                link.world.spend(link.rank, 100.0)
                return backward(on_ready)

            me.replica.backward = slow  # type: ignore[method-assign]
            for _ in range(10):
                rule.round(me.replica, link, state)

        world = World(4, lambda what, nbytes, peers: 40.0)
        world.run(main)
        return max(world.now)

    assert seconds(DPSGD()) == seconds(ADPSGD()) == 1000
    assert seconds(DPSGD(order="atc")) == 1000 + 10 * 80


def test_a_rank_gives_to_its_neighbours_only() -> None:
    problem = Problem(8)
    nbytes = sum(v.nbytes for v in Rank(problem, 0).replica.params.values())
    consensus = nbytes
    for rule, peers in (
        (DPSGD(), 2),
        (DPSGD("one_peer"), 1),
        (DPSGD("exponential"), 3),
        (ADPSGD(), 1),
    ):
        for o in run(rule, problem, 6):
            assert o.link.nbytes == 6 * peers * nbytes + consensus
    for o in run(SGP(), problem, 6):
        assert o.link.nbytes == 6 * (nbytes + 8) + consensus + 8


def test_a_period_takes_more_steps_for_one_exchange() -> None:
    problem = Problem(4)
    for rule in (DPSGD(period=3), DPSGD(period=3, order="atc"), ADPSGD(period=3), SGP(period=3)):
        out = run(rule, problem, 100)
        assert {o.steps for o in out} == {300}
        assert_close(out[0].consensus, problem.optimum(), 1e-4)
        early = run(rule, problem, 10, total=4)
        assert {o.steps for o in early} == {4}, "a block ends where the run does"


@pytest.mark.parametrize("rule", [DPSGD, ADPSGD])
def test_what_the_optimizer_remembers_is_kept_averaged_or_forgotten_as_asked(rule: Any) -> None:
    def buffers(moments: str) -> list[Tensor]:
        return [
            torch.cat(
                [v.flatten() for k, v in sorted(o.saved["optimizer"][0].items()) if "momentum" in k]
            )
            for o in run(rule(moments=moments), Problem(2, mixed=0.5), 6, make=momentum)
        ]

    kept, averaged, reset = buffers("keep"), buffers("average"), buffers("reset")
    assert (kept[0] - kept[1]).norm() > 2 * (averaged[0] - averaged[1]).norm() > 0
    problem = Problem(2, mixed=0.5)
    before = run(rule(moments="reset"), problem, 5, make=momentum)
    for r in range(2):  # all it remembers is the last gradient
        assert_close(reset[r], problem.A[r] @ before[r].x - problem.b[r])


@pytest.mark.parametrize("make", [adam, pytest.param(momentum, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", GOSSIP, ids=str)
def test_any_optimizer_works_underneath(rule: Any, make: Any) -> None:
    problem = Problem(
        4, spread=0.1
    )  # ranks that differ much pull Adam, which is not linear, off the optimum
    out = run(rule, problem, 300, make=make)
    assert (out[0].consensus - problem.optimum()).norm() < 0.3
    assert all(torch.equal(o.consensus, out[0].consensus) for o in out)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DPSGD(period=0), r"merge\.period=0"),
        (lambda: ADPSGD(period=-1), r"merge\.period=-1"),
        (lambda: SGP(period=0), r"merge\.period=0"),
        (lambda: ADPSGD(seed=-1), r"merge\.seed=-1"),
        (lambda: DPSGD("0-1,2-3").check(4), r"\{0,1\} and \{2,3\}"),
        (lambda: DPSGD("0>1,1>2").check(3), "doubly stochastic"),
        (lambda: SGP("0>1").check(2), "one direction only"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()


@pytest.mark.parametrize(
    "rule", [DPSGD(), DPSGD("one_peer", order="atc"), ADPSGD(), SGP()], ids=str
)
def test_a_codec_that_rounds_moves_no_mean(rule: Any) -> None:
    """Without gradients: what rounding gives to one rank it takes from another."""
    size, numel = 4, 3000
    start = torch.randn(
        size, numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )

    def main(group: Group) -> Tensor:
        link = compression.wrap(group, compression.Int8(), "parameters")
        values = {"x": start[group.rank].clone()}
        for round in range(12):
            if isinstance(rule, ADPSGD):
                partner = partners(0, round, size)[group.rank]
                turn = (
                    Turn(1.0, (), ())
                    if partner == group.rank
                    else Turn(0.5, (partner,), ((partner, 0.5),))
                )
            else:
                turns = topology.turns(rule.graph, size, group.rank, push=isinstance(rule, SGP))
                turn = turns[round % len(turns)]
            gossip.send(link, turn, values)()
        return values["x"]

    found = torch.stack(World(size).run(main))
    torch.testing.assert_close(found.mean(0), start.mean(0), rtol=1e-12, atol=1e-12)
    assert (found - found.mean(0)).abs().max() < 0.2 * (start - start.mean(0)).abs().max(), (
        "and they still come together"
    )
