"""`manyhands export RUN model.safetensors`: write the weights and the rows of embeddings.

Tensors are copied one by one from file to file, so one process can export a model that does not fit
into its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manyhands.assembly.tables import PREFIX, saved_readers
from manyhands.embedding.saved_rows import saved_tables
from manyhands.errors import CheckpointError, PlanError
from manyhands.exchange.solo import SoloGroup
from manyhands.recover import directory, sharded_file
from manyhands.recover.checkpoint import TENSORS, find
from manyhands.server.snapshots.table_reader import RowIndex
from manyhands.split.shard_spec import ShardSpec

MODEL = "model/"
ROWS = 1 << 16  # of an embedding, at a time


@dataclass(frozen=True)
class ExportedTensor:
    """A whole tensor to write."""

    spec: ShardSpec
    tensor: Tensor


def export_weights(
    file: Path, out: Path, best: str | None, run: Path | None, part: str | None
) -> Path:
    """Of a run's directory; of a script: of `run`, or of its last run."""
    if part is not None:
        raise PlanError(
            f"--part={part} has no effect on a .safetensors file, which holds all weights by name; "
            "leave it out"
        )
    if file.is_dir() and run is not None:
        raise CheckpointError(f"{file} is a run already, and --dir={run} names another; give one")
    given = None if run is None else str(run)
    path = file if file.is_dir() else directory.choose(Path("runs"), file.stem, given, resume=True)
    return export(Path(path), out, best)


def export(run: Path, out: Path, best: str | None = None) -> Path:
    """Write the newest checkpoint of `run`, or the best by a metric, to `out`."""
    path, snapshot = find(run, best, only=lambda name: name.startswith(f"state/{PREFIX}"))
    older = saved_tables({k.removeprefix(PREFIX): v for k, v in snapshot.state.items()})
    rows = {
        f"{PREFIX}{name}/{part}": content[part]
        for name, content in older.items()
        for part in ("ids", "values")
    }
    tables = {name: reader.index() for name, reader in saved_readers(path).items()}
    with sharded_file.Reader(path / TENSORS) as saved:
        names = [name.removeprefix(MODEL) for name in saved.names if name.startswith(MODEL)]
        shapes = {name: (saved.dtype(MODEL + name), saved.shape(MODEL + name)) for name in names}
        plain = {*shapes, *rows}
        shapes |= {name: (value.dtype, tuple(value.shape)) for name, value in rows.items()}
        for name, table in tables.items():
            values = torch.from_numpy(table.values(0, 0))
            shapes[f"{PREFIX}{name}/ids"] = torch.int64, (table.ids.size,)
            shapes[f"{PREFIX}{name}/values"] = values.dtype, (table.ids.size, values.shape[1])

        def tensors() -> Iterator[ExportedTensor]:
            for name in plain:
                yield ExportedTensor(
                    ShardSpec(name, shapes[name][1]),
                    rows[name] if name in rows else saved.whole(MODEL + name),
                )
            for name, table in tables.items():
                yield from _rows(name, table)

        sharded_file.write(
            out,
            shapes,
            tensors(),
            SoloGroup(),
            {"format": "pt", "round": str(snapshot.round)},
        )
    counts = {name: len(content["ids"]) for name, content in older.items()}
    counts |= {name: table.ids.size for name, table in tables.items()}
    if counts:
        said = ", ".join(f"{name} ({count} rows)" for name, count in counts.items())
        print(
            f"with embeddings, as {PREFIX}NAME/ids and {PREFIX}NAME/values: {said}", file=sys.stderr
        )
    return out


def _rows(name: str, table: RowIndex) -> Iterator[ExportedTensor]:
    """Ids, and values in parts: all of them may be more than fits into memory."""
    ids, values, n = f"{PREFIX}{name}/ids", f"{PREFIX}{name}/values", table.ids.size
    yield ExportedTensor(ShardSpec(ids, (n,)), torch.from_numpy(table.ids))
    shape, parts = (n, table.values(0, 0).shape[1]), max(1, -(-n // ROWS))
    for i in range(parts):
        spec = ShardSpec(values, shape, 0, parts, i)
        [(start, stop)] = spec.ranges
        yield ExportedTensor(spec, torch.from_numpy(table.values(start, stop)))
