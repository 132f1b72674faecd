"""Robust merging: each aggregation against its definition and against lying ranks.

In the limits where it must be the mean, it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from manyhands.core import Group, Tensors, Work
from manyhands.errors import PlanError
from manyhands.exchange.inproc import World
from manyhands.exchange.wrapper import GroupWrapper
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.building_blocks import aggregate
from manyhands.merge.robust import How, Robust
from support.compare import assert_close
from support.quadratic import Problem, Rank

HOWS = get_args(How)
Lie = Callable[[Tensor], Tensor]
LIES: dict[str, Lie] = {
    "random": lambda g: (
        100
        * torch.randn(
            g.shape,
            generator=torch.Generator().manual_seed(int(g.abs().sum() * 1e6) % 2**31),
            dtype=g.dtype,
        )
    ),
    "flipped": lambda g: -10 * g,
    "nan": lambda g: g * torch.nan,
    "infinite": lambda g: g * torch.inf,
    "huge": lambda g: torch.full_like(g, torch.finfo(g.dtype).max / 10),
}


def rows(n: int, numel: int = 40, seed: int = 0) -> list[Tensors]:
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "a": torch.randn(numel, generator=g, dtype=torch.float64),
            "b": torch.randn(7, generator=g, dtype=torch.float64),
        }
        for _ in range(n)
    ]


def flat(row: Tensors) -> Tensor:
    return torch.cat([v.flatten() for v in row.values()])


def merged(how: Any, given: Sequence[Tensors], f: int = 1, **options: Any) -> Tensor:
    """What the rule makes of these gradients in a first round."""
    centre = {f"centre/{k}": torch.zeros_like(v) for k, v in given[0].items()}
    return flat(Robust(how, f, **options).merge(aggregate.sanitise(given, f), centre))


def matrix(given: Sequence[Tensors]) -> Tensor:
    return torch.stack([flat(row) for row in given])


# -- definitions --


@pytest.mark.parametrize("n", range(1, 14))
def test_the_network_sorts_like_sort(n: int) -> None:
    x = torch.randn(n, 1000, generator=torch.Generator().manual_seed(n)).round(
        decimals=1
    )  # with ties
    assert torch.equal(torch.stack(aggregate._sorted(x)), x.sort(0).values)


@pytest.mark.parametrize("n", [3, 4, 5, 8])
def test_the_median_is_the_middle_one_or_the_mean_of_two(n: int) -> None:
    given = rows(n)
    assert_close(merged("median", given), matrix(given).quantile(0.5, 0))


def test_the_trimmed_mean_leaves_out_the_outermost_of_every_coordinate() -> None:
    given = rows(7)
    assert_close(merged("trimmed_mean", given, 2), matrix(given).sort(0).values[2:5].mean(0))


@pytest.mark.parametrize(("n", "f"), [(5, 1), (7, 2), (9, 1)])
def test_krum_picks_by_the_nearest_others_and_multi_krum_averages_the_best(n: int, f: int) -> None:
    given = rows(n)
    x = matrix(given)
    scores = []
    for i in range(n):
        others = sorted(float((x[i] - x[j]).square().sum()) for j in range(n) if j != i)
        scores.append(sum(others[: n - f - 2]))
    order = sorted(range(n), key=scores.__getitem__)
    assert torch.equal(merged("krum", given, f), x[order[0]])
    assert_close(merged("multi_krum", given, f), x[order[: n - f]].mean(0))


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    given = rows(6)
    x, found = matrix(given), flat(aggregate.geometric_median(given, passes=200))
    to = lambda v: float((x - v).norm(dim=1).sum())
    directions = torch.randn(
        50, x.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    assert all(to(found + 1e-3 * d) > to(found) for d in directions)
    eight = merged("geometric_median", given)
    assert to(eight) < to(found) * (1 + 1e-4) < to(x.mean(0)) * (1 + 1e-4), "8 passes come close"


def test_the_geometric_median_of_points_on_a_line_is_their_median() -> None:
    given = [{"a": torch.tensor([float(x)], dtype=torch.float64)} for x in (0, 1, 2, 50, 1000)]
    assert_close(merged("geometric_median", given), torch.tensor([2.0], dtype=torch.float64), 1e-3)


def test_clipping_moves_each_vote_no_further_than_the_radius() -> None:
    given = rows(5)
    given[2] = {k: 1e6 * v for k, v in given[2].items()}
    x, r = matrix(given), 2.5
    expected = (x * (r / x.norm(dim=1)).clamp(max=1)[:, None]).mean(0)
    assert_close(merged("clipping", given, radius=r), expected)
    assert merged("clipping", given, radius=r).norm() <= r
    assert merged("clipping", given).norm() <= x.norm(dim=1).sort().values[3] * (1 + 1e-12), (
        "no further than the honest ones stand"
    )


def test_clipping_starts_from_where_it_ended() -> None:
    rule, given = Robust("clipping", radius=0.5), rows(5)
    state = {f"centre/{k}": torch.zeros_like(v) for k, v in given[0].items()}
    x, v = matrix(given), torch.zeros(47, dtype=torch.float64)
    for _ in range(3):
        v = v + ((x - v) * (0.5 / (x - v).norm(dim=1)).clamp(max=1)[:, None]).mean(0)
        assert_close(flat(rule.merge(given, state)), v)


def test_chunks_make_no_difference() -> None:
    long = [
        {"a": torch.randn(70_001, generator=torch.Generator().manual_seed(i), dtype=torch.float64)}
        for i in range(5)
    ]
    x = matrix(long)
    assert_close(merged("median", long), x.median(0).values)
    assert_close(merged("trimmed_mean", long), x.sort(0).values[1:-1].mean(0))
    assert any(torch.equal(merged("krum", long), row) for row in x)


# -- what all of them keep --


@pytest.mark.parametrize("how", HOWS)
def test_the_order_of_ranks_makes_no_difference(how: Any) -> None:
    given = rows(7)
    assert_close(merged(how, given), merged(how, [given[i] for i in (3, 6, 0, 5, 1, 4, 2)]))


@pytest.mark.parametrize("how", HOWS)
def test_scaling_all_votes_scales_the_outcome(how: Any) -> None:
    given = rows(7)
    options, larger = ({"radius": 3.0}, {"radius": 24.0}) if how == "clipping" else ({}, {})
    scaled = [{k: 8 * v for k, v in row.items()} for row in given]
    assert_close(merged(how, scaled, **larger), 8 * merged(how, given, **options))
    assert_close(merged(how, scaled), 8 * merged(how, given))


@pytest.mark.parametrize("how", [h for h in HOWS if h != "clipping"])
def test_moving_all_votes_moves_the_outcome(how: Any) -> None:
    given, away = rows(7), rows(1, seed=9)[0]
    moved = [{k: v + away[k] for k, v in row.items()} for row in given]
    assert_close(merged(how, moved), merged(how, given) + flat(away), 1e-9)


def test_moving_all_votes_and_the_centre_moves_what_is_clipped() -> None:
    given, away = rows(7), rows(1, seed=9)[0]
    moved = [{k: v + away[k] for k, v in row.items()} for row in given]
    zero = {k: torch.zeros_like(v) for k, v in away.items()}
    assert_close(
        flat(aggregate.clip_centred(moved, away, 1, 3.0)),
        flat(aggregate.clip_centred(given, zero, 1, 3.0)) + flat(away),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lie", LIES)
def test_where_the_honest_agree_lies_change_nothing(lie: str, dtype: torch.dtype) -> None:
    u = {k: v.to(dtype) for k, v in rows(1)[0].items()}
    given = [
        u,
        u,
        {k: LIES[lie](v) for k, v in u.items()},
        u,
        u,
        {k: -LIES[lie](v) for k, v in u.items()},
        u,
    ]
    for how in ("median", "krum"):
        assert torch.equal(merged(how, given, 2), flat(u))
    for how in ("trimmed_mean", "geometric_median", "multi_krum"):
        assert_close(merged(how, given, 2), flat(u), 1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_the_outcome_is_finite_whatever_one_rank_sends(how: Any, bad: float) -> None:
    given = [{k: v.float() for k, v in row.items()} for row in rows(5)]
    given[3]["a"][17] = bad
    assert merged(how, given).isfinite().all()


def test_more_nonsense_than_liars_were_expected_shows() -> None:
    """All ranks overflow together when a run diverges: that is no lie, and must not be hidden."""
    given = rows(5)
    for row in given[:2]:
        row["a"][0] = torch.nan
    assert aggregate.sanitise(given, 1)[0]["a"].isnan().any()
    assert not any(row["a"].isnan().any() for row in aggregate.sanitise(given, 2))


# -- limits --


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("clipping", {"f": 0}),
        ("trimmed_mean", {"f": 0}),
        ("multi_krum", {"f": 0}),
        ("clipping", {"radius": float("inf")}),
        ("clipping", {"radius": 1e9}),
    ],
)
def test_with_nothing_to_guard_against_it_is_synchronous_sgd(
    how: Any, options: dict[str, Any]
) -> None:
    problem = Problem(5, mixed=0.5)
    assert_close(merged(how, rows(5), **options), matrix(rows(5)).mean(0))
    for a, b in zip(
        trained(Robust(how, **options), problem, 20), trained(AllReduce(), problem, 20), strict=True
    ):
        assert_close(a, b)


def test_alone_it_is_plain_sgd() -> None:
    for how in HOWS:
        assert torch.equal(
            trained(Robust(how), Problem(1), 20)[0], trained(AllReduce(), Problem(1), 20)[0]
        )


# -- on the bench --


class Liar(GroupWrapper):
    """A link whose rank sends something else than what it was given."""

    def __init__(self, group: Group, lie: Lie):
        super().__init__(group)
        self.lie = lie

    def all_reduce(self, values: Tensors, op: Any = "sum") -> Work:
        for k, v in values.items():
            if k != "count":
                v.copy_(self.lie(v))
        return self.group.all_reduce(values, op)

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        return self.group.swap(
            {k: self.lie(v) for k, v in values.items()}, peers
        )  # about its samples too


def slow(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.025)


def trained(
    rule: Any, problem: Problem, rounds: int, lie: Lie | None = None, **options: Any
) -> list[Tensor]:
    """Where the ranks end; with a lie, where the honest ones do: the last one lies."""
    rule.check(problem.size)

    def main(group: Any) -> Tensor:
        me = Rank(problem, group.rank, **options)
        state = rule.init(me.replica)
        link = Liar(group, lie) if lie is not None and group.rank == problem.size - 1 else group
        for _ in range(rounds):
            rule.round(me.replica, link, state)
        return me.point()

    ends = World(problem.size).run(main)
    return ends if lie is None else ends[:-1]


HONEST = Problem(5, spread=0.2, noise=0.1)


def honest_optimum() -> Tensor:
    return HONEST.optimum([1.0] * 4 + [0.0])


def liars() -> list[Any]:
    """Every way with two lies, one way with every lie; the rest of the product is slow."""
    found = []
    for rule, lie in itertools.product(
        [*map(Robust, HOWS), Robust("clipping", momentum=0.9)], LIES
    ):
        quick = lie in ("flipped", "infinite") or rule == Robust("median")
        found.append(
            pytest.param(rule, lie, id=f"{rule}-{lie}", marks=() if quick else (pytest.mark.slow,))
        )
    return found


@pytest.mark.parametrize(("rule", "lie"), liars())
def test_one_liar_of_five_moves_nobody_far_and_the_honest_stay_alike(rule: Any, lie: str) -> None:
    options = {"make": slow} if rule.momentum else {}  # ten gradients in one
    ends = trained(rule, HONEST, 100, LIES[lie], **options)
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert (ends[0] - honest_optimum()).norm() < 1.0


@pytest.mark.parametrize("lie", LIES)
def test_the_plain_mean_fails_with_one_liar_of_five(lie: str) -> None:
    end = trained(AllReduce(), HONEST, 100, LIES[lie])[0]
    assert not (end - honest_optimum()).norm() < 5.0


@pytest.mark.parametrize("rule", [*map(Robust, HOWS), Robust("median", momentum=0.9)], ids=str)
def test_replicas_stay_alike_with_uneven_shares_and_ranks_without_samples(rule: Any) -> None:
    counts = lambda rank, step: (rank + step) % 4 if rank != 1 else 0
    problem = Problem(5, spread=0.2)
    ends = trained(rule, problem, 100, counts=counts)
    assert all(torch.equal(end, ends[0]) for end in ends)
    start = Rank(problem, 0).point()
    # votes for no change hold it up; they do not lead it away
    assert (ends[0] - problem.optimum()).norm() < (start - problem.optimum()).norm() / 3


def test_nobody_moves_where_nobody_has_samples() -> None:
    ends = trained(Robust(), Problem(3), 5, counts=lambda rank, step: 0)
    assert all(torch.equal(end, Rank(Problem(3), 0).point()) for end in ends)


def test_momentum_is_each_ranks_own_sum_over_time() -> None:
    problem, rule = Problem(5, spread=0.2), Robust("median", momentum=0.9)

    def main(group: Any) -> tuple[Tensor, Tensor]:
        me = Rank(problem, group.rank)
        state = rule.init(me.replica)
        expected = torch.zeros(8, dtype=torch.float64)
        for _ in range(4):
            expected = 0.9 * expected + (problem.A[group.rank] @ me.point() - problem.b[group.rank])
            rule.round(me.replica, group, state)
        return me.point({"float64": state["momentum/float64"]}), expected

    for found, expected in World(5).run(main):
        assert_close(found, expected)


# -- refusals --


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Robust("krum").check(4),
            r"merge\.how=krum with merge\.f=1 needs 2f\+3 = 5 ranks or more, but data=4; set "
            r"data=5, merge\.f=0 or .*clipping",
        ),
        (lambda: Robust("multi_krum", f=2).check(6), r"2f\+3 = 7 ranks"),
        (
            lambda: Robust("median").check(2),
            r"2f\+1 = 3 ranks or more, but data=2; set data=3, merge\.f=0",
        ),
        (lambda: Robust("trimmed_mean", f=2).check(4), r"2f\+1 = 5 ranks"),
        (lambda: Robust(f=-1), r"merge\.f=-1"),
        (lambda: Robust(momentum=1.0), r"merge\.momentum=1\.0"),
        (
            lambda: Robust("median", radius=1.0),
            r"merge\.radius=1\.0.*no effect with merge\.how=median",
        ),
        (lambda: Robust(radius=0.0), r"merge\.radius=0\.0.*more than 0"),
    ],
)
def test_what_cannot_hold_is_refused_with_the_numbers(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()
