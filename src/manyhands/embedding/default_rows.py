"""Default rows: tables in this process, for embedding modules that no run has attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.errors import TaskError

_open: Callable[[], Any] | None = None
_default: Any = None


def keep_rows_in(open_tables: Callable[[], Any]) -> None:
    """Set the tables of modules that are not attached; they are opened on first use."""
    global _open, _default
    _open, _default = open_tables, None


def default_tables() -> Any:
    """A `RowSource` that all modules share which are not attached."""
    global _default
    if _default is None:
        _default = new_tables()
    return _default


def new_tables() -> Any:
    """Tables that no module has yet, of the kind that default tables are."""
    if _open is None:
        raise TaskError(
            "an Embedding is not attached to a store, and this process has no tables for such "
            "modules; import manyhands, which sets them, or attach "
            "embedding.tables.EmbeddingTables(model, store)"
        )
    return _open()
