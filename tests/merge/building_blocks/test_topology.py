"""Communication graphs: weights keep the mean, spectral gaps match the formulas, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.errors import PlanError
from manyhands.merge.building_blocks import topology
from manyhands.merge.building_blocks.topology import schedule, spectral_gap


def mixing(graph: str, size: int) -> torch.Tensor:
    (w,) = schedule(graph, size)
    return w


@pytest.mark.parametrize("graph", topology.WORDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 9, 16])
def test_rows_and_columns_of_every_graph_sum_to_one_and_all_ranks_are_joined(
    graph: str, size: int
) -> None:
    ones = torch.ones(size, dtype=torch.float64)
    for w in schedule(graph, size):
        torch.testing.assert_close(w @ ones, ones, rtol=0, atol=1e-15 * size)
        torch.testing.assert_close(ones @ w, ones, rtol=0, atol=1e-15 * size)
        assert w.min() >= 0
    topology.check(graph, size)
    topology.check(graph, size, push=True)


@pytest.mark.parametrize("n", [4, 5, 8, 17])
def test_the_gap_of_a_ring(n: int) -> None:
    assert spectral_gap(mixing("ring", n)) == pytest.approx(
        2 / 3 * (1 - math.cos(2 * math.pi / n)), abs=1e-12
    )


@pytest.mark.parametrize("q", [3, 4, 5])
def test_the_gap_of_a_torus(q: int) -> None:
    assert spectral_gap(mixing("torus", q * q)) == pytest.approx(
        2 / 5 * (1 - math.cos(2 * math.pi / q)), abs=1e-12
    )


@pytest.mark.parametrize("n", [2, 4, 6, 10, 16, 32])
def test_the_gap_of_an_exponential_graph(n: int) -> None:
    assert spectral_gap(mixing("exponential", n)) == pytest.approx(
        2 / (1 + math.ceil(math.log2(n))), abs=1e-12
    )


def test_the_gaps_of_star_and_complete_graph() -> None:
    assert spectral_gap(mixing("star", 7)) == pytest.approx(1 / 7, abs=1e-12)
    assert spectral_gap(mixing("complete", 7)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("n", "exact"), [(2, True), (8, True), (16, True), (6, False), (12, False)]
)
def test_one_peer_gives_the_exact_mean_after_log_n_rounds_only_for_powers_of_two(
    n: int, exact: bool
) -> None:
    rounds = schedule("one_peer", n)
    assert len(rounds) == math.ceil(math.log2(n))
    product = torch.eye(n, dtype=torch.float64)
    for w in rounds:
        assert ((w > 0).sum(0) == 2).all(), "one peer a round"
        product = w @ product
    assert torch.allclose(product, torch.full_like(product, 1 / n), rtol=0, atol=1e-15) == exact


def test_a_torus_of_six_is_two_rows_of_three() -> None:
    assert topology.torus(6) == {
        (0, 1),
        (1, 2),
        (0, 2),
        (3, 4),
        (4, 5),
        (3, 5),
        (0, 3),
        (1, 4),
        (2, 5),
    }


def test_edges_in_words_get_metropolis_weights() -> None:
    third = 1 / 3  # rank 1 has two neighbours, 0 and 2 have one
    expected = [[2 * third, third, 0], [third, third, third], [0, third, 2 * third]]
    torch.testing.assert_close(
        mixing("0-1,1-2", 3), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_weights_of_ones_own_are_taken_and_what_is_left_stays_with_the_rank() -> None:
    expected = [[0.75, 0.25, 0], [0.25, 0.65, 0.1], [0, 0.1, 0.9]]
    torch.testing.assert_close(
        mixing("0-1:0.25,1-2:0.1", 3),
        torch.tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=1e-15,
    )


def test_a_turn_tells_a_rank_whom_to_give_to_and_what_its_givers_weigh() -> None:
    (turn,) = topology.turns("0>1,1>2,2>0", 3, 1)
    assert (turn.own, turn.recipients, turn.senders) == (0.5, (2,), ((0, 0.5),))


def test_pushed_parts_sum_to_one_by_columns_on_any_directed_graph() -> None:
    (p,) = schedule("0>1,1>2,2>0,0>2", 3, push=True)
    torch.testing.assert_close(p.sum(0), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-15)
    assert p[:, 0].tolist() == pytest.approx([1 / 3] * 3)
    assert p.sum(1)[2] > 1.1, "uneven: what v is for"
    topology.check("0>1,1>2,2>0,0>2", 3, push=True)


@pytest.mark.parametrize(
    ("graph", "size", "says"),
    [
        (
            "0-1,2-3",
            4,
            r"not connected: ranks \{0,1\} and \{2,3\} never exchange.*add an edge "
            r"such as 1-2",
        ),
        ("0-1,1-2", 4, r"not connected: ranks \{0,1,2\} and \{3\}"),
        ("0>1,1>2", 3, r"column 0 .* sums to 1\.5, but 1 is needed; .*merge=sgp"),
        ("0-1:0.9,1-2:0.9", 3, r"rank 1 would keep -0\.8 of its own.*lower the weights"),
        ("0-1:1", 2, r"swap values for ever.*spectral gap 0"),
        ("0-1:0.5,1-2", 3, "some edges have a weight and some have none"),
        ("0-1,1-0", 2, "an edge is given twice"),
        ("0-3", 3, r"0-3 is no edge between two of the ranks 0 to 2 of data=3"),
        ("1-1", 3, "1-1 is no edge"),
        ("circle", 3, r"'circle' is neither an edge .* nor one of ring, torus"),
        ("torus", 7, r"7 is prime; set merge\.graph=ring or data=8"),
    ],
)
def test_a_graph_that_cannot_agree_is_refused_in_words(graph: str, size: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        topology.check(graph, size)


def test_a_directed_graph_without_a_way_back_is_refused_for_pushing_too() -> None:
    with pytest.raises(
        PlanError, match=r"ranks \{0\} and \{1\} and \{2\} are connected in one direction only"
    ):
        topology.check("0>1,1>2", 3, push=True)
