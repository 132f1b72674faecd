"""One step of a model whose graph is dealt out over the ranks of a group: branches that do not need each other run at the same time.

    rank 0   F0 stem, F0 left, F1 stem ...  F0 join, loss, B0 join, B0 left, B0 stem      F: take what comes from other segments,
    rank 1          F0 right       F1 right                B0 right                       compute, give to each who needs it

A segment (`compute/graph_cut`) is to this what a stage is to a pipeline: between its way there and its way back it keeps its own
autograd graph; gradients of what it gave come from all who took it, and are added. The order of what a rank does comes from
`split.graph.schedule`: its part of one order of all, so that no ranks wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from manyhands.core import Group
from manyhands.data.batches import Batch, BatchIterator
from manyhands.parallel.dataflow.partition import GraphPartition, SegmentProgram
from manyhands.parallel.pipeline.executor import (
    INFERRED,
    TRAINED,
    PipelineExecutor,
    Scaled,
    _Arrival,
    _Arrive,
    _shapes,
    _Whole,
)
from manyhands.parallel.pipeline.transfers import (
    Due,
    Key,
    Meta,
    Received,
    StageTransfers,
    Values,
)
from manyhands.parallel.tensor.sharding_rules import ShardedValue, TensorAxis
from manyhands.parallel.trace.program import resolve, run_node
from manyhands.replica.forward import TaskLoss, autocast, inputs_of
from manyhands.replica.recompute import buffers_stay
from manyhands.split.graph import SegmentAction, schedule


@dataclass
class _Order:
    actions: list[SegmentAction]
    due: dict[int, list[Due]]  # by peer
    reads: dict[
        tuple[str, int, int], int
    ]  # (kind, wire, micro) -> as which of its actions the peer reads it


@dataclass
class _Flight:
    """A micro-batch in a segment between its way there and its way back."""

    outputs: dict[int, list[GradientEdge]] = field(
        default_factory=dict
    )  # by wire on which gradients come
    arrivals: dict[int, list[_Arrival]] = field(
        default_factory=dict
    )  # by wire on which gradients are owed
    metas: dict[int, list[Meta]] = field(default_factory=dict)
    root: tuple[GradientEdge, Tensor] | None = None  # of the loss


@dataclass
class _Window:
    """The step under way."""

    batches: list[Batch]
    inputs: list[tuple[Any, ...]]
    scaled: Scaled
    total: Tensor
    count: int = 0
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)  # (segment, micro)
    output: Any = None


class GraphExecutor(PipelineExecutor):
    """This rank's part of `deal`. Called and asked as a pipeline is; the output comes out on the last rank."""

    def __init__(self, deal: GraphPartition, group: Group, **options: Any):
        """`options`: those of a Pipeline."""
        share = deal.shares[group.rank]
        super().__init__([share], group, lambda rank, micros: [], **options)
        self._deal, self._module = (
            replace(deal, shares=[]),
            share.module,
        )  # what others hold is theirs
        self._mail = PeerTransfers(group, self.device, options.get("axis"))
        self._orders: dict[tuple[Any, ...], _Order] = {}

    # -- the walk through the actions --

    def _run(self, drawn: list[Batch], scaled: Scaled, mode: str) -> Any:
        flow = self._deal.flows[self._module.training]
        inputs = [() if b.values is None else inputs_of(b.values, self.step) for b in drawn]
        if flow.check is not None:
            for given in inputs:
                if given:
                    flow.check(
                        given
                    )  # all ranks see the same sizes: all refuse, and nobody waits for another
        order = self._order(mode, tuple(i for i, b in enumerate(drawn) if b.values is not None))
        window = _Window(drawn, inputs, scaled, self._zero.clone())
        self._mail.open(
            order.due, [(mode, self._module.training, *_shapes(b.values)) for b in drawn]
        )
        for action in order.actions:
            if action.kind == "F":
                self._there(window, order, action, mode)
            else:
                self._back(window, order, action)
        self._mail.close()
        return window

    def _order(self, mode: str, kept: tuple[int, ...]) -> _Order:
        key = (mode, self._module.training, kept)
        if (known := self._orders.get(key)) is not None:
            return known
        deal, flow, me = self._deal, self._deal.flows[self._module.training], self.group.rank
        where = [p.rank for p in flow.parts]
        edges = [(w.source, w.sink, n) for w, n in zip(flow.wires, flow.nbytes, strict=True)]
        lists = schedule(
            self.group.size,
            where,
            [p.seconds for p in flow.parts],
            edges,
            len(kept),
            deal.placement.window,
            deal.link,
            mode == TRAINED,
        ).lists
        peers = sorted(
            {
                r
                for w in flow.wires
                for r in (where[w.source], where[w.sink])
                if me in (where[w.source], where[w.sink])
            }
        )
        made = _Order(
            [a._replace(micro=kept[a.micro]) for a in lists[me]],
            {r: [] for r in peers if r != me},
            {},
        )
        for peer, messages in made.due.items():
            for i, (kind, turn, segment) in enumerate(lists[peer]):
                for e, wire in enumerate(flow.wires):
                    ours, its = (
                        (wire.source, wire.sink) if kind == "F" else (wire.sink, wire.source)
                    )
                    if its == segment:  # it reads there what it needs, and gives what it made
                        made.reads[kind, e, kept[turn]] = i
                    if ours == segment and where[its] == me:
                        messages.append(Due(kind, 2 * e + (kind == "F"), kept[turn], i))
        if len(self._orders) > 64:  # steps of ever new numbers of micro-batches
            self._orders.clear()
        self._orders[key] = made
        return made

    # -- one segment --

    def _there(self, window: _Window, order: _Order, action: SegmentAction, mode: str) -> None:
        flow, here, (_, micro, number) = (
            self._deal.flows[self._module.training],
            self.group.rank,
            action,
        )
        part, flight, known = flow.parts[number], _Flight(), {}
        for e, wire in enumerate(flow.wires):
            if wire.sink == number:
                with self._span("receive", here, micro):
                    got = self._mail.take_values(flow.parts[wire.source].rank, 2 * e + 1, micro)
                known.update(self._taken(flight, e, got))
                del got
        inputs = window.inputs[micro]
        if part.program.output is None:
            with self._span("forward", here, micro), autocast(self.precision, self.device):
                known = self._segment(part, inputs, known)
        elif mode == INFERRED:
            with self._span("forward", here, micro), autocast(self.precision, self.device):
                known = self._segment(part, inputs, known)
                window.output = known["output"]
        else:
            known = self._lost(window, flight, part, micro, known)
        for e, wire in enumerate(flow.wires):
            if wire.source == number:
                given = {name: _whole_tensors(known[name]) for name in wire.names}
                with self._span("send", here, micro):
                    read = order.reads.get(("F", e, micro), 0)
                    wanted = self._mail.give_values(
                        flow.parts[wire.sink].rank, 2 * e + 1, micro, given, read
                    )
                flight.outputs[e] = [get_gradient_edge(t) for t in wanted]
        if mode == TRAINED:
            window.flights[number, micro] = flight

    def _taken(self, flight: _Flight, e: int, got: Received) -> Values:
        """What came on a wire, as if it had been computed here."""
        leaves, flight.arrivals[e], flight.metas[e] = list(got.leaves), [], []
        for i, wanted in enumerate(got.wanted):
            if wanted:
                flight.metas[e].append(Meta(tuple(leaves[i].shape), leaves[i].dtype))
                leaves[i] = self._landed(flight.arrivals[e], leaves[i])
        return got.values(leaves)

    def _lost(
        self, window: _Window, flight: _Flight, part: SegmentProgram, micro: int, known: Values
    ) -> Values:
        """The segment with the output, and the loss."""
        batch, made = window.batches[micro], dict[str, Any]()

        def call(inputs: tuple[Any, ...]) -> Any:
            made.update(self._segment(part, inputs, known))
            return made.pop("output")

        with self._span("forward", self.group.rank, micro):
            whole = cast(nn.Module, _Whole(self._module, call))
            task = TaskLoss(
                whole, cast(BatchIterator, None), self.loss, self.step, self.precision, self.device
            )
            loss, count = task.forward(batch.values, batch.count)
            root = window.scaled(loss, count)
        window.total += (loss.detach() * count).to(window.total)
        window.count += count
        if root.requires_grad:
            flight.root = get_gradient_edge(root), torch.ones_like(root, requires_grad=False)
        return made

    def _back(self, window: _Window, order: _Order, action: SegmentAction) -> None:
        flow, here, (_, micro, number) = (
            self._deal.flows[self._module.training],
            self.group.rank,
            action,
        )
        flight = window.flights.pop((number, micro))
        edges: list[GradientEdge] = [flight.root[0]] if flight.root is not None else []
        grads: list[Tensor] = [flight.root[1]] if flight.root is not None else []
        for (
            e,
            outputs,
        ) in (
            flight.outputs.items()
        ):  # several may have taken the same value: autograd adds what they send
            with self._span("receive", here, micro):
                came = self._mail.take_grads(flow.parts[flow.wires[e].sink].rank, 2 * e, micro)
            for edge, grad in zip(outputs, came, strict=True):
                if grad is not None:
                    edges.append(edge)
                    grads.append(grad)
        flight.outputs, flight.root = {}, None
        if edges:
            with self._span("backward", here, micro):
                torch.autograd.backward(edges, grads)
        del edges, grads
        for e, arrivals in flight.arrivals.items():
            with self._span("send", here, micro):
                given, read = [a.grad for a in arrivals], order.reads.get(("B", e, micro), 0)
                self._mail.give_grads(
                    flow.parts[flow.wires[e].source].rank,
                    2 * e,
                    micro,
                    given,
                    flight.metas[e],
                    read,
                )

    def _landed(self, arrivals: list[_Arrival], value: Tensor) -> Tensor:
        arrivals.append(arrival := _Arrival(value))
        return cast(Tensor, _Arrive.apply(self._anchor, arrival))

    def _segment(self, part: SegmentProgram, inputs: tuple[Any, ...], values: Values) -> Values:
        if not self.recompute or not torch.is_grad_enabled():
            return _walk(self._module, part, inputs, values)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), buffers_stay(self._module)

        def again(
            inputs: tuple[Any, ...], values: Values
        ) -> Values:  # must find what it took as it was
            own = {
                k: v.clone() if isinstance(v, Tensor) and v.requires_grad else v
                for k, v in values.items()
            }
            return _walk(self._module, part, inputs, own)

        return cast(
            Values, checkpoint(again, inputs, values, use_reentrant=False, context_fn=contexts)
        )


