"""Memory forecast: the bytes that a rank will need, known before the first step.

    static        parameters + the flat gradient vector + optimizer state, from shapes, split as the
                  layout splits them
    one micro     retained r: what its forward pass keeps for backward
                  peak e: the most that is alive at once, without gradients
    in flight k   micro-batches after forward and before backward, by the schedule
                  (`split.schedules.max_in_flight`)
    messages      of a pipeline: the batch of a step, and messages being transferred
    needed        static + (k - 1) r + e + messages

Nothing is guessed that can be tried: a step is run once on tensors without memory
(`memory_timeline`), and so is the optimizer (`static_memory`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands.core import Layout
from manyhands.errors import PlanError
from manyhands.plan.memory_timeline import (
    Cuts,
    LossOf,
    MemoryTimeline,
    StageMemory,
    Stages,
    record_timeline,
)
from manyhands.plan.static_memory import (
    buffer_bytes,
    guess_cuts,
    guess_stages,
    optimizer_bytes,
    tensor_share,
    unit_bytes,
)
from manyhands.split.schedules import max_in_flight


@dataclass(frozen=True)
class Forecast:
    """Memory forecast of one rank: bytes at its peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    other: int = 0
    stage: int = 0
    notes: tuple[str, ...] = ()  # what could not be tried on tensors without memory, and why

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.other

    def __str__(self) -> str:
        parts = {
            k: getattr(self, k)
            for k in ("parameters", "gradients", "optimizer", "activations", "other")
        }
        if not self.other:
            del parts["other"]
        unit, divisor = byte_unit(self.total)
        said = ", ".join(f"{k} {short(v / divisor)}" for k, v in parts.items())
        return "; ".join(
            [f"about {short(self.total / divisor)} {unit} a rank: {said}", *self.notes]
        )

    def against(self, measured: int) -> str:
        """The forecast beside the measured peak, as text."""
        unit, divisor = byte_unit(self.total)
        expected = short(self.total / divisor)
        return f"measured {short(measured / divisor)} {unit}, forecast {expected}"


@dataclass(frozen=True)
class Setting:
    """Setting: those parts of a plan that memory depends on."""

    layout: Layout = field(default_factory=Layout)
    zero: int = 3  # of the shard axis
    micros: int = 1  # of one rank and step: micro= times accumulate=
    schedule: str = "1f1b"
    recompute: bool = False
    # gradients move to the flat vector one by one during backward: an all-reduce between ranks
    overlap: bool = False
    sharers: int = 1  # ranks of a host that share one copy of the parameters
    owners: int = 1  # ranks that each keep the optimizer's state of their slice
    stages: Stages | None = None  # None: parameters in their order, cut evenly
    cuts: Cuts | None = None  # None: a guess by names and shapes
    bucket_bytes: int = 8 << 20
    other: int = 0  # other bytes of this rank: data on its GPU, the merge strategy's state
    scale: float = 1.0  # samples of a micro-batch over those of the one that was tried


