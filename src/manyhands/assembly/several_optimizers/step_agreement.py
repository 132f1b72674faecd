"""Step agreement: ranks compare which optimizer steps next, before they exchange its gradients.

What a step yields may depend on its samples (`if loss > 1: yield ...`), and so differ between
ranks. They would then add the gradients of one optimizer to those of another, or wait for a step
that never comes. One number of each rank is exchanged for every optimizer step. A rank of a user's
own loop that has no samples is told so what the others do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyhands.core import Group
from manyhands.errors import TaskError

FOLLOWS = 0  # no samples: what the others do
OVER, ALL = 1, 2  # the batch has no further step; all optimizers step together
FIRST = 3  # the first name


class StepAgreement:
    """What all ranks step next; raises on every rank where one is to step another optimizer."""

    def __init__(self, group: Group, names: Sequence[str], device: torch.device):
        self._group, self._names, self._device = group, list(names), device

    def __call__(self, name: str | None, follows: bool = False) -> str | None:
        group = self._group
        if group.size == 1:
            return name
        mine = OVER if name is None else ALL if not name else FIRST + self._names.index(name)
        mine = FOLLOWS if follows else mine
        said = torch.zeros(group.size, dtype=torch.int64, device=self._device)
        said[group.rank] = mine
        group.all_reduce({"next": said}).wait()
        codes = {r: code for r, code in enumerate(said.tolist()) if code != FOLLOWS}
        agreed = next(iter(codes.values()), OVER)
        if set(codes.values()) <= {agreed}:
            return None if agreed == OVER else "" if agreed == ALL else self._names[agreed - FIRST]
        first = next(iter(codes))
        rank = next(r for r, code in codes.items() if code != agreed)
        raise TaskError(
            f"rank {rank} {self._doing(codes[rank])}, but rank {first} {self._doing(agreed)}: "
            "every rank must make the same optimizer steps for a batch, in the same order; let "
            "which loss comes next not depend on the samples (give the loss with a count of 0 "
            "instead), nor, in a loop of your own, on how many batches this rank was shown (count "
            "by run.steps)"
        )

    def _doing(self, code: int) -> str:
        if code == OVER:
            return "has no further optimizer step in its batch"
        if code == ALL:
            return "steps all optimizers"
        return f"steps the optimizer {self._names[code - FIRST]!r}"
