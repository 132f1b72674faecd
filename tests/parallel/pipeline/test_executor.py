"""Pipelines inside one process: losses and gradients of the whole model, on every schedule."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Event, Group
from manyhands.data.batches import Batch
from manyhands.errors import TaskError
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.parallel.tensor.sharding_rules import ShardedValue, TensorAxis
from manyhands.split.schedules import SCHEDULES, max_in_flight
from support.compare import assert_gradients_close
from support.pipelines import (
    GivenBatches,
    HandStage,
    alone,
    chain,
    gradients,
    in_zoo,
    piped,
    scaled_by_count,
    step,
    traced,
)

CROSS = nn.functional.cross_entropy
X, Y = (
    torch.randn(64, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64),
    torch.arange(64) % 5,
)


def layers(count: int = 8, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    made = [nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)) for _ in range(count - 1)]
    return [m.double() for m in [*made, nn.Linear(6, 5)]]


def chunks_of(schedule: str) -> int:
    return 2 if schedule == "interleaved" else 1


# -- equal to one process --


@functools.cache
def whole(name: str) -> tuple[tuple[float, int], dict[str, Tensor | None], dict[str, Tensor]]:
    model, loss, data = in_zoo(name)
    got = alone(model, loss, step(data, (4, 4, 4, 3)))
    return got, {n: w.grad for n, w in model.named_parameters()}, dict(model.named_buffers())


@functools.cache
def cut_in_zoo(name: str, stages: int) -> Any:
    model, loss, data = in_zoo(name)
    return traced(model, tuple(v[:4] for v in data[:-1]), stages), loss, data


def zoo_cases() -> list[Any]:
    """All of them; those that add neither a model nor a schedule to the others are slow."""
    found = []
    for name, p, schedule in itertools.product(["mlp", "cnn", "gpt", "seq2seq"], [2, 4], SCHEDULES):
        quick = (
            name == "mlp"
            or (p == 2 and schedule == "1f1b")
            or (name, p, schedule) == ("gpt", 2, "interleaved")
        )
        found.append(pytest.param(name, p, schedule, marks=() if quick else (pytest.mark.slow,)))
    return found


@pytest.mark.parametrize(("name", "p", "schedule"), zoo_cases())
def test_every_schedule_gives_the_loss_and_the_gradients_of_one_process(
    name: str, p: int, schedule: str
) -> None:
    chunks = chunks_of(schedule) if (name, p) != ("mlp", 4) else 1  # four layers make four stages
    stages, loss, data = cut_in_zoo(name, p * chunks)

    def main(group: Group) -> Any:
        pipeline = piped(group, schedule, chunks, copy.deepcopy(stages), loss)
        got = pipeline(scaled_by_count, GivenBatches(step(data, (4, 4, 4, 3))))
        mine = pipeline.stages
        return got, gradients(mine), {n: b for s in mine for n, b in s.module.named_buffers()}

    (total, count), grads, buffers = whole(name)
    merged: dict[str, Any] = {}
    for (got, n), mine, kept in World(p).run(main):
        assert float(got) == pytest.approx(total, rel=1e-12) and n == count
        assert all(torch.equal(mine[k], merged[k]) for k in merged.keys() & mine.keys()), (
            "tied: the same bits on all its ranks"
        )
        merged |= mine
        for key, value in kept.items():
            torch.testing.assert_close(value, buffers[key], rtol=1e-12, atol=1e-12)
    assert_gradients_close(merged, grads)


SIZES = {
    "uneven": (3, 3, 2, 2),
    "empty": (4, 0, 3, 0),
    "one": (5,),
    "none": (0, 0),
    "many": (2,) * 11,
}


def size_cases() -> list[Any]:
    """All sizes on four ranks; on fewer ranks one size is quick, the others repeat it."""
    found = []
    for p, schedule, kind in itertools.product([1, 2, 4], SCHEDULES, SIZES):
        quick = p == 4 or (p, kind) in ((1, "uneven"), (2, "empty"))
        marks = () if quick else (pytest.mark.slow,)
        found.append(
            pytest.param(p, schedule, SIZES[kind], marks=marks, id=f"{p}-{schedule}-{kind}")
        )
    return found


@pytest.mark.parametrize(("p", "schedule", "sizes"), size_cases())
def test_micro_batches_may_be_uneven_empty_few_or_many_and_change_from_step_to_step(
    p: int, schedule: str, sizes: tuple[int, ...]
) -> None:
    def main(group: Group) -> Any:
        pipeline = piped(
            group, schedule, chunks_of(schedule), chain(layers(), p * chunks_of(schedule)), CROSS
        )
        steps = GivenBatches(
            [*step((X, Y), (4, 4)), *step((X, Y), sizes), *step((X, Y), (1, 4, 4, 1))]
        )
        return [pipeline(scaled_by_count, steps) for _ in range(3)], [
            s.module for s in pipeline.stages
        ]

    model = nn.Sequential(*layers())
    expected = [alone(model, CROSS, step((X, Y), some)) for some in ((4, 4), sizes, (1, 4, 4, 1))]
    ranks = World(p).run(main)
    for got, _ in ranks:
        assert [(float(t), n) for t, n in got] == [
            (pytest.approx(t, rel=1e-12), n) for t, n in expected
        ]
    ours = [
        w.grad for k in range(p * chunks_of(schedule)) for w in ranks[k % p][1][k // p].parameters()
    ]
    assert_gradients_close(
        dict(enumerate(ours)), dict(enumerate(w.grad for w in model.parameters()))
    )  # type: ignore[arg-type]


class Skip(nn.Module):
    """The middle of three stages: takes all kinds of values, of which some need no gradient, one is
    unused, one passes by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.second, self.third = (
            nn.Linear(6, 6).double() for _ in range(4)
        )
        self.word = nn.Embedding(7, 6).double()

    def begin(self, x: Tensor, ids: Tensor) -> dict[str, Any]:
        a = self.first(x)
        kept = (x[:, 0] > 0).nonzero().view(-1)  # so many rows as the data says
        return {
            "a": a,
            "skip": a.tanh(),
            "dead": self.unused(x),
            "ids": ids,
            "kept": a[kept],
            "mask": x > 0,
            "rows": len(kept),
            "rest": (None, [1.5, "text"], {"k": torch.float64}, slice(0, None), a.shape),
            "bare": x.detach().clone(),
        }

    def middle(self, v: dict[str, Any]) -> dict[str, Any]:
        nothing, (number, text), words, rows, shape = v["rest"]
        assert (
            nothing is None
            and text == "text"
            and words["k"] is torch.float64
            and shape == v["a"].shape
        )
        b = (
            self.second(v["a"][rows] * number).masked_fill(v["mask"], 0.0)
            + self.word(v["ids"])
            + v["bare"]
        )
        return {
            "b": b,
            "skip": v["skip"],
            "sum": v["kept"].sum() / max(1, v["rows"]),
            "rows": v["rows"],
        }

    def end(self, v: dict[str, Any]) -> Tensor:
        return self.third(v["b"] + v["skip"]) * (1 + v["sum"]) + v["rows"]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.end(self.middle(self.begin(x, ids)))


