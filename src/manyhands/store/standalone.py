"""Standalone store, `mh.Store`: a parameter server to use by itself, as from a notebook."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.core import Reply, Rows, Table, Tensors, Work
from manyhands.errors import ManyhandsError, StoreError
from manyhands.observe.text import size
from manyhands.server.validate import NAMESPACE_END, unknown_table
from manyhands.store import backends
from manyhands.store.arguments import FIELDS, ids_from, table_of, updates_from
from manyhands.store.saved_tables import content_of, save_tables, saved_tables_in


@dataclass(frozen=True, repr=False)
class StoredTable(Table):
    """A table that is there, with how many rows (elements of a dense one) and bytes it has."""

    rows: int = 0
    bytes: int = 0

    def __repr__(self) -> str:
        set_by_hand = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(Table)
            if f.name not in ("name", "options") and getattr(self, f.name) != f.default
        ]
        set_by_hand += [f"{key}={x!r}" for key, x in self.options.items()]
        said = ", ".join([repr(self.name), *set_by_hand])
        count = f"{self.rows:,} " + ("rows" if self.length is None else "numbers")
        return f"StoredTable({said}: {count}, {size(self.bytes)})"


class PushHandle:
    """A push on its way. `timestamp` counts this store's pushes, as PS-Lite's timestamps do."""

    def __init__(self, timestamp: int, work: Work):
        self.timestamp, self._work = timestamp, work

    def wait(self) -> None:
        """Return when every server has applied the push."""
        self._work.wait()

    def __repr__(self) -> str:
        return f"PushHandle({self.timestamp})"


class PullHandle:
    """Rows on their way; `result` waits for them."""

    def __init__(self, reply: Reply, one: str | None, shapes: Mapping[str, tuple[int, ...]]):
        self._reply, self._one, self._shapes = reply, one, shapes

    def result(self) -> Any:
        """A tensor, or of several tables a dict of tensors."""
        found = self._reply.result()
        shaped = {
            name: x.reshape(*self._shapes[name], x.shape[1]) if name in self._shapes else x
            for name, x in found.items()
        }
        return shaped if self._one is None else shaped[self._one]

    def wait(self) -> None:
        self._reply.result()


class StandaloneStore:
    """Tables of rows to push gradients to and pull values from; a server optimizer updates them.

        with mh.Store() as store:                  # in this process, without a server
            store.create("users", dim=16, optimizer="adagrad", lr=0.1)
            store.push("users", ids, grads)
            rows = store.pull("users", ids)

        store = mh.Store("127.0.0.1:9400")         # a running `manyhands server --keep`
        store = mh.Store(servers=2)                # two servers that live as long as this store

    Ids are ints: lists, NumPy arrays or tensors, of any shape; rows come back as tensors of that
    shape and `dim` more. Ids may be negative and may repeat: repeats are summed. An id without a
    row reads as the values its row would start from; its first push makes the row.

    `token` or `token_file` is the server's secret (default: MANYHANDS_TOKEN, MANYHANDS_TOKEN_FILE),
    `tls_ca` the authority of its certificate (MANYHANDS_TLS_CA). Stores and runs in different
    namespaces of a server do not see each other's tables (MANYHANDS_NAMESPACE). `optimizers` are
    modules of server optimizers of your own, "module:Class" to a table. A server that does not
    answer for `timeout_s` is lost.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        servers: int = 0,
        token: str | None = None,
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        namespace: str | None = None,
        optimizers: Sequence[str] = (),
        timeout_s: float = 60.0,
    ):
        of_address = {"token": token, "token_file": token_file, "tls_ca": tls_ca}
        if address is None and (given := [key for key, x in of_address.items() if x is not None]):
            raise StoreError(f"{given[0]}= is for a running server; give its address too")
        if address is not None and servers:
            raise StoreError(
                f"address {address!r} and servers={servers}: give the address of servers that run, "
                "or how many this store starts"
            )
        if address is not None and optimizers:
            raise StoreError(
                "optimizers= are for servers that this store starts; a running server has those "
                "of its --optimizers"
            )
        if servers < 0:
            raise StoreError(f"servers={servers}; 1 or more is needed, or none")
        if address is not None:
            found = backends.at_address(address, token, token_file, tls_ca, namespace, timeout_s)
        elif servers:
            found = backends.on_own_servers(servers, optimizers, namespace or "", timeout_s)
        else:
            found = backends.in_this_process(optimizers, namespace or "")
        self._backend, self._closed = found, False
        self._tables: dict[str, Table] = {}
        self._pushes = itertools.count()
        # where nobody calls close: servers end with this object, or with the process
        self._finalizer = weakref.finalize(self, found.end)

    @property
    def address(self) -> str | None:
        """HOST:PORT for other stores to join; None in this process."""
        return self._backend.address

    @property
    def token(self) -> str:
        """The secret that another store needs to join."""
        return self._backend.token

    # -- tables --

    def create(self, table: str | Table, *, values: Any = None, **given: Any) -> None:
        """Make a table: a name and the fields of `Table`, or a `Table`.

        Other keywords are options of its optimizer, such as lr=0.1. With `values` the table is
        dense: one vector that starts from them, pulled and pushed as a whole. To create a table
        that is there is harmless if it is the same (its rows stay), and refused if it is not.
        """
        made, vector = table_of(table, values, given)
        self._client().create(made, vector)
        self._tables[made.name] = made

    def tables(self) -> dict[str, StoredTable]:
        """All tables by name, also those that other clients made, with their rows and bytes."""
        found = [p for p in self._client().stored() if NAMESPACE_END not in p.table.name]
        self._tables = {part.table.name: part.table for part in found}
        return {
            part.table.name: StoredTable(
                **{field: getattr(part.table, field) for field in FIELDS},
                rows=part.rows,
                bytes=part.nbytes,
            )
            for part in sorted(found, key=lambda part: part.table.name)
        }

    def drop_table(self, name: str) -> None:
        """Delete a table, for all clients."""
        self._table(name)
        self._client().drop(name)
        self._tables.pop(name, None)

    # -- rows --

    def push(
        self,
        table: str | Mapping[str, Any],
        ids: Any = None,
        grads: Any = None,
        *,
        lr: float | None = None,
    ) -> PushHandle:
        """Hand gradients to the table's optimizer: push("users", ids, grads), push("w", grads) of
        a dense table, or all of several at once: push({"users": (ids, grads), "w": grads}).

        It is on its way when this returns, and applied exactly once; `wait` of the handle, or of
        the store, returns when it is. `lr` is for this push.
        """
        rows, updates, _ = self._pushed(table, ids, grads)
        work = self._client().push(rows, updates, lr=lr)
        return PushHandle(next(self._pushes), work)

    def pull(self, table: str | Mapping[str, Any], ids: Any = None) -> Any:
        """Rows as they are now, with all that this store pushed before: pull("users", ids),
        pull("w") of a dense table, or a dict of several: pull({"users": ids, "w": None})."""
        return self.pull_async(table, ids).result()

    def pull_async(self, table: str | Mapping[str, Any], ids: Any = None) -> PullHandle:
        """A pull that travels while you compute; its `result` are the rows."""
        rows, shapes = self._wanted(table, ids)
        one = table if isinstance(table, str) else None
        return PullHandle(self._client().pull_async(rows), one, shapes)

    def push_pull(
        self,
        table: str | Mapping[str, Any],
        ids: Any = None,
        grads: Any = None,
        *,
        lr: float | None = None,
    ) -> Any:
        """A push, and after it a pull of the same rows, in one request."""
        rows, updates, shapes = self._pushed(table, ids, grads)
        next(self._pushes)
        reply = self._client().exchange(rows, updates, wants=rows, lr=lr)
        return PullHandle(reply, table if isinstance(table, str) else None, shapes).result()

    def wait(self, handle: PushHandle | Iterable[PushHandle] | None = None) -> None:
        """Return when a push is applied, or several, or without an argument all of this store."""
        client = self._client()
        if handle is None:
            client.flush()
            return
        for each in [handle] if isinstance(handle, PushHandle) else handle:
            each.wait()

    def delete(self, table: str, ids: Any) -> int:
        """Delete rows with what the optimizer keeps of them; returns how many there were. The next
        push of such an id makes its row anew."""
        self._table(table)
        return self._client().delete(table, ids_from(table, ids).reshape(-1))

    def items(self, table: str) -> tuple[Tensor, Tensor]:
        """Ids and rows of all that a sparse table has, in the order of the ids."""
        if self._table(table).length is not None:
            raise StoreError(f"table {table!r} is dense and has no ids; use pull({table!r})")
        content = self._client().dump(table)
        return content["ids"], content["values"]

    # -- all of it --

    def stats(self) -> dict[str, float]:
        """Counters since the last call: rows and bytes pulled and pushed, requests, refusals."""
        return self._client().stats()

    def save(self, path: str | Path) -> None:
        """Save all tables, with what their optimizers keep, to a folder."""
        client, tables = self._client(), self.tables()
        plain = [Table(**{f: getattr(t, f) for f in FIELDS}) for t in tables.values()]
        save_tables(Path(path), client, plain)

    def load(self, path: str | Path) -> None:
        """Make the tables of a folder that `save` wrote, with their rows, in place of the rows
        that are here; other tables stay as they are."""
        found = saved_tables_in(Path(path))
        for table, _ in found:
            self.create(table)
        for table, file in found:
            self._client().restore(table.name, content_of(file))

    def close(self) -> None:
        """Wait until everything pushed is applied, and leave; servers of this store's own end."""
        if not self._closed:
            self._closed = True
            self._finalizer.detach()
            self._backend.close()

    # -- as a container --

    def __enter__(self) -> StandaloneStore:
        self._client()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except ManyhandsError:
            if kind is None:  # else the first error is the one to see
                raise

    def __len__(self) -> int:
        return len(self.tables())

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return name in self.tables()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables())

    def __repr__(self) -> str:
        """Without asking a server: it may be gone."""
        if self._closed:
            return "mh.Store(closed)"
        known = f", tables {', '.join(self._tables)}" if self._tables else ""
        return f"mh.Store({self._backend.where}{known})"

    # -- arguments --

    def _client(self) -> Any:
        if self._closed:
            raise StoreError("this store was closed; open another: mh.Store(...)")
        return self._backend.client

    def _table(self, name: str) -> Table:
        """A table that this store knows, or asks for: another client may have made it."""
        if name not in self._tables:
            self.tables()
        if name not in self._tables:
            raise unknown_table(name, self._tables)
        return self._tables[name]

    def _pushed(
        self, table: str | Mapping[str, Any], ids: Any, grads: Any
    ) -> tuple[Rows, Tensors, dict[str, tuple[int, ...]]]:
        if isinstance(table, Mapping):
            if ids is not None or grads is not None:
                raise StoreError("push(dict, ...): all that is pushed is in the dict")
            pairs = {name: x if isinstance(x, tuple) else (None, x) for name, x in table.items()}
        else:
            pairs = {table: (ids, grads) if grads is not None else (None, ids)}
        rows, updates, shapes = Rows(), Tensors(), dict[str, tuple[int, ...]]()
        for name, pair in pairs.items():
            spec = self._table(name)
            which, given = pair if len(pair) == 2 else (None, None)
            if given is None or (which is None) != (spec.length is not None):
                raise StoreError(
                    f"table {name!r} is sparse: push({name!r}, ids, grads), in a dict a tuple of "
                    "both"
                    if spec.length is None
                    else f"table {name!r} is dense: push({name!r}, grads), without ids"
                )
            if spec.length is not None:
                rows[name], updates[name] = None, updates_from(spec, None, given)
                continue
            numbers = ids_from(name, which)
            shapes[name] = tuple(numbers.shape)
            rows[name] = numbers.reshape(-1)
            updates[name] = updates_from(spec, numbers, given)
        return rows, updates, shapes

    def _wanted(
        self, table: str | Mapping[str, Any], ids: Any
    ) -> tuple[Rows, dict[str, tuple[int, ...]]]:
        if isinstance(table, Mapping) and ids is not None:
            raise StoreError("pull(dict, ids): the ids of each table are in the dict")
        wanted = dict(table) if isinstance(table, Mapping) else {table: ids}
        rows, shapes = Rows(), dict[str, tuple[int, ...]]()
        for name, which in wanted.items():
            dense = self._table(name).length is not None
            if dense != (which is None):
                raise StoreError(
                    f"table {name!r} is dense: pull({name!r}), without ids"
                    if dense
                    else f"table {name!r} is sparse: pull({name!r}, ids)"
                )
            if dense:
                rows[name] = None
                continue
            numbers = ids_from(name, which)
            shapes[name], rows[name] = tuple(numbers.shape), numbers.reshape(-1)
        return rows, shapes
