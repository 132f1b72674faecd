"""Tables of a run: on parameter servers that this run starts or joins, or in this process.

A model may need them twice. A strategy over a `Store` keeps the dense parameters there; `Embedding`
modules keep their rows there under any strategy. Both use the same servers, and a checkpoint holds
all of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands.assembly.chaos.frame_setup import install_frame_faults
from manyhands.assembly.elastic.leases import StepLeases
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Plan, Snapshot, Store, Strategy, Table, TableStore, Tensors
from manyhands.embedding import server_optimizer
from manyhands.embedding.modules import Embedding
from manyhands.embedding.saved_rows import saved_tables
from manyhands.embedding.tables import EmbeddingTables, embeddings, script_tables
from manyhands.errors import PlanError, TaskError
from manyhands.exchange.compression import SERVER_CODECS
from manyhands.launch import servers as processes
from manyhands.observe.server_events import server_event
from manyhands.plan.checks import parse_bytes
from manyhands.recover.checkpoint import read_manifest
from manyhands.recover.table_files import SavingTables, TableFiles, table_layers
from manyhands.replica.flat import FlatParameters
from manyhands.server.client.cached_store import CachedStore
from manyhands.server.client.observed_store import ObservedStore
from manyhands.server.client.server_store import ServerStore
from manyhands.server.elastic.client import ElasticClient
from manyhands.server.local_store import LocalStore
from manyhands.server.namespaces.namespaced_store import NamespacedStore
from manyhands.server.shard import Shard
from manyhands.server.snapshots.saved_tables import check_saved, without_state
from manyhands.server.snapshots.table_reader import TableReader

PREFIX = "table/"  # of tables in a snapshot's state
EVENT_EVERY_S = 1.0
SERVERS_FILE = "servers.json"
ELASTIC_LEASE_S = 60.0

Ids = Callable[[Any], Mapping[str, Any]]  # of a batch: the ids that its tables will look up


class RunTables:
    """Store of one rank; `embeddings` are the tables of its `Embedding` modules, if any."""

    def __init__(
        self,
        context: RankContext,
        plan: Plan,
        store: TableStore,
        embeddings: EmbeddingTables | None,
    ):
        self.context, self.plan, self.store = context, plan, store
        self.embeddings = embeddings
        self.leases: StepLeases | None = None  # where ranks may die and be replaced
        self.dense: list[Table] = []
        self._files = TableFiles(plan.save_tables == "incremental")
        self._reported = time.monotonic()

    @property
    def sparse(self) -> list[Table]:
        return [] if self.embeddings is None else self.embeddings.specs

    def create_dense(
        self,
        strategy: Strategy[Any, Any],
        flat: FlatParameters,
        values: Tensors,
        optimizer: Optimizer,
        saved: Snapshot | None = None,
    ) -> None:
        """Make tables of the dense parameters, with the optimizer's state of them and what servers
        had saved."""
        sums = strategy.on_server == "sum"
        shares_steps = strategy.shares_steps or self.leases is not None
        name, options = ("sum", {}) if sums else server_optimizer.server_optimizer_of(optimizer)
        taken = {t.name for t in self.sparse}
        for key, vector in values.items():
            if key in taken:
                raise TaskError(
                    f"the embedding {key!r} has the name of the model's own table; "
                    "call it something else"
                )
            dtype: Any = str(vector.dtype).removeprefix("torch.")
            if dtype not in ("float32", "float64"):
                raise TaskError(
                    f"parameters are {dtype}, but servers hold float32 and float64; "
                    "use precision=bf16 with float32 parameters"
                )
            state = {} if sums else server_optimizer.flat_state(flat, key, optimizer)
            if saved is not None and saved.meta.get("strategy") == self.plan.merge:
                state |= server_optimizer.flat_compensation(flat, key, saved.state)
            length = vector.numel()
            table = Table(key, length=length, dtype=dtype, optimizer=name, options=options)
            self.store.create(table, vector.detach().cpu(), state or None)
            self.dense.append(table)
        size = self.context.process.size
        if name == "momentum" and shares_steps and size > 1:
            self.context.notice(
                f"momentum={options['momentum']:g} over {size} ranks that do not wait: stale "
                "gradients act as momentum already; if the loss grows, lower momentum or the "
                "learning rate"
            )

    def flush(self) -> None:
        """Return when everything this rank has pushed is applied."""
        if self.embeddings is not None:
            self.embeddings.flush()
        else:
            self.store.flush()

    def report(self, round: int) -> None:
        """Counters of the servers and of this rank, about once a second, as an event of rank 0."""
        elapsed = time.monotonic() - self._reported
        if self.context.leads and elapsed >= EVENT_EVERY_S:
            self._reported += elapsed
            # behind a cache, which counts its hits
            store = self.store if self.embeddings is None else self.embeddings.store
            self.context.recorder.emit(server_event(store.stats(), time.time(), round, elapsed))

    # -- checkpoints --

    def begin_snapshot(self, round: int) -> SavingTables | None:
        """Begin to save the rows of embeddings as they are now: the servers write them themselves,
        while training goes on. Rank 0 calls it, and nobody pushes meanwhile."""
        if not self.sparse:
            return None
        folder = self.context.checkpoints.room_for_tables(round)
        return self._files.begin(self.store, [t.name for t in self.sparse], folder, round)

    def dense_state(self, strategy: Strategy[Any, Any]) -> dict[str, Tensors]:
        """The server optimizer's state of the dense vectors, by vector."""
        if strategy.on_server != "optimizer":
            return {}
        return {t.name: _state(self.store.dump(t.name)) for t in self.dense}

    def restore(self, saved: Snapshot) -> None:
        """Rank 0 restores the rows of a checkpoint; all ranks wait until they are applied."""
        contents = saved_tables(
            {k.removeprefix(PREFIX): v for k, v in saved.state.items() if k.startswith(PREFIX)}
        )
        files = saved_readers(self.context.checkpoints.last_good)
        for table in self.sparse:
            content = contents.get(table.name)
            if table.name in files:
                reader, drop = files[table.name], self.plan.table_state == "drop"
                drops = check_saved(reader, table, drop)  # on every rank: all of them refuse it
                if drops:
                    self.context.notice(
                        f"the embedding {table.name!r} keeps its values; the state of "
                        f"{reader.table['optimizer']} is dropped, {table.optimizer} starts anew"
                    )
                if self.context.rank == 0:
                    pieces = without_state(reader) if drops else reader.contents()
                    self.store.restore_pieces(table.name, pieces)
            elif content and self.context.rank == 0:
                self.store.restore(table.name, content)
            elif not content:
                self.context.notice(
                    f"the checkpoint has no rows of the embedding {table.name!r}: it starts anew"
                )
        self.flush()
        self.context.group.barrier()


