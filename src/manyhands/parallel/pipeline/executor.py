"""Pipeline executor: one step of a model cut into stages over ranks, by a schedule.

    rank 0   F0 F1 F2 F3          B0 B1 B2 B3
    rank 1      F0 F1 F2 F3    B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 ...

    F   receive values from the stage before, compute, send to the next
    B   receive gradients from the next stage, backward, send to the stage before
    W   gradients of weights that B left out (split_backward)

Every rank executes its list of actions, and so keeps no more activations than the schedule
promises: a micro-batch's graph is freed after its backward pass, and of the values that a stage
sends only the graph is kept. The last stage computes the loss. What a stage computes does not
depend on the schedule, so gradients are those of one process that accumulates the same
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from manyhands.core import Group
from manyhands.data.batches import Batch
from manyhands.parallel.pipeline.message_format import TensorMeta, Values
from manyhands.parallel.pipeline.received_tensor import ReceivedTensor
from manyhands.parallel.pipeline.split_backward import WeightBackward, backward_inputs
from manyhands.parallel.pipeline.stage_modules import Stage
from manyhands.parallel.pipeline.step_executor import (
    INFERRED,
    MOST_PLANS,
    TRAINED,
    Scaled,
    StepExecutor,
    StepState,
    batch_key,
)
from manyhands.parallel.pipeline.transfers import ExpectedMessage, StageTransfers
from manyhands.parallel.tensor.sharding_rules import TensorAxis
from manyhands.replica.forward import autocast, inputs_of
from manyhands.split.schedules import StageAction

# (rank, micro-batches) -> its actions in a step
Schedule = Callable[[int, int], Sequence[StageAction]]


@dataclass
class _StepPlan:
    """The actions and messages of a step, for given micro-batches that are not empty."""

    actions: list[StageAction]
    expected: dict[int, list[ExpectedMessage]]  # by peer
    # (kind, stage, micro) on another rank -> the index of its action that reads it
    reads: dict[tuple[str, int, int], int]
    splits: set[tuple[int, int]]  # (chunk, micro) with a backward pass in two parts


@dataclass
class _InFlight:
    """A micro-batch in a stage between its forward and its backward pass."""

    outputs: list[GradientEdge] = field(default_factory=list)
    # of the values that it received and sends gradients for
    metas: list[TensorMeta] = field(default_factory=list)
    inputs: list[GradientEdge] = field(default_factory=list)
    received: list[ReceivedTensor] = field(default_factory=list)
    seed: Tensor | None = None  # gradient of the loss: 1
    weights: WeightBackward | None = None  # the part that the action W computes


@dataclass
class _PipelineState(StepState):
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)  # (stage, micro)


class PipelineExecutor(StepExecutor):
    """Runs the stages of this rank, by chunk: stage k is on rank k mod p as its chunk k // p, p
    being the group's size. `axis`: the ranks that hold each stage together with this one, where
    tensors are sharded too. `options`: those of a `StepExecutor`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        group: Group,
        schedule: Schedule,
        *,
        device: torch.device | None = None,
        axis: TensorAxis | None = None,
        **options: Any,
    ):
        device = device or torch.device("cpu")
        held = [(stage.module, stage.tied) for stage in stages]
        transfers = StageTransfers(group, device, axis)
        super().__init__(held, group, transfers, device=device, **options)
        self.stages, self.schedule = list(stages), schedule
        self._last = group.size * len(self.stages) - 1  # stage of all ranks
        self._plans: dict[tuple[Any, ...], _StepPlan] = {}

    def _run(self, micros: list[Batch], scaled: Scaled, mode: str) -> StepState:
        kept = tuple(i for i, b in enumerate(micros) if b.values is not None)
        plan = self._plan(mode, len(micros), kept)
        state = _PipelineState(micros, scaled, self._zero.clone())
        self.transfers.start_step(plan.expected, [(mode, *batch_key(b.values)) for b in micros])
        for action in plan.actions:
            number = action.chunk * self.group.size + self.group.rank
            if action.kind == "F":
                self._forward(state, plan, number, action.micro, mode)
            elif action.kind == "B":
                self._backward(
                    state, plan, number, action.micro, (action.chunk, action.micro) in plan.splits
                )
            elif (rest := state.in_flight.pop((number, action.micro)).weights) is not None:
                with self._span("weight", number, action.micro):
                    rest()
        self.transfers.end_step()
        return state

    def _plan(self, mode: str, micros: int, kept: tuple[int, ...]) -> _StepPlan:
        if (found := self._plans.get((mode, micros, kept))) is not None:
            return found
        me, p, v = self.group.rank, self.group.size, len(self.stages)
        # schedules of several chunks count micro-batches in rounds of p; actions of those that are
        # missing from the last round are left out
        asked = -(-micros // p) * p if v > 1 else micros
        lists = {
            r: [a for a in self.schedule(r, asked) if a.micro in kept]
            for r in {me, (me - 1) % p, (me + 1) % p}
        }
        if mode == INFERRED:
            lists = {r: [a for a in some if a.kind == "F"] for r, some in lists.items()}
        splits = {(a.chunk, a.micro) for a in lists[me] if a.kind == "W"}
        plan = _StepPlan(lists[me], {r: [] for r in lists if r != me}, {}, splits)
        for peer, messages in plan.expected.items():
            for i, a in enumerate(lists[peer]):
                here = a.chunk * p + peer
                plan.reads[a.kind, here, a.micro] = i
                there = here + 1 if a.kind == "F" else here - 1
                if a.kind != "W" and 0 <= there <= self._last and there % p == me:
                    messages.append(ExpectedMessage(a.kind, there, a.micro, i))
        if len(self._plans) > MOST_PLANS:
            self._plans.clear()
        self._plans[mode, micros, kept] = plan
        return plan

    # -- one stage --

    def _forward(
        self, state: _PipelineState, plan: _StepPlan, number: int, micro: int, mode: str
    ) -> None:
        stage, batch = self.stages[number // self.group.size], state.batches[micro]
        self.counts = batch.count > 0
        flight = _InFlight()
        values = self._receive(flight, number, micro) if number else {}
        if number == self._last and mode == TRAINED:
            with self._span("forward", number, micro):
                begin = self._compute_loss(
                    state,
                    micro,
                    stage.module,
                    lambda inputs: self._compute(stage.module, stage.forward, inputs, values)[
                        "output"
                    ],
                )
            if begin is not None:
                flight.outputs, flight.seed = [begin[0]], begin[1]
        else:
            with self._span("forward", number, micro), autocast(self.precision, self.device):
                inputs = inputs_of(batch.values, self.objective.step)
                values = self._compute(stage.module, stage.forward, inputs, values)
            if number == self._last:
                state.output = values["output"]
            else:
                self._send(flight, plan, number, micro, values)
        if mode == TRAINED:
            state.in_flight[number, micro] = flight

    def _receive(self, flight: _InFlight, number: int, micro: int) -> Values:
        """The values of the stage before, as if they had been computed here."""
        with self._span("receive", number, micro):
            got = self.transfers.receive_values((number - 1) % self.group.size, number, micro)
        tensors = list(got.tensors)
        for i, wanted in enumerate(got.wanted):
            if wanted:
                flight.metas.append(TensorMeta(tuple(tensors[i].shape), tensors[i].dtype))
                flight.received.append(received := ReceivedTensor(tensors[i]))
                tensors[i] = received.enter_graph(self._anchor)
                flight.inputs.append(get_gradient_edge(tensors[i]))
        return got.values(tensors)

    def _send(
        self, flight: _InFlight, plan: _StepPlan, number: int, micro: int, values: Values
    ) -> None:
        with self._span("send", number, micro):
            read = plan.reads.get(("F", number + 1, micro), 0)
            wanted_back = self.transfers.send_values(
                (number + 1) % self.group.size, number + 1, micro, values, read
            )
        flight.outputs = [get_gradient_edge(t) for t in wanted_back]

    def _backward(
        self, state: _PipelineState, plan: _StepPlan, number: int, micro: int, splits: bool
    ) -> None:
        flight, p = state.in_flight[number, micro], self.group.size
        self.counts = state.batches[micro].count > 0  # BatchNorm asks again where it is recomputed
        grads: list[Tensor | None] = [flight.seed for _ in flight.outputs]
        if number < self._last:
            with self._span("receive", number, micro):
                grads = self.transfers.receive_grads((number + 1) % p, number, micro)
        back = [(edge, g) for edge, g in zip(flight.outputs, grads, strict=True) if g is not None]
        given: Sequence[Tensor | None] = [None] * len(flight.inputs)
        with self._span("backward", number, micro):
            edges, got = [edge for edge, _ in back], [g for _, g in back]
            flight.outputs = []
            # not in two parts: a recomputed stage, which would be computed again for each part, and
            # a stage for whose gradients no other stage waits
            if splits and back and flight.inputs and not self.recompute:
                weights = self.stages[number // p].module.parameters()
                given, flight.weights = backward_inputs(edges, got, flight.inputs, weights)
            elif back:
                torch.autograd.backward(edges, got)
                given = [r.grad for r in flight.received]
            flight.inputs, flight.received = [], []
            del back, edges, got, grads
        if not splits:
            del state.in_flight[number, micro]
        if number:
            with self._span("send", number, micro):
                read = plan.reads.get(("B", number - 1, micro), 0)
                self.transfers.send_grads(
                    (number - 1) % p, number - 1, micro, given, flight.metas, read
                )