def skipping(model: Skip) -> list[HandStage]:
    parts = [nn.Module(), nn.Module(), nn.Module()]
    for k, held in enumerate((("first", "unused"), ("second", "word"), ("third",))):
        for name in held:
            parts[k].add_module(name, getattr(model, name))
    return [
        HandStage(parts[0], lambda _, inputs, values: model.begin(*inputs)),
        HandStage(parts[1], lambda _, inputs, values: model.middle(values)),
        HandStage(parts[2], lambda _, inputs, values: {"output": model.end(values)}),
    ]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_values_of_every_kind_cross_a_cut_also_where_shapes_follow_the_data(
    schedule: str, recompute: bool
) -> None:
    ids = torch.arange(64) % 7
    torch.manual_seed(0)
    model = Skip()
    expected = alone(model, CROSS, step((X, ids, Y), (4, 4, 4, 3, 4)))
    theirs = {n: w.grad for n, w in model.named_parameters()}
    assert theirs["unused.weight"] is None

    def main(group: Group) -> Any:
        mine = copy.deepcopy(model)
        mine.zero_grad()
        pipeline = piped(group, schedule, 1, skipping(mine), CROSS, recompute=recompute)
        total, count = pipeline(scaled_by_count, GivenBatches(step((X, ids, Y), (4, 4, 4, 3, 4))))
        assert (float(total), count) == (pytest.approx(expected[0], rel=1e-12), expected[1])
        return gradients(pipeline.stages)

    assert_gradients_close(functools.reduce(lambda a, b: a | b, World(3).run(main)), theirs)


