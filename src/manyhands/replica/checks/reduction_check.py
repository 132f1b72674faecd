"""Reduction check: whether the loss of a task looks like a sum over the batch, or like a mean.

    ratio = L(batch) / (L(first half) + L(second half))        mean: about 1/2;  sum: about 1

A sum taken for a mean is wrong by the number of ranks, and nothing else would show it. The model's
outputs for the first batch are cut in halves, so nothing but the loss function runs again. Where
only the loss itself is known (step=, a loop of the user's), autograd's graph tells which reduction
came last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from manyhands.replica import state
from manyhands.replica.objective import Reduction

NEAR = 0.04  # how far a ratio may be from 1/2 or 1
ROUNDING = 1e-4  # how far the ratio of a mean over samples may be from 1/2
THROUGH = ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0")  # sums of losses
CLEARLY = 1.5  # times 1 / count: a factor of so much leaves a sum a sum
SUM = 2  # in torch's enumeration of reductions

IS_SUM = (
    "the loss looks like a sum over the batch, but is taken for a mean: with N ranks or "
    'micro-batches a step would be N times too small; say reduction="sum", or divide the loss by '
    "the batch size"
)
IS_MEAN = (
    'the loss looks like a mean over the batch, but reduction="sum" was given: a step is as many '
    "times too large as a batch has samples; leave reduction out"
)

IS_UNEVEN = (
    "the loss is no mean over the samples of a batch (class weights, ignore_index, or samples "
    "compared with each other): on several ranks it is averaged over their batches, which is not "
    "quite one process's; give step= and return the loss with the number it is a mean over"
)

FEWER = (
    "step= returned {counted} as the number that its loss is a mean over, fewer than the {count} "
    "samples of the batch: if that is another number (of right answers, say), ranks and batches "
    "are weighted by it; return the loss alone, or the number of samples or tokens"
)

Apparent = Reduction | Literal["uneven"]


def warning(given: Reduction, apparent: Apparent | None) -> str | None:
    """What to tell the user; None: nothing looks wrong."""
    if apparent is None or apparent == given:
        return None
    return {"sum": IS_SUM, "mean": IS_MEAN, "uneven": IS_UNEVEN}[apparent]


def of_halves(
    loss: Callable[..., Tensor], full: Tensor, outputs: Any, target: Any
) -> Apparent | None:
    """What `loss` seems to do over a batch for which it gave `full`; None: cannot be told."""
    tensors = [v for v in tree_flatten((outputs, target))[0] if isinstance(v, Tensor) and v.ndim]
    samples = {v.shape[0] for v in tensors}
    if len(samples) != 1 or any(type(v) is not Tensor for v in tensors):  # or sharded
        return None
    count = samples.pop()
    if count < 2 or count % 2:
        return None

    def half(start: int) -> float:
        cut = lambda v: v[start : start + count // 2] if isinstance(v, Tensor) and v.ndim else v
        return float(loss(tree_map(cut, outputs), tree_map(cut, target)))

    device = tensors[0].device
    rng = state.rng_state(device)  # a loss may draw random numbers: it must draw the same ones next
    try:
        with torch.no_grad():
            first, second = half(0), half(count // 2)
    except Exception:  # this loss takes whole batches only
        return None
    finally:
        state.load_rng(rng, device)
    if first * second <= 0:
        return None
    ratio = float(full.detach()) / (first + second)
    if abs(ratio - 1) < NEAR:
        return "sum"
    return "mean" if abs(ratio - 0.5) < ROUNDING else "uneven"


def of_graph(loss: Tensor, count: int) -> Reduction | None:
    """Which reduction came last in the computation of the `loss` of `count` samples; None: cannot
    be told. A sum that was divided by the count, or by more, may be a mean."""
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if node.name() in ("MulBackward0", "DivBackward0"):
            factor = _factor(node)
            if factor is None or abs(factor) * max(1, count) < CLEARLY:
                return None
            waiting += [child for child, _ in node.next_functions]
        elif hasattr(node, "_saved_reduction"):
            found.add("sum" if node._saved_reduction == SUM else "mean")
        elif node.name() in ("SumBackward0", "MeanBackward0"):
            found.add("sum" if node.name() == "SumBackward0" else "mean")
        elif node.name() in THROUGH:
            waiting += [child for child, _ in node.next_functions]
    if found == {"sum"}:
        return "sum"
    return "mean" if found == {"mean"} else None


def _factor(node: Any) -> float | None:
    """The number that a loss is multiplied by; None: not by a plain number."""
    if sum(child is not None for child, _ in node.next_functions) != 1:
        return None
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or not float(other):
        return None
    return 1 / float(other) if node.name() == "DivBackward0" else float(other)
