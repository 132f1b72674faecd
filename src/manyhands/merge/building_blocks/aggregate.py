"""Robust aggregation: one vector out of many, of which some may be wrong (`merge=robust`).

`rows` are what the ranks sent, the same in the same order everywhere, so that all ranks compute the
same bits. The work is done in chunks, because vectors need not fit in a cache: a chunk of all rows
stays there while it is sorted or summed. Distances are summed in float64, where the square of the
largest float32 is still finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from manyhands.core import Tensors

Rows = Sequence[Tensors]
TINY = 1e-300


def sanitise(rows: Rows, f: int) -> list[Tensors]:
    """Set rows that are not finite to 0.

    More than `f` of them mean that the run diverges, or that the loss scale is too large: they stay
    as they are, so that it shows.
    """
    bad = [  # aminmax gives NaN if any element is
        not all(bool(torch.stack(v.aminmax()).isfinite().all()) for v in row.values())
        for row in rows
    ]
    if sum(bad) > f:
        return list(rows)
    return [
        {k: torch.zeros_like(v) for k, v in row.items()} if b else row
        for row, b in zip(rows, bad, strict=True)
    ]


def mean(rows: Rows, weights: Tensor) -> Tensors:
    """sum_i weights_i x_i"""
    out = _like(rows[0])
    for k, at, x in _chunks(rows):
        torch.mv(x.T, weights.to(x.dtype), out=out[k][at])
    return out


def median(rows: Rows) -> Tensors:
    """Median of every coordinate; of an even number the mean of the two in the middle."""
    n, out = len(rows), _like(rows[0])
    for k, at, x in _chunks(rows):
        order = _sorted(x)
        torch.lerp(order[(n - 1) // 2], order[n // 2], 0.5, out=out[k][at])
    return out


def trimmed_mean(rows: Rows, f: int) -> Tensors:
    """Mean of every coordinate, without its f largest and f smallest values."""
    out = _like(rows[0])
    for k, at, x in _chunks(rows):
        torch.mean(torch.stack(_sorted(x)[f : len(rows) - f]), 0, out=out[k][at])
    return out


def krum(rows: Rows, f: int, best: int = 1) -> Tensors:
    """The row with the least sum of squared distances to its n - f - 2 nearest others.

    With `best` > 1: the mean of that many best rows.
    """
    n = len(rows)
    apart = torch.zeros(n, n, dtype=torch.float64, device=next(iter(rows[0].values())).device)
    for _, _, x in _chunks(rows):
        for i in range(n - 1):
            apart[i, i + 1 :] += _square_norms(x[i + 1 :] - x[i])
    apart = (apart + apart.T).nan_to_num(nan=torch.inf, posinf=torch.inf)
    apart.fill_diagonal_(torch.inf)  # a row is not its own neighbour
    scores = apart.sort(1).values[:, : n - f - 2].sum(1)
    chosen = scores.argsort(stable=True)[:best]
    if best == 1:
        i = int(chosen)
        return {k: v.clone() for k, v in rows[i].items()}
    return mean(rows, torch.zeros_like(scores).index_fill_(0, chosen, 1 / best))


def geometric_median(rows: Rows, passes: int = 8) -> Tensors:
    """argmin_v sum_i |x_i - v| by Weiszfeld's iteration.

        v = sum(x_i / d_i) / sum(1 / d_i),   d_i = |x_i - v|

    It starts from the coordinate median: from the mean, one huge row would need more passes.
    """
    v, weights = median(rows), torch.zeros(())
    for _ in range(passes):
        d = _distances(rows, v)
        # if more than half of the rows coincide, the floor is 0 and only they count: they are the
        # median
        near = 1 / d.clamp(min=1e-6 * d.median()).clamp(min=TINY)
        last, weights = weights, near / near.sum()
        if last.ndim and torch.allclose(last, weights, rtol=1e-5, atol=0):
            break
        v = mean(rows, weights)
    return v


def clip_centred(
    rows: Rows, v: Tensors, f: int, radius: float | None = None, passes: int = 1
) -> Tensors:
    """v + (1/n) sum_i (x_i - v) min(1, r / |x_i - v|).

    r is `radius`, or the (n-f)-th smallest distance, so that honest rows alone are not clipped.
    """
    out = {k: x.clone() for k, x in v.items()}
    for _ in range(passes):
        d = _distances(rows, out)
        r = d.kthvalue(len(rows) - f).values if radius is None else torch.full_like(d[0], radius)
        # 0/0 at v, inf/inf with an infinite radius: not clipped
        share = (r / d).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0) / len(rows)
        for k, at, x in _chunks(rows):
            centre = out[k][at]
            centre.add_(share.to(x.dtype) @ (x - centre))
    return out


# -- arithmetic --


def _chunks(rows: Rows) -> Iterator[tuple[str, slice, Tensor]]:
    """(name, slice, rows x elements) of every chunk of the vectors."""
    for k, first in rows[0].items():
        step = 2**15 if first.device.type == "cpu" else 2**22
        for start in range(0, first.numel(), step):
            at = slice(start, start + step)
            yield k, at, torch.stack([row[k].view(-1)[at] for row in rows])


def _like(row: Tensors) -> Tensors:
    return {k: torch.empty_like(v) for k, v in row.items()}


def _square_norms(x: Tensor) -> Tensor:
    return x.double().square_().sum(1)


def _distances(rows: Rows, v: Tensors) -> Tensor:
    squares = torch.zeros(len(rows), dtype=torch.float64, device=next(iter(v.values())).device)
    for k, at, x in _chunks(rows):
        squares += _square_norms(x - v[k][at])
    return squares.sqrt()


def _sorted(x: Tensor) -> list[Tensor]:
    """The rows of `x`, sorted within every column, by Batcher's odd-even network.

    Minimum and maximum of whole rows run at the speed of memory; a sort along a short dimension
    does not.
    """
    rows, n = list(x.unbind(0)), len(x)
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        a, b = rows[i + j], rows[i + j + k]
                        rows[i + j], rows[i + j + k] = torch.minimum(a, b), torch.maximum(a, b)
            k //= 2
        p *= 2
    return rows
