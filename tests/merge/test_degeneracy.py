"""Merge strategies that equal each other in their limits.

Also what they cost in messages, and their equations on numbers worked out by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core import Group, Tensors
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.merge.admm import ADMM
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.bmuf import BMUF
from manyhands.merge.diloco import DiLoCo
from manyhands.merge.easgd import EASGD
from manyhands.merge.local_sgd import LocalSGD
from manyhands.merge.model_average import ModelAverage
from manyhands.merge.streaming_diloco import StreamingDiLoCo
from support.compare import all_ranks_agree, assert_outcomes_close
from support.quadratic import Counts, Outcome, Problem, Rank, full, momentum, run, sgd

NOISY = Problem(4, mixed=1.0, noise=0.3)
VECTOR_BYTES = 16 * 8  # both parameters of the bench, each padded to 64 bytes


def uneven(rank: int, step: int) -> int:
    """From many samples to none, never the same for long."""
    return (7 * rank + 3 * step) % 5


# -- the table --


@pytest.mark.parametrize("counts", [full, uneven], ids=["full", "uneven"])
@pytest.mark.parametrize(
    "rule", [LocalSGD(period=1), ModelAverage(period=1), LocalSGD(period=9, post=100)], ids=str
)
def test_a_merge_after_every_step_is_synchronous_sgd(rule: Any, counts: Counts) -> None:
    assert_outcomes_close(
        run(rule, NOISY, 12, counts=counts), run(AllReduce(), NOISY, 12, counts=counts)
    )


def test_a_merge_after_every_step_is_synchronous_sgd_under_momentum_too_as_both_are_linear() -> (
    None
):
    assert_outcomes_close(
        run(LocalSGD(period=1), NOISY, 12, make=momentum),
        run(AllReduce(), NOISY, 12, make=momentum),
    )


LOCAL = LocalSGD(period=5)
DILOCO = DiLoCo(period=6, lr=0.7, momentum=0.4)
PAIRS: list[tuple[Any, Any]] = [
    (ModelAverage(period=5), LOCAL),
    (BMUF(period=5, eta=0.0, zeta=1.0, nesterov=True, moments="keep"), LOCAL),
    (BMUF(period=5, eta=0.0, zeta=1.0, nesterov=False, moments="keep"), LOCAL),
    (DiLoCo(period=5, lr=1.0, momentum=0.0), LOCAL),
    (ModelAverage(period=5, moments="average"), LocalSGD(period=5, moments="average")),
]


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=str)
@pytest.mark.parametrize("counts", [full, uneven], ids=["full", "uneven"])
def test_in_their_limits_strategies_are_each_other(left: Any, right: Any, counts: Counts) -> None:
    assert_outcomes_close(
        run(left, NOISY, 5, make=momentum, counts=counts),
        run(right, NOISY, 5, make=momentum, counts=counts),
    )


def test_streaming_in_one_fragment_is_diloco() -> None:
    whole = run(DILOCO, NOISY, 5, make=momentum)
    assert_outcomes_close(
        run(
            StreamingDiLoCo(period=6, fragments=1, tau=0, alpha=0.0, lr=0.7, momentum=0.4),
            NOISY,
            5,
            make=momentum,
        ),
        whole,
    )


def test_streaming_in_one_fragment_weighs_uneven_shares_as_diloco_does_to_single_precision() -> (
    None
):
    """Shares travel as a part of a step's samples, in float32, so that nobody has to wait for their
    sum first.
    """
    rule = StreamingDiLoCo(period=6, fragments=1, tau=0, alpha=0.0, lr=0.7, momentum=0.4)
    streamed, whole = (run(r, NOISY, 5, make=momentum, counts=uneven) for r in (rule, DILOCO))
    torch.testing.assert_close(streamed[0].consensus, whole[0].consensus, rtol=1e-6, atol=1e-6)


def look_ahead(eta: float, outcome: Outcome) -> Tensor:
    return outcome.x + eta * Rank(NOISY, 0).point(
        {k.removeprefix("D/"): v for k, v in outcome.state.items()}
    )


@pytest.mark.parametrize("zeta", [1.0, 0.6])
def test_what_nesterov_bmuf_broadcasts_is_diloco_with_its_momentum_and_rate(zeta: float) -> None:
    rule = BMUF(period=4, eta=0.7, zeta=zeta, moments="keep")
    ours, diloco = (
        run(r, NOISY, 6, make=momentum) for r in (rule, DiLoCo(period=4, lr=zeta, momentum=0.7))
    )
    for mine, theirs in zip(ours, diloco, strict=True):
        ahead = look_ahead(0.7, mine)
        torch.testing.assert_close(ahead, theirs.x, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(mine.consensus, ahead, rtol=1e-3), (
            "evaluated and saved is W, not the look-ahead"
        )


def test_diloco_and_bmuf_are_torch_nesterov_and_momentum_on_the_mean_displacement() -> None:
    """One block of one step of plain SGD moves by -lr g, so outer SGD sees the pseudo-gradient lr g
    of the union batch.
    """
    problem = Problem(2, noise=0.3)
    for rule, options in (
        (DiLoCo(period=1, lr=0.7, momentum=0.9), {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (BMUF(period=1, eta=0.6, nesterov=False), {"lr": 1.0, "momentum": 0.6}),
    ):
        ours = run(rule, problem, 8)
        ranks = [Rank(problem, r) for r in range(2)]
        x = torch.nn.Parameter(ranks[0].point())
        outer = torch.optim.SGD([x], **options)
        for _ in range(8):
            moved = []
            for me in ranks:
                start = x.detach().split([5, 3])
                me.model.u.data.copy_(start[0])
                me.model.v.data.copy_(start[1])
                me.replica.backward()
                me.replica.step()
                moved.append(x.detach() - me.point())
            x.grad = torch.stack(moved).mean(0)
            outer.step()
        torch.testing.assert_close(ours[0].consensus, x.detach(), rtol=1e-12, atol=1e-12)


def test_with_common_curvature_and_full_gradients_the_mean_of_local_sgd_is_sync_sgd() -> None:
    problem = Problem(3)
    for period in (2, 5, 7):
        rounds = 3
        assert_outcomes_close(
            run(LocalSGD(period=period), problem, rounds),
            run(AllReduce(), problem, rounds * period),
        )


def test_bmuf_takes_its_momentum_from_the_number_of_ranks() -> None:
    assert_outcomes_close(run(BMUF(period=3), NOISY, 4), run(BMUF(period=3, eta=0.75), NOISY, 4))


def test_admm_on_ranks_with_the_same_data_has_no_multiplier() -> None:
    outcomes = run(ADMM(period=4), Problem(3, spread=0.0), 3)
    assert all(
        float(v.abs().max()) < 1e-12
        for o in outcomes
        for k, v in o.state.items()
        if k.startswith("y/")
    )


# -- who agrees when --


@pytest.mark.parametrize(
    "rule",
    [ModelAverage(3), LocalSGD(3), BMUF(3), DiLoCo(3), ADMM(3)],
    ids=lambda r: type(r).__name__,
)
def test_between_blocks_all_replicas_are_the_model(rule: Any) -> None:
    outcomes = run(rule, NOISY, 4, make=momentum, counts=uneven)
    assert all_ranks_agree(outcomes) and all(torch.equal(o.x, o.consensus) for o in outcomes)


@pytest.mark.parametrize(
    "rule", [EASGD(3), StreamingDiLoCo(8, 2, 1)], ids=lambda r: type(r).__name__
)
def test_elastic_and_streaming_replicas_differ_but_stand_for_one_model_and_one_state(
    rule: Any,
) -> None:
    outcomes = run(rule, NOISY, 4, make=momentum, counts=uneven)
    assert not all_ranks_agree(outcomes)
    for k in outcomes[0].state:
        if k != "samples":  # how many of them each rank had
            assert all(torch.equal(o.state[k], outcomes[0].state[k]) for o in outcomes), k


def test_averaged_moments_are_the_same_everywhere_kept_ones_differ_and_reset_ones_are_gone() -> (
    None
):
    found = {
        how: run(LocalSGD(3, moments=how), NOISY, 2, make=momentum)
        for how in ("keep", "average", "reset")
    }
    buffers = {how: [o.saved["optimizer"][0] for o in outcomes] for how, outcomes in found.items()}
    assert not torch.equal(
        buffers["keep"][0]["u/momentum_buffer"], buffers["keep"][1]["u/momentum_buffer"]
    )
    assert all(
        torch.equal(b["u/momentum_buffer"], buffers["average"][0]["u/momentum_buffer"])
        for b in buffers["average"]
    )
    assert not any(buffers["reset"])


# -- when, how often, how much --


@pytest.mark.parametrize(("steps", "period"), [(12, 4), (13, 4), (3, 4), (5, 1)])
@pytest.mark.parametrize("kind", [ModelAverage, LocalSGD, BMUF, DiLoCo, EASGD, ADMM])
def test_there_are_steps_over_period_merges_rounded_up_and_each_moves_the_model_once(
    kind: Any, steps: int, period: int
) -> None:
    outcomes = run(kind(period=period), Problem(3), 100, total=steps)
    merges = -(-steps // period)
    for o in outcomes:
        assert o.steps == steps and len(o.losses) == merges
        assert merges * VECTOR_BYTES <= o.link.nbytes <= merges * (VECTOR_BYTES + 32), (
            "the model, and a few numbers"
        )


def test_streaming_sends_each_fragment_once_a_round_and_never_more_than_its_part_at_once() -> None:
    sent: list[list[tuple[int, dict[str, int]]]] = [[] for _ in range(2)]

    class Watched(ObservedGroup):
        def all_reduce(self, values: Tensors, op: Any = "sum") -> Any:
            sent[self.rank].append(
                (ranks[self.rank].step, {k: v.nbytes for k, v in values.items()})
            )
            return super().all_reduce(values, op)

    problem, rule = Problem(2), StreamingDiLoCo(period=12, fragments=4, tau=2)
    ranks = [Rank(problem, r, total=30) for r in range(2)]

    def main(group: Group) -> None:
        me = ranks[group.rank]
        state = rule.init(me.replica)
        while me.step < 30:
            rule.round(me.replica, Watched(group, lambda event: None), state)

    World(2).run(main)
    fragments = [(step, name) for step, values in sent[0] for name in values if name != "weight"]
    first = [(1, "float64[0]"), (4, "float64[1]"), (7, "float64[2]"), (10, "float64[3]")]
    second = [(12 + step, name) for step, name in first]
    cut_short = [(25, "float64[0]"), (28, "float64[1]"), (30, "float64[2]"), (30, "float64[3]")]
    assert fragments == first + second + cut_short and sent[0] == sent[1]
    assert max(values.get(name, 0) for _, values in sent[0] for name in values) == VECTOR_BYTES // 4


def test_a_streamed_fragment_is_what_it_was_when_it_left_and_lands_tau_steps_later() -> None:
    """mu=0, lr=1, alpha=0: x ends as the mean of where replicas stood tau steps before."""
    problem = Problem(2, noise=0.3)
    ours = run(
        StreamingDiLoCo(period=5, fragments=1, tau=2, alpha=0.0, lr=1.0, momentum=0.0), problem, 1
    )
    three = run(ModelAverage(period=3), problem, 1)
    assert_outcomes_close(ours, three)
    mixed = run(
        StreamingDiLoCo(period=5, fragments=1, tau=2, alpha=0.25, lr=1.0, momentum=0.0), problem, 1
    )
    for rank, o in enumerate(mixed):
        alone = Rank(problem, rank)
        for _ in range(5):
            alone.replica.backward()
            alone.replica.step()
        torch.testing.assert_close(
            o.x, 0.25 * alone.point() + 0.75 * three[0].x, rtol=1e-12, atol=1e-12
        )
        assert torch.equal(o.consensus, mixed[0].consensus)
        torch.testing.assert_close(o.consensus, three[0].x, rtol=1e-12, atol=1e-12)


def test_post_local_sgd_merges_every_step_up_to_its_step_and_then_once_a_period() -> None:
    outcomes = run(LocalSGD(period=4, post=5), Problem(2), 8)
    assert outcomes[0].steps == 5 * 1 + 3 * 4


def test_post_local_sgd_starts_at_the_first_decay_of_the_rate_and_a_warm_up_is_none() -> None:
    rates = [
        0.02,
        0.05,
        0.1,
        0.1,
        0.01,
        0.2,
        0.2,
        0.2,
        0.2,
        0.2,
        0.2,
        0.2,
    ]  # rises again later: still post
    problem = Problem(2)
    lengths: list[int] = []

    def main(group: Group) -> None:
        me = Rank(problem, group.rank, sgd)
        state, rule = LocalSGD(period=3, post="lr").init(me.replica), LocalSGD(period=3, post="lr")
        while me.step < 10:
            before = me.step
            me.update.optimizer.param_groups[0]["lr"] = rates[before]
            rule.round(me.replica, group, state)
            if group.rank == 0:
                lengths.append(me.step - before)

    World(2).run(main)
    assert lengths == [1, 1, 1, 1, 3, 3]


# -- by hand --


def test_one_round_of_diloco_from_a_known_displacement() -> None:
    """theta_i = theta + d on every rank, mu = 0: theta + lr d, so the pseudo-gradient has the right
    sign.
    """
    problem = Problem(3, spread=0.0)
    start, (moved, *_) = Rank(problem, 0).point(), run(LocalSGD(period=4), problem, 1)
    outcome = run(DiLoCo(period=4, lr=0.3, momentum=0.0), problem, 1)[0]
    torch.testing.assert_close(outcome.x, start + 0.3 * (moved.x - start), rtol=1e-12, atol=1e-12)


def test_a_rank_weighs_the_samples_of_its_block() -> None:
    """Two ranks, three samples against one in every step: w = 3/4 x_0 + 1/4 x_1."""
    problem = Problem(2)
    alone = []
    for rank in range(2):
        me = Rank(problem, rank)
        for _ in range(4):
            me.replica.backward()
            me.replica.step()
        alone.append(me.point())
    for rule in (
        ModelAverage(period=4),
        LocalSGD(period=4),
        DiLoCo(period=4, lr=1.0, momentum=0.0),
    ):
        outcome = run(rule, problem, 1, counts=lambda rank, step: 1 if rank else 3)[0]
        torch.testing.assert_close(
            outcome.x, 0.75 * alone[0] + 0.25 * alone[1], rtol=1e-12, atol=1e-12
        )


def test_the_loss_of_a_round_is_the_mean_over_the_samples_of_its_block() -> None:
    problem, counts = Problem(1), [1, 0, 5]
    (outcome,) = run(ModelAverage(period=3), problem, 1, counts=lambda rank, step: counts[step])
    me, seen = Rank(problem, 0, counts=lambda rank, step: counts[step]), []
    for _ in counts:
        seen.append(float(me.replica.backward()))
        me.replica.step()
    assert float(outcome.losses[0]) == pytest.approx((seen[0] + 5 * seen[2]) / 6)
