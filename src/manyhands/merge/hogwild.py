"""Hogwild!: ranks of one host step one parameter vector in shared memory, without any lock.

    every rank, at its own pace:    g = gradient of its batch at w, as w is while it computes
                                    w[j] <- w[j] - eta g[j]      for rows j with g[j] != 0

There is one w, which nobody copies: ranks send nothing and wait for nobody between two sync points
(evaluation, checkpoint, end of an epoch). Each claims its next batch from a counter, so a fast rank
computes more of them. A step of M ranks is M updates, each by the mean gradient of one rank's
batch: the learning rate is that of one rank's batch, and schedules count steps of the run. Two
ranks that write the same element at once may lose one of the two updates; where gradients are
sparse that is rare, and the method converges as if it were serial. The staleness of a gradient is
the number of updates since its rank read w, about M - 1. A run with several ranks does not repeat
bit for bit. One rank is the plain optimizer, and ranks whose batches touch disjoint rows give the
bits of serial training.

Rows whose gradient is zero are neither read nor written, so that no update of another rank to them
is lost: under `nn.Embedding(sparse=True)` with SGD, Adagrad or SparseAdam, and also for dense
gradients under SGD without momentum and weight decay and Adagrad without weight decay. Momentum,
Adam and weight decay move every element in every step: they rewrite all of w, and of two such steps
at the same moment one may be lost. Optimizer state is each rank's own and follows that rank's
gradients; it is saved for each rank. So Adagrad's sums grow M times slower than in serial training,
and momentum over stale gradients acts like more momentum than was set: lower either with many
ranks.

Use it when all ranks are CPU processes of one host and gradients are sparse (embeddings, matrix
factorisation), or when a model is so small that waiting for other ranks costs more than a lost
update.

Paper: Recht et al. 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
Descent" (arXiv:1106.5730): nearly linear speed-up on 10 cores for sparse SVM, matrix completion and
graph cuts, an order of magnitude faster than with locks.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyhands.core import Cargo, CommonReplica, Group, Strategy, Tensors
from manyhands.errors import PlanError


@dataclass(frozen=True)
class Hogwild(Strategy[CommonReplica, Group]):
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"  # by writing them into the memory of all ranks
    shares_parameters: ClassVar[bool] = True

    def init(self, replica: CommonReplica) -> Tensors:
        return {}

    def round(self, replica: CommonReplica, group: Group, state: Tensors) -> Tensor:
        if group.size > 1 and not replica.in_common:
            raise PlanError(
                f"merge=hogwild: {group.size} ranks with parameters of their own would never "
                "agree; lay them out in memory that all ranks share"
            )
        loss = replica.backward()
        replica.step()  # in place: the other ranks read it from now on
        return loss