def test_a_tensor_that_is_cut_over_ranks_stays_so_and_its_shard_gets_its_gradient() -> None:
    """Here the other ranks of the axis are only thought of: what travels is this rank's share and
    how it lies in the whole.
    """

    def main(group: Group) -> Any:
        axis = TensorAxis(None, 1, 2)

        def begin(
            module: nn.Module, inputs: tuple[Any, ...], values: dict[str, Any]
        ) -> dict[str, Any]:
            return {"cut": ShardedValue(module(inputs[0]), 1, 15, axis, 3)}

        def end(
            module: nn.Module, inputs: tuple[Any, ...], values: dict[str, Any]
        ) -> dict[str, Any]:
            cut = values["cut"]
            assert cut.axis is axis and (cut.shard_dim, cut.length, cut.groups, cut.shape) == (
                1,
                15,
                3,
                (4, 15),
            )
            return {"output": module(cut.local)}

        torch.manual_seed(0)
        one, two = nn.Linear(6, 6).double(), nn.Linear(6, 5).double()
        pipeline = piped(
            group, "1f1b", 1, [HandStage(one, begin), HandStage(two, end)], CROSS, axis=axis
        )
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4, 4))))
        return list(pipeline.stages[0].module.parameters())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6).double(), nn.Linear(6, 5).double())
    alone(model, CROSS, step((X, Y), (4, 4)))
    for got, w in zip(
        [g for some in World(2).run(main) for g in some], model.parameters(), strict=True
    ):
        torch.testing.assert_close(got.grad, w.grad, rtol=1e-12, atol=1e-12)


def test_a_value_that_cannot_travel_is_refused_by_name() -> None:
    def begin(module: nn.Module, inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        return {"x": module(inputs[0]), "odd": object()}

    def main(group: Group) -> None:
        stages = [HandStage(nn.Linear(6, 6).double(), begin), *chain(layers(2), 2)[1:]]
        piped(group, "1f1b", 1, stages, CROSS)(scaled_by_count, GivenBatches(step((X, Y), (4,))))

    with pytest.raises(TaskError, match="a object goes to stage 1; tensors, numbers, strings"):
        World(2).run(main)


# -- what a rank keeps, and what it sends --


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
    """Counts for how many micro-batches activations are kept at the most, in all that share the
    list `alive`.
    """

    def __init__(self, alive: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.alive, self.most = alive, 0

    def forward(self, x: Tensor) -> Tensor:
        x = Watched.apply(x, self.alive)
        self.most = max(self.most, sum(saved() is not None for saved in self.alive))
        return x


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p", [2, 4])
def test_no_more_micro_batches_are_alive_than_the_schedule_promises(p: int, schedule: str) -> None:
    m, chunks = 12, chunks_of(schedule)

    def main(group: Group) -> int:
        alive: list[weakref.ref[Tensor]] = []
        # between two layers: what is only needed for gradients of inputs goes before the weights
        # have theirs
        watched = [
            nn.Sequential(nn.Linear(6, 6), Watch(alive), nn.Linear(6, 6)).double()
            for _ in range(p * chunks)
        ]
        pipeline = piped(group, schedule, chunks, chain(watched, p * chunks), CROSS)
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4,) * m)))
        assert not any(saved() is not None for saved in alive), "nothing is kept after a step"
        return max(
            w.most for s in pipeline.stages for w in s.module.modules() if isinstance(w, Watch)
        )

    # no fewer either, or this test would not see them
    assert World(p).run(main) == [max_in_flight(schedule, p, rank, m, chunks) for rank in range(p)]


def test_once_both_ends_know_the_shapes_one_message_goes_each_way_for_every_micro_batch() -> None:
    def main(group: Group) -> list[int]:
        watched = ObservedGroup(group, lambda event: None)
        pipeline = piped(watched, "1f1b", 1, chain(layers(), 3), CROSS)
        calls = []
        for sizes in ((3, 3, 2, 2), (3, 3, 2, 2), (3, 2, 3, 2)):
            before = watched.calls
            pipeline(scaled_by_count, GivenBatches(step((X, Y), sizes)))
            calls.append(watched.calls - before - 1)  # less the sum of losses
        return calls

    # the middle rank takes and gives a message each way; new shapes (two of them) are described on
    # first sight, in two more
    assert World(3).run(main) == [[8 + 4, 8, 8], [16 + 8, 16, 16], [8 + 4, 8, 8]]


