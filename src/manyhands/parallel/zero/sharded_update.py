"""Sharded update: the user's optimizer on this rank's slices of the parameters.

Each of n ranks does 1/n of the work and keeps 1/n of the state.
For optimizers that treat every element by itself that changes no bit of the result. State is saved
and loaded by the names and shapes of whole parameters, so a checkpoint does not depend on the
number of ranks that wrote it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Tensors
from manyhands.errors import TaskError
from manyhands.parallel.zero.full_state import whole
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.spans import Span
from manyhands.replica import state
from manyhands.replica.lbfgs.lbfgs import LBFGS
from manyhands.replica.update import Sum, complete_momentum, fuse

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
)
# state of every element; a rank that owns nothing of a parameter cannot know which are in use
PER_ELEMENT = (
    "momentum_buffer",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "sum",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "exp_inf",
    "prev",
    "step_size",
)
PER_PARAMETER = ("step", "mu_product")


def check(optimizer: Optimizer, axis: str = "shard") -> None:
    """Refuse, before training, an optimizer whose update of one element depends on others."""
    if type(optimizer) not in (*ELEMENTWISE, LBFGS):  # LBFGS sums over ranks itself
        raise TaskError(
            f"{axis}= gives each rank slices of parameters, but {type(optimizer).__name__} is not "
            "known to treat every element by itself; use one of "
            f"{', '.join(k.__name__ for k in ELEMENTWISE)}, or data= instead of {axis}="
        )


def _keys_per_element(optimizer: Optimizer) -> tuple[str, ...]:
    return optimizer.per_element if isinstance(optimizer, LBFGS) else PER_ELEMENT


class ShardUpdate:
    """`Update` of a sharded replica."""

    slice_only = False  # between replicas every rank updates all that it holds

    def __init__(self, flat: ShardedParameters, optimizer: Optimizer):
        check(optimizer)
        self.flat, self.module, self.optimizer = flat, flat.module, optimizer
        # the user's own, for the names in checkpoints
        self._groups = [list(g["params"]) for g in optimizer.param_groups]
        slices: dict[int, nn.Parameter] = {}
        for s in flat.spans:
            for entry in s.entries:
                start, stop = s.owned(entry)
                before: dict[str, Any] = optimizer.state.pop(entry.parameter, {})
                if start == stop:
                    continue
                mine = slices[id(entry.parameter)] = flat.views[entry.index].parameter
                for key, value in before.items():  # Adagrad has state from the start
                    alike = isinstance(value, Tensor) and value.shape == entry.shape
                    alike = alike and key not in PER_PARAMETER
                    optimizer.state[mine][key] = (
                        value.reshape(-1)[start:stop].clone() if alike else value
                    )
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [slices[id(p)] for p in parameters if id(p) in slices]
        self.placed: list[int] = []  # the views whose gradients `place` gave last
        fuse(optimizer, flat.count.device)

    def place(self, used: list[bool], in_flat: bool) -> list[Tensor]:
        """Hand this rank's slices of the merged gradient to the optimizer. A parameter that no rank
        used gets none, as in plain torch."""
        for view, is_used in zip(self.flat.views, used, strict=True):
            view.parameter.grad = view.grad if is_used and view.grad.numel() else None
        complete_momentum(self.optimizer)
        self.placed = [
            i for i, view in enumerate(self.flat.views) if view.parameter.grad is not None
        ]
        return [self.flat.views[i].grad for i in self.placed]

    def save(self, sum_over_ranks: Sum | None = None) -> tuple[Tensors, dict[str, Any]]:
        """Whole tensors on every rank of the shard axis, all of which call this; needs no
        `sum_over_ranks`."""
        flat, held = self.flat, self.optimizer.state
        per_element = _keys_per_element(self.optimizer)
        present = torch.full(
            (len(per_element) + len(PER_PARAMETER), len(flat.views)),
            -1.0,
            dtype=torch.float64,
            device=flat.device,
        )
        for i, view in enumerate(flat.views):
            entries = held.get(view.parameter, {})
            for k, key in enumerate(per_element):
                present[k, i] = 1.0 if isinstance(entries.get(key), Tensor) else -1.0
            for k, key in enumerate(PER_PARAMETER, len(per_element)):
                present[k, i] = float(entries[key]) if key in entries else -1.0
        flat.group.all_reduce({"present": present}, "max").wait()
        found: Tensors = {}
        number = {view.name: i for i, view in enumerate(flat.views)}
        for k, key in enumerate(per_element):
            if not bool((present[k] > 0).any()):
                continue

            def own_state(s: Span, key: str = key) -> Tensor:
                mine = torch.zeros_like(s.value)
                for entry in s.entries:
                    kept = held.get(flat.views[entry.index].parameter, {}).get(key)
                    own = s.own_slice(entry)
                    if isinstance(kept, Tensor) and own.start < own.stop:
                        mine[own] = kept
                return mine

            found |= {
                f"{n}/{key}": v.cpu()
                for n, v in whole(flat, own_state)
                if present[k, number[n]] > 0
            }
        for k, key in enumerate(PER_PARAMETER, len(per_element)):
            found |= {
                f"{p.name}/{key}": present[k, i].float().cpu()
                for i, p in enumerate(flat.views)
                if present[k, i] >= 0
            }
        return found, {
            "groups": state.plain_groups(self.module, self.optimizer, self._groups),
            "numbers": {},
        }

    def load(self, tensors: Tensors, meta: dict[str, Any]) -> None:
        owned = self.flat.owned()
        mine: Tensors = {}
        for view in self.flat.views:
            for key in (*_keys_per_element(self.optimizer), *PER_PARAMETER):
                if (found := tensors.get(f"{view.name}/{key}")) is not None and view.value.numel():
                    mine[f"{view.name}/{key}"] = (
                        found.reshape(-1)[slice(*owned[view.name])].clone()
                        if key not in PER_PARAMETER
                        else found.clone()
                    )
        numbers = {
            n: v
            for n, v in meta["numbers"].items()
            if owned.get(n, (0, 0))[0] < owned.get(n, (0, 0))[1]
        }
        names = {id(view.parameter): view.name for view in self.flat.views}
        state.load_named(self.optimizer, names, mine, {**meta, "numbers": numbers})
