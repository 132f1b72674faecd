"""The tables behind a model's embeddings, on one store: one pull a batch and one push a step, for all of them together.

    begin(batch)      the next forward passes are this batch's      rows of all tables come in one pull
    prefetch(batch)   a batch to come: ask for its rows now         they travel while others compute
    push(...)         the step's gradients of all tables            one push, which goes with the next request for rows where it can

Which rows a batch needs is known before its forward pass where a task says so (`ids`), or, from the second batch on, where the
modules' ids are columns of the batch's tensors: what the first forward pass looked up, and where in the batch that stood, is
remembered. Ids that the model computes are not found; each module then pulls its own rows when it runs.

A row fetched ahead misses what was pushed since it was asked for: at most `lookahead` of this rank's own steps. With
lookahead=0 every batch sees all of them.
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
from manyhands.embedding.id_columns import IdColumns, same
from manyhands.embedding.modules import Embedding, saved_tables
from manyhands.errors import TaskError

Ids = Callable[
    [Any], Mapping[str, Tensor | Sequence[Tensor]]
]  # of a batch: table name -> the ids its modules will look up


class EmbeddingTables:
    """`model`: all its embeddings, or None: modules come one by one and every backward pass is pushed at once (`alone`)."""

    def __init__(
        self,
        model: nn.Module | None,
        store: TableStore,
        *,
        ids: Ids | None = None,
        together: bool = False,
        notice: Callable[[str], None] = lambda text: None,
    ):
        self.store, self.together, self._notice = store, together, notice
        self.modules = embeddings(model) if model is not None else []
        self._specs: dict[str, Table] = {}
        for module in self.modules:
            self._add(module.table, create=False)
        self._by_name = {m.name: m for m in reversed(self.modules)}
        self._alone = model is None
        # whether a push waits for the next request for rows and goes with it
        self._defers = store.background and not self._alone and not together
        self._unsent: _Push | None = None  # goes with the next request for rows
        self._ids, self._places = ids, IdColumns() if ids is None and not self._alone else None
        self._coming: list[_Fetch] = []
        self._now: _Fetch | None = None
        self._grads: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._sent: list[Work] = []
        self._unread = False  # pushed something since rows were last read for evaluation
        self._counts = dict.fromkeys(("rows_pulled", "rows_pushed", "lookups_ahead", "lookups"), 0)

    @property
    def specs(self) -> list[Table]:
        return list(self._specs.values())

    def attach(self) -> None:
        """Make the tables and have the modules take their rows from here. Every rank does the same."""
        for table in self._specs.values():
            self.store.create(table)
        for module in self.modules:
            module.attach(self)

    def close(self) -> None:
        self.drop()
        self._send()
        self._wait()
        for module in self.modules:
            module.attach(None)

    # -- rows --

    def prefetch(self, values: Any) -> None:
        """Ask for the rows of a batch to come, in the order in which batches will begin."""
        fetch = self._ask(values)
        if fetch is not None:
            self._coming.append(fetch)

    def begin(self, values: Any) -> None:
        """What runs next is this batch; None: a batch that nobody knows beforehand."""
        for i, fetch in enumerate(self._coming):
            if fetch.values is values:  # those asked for before it never came
                self._now, self._coming = fetch, self._coming[i + 1 :]
                return
        if self._places is not None and self._places.known is None:
            self._places.learn(values)
        self._now = self._ask(values)

    def take(self, module: Embedding, ids: Tensor) -> tuple[Tensor, Tensor]:
        table = module.table
        training = torch.is_grad_enabled() and module.training
        if self._alone:
            self._add(table, create=True)
        self._counts["lookups"] += 1
        asked = self._now.find(module, ids) if self._now is not None and training else None
        if asked is not None:
            self._counts["lookups_ahead"] += 1
            found, inverse, rows = asked.found, asked.inverse, asked.rows()
        else:
            if training and self._places is not None:
                self._places.saw(module, ids)
            if not training and self._unread:  # an evaluation sees all that was pushed
                self._unread = False
                self.flush()
            self._send()
            found, inverse = distinct(module.wanted(ids))
            rows = self.store.pull({table.name: found})[table.name]
            self._counts["rows_pulled"] += len(found)
        rows, inverse = rows.to(ids.device), inverse.to(ids.device)
        if training:
            rows = rows.detach().requires_grad_()
            rows.register_post_accumulate_grad_hook(
                functools.partial(self._collect, table.name, found)
            )
        return rows, inverse

    def _ask(self, values: Any) -> _Fetch | None:
        lookups = self._lookups(values)
        if not lookups:
            return None
        asked: list[_Asked] = []
        rows: Rows = {}
        for module, ids in lookups:
            found, inverse = distinct(module.wanted(ids))
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
        """What the modules will look up in a batch, as far as that is known."""
        if values is None:
            return []
        if self._ids is None:
            return [] if self._places is None else self._places.of(values, self._notice)
        told = self._ids(values)
        if unknown := [name for name in told if name not in self._by_name]:
            raise TaskError(
                f"Task.ids gives ids of {', '.join(unknown)}, but the model's tables are {', '.join(self._specs)}; use their names"
            )
        return [
            (self._by_name[n], i)
            for n, some in told.items()
            for i in ([some] if isinstance(some, Tensor) else some)
        ]

    # -- gradients --

    def _collect(self, name: str, ids: Tensor, rows: Tensor) -> None:
        assert rows.grad is not None
        self._grads.setdefault(name, []).append((ids, rows.grad.cpu()))
        rows.grad = None
        if self._alone:
            self.push()

    def push(self, scale: float = 1.0, rate: float = 1.0) -> None:
        """Hand over what the backward passes of this step gave, times `scale`; every table's lr times `rate`, by the schedule."""
        self._now = None
        if self._places is not None:
            self._places.end()
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
        self._wait()  # for the step before: what it could not do is said now
        for lr, names in self._by_lr(rows, rate):
            self._send()
            self._unsent = _Push({n: rows[n] for n in names}, {n: updates[n] for n in names}, lr)
            self._unread = True
        if not self._defers:
            self._send()
        if self.together:
            self._wait()
            self.store.tick(0)
            self._coming.clear()  # asked for before the others' gradients of this step
        if self._alone:
            self._wait()

    def _by_lr(self, rows: Iterable[str], rate: float) -> Iterator[tuple[float | None, list[str]]]:
        """One push for all, or while a schedule is at work one for all tables of equal lr."""
        if rate == 1 or not rows:
            if rows:
                yield None, list(rows)
            return
        groups: dict[float, list[str]] = {}
        for name in rows:
            groups.setdefault(self._specs[name].options["lr"] * rate, []).append(name)
        yield from groups.items()

    def _send(self) -> None:
        if self._unsent is not None:
            push, self._unsent = self._unsent, None
            self._sent.append(
                self.store.push(push.rows, push.updates, lr=push.lr, pending=self.together)
            )

    def drop(self) -> None:
        """Forget this step's gradients: it did not happen."""
        self._grads.clear()
        self._now = None

    def flush(self) -> None:
        """Come back when all that was pushed has arrived."""
        self._send()
        self._wait()
        self.store.flush()

    def _wait(self) -> None:
        sent, self._sent = self._sent, []
        for work in sent:
            work.wait()

    # -- all of it --

    def dump(self) -> Tensors:
        """Every table's rows and what its rule keeps of them, under "<table>/ids", "<table>/values", "<table>/state/..."."""
        self.flush()
        return {
            f"{name}/{key}": value
            for name in self._specs
            for key, value in self.store.dump(name).items()
        }

    def put(self, table: Table, content: Tensors) -> None:
        """These rows in place of those that the table has; it is made where it is not there."""
        self._add(table, create=True)
        self.store.restore(table.name, content)

    def restore(self, content: Tensors) -> None:
        self.flush()
        self._coming.clear()
        self._now = None
        for name, of_it in saved_tables(content).items():
            if name in self._specs:
                self.store.restore(name, of_it)

    def stats(self) -> dict[str, float]:
        """Rows pulled and pushed, lookups and those whose rows had been asked for before: since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {k: float(v) for k, v in counts.items()}

    def _add(self, table: Table, create: bool) -> None:
        known = self._specs.get(table.name)
        if known is None:
            if create:
                self.store.create(table)
            self._specs[table.name] = table
        elif known != table:
            differ = [k for k in vars(table) if getattr(known, k) != getattr(table, k)]
            said = "; ".join(f"{k}={getattr(known, k)!r} and {getattr(table, k)!r}" for k in differ)
            raise TaskError(
                f"two embeddings named {table.name!r} differ: {said}; give both the same, or each its own name"
            )

    def __deepcopy__(self, memo: Any) -> EmbeddingTables:
        return self  # a copy of a model in this process has the same rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # rows do not travel with a pickled model


def embeddings(model: nn.Module) -> list[Embedding]:
    return [m for m in model.modules() if isinstance(m, Embedding)]


def alone(open_store: Callable[[], TableStore]) -> EmbeddingTables:
    """For modules that no run attached: every backward pass is pushed at once."""
    return EmbeddingTables(None, open_store())


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    from manyhands.embedding import (
        distinct as kernel,  # brings numba: only models with embeddings need it
    )

    return kernel.distinct(ids.detach().cpu())


# -- what was asked for, and what is to be pushed --


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
    first: int  # of its rows among those of the table in the reply
    reply: Reply | None = None

    def rows(self) -> Tensor:
        assert self.reply is not None
        rows = self.reply.result()[self.module.name]
        return rows[self.first : self.first + len(self.found)]


@dataclass
class _Fetch:
    """A batch's rows, on their way. It holds the batch, so that no other tensor can stand at the same address meanwhile."""

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
                and _padding(one.module) == _padding(module)
                and same(one.ids, ids)
            ):
                return one
        return None


def _padding(module: Embedding) -> int | None:
    return getattr(module, "padding_id", None)
