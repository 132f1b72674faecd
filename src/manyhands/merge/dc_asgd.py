"""Delay-compensated asynchronous SGD (DC-ASGD): corrects a late gradient for the model's movement.

    w <- optimizer(w, g + lambda g * g * (w - w_i))    w_i: the w that rank i pulled for g

The correction is the first term of Taylor's series of the gradient around w_i, with g * g, element
by element, in place of the Hessian: for a log-likelihood near its optimum the two agree in
expectation. The server keeps w_i. `strength` is lambda, 0.04 where it is not given. With
`adaptive` it is strength / sqrt(v), v a running mean of g * g that forgets at the rate `decay`,
and strength is 2 where it is not given. Strength 0 is `downpour`; without delay, as with one rank,
it is the plain optimizer, bit for bit. The task's optimizer runs on the server, on the corrected
gradient, with the learning rate of the rank that pushes. Each push is a step of its own, so the
learning rate is that of one rank's batch; ranks claim their batches from one counter. Costs one
pull and one push of the model a step, and on the server a copy of the model for every rank.

Use it when asynchronous training is wanted but `downpour` loses accuracy: many ranks, so gradients
many updates old, and a loss that is a log-likelihood (cross entropy).

Paper: Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation"
(arXiv:1609.08326): on CIFAR-10 and ImageNet close to the accuracy of one worker, better than
asynchronous and synchronous SGD.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import ServedReplica, Store, Strategy, Tensors
from manyhands.merge.building_blocks.options import need
from manyhands.merge.building_blocks.server_model import pull_all, rows_of

CONSTANT, ADAPTIVE = 0.04, 2.0


@dataclass(frozen=True)
class DCASGD(Strategy[ServedReplica, Store]):
    strength: float | None = None
    adaptive: bool = False
    decay: float = 0.95
    link: ClassVar[type] = Store

    def __post_init__(self) -> None:
        if self.strength is not None:
            need(
                0 <= self.strength < float("inf"),
                f"strength={self.strength}",
                f"0 (no correction) or more is needed; {CONSTANT} is usual, "
                f"{ADAPTIVE:g} with merge.adaptive=true",
            )
        need(
            0 <= self.decay < 1,
            f"decay={self.decay}",
            "0 or more and less than 1 is needed; 0.95 is usual",
        )

    @property
    def shares_steps(self) -> bool:
        return True

    def batch_fraction(self, size: int) -> float:
        return 1.0

    def init(self, replica: ServedReplica) -> Tensors:
        return {}

    def round(self, replica: ServedReplica, store: Store, state: Tensors) -> Tensor:
        store.pull(rows_of(replica), into=replica.params, remember=True)
        loss = replica.backward()
        if replica.own_count:
            store.push(
                rows_of(replica),
                replica.gradient(),
                lr=replica.lr,
                compensate=self._strength,
                decay=self.decay if self.adaptive else None,
            ).wait()
        replica.stepped()
        return loss

    def consensus(self, replica: ServedReplica, store: Store, state: Tensors) -> Tensors:
        return pull_all(replica, store)

    @property
    def _strength(self) -> float:
        return (
            self.strength if self.strength is not None else ADAPTIVE if self.adaptive else CONSTANT
        )
