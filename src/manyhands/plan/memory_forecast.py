"""What a rank will need of memory, known before the first step.

    static        parameters + the flat gradient vector + optimizer state        from shapes, cut as the layout cuts them
    one micro     retained r: what its forward pass leaves for backward;  peak e: the most it has alive at once, gradients apart
    in flight k   micro-batches whose forward is done and whose backward is not, by the schedule (`split.schedules.max_in_flight`)
    mail          of a pipeline: the batch of a step, messages on their way
    needed        static + (k - 1) r + e + mail

Nothing of it is guessed where it can be tried: a step is run once on tensors without memory (`trial`), and so is the optimizer.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Layout, Replica, Strategy
from manyhands.errors import PlanError
from manyhands.plan.memory_timeline import (
    Chunk,
    Cuts,
    LossOf,
    Stages,
    Trial,
    blocks,
    trial,
)
from manyhands.split.schedules import max_in_flight
from manyhands.split.shard_spec import ShardSpec

FUSED = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
)  # one kernel updates in place: it needs no room besides


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank at its peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    other: int = 0
    stage: int = 0
    notes: tuple[str, ...] = ()  # what was not tried on tensors without memory, and why

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
        unit, divisor = _unit(self.total)
        said = ", ".join(f"{k} {_number(v / divisor)}" for k, v in parts.items())
        return "; ".join(
            [f"about {_number(self.total / divisor)} {unit} a rank: {said}", *self.notes]
        )

    def against(self, measured: int) -> str:
        unit, divisor = _unit(self.total)
        return f"measured {_number(measured / divisor)} {unit}, forecast {_number(self.total / divisor)}"


@dataclass(frozen=True)
class Setting:
    """Of a plan, what memory depends on."""

    layout: Layout = field(default_factory=Layout)
    zero: int = 3  # of the shard axis
    micros: int = 1  # of one rank and step: micro= times accumulate=
    schedule: str = "1f1b"
    recompute: bool = False
    overlap: bool = False  # gradients leave for the flat vector one by one while backward runs: an all-reduce between ranks
    sharers: int = 1  # ranks of a host that have one copy of the parameters in common
    owners: int = 1  # ranks that each keep the optimizer's state of their part
    stages: Stages | None = None  # None: parameters in their order, cut evenly
    cuts: Cuts | None = None  # None: a guess by names and shapes
    bucket_bytes: int = 8 << 20
    other: int = 0  # what else this rank holds: data on its GPU, the rule's state
    scale: float = 1.0  # samples of a micro-batch over samples of the one that was tried


class Study:
    """One model and one micro-batch of it, to be forecast under any setting. `live` is what counts: `observe.memory_peak.Live`."""

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
        self._trials: dict[Any, Trial] = {}

    def forecast(self, setting: Setting) -> Forecast:
        """Of the rank that needs most."""
        return max(self.forecasts(setting), key=lambda f: f.total)

    def forecasts(self, setting: Setting) -> list[Forecast]:
        """One for each place on the pipe axis; of the ranks of a tensor group the first, whose shares are never smaller."""
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
                f"pipe={layout.pipe}, but {len(stages)} stages were given; give pipe or a multiple of it"
            )
        blockwise = (
            setting.recompute and layout.pipe == 1
        )  # a stage of a pipeline is recomputed as a whole
        trial = self._trial(blockwise, stages, cuts, layout.tensor)
        return [self._at(s, setting, trial, stages, cuts) for s in range(layout.pipe)]

    def _trial(self, recompute: bool, stages: Stages, cuts: Cuts, tensor: int) -> Trial:
        key = (recompute, tuple(stages), tuple(sorted(cuts.items())), tensor)
        if key not in self._trials:
            self._trials[key] = trial(
                self.module, self.loss_of, self.values, self.live, stages, cuts, tensor, recompute
            )
        return self._trials[key]

    def _at(
        self, place: int, setting: Setting, trial: Trial, stages: Stages, cuts: Cuts
    ) -> Forecast:
        layout, mine = (
            setting.layout,
            range(place, len(stages), setting.layout.pipe),
        )  # several where stages interleave
        names = frozenset().union(*(stages[s] for s in mine))
        share = functools.partial(_share, cuts=cuts, size=layout.tensor)
        sizes = {
            n: int(p.nbytes * share(n, p)) for n, p in self.module.named_parameters() if n in names
        }
        trained = sum(
            sizes[n] for n, p in self.module.named_parameters() if n in names and p.requires_grad
        )
        frozen, buffers = sum(sizes.values()) - trained, _buffer_bytes(self.module, names)
        optimizer = sum(
            int(self.state.get(n, 0) * share(n, p))
            for n, p in self.module.named_parameters()
            if n in names
        )
        passing = setting.overlap or self._accumulates(setting)
        chunks = [trial.chunk(s, passing, share) for s in mine]
        most = max(chunks, key=lambda c: c.activations + c.gradients)
        held = (
            (self._in_flight(setting, place, len(chunks)) - 1)
            * sum(map(self._kept(setting), chunks))
            / len(chunks)
        )
        mail = self._mail(setting, trial, chunks)
        activations = int((held + most.activations + mail) * setting.scale)
        values, flat, grads = trained, trained, int(most.gradients)
        if self._accumulates(setting):
            grads += trained
        if layout.shard > 1:
            units = _unit_bytes(self.module, names, sizes)
            optimizer //= layout.shard
            if setting.zero >= 2:  # gradients go as they come
                flat = trained // layout.shard
                grads = min(
                    trained, max(setting.bucket_bytes, max(units) if setting.zero == 3 else 0)
                )
            if setting.zero == 3:  # one block computes while the next one comes
                values = trained // layout.shard + max(
                    a + b for a, b in zip(units, [*units[1:], 0], strict=True)
                )
        in_step = (
            self.step_room // layout.shard
        )  # by then activations are gone, but gradients are all there
        if not setting.overlap and not (layout.shard > 1 and setting.zero >= 2):
            in_step += trained
        return Forecast(
            values // setting.sharers + frozen + buffers,
            flat + grads,
            optimizer // setting.owners,
            max(activations, in_step - grads),
            setting.other,
            place,
            (*self._notes, *trial.notes),
        )

    def _in_flight(self, setting: Setting, place: int, chunks: int) -> int:
        if setting.layout.pipe == 1:
            return 1
        schedule = "1f1b" if setting.schedule == "interleaved" and chunks == 1 else setting.schedule
        return max_in_flight(schedule, setting.layout.pipe, place, setting.micros, chunks)

    def _mail(self, setting: Setting, trial: Trial, chunks: list[Chunk]) -> float:
        """What a rank of a pipeline has besides: the batch of a step, and with each neighbour one message on its way out, one that is
        received ahead and, of gradients, the one that is worked on."""
        if setting.layout.pipe == 1:
            return 0.0
        return (setting.micros - 1) * trial.batch + sum(
            2 * chunk.taken + 3 * chunk.given for chunk in chunks
        )

    def _kept(self, setting: Setting) -> Callable[[Chunk], float]:
        """What a micro-batch leaves behind until its way back."""
        return lambda chunk: chunk.received if setting.recompute else chunk.retained

    def _accumulates(self, setting: Setting) -> bool:
        """Whether a backward pass adds to gradients that are there already, those of the micro-batches before."""
        return setting.micros > 1 and not (setting.layout.shard > 1 and setting.zero >= 2)


# -- does it fit? --


def refuse(
    forecast: Forecast,
    available: int,
    others: Iterable[tuple[str, Forecast]] = (),
    anyway: bool = False,
) -> str | None:
    """Raise where the forecast is more than there is, and name the first of the `others` that would fit. `anyway`: only say so."""
    if forecast.total <= available:
        return None
    unit, divisor = _unit(forecast.total)
    fits = next(((words, f) for words, f in others if f.total <= available), None)
    do = (
        f"set {fits[0]} (about {_number(fits[1].total / divisor)} {unit})"
        if fits
        else "no single change of recompute, micro, shard, tensor, pipe or batch makes it fit: combine them, or take a smaller model"
    )
    said = f"{forecast}, but a rank has {_number(available / divisor)} {unit} here"
    if anyway:
        return f"{said}; running anyway"
    raise PlanError(f"{said}; {do}, or run it with --anyway")


def changes(study: Study, setting: Setting, batch: int) -> Iterator[tuple[str, Forecast]]:
    """Words of a plan that need less, the smallest change first: what costs time, then what moves ranks from data to the model, then
    what needs more ranks, last what trains on another batch. `batch`: samples of the micro-batch that was tried."""
    layout, change = setting.layout, dataclasses.replace
    if not setting.recompute:
        yield "recompute=true", study.forecast(change(setting, recompute=True))
    micros, scale = setting.micros, setting.scale
    while batch * scale >= 2:
        micros, scale = micros * 2, scale / 2
        yield f"micro={micros}", study.forecast(change(setting, micros=micros, scale=scale))
    for from_data in (True, False):
        if from_data and layout.data % 2:
            continue
        data = layout.data // 2 if from_data else layout.data
        for axis in ("shard", "tensor", "pipe"):
            size = getattr(layout, axis) * 2
            one = change(
                setting,
                layout=change(layout, data=data, **{axis: size}),
                stages=None,
                cuts=setting.cuts,
            )
            if axis == "pipe":
                one = change(
                    one,
                    micros=max(setting.micros, 4 * size),
                    scale=setting.scale * min(1.0, setting.micros / (4 * size)),
                )
            yield (
                (f"data={data} " if from_data and layout.data > 1 else "") + f"{axis}={size}",
                study.forecast(one),
            )
    if setting.micros == 1:
        samples = batch * setting.scale
        while samples >= 2:
            samples //= 2
            yield f"batch={int(samples)}", study.forecast(change(setting, scale=samples / batch))


# -- the parts of a model --


def guess_stages(module: nn.Module, pipe: int) -> Stages:
    """The parameters in their order, in `pipe` runs of about equal size."""
    sizes = {n: p.nbytes for n, p in module.named_parameters()}
    total, before = max(1, sum(sizes.values())), 0
    found: list[set[str]] = [set() for _ in range(pipe)]
    for name, nbytes in sizes.items():
        found[min(pipe - 1, (before + nbytes // 2) * pipe // total)].add(name)
        before += nbytes
    return tuple(map(frozenset, found))


def guess_cuts(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Layers that widen are cut by their outputs, those that narrow by their inputs, of equal ones in a module the last by its
    inputs; embeddings by their rows; convolutions, norms and what else there is stay whole."""
    found: dict[str, tuple[int, int]] = {}
    for path, layer in module.named_modules():
        start = f"{path}." if path else ""
        if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
            found |= {
                f"{start}in_proj_weight": (0, 3),
                f"{start}in_proj_bias": (0, 3),
                f"{start}out_proj.weight": (1, 1),
            }
            continue
        if isinstance(layer, nn.Embedding):
            found[f"{start}weight"] = (0, 1)
        pairs = [(n, c) for n, c in layer.named_children() if isinstance(c, nn.Linear)]
        for i, (name, linear) in enumerate(pairs):
            narrows = linear.in_features > linear.out_features or (
                linear.in_features == linear.out_features and i == len(pairs) - 1 > 0
            )
            found[f"{start}{name}.weight"] = (1, 1) if narrows else (0, 1)
            if not narrows:
                found[f"{start}{name}.bias"] = (0, 1)
    known = dict(module.named_parameters())
    return {n: cut for n, cut in found.items() if n in known}


