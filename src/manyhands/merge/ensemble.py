"""Ensemble and compression (EC-DNN): replicas average their outputs, not their weights.

    H times:    w_k <- step on CE(y, f_k)
    exchange:   every rank gets all M models;    o(x) = mean_k softmax f_k(x)
    D times:    w_k <- step on  a CE(y, f_k) + (1 - a) KL(o || f_k)  for a share of the samples,
                                CE(y, f_k)                           for the rest

The mean of the weights of non-convex networks may be worse than each of them; the mean of their
outputs is not: by Jensen its loss is at most the mean loss. The ensemble is M times as large, so
each rank distils it back into its own network, on its own data, before it continues. `period` is H,
`distil` D, `weight` a, `relabel` the share. A round costs (M-1) N values to each rank, which holds
all M models while it distils, and M more forward passes for each distilled batch. For classifiers
with loss= only: the model gives logits (samples, classes). Optimizer state stays local, and models
are never averaged with each other. The model of the rank with the lowest loss in its last round is
evaluated and saved: the mean of its weights over the D steps of its last distillation, along one
path, where averaging is safe.

Use it when replicas drift far apart, over long periods or on different data, and their average
fails; on a fast network averaging strategies reach the same accuracy sooner.

Paper: Sun et al. 2017, "Ensemble-Compression: A New Method for Parallel Training of Deep Neural
Networks" (arXiv:1606.00575): better accuracy and speed-up than model averaging.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import Cargo, Group, Strategy, Student, Tensors
from manyhands.merge.building_blocks.local_steps import copies
from manyhands.merge.building_blocks.options import need


@dataclass(frozen=True)
class Ensemble(Strategy[Student, Group]):
    period: int = 16
    distil: int = 48
    weight: float = 0.5
    relabel: float = 0.7
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "parameters"
    swaps: ClassVar[bool] = True
    distils: ClassVar[bool] = True  # its replica must be a Student

    def __post_init__(self) -> None:
        for name, steps in (("period", self.period), ("distil", self.distil)):
            need(
                steps >= 1,
                f"{name}={steps}",
                f"at least 1 step is needed; set merge.{name}=1 or more",
            )
        for name, share in (("weight", self.weight), ("relabel", self.relabel)):
            need(0 <= share <= 1, f"{name}={share}", "a share between 0 and 1 is needed")

    def init(self, replica: Student) -> Tensors:
        return {
            "loss": torch.zeros((), dtype=torch.float64),
            **{f"model/{k}": x.clone() for k, x in replica.params.items()},
        }

    def round(self, replica: Student, group: Group, state: Tensors) -> Tensor:
        models: list[Tensors] = []
        total, samples = torch.zeros((), device=replica.count.device), 0
        for i in replica.steps(self.period + self.distil):
            if (
                i == self.period and group.size > 1
            ):  # one model alone has nothing to learn from itself
                own = copies(replica.params)
                others = group.swap(own, [r for r in range(group.size) if r != group.rank])
                models = [*others[: group.rank], own, *others[group.rank :]]
            loss = (
                replica.distil(models, self.weight, self.relabel) if models else replica.backward()
            )
            total = total + loss * replica.own_count
            samples += replica.own_count
            replica.step()
            if models:
                for k, x in replica.params.items():
                    state[f"model/{k}"].lerp_(x, 1 / (i - self.period + 1))
        if not models:  # the run ends before anybody distils
            for k, x in replica.params.items():
                state[f"model/{k}"].copy_(x)
        state["loss"].copy_(total / samples) if samples else state["loss"].fill_(torch.inf)
        return total / max(samples, 1)

    def consensus(self, replica: Student, group: Group, state: Tensors) -> Tensors | None:
        losses = torch.zeros(group.size, dtype=torch.float64, device=replica.count.device)
        losses[group.rank] = state["loss"].nan_to_num(nan=torch.inf)
        group.all_reduce({"loss": losses}).wait()
        best = int(losses.argmin())
        model = {k: state[f"model/{k}"].clone() for k in replica.params}
        group.broadcast(model, source=best).wait()
        return model
