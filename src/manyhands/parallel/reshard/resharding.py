"""Resharding: global tensors from what ranks hold of them, and back, for checkpoints and exports.

    every rank  ->  rank 0       the tensors I hold: name, dtype, shard spec
    rank 0      ->  every rank   the global tensors that exist; which of your tensors you send

Each slice of a global tensor is sent once, by the first rank that holds it: copies on other
replicas and tied weights are not sent again. Optimizer state of a parameter's shape
("<parameter>/<key>") is cut as its parameter is. Anything smaller (a step count) is complete on
every rank.
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
    AnyShardSpec,
    ShardSlice,
    cut_key,
    from_plain,
    numel,
    renamed,
    to_plain,
)
from manyhands.split.shard_spec import ShardSpec

CPU = torch.device("cpu")
# what torch's optimizers keep once per parameter, also where the parameter is a scalar
NOT_PER_ELEMENT = ("step", "mu_product", "mu", "eta")
Owners = dict[str, list[tuple[int, AnyShardSpec]]]  # by global tensor: (rank, slice that it sends)


@dataclass(frozen=True)
class LocalTensor:
    """Local tensor: what this rank holds of a global tensor, and which slice of it that is."""

    spec: AnyShardSpec  # `spec.name` is the name of the global tensor
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass
class Survey:
    """What all ranks together hold, as far as this rank needs to know."""

    # of the global tensors, in the same order on every rank
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    mine: list[LocalTensor]  # what this rank sends or writes
    owners: Owners = field(default_factory=dict)  # on rank 0
    notes: list[Any] = field(default_factory=list)  # on rank 0: the note of each rank


class Resharding:
    """Resharding between the local tensors of a layout and the global tensors.

    specs      shard specs by the names that tensors have on this rank; a tensor without one is
               complete here; there may be specs of tensors that this rank does not hold
    aliases    further names of tied weights in the whole model -> the first name
    """

    def __init__(
        self,
        specs: Mapping[str, AnyShardSpec],
        world: Group,
        aliases: Mapping[str, str] | None = None,
        device: torch.device = CPU,
    ):
        self.world, self.device = world, device
        self.aliases = dict(aliases or {})
        self.specs = {k: renamed(s, self.first_name(s.name)) for k, s in specs.items()}
        self._by_global_name = {s.name: s for s in self.specs.values()}
        self._other_names: dict[str, list[str]] = {}
        for name, first in self.aliases.items():
            self._other_names.setdefault(first, []).append(name)

    def first_name(self, name: str) -> str:
        return self.aliases.get(name, name)

    def global_name(self, local: str) -> str:
        """The first name, in the whole model, of a tensor of this rank."""
        return self.specs[local].name if local in self.specs else self.first_name(local)

    def signature(self, names: Iterable[str]) -> str:
        """Hash of the shard specs of the tensors `names`, in order.

        Ranks, and runs, of equal signatures hold the same slices in the same order: vectors that
        one of them keeps fit another."""
        listed = [
            [name, *to_plain(spec)] for name in names if (spec := self._spec(name)) is not None
        ]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]

    def _spec(self, local: str) -> AnyShardSpec | None:
        """A tied weight may have more names in a module than it has in `specs`."""
        return self.specs.get(local) or self._by_global_name.get(self.first_name(local))

    # -- from local tensors to global ones --

    def local_tensors(self, local: Tensors) -> list[LocalTensor]:
        """This rank's tensors with their shard specs; a tied weight under all of its names."""
        found: dict[str, LocalTensor] = {}
        for key, tensor in local.items():
            for spec in self._specs_of(key, tensor):
                found.setdefault(spec.name, LocalTensor(spec, tensor))
        return list(found.values())

    def without_spec(self, local: Tensors) -> list[str]:
        """Optimizer state of a cut parameter that has neither its shape nor a single element.

        Which slice of a global tensor it is, is unknown."""
        return [key for key, tensor in local.items() if not self._has_spec(key, tensor)]

    def _has_spec(self, key: str, tensor: Tensor) -> bool:
        spec = self._spec(key.rpartition("/")[0])
        if (
            self._spec(key) is not None
            or spec is None
            or tensor.numel() <= 1
            or tuple(tensor.shape) == spec.local_shape
        ):
            return True
        return isinstance(spec, ShardSpec) and (spec.dim is None or spec.size == 1)

    def _specs_of(self, key: str, tensor: Tensor) -> list[AnyShardSpec]:
        shape, (name, _, entry) = tuple(tensor.shape), key.rpartition("/")
        if (spec := self._spec(key)) is not None:
            if shape != spec.local_shape:
                raise CheckpointError(
                    f"{key} has shape {shape} on this rank, but its shard spec has shape "
                    f"{spec.local_shape}"
                )
            return [renamed(spec, n) for n in (spec.name, *self._other_names.get(spec.name, []))]
        if (spec := self._spec(name)) is None:
            return [ShardSpec(key, shape)]
        if not self._has_spec(key, tensor):
            raise CheckpointError(
                f"optimizer state {key} has shape {shape}, its parameter {spec.local_shape} of "
                f"{spec.shape}: which slice of a global tensor it is, is not known; use an "
                "optimizer that keeps state of the parameter's shape (SGD, Adam, AdamW)"
            )
        global_name = f"{spec.name}/{entry}"
        if shape == spec.local_shape and shape:
            return [renamed(spec, global_name)]
        return [ShardSpec(global_name, shape)]

    def survey(self, held: Sequence[LocalTensor], note: Any = None) -> Survey:
        """What all ranks hold. Every rank calls it.

        Raises on all ranks where ranks contradict each other, or where no rank holds some
        elements."""
        listed = [[h.name, _dtype_name(h.tensor.dtype), to_plain(h.spec)] for h in held]
        received = self._to_first(json.dumps({"held": listed, "note": note}).encode())
        owners: Owners = {}
        replies: list[bytes] = []
        if self.world.rank == 0:
            everyone = [json.loads(raw) for raw in received]
            tensors, owners, wrong = _choose_owners([one["held"] for one in everyone])
            mine: list[list[str]] = [[] for _ in everyone]
            for name, specs in owners.items():
                for rank, _ in specs:
                    mine[rank].append(name)
            common = json.dumps({"tensors": tensors, "wrong": wrong})
            replies = [
                f'{{"mine": {json.dumps(names)}, "common": {common}}}'.encode() for names in mine
            ]
        answer = json.loads(self._from_first(replies))
        if wrong := answer["common"]["wrong"]:
            raise CheckpointError(
                "the tensors of all ranks do not make global tensors: " + "; ".join(wrong)
            )
        by_name = {h.name: h for h in held}
        return Survey(
            {
                name: (getattr(torch, dtype), tuple(shape))
                for name, (dtype, shape) in answer["common"]["tensors"].items()
            },
            [by_name[name] for name in answer["mine"]],
            owners,
            [one["note"] for one in everyone] if self.world.rank == 0 else [],
        )

    def gather(self, local: Tensors) -> Tensors:
        """The global tensors on rank 0, one after the other; nothing elsewhere. Every rank calls
        it."""
        survey = self.survey(self.local_tensors(local))
        mine = {h.name: h for h in survey.mine}
        found: Tensors = {}
        for name, (dtype, shape) in survey.tensors.items():
            if self.world.rank != 0:
                if (own := mine.get(name)) is not None and numel(own.spec):
                    self.world.transfer({0: _bytes(own.tensor).to(self.device)}, {}).wait()
                continue
            full = found[name] = torch.empty(shape, dtype=dtype)
            for rank, spec in survey.owners[name]:
                if rank == 0:
                    spec.insert(mine[name].tensor.detach().cpu(), full)
                elif numel(spec):
                    raw = torch.empty(
                        numel(spec) * dtype.itemsize, dtype=torch.uint8, device=self.device
                    )
                    self.world.transfer({}, {rank: raw}).wait()
                    spec.insert(raw.cpu().view(dtype).view(spec.local_shape), full)
        return found

    # -- and back --

    def wanted_specs(
        self, shapes: Mapping[str, Sequence[int]], names: Iterable[str] = ()
    ) -> dict[str, AnyShardSpec]:
        """The slices that this rank needs of global tensors of these names and shapes.

        By the rank's own names: those of `specs` and further `names`; `spec.name` is the name of
        the global tensor. Tensors that this rank holds and `shapes` does not have are left out."""
        found: dict[str, AnyShardSpec] = {}
        state: dict[str, list[str]] = {}
        for name in shapes:
            if name not in self.aliases and name not in self._other_names:
                state.setdefault(name.rpartition("/")[0], []).append(name)
        rest = [name for name in names if name not in self.specs]
        for local, spec in (*self.specs.items(), *((name, self._spec(name)) for name in rest)):
            if spec is None:
                found |= {local: ShardSpec(local, tuple(shapes[local]))} if local in shapes else {}
                continue
            if there := [
                n for n in (spec.name, *self._other_names.get(spec.name, [])) if n in shapes
            ]:
                found[local] = renamed(spec, there[0])
            for name in state.get(spec.name, []):
                shape, key = tuple(shapes[name]), name.rpartition("/")[2]
                like = shape == spec.shape and (
                    shape or (isinstance(spec, ShardSlice) and key not in NOT_PER_ELEMENT)
                )
                found[f"{local}/{key}"] = renamed(spec, name) if like else ShardSpec(name, shape)
        return found

    def extract(self, full: Tensors) -> Tensors:
        """This rank's local tensors of the global tensors `full`, by its own names."""
        wanted = self.wanted_specs({k: v.shape for k, v in full.items()})
        return {local: spec.extract(full[spec.name]) for local, spec in wanted.items()}

    # -- messages of different lengths, to rank 0 and back --

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


