"""One step of a model that is cut into stages over the ranks of a pipeline.

    rank 0   F0 F1 F2 F3          B0 B1 B2 B3          F: take values from the stage before, compute, give to the next
    rank 1      F0 F1 F2 F3    B0 B1 B2 B3             B: take gradients from the next, go back, give to the stage before
    rank 2         F0 F1 F2 F3 B0 B1 B2 ...            W: gradients of weights that B left out (split_backward)

Every rank reads the step's micro-batches from a source of its own, so that inputs and targets are never sent; it walks through
its list of actions, and so keeps no more activations than the schedule promises: a micro-batch's graph goes when its way back
is over, and of what a stage gives only the graph is kept, not the values. The last stage computes the loss. What a stage
computes is independent of the schedule, so gradients are those of one process that accumulates the same micro-batches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from manyhands.core import Emit, Event, Group
from manyhands.data.batches import Batch, BatchIterator
from manyhands.errors import TaskError
from manyhands.parallel.pipeline.split_backward import Rest, backward_inputs
from manyhands.parallel.pipeline.transfers import (
    Due,
    Key,
    Meta,
    StageTransfers,
    Values,
)
from manyhands.parallel.tensor.sharding_rules import TensorAxis
from manyhands.replica.forward import TaskLoss, autocast, inputs_of
from manyhands.replica.recompute import buffers_stay

Scaled = Callable[[Tensor, int], Tensor]  # (mean loss, samples of it) -> what to go back from
TRAINED, INFERRED = "trained", "inferred"


class Action(Protocol):
    """What `split.stages.Action` looks like from here."""

    @property
    def kind(self) -> Literal["F", "B", "W"]: ...
    @property
    def micro(self) -> int: ...
    @property
    def chunk(self) -> int: ...


class Stage(Protocol):
    """What `parallel.pipeline.stage_modules.Stage` looks like from here."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def tied(self) -> Mapping[str, Sequence[int]]: ...
    def forward(self, inputs: tuple[Any, ...], values: Values) -> Values: ...


Schedule = Callable[[int, int], Sequence[Action]]  # (rank, micro-batches) -> its actions in a step


@dataclass
class _Plan:
    """A step with the same micro-batches that are empty."""

    actions: list[Action]
    due: dict[int, list[Due]]  # by peer
    reads: dict[
        tuple[str, int, int], int
    ]  # (kind, stage, micro) on another rank -> as which of its actions
    splits: set[tuple[int, int]]  # (chunk, micro) whose way back is in two parts


@dataclass
class _Flight:
    """A micro-batch in a stage between its way there and its way back."""

    outputs: list[GradientEdge]
    metas: list[Meta]  # of what it took and owes gradients for
    inputs: list[GradientEdge]
    arrivals: list[_Arrival]
    seed: Tensor | None = None  # of the loss: 1
    rest: Rest | None = None


@dataclass
class _Window:
    """The step under way."""

    plan: _Plan
    batches: list[Batch]
    scaled: Scaled
    total: Tensor
    count: int = 0
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)  # (stage, micro)
    output: Any = None


