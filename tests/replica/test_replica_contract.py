"""Every kind of replica fulfils one contract: it trains like a plain torch loop.

`KINDS` lists the kinds: a module alone, its wrappers, and one replica spread over two ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from manyhands.core import (
    GradientReplica,
    Group,
    LoopReplica,
    PartialStepReplica,
    Replica,
    ServedReplica,
    Tensors,
)
from manyhands.data.batches import Batch
from manyhands.data.sources import TensorSource
from manyhands.exchange.inproc import World
from manyhands.exchange.shared import shard_memory
from manyhands.parallel.zero.full_state import gradient_state, parameter_state
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.replica.captured import CapturedReplica
from manyhands.replica.distillation import student
from manyhands.replica.flat import FlatParameters
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import ModuleReplica
from manyhands.replica.objective import Objective
from manyhands.replica.parameters import ReplicaGroup
from manyhands.replica.thinned import thinned
from manyhands.replica.update import WholeUpdate
from support.compare import assert_tensors_close
from support.pipelines import chain, piped

FEATURES, CLASSES, NOMINAL = 6, 3, 8
Sizes = Sequence[Sequence[int]]  # the micro-batches of each step
Make = Callable[[Any], Optimizer]
PROTOCOLS = (Replica, GradientReplica, PartialStepReplica, ServedReplica, LoopReplica)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(7, CLASSES)).double()


def samples(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, FEATURES, generator=g, dtype=torch.float64)
    return x.to(device), x[:, :CLASSES].argmax(1).to(device)


class GivenBatches:
    """The micro-batches of `sizes`, one step after the other; of each, the rows of one rank.

    `borrow`: an empty micro-batch still runs the model, on a row that does not count.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, rank: int = 0, size: int = 1, borrow: bool = False
    ):
        self.source = TensorSource(samples(max(1, sum(map(sum, sizes))), device), device)
        self.steps, self._borrow = 0, borrow
        self._todo, at = list[tuple[Tensor, bool]](), 0
        for step in sizes:
            for i, n in enumerate(step):
                rows = torch.arange(at, at + n, device=device)[rank::size]
                self._todo.append((rows, i == len(step) - 1))
                at += n

    def peek(self) -> tuple[int, bool]:
        rows, last = self._todo[0]
        return len(rows), last

    def next_indices(self) -> Tensor:
        rows, last = self._todo.pop(0)
        self.steps += last
        return rows

    def next(self) -> Batch:
        count, last = self.peek()
        rows = self.next_indices()
        if count or self._borrow:
            rows = rows if count else torch.zeros(1, dtype=torch.long)
            return Batch(self.source.fetch(rows), count, last)
        return Batch(None, 0, last)


@dataclass
class Built:
    """One rank of a replica; `weights` and `gradients` by name, as far as this rank has them."""

    replica: Any
    weights: Callable[[], Tensors]
    gradients: Callable[[], Tensors]
    batches: GivenBatches
    rtol: float = 1e-11

    def assert_weights(self, whole: Tensors) -> None:
        """This rank's weights are those of `whole`."""
        self._assert_in(self.weights(), whole)

    def assert_gradients(self, whole: Tensors) -> None:
        self._assert_in(self.gradients(), whole)

    def _assert_in(self, some: Tensors, whole: Tensors) -> None:
        assert some
        expected = {k: whole[k] for k in some}
        assert_tensors_close({k: v.cpu() for k, v in some.items()}, expected, rtol=self.rtol)


Build = Callable[..., Built]


def of_task(
    wrap: Callable[[ModuleReplica, TaskLoss, GivenBatches], Any], device: str = "cpu"
) -> Build:
    """A module alone on its rank, and what `wrap` makes of it."""

    def build(group: Group, sizes: Sizes, make: Make, **options: Any) -> Built:
        where = torch.device(device)
        model, batches = network().to(where), GivenBatches(sizes, where)
        flat = FlatParameters(model, lambda n, t: torch.zeros(n, dtype=t, device=where), 256)
        task: Any = TaskLoss(model, batches, Objective(cross_entropy), "fp32", where)
        update = WholeUpdate(flat, model, make(model.parameters()))
        plain = ModuleReplica(flat, update, task, **finished(batches, update.optimizer, options))
        return Built(
            wrap(plain, task, batches),
            lambda: named(model.named_parameters()),
            lambda: {view.name: view.grad.clone() for view in flat.views},
            batches,
            # a captured step has its learning rate in a float32 tensor
            rtol=1e-11 if device == "cpu" else 1e-6,
        )

    return build


