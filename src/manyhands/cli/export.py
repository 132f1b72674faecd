"""`manyhands export RUN model.safetensors`: write the weights and the rows of embeddings.

Tensors are copied one by one from file to file, so one process can export a model that does not fit
into its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from manyhands.assembly.tables import PREFIX
from manyhands.embedding.saved_rows import saved_tables
from manyhands.exchange.solo import SoloGroup
from manyhands.recover import sharded_file
from manyhands.recover.checkpoint import TENSORS, find
from manyhands.split.shard_spec import ShardSpec

MODEL = "model/"


@dataclass(frozen=True)
class ExportedTensor:
    """A whole tensor to write."""

    spec: ShardSpec
    tensor: Tensor


def export(run: Path, out: Path, best: str | None = None) -> Path:
    """Write the newest checkpoint of `run`, or the best by a metric, to `out`."""
    path, snapshot = find(run, best, only=lambda name: name.startswith(f"state/{PREFIX}"))
    tables = saved_tables({k.removeprefix(PREFIX): v for k, v in snapshot.state.items()})
    rows = {
        f"{PREFIX}{name}/{part}": content[part]
        for name, content in tables.items()
        for part in ("ids", "values")
    }
    with sharded_file.Reader(path / TENSORS) as saved:
        names = [name.removeprefix(MODEL) for name in saved.names if name.startswith(MODEL)]
        shapes = {name: (saved.dtype(MODEL + name), saved.shape(MODEL + name)) for name in names}
        shapes |= {name: (value.dtype, tuple(value.shape)) for name, value in rows.items()}

        def tensors() -> Iterator[ExportedTensor]:
            for name, (_, shape) in shapes.items():
                yield ExportedTensor(
                    ShardSpec(name, shape),
                    rows[name] if name in rows else saved.whole(MODEL + name),
                )

        sharded_file.write(
            out,
            shapes,
            tensors(),
            SoloGroup(),
            {"format": "pt", "round": str(snapshot.round)},
        )
    if tables:
        said = ", ".join(f"{name} ({len(content['ids'])} rows)" for name, content in tables.items())
        print(
            f"with embeddings, as {PREFIX}NAME/ids and {PREFIX}NAME/values: {said}", file=sys.stderr
        )
    return out
