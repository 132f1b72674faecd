"""Slim data parallelism (after Slim-DP): every rank trains a core of units and random others.

    I(u) = sum over edges e at u of |w_e| + c |g_e|
    S    = the `core` share of each layer with the largest I, chosen every `keep` rounds
    R_k  = an `explore` share of each layer, drawn from the rest by RNG(seed, round, k)
    rank k holds S and R_k;   w_e <- mean over the ranks that hold e, by their samples

What no rank holds keeps its value and its optimizer state. Networks are redundant, so most units
are left out of most rounds: their output is 0, and nothing is sent of them. The output of a held
unit is multiplied by 1 / P(held), 1 in S, so that in the mean the network is the whole one, which
is evaluated and saved; gradients are not multiplied, so a held edge makes a step of the usual
size. With period=1 gradients are merged and all ranks make the same step; with more it is local
SGD on what each rank holds. R_k is drawn again every `redraw` rounds. draw=disjoint divides the
whole rest instead, each unit to one rank. All ranks compute the same draws from the seed, so no
list of indices is sent. The g of I is a running mean that keeps `memory` of itself each round.
Units are outputs of Linears and convolutions that reach only others, through activations, pooling,
BatchNorm or flatten; the rest (inputs, outputs, residual streams, attention) is on every rank.
Between rounds all ranks hold the same model; each computes with the whole matrices, so only
messages get smaller: about (core + M explore) of a layer's rows, squared between two such layers,
each round. With core=1 it is all_reduce, or local_sgd where period is more than 1. With period=1
optimizer state is the same everywhere; else `moments` says what becomes of it: the holders'
average, given to all, so that it follows the unit (average), each rank's own (keep), or none
(reset).

Use it when the network between ranks is slow and the layers are wide: otherwise all_reduce, with
all units in each step, learns more from a sample.

Paper: Sun et al. 2017, "Slim-DP" (arXiv:1709.09393), sends a core and explorers in the same way;
significance is magnitude combined with gradient.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from manyhands.core import EXACT, Cargo, GradientReplica, Group, Op, Strategy, Tensors
from manyhands.merge.building_blocks.local_steps import copies, local_steps
from manyhands.merge.building_blocks.options import Moments, check_block, need
from manyhands.split.skeleton import Units

EXPLORE = 0.15


class Thinned(GradientReplica, Protocol):
    """A replica that can leave units of its network out."""

    @property
    def units(self) -> Units: ...
    def thin(self, scales: Tensor | None, elements: Tensors | None) -> None:
        """From now on leave units out of `backward` and elements out of `step`; None: nothing.

        `backward` multiplies each unit's output by its scale, where 0 leaves the unit out; the
        gradients are as large as without the scale. `step` changes only `elements`.
        """
        ...


@dataclass(frozen=True)
class Skeleton(Strategy[Thinned, Group]):
    core: float = 0.15
    explore: float = EXPLORE
    period: int = 1
    keep: int = 20
    redraw: int = 1
    draw: Literal["random", "disjoint"] = "random"
    c: float = 1.0
    memory: float = 0.9
    seed: int = 0
    moments: Moments = "average"
    link: ClassVar[type] = Group
    # other elements each time, so compression must not leave a rest for the next message
    sends: ClassVar[Cargo] = "parameters"
    thins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)
        for name, share in (("core", self.core), ("explore", self.explore)):
            need(
                0 <= share <= 1,
                f"{name}={share}",
                "a share of each layer's units between 0 and 1 is needed",
            )
        need(
            self.core + self.explore > 0,
            f"explore={self.explore}",
            "with merge.core=0 a rank would hold nothing; set merge.explore=0.15",
        )
        for name, rounds in (("keep", self.keep), ("redraw", self.redraw)):
            need(rounds >= 1, f"{name}={rounds}", "at least 1 round is needed between two draws")
        need(
            self.draw in ("random", "disjoint"),
            f"draw={self.draw}",
            "one of random, disjoint is needed",
        )
        need(
            self.draw == "random" or self.explore == EXPLORE,
            f"explore={self.explore}",
            "has no effect with merge.draw=disjoint, which divides all; leave it out",
        )
        need(
            0 <= self.c < float("inf"), f"c={self.c}", "a weight of 0 or more is needed; 1 is usual"
        )
        need(
            0 <= self.memory < 1,
            f"memory={self.memory}",
            "0 or more and less than 1 is needed; 0.9 is usual",
        )
        need(self.seed >= 0, f"seed={self.seed}", "0 or more is needed")
        need(
            self.period > 1 or self.moments == "average",
            f"moments={self.moments}",
            "has no effect with merge.period=1, where all ranks make the same step; leave it out",
        )

    def init(self, replica: Thinned) -> Tensors:
        total = replica.units.total
        return {
            # on the host, where units are drawn
            "rounds": torch.zeros((), dtype=torch.int64),
            "core": torch.zeros(total, dtype=torch.bool),
            "g": torch.zeros(total, dtype=torch.float64, device=replica.count.device),
        }

    def round(self, replica: Thinned, group: Group, state: Tensors) -> Tensor:
        units = replica.units
        number, core = int(state["rounds"]), state["core"]
        if number % self.keep == 0:
            scores = units.sums(replica.params) + self.c * state["g"]
            # equal to the bit on all ranks, even if their devices sum in different orders
            _all_reduce(group, {"scores": scores}, op="mean")
            core.copy_(units.skeleton(scores, self.core))
        draw = number // self.redraw
        if self.draw == "random":
            explorers = units.explorers(core, self.explore, self.seed, draw, group.size)
        else:
            explorers = units.disjoint(core, self.seed, draw, group.size)
        train = self._step if self.period == 1 else self._block
        loss = train(
            replica, group, state, core | explorers, units.scales(core, explorers)[group.rank]
        )
        replica.thin(None, None)
        state["rounds"] += 1
        return loss

    def _step(
        self, replica: Thinned, group: Group, state: Tensors, held: Tensor, scales: Tensor
    ) -> Tensor:
        """One step of all ranks together, by the mean gradient of each edge over its holders."""
        replica.thin(scales, None)
        loss = replica.backward()  # compute
        importance = _importance(replica, scales)
        n = self._share_importance(replica, group, state, importance, replica.own_count)
        weight, index = _holders(replica, held, n)
        grads = replica.grads
        _sum_held(group, grads, index, {"count": replica.count})  # exchange
        for k, g in grads.items():  # merge; `step` will divide by all samples
            g.mul_(_share(n, weight[k]).to(g.dtype))
        replica.thin(None, None if index is None else {k: w > 0 for k, w in weight.items()})
        replica.step()
        return loss

    def _block(
        self, replica: Thinned, group: Group, state: Tensors, held: Tensor, scales: Tensor
    ) -> Tensor:
        """`period` local steps of each rank on what it holds; then each edge's mean over them."""
        own = None
        if not bool(held.all()):
            mine = replica.units.holders(
                held[group.rank : group.rank + 1], torch.ones(1), replica.params
            )
            own = {k: m > 0 for k, m in mine.items()}
        w, importance = copies(replica.params), list[Tensor]()
        replica.thin(scales, own)

        def look() -> None:
            if not importance:
                importance.append(_importance(replica, scales))

        loss, samples = local_steps(replica, self.period, look)  # compute
        n = self._share_importance(replica, group, state, importance[0], samples)
        weight, index = _holders(replica, held, n)
        for k, x in replica.params.items():
            x.sub_(w[k]).mul_((samples / n.sum().clamp(min=1)).to(x.dtype))
        _sum_held(group, replica.params, index)  # exchange
        for k, x in replica.params.items():  # merge
            x.mul_(_share(n, weight[k]).to(x.dtype)).add_(w[k])
        if self.moments == "reset":
            replica.reset_moments()
        elif self.moments == "average" and group.size > 1:
            _average_moments(replica, group, own, weight, samples, n)
        return loss

    def _share_importance(
        self, replica: Thinned, group: Group, state: Tensors, importance: Tensor, samples: int
    ) -> Tensor:
        """The samples of every rank. Also updates the running mean of |g| from all ranks."""
        n = torch.zeros(group.size, dtype=torch.float64, device=replica.count.device)
        n[group.rank] = samples
        _all_reduce(group, {"samples": n, "importance": importance})
        keeps = self.memory if int(state["rounds"]) else 0.0
        state["g"].lerp_(importance / n.sum().clamp(min=1), 1 - keeps)
        return n


