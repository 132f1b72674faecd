"""Known tables: layouts as the client of one connection knows them.

Another client may have dropped a table and made it anew; a request of another shape must not be
read as if it had the new one.
"""

from __future__ import annotations

from manyhands.core import Table
from manyhands.errors import StoreError

Layout = tuple[Table, int]  # spec, and how many elements of a dense one are stored here


class KnownTables:
    def __init__(self) -> None:
        self._of: dict[str, Layout] = {}

    def check(self, name: str, now: Layout) -> Layout:
        """`now` itself, where it is what the client had when it first used the table."""
        known = self._of.setdefault(name, now)
        if known is not now:
            old, new = known[0], now[0]
            if (old.dim, old.length, old.dtype) != (new.dim, new.length, new.dtype):
                raise StoreError(
                    f"table {name!r} was dropped and made anew, with {_shape(new)}; it had "
                    f"{_shape(old)} when this client first used it: call tables() to use it as "
                    "it is"
                )
            self._of[name] = now
        return now

    def forget(self, name: str | None = None) -> None:
        """The client knows the table as it is, or (None) all of them."""
        if name is None:
            self._of.clear()
        else:
            self._of.pop(name, None)


def _shape(table: Table) -> str:
    return f"dim={table.dim}, length={table.length}, dtype={table.dtype}"
