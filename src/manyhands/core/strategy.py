"""Strategy: a merge algorithm, by which replicas agree over a group or a store."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, TypeVar

from torch import Tensor

from manyhands.core.group import Group
from manyhands.core.replica import Replica
from manyhands.core.store import Store
from manyhands.records import Tensors

Cargo = Literal["gradients", "updates", "parameters"]  # what a strategy sends
R = TypeVar("R", bound=Replica, contravariant=True)
L = TypeVar("L", Group, Store, contravariant=True)


class Strategy(Protocol[R, L]):
    """Merge strategy: one distributed training algorithm, a frozen dataclass of hyper-parameters.

    `R` is the kind of replica it needs, `L` what it exchanges over: `Strategy[Replica, Group]`. A
    strategy inherits from this class for the defaults; `init` and `round` it must write.
    """

    link: ClassVar[type]  # Group or Store: what `round` exchanges over
    sends: ClassVar[Cargo] = "gradients"  # decides which compression may be used
    # replicas are equal to the bit between any two rounds, so they may share memory and the update
    replicas_agree: ClassVar[bool] = False
    swaps: ClassVar[bool] = False  # sends to single peers, so no rank sees a sum over all
    distils: ClassVar[bool] = False  # needs a `Student`
    thins: ClassVar[bool] = False  # needs a replica that can leave units out (`merge/skeleton.py`)
    # ranks step one parameter vector, in memory that all of them share, each at its own pace
    shares_parameters: ClassVar[bool] = False
    # over a Store: what a table does with a push
    on_server: ClassVar[Literal["optimizer", "sum"]] = "optimizer"

    @property
    def shares_steps(self) -> bool:
        """Over a Store: ranks claim steps from one counter, and a step is one rank's batch.

        Otherwise every rank takes part in every step.
        """
        return False

    def batch_fraction(self, size: int) -> float:
        """With `shares_steps`: how large a part of one step of the model one rank's batch is."""
        return 1 / size

    def check(self, size: int) -> None:
        """Raise PlanError where the options do not fit `size` ranks; called before training."""
        return None

    def init(self, replica: R, /) -> Tensors:
        """The strategy's own state, which checkpoints save."""
        ...

    def round(self, replica: R, link: L, state: Tensors, /) -> Tensor:
        """One round: compute, exchange, merge. Returns the mean loss of this rank's samples."""
        ...

    def consensus(self, replica: R, link: L, state: Tensors, /) -> Tensors | None:
        """The one model that all replicas represent, to evaluate and save; None: each holds it.

        Every rank calls it. It changes neither the replica nor the state.
        """
        return None
