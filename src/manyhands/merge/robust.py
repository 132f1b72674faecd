"""Byzantine-robust aggregation: gradients merged so that f of the n ranks may send anything.

    median            the median of every coordinate                                     n >= 2f+1
    trimmed_mean      mean of every coordinate without its f largest and f smallest      n >= 2f+1
    krum              the g_i with the least sum of squared distances to n-f-2 nearest   n >= 2f+3
    multi_krum        the mean of the n-f best of these                                  n >= 2f+3
    geometric_median  argmin_v sum_i |g_i - v|                                           n >= 2f+1
    clipping          v <- v + (1/n) sum_i (g_i - v) min(1, r / |g_i - v|), from last v  n >= 2f+1

A rank may be wrong because of bad data, broken memory or intent. Every rank gets all n mean
gradients and merges them itself, in the order of ranks, so honest replicas stay equal to the bit
and no rank has to trust another's sum: (n-1) N values a step arrive at each rank, and are held
there. A gradient with NaN or infinity in it counts as zero. Every rank has one vote, whatever its
number of samples (one without any votes for no change): votes have no weights, because a wrong
rank could claim any. `radius` is that of clipping; where it is not given, the (n-f)-th smallest
distance from v. `momentum` keeps each rank's own sum of gradients over time and sends that, m <-
momentum m + g: it has far less noise in which a wrong gradient could hide. It replaces the
optimizer's momentum: with merge.momentum=0.9 give the optimizer none, and the learning rate it had
with 0.9; both together overshoot.

Use it when a rank may be wrong and nobody would notice; with momentum where the noise of single
batches is as large as the gradient itself, or a wrong gradient of that size passes for noise.
clipping differs least from the mean where all are honest; median and krum are biased when ranks
hold different data, krum takes one rank's gradient and is the noisiest, geometric_median costs the
most to compute.

Paper: Blanchard et al. 2017 (krum, arXiv:1703.02757), Yin et al. 2018 (median and trimmed mean,
arXiv:1803.01498), Pillutla et al. 2022 (geometric median, arXiv:1912.13445), Karimireddy et al.
2021 (centered clipping and worker momentum, arXiv:2012.10333).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyhands.core import Cargo, GradientReplica, Group, Strategy, Tensors
from manyhands.errors import PlanError
from manyhands.merge.building_blocks import aggregate
from manyhands.merge.building_blocks.options import need

How = Literal["median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "clipping"]
MOST = 2.0**24  # most samples that a rank may claim: float32 counts exactly up to this


@dataclass(frozen=True)
class Robust(Strategy[GradientReplica, Group]):
    how: How = "clipping"
    f: int = 1
    momentum: float = 0.0
    radius: float | None = None
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "gradients"
    swaps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        need(self.f >= 0, f"f={self.f}", "0 or more wrong ranks are needed")
        need(
            0 <= self.momentum < 1,
            f"momentum={self.momentum}",
            "0 (none) to less than 1 is needed; 0.9 is usual",
        )
        if self.radius is not None:
            need(
                self.how == "clipping",
                f"radius={self.radius}",
                f"it has no effect with merge.how={self.how}; leave it out",
            )
            need(
                self.radius > 0,
                f"radius={self.radius}",
                "more than 0 is needed; leave it out for the (n-f)-th smallest distance",
            )

    def check(self, size: int) -> None:
        more, formula = (3, "2f+3") if "krum" in self.how else (1, "2f+1")
        if 1 < size < 2 * self.f + more:
            needed = 2 * self.f + more
            raise PlanError(
                f"merge.how={self.how} with merge.f={self.f} needs {formula} = {needed} ranks or "
                f"more, but data={size}; "
                f"set data={needed}{f', merge.f={(size - more) // 2}' if size >= more else ''}"
                f"{' or merge.how=clipping (2f+1)' if more == 3 and size > 2 * self.f else ''}"
            )

    def init(self, replica: GradientReplica) -> Tensors:
        kinds = [
            *(["momentum"] if self.momentum else []),
            *(["centre"] if self.how == "clipping" else []),
        ]
        return {
            f"{kind}/{k}": torch.zeros_like(x) for kind in kinds for k, x in replica.params.items()
        }

    def round(self, replica: GradientReplica, group: Group, state: Tensors) -> Tensor:
        loss = replica.backward()
        if group.size == 1:
            replica.step()
            return loss
        vote = self._vote(replica, state)
        others = group.swap(
            {**vote, "count": replica.count}, [r for r in range(group.size) if r != group.rank]
        )
        counts = [replica.count.clone(), *(theirs.pop("count") for theirs in others)]
        merged = self.merge(
            aggregate.sanitise([*others[: group.rank], vote, *others[group.rank :]], self.f), state
        )
        # `step` divides the claimed count out again; it must only be finite and equal on all ranks
        claims = (
            torch.stack(counts)
            .nan_to_num(nan=0.0, posinf=MOST, neginf=0.0)
            .clamp(0.0, MOST)
            .round()
        )
        replica.count.copy_(claims.sum(0))
        for k, grad in replica.grads.items():
            torch.mul(merged[k], replica.scale, out=grad)
        replica.step()
        for grad in replica.grads.values():
            # also the padding: values that another rank sent there would enter our next vote
            grad.zero_()
        return loss

    def _vote(self, replica: GradientReplica, state: Tensors) -> Tensors:
        """This rank's mean gradient, or with `momentum` its sum over time."""
        mean = {k: g / replica.scale.clamp(min=1e-30) for k, g in replica.grads.items()}
        if not self.momentum:
            return mean
        if not all(bool(g.isfinite().all()) for g in mean.values()):
            return mean  # an overflow is sent, so that it shows, but not kept in the momentum
        for k, g in mean.items():
            state[f"momentum/{k}"].mul_(self.momentum).add_(g)
        return {k: state[f"momentum/{k}"].clone() for k in mean}

    def merge(self, rows: aggregate.Rows, state: Tensors) -> Tensors:
        if self.how == "median":
            return aggregate.median(rows)
        if self.how == "trimmed_mean":
            return aggregate.trimmed_mean(rows, self.f)
        if self.how == "krum":
            return aggregate.krum(rows, self.f)
        if self.how == "multi_krum":
            return aggregate.krum(rows, self.f, best=len(rows) - self.f)
        if self.how == "geometric_median":
            return aggregate.geometric_median(rows)
        merged = aggregate.clip_centred(
            rows, {k: state[f"centre/{k}"] for k in rows[0]}, self.f, self.radius
        )
        # if it is not finite, the step is skipped and the centre keeps its value
        if all(bool(v.isfinite().all()) for v in merged.values()):
            for k, v in merged.items():
                state[f"centre/{k}"].copy_(v)
        return merged
