"""Skeleton split: which rank holds which units, and how they are scaled.

Also which elements of a parameter follow from that.
"""

from __future__ import annotations

import pytest
import torch

from manyhands.split.skeleton import UnitParameter, Units

# 3 inputs -> layer a of 4 units -> layer b of 2, each read by two consecutive numbers -> 1 output;
# then a bias of the output
A, A_BIAS = (
    UnitParameter("a", "x", 0, (4, 3), (3, 1), ((0, 0, 1),)),
    UnitParameter("a.bias", "x", 12, (4,), (1,), ((0, 0, 1),)),
)
B = UnitParameter("b", "x", 16, (2, 4), (4, 1), ((0, 1, 1), (1, 0, 1)))
C = UnitParameter("c", "x", 24, (1, 4), (4, 1), ((1, 1, 2),))
NET = Units((4, 2), (A, A_BIAS, B, C))
LENGTH = 29  # the last one is no unit's
WIDE = Units((40, 20, 7), ())


def flags(*held: int, total: int = 6) -> torch.Tensor:
    return torch.tensor([i in held for i in range(total)])


# -- choosing --


def test_the_skeleton_is_the_most_important_share_of_each_layer_by_itself() -> None:
    scores = torch.tensor([1.0, 4.0, 3.0, 2.0, 100.0, 200.0])
    assert NET.skeleton(scores, 0.5).tolist() == flags(1, 2, 5).tolist()
    assert not NET.skeleton(scores, 0.0).any() and NET.skeleton(scores, 1.0).all()


def test_of_equally_important_units_the_first_are_taken_on_every_rank() -> None:
    assert NET.skeleton(torch.ones(6), 0.5).tolist() == flags(0, 1, 4).tolist()


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("core", [0.0, 0.15, 0.5, 1.0])
def test_explorers_are_never_of_the_skeleton_and_as_many_as_asked_for(
    core: float, share: float
) -> None:
    chosen = WIDE.skeleton(torch.rand(67, generator=torch.Generator().manual_seed(1)), core)
    drawn = WIDE.explorers(chosen, share, seed=3, draw=5, ranks=4)
    assert drawn.shape == (4, 67) and not (drawn & chosen).any()
    for layer, n in zip((slice(0, 40), slice(40, 60), slice(60, 67)), WIDE.sizes, strict=True):
        rest = n - int(chosen[layer].sum())
        assert (
            drawn[:, layer].sum(1).tolist()
            == [min(rest, max(round(share * n), int(share > 0 or rest == n)))] * 4
        )
        assert (chosen | drawn)[:, layer].any(1).all(), (
            "a layer of which nothing is held cuts the network in two"
        )


def test_draws_follow_from_seed_draw_and_rank_and_differ_with_each_of_them() -> None:
    core = torch.zeros(67, dtype=torch.bool)
    once, again = (WIDE.explorers(core, 0.3, seed=3, draw=5, ranks=3) for _ in range(2))
    assert torch.equal(once, again)
    assert torch.equal(once, WIDE.explorers(core, 0.3, 3, 5, ranks=5)[:3]), (
        "however many others there are"
    )
    seen = [
        once[0],
        once[1],
        WIDE.explorers(core, 0.3, 4, 5, 1)[0],
        WIDE.explorers(core, 0.3, 3, 6, 1)[0],
    ]
    assert len({tuple(s.tolist()) for s in seen}) == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_disjoint_draws_hold_all_units_and_none_by_two_unless_a_layer_is_too_small(
    ranks: int,
) -> None:
    core = WIDE.skeleton(torch.arange(67.0), 0.15)
    drawn = WIDE.disjoint(core, seed=1, draw=2, ranks=ranks)
    assert (core | drawn.any(0)).all() and not (drawn & core).any()
    assert drawn[:, :60].sum(0).max() == 1
    assert drawn[:, 60:].any(1).all(), "the layer of 7 has something for each of 8 ranks"


def test_what_is_held_is_scaled_by_how_seldom_it_is_and_nothing_else_is_there() -> None:
    core = flags(0, 4)
    explorers = torch.stack([flags(1, 5), flags(2, 3, 5)])
    assert NET.scales(core, explorers).tolist() == [[1, 3, 0, 0, 1, 1], [1, 0, 1.5, 1.5, 1, 1]]


def test_over_many_draws_a_scaled_unit_is_there_once_on_average() -> None:
    core = WIDE.skeleton(torch.arange(67.0), 0.15)
    draws = [WIDE.scales(core, WIDE.explorers(core, 0.15, 0, d, 4)) for d in range(500)]
    assert float((torch.cat(draws).mean(0) - 1).abs().max()) < 0.25


# -- elements --


def test_the_score_of_a_unit_sums_over_all_its_edges_in_and_out() -> None:
    values = torch.zeros(LENGTH)
    values[0:12] = -torch.arange(12.0)  # rows of a: 0+1+2, 3+4+5, ...
    values[12:16] = torch.tensor([10.0, 20.0, 30.0, 40.0])
    values[16:24] = torch.tensor(
        [1.0, 0, 0, 0, 0, 0, 0, -2.0]
    )  # b: from a's first unit to its own first, from the last to the second
    values[24:28] = torch.tensor([100.0, 1.0, 5.0, -7.0])
    values[28] = 1e9
    assert NET.sums({"x": values}).tolist() == [
        3 + 10 + 1,
        12 + 20,
        21 + 30,
        30 + 40 + 2,
        1 + 101,
        2 + 12,
    ]


def test_an_edge_is_held_by_those_who_hold_both_of_its_ends() -> None:
    held = torch.stack([flags(0, 1, 4), flags(1, 2, 5)])
    weight = NET.holders(held, torch.tensor([10.0, 1.0]), {"x": torch.zeros(LENGTH)})["x"]
    assert weight[:12].view(4, 3)[:, 0].tolist() == [10, 11, 1, 0] == weight[12:16].tolist()
    assert weight[16:24].view(2, 4).tolist() == [[10, 10, 0, 0], [0, 1, 1, 0]]
    assert weight[24:28].tolist() == [10, 10, 1, 1], "two numbers in a row belong to one unit"
    assert weight[28] == 11, "what is no unit's is on every rank"


def test_holders_are_counted_in_any_memory_format() -> None:
    """Channels last: the dimensions of a convolution lie in another order in memory."""
    parameter = UnitParameter(
        "conv",
        "x",
        0,
        (2, 3, 2, 2),
        torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last).stride(),
        ((0, 0, 1), (1, 1, 1)),
    )
    units = Units((2, 3), (parameter,))
    weight = units.holders(flags(0, 3, total=5)[None], torch.ones(1), {"x": torch.zeros(24)})
    view = units.of_parameters(weight)["conv"]
    assert view[0, 1].eq(1).all() and view.sum() == 4