class Study:
    """Memory study: one model and one micro-batch, to be forecast under any setting.

    `live` counts bytes: `observe.memory_peak.LiveStorages`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_of: LossOf,
        values: Any,
        optimizer: Optimizer,
        live: Callable[..., Any],
    ):
        self.module, self.loss_of, self.values, self.live = module, loss_of, values, live
        self.state, self.step_room, self._notes = optimizer_bytes(module, optimizer)
        self._timelines: dict[Any, MemoryTimeline] = {}

    def forecast(self, setting: Setting) -> Forecast:
        """The forecast of the rank that needs most."""
        return max(self.forecasts(setting), key=lambda f: f.total)

    def forecasts(self, setting: Setting) -> list[Forecast]:
        """One forecast for each rank of the pipe axis.

        Of the ranks of a tensor group it is the first, whose shards are never smaller.
        """
        layout = setting.layout
        cuts = (
            (guess_cuts(self.module) if setting.cuts is None else setting.cuts)
            if layout.tensor > 1
            else {}
        )
        stages = (
            guess_stages(self.module, layout.pipe)
            if setting.stages is None
            else tuple(setting.stages)
        )
        if len(stages) % layout.pipe:
            raise PlanError(
                f"pipe={layout.pipe}, but {len(stages)} stages were given; "
                "give pipe or a multiple of it"
            )
        # a stage of a pipeline is recomputed as a whole
        blockwise = setting.recompute and layout.pipe == 1
        timeline = self._timeline(blockwise, stages, cuts, layout.tensor)
        return [self._of_rank(s, setting, timeline, stages, cuts) for s in range(layout.pipe)]

    def _timeline(self, recompute: bool, stages: Stages, cuts: Cuts, tensor: int) -> MemoryTimeline:
        key = (recompute, tuple(stages), tuple(sorted(cuts.items())), tensor)
        if key not in self._timelines:
            self._timelines[key] = record_timeline(
                self.module, self.loss_of, self.values, self.live, stages, cuts, tensor, recompute
            )
        return self._timelines[key]

    def _of_rank(
        self, pipe_rank: int, setting: Setting, timeline: MemoryTimeline, stages: Stages, cuts: Cuts
    ) -> Forecast:
        layout = setting.layout
        mine = range(pipe_rank, len(stages), layout.pipe)  # several where stages interleave
        names = frozenset().union(*(stages[s] for s in mine))
        share = functools.partial(tensor_share, cuts=cuts, size=layout.tensor)
        sizes = {
            n: int(p.nbytes * share(n, p)) for n, p in self.module.named_parameters() if n in names
        }
        trained = sum(
            sizes[n] for n, p in self.module.named_parameters() if n in names and p.requires_grad
        )
        frozen, buffers = sum(sizes.values()) - trained, buffer_bytes(self.module, names)
        optimizer = sum(
            int(self.state.get(n, 0) * share(n, p))
            for n, p in self.module.named_parameters()
            if n in names
        )
        passing = setting.overlap or self._accumulates(setting)
        chunks = [timeline.stage_memory(s, passing, share) for s in mine]
        most = max(chunks, key=lambda c: c.activations + c.gradients)
        held = (
            (self._in_flight(setting, pipe_rank, len(chunks)) - 1)
            * sum(map(self._kept(setting), chunks))
            / len(chunks)
        )
        messages = self._messages(setting, timeline, chunks)
        activations = int((held + most.activations + messages) * setting.scale)
        values, flat, grads = trained, trained, int(most.gradients)
        if self._accumulates(setting):
            grads += trained
        if layout.shard > 1:
            units = unit_bytes(self.module, names, sizes)
            optimizer //= layout.shard
            if setting.zero >= 2:  # gradients are reduced bucket by bucket
                flat = trained // layout.shard
                grads = min(
                    trained, max(setting.bucket_bytes, max(units) if setting.zero == 3 else 0)
                )
            if setting.zero == 3:  # one block computes while the next one is gathered
                values = trained // layout.shard + max(
                    a + b for a, b in zip(units, [*units[1:], 0], strict=True)
                )
        # in the optimizer's step activations are freed, but all gradients exist
        in_step = self.step_room // layout.shard
        if not setting.overlap and not (layout.shard > 1 and setting.zero >= 2):
            in_step += trained
        return Forecast(
            values // setting.sharers + frozen + buffers,
            flat + grads,
            optimizer // setting.owners,
            max(activations, in_step - grads),
            setting.other,
            pipe_rank,
            (*self._notes, *timeline.notes),
        )

    def _in_flight(self, setting: Setting, pipe_rank: int, chunks: int) -> int:
        if setting.layout.pipe == 1:
            return 1
        schedule = "1f1b" if setting.schedule == "interleaved" and chunks == 1 else setting.schedule
        return max_in_flight(schedule, setting.layout.pipe, pipe_rank, setting.micros, chunks)

    def _messages(
        self, setting: Setting, timeline: MemoryTimeline, chunks: list[StageMemory]
    ) -> float:
        """What a rank of a pipeline holds besides.

        It is the batch of a step, and with each neighbour one message being sent, one received
        early and, of gradients, the one in use.
        """
        if setting.layout.pipe == 1:
            return 0.0
        return (setting.micros - 1) * timeline.batch + sum(
            2 * chunk.inputs + 3 * chunk.outputs for chunk in chunks
        )

    def _kept(self, setting: Setting) -> Callable[[StageMemory], float]:
        """What a micro-batch keeps until its backward pass."""
        return lambda chunk: chunk.received if setting.recompute else chunk.retained

    def _accumulates(self, setting: Setting) -> bool:
        """Whether a backward pass adds to the gradients of the micro-batches before."""
        return setting.micros > 1 and not (setting.layout.shard > 1 and setting.zero >= 2)


def byte_unit(nbytes: int) -> tuple[str, float]:
    """GB or MB, and its bytes."""
    return ("GB", 1e9) if nbytes >= 1e10 else ("MB", 1e6)


def short(x: float) -> str:
    """123, 12.3, 0.12: about three significant digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}".removesuffix(".0") if x >= 1 else f"{x:.2g}"
