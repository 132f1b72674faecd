"""Rows of embeddings in the newest checkpoint of a run, to be compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from manyhands.assembly.tables import saved_readers
from manyhands.recover.checkpoint import NOTHING, find


def saved_rows(run: Path) -> dict[str, dict[str, np.ndarray]]:
    """By table: ids, values, optimizer state, push counts and times, version."""
    path, _ = find(run, only=NOTHING)
    return {name: reader.whole() for name, reader in saved_readers(path).items()}


def assert_same_rows(
    a: dict[str, dict[str, np.ndarray]], b: dict[str, dict[str, np.ndarray]]
) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].keys() == b[name].keys()
        for key, x in a[name].items():
            np.testing.assert_array_equal(b[name][key], x, err_msg=f"{name} {key}")
