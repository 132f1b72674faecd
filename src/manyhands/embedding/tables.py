"""Embedding tables of a model on one store: one pull a batch and one push a step, for all tables.

    prefetch(batch)   ask for the rows of a later batch; they travel while this rank computes
    begin(batch)      the next forward passes are of this batch; its rows come in one pull
    push(...)         the step's gradients of all tables in one push; where the store works in the
                      background, it goes with the next request for rows

The rows of a batch are known before its forward pass in two cases: the task names its ids (`ids`),
or, from the second batch on, the modules' ids are columns of the batch's tensors (`id_columns`).
If the model computes ids, each module pulls its own rows when it runs.

A prefetched row misses what was pushed since it was asked for: at most `lookahead` of this rank's
own steps. With lookahead=0 every batch sees all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core import (
    Reply,
    Rows,
    Table,
    TableStore,
    Tensors,
    Work,
)
from manyhands.embedding.distinct import distinct
from manyhands.embedding.gather import Room
from manyhands.embedding.id_columns import IdColumns, same_ids
from manyhands.embedding.modules import Embedding
from manyhands.embedding.saved_rows import saved_tables
from manyhands.errors import TaskError

# of a batch: table name -> the ids that its modules will look up
Ids = Callable[[Any], Mapping[str, Tensor | Sequence[Tensor]]]


class EmbeddingTables:
    """Tables of all embeddings in `model`. None: modules are added when they first look up rows,
    and every backward pass is pushed at once (`script_tables`). `synchronous`: pushes are pending
    until all ranks have made theirs."""

    def __init__(
        self,
        model: nn.Module | None,
        store: TableStore,
        *,
        ids: Ids | None = None,
        synchronous: bool = False,
        notice: Callable[[str], None] = lambda text: None,
    ):
        self.store, self._synchronous, self._notice = store, synchronous, notice
        self.modules = embeddings(model) if model is not None else []
        self._tables: dict[str, Table] = {}
        for module in self.modules:
            self._add(module.table, create=False)
        self._by_name = {m.name: m for m in reversed(self.modules)}
        self._immediate = model is None
        self.of_run = not self._immediate
        # whether a push waits for the next request for rows and goes with it
        self._defers = store.background and not self._immediate and not synchronous
        self._unsent: _Push | None = None
        self._ids = ids
        self._columns = IdColumns() if ids is None and not self._immediate else None
        self._prefetched: list[_Fetch] = []
        self._now: _Fetch | None = None
        self._grads: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._sent: list[Work] = []
        self._unread = False  # something was pushed since the last evaluation
        self._counts = dict.fromkeys(("rows_pulled", "rows_pushed", "lookups_ahead", "lookups"), 0)

    @property
    def specs(self) -> list[Table]:
        return list(self._tables.values())

    def attach(self) -> None:
        """Create the tables and let the modules look up rows here. Every rank does the same."""
        for table in self._tables.values():
            self.store.create(table)
        for module in self.modules:
            module.attach(self)

    def close(self) -> None:
        self._finish()
        for module in self.modules:
            module.attach(None)

    def leave_rows(self, store: TableStore) -> None:
        """Close, and let the modules keep their rows: `store`, which holds them, is theirs now."""
        self._finish()
        own = script_tables(store)
        for module in self.modules:
            module.attach(own)

    def _finish(self) -> None:
        self.drop()
        self._send()
        self._wait()

    # -- rows --

    def prefetch(self, values: Any) -> None:
        """Ask for the rows of a later batch, in the order in which batches will begin."""
        fetch = self._ask(values)
        if fetch is not None:
            self._prefetched.append(fetch)

    def begin(self, values: Any) -> None:
        """The next forward passes are of this batch; None: its content is not known."""
        for i, fetch in enumerate(self._prefetched):
            if fetch.values is values:  # batches prefetched before it were skipped
                self._now, self._prefetched = fetch, self._prefetched[i + 1 :]
                return
        if self._columns is not None and self._columns.known is None:
            self._columns.learn_from(values)
        self._now = self._ask(values)

    def lookup(self, module: Embedding, ids: Tensor) -> tuple[Tensor, Tensor, Room | None]:
        table, room = module.table, None
        training = torch.is_grad_enabled() and module.training
        if self._immediate:
            self._add(table, create=True)
        self._counts["lookups"] += 1
        asked = self._now.find(module, ids) if self._now is not None and training else None
        if asked is not None:
            self._counts["lookups_ahead"] += 1
            found, inverse, rows = asked.found, asked.inverse, asked.rows()
        else:
            if training and self._columns is not None:
                self._columns.record(module, ids)
            if not training and self._unread:  # an evaluation sees everything pushed
                self._unread = False
                self.flush()
            self._send()
            found, inverse = distinct(module.wanted(ids).detach().cpu())
            rows = self.store.pull({table.name: found})[table.name]
            self._counts["rows_pulled"] += len(found)
        rows, inverse = rows.to(ids.device), inverse.to(ids.device)
        if training and not module.frozen:
            rows = rows.detach().requires_grad_()
            rows.register_post_accumulate_grad_hook(
                functools.partial(self._collect, table.name, found)
            )
            room = functools.partial(self._room, table.name, found)
        return rows, inverse, room

    def _room(self, name: str, ids: Tensor) -> Tensor:
        """Memory for the rows' gradient, from which the store sends it without a copy."""
        return self.store.push_buffers({name: ids})[name]

    def _ask(self, values: Any) -> _Fetch | None:
        lookups = self._lookups(values)
        if not lookups:
            return None
        asked: list[_Asked] = []
        rows: Rows = {}
        for module, ids in lookups:
            found, inverse = distinct(module.wanted(ids).detach().cpu())
            name = module.name
            before = rows.get(name)
            rows[name] = found if before is None else torch.cat([before, found])
            asked.append(_Asked(module, ids, found, inverse, 0 if before is None else len(before)))
            self._counts["rows_pulled"] += len(found)
        return _Fetch(values, asked, self._request(rows))

    def _request(self, rows: Rows) -> Reply:
        if self._unsent is not None and self._defers:
            push, self._unsent = self._unsent, None
            return self.store.exchange(push.rows, push.updates, wants=rows, lr=push.lr)
        return self.store.pull_async(rows)

    def _lookups(self, values: Any) -> list[tuple[Embedding, Tensor]]:
        """The modules and ids of a batch that are known before its forward pass."""
        if values is None:
            return []
        if self._ids is None:
            return [] if self._columns is None else self._columns.of(values, self._notice)
        given = self._ids(values)
        if unknown := [name for name in given if name not in self._by_name]:
            raise TaskError(
                f"Task.ids gives ids of {', '.join(unknown)}, but the model's tables are "
                f"{', '.join(self._tables)}; use their names"
            )
        return [
            (self._by_name[n], i)
            for n, some in given.items()
            for i in ([some] if isinstance(some, Tensor) else some)
        ]

    # -- gradients --

    def _collect(self, name: str, ids: Tensor, rows: Tensor) -> None:
        assert rows.grad is not None
        self._grads.setdefault(name, []).append((ids, rows.grad.cpu()))
        rows.grad = None
        if self._immediate:
            self.push()

    def push(self, scale: float = 1.0, rate: float = 1.0) -> None:
        """Push the gradients of this step's backward passes times `scale`; every table's lr is
        multiplied by `rate`, of the schedule."""
        self._now = None
        if self._columns is not None:
            self._columns.end()
        grads, self._grads = self._grads, {}
        rows: Rows = {}
        updates: Tensors = {}
        for name, parts in grads.items():
            ids, update = (
                parts[0]
                if len(parts) == 1
                else (torch.cat([i for i, _ in parts]), torch.cat([g for _, g in parts]))
            )
            rows[name], updates[name] = ids, update if scale == 1 else update.mul_(scale)
            self._counts["rows_pushed"] += len(ids)
        self._wait()  # for the step before: its errors are raised now
        for lr, names in self._by_lr(rows, rate):
            self._send()
            self._unsent = _Push({n: rows[n] for n in names}, {n: updates[n] for n in names}, lr)
            self._unread = True
        if not self._defers:
            self._send()
        if self._synchronous:
            self._wait()
            self.store.tick(0)
            self._prefetched.clear()  # asked for before the other ranks' gradients of this step
        if self._immediate:
            self._wait()

    def _by_lr(self, rows: Iterable[str], rate: float) -> Iterator[tuple[float | None, list[str]]]:
        """Tables by lr: all of them, or while a schedule changes lr, groups of equal lr."""
        if rate == 1 or not rows:
            if rows:
                yield None, list(rows)
            return
        groups: dict[float, list[str]] = {}
        for name in rows:
            groups.setdefault(self._tables[name].options["lr"] * rate, []).append(name)
        yield from groups.items()

    def _send(self) -> None:
        if self._unsent is not None:
            push, self._unsent = self._unsent, None
            self._sent.append(
                self.store.push(push.rows, push.updates, lr=push.lr, pending=self._synchronous)
            )

    def drop(self) -> None:
        """Discard this step's gradients."""
        self._grads.clear()
        self._now = None

    def flush(self) -> None:
        """Return when everything pushed has arrived."""
        self._send()
        self._wait()
        self.store.flush()

    def _wait(self) -> None:
        sent, self._sent = self._sent, []
        for work in sent:
            work.wait()

    # -- whole tables --

    def dump(self) -> Tensors:
        """All rows and what server optimizers keep of them, under "<table>/ids", "<table>/values",
        "<table>/state/..."."""
        self.flush()
        return {
            f"{name}/{key}": value
            for name in self._tables
            for key, value in self.store.dump(name).items()
        }

    def replace_rows(self, table: Table, content: Tensors) -> None:
        """Give the table these rows in place of those it has; create it where it is missing."""
        self._add(table, create=True)
        self.store.restore(table.name, content)

    def replace_pieces(self, table: Table, contents: Iterable[Mapping[str, Any]]) -> None:
        """As `replace_rows`, with rows that come in pieces."""
        self._add(table, create=True)
        self.store.restore_pieces(table.name, contents)

    def restore(self, content: Tensors) -> None:
        self.flush()
        self._prefetched.clear()
        self._now = None
        for name, of_it in saved_tables(content).items():
            if name in self._tables:
                self.store.restore(name, of_it)

    def stats(self) -> dict[str, float]:
        """Since the last call: rows pulled and pushed, lookups, and lookups of prefetched rows."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {k: float(v) for k, v in counts.items()}

    def _add(self, table: Table, create: bool) -> None:
        known = self._tables.get(table.name)
        if known is None:
            if create:
                self.store.create(table)
            self._tables[table.name] = table
        elif known != table:
            differ = [k for k in vars(table) if getattr(known, k) != getattr(table, k)]
            said = "; ".join(f"{k}={getattr(known, k)!r} and {getattr(table, k)!r}" for k in differ)
            raise TaskError(
                f"two embeddings named {table.name!r} differ: {said}; "
                "give both the same, or each its own name"
            )

    def __deepcopy__(self, memo: Any) -> EmbeddingTables:
        return self  # a copy of a model in this process has the same rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # rows do not travel with a pickled model


def embeddings(model: nn.Module) -> list[Embedding]:
    return [m for m in model.modules() if isinstance(m, Embedding)]


def script_tables(store: TableStore) -> EmbeddingTables:
    """Tables for modules that no run attached: every backward pass is pushed at once."""
    return EmbeddingTables(None, store)


# -- pushes and pulls under way --


@dataclass
class _Push:
    rows: Rows
    updates: Tensors
    lr: float | None


@dataclass
class _Asked:
    """The rows that one module will look up in one batch."""

    module: Embedding
    ids: Tensor
    found: Tensor
    inverse: Tensor
    first: int  # index of its first row among the table's rows in the reply
    reply: Reply | None = None

    def rows(self) -> Tensor:
        assert self.reply is not None
        rows = self.reply.result()[self.module.name]
        return rows[self.first : self.first + len(self.found)]


@dataclass
class _Fetch:
    """The rows of a batch, on their way. It keeps a reference to the batch, so that no other tensor
    can get the same address meanwhile."""

    values: Any
    asked: list[_Asked]
    reply: Reply

    def __post_init__(self) -> None:
        for one in self.asked:
            one.reply = self.reply

    def find(self, module: Embedding, ids: Tensor) -> _Asked | None:
        for one in self.asked:
            if (
                one.module.name == module.name
                and one.module.padding_id == module.padding_id
                and same_ids(one.ids, ids)
            ):
                return one
        return None
