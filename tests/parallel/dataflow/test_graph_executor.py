"""Dataflow parallelism: losses, gradients and states are those of one process."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Event, Group
from manyhands.data.batches import Batch
from manyhands.errors import PlanError, TaskError
from manyhands.exchange.inproc import World
from manyhands.observe.graph_picture import svg
from manyhands.parallel.dataflow.common_subexpressions import without_common_subexpressions
from manyhands.parallel.dataflow.graph_nodes import FIELDS, measure_costs, trace_finely
from manyhands.parallel.dataflow.partition import partition
from manyhands.split.graph import GraphNode, TransferCost
from manyhands.split.graph_schedule import simulate
from support.compare import assert_gradients_close
from support.dataflow import Inception, Towers, branched, graphed, partition_of
from support.pipelines import GivenBatches, alone, gradients, scaled_by_count, step
from support.traced_models import loss as loss_of
from support.traced_models import model as model_of

CROSS = nn.functional.cross_entropy
MODELS = ("mlp", "cnn", "gpt", "seq2seq", "towers", "inception")


@functools.cache
def whole(name: str) -> tuple[list[tuple[float, int]], dict[str, Tensor | None], dict[str, Tensor]]:
    model, loss, data = branched(name)
    got = [alone(model, loss, step(data, sizes)) for sizes in ((4, 4, 4, 3), (4, 0, 5))]
    return got, {n: w.grad for n, w in model.named_parameters()}, dict(model.named_buffers())


# every model over three ranks; over other numbers the largest ones are slow
OVER = [
    pytest.param(
        name,
        ranks,
        marks=() if ranks == 3 or name in ("mlp", "towers", "inception") else (pytest.mark.slow,),
    )
    for name in MODELS
    for ranks in (2, 3, 4)
]


@pytest.mark.parametrize(("name", "ranks"), OVER)
def test_a_graph_over_ranks_gives_the_loss_and_the_gradients_of_one_process(
    name: str, ranks: int
) -> None:
    model, loss, data = branched(name)
    partitioned = partition_of(model, tuple(v[:4] for v in data[:-1]), ranks)

    def main(group: Group) -> Any:
        graph = graphed(group, copy.deepcopy(partitioned), loss)
        steps = GivenBatches([*step(data, (4, 4, 4, 3)), *step(data, (4, 0, 5))])
        got = [graph(scaled_by_count, steps) for _ in range(2)]
        return got, gradients([graph.stage]), dict(graph.stage.module.named_buffers())

    losses, grads, buffers = whole(name)
    merged: dict[str, Any] = {}
    for got, mine, kept in World(ranks).run(main):
        assert [(float(t), n) for t, n in got] == [
            (pytest.approx(t, rel=1e-12), n) for t, n in losses
        ]
        assert mine, "every rank holds something"
        assert all(torch.equal(mine[k], merged[k]) for k in merged.keys() & mine.keys()), (
            "tied: the same bits on all its ranks"
        )
        merged |= mine
        for key, value in kept.items():
            torch.testing.assert_close(value, buffers[key], rtol=1e-12, atol=1e-12)
    assert_gradients_close(merged, grads)


# -- who does what --


def test_two_towers_stand_on_two_ranks_and_begin_without_waiting_for_each_other() -> None:
    model, _, data = branched("towers")
    partitioned = partition_of(model, tuple(v[:4] for v in data[:-1]), 2, micros=1)
    flow = partitioned.flows[True]
    fed = {w.sink for w in flow.edges if flow.segments[w.source].rank != flow.segments[w.sink].rank}
    assert {p.rank for s, p in enumerate(flow.segments) if s not in fed} == {0, 1}
    held = [
        {n.split(".")[0] for n, _ in m.named_parameters()}
        for m in [s.module for s in partitioned.stages]
    ]
    assert held[0] in ({"left"}, {"right"}) and "head" in held[1]


def test_measured_towers_take_less_than_two_thirds_of_the_time_of_one_rank() -> None:
    torch.manual_seed(0)
    model, x = Towers(width=256, depth=3), torch.randn(256, 6)
    traced = without_common_subexpressions(trace_finely(model, (x, x), 2))
    numbers = measure_costs(traced, (x, x), repeats=3)
    assert len(numbers) == FIELDS * len(traced.nodes[True]) and all(type(n) is int for n in numbers)
    for i, s in enumerate(
        traced.nodes[True]
    ):  # what both towers do is as long, whatever else the machine did while we measured
        twin = next(
            (
                k
                for k, o in enumerate(traced.nodes[True])
                if o.target == str(s.target).replace("right", "left")
            ),
            i,
        )
        numbers[FIELDS * i] = numbers[FIELDS * twin]
    partitioned = partition(traced, numbers, 2, link=TransferCost(0.0, 1e12))
    alone = simulate(partitioned.nodes, [0] * len(partitioned.nodes), 1)
    both = simulate(partitioned.nodes, partitioned.placement.where, 2, link=TransferCost(0.0, 1e12))
    assert both.time == pytest.approx(partitioned.placement.seconds)
    assert both.time < 0.65 * alone.time


def test_what_cannot_fit_is_refused_with_numbers_and_what_fits_keeps_to_the_limit() -> None:
    model, _, data = branched("gpt")
    example = tuple(v[:4] for v in data[:-1])
    held = sum(p.nbytes for p in model.parameters())
    roomy = partition_of(model, example, 2, limit=0.7 * held)
    assert max(roomy.placement.memory) <= 0.7 * held
    for rank, held_here in enumerate(roomy.stages):
        assert sum(p.nbytes for p in held_here.module.parameters()) <= roomy.placement.memory[rank]
    with pytest.raises(
        PlanError,
        match=r"no placement over pipe=2 ranks keeps each within 0\.0 MiB: the model takes 0\.1 "
        r"MiB",
    ):
        partition_of(model, example, 2, limit=0.3 * held)
    with pytest.raises(
        PlanError, match="pipe=9, but the model has 4 pieces with parameters to train"
    ):
        partition_of(
            *(branched("mlp")[i] if i == 0 else (branched("mlp")[2][0][:4],) for i in (0, 2)), 9
        )


def test_numbers_of_another_trace_are_refused() -> None:
    model, _, data = branched("mlp")
    traced = trace_finely(model, (data[0][:4],), 2)
    with pytest.raises(PlanError, match="3 numbers for 7 nodes"):
        partition(traced, [1, 2, 3], 2)


def test_what_a_module_changes_in_place_stays_with_what_made_it_also_where_blocks_are_alike() -> (
    None
):
    model, _, data = branched("inception")
    traced = trace_finely(model, (data[0][:4],), 2)
    names = [s.name for s in traced.nodes[True]]
    changed = {(names[a], names[b]) for a, b in traced.inseparable}
    assert ("blocks_0_three_0", "blocks_0_three_1") in changed and (
        "blocks_1_five_1",
        "blocks_1_five_2",
    ) in changed
    measure_costs(traced, (data[0][:4],), repeats=1)


def test_how_torch_convolves_a_small_batch_does_not_bind_the_model_to_small_batches() -> None:
    model, _, data = branched("cnn")
    traced = trace_finely(model.float(), (data[0][:4].float(),), 2)
    for check in traced.size_guards.values():
        check((data[0][:40].float(),))  # evaluation takes larger ones


# -- computed once --


class Repeats(nn.Module):
    """The same expression and the same layer twice; chance, a state and changes in place that look
    alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.norm, self.drop = nn.BatchNorm1d(6, momentum=0.5), nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.register_buffer("count", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        one = (self.a(x) * self.scale).tanh()
        two = (self.a(x) * self.scale).tanh()  # the same
        other = (self.a(x) * self.scale).sigmoid()  # the same but for its end
        normed = self.norm(one) + self.norm(two)  # moves its statistics twice
        dropped = self.drop(one) - self.drop(two)  # draws twice
        c, d = x * 2, x * 2
        c.add_(1)
        before = self.count * 1
        self.count.add_(1)
        after = self.count * 1
        return self.last(self.b(one + two * other + normed) + dropped * 0 + c * d + after - before)


def test_a_repeated_expression_is_computed_once_and_what_only_looks_repeated_is_not() -> None:
    torch.manual_seed(0)
    model, x = Repeats().double(), torch.randn(8, 6, dtype=torch.float64)
    whole_trace = trace_finely(model, (x,), 2)
    short = without_common_subexpressions(whole_trace)

    def count(traced: Any, target: str) -> int:
        return sum(
            str(getattr(s.target, "__name__", s.target)).strip("_") == target
            for s in traced.nodes[True]
        )

    assert [count(whole_trace, t) for t in ("a", "tanh", "sigmoid", "norm", "drop")] == [
        3,
        2,
        1,
        2,
        2,
    ]
    assert [count(short, t) for t in ("a", "tanh", "sigmoid", "norm", "drop")] == [1, 1, 1, 2, 2]
    assert len(whole_trace.nodes[True]) - len(short.nodes[True]) == 2 + 2 + 1, (
        "two a, two products, one tanh"
    )
    assert len(short.nodes[True]) == len(short.nodes[False])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_and_states_of_what_is_computed_once_are_those_of_all_uses(ranks: int) -> None:
    torch.manual_seed(0)
    model = Repeats().double()
    model.drop.p = 0.0
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 5
    partitioned = partition_of(copy.deepcopy(model), (x[:4],), ranks)
    expected = alone(model, CROSS, step((x, y), (4, 4, 4)))

    def main(group: Group) -> Any:
        graph = graphed(group, copy.deepcopy(partitioned), CROSS)
        total, count = graph(scaled_by_count, GivenBatches(step((x, y), (4, 4, 4))))
        assert (float(total), count) == (pytest.approx(expected[0], rel=1e-12), expected[1])
        return gradients([graph.stage]), dict(graph.stage.module.named_buffers())

    merged: dict[str, Any] = {}
    buffers: dict[str, Tensor] = {}
    for grads, held in World(ranks).run(main):
        merged |= grads
        buffers |= held
    assert_gradients_close(merged, {n: w.grad for n, w in model.named_parameters()})
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-12, atol=1e-12)


