"""Memory peak: the most memory a rank used in a step, measured, and what its host has left.

    GPU   the allocator's own count of allocated bytes, over the whole run
    CPU   the bytes of all live storages, counted exactly, over the first rounds: parameters,
          gradients, the optimizer's state, and every tensor that an operation makes until it is
          freed

The resident size of the process would be cheaper to read, but measures something else: it includes
what libraries load and compile on first use and what the C library keeps for later (tens of
megabytes), and not memory that was allocated and never touched. Counting costs some microseconds an
operation, so only the first rounds are counted: from the second on they are alike. Memory that a
kernel allocates and frees before it returns is not seen: little for matrix work (the process of a
GPT of 302 MB grew by 4 to 9% more), but much for convolutions on a CPU, whose library copies its
tensors into another layout (that of a CNN of 293 MB grew by 57 to 94% more).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDS = 2  # the optimizer's state is there from the second on
NO_LIMIT = 2**60  # version 1 of cgroups writes "no limit" as a huge number

Record = Callable[[int, int], None]  # (storage, bytes): > 0 when it is made, < 0 when it is freed
Reads = Callable[[int], None]  # (storage): an operation reads it


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of live storages while entered.

    It counts those of the `held` tensors and all that operations make. `sharers` ranks
    have one copy of the `common` tensors; each counts an equal share of them.
    """

    def __init__(
        self,
        held: Iterable[Tensor] = (),
        *,
        common: Iterable[Tensor] = (),
        sharers: int = 1,
        record: Record | None = None,
        reads: Reads | None = None,
    ):
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._record, self._reads = record, reads
        self._bytes: dict[int, int] = {}  # by storage; 0: it existed before
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensors, share in ((common, sharers), (held, 1)):
            for tensor in tensors:
                if (storage := _storage(tensor)) is not None and storage._cdata not in self._alive:
                    self._add(storage, storage.nbytes() // share)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler (a second and more) to skip this mode

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in _tensors((args, tuple((kwargs or {}).values()))):
            if (storage := _storage(tensor)) is None:
                continue
            if storage._cdata not in self._alive:
                self._add(storage, 0)  # it existed before: views of it are no new memory
            elif self._reads is not None:
                self._reads(storage._cdata)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = _storage(tensor)
            if storage is not None and storage._cdata not in self._alive:
                self._add(storage, storage.nbytes())
        return out

    def _add(self, storage: Any, nbytes: int) -> None:
        key = storage._cdata
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._bytes[key] = nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._record is not None and nbytes:
            self._record(key, nbytes)

    def _gone(self, key: int) -> None:
        if self._alive.pop(key, None) is None:
            return
        nbytes = self._bytes.pop(key)
        self.live_bytes -= nbytes
        if self._record is not None and nbytes:
            self._record(key, -nbytes)

    def stop(self) -> None:
        """Stop counting: storages that are freed later are ignored."""
        self._alive.clear()


class Meter:
    """Memory meter: the peak of a run. Use `with meter:` around each round.

    Only the first rounds are counted, the others cost nothing. `held()` returns the tensors that
    exist when a round begins: parameters, buffers, gradients, the state of the optimizer and of the
    merge strategy.
    """

    def __init__(
        self,
        device: torch.device,
        held: Callable[[], Iterable[Tensor]],
        *,
        common: Callable[[], Iterable[Tensor]] = tuple,
        sharers: int = 1,
        rounds: int = ROUNDS,
    ):
        self._device, self._held, self._common, self._sharers, self._left = (
            device,
            held,
            common,
            sharers,
            rounds,
        )
        self._live: LiveStorages | None = None
        self._peak = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> Meter:
        if self._left > 0 and self._device.type == "cpu":
            self._live = LiveStorages(self._held(), common=self._common(), sharers=self._sharers)
            self._live.__enter__()
        self._left -= 1
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.__exit__(*error)
            live.stop()
            self._peak = max(self._peak, live.peak_bytes)

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that were in use; None: nothing was measured."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._peak or None


def held_by(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters with their gradients, buffers, and the optimizer's state."""
    found = [*module.parameters(), *module.buffers()]
    found += [p.grad for p in module.parameters() if p.grad is not None]
    for group in optimizer.param_groups:
        found += [p.grad for p in group["params"] if p.grad is not None]
    for entries in optimizer.state.values():
        found += [value for value in entries.values() if isinstance(value, Tensor)]
    return found


def available_bytes(
    device: torch.device, ranks: int = 1, own: int = 0, root: Path = Path("/")
) -> int:
    """Bytes that one rank may use in all, the `own` bytes that it already uses included.

    What the GPU, or this host, or the tightest cgroup above this process has left, divided by the
    `ranks` that share it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // ranks + torch.cuda.memory_reserved(device)
    left = [_free_bytes(root), *_left_in_cgroups(root)]
    return max(0, min(left)) // ranks + own


def _free_bytes(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return NO_LIMIT  # not Linux: unknown, so nothing is refused


def _left_in_cgroups(root: Path) -> list[int]:
    left = []
    for controller, limit_name, used_name in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        top = root / "sys/fs/cgroup" / controller
        for line in _lines(root / "proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if controller not in controllers.split(","):
                continue
            folder = top / path.lstrip("/")
            for above in (f for f in (folder, *folder.parents) if f == top or top in f.parents):
                limit, used = _lines(above / limit_name), _lines(above / used_name)
                if limit and used and limit[0] != "max" and int(limit[0]) < NO_LIMIT:
                    left.append(int(limit[0]) - int(used[0]))
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse, or another tensor without a storage
        return None


def _tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