def of_shards(stage: int) -> Build:
    """ZeRO: each of two ranks has half of the samples and half of every vector."""

    def build(group: Group, sizes: Sizes, make: Make, **options: Any) -> Built:
        cpu, model = torch.device("cpu"), network()
        batches = GivenBatches(sizes, cpu, group.rank, group.size, borrow=stage == 3)
        memory, common = shard_memory(group)
        optimizer = make(model.parameters())
        flat = ShardedParameters(
            model, group, stage, allocate=memory, common=common, bucket_bytes=512, block_bytes=512
        )
        task: Any = TaskLoss(model, batches, Objective(cross_entropy), "fp32", cpu)
        replica = ModuleReplica(
            flat, ShardUpdate(flat, optimizer), task, **finished(batches, optimizer, options)
        )
        return Built(replica, lambda: parameter_state(flat), lambda: gradient_state(flat), batches)

    return build


def in_stages(group: Group, sizes: Sizes, make: Make, **options: Any) -> Built:
    """A pipeline: each of two ranks has half of the layers and all samples."""
    cpu, model = torch.device("cpu"), network()
    batches, stages = GivenBatches(sizes, cpu), chain(list(model), group.size)
    module = stages[group.rank].module
    executor = piped(group, "1f1b", 1, stages, loss=cross_entropy)
    flat = FlatParameters(module, lambda n, t: torch.zeros(n, dtype=t), 256)
    update = WholeUpdate(flat, module, make(module.parameters()))
    whole = ReplicaGroup(lambda v: group.all_reduce({"v": v}).wait(), [1.0] * len(flat.views))
    replica = ModuleReplica(
        flat,
        update,
        lambda: pytest.fail("a pipeline runs all micro-batches of a step itself"),
        run_micro_batches=lambda scaled: executor(scaled, batches),
        replica_group=whole,
        **finished(batches, update.optimizer, options),
    )
    names = {id(p): name for name, p in model.named_parameters()}
    return Built(
        replica,
        lambda: named((names[id(p)], p) for p in module.parameters()),
        lambda: {names[id(view.parameter)]: view.grad.clone() for view in flat.views},
        batches,
    )


def finished(
    batches: GivenBatches, optimizer: Optimizer, options: dict[str, Any]
) -> dict[str, Any]:
    """The options of a replica, with a schedule over its optimizer and an end after some steps."""
    schedule, end = options.pop("schedule", None), options.pop("end", float("inf"))
    more = {} if schedule is None else {"schedule": schedule(optimizer)}
    return {"nominal": NOMINAL, "ended": lambda: batches.steps >= end, **more, **options}


@dataclass(frozen=True)
class Kind:
    build: Build
    size: int = 1  # ranks over which the one replica is spread


KINDS = {
    "module": Kind(of_task(lambda plain, task, batches: plain)),
    "student": Kind(of_task(lambda plain, task, batches: student(plain, task))),
    "thinned": Kind(
        of_task(lambda plain, task, batches: thinned(plain, task.module, task, batches.source))
    ),
    "thinned student": Kind(
        of_task(
            lambda plain, task, batches: thinned(
                student(plain, task), task.module, task, batches.source
            )
        )
    ),
    "captured": Kind(
        of_task(
            lambda plain, task, batches: CapturedReplica(plain, task, batches, pytest.fail), "cuda"
        )
    ),
    "zero 1": Kind(of_shards(1), 2),
    "zero 2": Kind(of_shards(2), 2),
    "zero 3": Kind(of_shards(3), 2),
    "pipelined": Kind(in_stages, 2),
}
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)


def kinds(*without: str) -> Any:
    marks = {"captured": GPU}
    listed = [pytest.param(k, marks=marks.get(k, ())) for k in KINDS if k not in without]
    return pytest.mark.parametrize("kind", listed)