def optimizer_bytes(
    module: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, int], int, tuple[str, ...]]:
    """The optimizer's state by parameter, the room its step needs besides, and what had to be assumed."""
    names = {id(p): n for n, p in module.named_parameters()}
    held = [
        [p for p in g["params"] if p.requires_grad and id(p) in names]
        for g in optimizer.param_groups
    ]
    room = (
        0
        if type(optimizer) in FUSED
        else 2 * max((p.nbytes for group in held for p in group), default=0)
    )
    found: dict[str, int] = {}
    for number, group in enumerate(held):
        known: dict[Any, int] = {}  # parameters of one shape are alike
        for p in group:
            key = (p.shape, p.dtype)
            if key not in known:
                try:
                    known[key] = _state_bytes(optimizer, number, torch.empty_like(p, device="meta"))
                except Exception:  # it asks for values
                    try:
                        known[key] = _state_bytes(optimizer, number, torch.zeros_like(p))
                    except Exception:
                        note = f"{type(optimizer).__name__} cannot be tried: two numbers a parameter are assumed for its state"
                        return (
                            {names[id(p)]: 2 * p.nbytes for group in held for p in group},
                            0,
                            (note,),
                        )
            found[names[id(p)]] = known[key]
    return found, room, ()


def _state_bytes(optimizer: Optimizer, group: int, values: Tensor) -> int:
    """What the optimizer keeps for one parameter after one step."""
    p = nn.Parameter(values)
    p.grad = torch.zeros_like(p)
    memo = {
        id(x): nn.Parameter(torch.empty(0)) for g in optimizer.param_groups for x in g["params"]
    }
    twin = copy.deepcopy(optimizer, dict(memo) | {id(optimizer.state): type(optimizer.state)(dict)})
    plain: dict[str, Any] = {
        k: False for k in ("fused", "foreach", "capturable") if k in twin.param_groups[group]
    }  # has a meta version
    twin.param_groups = [{**twin.param_groups[group], **plain, "params": [p]}]
    type(optimizer).step(twin)  # not twin.step: a schedule may have put itself before it
    return sum(v.nbytes for v in twin.state.get(p, {}).values() if isinstance(v, Tensor))