class Unlike(nn.Module):
    """Calls that differ in a type, a size or a mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        half = ids / 1 + ids.mul(1) + ids.mul(1.0) + ids.mul(True)
        with torch.no_grad():
            still = self.a(x)
        return self.b(self.a(x) + still) * half + x.sum(0) + x.sum(1, keepdim=True)


def test_what_differs_in_a_type_or_in_whether_gradients_flow_is_not_the_same() -> None:
    torch.manual_seed(0)
    model, x, ids = (
        Unlike().double(),
        torch.randn(8, 6, dtype=torch.float64),
        torch.arange(48).view(8, 6),
    )
    assert len(without_common_subexpressions(trace_finely(model, (x, ids), 1)).nodes[True]) == len(
        trace_finely(model, (x, ids), 1).nodes[True]
    )


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama", "skips"])
def test_models_of_others_and_with_structures_for_outputs_go_through(name: str) -> None:
    made, inputs = model_of(name, 8)
    partitioned = partition_of(copy.deepcopy(made), tuple(v[:4] for v in inputs), 3)

    def own(model: nn.Module, batch: Any) -> Tensor:
        options = {"use_cache": False} if model is made and hasattr(made, "generate") else {}
        return loss_of(model(*batch, **options)) / 100

    batches = [Batch(tuple(v[i : i + 4] for v in inputs), 4, i == 4) for i in (0, 4)]
    for batch in batches:
        scaled_by_count(own(made, batch.values), batch.count).backward()

    def main(group: Group) -> Any:
        graph = graphed(group, copy.deepcopy(partitioned), step=own)
        graph(scaled_by_count, GivenBatches(list(batches)))
        return gradients([graph.stage])

    merged = functools.reduce(lambda a, b: a | b, World(3).run(main))
    assert_gradients_close(merged, {n: w.grad for n, w in made.named_parameters()})


# -- the rest of a task --


def test_inference_gives_the_outputs_on_the_last_rank_and_leaves_no_trace() -> None:
    model, loss, data = branched("inception")
    partitioned = partition_of(copy.deepcopy(model), (data[0][:4],), 3)
    model.eval()

    def main(group: Group) -> Any:
        graph = graphed(group, copy.deepcopy(partitioned), loss)
        graph.stage.module.eval()
        got = [graph.infer(tuple(v[:n] for v in data)) for n in (5, 5, 3)]
        return got, [w.grad for w in graph.stage.module.parameters()]

    *others, (outputs, grads) = World(3).run(main)
    assert all(got == [None] * 3 for got, _ in others)
    assert all(g is None for g in grads)
    for got, n in zip(outputs, (5, 5, 3), strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got, model(data[0][:n]).detach(), rtol=1e-12, atol=1e-12)


class TwoWays(nn.Module):
    """Does more in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        if self.training:
            x = self.b(x).relu_() + x.detach().mean()
        else:
            x = self.b(x.clamp(max=0.5)).exp()
        return self.d(self.c(x).tanh())


