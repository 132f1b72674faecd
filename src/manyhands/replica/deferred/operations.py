"""Recorded operations: what a model function did to tensors, and how any of them is made again.

A tensor is a view (`StorageView`) of a numbered storage, so that ties, slices and in-place changes
need no bookkeeping of their own. The value of a view is made by repeating, in their order, the
operations that wrote to its storage since it was last overwritten as a whole, and those that these
read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.replica.deferred.untouched_memory import untouched


@dataclass(frozen=True)
class StorageView:
    """A view of a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Constant:
    """A tensor that has its values already: a list, an array."""

    value: Tensor


class DrawsFrom:
    """The place of a generator among the arguments of an operation."""

    def __repr__(self) -> str:
        return "generator"


@dataclass(frozen=True)
class Operation:
    """One operation: `args` have `StorageView`s and `Constant`s in the place of tensors."""

    call: Any  # of torch.ops
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[StorageView, ...]
    # storages that it made; None: not a tensor, or no new memory
    outputs: tuple[StorageView | None, ...]
    overwritten: frozenset[int]  # storages of which no earlier value is left
    default_dtype: torch.dtype
    random: Tensor | None = None  # the generator's state before it

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        generator = torch.Generator()
        if self.random is not None:
            generator.set_state(self.random)

        def real(value: Any) -> Any:
            if isinstance(value, StorageView):
                return value.of(storages[value.storage])
            if isinstance(value, DrawsFrom):
                return generator
            return value.value.clone() if isinstance(value, Constant) else value

        args, kwargs = tree_map(real, (self.args, self.kwargs), is_leaf=_is_leaf)
        with _defaults(self.default_dtype, self.random):
            found = tree_leaves(self.call(*args, **kwargs))
        for ref, made in zip(self.outputs, found, strict=True):
            if ref is None:
                continue
            if "empty" in self.call.name():  # what nobody writes is alike on all ranks
                made.zero_()
            alike = made.stride() == ref.stride and made.storage_offset() == ref.offset
            if not alike:
                end = 1 + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True))
                memory = torch.zeros(ref.offset + end, dtype=ref.dtype)
                ref.of(memory.untyped_storage()).copy_(made)
                made = memory
            storages[ref.storage] = made.untyped_storage()


@dataclass
class Operations:
    """All operations of a model function, in their order."""

    made: list[Operation] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)  # by storage
    writers: list[list[int]] = field(default_factory=list)  # by storage: numbers of operations
    # generator states are 5 KB each: two draws from one state are two operations with the same
    _digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=32))

    def new_storage(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        self.writers.append([])
        return len(self.nbytes) - 1

    def add(self, operation: Operation, written: set[int]) -> None:
        for storage in written:
            self.writers[storage].append(len(self.made))
        self.made.append(operation)
        said = (operation.call.name(), operation.args, operation.kwargs, operation.outputs)
        self._digest.update(repr(tree_map(_said, said, is_leaf=_is_leaf)).encode())
        for value in tree_leaves((operation.args, operation.kwargs), is_leaf=_is_leaf):
            if isinstance(value, Constant):
                self._digest.update(_bytes(value.value))
        if operation.random is not None:
            self._digest.update(_bytes(operation.random))

    def digest(self) -> list[int]:
        """Four numbers: equal where two processes have recorded the same."""
        raw = self._digest.digest()
        return [int.from_bytes(raw[i : i + 7], "little") for i in range(0, 28, 7)]

    def make(self, refs: Sequence[StorageView]) -> list[Tensor]:
        """The values of these views, in new memory."""
        needed = sorted(self._needed({ref.storage for ref in refs}))
        last: dict[int, int] = {}
        for number in needed:
            for storage in self._touched(self.made[number]):
                last[storage] = number
        kept = {ref.storage for ref in refs}
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), _no_modes():
            for storage in kept:
                if not self.writers[storage]:
                    storages[storage] = untouched(self.nbytes[storage]).untyped_storage()
            for number in needed:
                operation = self.made[number]
                for ref in operation.reads:
                    if ref.storage not in storages:  # about to be overwritten as a whole
                        storages[ref.storage] = untouched(
                            self.nbytes[ref.storage]
                        ).untyped_storage()
                operation.run(storages)
                for storage in self._touched(operation):
                    if last[storage] == number and storage not in kept:
                        del storages[storage]
            return [ref.of(storages[ref.storage]) for ref in refs]

    def _needed(self, storages: set[int]) -> set[int]:
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        waiting = [(storage, len(self.made)) for storage in storages]
        while waiting:
            pair = storage, before = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            for number in reversed([n for n in self.writers[storage] if n < before]):
                operation = self.made[number]
                if number not in found:
                    found.add(number)
                    waiting += [
                        (ref.storage, number)
                        for ref in operation.reads
                        if ref.storage not in operation.overwritten
                    ]
                if storage in operation.overwritten:
                    break
        return found

    @staticmethod
    def _touched(operation: Operation) -> set[int]:
        outputs = {ref.storage for ref in operation.outputs if ref is not None}
        return outputs | {ref.storage for ref in operation.reads}


def _is_leaf(value: Any) -> bool:
    return isinstance(value, StorageView | Constant | DrawsFrom)


def _said(value: Any) -> Any:
    return "constant" if isinstance(value, Constant) else value


def _bytes(value: Tensor) -> bytes:
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def _no_modes() -> Iterator[None]:
    """One thread, as models are built; and no mode of the caller sees what is made."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _defaults(dtype: torch.dtype, random: Tensor | None) -> Iterator[None]:
    """torch's settings at the time of recording; afterwards as they were."""
    before, state = torch.get_default_dtype(), None
    torch.set_default_dtype(dtype)
    if random is not None:
        state = torch.get_rng_state()
        torch.set_rng_state(random)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        if state is not None:
            torch.set_rng_state(state)