def test_what_needs_no_gradient_gets_no_message() -> None:
    def main(group: Group) -> int:
        stages = chain(layers(2), 2)
        for w in stages[0].module.parameters():
            w.requires_grad_(False)
        watched = ObservedGroup(group, lambda event: None)
        pipeline = piped(watched, "1f1b", 1, stages, CROSS)
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4, 4))))
        before = watched.calls
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4, 4))))
        return watched.calls - before - 1

    assert World(2).run(main) == [2, 2]


# -- the rest of a task --


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_short_types_and_a_loss_scale_give_the_bits_of_one_process(
    schedule: str, precision: str
) -> None:
    scale = 1024.0 if precision == "fp16" else 1.0
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    x = X.float()

    def scaled(loss: Tensor, count: int) -> Tensor:
        assert loss.dtype == torch.float32
        return loss * (count / 16) * scale

    model = nn.Sequential(*layers()).float()
    for batch in step((x, Y), (4, 4, 4)):
        with torch.autocast("cpu", kind):
            loss = CROSS(model(batch.values[0]), batch.values[1])
        scaled(loss.float(), 4).backward()

    def main(group: Group) -> Any:
        mine = [layer.float() for layer in layers()]
        pipeline = piped(group, schedule, 1, chain(mine, 2), CROSS, precision=precision)
        pipeline(scaled, GivenBatches(step((x, Y), (4, 4, 4))))
        return list(pipeline.stages[0].module.parameters())

    ours = [w for some in World(2).run(main) for w in some]
    for got, expected in zip(ours, model.parameters(), strict=True):
        assert torch.equal(got.grad, expected.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputing_changes_neither_gradients_nor_dropout_nor_running_statistics(
    schedule: str,
) -> None:
    def main(recompute: bool, group: Group) -> Any:
        torch.manual_seed(5)
        mine = [
            nn.Sequential(
                nn.ReLU(inplace=True) if i else nn.Identity(),
                nn.Linear(6, 6),
                nn.BatchNorm1d(6),
                nn.Dropout(0.3),
            )
            for i in range(8)
        ]
        chunks = chunks_of(schedule)
        stages = chain([m.double() for m in mine], 2 * chunks)
        pipeline = piped(group, schedule, chunks, stages, CROSS, recompute=recompute)
        torch.manual_seed(6)
        total, _ = pipeline(scaled_by_count, GivenBatches(step((X, Y), (8, 8, 8, 8))))
        return (
            total,
            [w.grad for s in pipeline.stages for w in s.module.parameters()],
            [s.module.state_dict() for s in pipeline.stages],
        )

    kept, again = (
        World(2).run(functools.partial(main, False)),
        World(2).run(functools.partial(main, True)),
    )
    for (t, grads, states), (t2, grads2, states2) in zip(kept, again, strict=True):
        assert float(t) == float(t2)
        assert all(torch.equal(a, b) for a, b in zip(grads, grads2, strict=True))
        for one, two in zip(states, states2, strict=True):
            assert all(torch.equal(one[k], two[k]) for k in one)


def test_recomputing_keeps_the_activations_of_one_micro_batch_at_the_most() -> None:
    def main(group: Group) -> int:
        watched = [nn.Sequential(nn.Linear(6, 6), Watch([]), nn.Tanh()).double() for _ in range(2)]
        pipeline = piped(group, "gpipe", 1, chain(watched, 2), CROSS, recompute=True)
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4,) * 6)))
        return next(w.most for w in pipeline.stages[0].module.modules() if isinstance(w, Watch))

    assert World(2).run(main) == [1, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inference_gives_the_outputs_on_the_last_rank_and_leaves_no_trace(schedule: str) -> None:
    model = nn.Sequential(*layers())
    chunks = chunks_of(schedule)

    def main(group: Group) -> Any:
        pipeline = piped(group, schedule, chunks, chain(layers(), 4 * chunks), CROSS)
        got = [pipeline.infer((X[:n], Y[:n])) for n in (5, 5, 3)]
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4, 4, 4, 4))))
        got.append(pipeline.infer((X[:5], Y[:5])))
        return got, [w.grad for s in pipeline.stages for w in s.module.parameters()]

    *others, (outputs, _) = World(4).run(main)
    assert all(got == [None] * 4 for got, _ in others)
    for got, n in zip(outputs, (5, 5, 3, 5), strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got, model(X[:n]).detach(), rtol=1e-12, atol=1e-12)
    alone(model, CROSS, step((X, Y), (4, 4, 4, 4)))
    torch.testing.assert_close(others[0][1][0], model[0][0].weight.grad, rtol=1e-12, atol=1e-12)


