"""A rank's own state in a checkpoint: what differs between replicas.

Parameters, optimizer moments, strategy state and error feedback may.

No strategy declares what differs. Ranks compare checksums, and only tensors that are not equal on
all replicas are saved once per rank. On as many replicas as before, each rank takes its own back,
bit for bit. On another number all start from the consensus model, and error feedback is divided
evenly, so that nothing that a codec has held back is lost.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Layout, Plan, Snapshot, Tensors
from manyhands.parallel.reshard.rank_state import RankState
from manyhands.parallel.reshard.resharding import Resharding
from manyhands.replica import state
from manyhands.replica.module import ModuleReplica
from manyhands.replica.update import prime
from manyhands.trainer_parts import ActiveStrategy

PACKET_BYTES = 64 * 2**20
HELD_BACK = ("codec/error/", "codec/velocity/")  # sums over ranks that are still to be sent


@dataclass
class OwnState:
    """By kind and name: codec/, param/, optimizer/, state/ (of the strategy), scaler/."""

    context: RankContext
    plan: Plan
    module: nn.Module
    replica: ModuleReplica
    resharding: Resharding | None = None
    local: RankState | None = None

    def __post_init__(self) -> None:
        self._same_split: bool | None = None

    def gather(self, active: ActiveStrategy, model_apart: bool) -> Tensors:
        """On rank 0: what differs between ranks, of all ranks; and what is equal on all ranks but
        in no other part of the snapshot."""
        mine = self._kept(active)
        names = differing(self.context, mine)
        found = gathered(self.context, {k: mine[k] for k in names})
        apart = ("codec/", "param/") if model_apart else ("codec/",)
        once = [k for k in mine if k not in names and k.startswith(apart)]
        return {**found, **{f"*/{k}": mine[k].detach().to("cpu", copy=True) for k in once}}

    def for_sharded_file(self, active: ActiveStrategy, model_apart: bool) -> Tensors:
        """Of a model that is split, by name in the file: what differs between replicas; what does
        not, from the first rank that holds it."""
        inner, rank = ranks_per_replica(self.plan.layout), self.context.rank
        mine = self._kept(active) | {f"state/{k}": v for k, v in active.state.items()}
        names = differing(self.context, mine)
        own = {f"ranks/{rank}/{k}": mine[k] for k in names}
        if rank < inner:
            apart = ("codec/", "state/", "param/") if model_apart else ("codec/", "state/")
            once = {k: v for k, v in mine.items() if k not in names and k.startswith(apart)}
            own |= {f"ranks/*{rank}/{k}": v for k, v in once.items()}
        return {k: v.detach() for k, v in own.items()}

    def _kept(self, active: ActiveStrategy) -> Tensors:
        """What may differ between ranks, by kind and name."""
        mine = {f"codec/{k}": v for k, v in active.codec_state().items()}
        if active.strategy.replicas_agree:
            return mine
        flat, optimizer = self.replica.flat, self.replica.optimizer
        # while saving: ranks must give the same names, also one that has had no samples yet
        new = prime(optimizer)
        mine |= {f"param/{k}": v for k, v in flat.values.items()}
        if self.local is None:
            moments, _ = state.optimizer_state(self.module, optimizer)
        else:
            moments, _ = self.local.optimizer()
        mine |= {f"optimizer/{k}": v for k, v in moments.items()}
        mine |= {f"state/{k}": v for k, v in active.state.items()}
        if (scaler := self.replica.scaler) is not None:
            mine["scaler/scale"] = torch.tensor([scaler.get_scale()], dtype=torch.float64)
        for p in new:
            del optimizer.state[p]
        return mine

    # -- and back --

    def of_this_rank(self, saved: Snapshot) -> Tensors:
        """This rank's own tensors of a snapshot; on another number of replicas, its share of what
        can be divided."""
        if not self.fits(saved):
            return {}
        layout = self.plan.layout
        inner, before, now = ranks_per_replica(layout), saved_layout(saved).data, layout.data
        at = self.context.rank % inner  # which part of the model this rank holds
        common, own = f"*{at if inner > 1 else ''}/", f"{self.context.rank}/"
        mine = {k.removeprefix(common): v for k, v in saved.ranks.items() if k.startswith(common)}
        if before == now:
            kept = {k.removeprefix(own): v for k, v in saved.ranks.items() if k.startswith(own)}
            return {**mine, **kept}
        for key in mine:
            if key.startswith(HELD_BACK):  # every rank that there was held back as much
                mine[key] = mine[key] * before / now
        held_back = [k.partition("/")[2] for k in saved.ranks if k.startswith(f"{at}/codec/")]
        for key in held_back:
            # of the second stage: lost by the owners of shards, which have other shards now
            if not key.startswith("codec/second/"):
                every = [saved.ranks[f"{r * inner + at}/{key}"] for r in range(before)]
                mine[key] = torch.stack(every).sum(0) / now
        return mine

    def fits(self, saved: Snapshot) -> bool:
        """Whether every rank holds the same part of the model as when it was saved; the number of
        replicas may differ. Where the model is split, every rank must call it."""
        if self._same_split is None:
            self._same_split = self._compare_split(saved)
        return self._same_split

    def _compare_split(self, saved: Snapshot) -> bool:
        then, now = saved_layout(saved), self.plan.layout
        same = dataclasses.replace(then, data=1) == dataclasses.replace(now, data=1)
        if self.resharding is None or self.local is None:
            return same
        if same:
            signatures = saved.meta.get("parts", [])
            mine = signatures[self.context.rank % ranks_per_replica(now)]
            same = mine == self.resharding.signature(self.local.model())
        other = torch.tensor([int(not same)], dtype=torch.int64, device=self.context.device)
        self.context.group.all_reduce({"other": other}, op="max").wait()
        return not int(other)


def saved_layout(saved: Snapshot) -> Layout:
    return layout_of(saved.meta)


def layout_of(meta: dict[str, Any]) -> Layout:
    """Checkpoints from before there was more than one axis know only the number of ranks."""
    axes = meta.get("layout")
    return Layout(data=meta.get("size") or 1) if axes is None else Layout(**axes)


def ranks_per_replica(layout: Layout) -> int:
    return layout.size // layout.data


# -- tensors that differ between ranks --


def agreed(context: RankContext, moments: Tensors) -> Tensors:
    """Of optimizer state that replicas have each for themselves, the mean, and of counts of steps
    the largest: what replicas go on from that agree. All ranks give the same names."""
    means = {
        k: v.to(context.device, copy=True)
        for k, v in moments.items()
        if v.ndim and v.is_floating_point()
    }
    counts = [k for k, v in moments.items() if not v.ndim]
    largest = torch.tensor([float(moments[k]) for k in counts], dtype=torch.float64)
    largest = largest.to(context.device)
    if means:
        context.data_group.all_reduce(means, op="mean").wait()
    if counts:
        context.data_group.all_reduce({"counts": largest}, op="max").wait()
    alike = {
        k: torch.full_like(moments[k], n) for k, n in zip(counts, largest.tolist(), strict=True)
    }
    return {**moments, **{k: v.cpu() for k, v in means.items()}, **alike}


def all_rng(context: RankContext) -> Tensors:
    """Every rank's random number generators, as "<rank>/<generator>"."""
    mine, size = state.rng_state(context.device), context.process.size
    rows = {k: torch.zeros(size, v.numel(), dtype=torch.int32) for k, v in mine.items()}
    for k, v in mine.items():
        rows[k][context.rank] = v.to(torch.int32)
    if context.device.type == "cuda":
        rows = {k: v.to(context.device) for k, v in rows.items()}
    context.group.all_reduce(rows).wait()
    return {f"{r}/{k}": v[r].to("cpu", torch.uint8) for k, v in rows.items() for r in range(size)}