every_kind = kinds()
# a strategy that reads gradients between backward and step excludes a captured step
open_kinds = kinds("captured")


def on_every_rank(
    kind: str, sizes: Sizes, body: Callable[[Built], Any], make: Make = momentum, **options: Any
) -> list[Any]:
    """What `body` returns on each rank of the replica."""

    def main(group: Group) -> Any:
        build = KINDS[kind].build
        if kind != "captured":
            return body(build(group, sizes, make, **options))
        with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
            return body(build(group, sizes, make, **options))

    return World(KINDS[kind].size).run(main)


def train(built: Built, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(built.replica.backward()))
        built.replica.step()
    return losses


class PlainLoop:
    """The same steps in plain torch, each on the union of its micro-batches."""

    def __init__(self, sizes: Sizes, make: Make = momentum):
        self.model, self.totals = network(), [sum(step) for step in sizes]
        self.optimizer = make(self.model.parameters())
        self.x, self.y = samples(max(1, sum(self.totals)), torch.device("cpu"))
        self.at = 0

    def backward(self) -> float:
        n = self.totals.pop(0)
        self.optimizer.zero_grad()
        if not n:
            return 0.0
        rows = slice(self.at, self.at + n)
        self.at += n
        loss = cross_entropy(self.model(self.x[rows]), self.y[rows])
        loss.backward()
        return float(loss)

    def train(self) -> list[float]:
        losses = []
        while self.totals:
            n = self.totals[0]
            losses.append(self.backward())
            if n:
                self.optimizer.step()
        return losses

    def weights(self) -> Tensors:
        return named(self.model.named_parameters())

    def gradients(self) -> Tensors:
        return {k: p.grad.clone() for k, p in self.model.named_parameters() if p.grad is not None}


def named(parameters: Iterator[tuple[str, nn.Parameter]] | Any) -> Tensors:
    return {k: p.detach().cpu().clone() for k, p in parameters}


# -- the contract --


@every_kind
def test_it_has_all_that_strategies_and_the_loop_may_use(kind: str) -> None:
    wanted = {m for p in PROTOCOLS for m in (*vars(p), *p.__annotations__) if m[0] != "_"}
    assert len(wanted) == 22

    def body(built: Built) -> None:
        has = {*dir(type(built.replica)), *vars(built.replica)}
        assert wanted <= has

    on_every_rank(kind, [], body)


@every_kind
def test_params_and_grads_are_long_vectors_through_which_the_model_changes(kind: str) -> None:
    def body(built: Built) -> None:
        params, grads = built.replica.params, built.replica.grads
        assert params.keys() == grads.keys()
        for k, x in params.items():
            assert x.ndim == 1 and x.is_contiguous() and x.shape == grads[k].shape
        before = built.weights()
        for x in params.values():
            x.add_(1.0)
        built.assert_weights({k: w + 1 for k, w in before.items()})

    on_every_rank(kind, [], body)


RAGGED: Sizes = [[8], [3, 4, 1], [2, 6], [8], [5], [4, 4], [8], [8]]


@every_kind
@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_backward_then_step_is_a_plain_torch_loop(kind: str, make: Make) -> None:
    plain = PlainLoop(RAGGED, make)
    expected = plain.train()

    def body(built: Built) -> None:
        assert train(built, len(RAGGED)) == pytest.approx(expected, rel=built.rtol)
        built.assert_weights(plain.weights())

    on_every_rank(kind, RAGGED, body, make)


@every_kind
def test_clipping_is_by_the_norm_of_the_whole_gradient(kind: str) -> None:
    plain, clip = PlainLoop(RAGGED), 0.05
    while plain.totals:
        plain.backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), clip)
        plain.optimizer.step()

    def body(built: Built) -> None:
        train(built, len(RAGGED))
        built.assert_weights(plain.weights())

    on_every_rank(kind, RAGGED, body, clip=clip)


