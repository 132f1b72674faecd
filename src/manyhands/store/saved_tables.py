"""Saved tables of `mh.Store`: a folder with one safetensors file a table, and their list.

    tables.json         every table's fields, and the name of its file
    0.safetensors ...   what `dump` gives: ids, values, state/<name>, meta, version

The folder appears as a whole: it is written under another name first.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from manyhands.core import Table, TableStore, Tensors
from manyhands.errors import CheckpointError

LIST, FORMAT = "tables.json", 1


def save_tables(path: Path, store: TableStore, tables: Sequence[Table]) -> None:
    """Each table is saved as it is at one moment, one after the other."""
    if path.exists() and not (path / LIST).is_file() and (path.is_file() or any(path.iterdir())):
        raise CheckpointError(
            f"{path} is there and holds no saved tables; give a new folder, or one that was saved "
            "before, which is replaced"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    partial, old = (path.parent / f".{path.name}.{kind}-{mark}" for kind in ("partial", "old"))
    partial.mkdir()
    try:
        entries = []
        for number, table in enumerate(tables):
            file = f"{number}.safetensors"
            save_file(store.dump(table.name), str(partial / file))
            entries.append({"file": file, "table": dataclasses.asdict(table)})
        written = json.dumps({"format": FORMAT, "tables": entries}, indent=1)
        (partial / LIST).write_text(written + "\n")
        if path.exists():
            os.rename(path, old)
        os.rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def saved_tables_in(path: Path) -> list[tuple[Table, Path]]:
    """The tables of a folder, and their files."""
    try:
        listed: dict[str, Any] = json.loads((path / LIST).read_text())
        if listed["format"] != FORMAT:
            raise CheckpointError(
                f"{path} was saved in format {listed['format']}, and this version reads "
                f"{FORMAT}; load it with the version that saved it"
            )
        return [(Table(**entry["table"]), path / entry["file"]) for entry in listed["tables"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(
            f"{path} holds no tables that can be read ({e}); give a folder that Store.save wrote"
        ) from e


def content_of(file: Path) -> Tensors:
    try:
        return load_file(str(file))
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{file} cannot be read ({e}); save the tables again") from e