def test_a_model_that_does_other_things_in_evaluation_does_them_on_its_ranks() -> None:
    torch.manual_seed(0)
    model, x = TwoWays().double(), torch.randn(8, 6, dtype=torch.float64)
    partitioned = partition_of(copy.deepcopy(model), (x[:4],), 3)

    def main(group: Group) -> Any:
        graph = graphed(group, copy.deepcopy(partitioned), CROSS)
        graph(scaled_by_count, GivenBatches(step((x, torch.arange(8) % 5), (4, 4))))
        graph.stage.module.eval()
        return graph.infer((x, x)), gradients([graph.stage])

    got = World(3).run(main)
    expected = {n: w for n, w in model.named_parameters()}
    alone(model, CROSS, step((x, torch.arange(8) % 5), (4, 4)))
    assert_gradients_close(
        functools.reduce(lambda a, b: a | b, (g for _, g in got)),
        {n: w.grad for n, w in expected.items()},
    )
    torch.testing.assert_close(got[-1][0], model.eval()(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputing_changes_neither_gradients_nor_states(precision: str) -> None:
    torch.manual_seed(0)
    model, x, y = Inception(), torch.randn(16, 1, 6, 6), torch.arange(16) % 5
    partitioned = partition_of(model, (x[:4],), 2)

    def main(recompute: bool, group: Group) -> Any:
        graph = graphed(
            group, copy.deepcopy(partitioned), CROSS, recompute=recompute, precision=precision
        )
        graph(scaled_by_count, GivenBatches(step((x, y), (4, 4, 4))))
        return gradients([graph.stage]), graph.stage.module.state_dict()

    kept, again = (
        World(2).run(functools.partial(main, False)),
        World(2).run(functools.partial(main, True)),
    )
    for (grads, state), (grads2, state2) in zip(kept, again, strict=True):
        assert grads.keys() == grads2.keys() and all(
            torch.equal(g, grads2[n]) for n, g in grads.items()
        )  # type: ignore[arg-type]
        assert all(torch.equal(v, state2[n]) for n, v in state.items())


def test_a_step_of_ones_own_counts_as_it_likes() -> None:
    model, _, (x, x2, y) = branched("towers")

    def own(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        kept = batch["y"] != 0
        losses = CROSS(model(batch["x"], y=batch["x2"]), batch["y"], reduction="none")
        return (losses * kept).sum() / max(1, int(kept.sum())), int(kept.sum())

    batches = [
        Batch({"x": x[i : i + 6], "x2": x2[i : i + 6], "y": y[i : i + 6]}, 6, i == 12)
        for i in (0, 6, 12)
    ]
    partitioned = partition_of(copy.deepcopy(model), (x[:4], x2[:4]), 2)
    expected, count = 0.0, 0
    for batch in batches:
        loss, n = own(model, batch.values)
        scaled_by_count(loss, n).backward()
        expected, count = expected + float(loss.detach()) * n, count + n

    def main(group: Group) -> Any:
        graph = graphed(group, copy.deepcopy(partitioned), step=own)
        total, n = graph(scaled_by_count, GivenBatches(list(batches)))
        assert (float(total), n) == (pytest.approx(expected, rel=1e-12), count)
        return gradients([graph.stage])

    merged = functools.reduce(lambda a, b: a | b, World(2).run(main))
    assert_gradients_close(merged, {n: w.grad for n, w in model.named_parameters()})


def test_a_batch_that_would_go_another_way_is_refused_by_every_rank() -> None:
    model, loss, data = branched("seq2seq")
    partitioned = partition_of(model, tuple(v[:4] for v in data[:-1]), 2)
    wrong = (data[0][:4, :3], data[1][:4, :3], data[2][:4, :3])
    refused: list[int] = []

    def main(group: Group) -> None:
        try:
            graphed(group, copy.deepcopy(partitioned), loss)(
                scaled_by_count, GivenBatches([Batch(wrong, 4, True)])
            )
        except TaskError:
            refused.append(group.rank)

    World(2).run(main)
    assert sorted(refused) == [0, 1]


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: Any) -> Tensor:
        big = x.clone()
        ctx.save_for_backward(big)
        alive.append(weakref.ref(big))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * 2, None


class Watch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref[Tensor]] = []
        self.linear, self.most = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        x = Watched.apply(self.linear(x), self.alive)
        self.most = max(self.most, sum(saved() is not None for saved in self.alive))
        return x


def test_no_more_micro_batches_are_alive_than_the_window_allows() -> None:
    x, y = torch.randn(48, 6), torch.arange(48) % 5
    partitioned = partition_of(
        nn.Sequential(Watch(), nn.Linear(6, 6), nn.Linear(6, 5)), (x[:4],), 2, micros=12
    )

    def main(group: Group) -> Any:
        graph = graphed(group, copy.deepcopy(partitioned), CROSS)
        watch = [w for w in graph.stage.module.modules() if isinstance(w, Watch)]
        for w in watch:
            w.alive.clear()  # of tracing
        graph(scaled_by_count, GivenBatches(step((x, y), (4,) * 12)))
        assert all(saved() is None for w in watch for saved in w.alive), (
            "nothing is kept after a step"
        )
        return [w.most for w in watch]

    assert partitioned.placement.window == 2
    assert sorted(World(2).run(main)) == [[], [2]]


def test_every_piece_of_work_and_every_message_is_reported() -> None:
    model, loss, data = branched("towers")
    partitioned = partition_of(model, tuple(v[:4] for v in data[:-1]), 2)

    def main(group: Group) -> list[Event]:
        seen: list[Event] = []
        graph = graphed(
            group, copy.deepcopy(partitioned), loss, emit=seen.append, rank=7 + group.rank
        )
        graph.round = 3
        graph(scaled_by_count, GivenBatches(step(data, (4, 4))))
        return seen

    for rank, seen in enumerate(World(2).run(main)):
        assert {(e.rank, e.round) for e in seen} == {(7 + rank, 3)}
        assert {e.name for e in seen} == {"forward", "backward", "send", "receive"}
        assert all(
            e.value == {"micro": e.value["micro"], "stage": rank}
            for e in seen
            if isinstance(e.value, dict)
        )
        assert sum(e.nbytes for e in seen if e.name == "send") > 0


def test_the_picture_shows_every_node_and_the_bytes_of_every_cut() -> None:
    model, _, data = branched("inception")
    partitioned = partition_of(model, tuple(v[:4] for v in data[:-1]), 3)
    where = partitioned.placement.where
    picture = svg(partitioned.nodes, where, "branches & more")
    cuts = [
        (t, where[u])
        for u, n in enumerate(partitioned.nodes)
        for t in n.inputs
        if where[t] != where[u]
    ]
    assert cuts and picture.count('class="cut"') == len(cuts)
    assert picture.count('class="crossing"') == len(set(cuts)), "a value goes to a rank once"
    assert picture.count('class="node"') == len(partitioned.nodes)
    assert "branches &amp; more" in picture and "rank 2" in picture and ">8 B<" in picture
    ElementTree.fromstring(picture)


def test_a_picture_of_very_many_nodes_shows_runs_of_them() -> None:
    nodes = [GraphNode(f"n{i}", 1.0, (i - 1,) if i else ()) for i in range(900)]
    picture = svg(nodes, [i // 300 for i in range(900)])
    assert picture.count('class="node"') == 3 and picture.count('class="cut"') == 2