@every_kind
@pytest.mark.parametrize("sizes", [[[8]], [[3, 2]], [[1]]])
def test_count_is_the_number_of_samples_of_the_replica(kind: str, sizes: Sizes) -> None:
    def body(built: Built) -> None:
        built.replica.backward()
        n = sum(sizes[0])
        assert built.replica.own_count == float(built.replica.count[0]) == n
        assert bool((built.replica.count[1:] == 1).all()), "all parameters are used"

    on_every_rank(kind, sizes, body)


@open_kinds
@pytest.mark.parametrize("sizes", [[[8]], [[3, 2]], [[1]]])
def test_grads_are_scale_times_the_mean_gradient(kind: str, sizes: Sizes) -> None:
    plain = PlainLoop(sizes)
    plain.backward()

    def body(built: Built) -> None:
        built.replica.backward()
        scale = built.replica.scale
        assert float(scale) == sum(sizes[0]) / NOMINAL
        assert built.replica.grads
        expected = {k: g * scale for k, g in plain.gradients().items()}
        built.assert_gradients(expected)

    on_every_rank(kind, sizes, body)


@open_kinds
def test_a_term_times_scale_that_is_added_to_grads_is_added_to_the_step(kind: str) -> None:
    sizes: Sizes = [[8], [3, 2]]
    plain = PlainLoop(sizes, sgd)
    for _ in sizes:
        plain.backward()
        for p in plain.model.parameters():
            assert p.grad is not None
            p.grad.add_(0.25)
        plain.optimizer.step()

    def body(built: Built) -> None:
        for _ in sizes:
            built.replica.backward()
            for g in built.replica.grads.values():
                g.add_(built.replica.scale * 0.25)
            built.replica.step()
        built.assert_weights(plain.weights())

    on_every_rank(kind, sizes, body, sgd)


@open_kinds
def test_on_ready_gets_every_gradient_once_and_may_sum_it_over_ranks_in_place(kind: str) -> None:
    plain = PlainLoop([[8]])
    plain.train()

    def body(built: Built) -> list[str]:
        got: list[tuple[str, Tensor]] = []
        built.replica.backward(on_ready=lambda bucket: got.extend(bucket.items()))
        grads = built.replica.grads
        assert sum(g.numel() for _, g in got) == sum(g.numel() for g in grads.values())
        for _, g in got:
            g.mul_(2)  # as the sum over two equal replicas
        built.replica.count.mul_(2)
        built.replica.step()
        built.assert_weights(plain.weights())
        return [name for name, _ in got]

    first, second = (on_every_rank(kind, [[8]], body) for _ in range(2))
    assert first == second, "in the same order in every replica"


@every_kind
def test_empty_micro_batches_change_nothing(kind: str) -> None:
    full: Sizes = [[4, 3], [8], [5]]
    holed: Sizes = [[4, 0, 3, 0], [0, 8], [5, 0]]

    def body(built: Built) -> Tensors:
        train(built, 3)
        return built.weights()

    for a, b in zip(*(on_every_rank(kind, s, body) for s in (full, holed)), strict=True):
        assert_tensors_close(a, b)


@every_kind
@pytest.mark.parametrize("make", [momentum, adam])
def test_a_step_without_any_samples_changes_nothing(kind: str, make: Make) -> None:
    def body(built: Built) -> None:
        train(built, 2)
        before = built.weights()
        kept = {k: m.clone() for k, m in built.replica.moments.items()}
        assert train(built, 1) == [0.0] and built.replica.own_count == 0
        assert all(torch.equal(w, before[k]) for k, w in built.weights().items())
        assert all(torch.equal(m, kept[k]) for k, m in built.replica.moments.items())
        train(built, 1)
        assert not all(torch.equal(w, before[k]) for k, w in built.weights().items())

    on_every_rank(kind, [[8], [8], [0], [8]], body, make)


@every_kind
def test_holding_shows_other_parameters_and_restores_its_own(kind: str) -> None:
    def body(built: Built) -> None:
        replica = built.replica
        before = copy.deepcopy(dict(replica.params))
        with replica.holding({k: x + 1 for k, x in before.items()}):
            assert all(torch.equal(x, before[k] + 1) for k, x in replica.params.items())
        assert all(torch.equal(x, before[k]) for k, x in replica.params.items())
        with (
            pytest.raises(ZeroDivisionError),
            replica.holding({k: x + 1 for k, x in before.items()}),
        ):
            raise ZeroDivisionError
        assert all(torch.equal(x, before[k]) for k, x in replica.params.items())
        with replica.holding(None):
            assert all(torch.equal(x, before[k]) for k, x in replica.params.items())

    on_every_rank(kind, [], body)


