"""Graph executor: one step of a model whose graph is partitioned over ranks.

Branches that do not need each other run at the same time.

    rank 0   F0 stem, F0 left, F1 stem ...  F0 join, loss, B0 join, B0 left, B0 stem
    rank 1          F0 right       F1 right                B0 right

    F   receive values of other segments, compute, send to each segment that needs them
    B   receive gradients from each of those, backward, send gradients

A segment (`dataflow.partition`) is to a graph what a stage is to a pipeline: between its forward
and its backward pass it keeps its own autograd graph. Gradients of the values that it sent come
from every segment that received them, and are added. A rank's actions follow from
`split.graph_schedule`: they are its share of one order of all actions, so that no ranks wait for
each other in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from manyhands.core import Group
from manyhands.data.batches import Batch
from manyhands.parallel.dataflow.partition import GraphPartition
from manyhands.parallel.dataflow.peer_transfers import PeerTransfers
from manyhands.parallel.dataflow.segment_programs import Flow, SegmentProgram
from manyhands.parallel.pipeline.message_format import ReceivedValues, TensorMeta, Values
from manyhands.parallel.pipeline.received_tensor import ReceivedTensor
from manyhands.parallel.pipeline.step_executor import (
    MOST_PLANS,
    TRAINED,
    Scaled,
    StepExecutor,
    StepState,
    batch_key,
)
from manyhands.parallel.pipeline.transfers import ExpectedMessage
from manyhands.parallel.tensor.sharding_rules import ShardedValue, TensorAxis
from manyhands.parallel.trace.program import resolve, run_node
from manyhands.replica.forward import autocast, inputs_of
from manyhands.split.graph_schedule import SegmentAction, schedule


@dataclass
class _Order:
    """The actions and messages of a step, for given micro-batches that are not empty."""

    actions: list[SegmentAction]
    expected: dict[int, list[ExpectedMessage]]  # by peer
    # (kind, edge, micro) -> the index of the peer's action that reads it
    reads: dict[tuple[str, int, int], int]


@dataclass
class _InFlight:
    """A micro-batch in a segment between its forward and its backward pass."""

    # by edge on which gradients come
    outputs: dict[int, list[GradientEdge]] = field(default_factory=dict)
    # by edge on which gradients are to be sent
    received: dict[int, list[ReceivedTensor]] = field(default_factory=dict)
    metas: dict[int, list[TensorMeta]] = field(default_factory=dict)
    root: tuple[GradientEdge, Tensor] | None = None  # of the loss


@dataclass
class _GraphState(StepState):
    inputs: list[tuple[Any, ...]] = field(default_factory=list)  # of every micro-batch
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)  # (segment, micro)


class GraphExecutor(StepExecutor):
    """Runs this rank's segments of `partition`. The last rank has the model's output. `axis`: the
    ranks that hold each segment together with this one, where tensors are sharded too. `options`:
    those of a `StepExecutor`."""

    def __init__(
        self,
        partition: GraphPartition,
        group: Group,
        *,
        device: torch.device | None = None,
        axis: TensorAxis | None = None,
        **options: Any,
    ):
        device, self.stage = device or torch.device("cpu"), partition.stages[group.rank]
        held = [(self.stage.module, self.stage.tied)]
        transfers = PeerTransfers(group, device, axis)
        super().__init__(held, group, transfers, device=device, **options)
        # without the modules of other ranks
        self._partition, self._module = replace(partition, stages=[]), self.stage.module
        self._orders: dict[tuple[Any, ...], _Order] = {}

    def _run(self, micros: list[Batch], scaled: Scaled, mode: str) -> StepState:
        flow = self._partition.flows[self._module.training]
        inputs = [
            () if b.values is None else inputs_of(b.values, self.objective.step) for b in micros
        ]
        if flow.check is not None:
            for given in inputs:
                if given:
                    flow.check(given)  # all ranks see the same sizes: all raise, and none waits
        order = self._order(mode, tuple(i for i, b in enumerate(micros) if b.values is not None))
        state = _GraphState(micros, scaled, self._zero.clone(), inputs=inputs)
        self.transfers.start_step(
            order.expected, [(mode, self._module.training, *batch_key(b.values)) for b in micros]
        )
        for action in order.actions:
            if action.kind == "F":
                self._forward(state, order, flow, action, mode)
            else:
                self._backward(state, order, flow, action)
        self.transfers.end_step()
        return state

    def _order(self, mode: str, kept: tuple[int, ...]) -> _Order:
        key = (mode, self._module.training, kept)
        if (known := self._orders.get(key)) is not None:
            return known
        flow, me = self._partition.flows[self._module.training], self.group.rank
        where = [s.rank for s in flow.segments]
        lists = schedule(
            self.group.size,
            where,
            [s.seconds for s in flow.segments],
            [(e.source, e.sink, n) for e, n in zip(flow.edges, flow.nbytes, strict=True)],
            len(kept),
            self._partition.placement.window,
            self._partition.link,
            mode == TRAINED,
        ).lists
        ends = [(where[e.source], where[e.sink]) for e in flow.edges]
        peers = sorted({r for pair in ends if me in pair for r in pair if r != me})
        actions = [a._replace(micro=kept[a.micro]) for a in lists[me]]
        order = _Order(actions, {r: [] for r in peers}, {})
        for peer, messages in order.expected.items():
            for i, (kind, turn, segment) in enumerate(lists[peer]):
                for number, edge in enumerate(flow.edges):
                    sender, reader = (
                        (edge.source, edge.sink) if kind == "F" else (edge.sink, edge.source)
                    )
                    if reader == segment:
                        order.reads[kind, number, kept[turn]] = i
                    if sender == segment and where[reader] == me:
                        stage = 2 * number + (kind == "F")
                        messages.append(ExpectedMessage(kind, stage, kept[turn], i))
        if len(self._orders) > MOST_PLANS:
            self._orders.clear()
        self._orders[key] = order
        return order

    # -- one segment --

    def _forward(
        self, state: _GraphState, order: _Order, flow: Flow, action: SegmentAction, mode: str
    ) -> None:
        here, (_, micro, number) = self.group.rank, action
        segment, flight, known = flow.segments[number], _InFlight(), dict[str, Any]()
        for i, edge in enumerate(flow.edges):
            if edge.sink == number:
                with self._span("receive", here, micro):
                    got = self.transfers.receive_values(
                        flow.segments[edge.source].rank, 2 * i + 1, micro
                    )
                known.update(self._enter_graph(flight, i, got))
                del got
        if segment.program.output is not None and mode == TRAINED:
            known = self._forward_and_loss(state, flight, segment, micro, known)
        else:
            with self._span("forward", here, micro), autocast(self.precision, self.device):
                run = partial(_run_segment, self._module, segment)
                known = self._compute(self._module, run, state.inputs[micro], known)
            if segment.program.output is not None:
                state.output = known["output"]
        for i, edge in enumerate(flow.edges):
            if edge.source == number:
                given = {name: _whole_tensors(known[name]) for name in edge.names}
                with self._span("send", here, micro):
                    read = order.reads.get(("F", i, micro), 0)
                    wanted = self.transfers.send_values(
                        flow.segments[edge.sink].rank, 2 * i + 1, micro, given, read
                    )
                flight.outputs[i] = [get_gradient_edge(t) for t in wanted]
        if mode == TRAINED:
            state.in_flight[number, micro] = flight

    def _enter_graph(self, flight: _InFlight, edge: int, got: ReceivedValues) -> Values:
        """The values of an edge, as if they had been computed here."""
        tensors, flight.received[edge], flight.metas[edge] = list(got.tensors), [], []
        for i, wanted in enumerate(got.wanted):
            if wanted:
                flight.metas[edge].append(TensorMeta(tuple(tensors[i].shape), tensors[i].dtype))
                flight.received[edge].append(received := ReceivedTensor(tensors[i]))
                tensors[i] = received.enter_graph(self._anchor)
        return got.values(tensors)

    def _forward_and_loss(
        self,
        state: _GraphState,
        flight: _InFlight,
        segment: SegmentProgram,
        micro: int,
        known: Values,
    ) -> Values:
        """The segment with the model's output, and the loss."""
        made: Values = {}
        run = partial(_run_segment, self._module, segment)

        def model(inputs: tuple[Any, ...]) -> Any:
            made.update(self._compute(self._module, run, inputs, known))
            return made.pop("output")

        with self._span("forward", self.group.rank, micro):
            flight.root = self._compute_loss(state, micro, self._module, model)
        return made

    def _backward(
        self, state: _GraphState, order: _Order, flow: Flow, action: SegmentAction
    ) -> None:
        here, (_, micro, number) = self.group.rank, action
        flight = state.in_flight.pop((number, micro))
        edges: list[GradientEdge] = [flight.root[0]] if flight.root is not None else []
        grads: list[Tensor] = [flight.root[1]] if flight.root is not None else []
        # several segments may have received the same value: autograd adds the gradients they send
        for i, outputs in flight.outputs.items():
            with self._span("receive", here, micro):
                sink = flow.segments[flow.edges[i].sink].rank
                came = self.transfers.receive_grads(sink, 2 * i, micro)
            for edge, grad in zip(outputs, came, strict=True):
                if grad is not None:
                    edges.append(edge)
                    grads.append(grad)
        flight.outputs, flight.root = {}, None
        if edges:
            with self._span("backward", here, micro):
                torch.autograd.backward(edges, grads)
        del edges, grads
        for i, received in flight.received.items():
            with self._span("send", here, micro):
                source = flow.segments[flow.edges[i].source].rank
                given, read = [r.grad for r in received], order.reads.get(("B", i, micro), 0)
                self.transfers.send_grads(source, 2 * i, micro, given, flight.metas[i], read)


def _run_segment(
    module: nn.Module, segment: SegmentProgram, inputs: tuple[Any, ...], values: Values
) -> Values:
    program, known = segment.program, dict(values)
    for node, drops in zip(program.nodes, program.drops, strict=True):
        known[node.name] = run_node(module, node, inputs, known)
        for name in drops:
            del known[name]
    made = {name: known[name] for name in program.sends}
    if program.output is not None:
        made["output"] = resolve(module, program.output, inputs, known)
    return made


def _whole_tensors(value: Any) -> Any:
    """Sharded values are sent whole: a receiving segment may shard them otherwise."""
    return value.gathered() if isinstance(value, ShardedValue) else value
