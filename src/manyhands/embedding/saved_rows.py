"""Rows of embeddings in a checkpoint, and loading them into a model.

They are files of tables, read in pieces (`SavedTable`); in older checkpoints they are tensors named
"<table>/<part>".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from manyhands.core import Tensors
from manyhands.embedding.default_rows import new_tables
from manyhands.embedding.modules import Embedding
from manyhands.errors import CheckpointError


class SavedTable(Protocol):
    """A table of a checkpoint (`server.snapshots.table_reader`)."""

    @property
    def dim(self) -> int: ...
    def contents(self) -> Iterator[Mapping[str, Any]]:
        """Arrays of all rows in bounded pieces, to be restored in this order."""
        ...


def saved_tables(saved: Tensors) -> dict[str, Tensors]:
    """The tensors of a checkpoint under "<table>/<part>", by table."""
    names = [
        k.removesuffix("/ids")
        for k in saved
        if k.endswith("/ids") and f"{k.removesuffix('/ids')}/values" in saved
    ]
    found: dict[str, Tensors] = {name: {} for name in names}
    for key, value in saved.items():
        # parts of a table "a/b" are not of "a", and the state of "a" is not of a table "a/state"
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


def load_rows(
    model: nn.Module, saved: Tensors, files: Mapping[str, SavedTable] = MappingProxyType({})
) -> None:
    """Load the rows of a checkpoint into a model that is not part of a run: into the tables of its
    own if it has some, else into those of this process."""
    modules = {m.name: m for m in model.modules() if isinstance(m, Embedding)}
    older = saved_tables(saved)
    dims = {name: content["values"].shape[1] for name, content in older.items()}
    dims |= {name: table.dim for name, table in files.items()}
    tables = dims
    wrong = [f"  only in the model:      the embedding {n!r}" for n in modules if n not in tables]
    wrong += [f"  only in the checkpoint: the embedding {n!r}" for n in tables if n not in modules]
    for name in modules.keys() & tables.keys():
        dim, given = modules[name].table.dim, dims[name]
        if dim != given:
            wrong.append(
                f"  other shape: the embedding {name!r}: model dim={dim}, checkpoint dim={given}"
            )
    if wrong:
        lines = ["the checkpoint is of another model:", *wrong]
        raise CheckpointError("\n".join([*lines, "load it into the model it was saved from"]))
    for name, module in modules.items():
        if module.tables.of_run:
            raise module.error(
                "it is part of a run",
                "a model of its own",
                "go on from a checkpoint with resume=True",
            )
        if name in files:
            pieces = _as_dtype(files[name].contents(), np.dtype(module.table.dtype))
            module.tables.replace_pieces(module.table, pieces)
            continue
        dtype = torch.float64 if module.table.dtype == "float64" else torch.float32
        content = {k: v.to(dtype) if v.is_floating_point() else v for k, v in older[name].items()}
        module.tables.replace_rows(module.table, content)


def _as_dtype(
    contents: Iterator[Mapping[str, Any]], dtype: np.dtype
) -> Iterator[Mapping[str, Any]]:
    for content in contents:
        yield {k: x.astype(dtype) if x.dtype.kind == "f" else x for k, x in content.items()}


def load_own_rows(
    model: nn.Module, saved: Tensors, files: Mapping[str, SavedTable] = MappingProxyType({})
) -> None:
    """Load the rows of a checkpoint into new tables, which only this model has."""
    own = new_tables()
    for module in model.modules():
        if isinstance(module, Embedding):
            module.attach(own)
    load_rows(model, saved, files)
