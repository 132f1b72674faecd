"""Whole tensors out of what ranks hold of them, and back: how layouts change, and what a file of the whole is written from.

    every rank  ->  rank 0     what I hold: name, dtype, which region of the whole
    rank 0      ->  every rank the whole tensors there are; which of your regions you speak for

Each region is spoken for once, by the first rank that holds it: replicas and tied weights are not sent twice. Optimizer state of
a parameter's shape ("<parameter>/<key>") lies where its parameter does; anything smaller (a step count) is whole everywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.core import Group, Tensors
from manyhands.errors import CheckpointError
from manyhands.split.shard_slice import (
    Region,
    ShardSlice,
    family,
    from_plain,
    numel,
    renamed,
    to_plain,
)
from manyhands.split.shard_spec import ShardSpec

CPU = torch.device("cpu")
NOT_PER_ELEMENT = (
    "step",
    "mu_product",
    "mu",
    "eta",
)  # what torch's optimizers keep once a parameter, also where that is a scalar


@dataclass(frozen=True)
class LocalTensor:
    """What this rank holds of a tensor of the whole."""

    region: Region  # `region.name` is the name in the whole
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.region.name


@dataclass
class Survey:
    """What all ranks together hold, as far as this rank needs to know."""

    tensors: dict[
        str, tuple[torch.dtype, tuple[int, ...]]
    ]  # of the whole, in the same order on every rank
    mine: list[LocalTensor]  # what this rank speaks for
    speakers: dict[str, list[tuple[int, Region]]] = field(
        default_factory=dict
    )  # on rank 0: who has which region
    notes: list[Any] = field(default_factory=list)  # on rank 0: what each rank had to say besides


class Resharding:
    """`parts` says by the names that this rank's tensors have here where they lie in the whole (what is not named is whole; it may
    name more than this rank holds); `aliases` are further names of tied weights in the whole model: name -> the first name."""

    def __init__(
        self,
        parts: Mapping[str, Region],
        world: Group,
        aliases: Mapping[str, str] | None = None,
        device: torch.device = CPU,
    ):
        self.world, self.device = world, device
        self.aliases = dict(aliases or {})
        self.parts = {k: renamed(p, self.first_name(p.name)) for k, p in parts.items()}
        self._by_whole = {p.name: p for p in self.parts.values()}
        self._other_names: dict[str, list[str]] = {}
        for name, first in self.aliases.items():
            self._other_names.setdefault(first, []).append(name)

    def first_name(self, name: str) -> str:
        return self.aliases.get(name, name)

    def whole_name(self, local: str) -> str:
        """The first name in the whole of a tensor of this rank."""
        return self.parts[local].name if local in self.parts else self.first_name(local)

    def signature(self, names: Iterable[str]) -> str:
        """Of the tensors that this rank holds. Alike on ranks, and in runs, that hold the same of the whole in the same order: what
        one of them keeps in vectors fits another."""
        listed = [
            [name, *to_plain(region)] for name in names if (region := self._part(name)) is not None
        ]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]

    def _part(self, local: str) -> Region | None:
        """A tied weight may have more names in a module than it has in `parts`."""
        return self.parts.get(local) or self._by_whole.get(self.first_name(local))

    # -- from parts to the whole --

    def held(self, local: Tensors) -> list[LocalTensor]:
        """Where each of this rank's tensors lies; a tied weight stands under all of its names."""
        found: dict[str, LocalTensor] = {}
        for key, tensor in local.items():
            for region in self._regions(key, tensor):
                found.setdefault(region.name, LocalTensor(region, tensor))
        return list(found.values())

    def unplaced(self, local: Tensors) -> list[str]:
        """State that belongs to a cut parameter but has neither its shape nor a single element: nobody knows where it lies."""
        return [key for key, tensor in local.items() if not self._placed(key, tensor)]

    def _placed(self, key: str, tensor: Tensor) -> bool:
        region = self._part(key.rpartition("/")[0])
        if (
            self._part(key) is not None
            or region is None
            or tensor.numel() <= 1
            or tuple(tensor.shape) == region.local_shape
        ):
            return True
        return isinstance(region, ShardSpec) and (region.dim is None or region.size == 1)

    def _regions(self, key: str, tensor: Tensor) -> list[Region]:
        shape, (name, _, entry) = tuple(tensor.shape), key.rpartition("/")
        if (region := self._part(key)) is not None:
            if shape != region.local_shape:
                raise CheckpointError(
                    f"{key} has shape {shape} here, but its part of the whole has {region.local_shape}"
                )
            return [
                renamed(region, n) for n in (region.name, *self._other_names.get(region.name, []))
            ]
        if (region := self._part(name)) is None:
            return [ShardSpec(key, shape)]
        if not self._placed(key, tensor):
            raise CheckpointError(
                f"optimizer state {key} has shape {shape}, its parameter {region.local_shape} of {region.shape}: where it lies in the "
                "whole is not known; use an optimizer that keeps state of the parameter's shape (SGD, Adam, AdamW)"
            )
        whole = f"{region.name}/{entry}"
        return [
            renamed(region, whole)
            if shape == region.local_shape and shape
            else ShardSpec(whole, shape)
        ]

    def survey(self, held: Sequence[LocalTensor], note: Any = None) -> Survey:
        """Every rank calls it. Raises everywhere alike where ranks contradict each other or nobody holds a part of a tensor."""
        listed = [[h.name, _said(h.tensor.dtype), to_plain(h.region)] for h in held]
        told = self._to_first(json.dumps({"held": listed, "note": note}).encode())
        speakers: dict[str, list[tuple[int, Region]]] = {}
        replies: list[bytes] = []
        if self.world.rank == 0:
            everyone = [json.loads(raw) for raw in told]
            tensors, speakers, wrong = _decide([one["held"] for one in everyone])
            mine: list[list[str]] = [[] for _ in everyone]
            for name, regions in speakers.items():
                for rank, _ in regions:
                    mine[rank].append(name)
            common = json.dumps({"tensors": tensors, "wrong": wrong})
            replies = [
                f'{{"mine": {json.dumps(names)}, "common": {common}}}'.encode() for names in mine
            ]
        answer = json.loads(self._from_first(replies))
        if wrong := answer["common"]["wrong"]:
            raise CheckpointError("what ranks hold does not make a whole: " + "; ".join(wrong))
        by_name = {h.name: h for h in held}
        return Survey(
            {
                name: (getattr(torch, dtype), tuple(shape))
                for name, (dtype, shape) in answer["common"]["tensors"].items()
            },
            [by_name[name] for name in answer["mine"]],
            speakers,
            [one["note"] for one in everyone] if self.world.rank == 0 else [],
        )

    def gather(self, local: Tensors) -> Tensors:
        """The whole tensors on rank 0, one after the other; nothing elsewhere. Every rank calls it."""
        survey = self.survey(self.held(local))
        mine = {h.name: h for h in survey.mine}
        found: Tensors = {}
        for name, (dtype, shape) in survey.tensors.items():
            if self.world.rank != 0:
                if (own := mine.get(name)) is not None and numel(own.region):
                    self.world.transfer({0: _bytes(own.tensor).to(self.device)}, {}).wait()
                continue
            whole = found[name] = torch.empty(shape, dtype=dtype)
            for rank, region in survey.speakers[name]:
                if rank == 0:
                    region.put(mine[name].tensor.detach().cpu(), whole)
                elif numel(region):
                    raw = torch.empty(
                        numel(region) * dtype.itemsize, dtype=torch.uint8, device=self.device
                    )
                    self.world.transfer({}, {rank: raw}).wait()
                    region.put(raw.cpu().view(dtype).view(region.local_shape), whole)
        return found

    # -- and back --

    def wanted(
        self, shapes: Mapping[str, Sequence[int]], names: Iterable[str] = ()
    ) -> dict[str, Region]:
        """What this rank needs of whole tensors of these names and shapes, by its own names: those of `parts` and further `names`;
        `region.name` is the whole's name. Tensors that this rank holds and `shapes` does not know are left out."""
        found: dict[str, Region] = {}
        state: dict[str, list[str]] = {}
        for name in shapes:
            if name not in self.aliases and name not in self._other_names:
                state.setdefault(name.rpartition("/")[0], []).append(name)
        rest = [name for name in names if name not in self.parts]
        for local, region in (*self.parts.items(), *((name, self._part(name)) for name in rest)):
            if region is None:
                found |= {local: ShardSpec(local, tuple(shapes[local]))} if local in shapes else {}
                continue
            if there := [
                n for n in (region.name, *self._other_names.get(region.name, [])) if n in shapes
            ]:
                found[local] = renamed(region, there[0])
            for name in state.get(region.name, []):
                shape, key = tuple(shapes[name]), name.rpartition("/")[2]
                like = shape == region.shape and (
                    shape or (isinstance(region, ShardSlice) and key not in NOT_PER_ELEMENT)
                )
                found[f"{local}/{key}"] = renamed(region, name) if like else ShardSpec(name, shape)
        return found

    def take(self, whole: Tensors) -> Tensors:
        """This rank's part of whole tensors, by its own names."""
        wanted = self.wanted({k: v.shape for k, v in whole.items()})
        return {local: region.take(whole[region.name]) for local, region in wanted.items()}

    # -- bytes of unlike length, to rank 0 and back --

    def _to_first(self, raw: bytes) -> list[bytes]:
        rank = self.world.rank
        lengths = torch.zeros(self.world.size, dtype=torch.int64, device=self.device)
        lengths[rank] = len(raw)
        self.world.all_reduce({"lengths": lengths}).wait()
        if rank != 0:
            self.world.transfer({0: self._packed(raw)}, {}).wait()
            return []
        into = {
            r: torch.empty(n, dtype=torch.uint8, device=self.device)
            for r, n in enumerate(lengths.tolist())
            if r
        }
        self.world.transfer({}, into).wait()
        return [raw, *(v.cpu().numpy().tobytes() for v in into.values())]

    def _from_first(self, raw: list[bytes]) -> bytes:
        rank = self.world.rank
        lengths = torch.zeros(self.world.size, dtype=torch.int64, device=self.device)
        if rank == 0:
            lengths.copy_(torch.tensor([len(one) for one in raw]))
        self.world.broadcast({"lengths": lengths}).wait()
        if rank == 0:
            self.world.transfer({r: self._packed(one) for r, one in enumerate(raw) if r}, {}).wait()
            return raw[0]
        into = torch.empty(int(lengths[rank]), dtype=torch.uint8, device=self.device)
        self.world.transfer({}, {0: into}).wait()
        return into.cpu().numpy().tobytes()

    def _packed(self, raw: bytes) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.device)