def differing(context: RankContext, mine: Tensors) -> list[str]:
    """Names of tensors that are not equal, to the bit, on all replicas."""
    if context.data_group.size == 1 or not mine:
        return []
    sums = []
    for value in mine.values():
        raw = _bytes(value).cpu().numpy().tobytes()
        sums.append(zlib.crc32(raw) << 31 | zlib.adler32(raw) >> 1)
    here = torch.tensor(sums, dtype=torch.int64, device=context.device)
    span = torch.cat([here, -here])
    context.data_group.all_reduce({"checksums": span}, op="max").wait()
    same = (span[: len(sums)] == -span[len(sums) :]).tolist()
    return [k for k, alike in zip(mine, same, strict=True) if not alike]


def gathered(context: RankContext, mine: Tensors) -> Tensors:
    """On rank 0 every rank's tensors, under "<rank>/<name>", in the host's memory; nothing on the
    others. A vector may have another length on another rank.

    They come one rank after the other, PACKET_BYTES at a time: rank 0's device, which is full of
    the model, never has more of them."""
    if not mine:
        return {}
    size = context.process.size
    lengths = torch.zeros(size, len(mine), dtype=torch.int64, device=context.device)
    lengths[context.rank] = torch.tensor([v.numel() for v in mine.values()])
    context.group.all_reduce({"lengths": lengths}).wait()
    counts, widths = lengths.tolist(), [v.element_size() for v in mine.values()]
    if context.rank != 0:
        _send_packets(context, [_bytes(v) for v in mine.values()])
        return {}
    found = {f"0/{k}": v.detach().to("cpu", copy=True) for k, v in mine.items()}
    for rank in range(1, size):
        theirs: Tensors = {}
        for (name, value), n in zip(mine.items(), counts[rank], strict=True):
            shape = value.shape if n == value.numel() else (n,)
            theirs[f"{rank}/{name}"] = torch.empty(shape, dtype=value.dtype)
        nbytes = [n * width for n, width in zip(counts[rank], widths, strict=True)]
        _receive_packets(context, rank, nbytes, [_bytes(v) for v in theirs.values()])
        found |= theirs
    return found


def _packets(nbytes: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Vectors of these lengths in packets of at most PACKET_BYTES: which vector, from, to."""
    packet: list[tuple[int, int, int]] = []
    room = PACKET_BYTES
    for i, length in enumerate(nbytes):
        at = 0
        while at < length:
            stop = min(length, at + room)
            packet.append((i, at, stop))
            room, at = room - (stop - at), stop
            if not room:
                yield packet
                packet, room = [], PACKET_BYTES
    if packet:
        yield packet


def _send_packets(context: RankContext, vectors: list[Tensor]) -> None:
    for packet in _packets([v.numel() for v in vectors]):
        parts = [vectors[i][at:stop].to(context.device) for i, at, stop in packet]
        context.group.transfer({0: torch.cat(parts)}, {}).wait()


def _receive_packets(
    context: RankContext, rank: int, nbytes: list[int], into: list[Tensor]
) -> None:
    for packet in _packets(nbytes):
        total = sum(stop - at for _, at, stop in packet)
        raw = torch.empty(total, dtype=torch.uint8, device=context.device)
        context.group.transfer({}, {rank: raw}).wait()
        taken = 0
        for i, at, stop in packet:
            into[i][at:stop].copy_(raw[taken : taken + stop - at])
            taken += stop - at


def _bytes(value: Tensor) -> Tensor:
    flat: Any = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
