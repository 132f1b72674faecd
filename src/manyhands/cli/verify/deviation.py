"""Deviation from one process: how far a plan's recorded run is from the reference run.

The bound is 1e-12 in float64: two orders of summation. `rounded` runs, one process again under
random rounding, say how far rounding alone moves the task. Where that is more, the bound is ten
times as much, separately for loss, gradients and parameters. It is never so wide that an error in
the method could hide below it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core import Tensors

KINDS = ("loss", "gradient", "parameter")
ROUNDINGS = 10.0  # how many times the effect of one rounding still is rounding
CEILING = 1e-4  # of bounds: a wrong weight or a lost sample shows at about 1e-3
LOSS = "(loss)"  # in the list of modules
# what is so much smaller than the largest gradient and moves by so much of itself under random
# rounding is zero except for rounding
SMALL, UNSETTLED = 1e-4, 1e-2


@dataclasses.dataclass
class Deviation:
    """Deviation from one process: the largest relative difference of each kind."""

    loss: float
    gradient: float
    parameter: float
    by_module: dict[str, float]
    rtol: float
    noise: list[str] = dataclasses.field(default_factory=list)  # parameters that were left out
    # by kind: how far one rounding of every operation moves the reference; {}: not measured
    rounding: dict[str, float] = dataclasses.field(default_factory=dict)
    computes_in: torch.dtype | None = None  # the coarsest dtype inside; None: not measured

    @property
    def equal(self) -> bool:
        return all(getattr(self, kind) <= self.bound(kind) for kind in KINDS)

    @property
    def undecided(self) -> bool:
        """Whether rounding could explain the difference, but could also hide an error."""
        return not self.equal and all(getattr(self, k) <= self.explained(k) for k in KINDS)

    @property
    def unexplained(self) -> bool:
        """Whether no further rounding could explain it: it is far more than was measured."""
        return any(getattr(self, kind) > 100 * self.explained(kind) for kind in KINDS)

    @property
    def lifted(self) -> bool:
        """Whether a bound is wider than orders of summation need."""
        return any(self.bound(kind) > self.rtol for kind in KINDS)

    def bound(self, kind: str) -> float:
        return max(self.rtol, min(self.explained(kind), CEILING))

    def explained(self, kind: str) -> float:
        """How large a difference rounding alone makes."""
        return max(self.rtol, ROUNDINGS * self.rounding.get(kind, 0.0))


def measure(
    ours: list[Tensors], alone: list[Tensors], rtol: float, rounded: Sequence[list[Tensors]] = ()
) -> Deviation:
    """Compare the ranks' records with the reference `alone`, and so the `rounded` references."""
    unsettled = _unsettled(alone[0], rounded)
    noise = _noise(alone[0]) | _small_and_unsettled(alone[0], unsettled)
    worst, by_module = _differences(ours, alone, noise, unsettled)
    rounding: dict[str, float] = {}
    for run in rounded:
        moved, _ = _differences(run, alone, noise, unsettled)
        rounding = {k: max(moved[k], rounding.get(k, 0.0)) for k in KINDS}
    loss, gradient, parameter = (worst[kind] for kind in KINDS)
    return Deviation(loss, gradient, parameter, by_module, rtol, sorted(noise), rounding)


def _differences(
    ours: list[Tensors], alone: list[Tensors], noise: set[str], unsettled: Tensors
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest relative difference of each kind and of each module."""
    worst, by_module = dict.fromkeys(KINDS, 0.0), {}
    if rounds := [k for k in alone[0] if k.startswith("loss/")]:
        worst["loss"] = by_module[LOSS] = max(
            _relative(_mean([o[k] for o in ours]), _mean([a[k] for a in alone])) for k in rounds
        )
    for key in sorted(set(alone[0]) | set(ours[0])):
        kind, name = key.partition("/")[0], _name(key)
        if kind == "loss" or name in noise:
            continue
        value = float("inf")
        if key in ours[0] and key in alone[0]:
            mine, theirs = ours[0][key], alone[0][key]
            if kind == "parameter":
                mine = torch.where(_quiet(name, unsettled, alone[0], ours[0]), theirs, mine)
            value = _relative(mine, theirs)
        worst[kind] = max(worst[kind], value)
        module = name.rpartition(".")[0]
        by_module[module] = max(by_module.get(module, 0.0), value)
    return worst, by_module


# -- gradients that are zero except for rounding --


def _noise(kept: Tensors) -> set[str]:
    """Parameters whose gradient is zero except for rounding (a bias before BatchNorm).

    They are not compared: optimizers that divide by the gradient's size amplify the rounding.
    """
    largest = _largest(kept)
    bound = max(largest.values(), default=0.0) * 1e3 * _eps(kept)
    return {name for name, value in largest.items() if 0 < value < bound}


def _small_and_unsettled(kept: Tensors, unsettled: Tensors) -> set[str]:
    """The same, found by random rounding: such a gradient is larger in a part that is float32."""
    largest = _largest(kept)
    bound = max(largest.values(), default=0.0) * SMALL
    return {
        name
        for name, moved in unsettled.items()
        if moved.numel() and 0 < largest[name] < bound and moved.max() > UNSETTLED * largest[name]
    }


def _unsettled(kept: Tensors, rounded: Sequence[list[Tensors]]) -> Tensors:
    """By parameter: how far random rounding moves each element of its gradient at most."""
    found: Tensors = {}
    for run in rounded:
        for key, value in kept.items():
            if key.startswith("gradient/") and key in run[0]:
                moved = (run[0][key] - value).abs()
                name = _name(key)
                found[name] = torch.maximum(found[name], moved) if name in found else moved
    return found


def _quiet(name: str, unsettled: Tensors, *runs: Tensors) -> Tensor:
    """The elements of a parameter whose gradient is zero except for rounding.

    An example is the third of a fused bias that belongs to the keys: softmax does not depend on it.
    """
    rounds = [
        kept[k].abs()
        for kept in runs
        for k in kept
        if k.startswith("gradient/") and _name(k) == name
    ]
    if not rounds:
        return torch.tensor(False)
    largest, most = torch.stack(rounds).amax(0), max(_largest(runs[0]).values())
    quiet = largest < most * 1e3 * _eps(runs[0])
    if name in unsettled:
        quiet |= (largest < most * SMALL) & (unsettled[name] > UNSETTLED * largest)
    return (largest > 0) & quiet


def _largest(kept: Tensors) -> dict[str, float]:
    """By parameter: the largest entry of its gradients."""
    largest: dict[str, float] = {}
    for key, value in kept.items():
        if key.startswith("gradient/") and value.numel():
            largest[_name(key)] = max(largest.get(_name(key), 0.0), float(value.abs().max()))
    return largest


def _eps(kept: Tensors) -> float:
    return max(
        (torch.finfo(v.dtype).eps for k, v in kept.items() if k.startswith("gradient/")),
        default=0.0,
    )


# -- records --


def _name(key: str) -> str:
    """The parameter of "gradient/<round>/<parameter>" and "parameter/<parameter>"."""
    return key.split("/", 2)[2] if key.startswith("gradient/") else key.partition("/")[2]


def _mean(pairs: list[Tensor]) -> Tensor:
    total = torch.stack(pairs).sum(0)
    return total[0] / total[1]


def _relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the tensor's largest entry: single tiny entries do not matter."""
    if a.numel() == 0:
        return 0.0
    scale = float(b.abs().max())
    difference = float((a - b).abs().max())
    if difference != difference:
        return float("inf")
    return difference / scale if scale else difference