class PipelineExecutor:
    """The stages of this rank, by chunk: stage k of all lies on rank k mod p as its chunk k // p, p being the group's size.

    Called once a step by every rank of `group` with its own walk through the same batches. `infer` runs forward only. `axis`: of
    the ranks that hold the stages together with this one, where tensors are cut too."""

    def __init__(
        self,
        stages: Sequence[Stage],
        group: Group,
        schedule: Schedule,
        *,
        loss: Callable[..., Tensor] | None = None,
        step: Callable[[nn.Module, Any], Tensor | tuple[Tensor, int]] | None = None,
        precision: str = "fp32",
        device: torch.device | None = None,
        recompute: bool = False,
        axis: TensorAxis | None = None,
        emit: Emit | None = None,
        clock: Callable[[], float] = time.time,
        rank: int | None = None,
    ):
        self.stages, self.group, self.schedule = list(stages), group, schedule
        self.loss, self.step, self.precision, self.recompute = loss, step, precision, recompute
        self.device = device or torch.device("cpu")
        self.round = 0  # the loop sets it: that of the events
        self.counts = True  # whether the micro-batch at work has samples of its own: BatchNorm asks
        self._emit, self._clock, self._rank = emit, clock, group.rank if rank is None else rank
        self._stages = group.size * len(self.stages)  # of all ranks
        self._mail = StageTransfers(group, self.device, axis)
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        where = self.device if self.device.type != "mps" else torch.device("cpu")
        self._zero = torch.zeros((), dtype=torch.float64, device=where)

    def __call__(self, scaled: Scaled, batches: BatchIterator) -> tuple[Tensor, int]:
        """One step: gradients are added to `.grad` of this rank's parameters. Gives the sum of losses over all samples of the
        step, and their number, on every rank."""
        drawn = [batches.next()]
        while not drawn[-1].last:
            drawn.append(batches.next())
        before = [(weight, weight.grad) for weight, _ in self._tied]
        for weight, _ in self._tied:
            weight.grad = (
                None  # of this step alone: what was summed before must not be summed again
            )
        window = self._run(drawn, scaled, TRAINED)
        self._sum_tied()
        for weight, grad in before:
            if grad is not None:
                weight.grad = grad if weight.grad is None else grad + weight.grad
        both = {"sums": torch.stack([window.total, self._zero + window.count])}
        self.group.all_reduce(both).wait()  # only the last stage brought something
        total, count = both["sums"]
        # a step of the user's counts in its own way; else all ranks have read the same batches and the device is not asked
        known = (
            sum(b.count for b in drawn if b.values is not None) if self.step is None else int(count)
        )
        return total.to(self._dtype), known

    @torch.no_grad()
    def infer(self, values: Any) -> Any:
        """What the model gives for a batch, on the rank of the last stage; None elsewhere. Every rank of the group calls it."""
        return self._run([Batch(values, 1, True)], lambda loss, count: loss, INFERRED).output

    # -- the walk through the actions --

    def _run(self, drawn: list[Batch], scaled: Scaled, mode: str) -> _Window:
        plan = self._plan(
            mode, len(drawn), tuple(i for i, b in enumerate(drawn) if b.values is not None)
        )
        window = _Window(plan, drawn, scaled, self._zero.clone())
        self._mail.open(plan.due, [(mode, *_shapes(b.values)) for b in drawn])
        for action in plan.actions:
            number = action.chunk * self.group.size + self.group.rank
            if action.kind == "F":
                self._forward(window, number, action.micro, mode)
            elif action.kind == "B":
                self._backward(
                    window, number, action.micro, (action.chunk, action.micro) in plan.splits
                )
            elif (rest := window.flights.pop((number, action.micro)).rest) is not None:
                with self._span("weight", number, action.micro):
                    rest()
        self._mail.close()
        return window

    def _plan(self, mode: str, micros: int, kept: tuple[int, ...]) -> _Plan:
        if (found := self._plans.get((mode, micros, kept))) is not None:
            return found
        me, p, v = self.group.rank, self.group.size, len(self.stages)
        # schedules of several chunks take micro-batches in rounds of p; what is missing from the last round, nobody does
        asked = -(-micros // p) * p if v > 1 else micros
        lists = {
            r: [a for a in self.schedule(r, asked) if a.micro in kept]
            for r in {me, (me - 1) % p, (me + 1) % p}
        }
        if mode == INFERRED:
            lists = {r: [a for a in some if a.kind == "F"] for r, some in lists.items()}
        plan = _Plan(
            lists[me],
            {r: [] for r in lists if r != me},
            {},
            {(a.chunk, a.micro) for a in lists[me] if a.kind == "W"},
        )
        for peer, messages in plan.due.items():
            for i, a in enumerate(lists[peer]):
                here = a.chunk * p + peer
                plan.reads[a.kind, here, a.micro] = i
                there = here + 1 if a.kind == "F" else here - 1
                if a.kind != "W" and 0 <= there < self._stages and there % p == me:
                    messages.append(Due(a.kind, there, a.micro, i))
        if len(self._plans) > 64:  # steps of ever new numbers of micro-batches
            self._plans.clear()
        self._plans[mode, micros, kept] = plan
        return plan

    def _forward(self, window: _Window, number: int, micro: int, mode: str) -> None:
        stage, batch, p = (
            self.stages[number // self.group.size],
            window.batches[micro],
            self.group.size,
        )
        self.counts = batch.count > 0
        values: Values = {}
        flight = _Flight([], [], [], [])
        if number:
            with self._span("receive", number, micro):
                got = self._mail.take_values((number - 1) % p, number, micro)
            leaves = list(got.leaves)
            for i, wanted in enumerate(got.wanted):
                if wanted:
                    flight.metas.append(Meta(tuple(leaves[i].shape), leaves[i].dtype))
                    leaves[i] = self._arrive(flight, leaves[i])
            values = got.values(leaves)
            del got, leaves
        if number < self._stages - 1:
            with self._span("forward", number, micro), autocast(self.precision, self.device):
                values = self._compute(stage, inputs_of(batch.values, self.step), values)
            with self._span("send", number, micro):
                read = window.plan.reads.get(("F", number + 1, micro), 0)
                wanted_back = self._mail.give_values(
                    (number + 1) % p, number + 1, micro, values, read
                )
            flight.outputs = [get_gradient_edge(t) for t in wanted_back]
        elif mode == INFERRED:
            with self._span("forward", number, micro), autocast(self.precision, self.device):
                window.output = self._compute(stage, inputs_of(batch.values, self.step), values)[
                    "output"
                ]
        else:
            with self._span("forward", number, micro):
                whole = _Whole(
                    stage.module, lambda inputs: self._compute(stage, inputs, values)["output"]
                )
                task = TaskLoss(
                    cast(nn.Module, whole),
                    cast(BatchIterator, None),
                    self.loss,
                    self.step,
                    self.precision,
                    self.device,
                )
                loss, count = task.forward(batch.values, batch.count)
                root = window.scaled(loss, count)
            window.total += (loss.detach() * count).to(window.total)
            window.count += count
            if root.requires_grad:
                flight.outputs, flight.seed = (
                    [get_gradient_edge(root)],
                    torch.ones_like(root, requires_grad=False),
                )
        if mode == TRAINED:
            window.flights[number, micro] = flight

    def _backward(self, window: _Window, number: int, micro: int, splits: bool) -> None:
        flight, p = window.flights[number, micro], self.group.size
        self.counts = window.batches[micro].count > 0  # what is computed again asks again
        grads: list[Tensor | None] = [flight.seed for _ in flight.outputs]
        if number < self._stages - 1:
            with self._span("receive", number, micro):
                grads = self._mail.take_grads((number + 1) % p, number, micro)
        back = [(edge, g) for edge, g in zip(flight.outputs, grads, strict=True) if g is not None]
        given: Sequence[Tensor | None] = [None] * len(flight.inputs)
        with self._span("backward", number, micro):
            edges, got = [edge for edge, _ in back], [g for _, g in back]
            flight.outputs = []
            # a recomputed stage would be computed again for each part, and one that owes nothing has nobody waiting for it
            if splits and back and flight.inputs and not self.recompute:
                weights = self.stages[number // p].module.parameters()
                given, flight.rest = backward_inputs(edges, got, flight.inputs, weights)
            elif back:
                torch.autograd.backward(edges, got)
                given = [a.grad for a in flight.arrivals]
            flight.inputs, flight.arrivals = [], []
            del back, edges, got, grads
        if not splits:
            del window.flights[number, micro]
        if number:
            with self._span("send", number, micro):
                read = window.plan.reads.get(("B", number - 1, micro), 0)
                self._mail.give_grads(
                    (number - 1) % p, number - 1, micro, given, flight.metas, read
                )

    # -- one stage --

    def _compute(self, stage: Stage, inputs: tuple[Any, ...], values: Values) -> Values:
        if not self.recompute or not torch.is_grad_enabled():
            return stage.forward(inputs, values)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), buffers_stay(stage.module)

        return cast(
            Values,
            checkpoint(_copied, stage, inputs, values, use_reentrant=False, context_fn=contexts),
        )

    def _arrive(self, flight: _Flight, value: Tensor) -> Tensor:
        arrival = _Arrival(value)
        flight.arrivals.append(arrival)
        there = cast(Tensor, _Arrive.apply(self._anchor, arrival))
        flight.inputs.append(get_gradient_edge(there))
        return there

    @functools.cached_property
    def _dtype(self) -> torch.dtype:
        """Of the loss: double only where the model is."""
        doubled = any(
            w.dtype == torch.float64 for stage in self.stages for w in stage.module.parameters()
        )
        return torch.float64 if doubled else torch.float32

    @functools.cached_property
    def _tied(self) -> list[tuple[nn.Parameter, list[int]]]:
        """Weights of this rank that others hold too, and all ranks that do, in the same order everywhere."""
        found: dict[str, tuple[nn.Parameter, list[int]]] = {}
        for stage in self.stages:
            held = dict(stage.module.named_parameters(remove_duplicate=False)) if stage.tied else {}
            for name, holders in stage.tied.items():
                if len(ranks := sorted({h % self.group.size for h in holders})) > 1:
                    found[name] = (held[name], ranks)
        return [found[name] for name in sorted(found)]

    def _sum_tied(self) -> None:
        """Weights that stages on several ranks hold get the sum of their gradients, added in the order of ranks: the same bits."""
        me, under_way = self.group.rank, []
        for weight, ranks in self._tied:
            own = torch.zeros(weight.numel() + 1, dtype=weight.dtype, device=weight.device)
            if weight.grad is not None:
                own[:-1].copy_(weight.grad.reshape(-1))
                own[-1] = 1  # else nobody has one, and it stays so
            got = {r: torch.empty_like(own) for r in ranks if r != me}
            work = self.group.transfer(dict.fromkeys(got, own), got)
            under_way.append((weight, {**got, me: own}, ranks, work))
        for weight, parts, ranks, work in under_way:
            work.wait()
            total = parts[ranks[0]].clone()
            for r in ranks[1:]:
                total += parts[r]
            if total[-1]:
                weight.grad = total[:-1].view(weight.shape)

    @contextmanager
    def _span(self, name: str, stage: int, micro: int) -> Iterator[None]:
        if self._emit is None:
            yield
            return
        start, before = self._clock(), self._mail.nbytes
        yield
        seconds, nbytes = self._clock() - start, self._mail.nbytes - before
        self._emit(
            Event(
                start,
                self._rank,
                self.round,
                name,
                seconds,
                nbytes,
                {"micro": micro, "stage": stage},
            )
        )


@dataclass
class _Arrival:
    """A value on its way into the graph, and later its gradient."""

    value: Tensor | None
    grad: Tensor | None = None


class _Arrive(torch.autograd.Function):
    """A tensor that came from elsewhere becomes one that was computed: a stage may change it in place, as it could in the whole
    model, which a leaf would not allow."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: _Arrival) -> Tensor:
        ctx.arrival = arrival
        assert arrival.value is not None
        value, arrival.value = arrival.value.detach(), None
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        (ctx.arrival.grad,) = grads
        return None, None


class _Whole:
    """Stands for the whole model in a step of the user's, which may call it once; of the model's parts no rank has all."""

    def __init__(self, module: nn.Module, call: Callable[[tuple[Any, ...]], Any]):
        self._module, self._call, self._called = module, call, False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._called:
            raise TaskError(
                "step=(model, batch) calls the model several times, but a pipeline computes one call a batch; make one call of them, or "
                "put what the step does into a module"
            )
        self._called = True
        return self._call((*inputs, *named.values()))

    def __getattr__(self, name: str) -> Any:
        if name in ("training", "device", "dtype"):
            return getattr(self._module, name)
        raise TaskError(
            f"step=(model, batch) asks the model for {name!r}, but in a pipeline no rank has the whole model; put that into the model's "
            "forward, or use data=, tensor= or shard="
        )


def _copied(stage: Stage, inputs: tuple[Any, ...], values: Values) -> Values:
    # a stage that changes in place what it took must find it as it was when it computes again
    return stage.forward(
        inputs,
        {
            k: v.clone() if isinstance(v, Tensor) and v.requires_grad else v
            for k, v in values.items()
        },
    )


def _shapes(values: Any) -> Key:
    """What all ranks see of a batch: its tensors' shapes."""
    if isinstance(values, Tensor):
        return tuple(values.shape)
    if isinstance(values, Mapping):
        return tuple((k, _shapes(v)) for k, v in values.items())
    return tuple(_shapes(v) for v in values) if isinstance(values, tuple | list) else ()
