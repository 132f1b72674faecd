"""Merge strategies over a store: their limits, and their equations by hand.

Their invariants hold under scripted delays.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core import Store, Table, Tensors
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.merge import STRATEGIES
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.async_admm import AsyncADMM
from manyhands.merge.async_easgd import AsyncEASGD
from manyhands.merge.backup import Backup
from manyhands.merge.dc_asgd import DCASGD
from manyhands.merge.downpour import Downpour
from manyhands.merge.stale_sync import StaleSync
from manyhands.server.clock import Clock
from manyhands.server.inproc_store import InprocStore
from manyhands.server.shard import Shard
from support.compare import assert_outcomes_close, same_outcomes
from support.quadratic import (
    BATCH,
    Counts,
    Make,
    Outcome,
    Problem,
    Rank,
    full,
    hold,
    momentum,
    run,
    sgd,
)

NOISY = Problem(4, mixed=1.0, noise=0.3)
INF = float("inf")
EVERY = [
    StaleSync(0),
    StaleSync(2),
    StaleSync(INF),
    Backup(quorum=2),
    Downpour(),
    Downpour(2, 3, adapt=True),
    DCASGD(),
    DCASGD(adaptive=True),
    AsyncEASGD(3),
    AsyncADMM(3),
]
MAKES: dict[str, Make] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.6, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
}
free = lambda what, nbytes, peers: 0.0


def uneven(rank: int, step: int) -> int:
    """From many samples to none, and in every fifth step nobody has any."""
    return 0 if step % 5 == 4 else (7 * rank + 3 * step) % 5


def jitter(rank: int, step: int) -> float:
    """Nobody is equally fast twice, and rank 1 is slow."""
    return (1 + (5 * rank + 3 * step) % 7) * (4 if rank == 1 else 1)


def alone(problem: Problem, make: Make, steps: int) -> Tensor:
    plain = Rank(problem, 0, make)
    for _ in range(steps):
        plain.replica.backward()
        plain.replica.step()
    return plain.point()


def commits(outcomes: list[Outcome]) -> list[Any]:
    return list(outcomes[0].link.clock.commits_since(0))


# -- the table --


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("counts", [full, uneven], ids=["full", "uneven"])
@pytest.mark.parametrize("rule", [StaleSync(0), Backup(quorum=4)], ids=str)
def test_without_staleness_and_with_all_ranks_it_is_synchronous_sgd(
    rule: Any, counts: Counts, make: str
) -> None:
    synchronous = run(AllReduce(), NOISY, 12, make=MAKES[make], counts=counts)
    assert_outcomes_close(
        run(rule, NOISY, 12, make=MAKES[make], counts=counts, pace=jitter), synchronous
    )


@pytest.mark.parametrize("make", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize(
    "rule",
    [
        StaleSync(0),
        StaleSync(3),
        StaleSync(INF),
        Backup(),
        Downpour(),
        Downpour(adapt=True),
        DCASGD(),
        DCASGD(adaptive=True),
    ],
    ids=str,
)
def test_of_one_rank_it_is_the_plain_optimizer_to_the_bit(rule: Any, make: str) -> None:
    problem = Problem(1, noise=0.3)
    (outcome,) = run(rule, problem, 12, make=MAKES[make])
    assert torch.equal(outcome.consensus, alone(problem, MAKES[make], 12))


@pytest.mark.parametrize("make", ["adam", "adamw", "adagrad"])
def test_of_one_rank_it_is_the_plain_optimizer_whatever_that_is(make: str) -> None:
    problem = Problem(1, noise=0.3)
    (outcome,) = run(Downpour(), problem, 12, make=MAKES[make])
    torch.testing.assert_close(
        outcome.consensus, alone(problem, MAKES[make], 12), rtol=1e-12, atol=1e-12
    )


def one_after_the_other(rule: Any, problem: Problem, rounds: int) -> Tensor:
    """All rounds of rank 0, then all of rank 1, ...: what a rank pulled is what stands there when
    it pushes.
    """
    world, shards, clock = World(problem.size), [Shard()], Clock(problem.size)

    def main(group: InprocGroup) -> Tensor:
        me, store = (
            Rank(problem, group.rank, nominal=BATCH),
            InprocStore(world, group.rank, shards, clock),
        )
        hold(rule, me, store, {})
        state = rule.init(me.replica)
        world.spend(group.rank, 100.0 * group.rank)
        for _ in range(rounds):
            rule.round(me.replica, store, state)
        group.all_reduce({"end": torch.zeros(1)}).wait()
        return me.point(rule.consensus(me.replica, store, state))

    return world.run(main)[0]


@pytest.mark.parametrize(
    "rule", [DCASGD(), DCASGD(strength=0.5), DCASGD(adaptive=True), Downpour(adapt=True)], ids=str
)
def test_without_delay_there_is_nothing_to_compensate(rule: Any) -> None:
    problem = Problem(3, noise=0.3)
    assert torch.equal(
        one_after_the_other(rule, problem, 4), one_after_the_other(Downpour(), problem, 4)
    )
    late, plain = run(rule, problem, 4), run(Downpour(), problem, 4)
    assert not torch.equal(late[0].consensus, plain[0].consensus), "and with delay there is"


@pytest.mark.parametrize("pace", [None, jitter])
def test_compensation_of_no_strength_is_downpour_to_the_bit(pace: Any) -> None:
    gentle = lambda p: torch.optim.SGD(p, lr=0.05)
    plain, none, some = (
        run(rule, NOISY, 8, make=gentle, pace=pace)
        for rule in (Downpour(), DCASGD(strength=0.0), DCASGD(strength=0.1))
    )
    assert same_outcomes(none, plain) and not same_outcomes(some, plain)


def test_staleness_of_at_most_one_leaves_the_rate_as_it_is_to_the_bit() -> None:
    """Of two ranks that are equally fast each is one update late; of three, two."""
    for size, alike in ((2, True), (3, False)):
        problem = Problem(size, noise=0.3)
        assert (
            same_outcomes(run(Downpour(adapt=True), problem, 8), run(Downpour(), problem, 8))
            == alike
        )


def test_local_steps_between_fetch_and_push_are_those_of_serial_sgd() -> None:
    """One rank that fetches and pushes every third step: where its own steps took it is where the
    pushed sum takes the server.
    """
    problem = Problem(1, noise=0.3)
    (outcome,) = run(Downpour(n_push=3, n_fetch=3), problem, 4)
    assert outcome.steps == 12
    torch.testing.assert_close(outcome.consensus, alone(problem, sgd, 12), rtol=1e-12, atol=1e-12)


def test_updates_of_stale_ranks_carry_their_share_so_that_one_clock_is_one_synchronous_step() -> (
    None
):
    """From a common start all pull the same: after one clock the sum of their updates is the mean
    gradient's step.
    """
    for staleness in (1, 3, INF):
        assert_outcomes_close(run(StaleSync(staleness), NOISY, 1), run(AllReduce(), NOISY, 1))


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_the_number_of_servers_changes_no_bit(rule: Any) -> None:
    one = run(rule, NOISY, 5, make=momentum, pace=jitter)
    for servers in (2, 3):
        assert same_outcomes(
            one, run(rule, NOISY, 5, make=momentum, pace=jitter, servers=servers)
        ), servers


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_under_delays_it_runs_the_same_way_every_time(rule: Any) -> None:
    first, second = (run(rule, NOISY, 5, make=momentum, pace=jitter) for _ in range(2))
    assert same_outcomes(first, second)
    assert [o.link.world.now for o in first] == [o.link.world.now for o in second]


def test_every_strategy_over_a_store_is_asked_here() -> None:
    assert {type(rule) for rule in EVERY} == {
        rule for rule in STRATEGIES.values() if rule.link is Store
    }


# -- backup workers --

SCRIPT = [
    (3, 5, 90),
    (7, 2, 90),
    (4, 4, 90),
    (1, 8, 90),
    (6, 5, 90),
]  # seconds of each rank's batch, by step


def scripted(rank: int, step: int) -> float:
    return float(SCRIPT[step][rank])


def with_backup(problem: Problem) -> tuple[list[Outcome], list[float]]:
    """Rank 2 is late in every step; when each step was made, as rank 0 saw it."""
    times: list[float] = []

    def look(me: Rank, link: InprocStore, state: Tensors) -> None:
        if me.rank == 0:
            times.append(link.world.now[0])

    return run(
        Backup(quorum=2), problem, [5, 5, 1], pace=scripted, cost=free, after_round=look
    ), times


def test_a_step_takes_as_long_as_the_last_of_the_quorum() -> None:
    _, times = with_backup(Problem(3))
    assert times == list(itertools.accumulate(float(sorted(delays)[1]) for delays in SCRIPT))


def test_the_divisor_is_the_quorum_and_a_late_gradient_never_counts() -> None:
    problem, other = Problem(3, noise=0.3), Problem(3, noise=0.3)
    other.b[2].mul_(-7)
    outcomes, _ = with_backup(problem)
    assert same_outcomes(outcomes[:2], with_backup(other)[0][:2]) and not torch.equal(
        outcomes[2].losses[0], with_backup(other)[0][2].losses[0]
    )
    ranks, x = [Rank(problem, r) for r in range(2)], Rank(problem, 0).point()
    for _ in SCRIPT:
        gradients = []
        for me in ranks:
            me.model.u.data.copy_(x[:5])
            me.model.v.data.copy_(x[5:])
            me.replica.backward()
            gradients.append(me.point(me.replica.gradient()))
        x = x - 0.25 * sum(gradients) / 2
    torch.testing.assert_close(outcomes[0].consensus, x, rtol=1e-12, atol=1e-12)


def test_a_rank_that_was_late_once_takes_part_again() -> None:
    """Late with its first batch only: in the middle of step 7 it begins with the model of step 6,
    and comes in time.
    """
    slow_once = lambda rank, step: 3.0 if rank < 2 else 20.0 if step == 0 else 0.5
    found = [
        {worker for worker, _ in members}
        for _, members in commits(
            run(Backup(quorum=2), Problem(3), [8, 8, 2], pace=slow_once, cost=free)
        )
    ]
    assert found[:7] == [{0, 1}] * 6 + [{0, 2}]


# -- asynchronous SGD --


def test_the_server_has_made_as_many_updates_as_pushes_were_accepted() -> None:
    for rule, pushes in (
        (Downpour(), 4 * 7),
        (Downpour(n_push=3), 4 * 7),
        (DCASGD(), 4 * 7),
        (StaleSync(0), 7),
        (Backup(4), 7),
    ):
        outcomes = run(rule, NOISY, 7)
        assert outcomes[0].link.shards[0].version == pushes, rule


@pytest.mark.parametrize("size", [2, 3])
def test_of_equally_fast_ranks_each_gradient_is_as_many_updates_late_as_there_are_others(
    size: int,
) -> None:
    rounds, spread_out = 20, lambda rank, step: 30.0 + 10.0 * rank * (step == 0)
    stats = run(Downpour(), Problem(size), rounds, pace=spread_out)[0].link.stats()
    assert stats[f"stale_{size - 1}"] >= size * rounds - size * (
        size - 1
    )  # all but at the start and at the end


def test_what_is_applied_is_the_sum_of_what_was_pushed() -> None:
    """Plain SGD is linear: the model has moved by the rate times the sum of all accrued gradients,
    whoever pushed them when.
    """
    problem, given = Problem(3, noise=0.3), []

    class Watched(Downpour):
        def round(self, replica: Any, link: Any, state: Tensors) -> Tensor:
            push = link.push

            def watch(rows: Any, updates: Tensors, **how: Any) -> Any:
                given.append({k: v.clone() for k, v in updates.items()})
                return push(rows, updates, **how)

            link.push = watch
            try:
                return super().round(replica, link, state)
            finally:
                link.push = push

    outcomes = run(Watched(n_push=3, n_fetch=2), problem, 4, pace=jitter)
    start = Rank(problem, 0)
    moved = 0.25 * sum(start.point(g) for g in given)
    assert len(given) == 3 * 4 and outcomes[0].steps == 12
    torch.testing.assert_close(outcomes[0].consensus, start.point() - moved, rtol=1e-10, atol=1e-10)


def compensated(shift: float) -> tuple[float, float]:
    """l = -log x, so l'' = l' l': the gradient at 2, applied where the model is `shift` further,
    and the true one there.
    """
    world, shards, clock = World(2), [Shard()], Clock(2)

    def main(group: InprocGroup) -> float:
        store = InprocStore(world, group.rank, shards, clock)
        store.create(
            Table("x", length=1, dtype="float64", optimizer="sgd", options={"lr": 1.0}),
            torch.tensor([2.0], dtype=torch.float64),
        )
        x = store.pull({"x": None}, remember=True)["x"].clone()
        if group.rank == 0:  # moves the model while the other one computes
            store.push({"x": None}, {"x": torch.tensor([-shift], dtype=torch.float64)})
        else:
            world.spend(1, 10.0)
            before = store.pull({"x": None})["x"].clone()
            store.push({"x": None}, {"x": -1 / x}, compensate=1.0)
            return float(before - store.pull({"x": None})["x"])
        return 0.0

    return world.run(main)[1], -1 / (2.0 + shift)


def test_compensation_is_the_first_taylor_term_where_the_hessian_is_the_squared_gradient() -> None:
    applied, _ = compensated(0.1)
    assert applied == pytest.approx(-1 / 2 + 0.1 / 4, abs=1e-15)
    errors = [abs(applied - true) for applied, true in map(compensated, (0.1, 0.05, 0.025))]
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine == pytest.approx(4, rel=0.1), "what is left is of second order"


# -- bounded staleness --


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_nobody_begins_a_clock_before_the_slowest_has_done_the_one_that_staleness_says(
    staleness: int,
) -> None:
    done, leads = Counter({r: 0 for r in range(4)}), []

    def pace(rank: int, step: int) -> float:
        leads.append(step - min(done.values()))
        return jitter(rank, step)

    class Counted(StaleSync):
        def round(self, replica: Any, link: Any, state: Tensors) -> Tensor:
            tick = link.tick

            def counting(*given: Any, **how: Any) -> Any:
                done[link.rank] += 1
                return tick(*given, **how)

            link.tick = counting
            try:
                return super().round(replica, link, state)
            finally:
                link.tick = tick

    run(Counted(staleness), NOISY, 20, pace=pace)
    assert max(leads) == staleness, "the bound holds, and is used"


def test_without_a_bound_nobody_ever_waits() -> None:
    outcomes = run(StaleSync(INF), NOISY, 20, pace=jitter)
    world, spent = outcomes[0].link.world, [sum(jitter(r, n) for n in range(20)) for r in range(4)]
    # until the meeting in the end a rank's time is what its steps and its calls took: a pull, a
    # push and a tick each
    for r in range(4):
        assert world.busy[r]["compute"] == spent[r]
        assert world.now[r] - world.busy[r]["wait"] == pytest.approx(spent[r] + 3 * 20, abs=6), r


# -- elastic averaging --


def test_elastic_averaging_conserves_the_sum_of_replicas_and_centre_whoever_comes_when() -> None:
    problem = Problem(3)
    apart = run(AsyncEASGD(period=1), problem, 1)
    total = sum(o.x for o in apart) + apart[0].consensus
    for o in apart:
        o.saved["optimizer"][1]["groups"][0]["lr"] = 0.0
    later = run(AsyncEASGD(period=1), problem, 6, resumed=apart, pace=jitter)
    torch.testing.assert_close(
        sum(o.x for o in later) + later[0].consensus, total, rtol=1e-12, atol=1e-12
    )
    assert not torch.allclose(later[0].x, apart[0].x, rtol=1e-3), "they did move"


def test_an_exchange_that_nobody_disturbs_closes_the_gap_by_its_factor() -> None:
    problem, alpha = Problem(2), 0.3
    apart = run(AsyncEASGD(period=1, alpha=alpha), problem, 1)
    for o in apart:
        o.saved["optimizer"][1]["groups"][0]["lr"] = 0.0
    centres, gaps = [apart[0].consensus], []
    mine = [o.x for o in apart]

    def look(me: Rank, link: InprocStore, state: Tensors) -> None:
        centre = me.point(link.pull(dict.fromkeys(me.replica.params)))
        gaps.append((mine[me.rank] - centres[-1], me.point() - centre))
        centres.append(centre)
        mine[me.rank] = me.point()

    apart_in_time = lambda rank, step: (
        30.0 + 15.0 * rank * (step == 1)
    )  # the first step was taken before
    run(
        AsyncEASGD(period=1, alpha=alpha),
        problem,
        5,
        resumed=apart,
        pace=apart_in_time,
        after_round=look,
    )
    assert len(gaps) == 10
    for before, after in gaps:
        torch.testing.assert_close(after, (1 - 2 * alpha) * before, rtol=1e-12, atol=1e-12)


# -- asynchronous ADMM --

SOLVED = {"period": 70, "rho": 1.0}  # a local problem is solved to the end


def gradient(problem: Problem, rank: int, x: Tensor) -> Tensor:
    return problem.A[rank] @ x - problem.b[rank]


def test_the_multiplier_is_minus_the_gradient_after_every_step_of_a_rank() -> None:
    problem, seen = Problem(3, mixed=1.0), []

    def look(me: Rank, link: InprocStore, state: Tensors) -> None:
        y = me.point({k: state[f"y/{k}"] for k in me.replica.params})
        seen.append(float((y + gradient(problem, me.rank, me.point())).abs().max()))
        assert float(y.abs().max()) > 0.01

    run(AsyncADMM(**SOLVED), problem, 4, pace=jitter, after_round=look)
    assert max(seen) < 1e-8 and len(seen) == 12


def test_with_all_ranks_and_no_delay_it_is_the_synchronous_method_in_the_order_x_y_z() -> None:
    problem = Problem(3, mixed=1.0)
    outcomes = run(AsyncADMM(quorum=3, delay=1, **SOLVED), problem, 5, pace=jitter)
    z, ys, rho = Rank(problem, 0).point(), [torch.zeros(8).double() for _ in range(3)], 1.0
    for _ in range(5):
        xs = [
            torch.linalg.solve(A + rho * torch.eye(8).double(), b - y + rho * z)
            for A, b, y in zip(problem.A, problem.b, ys, strict=True)
        ]
        ys = [y + rho * (x - z) for x, y in zip(xs, ys, strict=True)]
        z = torch.stack([x + y / rho for x, y in zip(xs, ys, strict=True)]).mean(0)
    torch.testing.assert_close(outcomes[0].consensus, z, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("quorum", "delay"),
    [(1, 3), (4, 1), *(pytest.param(2, d, marks=pytest.mark.slow) for d in (2, 10))],
)
def test_it_reaches_the_optimum_under_any_quorum_and_delay_and_leaves_nobody_out_for_longer(
    quorum: int, delay: int
) -> None:
    problem = Problem(4, mixed=1.0)
    outcomes = run(
        AsyncADMM(period=8, rho=1.0, quorum=quorum, delay=delay), problem, 120, pace=jitter
    )
    torch.testing.assert_close(outcomes[0].consensus, problem.optimum(), rtol=1e-5, atol=1e-5)
    found = [{worker for worker, _ in members} for _, members in commits(outcomes)]
    done, absent = Counter[int](), Counter[int]()
    for members in found:
        done.update(members)
        if max(done.values()) == 120:  # from here on somebody rests
            break
        assert len(members) >= quorum
        for rank in range(4):
            absent[rank] = 0 if rank in members else absent[rank] + 1
            assert absent[rank] < delay
    assert len(found) >= 120
