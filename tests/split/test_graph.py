"""Placements, segments and schedules of graphs.

Small graphs against all placements; random ones by what must hold of each.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from manyhands.errors import PlanError
from manyhands.split.graph import (
    GraphNode,
    TransferCost,
    common_calls,
    segment_edges,
    segments,
)
from manyhands.split.graph_placement import place_nodes
from manyhands.split.graph_schedule import schedule, simulate

FAST = TransferCost(0.0, 1e18)
MIB = 2**20


def chain(count: int, **more: Any) -> list[GraphNode]:
    return [
        GraphNode(f"n{i}", 1.0, (i - 1,) if i else (), weights={f"w{i}": 1.0}, **more)
        for i in range(count)
    ]


def towers(depth: int = 3) -> list[GraphNode]:
    """Two chains and a light node that joins them."""
    made: list[GraphNode] = []
    for side in range(2):
        for i in range(depth):
            at = len(made)
            made.append(
                GraphNode(
                    f"{side}.{i}", 1.0, (at - 1,) if i else (), 1e3, weights={f"{side}.{i}": 1.0}
                )
            )
    return [*made, GraphNode("join", 0.2, (depth - 1, 2 * depth - 1), 10)]


def chance(seed: int, count: int = 14) -> list[GraphNode]:
    pick = random.Random(seed)
    made = []
    for u in range(count):
        takes = tuple(sorted(pick.sample(range(u), min(u, pick.randint(0, 3)))))
        weights = {f"w{pick.randrange(count)}": pick.uniform(1, 5)} if pick.random() < 0.7 else {}
        made.append(
            GraphNode(
                f"n{u}",
                pick.uniform(0, 2),
                takes,
                pick.uniform(0, 1e8),
                pick.uniform(0, 3),
                weights,
            )
        )
    return made


# -- computed once --


def test_calls_with_the_same_key_and_arguments_are_one_also_where_their_arguments_became_one() -> (
    None
):
    calls: list[Any] = [
        ("x", ()),
        ("f", (0,)),
        ("f", (0,)),
        ("g", (1,)),
        ("g", (2,)),
        ("g", (0,)),
        ("h", (3, 4)),
        ("h", (4, 3)),
    ]
    assert common_calls(calls) == [0, 1, 1, 3, 3, 5, 6, 6]


def test_what_has_no_key_is_never_left_out_and_its_results_are_not_the_same() -> None:
    calls: list[Any] = [
        ("x", ()),
        (None, (0,)),
        (None, (0,)),
        ("f", (1,)),
        ("f", (2,)),
        ("f", (1,)),
    ]
    assert common_calls(calls) == [0, 1, 2, 3, 4, 3]


# -- who --


def test_two_towers_take_little_more_than_half_of_the_time_of_one_rank() -> None:
    nodes = towers()
    found = place_nodes(nodes, 2, 1)
    assert found.alone == pytest.approx(6.2)
    assert found.seconds < 0.65 * found.alone
    assert (
        len({found.where[u] for u in range(3)}) == len({found.where[u] for u in range(3, 6)}) == 1
    )
    assert found.where[-1] == 1, "the output is on the last rank"


def test_a_chain_is_cut_into_even_parts_where_micro_batches_follow_each_other() -> None:
    found = place_nodes(chain(8), 4, 16, link=FAST)
    assert found.where == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.seconds == pytest.approx(2.0 * (16 + 3)), (
        "that of a pipeline: work of a rank x (micro-batches + ranks - 1)"
    )


@pytest.mark.parametrize("seed", range(12))
def test_small_graphs_are_placed_nearly_as_well_as_can_be(seed: int) -> None:
    nodes, micros = [n for n in chance(seed, 7)], 4
    nodes[0] = GraphNode("n0", 1.0, weights={"a": 1.0})
    nodes[-1] = GraphNode("n6", 1.0, nodes[-1].inputs, weights={"b": 1.0})
    best = min(
        simulate(nodes, where, 2, micros, 2).time
        for where in itertools.product(range(2), repeat=7)
        if len({where[u] for u, n in enumerate(nodes) if n.weights}) == 2
    )
    assert place_nodes(nodes, 2, micros, window=2).seconds <= 1.25 * best


def test_what_is_dear_to_send_is_not_cut() -> None:
    nodes = chain(6)
    nodes[2] = GraphNode("n2", 1.0, (1,), 1e12, weights={"w2": 1.0})
    where = place_nodes(nodes, 2, 8).where
    assert where[2] == where[3] and len(set(where)) == 2


def test_nodes_of_one_group_stay_together() -> None:
    nodes = [
        GraphNode(n.name, n.seconds, n.inputs, weights=n.weights, group=u % 3)
        for u, n in enumerate(chain(9))
    ]
    where = place_nodes(nodes, 3, 8).where
    assert (
        all(len({where[u] for u in range(g, 9, 3)}) == 1 for g in range(3)) and len(set(where)) == 3
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_weights_and_the_same_question_the_same_answer(ranks: int) -> None:
    for seed in range(10):
        nodes = chance(seed)
        found = place_nodes(nodes, ranks, 4)
        assert {found.where[u] for u, n in enumerate(nodes) if n.weights} == set(range(ranks))
        assert found == place_nodes(nodes, ranks, 4)


def test_a_rank_with_frozen_weights_alone_would_have_nothing_to_train() -> None:
    nodes = [
        GraphNode(n.name, n.seconds, n.inputs, weights=n.weights, trains=u >= 4)
        for u, n in enumerate(chain(6))
    ]
    where = place_nodes(nodes, 2, 8, link=FAST).where
    assert {where[4], where[5]} == {0, 1}


# -- memory --


def test_a_limit_is_kept_where_the_quickest_placement_would_break_it() -> None:
    # by time alone, one rank would hold the light node with the large table and half of the rest
    nodes = [
        GraphNode("table", 0.01, weights={"t": 60 * MIB}),
        *(GraphNode(f"n{i}", 1.0, (0,), weights={f"w{i}": 10 * MIB}) for i in range(6)),
    ]
    nodes.append(GraphNode("join", 0.1, tuple(range(1, 7))))
    free, tight = place_nodes(nodes, 2, 4), place_nodes(nodes, 2, 4, limit=70 * MIB)
    assert max(free.memory) > 70 * MIB >= max(tight.memory)
    assert sum(tight.memory) == 120 * MIB


def test_fewer_micro_batches_are_under_way_where_memory_is_short() -> None:
    nodes = chain(4, activation_bytes=10 * MIB)
    assert place_nodes(nodes, 2, 8).window == 2
    tight = place_nodes(nodes, 2, 8, limit=25 * MIB)
    assert tight.window == 1 and max(tight.memory) <= 25 * MIB
    assert tight.seconds > place_nodes(nodes, 2, 8).seconds


def test_a_weight_that_two_nodes_use_counts_once_on_a_rank_and_on_every_rank_that_has_it() -> None:
    nodes = [
        GraphNode(f"n{i}", 1.0, (i - 1,) if i else (), weights={f"w{i}": MIB, "tied": 8 * MIB})
        for i in range(4)
    ]
    assert sorted(place_nodes(nodes, 2, 8).memory) == [10 * MIB, 10 * MIB]


def test_what_cannot_fit_is_refused_with_numbers() -> None:
    nodes = [
        GraphNode(
            f"n{i}", 1.0, (i - 1,) if i else (), activation_bytes=MIB, weights={f"w{i}": 10 * MIB}
        )
        for i in range(4)
    ]
    with pytest.raises(PlanError) as refused:
        place_nodes(nodes, 2, 4, limit=21 * MIB)
    assert str(refused.value) == (
        "no placement over pipe=2 ranks keeps each within 21.0 MiB: the model takes 40.0 MiB and "
        "4.0 MiB per micro-batch in flight, "
        "and the fullest rank 22.0 MiB at the least; use more ranks, smaller micro-batches or "
        "recompute=true"
    )


def test_more_ranks_than_pieces_with_parameters_are_refused() -> None:
    with pytest.raises(
        PlanError,
        match="pipe=4, but the model has 3 pieces with parameters to train that can be separated; "
        "set pipe=3 or less",
    ):
        place_nodes([*chain(3), GraphNode("join", 1.0, (2,))], 4)


# -- what goes where, and when --


def parts_of(nodes: list[GraphNode], where: list[int]) -> Any:
    parts = segments(nodes, where)
    of = {u: s for s, part in enumerate(parts) for u in part.nodes}
    needs = [
        sorted({str(t) for u in p.nodes for t in nodes[u].inputs if of[t] != s})
        for s, p in enumerate(parts)
    ]
    return (
        parts,
        of,
        segment_edges([p.rank for p in parts], [[str(u) for u in p.nodes] for p in parts], needs),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_value_is_there_before_it_is_needed_and_goes_to_a_rank_once(ranks: int) -> None:
    for seed in range(40):
        nodes, pick = chance(seed, 25), random.Random(seed)
        where = [pick.randrange(ranks) for _ in nodes]
        parts, of, lines = parts_of(nodes, where)
        assert sorted(u for p in parts for u in p.nodes) == list(range(25))
        assert all(where[u] == p.rank for p in parts for u in p.nodes)
        has = [set(map(str, p.nodes)) for p in parts]
        for line in lines:
            assert line.source < line.sink and set(line.names) <= has[line.source]
            has[line.sink] |= set(line.names)
        assert all(str(t) in has[of[u]] for u, n in enumerate(nodes) for t in n.inputs)
        far = [
            (name, parts[x.sink].rank)
            for x in lines
            for name in x.names
            if parts[x.source].rank != parts[x.sink].rank
        ]
        assert len(far) == len(set(far)), "a value goes to a rank once"
        for p in parts:  # it takes from elsewhere at its beginning, and gives at its end
            inside = p.nodes[:-1]
            assert not any(
                where[t] != p.rank
                for u in p.nodes[1:]
                for t in nodes[u].inputs
                if str(t) not in _came(nodes, where, p)
            )
            assert not any(
                u in nodes[v].inputs and where[v] != p.rank for u in inside for v in range(25)
            )


def _came(nodes: list[GraphNode], where: list[int], part: Any) -> set[str]:
    """What this segment's first node, or any segment of the rank before it, has taken."""
    parts = segments(nodes, where)
    before = [q for q in parts[: parts.index(part)] if q.rank == part.rank]
    return {
        str(t)
        for u in [*(u for q in before for u in q.nodes), part.nodes[0]]
        for t in nodes[u].inputs
    }


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_lists_of_actions_can_be_run_together_and_keep_to_the_window(
    ranks: int, window: int
) -> None:
    for seed in range(15):
        nodes, pick, micros = chance(seed, 12), random.Random(seed), 5
        where = [pick.randrange(ranks) for _ in nodes]
        parts, _, lines = parts_of(nodes, where)
        edges = [(x.source, x.sink, 1e6) for x in lines]
        found = schedule(ranks, [p.rank for p in parts], [1.0] * len(parts), edges, micros, window)
        assert sum(len(mine) for mine in found.lists) == 2 * micros * len(parts)
        assert max(found.in_flight) <= window
        done: set[Any] = set()
        at = [0] * ranks
        moved = True
        while moved:  # nobody looks ahead: each waits for what its next action needs
            moved = False
            for r, mine in enumerate(found.lists):
                while at[r] < len(mine):
                    kind, micro, s = mine[at[r]]
                    need = (
                        [("F", micro, a) for a, b, _ in edges if b == s]
                        if kind == "F"
                        else [("B", micro, b) for a, b, _ in edges if a == s]
                    )
                    if not done.issuperset(need) or (kind == "B" and ("F", micro, s) not in done):
                        break
                    done.add((kind, micro, s))
                    at[r] += 1
                    moved = True
        assert len(done) == 2 * micros * len(parts)
        for mine in found.lists:  # a state sees micro-batches in their order
            for kind in "FB":
                for s in range(len(parts)):
                    seen = [a.micro for a in mine if a.kind == kind and a.segment == s]
                    assert seen == sorted(seen)


def test_inference_only_goes_there() -> None:
    nodes = chain(4)
    parts, _, lines = parts_of(nodes, [0, 0, 1, 1])
    found = schedule(
        2,
        [p.rank for p in parts],
        [1.0, 1.0],
        [(x.source, x.sink, 0.0) for x in lines],
        3,
        2,
        FAST,
        backward=False,
    )
    assert [[a.kind for a in mine] for mine in found.lists] == [["F"] * 3, ["F"] * 3]
    assert found.time == pytest.approx(4.0)
