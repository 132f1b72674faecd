"""The user's optimizer on this rank's slices: each of n ranks does 1/n of the work and keeps 1/n of the state.

For optimizers that treat every element by itself that changes no bit of the result. State is saved and loaded by the names and
shapes of whole parameters, so a checkpoint does not know over how many ranks it was written.
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
from manyhands.replica.update import Sum, fuse

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
# what those keep of every element; a rank that owns nothing of a parameter cannot know which are in use
PER_ELEMENT = (
    "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "grad_avg", "acc_delta", "exp_inf", "prev", "step_size",
)  # fmt: skip
ONCE = ("step", "mu_product")  # and once a parameter


def check(optimizer: Optimizer, axis: str = "shard") -> None:
    """Refuse, before training, an optimizer whose update of one element depends on others."""
    if type(optimizer) not in ELEMENTWISE:
        raise TaskError(
            f"{axis}= gives each rank parts of parameters, but {type(optimizer).__name__} is not known to treat every element by itself; "
            f"use one of {', '.join(k.__name__ for k in ELEMENTWISE)}, or data= instead of {axis}="
        )


class ShardUpdate:
    part_only = False  # between replicas every rank updates all that it has

    def __init__(self, flat: ShardedParameters, optimizer: Optimizer):
        check(optimizer)
        self.flat, self.module, self.optimizer = flat, flat.module, optimizer
        self._groups = [
            list(g["params"]) for g in optimizer.param_groups
        ]  # the user's own, for the names in checkpoints
        slices: dict[int, nn.Parameter] = {}
        for s in flat.spans:
            for place in s.places:
                start, stop = s.run(place)
                before: dict[str, Any] = optimizer.state.pop(place.parameter, {})
                if start == stop:
                    continue
                mine = slices[id(place.parameter)] = flat.views[place.index].parameter
                for key, value in before.items():  # Adagrad has state from the start
                    alike = (
                        isinstance(value, Tensor) and value.shape == place.shape and key not in ONCE
                    )
                    optimizer.state[mine][key] = (
                        value.reshape(-1)[start:stop].clone() if alike else value
                    )
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [slices[id(p)] for p in parameters if id(p) in slices]
        self.placed: list[int] = []  # the views whose gradients `place` gave last
        fuse(optimizer, flat.count.device)

    def place(self, used: list[bool], in_flat: bool) -> list[Tensor]:
        """Hand this rank's slices of the merged gradient to the optimizer; what no rank used gets none, as in plain torch."""
        for view, is_used in zip(self.flat.views, used, strict=True):
            view.parameter.grad = view.grad if is_used and view.grad.numel() else None
        self.placed = [
            i for i, view in enumerate(self.flat.views) if view.parameter.grad is not None
        ]
        return [self.flat.views[i].grad for i in self.placed]

    def save(self, sum_over_ranks: Sum | None = None) -> tuple[Tensors, dict[str, Any]]:
        """Whole tensors, on every rank of the shard axis, which all call this; the axis sums by itself."""
        flat, held = self.flat, self.optimizer.state
        told = torch.full(
            (len(PER_ELEMENT) + len(ONCE), len(flat.views)),
            -1.0,
            dtype=torch.float64,
            device=flat.device,
        )
        for i, view in enumerate(flat.views):
            entries = held.get(view.parameter, {})
            for k, key in enumerate(PER_ELEMENT):
                told[k, i] = 1.0 if isinstance(entries.get(key), Tensor) else -1.0
            for k, key in enumerate(ONCE, len(PER_ELEMENT)):
                told[k, i] = float(entries[key]) if key in entries else -1.0
        flat.group.all_reduce({"told": told}, "max").wait()
        found: Tensors = {}
        number = {view.name: i for i, view in enumerate(flat.views)}
        for k, key in enumerate(PER_ELEMENT):
            if not bool((told[k] > 0).any()):
                continue

            def own(s: Span, key: str = key) -> Tensor:
                mine = torch.zeros_like(s.value)
                for place in s.places:
                    start, stop = s.run(place)
                    kept = held.get(flat.views[place.index].parameter, {}).get(key)
                    if isinstance(kept, Tensor) and start < stop:
                        lo = place.start + start - s.own.start
                        mine[lo : lo + stop - start] = kept
                return mine

            found |= {f"{n}/{key}": v.cpu() for n, v in whole(flat, own) if told[k, number[n]] > 0}
        for k, key in enumerate(ONCE, len(PER_ELEMENT)):
            found |= {
                f"{p.name}/{key}": told[k, i].float().cpu()
                for i, p in enumerate(flat.views)
                if told[k, i] >= 0
            }
        return found, {
            "groups": state.plain_groups(self.module, self.optimizer, self._groups),
            "numbers": {},
        }

    def load(self, tensors: Tensors, meta: dict[str, Any]) -> None:
        runs = self.flat.runs()
        mine: Tensors = {}
        for view in self.flat.views:
            for key in (*PER_ELEMENT, *ONCE):
                if (found := tensors.get(f"{view.name}/{key}")) is not None and view.value.numel():
                    mine[f"{view.name}/{key}"] = (
                        found.reshape(-1)[slice(*runs[view.name])].clone()
                        if key not in ONCE
                        else found.clone()
                    )
        numbers = {
            n: v
            for n, v in meta["numbers"].items()
            if runs.get(n, (0, 0))[0] < runs.get(n, (0, 0))[1]
        }
        names = {id(view.parameter): view.name for view in self.flat.views}
        state.load_named(self.optimizer, names, mine, {**meta, "numbers": numbers})
