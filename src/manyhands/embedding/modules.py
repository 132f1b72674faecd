"""Embeddings whose rows stand in a Store: `mh.Embedding` and `mh.EmbeddingBag`, over raw int64 ids of any range.

    forward     u, inverse = distinct(ids);   W = pull(u);   out = W[inverse]
    backward    g = dloss/dW, one row for each distinct id;   push(u, g): the table's rule makes the step where the row is

No parameter, no vocabulary, no size: a row is made when its id first comes. In eval mode, and without gradients, rows are only
read. A run attaches a model's modules to its store (`embedding.tables`) and pushes once a step. A module that nobody attached, in a
plain script, keeps its rows in this process and pushes in `loss.backward()`; there modules of one name share one table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.core import Table, Tensors
from manyhands.errors import CheckpointError, TaskError

Init = Literal["zeros", "uniform", "normal"]
Mode = Literal["sum", "mean", "max"]
MODES = ("sum", "mean", "max")
Forward = TypeVar("Forward", bound=Callable[..., Tensor])


def uncompiled(forward: Forward) -> Forward:
    """torch.compile works around it: nobody can trace a store and numba's kernels; the rest of the model is compiled."""
    disabled: Any = None

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal disabled
        if disabled is None:
            if (
                "torch._dynamo" not in sys.modules
            ):  # nothing is compiled here, and importing it takes a second
                return forward(*args, **kwargs)
            disabled = torch.compiler.disable(forward)
        out: Tensor = disabled(*args, **kwargs)
        return out

    return call  # type: ignore[return-value]