@every_kind
def test_load_copies_into_the_model(kind: str) -> None:
    def body(built: Built) -> None:
        before = built.weights()
        built.replica.load({k: x * 2 for k, x in built.replica.params.items()})
        built.assert_weights({k: w * 2 for k, w in before.items()})

    on_every_rank(kind, [], body)


@every_kind
def test_a_block_of_steps_ends_where_the_run_does(kind: str) -> None:
    def body(built: Built) -> list[int]:
        replica, done = built.replica, []
        assert not replica.in_block
        for i in replica.steps(5):
            assert replica.in_block == (i > 0)
            train(built, 1)
            done.append(i)
        assert not replica.in_block
        assert list(replica.steps(1)) == [0], "a block has at least one step"
        return done

    assert on_every_rank(kind, [[8]] * 6, body, end=3) == [[0, 1, 2]] * KINDS[kind].size
    assert on_every_rank(kind, [[8]] * 6, body) == [[0, 1, 2, 3, 4]] * KINDS[kind].size


@every_kind
@pytest.mark.parametrize(("make", "each"), [(sgd, 0), (momentum, 1), (adam, 2)])
def test_moments_have_the_same_names_with_and_without_samples(
    kind: str, make: Make, each: int
) -> None:
    """A replica that never had samples must not leave others waiting in an exchange of moments."""

    def body(built: Built) -> list[str]:
        train(built, 2)
        moments = built.replica.moments
        elements = sum(view.parameter.numel() for view in built.replica.flat.views)
        assert sum(m.numel() for m in moments.values()) == each * elements
        return [f"{k} {tuple(m.shape)}" for k, m in moments.items()]

    busy, idle = (on_every_rank(kind, sizes, body, make) for sizes in ([[8], [8]], [[0], [0]]))
    assert busy == idle


@every_kind
def test_reset_moments_starts_the_optimizer_anew(kind: str) -> None:
    sizes: Sizes = [[8], [8]]
    plain = PlainLoop(sizes)
    plain.backward()
    plain.optimizer.step()
    plain.optimizer.state.clear()
    plain.backward()
    plain.optimizer.step()

    def body(built: Built) -> None:
        train(built, 1)
        built.replica.reset_moments()
        train(built, 1)
        built.assert_weights(plain.weights())

    on_every_rank(kind, sizes, body)


@every_kind
def test_the_schedule_moves_once_a_step_and_no_more_when_the_run_closes(kind: str) -> None:
    def body(built: Built) -> list[float]:
        rates = []
        for i in range(4):
            built.replica.closing = i == 3
            train(built, 1)
            rates.append(built.replica.lr)
        return rates

    def halves(optimizer: Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    for rates in on_every_rank(kind, [[8], [3, 5], [0], [0]], body, schedule=halves):
        assert rates == pytest.approx([0.05, 0.025, 0.0125, 0.0125])


@every_kind
def test_a_replica_that_updates_everything_leaves_nothing_to_gather(kind: str) -> None:
    def body(built: Built) -> None:
        built.replica.backward()
        assert not built.replica.updates_slice and built.replica.square_norm() is None

    on_every_rank(kind, [[8]], body, clip=0.1)


@kinds("captured", "zero 1", "zero 2", "zero 3", "pipelined")  # servers hold whole models
@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradient_is_the_clipped_mean_for_a_server_that_makes_the_step(
    kind: str, clip: float | None
) -> None:
    plain = PlainLoop([[3, 2]])
    plain.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(plain.model.parameters(), clip)

    def body(built: Built) -> None:
        built.replica.backward()
        before = built.weights()
        assert built.replica.gradient() is not None
        built.assert_gradients(plain.gradients())
        built.replica.stepped()
        assert all(torch.equal(w, before[k]) for k, w in built.weights().items())

    on_every_rank(kind, [[3, 2]], body, clip=clip)