Listed = list[list[Any]]  # of one rank: [name, dtype, shard spec]


def _choose_owners(everyone: list[Listed]) -> tuple[dict[str, Any], Owners, list[str]]:
    """The global tensors, which rank sends which slice of each, and what is wrong."""
    tensors: dict[str, Any] = {}
    # name -> cut -> shard spec -> the first rank that holds it
    cuts: dict[str, dict[tuple[Any, ...], dict[AnyShardSpec, int]]] = {}
    wrong: list[str] = []
    for rank, listed in enumerate(everyone):
        for name, dtype, plain in listed:
            spec = from_plain(name, plain)
            is_ = [dtype, list(spec.shape)]
            first = tensors.setdefault(name, [dtype, list(spec.shape)])
            if is_ != first:
                wrong.append(
                    f"{name} is {is_[0]} {is_[1]} on rank {rank}, but {first[0]} {first[1]} on a "
                    "rank before it"
                )
            cuts.setdefault(name, {}).setdefault(cut_key(spec), {}).setdefault(spec, rank)
    owners: Owners = {}
    for name, kinds in cuts.items():
        size = math.prod(tensors[name][1])
        complete = [kind for kind in kinds.values() if sum(map(numel, kind)) == size]
        # a tied weight may be complete on one stage and cut on another: the first complete set is
        # taken
        if complete:
            owners[name] = [(rank, spec) for spec, rank in complete[0].items()]
        else:
            most = max(sum(map(numel, kind)) for kind in kinds.values())
            wrong.append(f"of the {size} elements of {name} the ranks hold {most}")
    return tensors, owners, wrong


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(value: Tensor) -> Tensor:
    flat: Any = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