def saved_readers(checkpoint: Path | None) -> dict[str, TableReader]:
    """The tables of a checkpoint that servers wrote, by name."""
    if checkpoint is None:
        return {}
    layers = table_layers(checkpoint, read_manifest(checkpoint))
    return {name: TableReader(files) for name, files in layers.items()}


def _state(content: Tensors) -> Tensors:
    return {k.removeprefix("state/"): v for k, v in content.items() if k.startswith("state/")}


def open_tables(
    context: RankContext, plan: Plan, module: nn.Module, ids: Ids | None = None
) -> RunTables | None:
    """Start or join the servers of the plan, or hold the tables here; None: the run needs none."""
    embedded, over_store = bool(embeddings(module)), plan.strategy.link is Store
    _check(context, plan, embedded, over_store, ids)
    if not embedded and not over_store:
        return None
    if embedded and plan.clip is not None:
        context.notice(
            f"clip={plan.clip:g} bounds the gradient of parameters; "
            "rows of mh.Embedding are not clipped"
        )
    store, leases = connect_store(context, plan, _modules(module))
    if not embedded:
        tables = RunTables(context, plan, store, None)
        tables.leases = leases
        return tables
    seen: TableStore = CachedStore(store, plan.cache, plan.cache_age) if plan.cache else store
    rows = EmbeddingTables(
        module, seen, ids=ids, synchronous=plan.embeddings == "sync", notice=context.notice
    )
    rows.attach()
    _say_what_is_trained(context, module)
    # in one process the model keeps its rows after the run; those on servers end with them
    close = rows.close if plan.servers else functools.partial(rows.leave_rows, store)
    context.to_close.insert(0, close)  # before the store that it pushes to
    return RunTables(context, plan, store, rows)


