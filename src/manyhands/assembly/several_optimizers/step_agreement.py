"""Step agreement: ranks compare which optimizer steps next, before they exchange its gradients.

What a step yields may depend on its samples (`if loss > 1: yield ...`), and so differ between
ranks. They would then add the gradients of one optimizer to those of another, or wait for a step
that never comes. One number of each rank is exchanged for every optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyhands.core import Group
from manyhands.errors import TaskError

OVER, ALL = 1, 2  # the batch has no further step; all optimizers step together
FIRST = 3  # the first name


class StepAgreement:
    """Raises on every rank where one is to step another optimizer than rank 0."""

    def __init__(self, group: Group, names: Sequence[str], device: torch.device):
        self._group, self._names, self._device = group, list(names), device

    def __call__(self, name: str | None) -> None:
        group = self._group
        if group.size == 1:
            return
        mine = OVER if name is None else ALL if not name else FIRST + self._names.index(name)
        said = torch.zeros(group.size, dtype=torch.int64, device=self._device)
        said[group.rank] = mine
        group.all_reduce({"next": said}).wait()
        codes = said.tolist()
        if len(set(codes)) == 1:
            return
        rank = next(r for r, code in enumerate(codes) if code != codes[0])
        raise TaskError(
            f"rank {rank} {self._doing(codes[rank])}, but rank 0 {self._doing(codes[0])}: every "
            "rank must make the same optimizer steps for a batch, in the same order; let which "
            "loss comes next not depend on the samples (give the loss with a count of 0 instead)"
        )

    def _doing(self, code: int) -> str:
        if code == OVER:
            return "has no further optimizer step in its batch"
        if code == ALL:
            return "steps all optimizers"
        return f"steps the optimizer {self._names[code - FIRST]!r}"
