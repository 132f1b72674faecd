"""Namespaced store: a store around a store that puts a namespace before the names of tables.

    table "users" in namespace "team-a"   is "team-a::users" to the servers; errors name it as the
                                          caller does

Runs and stores of different namespaces can so use one server without knowing of each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

from torch import Tensor

from manyhands.core import (
    Late,
    PushOptions,
    Reply,
    Rows,
    Table,
    TableSnapshot,
    TableStore,
    Tensors,
    Tick,
    Work,
)
from manyhands.errors import ServerLost, StoreError
from manyhands.server.protocol.table_messages import StoredPart
from manyhands.server.validate import NAMESPACE_END, check_namespace


class ClientStore(TableStore, Protocol):
    """A store as `mh.Store` uses it: beside rows, tables that come and go."""

    def stored(self) -> list[StoredPart]:
        """All tables that are there, whoever made them; the store can use them from now on."""
        ...

    def delete(self, name: str, ids: Tensor) -> int: ...
    def drop(self, name: str) -> bool: ...


class NamespacedStore:
    """`store` is not used by anybody else."""

    def __init__(self, store: TableStore, namespace: str):
        check_namespace(namespace)
        self.store, self.rank, self.size = store, store.rank, store.size
        self.background = store.background
        self._prefix = namespace + NAMESPACE_END

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors with the names that the caller knows."""
        try:
            yield
        except (StoreError, ServerLost) as e:
            if self._prefix not in str(e):
                raise
            raise type(e)(str(e).replace(self._prefix, "")) from e

    def _long(self, name: str) -> str:
        if NAMESPACE_END in name:
            raise StoreError(
                f"table {name!r}; a name without {NAMESPACE_END} is needed, which divides "
                "namespaces from names"
            )
        return self._prefix + name

    def _rows(self, rows: Rows) -> Rows:
        return {self._long(name): ids for name, ids in rows.items()}

    def _tensors(self, given: Tensors) -> Tensors:
        return {self._long(name): x for name, x in given.items()}

    def short(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(self._prefix): x for name, x in found.items()}

    # -- rows --

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        return self.pull_async(rows, into, remember=remember).result()

    def pull_async(
        self, rows: Rows, into: Tensors | None = None, *, remember: bool = False
    ) -> Reply:
        where = None if into is None else self._tensors(into)
        with self.errors():
            reply = self.store.pull_async(self._rows(rows), where, remember=remember)
        return _NamedRequest(self, reply.result)

    def push_buffers(self, rows: Rows) -> Tensors:
        with self.errors():
            return self.short(self.store.push_buffers(self._rows(rows)))

    def push(self, rows: Rows, updates: Tensors, **options: Unpack[PushOptions]) -> Work:
        with self.errors():
            work = self.store.push(self._rows(rows), self._tensors(updates), **options)
        return _NamedRequest(self, work.wait)

    def exchange(
        self, rows: Rows, updates: Tensors, *, wants: Rows, **options: Unpack[PushOptions]
    ) -> Reply:
        given, wanted = self._tensors(updates), self._rows(wants)
        with self.errors():
            reply = self.store.exchange(self._rows(rows), given, wants=wanted, **options)
        return _NamedRequest(self, reply.result)

    def flush(self) -> None:
        with self.errors():
            self.store.flush()

    # -- clocks and steps --

    def tick(
        self,
        staleness: float = math.inf,
        quorum: int | None = None,
        *,
        late: Late = "drop",
        delay: int | None = None,
    ) -> Tick:
        with self.errors():
            return self.store.tick(staleness, quorum, late=late, delay=delay)

    def claim_step(self, limit: int, shared: bool) -> int | None:
        return self.store.claim_step(limit, shared)

    def request_sync(self) -> None:
        self.store.request_sync()

    # -- tables --

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        named = dataclasses.replace(table, name=self._long(table.name))
        with self.errors():
            self.store.create(named, values, state)

    def dump(self, name: str) -> Tensors:
        with self.errors():
            return self.store.dump(self._long(name))

    def restore(self, name: str, content: Tensors) -> None:
        with self.errors():
            self.store.restore(self._long(name), content)

    def snapshot(
        self,
        names: Sequence[str],
        folder: Path,
        tag: str,
        base: str = "",
        incremental: bool = False,
    ) -> TableSnapshot:
        long = [self._long(name) for name in names]
        with self.errors():
            return _NamedSnapshot(self, self.store.snapshot(long, folder, tag, base, incremental))

    def restore_pieces(self, name: str, contents: Iterable[Mapping[str, Any]]) -> None:
        with self.errors():
            self.store.restore_pieces(self._long(name), contents)

    def stats(self) -> dict[str, float]:
        """Hot rows of this namespace only; other counters are of the servers as a whole."""
        hot = f"hot/{self._prefix}"
        return {
            key.replace(self._prefix, "", 1): n
            for key, n in self.store.stats().items()
            if not key.startswith("hot/") or key.startswith(hot)
        }

    def close(self) -> None:
        with self.errors():
            self.store.close()


class NamespacedClient(NamespacedStore):
    """The same around a store whose tables come and go."""

    store: ClientStore

    def __init__(self, store: ClientStore, namespace: str):
        super().__init__(store, namespace)

    def stored(self) -> list[StoredPart]:
        return [
            StoredPart(
                dataclasses.replace(part.table, name=part.table.name.removeprefix(self._prefix)),
                part.rows,
                part.nbytes,
            )
            for part in self.store.stored()
            if part.table.name.startswith(self._prefix)
        ]

    def delete(self, name: str, ids: Tensor) -> int:
        with self.errors():
            return self.store.delete(self._long(name), ids)

    def drop(self, name: str) -> bool:
        with self.errors():
            return self.store.drop(self._long(name))


class _NamedRequest:
    """A request under way; its rows come under the names that the caller knows."""

    def __init__(self, store: NamespacedStore, finish: Callable[[], Tensors | None]):
        self._store, self._finish = store, finish
        self._found: Tensors | None = None

    def result(self) -> Tensors:
        if self._found is None:
            with self._store.errors():
                self._found = self._store.short(self._finish() or {})
        return self._found

    def wait(self) -> None:
        self.result()


class _NamedSnapshot:
    """A snapshot under way; its files come under the names that the caller knows."""

    def __init__(self, store: NamespacedStore, snapshot: TableSnapshot):
        self._store, self._snapshot = store, snapshot

    @property
    def base(self) -> str:
        return self._snapshot.base

    def finish(self) -> Mapping[str, Sequence[tuple[str, int, str]]]:
        with self._store.errors():
            return self._store.short(self._snapshot.finish())

    def end(self, good: bool) -> None:
        self._snapshot.end(good)
