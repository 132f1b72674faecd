"""Embedding modules over a store: `mh.Embedding` and `mh.EmbeddingBag`, for any int64 ids.

    forward     u, inverse = distinct(ids);   W = pull(u);   out = W[inverse]
    backward    g = dloss/dW, one row for each distinct id;   push(u, g)

The server optimizer of the table makes the step where the row is. There is no parameter, no
vocabulary and no size: a row is made when its id is first trained. In eval mode, without gradients,
and after `requires_grad_(False)` on the module, rows are only read. A run attaches a model's
modules to its store (`embedding.tables`) and pushes once a step. A module that is not attached, in
a plain script, keeps its rows in this process and pushes in `loss.backward()`; there modules of one
name share one table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.core import Table, Tensors
from manyhands.embedding.default_rows import default_tables
from manyhands.embedding.gather import Room, bags_of, rows_of
from manyhands.errors import TaskError

Init = Literal["zeros", "uniform", "normal"]
Mode = Literal["sum", "mean", "max"]
MODES = ("sum", "mean", "max")
# options of torch's modules that rows without a vocabulary do not have
TORCH_ONLY = (
    "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse "
    "include_last_offset device _weight"
).split()
Forward = TypeVar("Forward", bound=Callable[..., Tensor])


def uncompiled(forward: Forward) -> Forward:
    """Exclude from torch.compile, which cannot trace a store and numba kernels; the rest of the
    model is compiled."""
    disabled: Any = None

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal disabled
        if disabled is None:
            # without dynamo nothing is compiled here, and importing it takes a second
            if "torch._dynamo" not in sys.modules:
                return forward(*args, **kwargs)
            disabled = torch.compiler.disable(forward)
        out: Tensor = disabled(*args, **kwargs)
        return out

    return call  # type: ignore[return-value]


class RowSource(Protocol):
    """Where modules look up their rows (`embedding.tables.EmbeddingTables`)."""

    of_run: bool  # whether a run pushes to them, once a step

    def lookup(self, module: Embedding, ids: Tensor) -> tuple[Tensor, Tensor, Room | None]:
        """The rows of the distinct ids among `module.wanted(ids)`, for each wanted id an index into
        the rows, and memory for their gradient, where it is to be pushed from some."""
        ...

    def replace_rows(self, table: Table, content: Tensors) -> None:
        """Give the table these rows in place of those it has."""
        ...

    def replace_pieces(self, table: Table, contents: Iterable[Mapping[str, Any]]) -> None:
        """As `replace_rows`, with rows that come in pieces."""
        ...


class Embedding(nn.Module):
    """Embedding without a vocabulary: `dim` numbers for every int64 id. ids of any shape; out has
    one axis more.

    `optimizer` is the server optimizer of its rows, with `lr` and `options`; the torch optimizer of
    the model does not see the rows. `requires_grad_(False)` on the module keeps its rows as they
    are; on a model around it, it does not reach the rows, since they are no parameters.
    """

    padding_id: int | None = None
    frozen: bool = False  # by requires_grad_(False)

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: str = "adagrad",
        lr: float = 0.01,
        init: Init = "uniform",
        scale: float = 0.01,
        seed: int = 0,
        admit_after: int = 1,
        admit_share: float = 1.0,
        expire_after: int | None = None,
        expire_count: int | None = None,
        expire_norm: float | None = None,
        dtype: torch.dtype = torch.float32,
        **options: float,
    ):
        super().__init__()
        if "rule" in options:  # the old name
            given = options["rule"]
            raise TaskError(f"{type(self).__name__}(rule={given!r}) is now optimizer={given!r}")
        _check(name, dim, lr, init, dtype)
        self._refuse_torch_only(name, options)
        self.name = name
        self.table = Table(
            name,
            dim,
            optimizer=optimizer,
            options={"lr": lr, **options},
            init=init,
            scale=scale,
            seed=seed,
            admit_after=admit_after,
            admit_share=admit_share,
            expire_after=expire_after,
            expire_count=expire_count,
            expire_norm=expire_norm,
        )
        # of the output; rows are float64 if a model is cast to that, and else float32
        self._dtype = dtype
        self._set_row_dtype()
        self._tables: RowSource | None = None  # that a run attached

    @property
    def attached(self) -> bool:
        return self._tables is not None

    @property
    def tables(self) -> RowSource:
        return self._tables if self._tables is not None else default_tables()

    def attach(self, tables: RowSource | None) -> None:
        """Look up rows there from now on; None: in the tables of this process."""
        self._tables = tables

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """False: rows are looked up as before, and get no gradients."""
        self.frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def wanted(self, ids: Tensor) -> Tensor:
        """The ids whose rows a batch needs, on one axis."""
        return ids.reshape(-1)

    @uncompiled
    def forward(self, ids: Tensor) -> Tensor:
        self._check_ids(ids)
        rows, inverse, room = self._lookup(ids)
        return rows_of(rows, inverse, room).view(*ids.shape, self.table.dim).to(self._dtype)

    def extra_repr(self) -> str:
        frozen = ", frozen" if self.frozen else ""
        return f"{self.name!r}, dim={self.table.dim}, optimizer={self.table.optimizer}{frozen}"

    def _lookup(self, ids: Tensor) -> tuple[Tensor, Tensor, Room | None]:
        return self.tables.lookup(self, ids)

    def _refuse_torch_only(self, name: str, options: dict[str, float]) -> None:
        if given := [key for key in options if key in TORCH_ONLY]:
            said = ", ".join(f"{key}={options[key]!r}" for key in given)
            bag = isinstance(self, EmbeddingBag)
            do = "name it padding_id" if bag and given == ["padding_idx"] else "leave it out"
            raise TaskError(
                f"{type(self).__name__} {name!r}: {said} is an option of "
                f"torch.nn.{type(self).__name__}, but rows here have name, dim and the options of "
                f"their server optimizer; {do}"
            )

    def _check_ids(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor):
            raise self.error(
                f"ids are a {type(ids).__name__}", "a tensor of int64", "use torch.as_tensor(ids)"
            )
        if ids.dtype != torch.int64:
            raise self.error(
                f"ids are {ids.dtype}",
                "int64",
                "call .long() where they are whole numbers, hash them where not",
            )

    def error(self, given: str, needed: str, do: str) -> TaskError:
        return TaskError(
            f"{type(self).__name__} {self.name!r}: {given}, but {needed} is needed; {do}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Embedding:
        super()._apply(fn, recurse)
        # .double(), .half(), .to(dtype): there is no parameter to ask
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        self._set_row_dtype()
        return self

    def _set_row_dtype(self) -> None:
        self.table = dataclasses.replace(
            self.table, dtype="float64" if self._dtype == torch.float64 else "float32"
        )


class EmbeddingBag(Embedding):
    """Embedding bag: the sum, mean or maximum over the rows of each bag, as nn.EmbeddingBag.

    ids are [bags, length], or on one axis with `offsets` where each bag begins. Ids equal to
    `padding_id` are left out: not fetched, not counted by the mean. An empty bag gives 0.
    `weights`, of the shape of ids, multiply the rows of a sum; `per_sample_weights`, torch's name,
    is the same.
    """

    def __init__(
        self, name: str, dim: int, mode: Mode = "sum", *, padding_id: int | None = None, **more: Any
    ):
        super().__init__(name, dim, **more)
        if mode not in MODES:
            raise self.error(
                f"mode={mode!r}", " or ".join(MODES), "mode='sum' adds the rows of a bag"
            )
        self.mode, self.padding_id = mode, padding_id

    def wanted(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        return flat if self.padding_id is None else flat[flat != self.padding_id]

    @uncompiled
    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        self._check_ids(ids)
        starts = self._starts(ids, offsets)
        if per_sample_weights is not None:
            if weights is not None:
                raise self.error(
                    "weights and per_sample_weights",
                    "one of them",
                    "leave one out: they are two names of one argument",
                )
            weights = per_sample_weights
        if weights is not None:
            weights = self._weights(ids, weights)
        rows, inverse, room = self._lookup(ids)
        if not len(rows):
            out = rows.new_zeros(len(starts), self.table.dim)
        else:
            out = bags_of(rows, inverse, starts, self.mode, weights, room)
        return out.to(self._dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}"

    def _starts(self, ids: Tensor, offsets: Tensor | None) -> Tensor:
        """Where each bag begins among the ids that are wanted."""
        if ids.ndim == 2:
            if offsets is not None:
                raise self.error(
                    "2-D ids with offsets", "either of them", "leave offsets out: each row is a bag"
                )
            bags, length = ids.shape
            ends = (
                torch.full((bags,), length, device=ids.device)
                if self.padding_id is None
                else (ids != self.padding_id).sum(1)
            )
            return ends.cumsum(0) - ends
        if ids.ndim != 1 or offsets is None:
            raise self.error(
                f"ids of shape {list(ids.shape)}{'' if offsets is None else ' with offsets'}",
                "[bags, length], or one axis and offsets where bags begin",
                "give offsets=tensor([0, ...]) or 2-D ids padded with padding_id",
            )
        if offsets.dtype != torch.int64 or offsets.ndim != 1:
            raise self.error(
                f"offsets are {offsets.dtype} of shape {list(offsets.shape)}",
                "int64 on one axis",
                "call .long()",
            )
        inside = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        if len(offsets) and (inside[0] != 0 or bool((inside.diff() < 0).any())):
            raise self.error(
                f"offsets {offsets[:5].tolist()}... over {len(ids)} ids",
                "offsets that begin at 0 and rise to at most that",
                "sort them",
            )
        if not len(offsets) and len(ids):
            raise self.error(
                f"{len(ids)} ids and no offsets",
                "offsets that begin at 0",
                "offsets=tensor([0]) is one bag of all",
            )
        if self.padding_id is None:
            return offsets
        # how many wanted ids are before each position
        before = F.pad((ids != self.padding_id).cumsum(0), (1, 0))
        return before[offsets]

    def _weights(self, ids: Tensor, weights: Tensor) -> Tensor:
        if self.mode != "sum":
            raise self.error(
                f"weights with mode={self.mode!r}", "mode='sum'", "leave weights out or sum"
            )
        if weights.shape != ids.shape:
            raise self.error(
                f"weights of shape {list(weights.shape)}",
                f"the shape of ids, {list(ids.shape)},",
                "give one an id",
            )
        flat = weights.reshape(-1).to(
            torch.float64 if self._dtype == torch.float64 else torch.float32
        )
        return flat if self.padding_id is None else flat[ids.reshape(-1) != self.padding_id]


def _check(name: str, dim: int, lr: float, init: str, dtype: torch.dtype) -> None:
    if not isinstance(name, str) or not name:
        raise TaskError(
            f"Embedding(name={name!r}), but a name for its table is needed, such as 'users'"
        )
    if not isinstance(dim, int) or dim < 1:
        raise TaskError(
            f"Embedding {name!r}: dim={dim!r}, but a whole number of at least 1 is needed"
        )
    if not (lr > 0 and math.isfinite(lr)):
        raise TaskError(
            f"Embedding {name!r}: lr={lr}, but a positive number is needed; "
            "call requires_grad_(False) on it to keep its rows as they are"
        )
    if init not in ("zeros", "uniform", "normal"):
        raise TaskError(
            f"Embedding {name!r}: init={init!r}, but zeros, uniform or normal is needed"
        )
    if dtype not in (torch.float32, torch.float64):
        raise TaskError(
            f"Embedding {name!r}: dtype={dtype}, but rows are kept in torch.float32 or "
            "torch.float64; use one of them"
        )
