"""Tables of a run and whoever holds them: servers started or joined, or this process alone. Between `site` and `build`.

A model may need them twice: a rule over a `Store` keeps the dense parameters there, and `Embedding` modules keep their rows
there under any rule. Both use the same servers; a checkpoint holds all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.assembly.rank_context import RankContext
from manyhands.core import (
    Plan,
    Snapshot,
    Store,
    Strategy,
    Table,
    TableStore,
    Tensors,
)
from manyhands.embedding import server_optimizer
from manyhands.embedding.saved_rows import saved_tables
from manyhands.embedding.tables import EmbeddingTables, embeddings, script_tables
from manyhands.errors import PlanError, TaskError
from manyhands.exchange.compression import SERVER_CODECS
from manyhands.launch import servers as processes
from manyhands.observe.server_events import server_event
from manyhands.replica.flat import FlatParameters

PREFIX = "table/"  # of tables in a snapshot's state
EVENT_EVERY_S = 1.0


class RunTables:
    """The store of one rank. `sparse` are the tables of its `Embedding` modules, where it has some."""

    def __init__(
        self, context: RankContext, plan: Plan, store: TableStore, tables: EmbeddingTables | None
    ):
        self.context, self.plan, self.store, self.sparse = context, plan, store, tables
        self.dense: list[Table] = []
        self._told = time.monotonic()

    @property
    def tables(self) -> list[Table]:
        return [*self.dense, *(self.sparse.specs if self.sparse is not None else [])]

    def hold(
        self,
        strategy: Strategy[Any, Any],
        flat: FlatParameters,
        values: Tensors,
        optimizer: Optimizer,
        saved: Snapshot | None = None,
    ) -> None:
        """Give the dense parameters to the store, with what the optimizer remembers of them and what servers had `saved`."""
        rule, options = (
            ("sum", {})
            if strategy.on_server == "sum"
            else server_optimizer.server_optimizer_of(optimizer)
        )
        taken = {t.name for t in self.tables}
        for key, vector in values.items():
            if key in taken:
                raise TaskError(
                    f"the embedding {key!r} has the name of the model's own table; call it something else"
                )
            dtype: Any = str(vector.dtype).removeprefix("torch.")
            if dtype not in ("float32", "float64"):
                raise TaskError(
                    f"parameters are {dtype}, but servers hold float32 and float64; use precision=bf16 with float32 parameters"
                )
            state = (
                {}
                if strategy.on_server == "sum"
                else server_optimizer.flat_state(flat, key, optimizer)
            )
            if saved is not None and saved.meta.get("rule") == self.plan.merge:
                state |= server_optimizer.flat_compensation(flat, key, saved.state)
            table = Table(key, length=vector.numel(), dtype=dtype, optimizer=rule, options=options)
            self.store.create(table, vector.detach().cpu(), state or None)
            self.dense.append(table)
        if rule == "momentum" and strategy.shares_steps and self.context.process.size > 1:
            self.context.notice(
                f"momentum={options['momentum']:g} over {self.context.process.size} ranks that do not wait: stale gradients act as momentum "
                "already; if the loss grows, lower momentum or the learning rate"
            )

    def settle(self) -> None:
        """All that this rank pushed has arrived."""
        if self.sparse is not None:
            self.sparse.flush()
        else:
            self.store.flush()

    def tell(self, round: int) -> None:
        """What servers and this rank counted, about once a second, as an event of rank 0."""
        elapsed = time.monotonic() - self._told
        if self.context.rank == 0 and elapsed >= EVENT_EVERY_S:
            self._told += elapsed
            seen = (
                self.store if self.sparse is None else self.sparse.store
            )  # behind a cache, which counts its hits
            self.context.recorder.emit(server_event(seen.stats(), time.time(), round, elapsed))

    # -- checkpoints --

    def dump(self, strategy: Strategy[Any, Any]) -> tuple[Tensors, dict[str, Tensors]]:
        """What no parameter stands for, to be saved: rows of embeddings, by "table/<name>/<part>". And what the servers'
        optimizer remembers of the dense vectors, by vector."""
        rows: Tensors = {}
        for table in self.sparse.specs if self.sparse is not None else []:
            rows |= {f"{PREFIX}{table.name}/{k}": v for k, v in self.store.dump(table.name).items()}
        moments = (
            {t.name: _state(self.store.dump(t.name)) for t in self.dense}
            if strategy.on_server == "optimizer"
            else {}
        )
        return rows, moments

    def restore(self, saved: Snapshot) -> None:
        """Rank 0 puts back the rows of a checkpoint; all wait until they are there."""
        tables = self.sparse.specs if self.sparse is not None else []
        contents = saved_tables(
            {k.removeprefix(PREFIX): v for k, v in saved.state.items() if k.startswith(PREFIX)}
        )
        for table in tables:
            content = contents.get(table.name)
            if content and self.context.rank == 0:
                self.store.restore(table.name, content)
            elif not content:
                self.context.notice(
                    f"the checkpoint has no rows of the embedding {table.name!r}: it starts anew"
                )
        self.settle()
        self.context.link.all_reduce(
            {"restored": torch.zeros(1, device=self.context.device)}
        ).wait()


def _state(content: Tensors) -> Tensors:
    return {k.removeprefix("state/"): v for k, v in content.items() if k.startswith("state/")}


def open_serving(
    context: RankContext,
    plan: Plan,
    module: nn.Module,
    ids: Callable[[Any], Mapping[str, Any]] | None = None,
) -> RunTables | None:
    """Start or join the servers of the plan, or hold the tables here; None: this run needs no tables."""
    embedded, over_store = bool(embeddings(module)), plan.strategy.link is Store
    if ids is not None and not embedded:
        raise TaskError(
            "Task.ids names what mh.Embedding tables look up, but the model has none; leave it out"
        )
    if plan.servers and not embedded and not over_store:
        raise PlanError(
            f"servers={plan.servers} has no effect: merge={plan.merge} moves the model between ranks and the model has no mh.Embedding; "
            "add staleness=0 (synchronous), staleness=4 or merge=downpour to keep the model on the servers"
        )
    if plan.embeddings == "sync" and not embedded:
        raise PlanError(
            "embeddings=sync has no effect: the model has no mh.Embedding; leave it out"
        )
    for key in ("cache", "lookahead"):
        if not embedded and getattr(plan, key) != Plan.__dataclass_fields__[key].default:
            raise PlanError(
                f"{key}={getattr(plan, key)} has no effect: the model has no mh.Embedding; leave it out"
            )
    if not embedded and not over_store:
        return None
    if embedded and plan.clip is not None:
        context.notice(
            f"clip={plan.clip:g} bounds the gradient of parameters; rows of mh.Embedding are not clipped"
        )
    if embedded and plan.precision == "fp16":
        raise PlanError(
            "precision=fp16 scales the loss, and rows of mh.Embedding learn before that is undone; set precision=bf16"
        )
    if not plan.servers and context.process.size > 1:
        raise PlanError(
            f"the model has mh.Embedding tables and data={context.process.size} ranks, who must find them somewhere; add servers=1"
        )
    store = _connect(context, plan, module)
    if not embedded:
        return RunTables(context, plan, store, None)
    from manyhands.server.client.cached_store import CachedStore

    seen: TableStore = CachedStore(store, plan.cache, plan.cache_age) if plan.cache else store
    tables = EmbeddingTables(
        module, seen, ids=ids, synchronous=plan.embeddings == "sync", notice=context.notice
    )
    tables.attach()
    context.closing.insert(0, tables.close)  # before the store that it pushes to
    return RunTables(context, plan, store, tables)


def rows_of_this_process() -> EmbeddingTables:
    """For `Embedding` modules in a script without a run."""
    from manyhands.server.local_store import LocalStore

    return script_tables(LocalStore(0, 1))


def _connect(context: RankContext, plan: Plan, module: nn.Module) -> TableStore:
    from manyhands.server.client.observed_store import ObservedStore
    from manyhands.server.client.server_store import (
        ServerStore,  # these bring numba: only runs with tables need it
    )
    from manyhands.server.local_store import LocalStore
    from manyhands.server.shard import Shard

    if not plan.servers:
        return LocalStore(0, 1, [Shard(modules=_modules(module))])
    place = context.process
    started = processes.start(
        plan.servers,
        place,
        context.store,
        workers=place.size,
        timeout_s=plan.timeout_s,
        modules=_modules(module),
    )
    context.closing.append(started.close)
    context.fate = started.fate
    payload: Any = plan.compress if plan.compress in SERVER_CODECS else "none"
    store = ServerStore(
        started.coordinator,
        place.rank,
        place.size,
        started.token,
        timeout_s=plan.timeout_s,
        payload=payload,
        tls=started.tls,
    )
    context.closing.insert(0, store.close)  # before the servers it talks to
    return ObservedStore(store, context.link, payload)


def _modules(module: nn.Module) -> list[str]:
    """Where rules of the user's own come from, which the servers are then allowed to import."""
    rules = [m.table.optimizer for m in embeddings(module)]
    return sorted({rule.partition(":")[0] for rule in rules if ":" in rule})