def test_a_step_of_ones_own_counts_as_it_likes_and_reads_batches_of_its_own_form() -> None:
    def own(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        kept = batch["y"] != 0
        losses = CROSS(model(batch["x"]), batch["y"], reduction="none")
        return (losses * kept).sum() / max(1, int(kept.sum())), int(kept.sum())

    batches = [Batch({"x": X[i : i + 6], "y": Y[i : i + 6]}, 6, i == 12) for i in (0, 6, 12)]
    model, expected, count = nn.Sequential(*layers()), 0.0, 0
    for batch in batches:
        loss, n = own(model, batch.values)
        scaled_by_count(loss, n).backward()
        expected, count = expected + float(loss.detach()) * n, count + n

    def main(group: Group) -> Any:
        pipeline = piped(group, "1f1b", 1, chain(layers(), 3), step=own)
        total, n = pipeline(scaled_by_count, GivenBatches(list(batches)))
        assert (float(total), n) == (pytest.approx(expected, rel=1e-12), count)
        return list(pipeline.stages[0].module.parameters())

    for got, w in zip(
        [g for some in World(3).run(main) for g in some], model.parameters(), strict=True
    ):
        torch.testing.assert_close(got.grad, w.grad, rtol=1e-12, atol=1e-12)


def test_a_step_that_never_calls_the_model_is_refused() -> None:
    def main(group: Group) -> None:
        pipeline = piped(
            group, "1f1b", 1, chain(layers(), 2), step=lambda model, batch: torch.zeros(())
        )
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4,))))

    with pytest.raises(TaskError, match="did not call the model"):
        World(2).run(main)


def test_every_piece_of_work_and_every_message_is_reported_with_its_time() -> None:
    def main(group: Group) -> list[Event]:
        seen: list[Event] = []
        ticks = iter(range(10_000))
        pipeline = piped(
            group,
            "zero_bubble",
            1,
            chain(layers(), 2),
            CROSS,
            emit=seen.append,
            clock=lambda: float(next(ticks)),
            rank=7 + group.rank,
        )
        pipeline.round = 3
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4, 4))))
        return seen

    first, last = World(2).run(main)
    assert {(e.rank, e.round) for e in first} == {(7, 3)} and {(e.rank, e.round) for e in last} == {
        (8, 3)
    }
    assert all(e.seconds == 1.0 for e in first + last)
    names = [
        (e.name, e.value["micro"])
        for e in last
        if isinstance(e.value, dict) and e.value["stage"] == 1
    ]
    assert names == [
        ("receive", 0),
        ("forward", 0),
        ("backward", 0),
        ("send", 0),
        ("receive", 1),
        ("forward", 1),
        ("backward", 1),
        ("send", 1),
        ("weight", 0),
        ("weight", 1),
    ]
    assert [e.nbytes for e in first if e.name == "send"][1] == 64 + 4 * 6 * 8


def test_a_weight_tied_between_stages_that_no_micro_batch_used_keeps_no_gradient() -> None:
    def main(group: Group) -> Any:
        parts = chain(layers(2), 2)
        spare = nn.Parameter(torch.ones(3, dtype=torch.float64))
        for part in parts:
            part.module.register_parameter(
                "spare",
                spare if group.rank == 0 else nn.Parameter(torch.ones(3, dtype=torch.float64)),
            )
            part.tied["spare"] = [0, 1]
        pipeline = piped(group, "1f1b", 1, parts, CROSS)
        pipeline(scaled_by_count, GivenBatches(step((X, Y), (4,))))
        return pipeline.stages[0].module.get_parameter("spare").grad

    assert World(2).run(main) == [None, None]
