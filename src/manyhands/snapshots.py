"""All of a run as a `Snapshot`, and back: what is common to all ranks once, what is a rank's own once a rank.

Nobody declares what differs: every rank's checksums are compared, and only tensors that are not the same everywhere travel to
rank 0, which writes. On as many ranks as before each takes its own back, bit for bit. On another number, all start from the one
model that the ranks stood for; error feedback is shared out evenly, so that nothing held back is lost.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.compute import batches as data
from manyhands.compute import served, state
from manyhands.compute.module import ModuleReplica
from manyhands.compute.update import prime
from manyhands.core import Plan, Snapshot, Tensors
from manyhands.errors import CheckpointError
from manyhands.plan import words
from manyhands.rule import Rule
from manyhands.serving import Serving
from manyhands.site import Site


@dataclass
class Snapshots:
    """What a snapshot of this rank's run is made of."""

    site: Site
    plan: Plan
    module: nn.Module
    replica: ModuleReplica
    walk: data.Batches
    global_batch: int
    order: dict[str, Any]
    serving: Serving | None = None
    consensus: Tensors | None = None  # the model that was restored, before each rank took its own back

    def take(self, round: int, rule: Rule, metrics: dict[str, float]) -> Snapshot:
        """Every rank calls it; rank 0 gets the snapshot, the others an empty one."""
        site, update = self.site, self.replica.update
        rng = _all_rng(site)
        model = rule.consensus(self.replica, site.link)
        own = self._own(rule, model is not None)
        empty = Snapshot(round, {}, {}, {}, self.walk.position)
        if site.rank != 0 and not update.part_only:
            return empty
        tensors, optimizer_meta = update.save(lambda values: site.link.all_reduce(values).wait())
        if site.rank != 0:
            return empty
        rows: Tensors = {}
        if self.serving is not None:
            rows, moments = self.serving.dump(rule.strategy)
            if moments:
                tensors = served.named_state(self.replica.flat, self.replica.optimizer, moments)
                rows |= served.named_compensation(self.replica.flat, moments)
        schedule, scaler = self.replica.schedule, self.replica.scaler
        meta = {
            "optimizer": optimizer_meta,
            "schedule": None if schedule is None else state.to_plain(schedule.state_dict()),
            "scaler": None if scaler is None else scaler.state_dict(),
            "global_batch": self.global_batch,
            "order": self.order,
            "plan": words.describe(self.plan),
            "metrics": metrics,
            "size": site.place.size,
            "rule": rule.name,
            "part": rule.part,
        }
        with self.replica.flat.holding(model):
            params = state.model_state(self.module)
        merge_state = rows | {k: v.detach().to("cpu", copy=True) for k, v in rule.state.items()}
        return Snapshot(round, params, tensors, merge_state, self.walk.position, rng, meta, own)

    def _own(self, rule: Rule, model_apart: bool) -> Tensors:
        """What is not the same on all ranks, of all of them; and what no other part of the snapshot holds. On rank 0."""
        wire = {f"wire/{k}": v for k, v in rule.wire_state().items()}
        mine = dict(wire)
        if not rule.strategy.replicas_agree:
            flat, optimizer = self.replica.flat, self.replica.optimizer
            new = prime(optimizer)  # for the time of saving: ranks must name the same, also one that has had no samples yet
            mine |= {f"param/{k}": v for k, v in flat.values.items()}
            mine |= {f"optimizer/{k}": v for k, v in state.optimizer_state(self.module, optimizer)[0].items()}
            mine |= {f"state/{k}": v for k, v in rule.state.items()}
            if self.replica.scaler is not None:
                mine["scaler/scale"] = torch.tensor([self.replica.scaler.get_scale()], dtype=torch.float64)
            for p in new:
                del optimizer.state[p]
        differing = _differing(self.site, mine)
        found = _gathered(self.site, {k: mine[k] for k in differing})
        once = [k for k in mine if k not in differing and (k in wire or (model_apart and k.startswith("param/")))]
        return {**found, **{f"*/{k}": mine[k].detach().to("cpu", copy=True) for k in once}}

    # -- and back --

    def restore(self, saved: Snapshot, rule_name: str) -> None:
        """Model, optimizer, schedule, scaler and random numbers."""
        replica, site = self.replica, self.site
        state.load_model(self.module, saved.params)
        if self.serving is not None:
            self.consensus = {k: v.clone() for k, v in replica.flat.values.items()}
            self.serving.restore(saved)
        mine = self._mine(saved)
        optimizer = {k.partition("/")[2]: v for k, v in mine.items() if k.startswith("optimizer/")}
        replica.update.load({**saved.optimizer, **optimizer}, saved.meta["optimizer"])
        if saved.meta.get("rule", rule_name) == rule_name:
            for key, values in replica.flat.values.items():
                if (own := mine.get(f"param/{key}")) is not None:
                    values.copy_(own)
        if replica.schedule is not None and saved.meta["schedule"] is not None:
            replica.schedule.load_state_dict(state.from_plain(saved.meta["schedule"]))
        if replica.scaler is not None and saved.meta["scaler"] is not None:
            replica.scaler.load_state_dict(saved.meta["scaler"])
            if (own := mine.get("scaler/scale")) is not None:
                replica.scaler.update(new_scale=float(own))
        rng = {k.partition("/")[2]: v for k, v in saved.rng.items() if k.partition("/")[0] == str(site.rank)}
        if rng and all(f"{r}/torch" in saved.rng for r in range(site.place.size)):
            state.load_rng(rng, site.device)

    def restore_rule(self, saved: Snapshot, rule: Rule) -> Tensors:
        """The rule's state, in place; returns that of its wire. A rule that was not at work then starts anew from the model."""
        then = saved.meta.get("rule", rule.name)
        if then != rule.name:
            self.site.notice(f"merge={rule.name} from here on, {then} before: it starts from the model, with a state of its own")
            return {}
        mine = self._mine(saved)
        lost = []
        for key, value in rule.state.items():
            of_ranks = f"0/state/{key}" in saved.ranks
            found = mine.get(f"state/{key}") if of_ranks else saved.state.get(key)
            if found is not None and found.shape == value.shape:
                value.copy_(found)
            else:
                lost.append(key)
        if lost:
            self.site.notice(f"what each of {saved.meta['size']} ranks kept for itself starts anew here: {', '.join(lost)}")
        return {k.partition("/")[2]: v for k, v in mine.items() if k.startswith("wire/")}

    def _mine(self, saved: Snapshot) -> Tensors:
        """This rank's share of what ranks had for themselves: its own, or on another number of ranks what can be shared out."""
        size, before = self.site.place.size, saved.meta.get("size")
        mine = {k[2:]: v for k, v in saved.ranks.items() if k.startswith("*/")}
        own = {k.partition("/")[2]: v for k, v in saved.ranks.items() if k.startswith(f"{self.site.rank}/")}
        if before == size:
            return {**mine, **own}
        held_back = [k.partition("/")[2] for k in saved.ranks if k.startswith("0/wire/")]
        for key in (k for k in held_back if not k.startswith("wire/second/")):  # what owners of shards lost has no place any more
            mine[key] = torch.stack([saved.ranks[f"{r}/{key}"] for r in range(before or 0)]).sum(0) / size
        return mine


