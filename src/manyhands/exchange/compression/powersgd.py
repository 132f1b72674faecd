"""PowerSGD codec: two thin factors of each gradient matrix, from one power iteration per step.

    G_i = g_i + e_i;   P = orth(sum_i G_i Q);   Q = mean_i G_i' P;   out = P Q';   e_i = G_i - out
                                                              (Vogels et al. 2019, arXiv:1905.13727)

The iteration starts from the factors of the step before. r (m + n) values are sent instead of m
n, by plain all-reduce, whatever the number of ranks. `out` is what compressing the mean gradient
itself would give. Where the shapes of the parameters in a vector are known, each of two or more
dimensions is a matrix (first dimension by the rest) and the others are sent uncompressed; else
the whole vector is laid out as one matrix, as square as possible. The first `start_after` steps
are uncompressed. Orthogonalised in float32 by Householder reflections, which turn a zero gradient
into unit vectors and not into NaN. Only all ranks together can decode it: no use for strategies
that swap with neighbours.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import (
    Cargo,
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.errors import PlanError
from manyhands.exchange.compression.codec import DIFFERENCES, Memory, drop_nonfinite


@dataclass(frozen=True)
class PowerSGD:
    rank: int = 4
    start_after: int = 0

    carries: ClassVar[frozenset[Cargo]] = DIFFERENCES
    point_to_point: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise PlanError(
                f"compress.rank={self.rank}: at least 1 column is needed; 2 to 4 is usual"
            )
        if self.start_after < 0:
            raise PlanError(f"compress.start_after={self.start_after}: 0 or more steps are needed")

    def reduce(self, x: Tensor, op: Op, group: Group, memory: Memory) -> Iterator[Work]:
        if memory.count() < self.start_after:
            yield group.all_reduce({memory.name: x}, op)
            return
        matrices, plain = self._lay_out(x.numel(), memory)
        error = memory.keep(
            "error", max([x.numel(), *(s.stop for s, *_ in matrices)]), _residual(x.dtype), x.device
        )
        for s, *_ in matrices:
            error[s.start : min(s.stop, x.numel())].add_(
                x[s]
            )  # a slice past the end of x stops there: the rest is padding
        G = [error[s].view(m, n).to(torch.float32) for s, m, n, _ in matrices]
        Q = self._factors(matrices, memory, x.device)

        P = torch.cat([(g @ q).view(-1) for g, q in zip(G, Q, strict=True)]) if G else x[:0]
        rest = torch.cat([x[s] for s in plain]) if plain else x[:0]
        yield group.all_reduce(_some({"p": P, "rest": rest}), "sum")

        columns = [
            torch.linalg.qr(p.view(m, r))[0]
            for p, (_, m, _, r) in zip(
                P.split([m * r for _, m, _, r in matrices]), matrices, strict=True
            )
        ]
        packed = (
            torch.cat([(g.t() @ p).view(-1) for g, p in zip(G, columns, strict=True)])
            if G
            else x[:0]
        )
        if G:
            yield group.all_reduce({"q": packed}, "mean")

        size = group.size if op == "sum" else 1
        for p, q, kept, (s, _, _, _) in zip(
            columns, packed.split([q.numel() for q in Q]), Q, matrices, strict=True
        ):
            kept.copy_(q.view_as(kept))
            out = (p @ kept.t()).view(-1)
            error[s].sub_(out)
            within = x[s]
            within.copy_(out[: within.numel()]).mul_(size)
        error[x.numel() :] = 0  # padding
        drop_nonfinite(error, packed)
        for i, q in enumerate(Q):
            q.copy_(torch.where(q.isfinite(), q, _random(q.shape, memory.seed(i)).to(q.device)))
        for s, value in zip(plain, rest.split([s.stop - s.start for s in plain]), strict=True):
            x[s] = value if op == "sum" else value / group.size

    def encode(self, x: Tensor, memory: Memory) -> Tensor:
        return x  # not point_to_point: a factor is of no use without the others

    def decode(self, packed: Tensor, into: Tensor, memory: Memory) -> None:
        into.copy_(packed)

    def _lay_out(
        self, numel: int, memory: Memory
    ) -> tuple[list[tuple[slice, int, int, int]], list[slice]]:
        """(where, m, n, r) of each matrix, and where what is sent uncompressed is."""
        if memory.shapes is None:
            m = math.isqrt(numel - 1) + 1
            n = -(-numel // m)
            return [(slice(0, m * n), m, n, min(self.rank, m, n))], []
        matrices = []
        for s, shape in sorted(memory.shapes, key=lambda parameter: parameter[0].start):
            if len(shape) > 1 and (m := shape[0]) and (n := shape.numel() // m):
                r = min(self.rank, m, n)
                if r * (m + n) < m * n:
                    matrices.append((s, m, n, r))
        bounds = [0, *(b for s, *_ in matrices for b in (s.start, s.stop)), numel]
        return matrices, [
            slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b
        ]

    def _factors(
        self, matrices: list[tuple[slice, int, int, int]], memory: Memory, device: torch.device
    ) -> list[Tensor]:
        """The Q of the step before, views of one kept vector; at first random, the same on all
        ranks."""
        shapes = [torch.Size((n, r)) for _, _, n, r in matrices]
        new = not memory.has("q")
        q = memory.keep("q", sum(shape.numel() for shape in shapes), torch.float32, device)
        Q = [
            part.view(shape)
            for part, shape in zip(
                q.split([shape.numel() for shape in shapes]), shapes, strict=True
            )
        ]
        if new:
            for i, part in enumerate(Q):
                part.copy_(_random(part.shape, memory.seed(i)))
        return Q


def _random(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _residual(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _some(values: Tensors) -> Tensors:
    return {k: v for k, v in values.items() if v.numel()}
