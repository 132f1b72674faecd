"""Rows of embeddings in a checkpoint: tensors named "<table>/<part>", and loading them."""

from __future__ import annotations

import torch
from torch import nn

from manyhands.core import Tensors
from manyhands.embedding.modules import Embedding, new_tables
from manyhands.errors import CheckpointError


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


def load_rows(model: nn.Module, saved: Tensors) -> None:
    """Load the rows of a checkpoint into a model that is not part of a run: into the tables of its
    own if it has some, else into those of this process."""
    modules = {m.name: m for m in model.modules() if isinstance(m, Embedding)}
    tables = saved_tables(saved)
    wrong = [f"  only in the model:      the embedding {n!r}" for n in modules if n not in tables]
    wrong += [f"  only in the checkpoint: the embedding {n!r}" for n in tables if n not in modules]
    for name in modules.keys() & tables.keys():
        dim, given = modules[name].table.dim, tables[name]["values"].shape[1]
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
        dtype = torch.float64 if module.table.dtype == "float64" else torch.float32
        content = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tables[name].items()}
        module.tables.replace_rows(module.table, content)


def load_own_rows(model: nn.Module, saved: Tensors) -> None:
    """Load the rows of a checkpoint into new tables, which only this model has."""
    own = new_tables()
    for module in model.modules():
        if isinstance(module, Embedding):
            module.attach(own)
    load_rows(model, saved)