def _importance(replica: Thinned, scales: Tensor) -> Tensor:
    """Of each unit: sum over its edges of |mean gradient|, times this rank's samples.

    A rank that leaves a unit out adds 0 for it, so others' sums are multiplied by 1 / P(held).
    """
    if not replica.own_count:
        return torch.zeros(replica.units.total, dtype=torch.float64, device=replica.count.device)
    return (
        replica.units.sums(replica.grads)
        * scales.to(replica.count.device)
        * (replica.own_count / replica.scale)
    )


def _holders(replica: Thinned, held: Tensor, n: Tensor) -> tuple[Tensors, Tensors | None]:
    """Of each element: the samples of its holders; and the indices of held elements (None: all)."""
    weight = replica.units.holders(held, n, replica.params)
    return weight, None if bool(held.all()) else {
        k: w.nonzero().flatten() for k, w in weight.items()
    }


def _share(n: Tensor, weight: Tensor) -> Tensor:
    return n.sum().to(weight.dtype) / weight.clamp(min=1)


def _sum_held(
    group: Group, values: Tensors, index: Tensors | None, besides: Tensors | None = None
) -> None:
    """Sum the elements that any rank holds over ranks; the others become 0.

    They are packed at the front of the vectors, because a group may reduce the vectors' own memory
    without a copy.
    """
    packed = values
    if index is not None:
        for k, v in values.items():
            v[: len(index[k])].copy_(v[index[k]])
        packed = {f"held/{k}": v[: len(index[k])] for k, v in values.items() if len(index[k])}
    work = [group.all_reduce(packed)] if packed else []
    for sent in [*work, *([group.all_reduce(besides)] if besides else [])]:
        sent.wait()
    if index is not None:
        for k, v in values.items():
            got = v[: len(index[k])].clone()
            v.zero_()
            v[index[k]] = got


def _average_moments(
    replica: Thinned, group: Group, own: Tensors | None, weight: Tensors, samples: int, n: Tensor
) -> None:
    """Optimizer state of an edge: the mean over its holders, for all, so it follows the unit."""
    units = replica.units
    held, weights = (
        ({}, {}) if own is None else (units.of_parameters(own), units.of_parameters(weight))
    )
    for name, m in replica.moments.items():
        parameter = name.rpartition("/")[0]
        w = weights[parameter] if parameter in weights else n.sum().to(m.dtype).expand(m.shape)
        mine = torch.where(held[parameter], m, 0) if parameter in held else m
        mean = mine[w > 0] * (samples / w[w > 0]).to(m.dtype)
        _all_reduce(group, {name: mean})
        m[w > 0] = mean


def _all_reduce(group: Group, values: Tensors, op: Op = "sum") -> None:
    if some := {f"{EXACT}{k}": v for k, v in values.items() if v.numel()}:
        group.all_reduce(some, op).wait()