def rule_bytes(strategy: Strategy[Any, Any], trained: Mapping[torch.dtype, int]) -> int:
    """What a rule remembers of a model with so many trained numbers of each dtype."""
    vectors = {
        str(dtype): torch.empty(n, dtype=dtype, device="meta") for dtype, n in trained.items()
    }
    try:
        state = strategy.init(
            cast(Replica, SimpleNamespace(params=vectors, grads=vectors, lr=0.1, moments={}))
        )
    except Exception:
        return 0  # it asks for more than shapes
    return sum(v.nbytes for v in state.values())


def _share(name: str, tensor: Tensor, cuts: Cuts, size: int) -> float:
    if name not in cuts or size == 1:
        return 1.0
    dim, groups = cuts[name]
    part = ShardSpec(name, tuple(tensor.shape), dim, size, 0, groups)
    return part.local_shape[dim] / max(1, tensor.shape[dim])


def _buffer_bytes(module: nn.Module, names: frozenset[str]) -> int:
    """Buffers go with the layer that they belong to; those of a layer without parameters may be anywhere, so they are counted."""
    owners = {n.rpartition(".")[0] for n in names}
    others = {n.rpartition(".")[0] for n, _ in module.named_parameters()} - owners
    return sum(b.nbytes for n, b in module.named_buffers() if n.rpartition(".")[0] not in others)


def _unit_bytes(module: nn.Module, names: frozenset[str], sizes: Mapping[str, int]) -> list[int]:
    """The blocks that are gathered and let go as one, and what stands beside them."""
    ids = {id(p): n for n, p in module.named_parameters()}
    of_blocks = [{ids[id(p)] for p in block.parameters()} & names for block in blocks(module)]
    rest = names - frozenset().union(*of_blocks)
    return [sum(sizes[n] for n in unit) for unit in (*of_blocks, rest) if unit] or [0]


# -- small things --


def _unit(nbytes: int) -> tuple[str, float]:
    return ("GB", 1e9) if nbytes >= 1e10 else ("MB", 1e6)


def _number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}".removesuffix(".0") if x >= 1 else f"{x:.2g}"