def found(site: Site, order: dict[str, Any]) -> Snapshot | None:
    """What to go on from: the same on every rank, or an error."""
    saved = site.checkpoints.latest()
    here = torch.tensor([-1 if saved is None else saved.round], dtype=torch.int64, device=site.device)
    span = torch.cat([here, -here])
    site.link.all_reduce({"round": span}, op="max").wait()
    if span[0] != -span[1]:
        raise CheckpointError(
            f"ranks see different checkpoints in {site.directory} (rounds {-int(span[1])} to {int(span[0])}; -1: none); "
            "all ranks must see the same directory: put it on a shared disk"
        )
    if saved is None:
        site.notice(f"nothing to resume in {site.directory}: no checkpoint yet; starting from the beginning")
    elif saved.position.offset and (then := saved.meta["order"]) != order:
        changed = ", ".join(f"{k} {then[k]} -> {order[k]}" for k in order if then[k] != order[k])
        site.notice(
            f"the order of samples is another one than before ({changed}): in this epoch some may come twice or not at all"
        )
    return saved


def _all_rng(site: Site) -> Tensors:
    """Every rank's generators, on rank 0."""
    mine = state.rng_state(site.device)
    rows = {k: torch.zeros(site.place.size, v.numel(), dtype=torch.int32) for k, v in mine.items()}
    for k, v in mine.items():
        rows[k][site.rank] = v.to(torch.int32)
    rows = {k: v.to(site.device) for k, v in rows.items()} if site.device.type == "cuda" else rows
    site.link.all_reduce(rows).wait()
    return {f"{r}/{k}": v[r].to("cpu", torch.uint8) for k, v in rows.items() for r in range(site.place.size)}


def _differing(site: Site, mine: Tensors) -> list[str]:
    """The names of tensors that are not the same, to the bit, on all ranks."""
    if site.place.size == 1 or not mine:
        return []
    sums = []
    for value in mine.values():
        raw = _bytes(value).cpu().numpy().tobytes()
        sums.append(zlib.crc32(raw) << 31 | zlib.adler32(raw) >> 1)
    here = torch.tensor(sums, dtype=torch.int64, device=site.device)
    span = torch.cat([here, -here])
    site.link.all_reduce({"checksums": span}, op="max").wait()
    same = (span[: len(sums)] == -span[len(sums) :]).tolist()
    return [k for k, alike in zip(mine, same, strict=True) if not alike]


def _gathered(site: Site, mine: Tensors) -> Tensors:
    """Everybody's tensors on rank 0, under "<rank>/<name>"; nothing elsewhere. A vector may be of another length elsewhere."""
    if not mine:
        return {}
    lengths = torch.zeros(site.place.size, len(mine), dtype=torch.int64, device=site.device)
    lengths[site.rank] = torch.tensor([v.numel() for v in mine.values()])
    site.link.all_reduce({"lengths": lengths}).wait()
    packed = torch.cat([_bytes(v) for v in mine.values()]).to(site.device)
    if site.rank != 0:
        site.link.transfer({0: packed}, {}).wait()
        return {}
    sizes = torch.tensor([v.element_size() for v in mine.values()])
    others = {
        r: torch.empty(int(lengths[r].cpu() @ sizes), dtype=torch.uint8, device=site.device) for r in range(1, site.place.size)
    }
    site.link.transfer({}, others).wait()
    found: Tensors = {}
    for rank, raw in {0: packed, **others}.items():
        at = 0
        for (name, value), length in zip(mine.items(), lengths[rank].tolist(), strict=True):
            piece = raw[at : at + length * value.element_size()].cpu().clone()  # a slice may start at any byte
            found[f"{rank}/{name}"] = piece.view(value.dtype).view(value.shape if length == value.numel() else length)
            at += piece.numel()
    return found


def _bytes(value: Tensor) -> Tensor:
    flat: Any = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