Listed = list[list[Any]]  # of one rank: [name, dtype, region]


def _decide(
    everyone: list[Listed],
) -> tuple[dict[str, Any], dict[str, list[tuple[int, Region]]], list[str]]:
    """The whole tensors, who speaks for which region of each, and what is wrong."""
    tensors: dict[str, Any] = {}
    cuts: dict[
        str, dict[tuple[Any, ...], dict[Region, int]]
    ] = {}  # name -> kind of cut -> region -> its first holder
    wrong: list[str] = []
    for rank, listed in enumerate(everyone):
        for name, dtype, plain in listed:
            region = from_plain(name, plain)
            is_, first = (
                [dtype, list(region.shape)],
                tensors.setdefault(name, [dtype, list(region.shape)]),
            )
            if is_ != first:
                wrong.append(
                    f"{name} is {is_[0]} {is_[1]} on rank {rank}, but {first[0]} {first[1]} on a rank before it"
                )
            cuts.setdefault(name, {}).setdefault(family(region), {}).setdefault(region, rank)
    speakers: dict[str, list[tuple[int, Region]]] = {}
    for name, kinds in cuts.items():
        size = math.prod(tensors[name][1])
        complete = [kind for kind in kinds.values() if sum(map(numel, kind)) == size]
        if complete:  # a tied weight may be whole on one stage and cut on another: the first whole set will do
            speakers[name] = [(rank, region) for region, rank in complete[0].items()]
        else:
            most = max(sum(map(numel, kind)) for kind in kinds.values())
            wrong.append(f"of the {size} elements of {name} the ranks hold {most}")
    return tensors, speakers, wrong


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(value: Tensor) -> Tensor:
    flat: Any = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