class RowSource(Protocol):
    """Where modules take rows from (`embedding.tables.Tables`)."""

    def take(self, module: Embedding, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the distinct ones among `module.wanted(ids)`, and for each of those an index into the rows."""
        ...

    def put(self, table: Table, content: Tensors) -> None:
        """These rows in place of those that the table has."""
        ...


class Embedding(nn.Module):
    """`dim` numbers for every int64 id, as nn.Embedding without a vocabulary. ids of any shape; out has one axis more.

    `optimizer` is the server optimizer of its rows, `lr` and `options` are its own; the torch optimizer of the model does not see them.
    """

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
        _check(name, dim, lr, init, dtype)
        self.name = name
        self.table = Table(
            name, dim, optimizer=optimizer, options={"lr": lr, **options}, init=init, scale=scale, seed=seed,
            admit_after=admit_after, admit_share=admit_share,
            expire_after=expire_after, expire_count=expire_count, expire_norm=expire_norm,
        )  # fmt: skip
        self._dtype = dtype  # of what comes out; rows are float32 whatever a model is cast to, or float64 where it is that
        self._set_rows()
        self._tables: RowSource | None = None  # that a run attached

    def attach(self, tables: RowSource | None) -> None:
        """Take rows from there from now on; None: from this process's own."""
        self._tables = tables

    def wanted(self, ids: Tensor) -> Tensor:
        """The ids whose rows a batch needs, on one axis."""
        return ids.reshape(-1)

    @uncompiled
    def forward(self, ids: Tensor) -> Tensor:
        self._check_ids(ids)
        rows, inverse = self._take(ids)
        from manyhands.embedding.gather import (
            rows_of,  # brings numba: only models with embeddings need it
        )

        return rows_of(rows, inverse).view(*ids.shape, self.table.dim).to(self._dtype)

    def extra_repr(self) -> str:
        return f"{self.name!r}, dim={self.table.dim}, optimizer={self.table.optimizer}"

    def _take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        tables = self._tables if self._tables is not None else _in_this_process()
        return tables.take(self, ids)

    def _check_ids(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor):
            raise self._error(
                f"ids are a {type(ids).__name__}", "a tensor of int64", "use torch.as_tensor(ids)"
            )
        if ids.dtype != torch.int64:
            raise self._error(
                f"ids are {ids.dtype}",
                "int64",
                "call .long() where they are whole numbers, hash them where not",
            )

    def _error(self, given: str, needed: str, do: str) -> TaskError:
        return TaskError(
            f"{type(self).__name__} {self.name!r}: {given}, but {needed} is needed; {do}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Embedding:
        super()._apply(fn, recurse)
        self._dtype = fn(
            torch.empty(0, dtype=self._dtype)
        ).dtype  # .double(), .half(), .to(dtype): there is no parameter to ask
        self._set_rows()
        return self

    def _set_rows(self) -> None:
        self.table = dataclasses.replace(
            self.table, dtype="float64" if self._dtype == torch.float64 else "float32"
        )


class EmbeddingBag(Embedding):
    """The sum, mean or maximum over the rows of each bag, as nn.EmbeddingBag: ids [bags, length], or ids on one axis with
    `offsets` where each bag begins. Ids equal to `padding_id` are not there: not fetched, not counted by the mean. An empty bag
    gives 0. `weights`, of the shape of ids, multiply the rows of a sum.
    """

    def __init__(
        self, name: str, dim: int, mode: Mode = "sum", *, padding_id: int | None = None, **more: Any
    ):
        super().__init__(name, dim, **more)
        if mode not in MODES:
            raise self._error(
                f"mode={mode!r}", " or ".join(MODES), "mode='sum' adds the rows of a bag"
            )
        self.mode, self.padding_id = mode, padding_id

    def wanted(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        return flat if self.padding_id is None else flat[flat != self.padding_id]

    @uncompiled
    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        self._check_ids(ids)
        starts = self._starts(ids, offsets)
        if weights is not None:
            weights = self._weights(ids, weights)
        rows, inverse = self._take(ids)
        if not len(rows):
            out = rows.new_zeros(len(starts), self.table.dim)
        else:
            from manyhands.embedding.gather import bags_of

            out = bags_of(rows, inverse, starts, self.mode, weights)
        return out.to(self._dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}"

    def _starts(self, ids: Tensor, offsets: Tensor | None) -> Tensor:
        """Where each bag begins among the ids that are wanted."""
        if ids.ndim == 2:
            if offsets is not None:
                raise self._error(
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
            raise self._error(
                f"ids of shape {list(ids.shape)}{'' if offsets is None else ' with offsets'}",
                "[bags, length], or one axis and offsets where bags begin",
                "give offsets=tensor([0, ...]) or 2-D ids padded with padding_id",
            )
        if offsets.dtype != torch.int64 or offsets.ndim != 1:
            raise self._error(
                f"offsets are {offsets.dtype} of shape {list(offsets.shape)}",
                "int64 on one axis",
                "call .long()",
            )
        inside = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        if len(offsets) and (inside[0] != 0 or bool((inside.diff() < 0).any())):
            raise self._error(
                f"offsets {offsets[:5].tolist()}... over {len(ids)} ids",
                "offsets that begin at 0 and rise to at most that",
                "sort them",
            )
        if not len(offsets) and len(ids):
            raise self._error(
                f"{len(ids)} ids and no offsets",
                "offsets that begin at 0",
                "offsets=tensor([0]) is one bag of all",
            )
        if self.padding_id is None:
            return offsets
        before = F.pad((ids != self.padding_id).cumsum(0), (1, 0))  # wanted ids ahead of each place
        return before[offsets]

    def _weights(self, ids: Tensor, weights: Tensor) -> Tensor:
        if self.mode != "sum":
            raise self._error(
                f"weights with mode={self.mode!r}", "mode='sum'", "leave weights out or sum"
            )
        if weights.shape != ids.shape:
            raise self._error(
                f"weights of shape {list(weights.shape)}",
                f"the shape of ids, {list(ids.shape)},",
                "give one an id",
            )
        flat = weights.reshape(-1).to(
            torch.float64 if self._dtype == torch.float64 else torch.float32
        )
        return flat if self.padding_id is None else flat[ids.reshape(-1) != self.padding_id]


# -- rows of this process, for modules that no run has attached --

_open: Callable[[], RowSource] | None = None
_own: RowSource | None = None


def keep_rows_in(open_tables: Callable[[], RowSource]) -> None:
    """Say what holds the rows of modules that are not attached; it is opened when one of them first asks."""
    global _open, _own
    _open, _own = open_tables, None


def _in_this_process() -> RowSource:
    global _own
    if _own is None:
        if _open is None:
            raise TaskError(
                "an Embedding is not attached to a store and nothing holds rows in this process; import manyhands, which "
                "sees to that, or attach compute.tables.Tables(model, store)"
            )
        _own = _open()
    return _own


def saved_tables(saved: Tensors) -> dict[str, Tensors]:
    """What a checkpoint has under "<table>/<part>", by table."""
    names = [
        k.removesuffix("/ids")
        for k in saved
        if k.endswith("/ids") and f"{k.removesuffix('/ids')}/values" in saved
    ]
    found: dict[str, Tensors] = {name: {} for name in names}
    for key, value in saved.items():
        # of a table "a" those of a table "a/b" are no parts, nor is the state of "a" one of a table "a/state"
        owners = [
            name
            for name in names
            if key.startswith(f"{name}/") and _is_part(key.removeprefix(f"{name}/"))
        ]
        if owners:
            owner = max(owners, key=len)
            found[owner][key.removeprefix(f"{owner}/")] = value
    return found


def _is_part(name: str) -> bool:
    return name in ("ids", "values", "meta", "version") or name.startswith("state/")


def load_rows(model: nn.Module, saved: Tensors) -> None:
    """Rows of a checkpoint, under "<table>/<part>", for a model that no run has attached."""
    modules = {m.name: m for m in model.modules() if isinstance(m, Embedding)}
    tables = saved_tables(saved)
    wrong = [f"  only in the model:      the embedding {n!r}" for n in modules if n not in tables]
    wrong += [f"  only in the checkpoint: the embedding {n!r}" for n in tables if n not in modules]
    for name in modules.keys() & tables.keys():
        dim, given = modules[name].table.dim, tables[name]["values"].shape[1]
        wrong += (
            [f"  other shape: the embedding {name!r}: model dim={dim}, checkpoint dim={given}"]
            if dim != given
            else []
        )
    if wrong:
        raise CheckpointError(
            "\n".join(
                [
                    "the checkpoint is of another model:",
                    *wrong,
                    "load it into the model it was saved from",
                ]
            )
        )
    for name, module in modules.items():
        if module._tables is not None:
            raise module._error(
                "it is part of a run",
                "a model of its own",
                "go on from a checkpoint with resume=True",
            )
        dtype = torch.float64 if module.table.dtype == "float64" else torch.float32
        content = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tables[name].items()}
        _in_this_process().put(module.table, content)


def _check(name: str, dim: int, lr: float, init: str, dtype: torch.dtype) -> None:
    if not isinstance(name, str) or not name:
        raise TaskError(
            f"Embedding name={name!r}, but a name for its table is needed, such as 'users'"
        )
    if not isinstance(dim, int) or dim < 1:
        raise TaskError(
            f"Embedding {name!r}: dim={dim!r}, but a whole number of at least 1 is needed"
        )
    if not (lr > 0 and math.isfinite(lr)):
        raise TaskError(
            f"Embedding {name!r}: lr={lr}, but a positive number is needed; call .eval() on it to keep its rows as they are"
        )
    if init not in ("zeros", "uniform", "normal"):
        raise TaskError(
            f"Embedding {name!r}: init={init!r}, but zeros, uniform or normal is needed"
        )
    if dtype not in (torch.float32, torch.float64):
        raise TaskError(
            f"Embedding {name!r}: dtype={dtype}, but torch.float32 or torch.float64 is needed: what rows are kept in"
        )