def _check(
    context: RankContext, plan: Plan, embedded: bool, over_store: bool, ids: Ids | None
) -> None:
    """Refuse words that have no effect on this model, and plans that lack a server."""
    if ids is not None and not embedded:
        raise TaskError(
            "Task.ids names what mh.Embedding tables look up, but the model has none; leave it out"
        )
    if plan.servers and not embedded and not over_store:
        raise PlanError(
            f"servers={plan.servers} has no effect: merge={plan.merge} moves the model between "
            "ranks and the model has no mh.Embedding; add staleness=0 (synchronous), staleness=4 "
            "or merge=downpour to keep the model on the servers"
        )
    for word in ("save_tables", "table_state"):
        value = getattr(plan, word)
        if not embedded and value != Plan.__dataclass_fields__[word].default:
            raise PlanError(
                f"{word}={value} has no effect: the model has no mh.Embedding; leave it out"
            )
    if plan.embeddings == "sync" and not embedded:
        raise PlanError(
            "embeddings=sync has no effect: the model has no mh.Embedding; leave it out"
        )
    for key in ("cache", "lookahead", "hot_rows"):
        if not embedded and getattr(plan, key) != Plan.__dataclass_fields__[key].default:
            raise PlanError(
                f"{key}={getattr(plan, key)} has no effect: the model has no mh.Embedding; "
                "leave it out"
            )
    if embedded and plan.elastic is not None:
        raise PlanError(
            f"elastic={plan.elastic}: rows of mh.Embedding are pushed apart from the model, and a "
            "rank that dies between the two would count once in one and twice in the other; leave "
            "elastic= out"
        )
    if embedded and plan.precision == "fp16":
        raise PlanError(
            "precision=fp16 scales the loss, and rows of mh.Embedding are updated before that is "
            "undone; set precision=bf16"
        )
    if (embedded or over_store) and not plan.servers and context.process.size > 1:
        raise PlanError(
            f"tables of mh.Embedding must be on a server where data={context.process.size} ranks "
            "use them; add servers=1"
        )


def _say_what_is_trained(context: RankContext, module: nn.Module) -> None:
    """Rows are no parameters, so requires_grad_(False) on a module around them does not reach
    them: say so where everything beside an embedding is frozen, and it is not."""
    for name, around in module.named_modules():
        own = [p for p in around.parameters() if not isinstance(around, Embedding)]
        rows = sorted({m.name for m in embeddings(around) if not m.frozen})
        if own and rows and not any(p.requires_grad for p in own):
            context.notice(
                f"all parameters of {name or 'the model'} are frozen, but the rows of "
                f"{', '.join(rows)} in it are trained; call requires_grad_(False) on the "
                "mh.Embedding itself to keep its rows as they are"
            )
            return


def rows_of_this_process() -> EmbeddingTables:
    """For `Embedding` modules in a script without a run."""
    return script_tables(LocalStore(0, 1))


def connect_store(
    context: RankContext, plan: Plan, modules: Sequence[str] = ()
) -> tuple[TableStore, StepLeases | None]:
    """The store of a plan, on its servers or in this process; `modules` of custom optimizers."""
    if not plan.servers:
        return LocalStore(0, 1, [Shard(modules=modules)]), None
    process = context.process
    # of an elastic run, the launcher has started them
    options = (
        server_options(plan, context.directory, modules)
        if plan.elastic is None
        else processes.ServerOptions()
    )
    started = processes.start(
        plan.servers,
        process,
        context.store,
        workers=process.size,
        timeout_s=plan.timeout_s,
        options=options,
    )
    context.to_close.append(started.close)
    context.server_failures = started.fate
    install_frame_faults(process.rank)
    payload: Any = plan.compress if plan.compress in SERVER_CODECS else "none"
    store = ServerStore(
        started.coordinator,
        process.rank,
        process.size,
        started.token,
        timeout_s=plan.timeout_s,
        lease_s=plan.lease_s or _default_lease_s(plan),
        payload=payload,
        tls=started.tls,
        namespace=started.namespace,
        elastic=plan.elastic is not None,
    )
    context.to_close.insert(0, store.close)  # before the servers it talks to
    leases = None
    if plan.elastic is not None:
        client = ElasticClient(store, marks=plan.strategy.on_server == "optimizer")
        leases = StepLeases(context, client)
        context.take_part(client.gather, client.replaces)
    named = NamespacedStore(store, started.namespace) if started.namespace else store
    return ObservedStore(named, context.group, payload), leases


def _default_lease_s(plan: Plan) -> float:
    """Elastic ranks go on without one that says nothing; others would only end with an error."""
    return plan.timeout_s if plan.elastic is None else min(plan.timeout_s, ELASTIC_LEASE_S)


def server_options(
    plan: Plan, directory: Path, modules: Sequence[str] = ()
) -> processes.ServerOptions:
    """How the servers of a run are started."""
    return processes.ServerOptions(
        plan.shards,
        plan.replicas,
        plan.ack,
        None if plan.server_memory is None else parse_bytes(plan.server_memory),
        tuple(modules),
        (plan.membership or str(directory / "membership")) if plan.replicas > 1 else "",
        directory.name,
        str(directory / SERVERS_FILE),
        plan.hot_rows,
        plan.hot_age,
    )


def _modules(module: nn.Module) -> list[str]:
    """Modules of the user's own server optimizers, which the servers are then allowed to import."""
    names = [m.table.optimizer for m in embeddings(module)]
    return sorted({name.partition(":")[0] for name in names if ":" in name})
