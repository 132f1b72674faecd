"""Mean loss of each named optimizer since the last exchange of status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class NamedLosses:
    """Sums losses by the name of the optimizer that steps by them; read in bulk, as a GPU is waited
    for then."""

    def __init__(self, names: Iterable[str]):
        self.names = list(names)
        self.means: dict[str, float] = {}  # over all ranks, as of the last `read`
        self._unread: list[tuple[int, Tensor, int]] = []  # which name, mean loss, samples behind it

    def add(self, name: str | None, loss: Tensor, count: int) -> None:
        if name and count:
            self._unread.append((self.names.index(name), loss.detach().float(), count))

    def take(self) -> Tensor:
        """For each name the sum over samples and the samples, of this rank since the last call."""
        sums = torch.zeros(len(self.names), 2, dtype=torch.float64)
        if self._unread:
            which, losses, counts = zip(*self._unread, strict=True)
            samples = torch.tensor(counts, dtype=torch.float64)
            row = torch.stack([torch.stack(losses).cpu().double() * samples, samples], dim=1)
            sums.index_add_(0, torch.tensor(which), row)
        self._unread.clear()
        return sums.view(-1)

    def read(self, sums: Sequence[float]) -> None:
        """`sums`: what `take` gave, summed over ranks."""
        for name, total, count in zip(self.names, sums[::2], sums[1::2], strict=True):
            if count:
                self.means[name] = total / count