def _walk(
    module: nn.Module, part: SegmentProgram, inputs: tuple[Any, ...], values: Values
) -> Values:
    program, known = part.program, dict(values)
    for step, drops in zip(program.steps, program.drops, strict=True):
        known[step.name] = run_node(module, step, inputs, known)
        for name in drops:
            del known[name]
    made = {name: known[name] for name in program.gives}
    if program.output is not None:
        made["output"] = resolve(module, program.output, inputs, known)
    return made


def _whole_tensors(value: Any) -> Any:
    """Where matrices are split too, whole tensors travel."""
    return value.gather() if isinstance(value, ShardedValue) else value


class PeerTransfers(StageTransfers):
    """One mail for every peer, since both ends of each must remember and forget the same descriptions."""

    def __init__(self, group: Group, device: torch.device, axis: TensorAxis | None = None):
        super().__init__(group, device, axis)
        self._all = {peer: StageTransfers(group, device, axis) for peer in range(group.size)}

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self._all.values()) if hasattr(self, "_all") else 0

    @nbytes.setter
    def nbytes(self, value: int) -> None: ...

    def open(self, due: Mapping[int, Sequence[Due]], keys: Sequence[Key]) -> None:
        for peer, mail in self._all.items():
            mail.open({peer: due[peer]} if peer in due else {}, keys)

    def close(self) -> None:
        for mail in self._all.values():
            mail.close()

    def give_values(
        self, peer: int, stage: int, micro: int, values: Values, read: int
    ) -> list[Tensor]:
        return self._all[peer].give_values(peer, stage, micro, values, read)

    def take_values(self, peer: int, stage: int, micro: int) -> Received:
        return self._all[peer].take_values(peer, stage, micro)

    def give_grads(
        self,
        peer: int,
        stage: int,
        micro: int,
        grads: Sequence[Tensor | None],
        metas: Sequence[Meta],
        read: int,
    ) -> None:
        self._all[peer].give_grads(peer, stage, micro, grads, metas, read)

    def take_grads(self, peer: int, stage: int, micro: int) -> list[Tensor | None]:
        return self._all[peer].take_grads(peer, stage, micro)
