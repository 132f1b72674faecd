"""Start of a run: the snapshot that it resumes from, batch sizes that follow, and what it says."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.assembly.data import batch_sizes, resolve_split
from manyhands.assembly.own_state import layout_of, ranks_per_replica, saved_layout
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.spec import TrainingSpec
from manyhands.core import Event, Plan, Position, Snapshot
from manyhands.data.drawn import DrawnSource
from manyhands.data.sources import Source
from manyhands.errors import CheckpointError, TaskError
from manyhands.launch import environment
from manyhands.plan import words
from manyhands.recover import sharded_file
from manyhands.recover.checkpoint import NEW, read_manifest
from manyhands.recover.read_share import ReadShare, load_share


@dataclass(frozen=True)
class Start:
    """Where a run starts: anew, or from a snapshot."""

    plan: Plan
    global_batch: int  # samples of a step over all ranks
    order: dict[str, Any]  # what the order of samples follows from
    saved: Snapshot | None = None
    at: Position = field(default_factory=Position)  # where there is no snapshot (any more)

    @property
    def position(self) -> Position:
        return self.at if self.saved is None else self.saved.position

    @property
    def seed(self) -> int:
        return self.plan.seed or 0


def start(context: RankContext, plan: Plan, train: Source) -> Start:
    plan = resolve_split(plan, train)
    order = {"split": plan.split, "seed": plan.seed or 0, "samples": train.samples}
    if (regrouping := context.regrouping) is not None and regrouping.begin is not None:
        meta = regrouping.begin.meta  # the run goes on with another group of ranks
        plan, _ = batch_sizes(context, plan, train, None)
        return Start(plan, meta["global_batch"], order, None, Position(*meta["position"]))
    if plan.split != "by_feature":  # each rank has columns of its own
        _check_same_data(context, train)
    saved = find_snapshot(context, order) if context.options.resume else None
    plan, global_batch = batch_sizes(context, plan, train, saved)
    if context.elastic is not None and context.options.resume:
        return _elastic_start(context, Start(plan, global_batch, order, saved))
    return Start(plan, global_batch, order, saved)


def _elastic_start(context: RankContext, here: Start) -> Start:
    """Where the first of all ranks started, also for a process that comes later, in place of a dead
    one: then there are newer checkpoints, and that one may be gone."""
    at, saved = here.position, here.saved
    mine = [-1 if saved is None else saved.round, here.global_batch, at.epoch, at.offset, at.steps]
    agreed = context.store.compare_set("elastic start", "", json.dumps(mine))
    round, global_batch, *position = json.loads(bytes(agreed))
    if saved is not None and saved.round != round:
        if not environment.starts():
            raise CheckpointError(
                f"ranks see different checkpoints in {context.directory} (rounds {round} and "
                f"{saved.round}); all ranks must see the same directory: put it on a shared disk"
            )
        saved = None
    return dataclasses.replace(here, global_batch=global_batch, saved=saved, at=Position(*position))


def _check_same_data(context: RankContext, train: Source) -> None:
    """Refuse a task that draws other training data on every rank."""
    if context.process.size == 1:
        return
    digest = train.digest()
    first = bytes(context.store.compare_set("training data", "", digest)).decode()
    if first != digest:
        raise TaskError(
            "the training data of this rank is not that of the others: task() makes or divides it "
            "with random numbers that nobody seeded; give it a seed of its own (random_state=0)"
        )


def find_snapshot(context: RankContext, order: dict[str, Any]) -> Snapshot | None:
    """The newest good snapshot: the same on every rank, or an error."""
    saved = _newest_good(context)
    if saved is not None:
        saved = with_present_names(saved)
    if saved is None:
        context.notice(
            f"nothing to resume in {context.directory}: no checkpoint yet; "
            "starting from the beginning"
        )
    elif saved.position.offset and (then := saved.meta["order"]) != order:
        changed = ", ".join(f"{k} {then[k]} -> {order[k]}" for k in order if then[k] != order[k])
        context.notice(
            f"the order of samples is another one than before ({changed}): "
            "in this epoch some may come twice or not at all"
        )
    return saved


def _newest_good(context: RankContext) -> Snapshot | None:
    """Every rank reads and checks its share (`recover.read_share`). A checkpoint in which one of
    them finds damage is passed over by all."""
    checkpoints = context.checkpoints
    found = checkpoints.all()
    for path in [*reversed(found), None]:
        _check_same_round(context, path)
        if path is None:
            break
        saved, wrong = None, ""
        try:
            saved = load_share(path, _share(context, read_manifest(path)["meta"]))
        except CheckpointError as e:
            wrong = str(e)
        if said := sharded_file.shared_error(context.group, wrong, context.device):
            checkpoints.report("warning", 0.0, 0, f"{said}; using the one before it")
        else:
            checkpoints.last_good = path
            return saved
    if found:
        raise CheckpointError(
            f"all {len(found)} checkpoints in {checkpoints.folder} are damaged; "
            "start anew without resume"
        )
    return None


def _round_of(path: Path) -> int:
    """By its name; -2: it is no name of ours."""
    number = path.name.removeprefix("step-").removesuffix(NEW)
    return int(number) if number.isdigit() else -2


def _check_same_round(context: RankContext, path: Path | None) -> None:
    here = torch.tensor(
        [-1 if path is None else _round_of(path)], dtype=torch.int64, device=context.device
    )
    span = torch.cat([here, -here])
    context.group.all_reduce({"round": span}, op="max").wait()
    if span[0] != -span[1]:
        raise CheckpointError(
            f"ranks see different checkpoints in {context.directory} "
            f"(rounds {-int(span[1])} to {int(span[0])}; -1: none); "
            "all ranks must see the same directory: put it on a shared disk"
        )


def _share(context: RankContext, meta: dict[str, Any]) -> ReadShare:
    """What this rank reads of a checkpoint with such a manifest. Of what ranks had for themselves
    its own; on another number of replicas also what is divided anew among them. Of a model that is
    split it reads slices, later."""
    rank, layout = context.rank, context.plan.layout
    inner, same = ranks_per_replica(layout), layout_of(meta).data == layout.data

    def reads(name: str) -> bool:
        kind, whose, *rest = name.split("/")
        if kind in ("model", "optimizer"):
            return not context.splits_model
        if kind == "ranks" and whose.isdigit():
            divided = not same and rest[:1] in (["codec"], ["wire"])
            return int(whose) == rank or (divided and int(whose) % inner == rank % inner)
        # random numbers are few, and which ranks have them is asked for by name
        return kind != "ranks" or whose in ("*", f"*{rank % inner}")

    # of ranks that come and go, each reads and checks for itself
    hashes = (rank, context.process.size) if context.elastic is None else (0, 1)
    return ReadShare(*hashes, reads, later=lambda name: name.startswith(("model/", "optimizer/")))


def with_present_names(saved: Snapshot) -> Snapshot:
    """A snapshot of version 0.1, in whose files strategies were rules and codecs were wires."""
    old = {"rule": "strategy", "part": "word", "wire_kept": "codec_kept"}
    saved.meta = {old.get(k, k): v for k, v in saved.meta.items()}
    saved.ranks = {_codec_name(k): v for k, v in saved.ranks.items()}
    return saved


def _codec_name(name: str) -> str:
    """`<rank>/wire/...` is `<rank>/codec/...` now."""
    rank, kind, rest = name.split("/", 2)
    return f"{rank}/codec/{rest}" if kind == "wire" else name


def notice_resumed(context: RankContext, begin: Start) -> None:
    if (saved := begin.saved) is not None:
        at = saved.position
        context.notice(
            f"resumed at round {saved.round} (epoch {at.epoch}, {at.offset} samples into it) "
            f"from {context.checkpoints.last_good}"
        )
        if context.options.kept:
            context.notice(f"as before: {context.options.kept} (a word given anew changes it)")
        then, now = saved_layout(saved), begin.plan.layout
        if then != now:
            context.notice(
                f"on {words.layout_line(now)} from here on, {words.layout_line(then)} before"
            )


def announce(
    context: RankContext,
    plan: Plan,
    module: nn.Module,
    global_batch: int,
    spec: TrainingSpec,
) -> None:
    """Events at the start of a run, from rank 0, and the resolved plan in the run directory."""
    if not context.leads:
        return
    resolved = dataclasses.replace(plan, threads=torch.get_num_threads())
    step = f"{global_batch} samples a step"
    if isinstance(spec.train, DrawnSource):
        # words about data would be refused where the plan is given again
        resolved, step = dataclasses.replace(resolved, batch=None, split="auto"), "own batches"
    context.write_plan(words.to_toml(resolved))
    here = sum(p.numel() for p in module.parameters())
    model = f"{type(module).__name__}, {here:,} parameters"
    if spec.part is not None:
        model = f"{spec.part.name}, {here:,} of them on rank 0"
    where = context.device.type
    if context.process.size > 1:
        where = f"{context.process.size} x {where} over {context.group_name}"
    texts = {
        "start": words.brief(resolved),
        "model": f"{model}; {step}; {where}",
        "run": str(context.directory),
    }
    for name, text in texts.items():
        context.recorder.emit(Event(time.time(), 0, context.group.round, name, value=text))
    context.recorder.flush()
