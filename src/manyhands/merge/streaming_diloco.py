"""Streaming DiLoCo: DiLoCo on one fragment of the model at a time, while training goes on.

    fragment f of P, once every H steps, at step t = (f + 1) H / P of a round:
    t - tau:   g = a - sum_i s_i x_i;   its all-reduce starts
    t:         v <- mu v + g;   a <- a - lr (g + mu v);   x_i <- alpha x_i + (1 - alpha) a

a is the anchor that all ranks share, x_i the fragment as rank i trains it, s_i its share of the
samples since the fragment was last sent, alpha the weight of the LOCAL fragment. Fragments are
slices of the flat parameter vectors: the largest message is 1/P of the model, and its all-reduce
has tau steps of time. None is in flight between rounds. Replicas differ; the anchors are evaluated
and saved. Costs two vectors, a and v. The paper has H=100 on language models; the default is
shorter for the same reason as that of `diloco`.

Use it when `diloco` is right and its all-reduce still delays training.

Paper: Douillard et al. 2025 (arXiv:2501.18512): about two orders of magnitude less bandwidth at
equal quality, language models of billions of parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core import Cargo, GradientReplica, Group, Strategy, Tensors, Work
from manyhands.merge.building_blocks.local_steps import copies, settle_moments
from manyhands.merge.building_blocks.options import Moments, check_block, need
from manyhands.merge.diloco import check_outer


@dataclass(frozen=True)
class StreamingDiLoCo(Strategy[GradientReplica, Group]):
    period: int = 48
    fragments: int = 4
    tau: int = 2
    alpha: float = 0.5
    lr: float = 0.7
    momentum: float = 0.9
    moments: Moments = "keep"
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"

    def __post_init__(self) -> None:
        check_block(self.period, self.moments)
        check_outer(self.lr, self.momentum)
        P, H = self.fragments, self.period
        need(
            1 <= P <= H,
            f"fragments={P}",
            f"1 to {H} are needed, as each is merged at a step of its own among merge.period={H}",
        )
        need(
            0 <= self.tau < H // P,
            f"tau={self.tau}",
            f"0 or more and less than period / fragments = {H} / {P} is needed, so that one "
            f"fragment is in flight at a time; set merge.tau={max(0, H // P - 1)} or less",
        )
        need(
            0 <= self.alpha < 1,
            f"alpha={self.alpha}",
            "the weight of the local fragment, 0 or more and less than 1, is needed",
        )

    def init(self, replica: GradientReplica) -> Tensors:
        state = {f"a/{k}": x for k, x in copies(replica.params).items()}
        state |= {f"v/{k}": torch.zeros_like(x) for k, x in replica.params.items()}
        # of each fragment: this rank's samples since it was last sent, in full steps of all ranks
        return state | {
            "samples": torch.zeros(self.fragments, dtype=torch.float64, device=replica.count.device)
        }

    def round(self, replica: GradientReplica, group: Group, state: Tensors) -> Tensor:
        total, samples = torch.zeros((), device=replica.count.device), 0
        to_send, flying = list(range(self.fragments)), list[_Sent]()
        for i in replica.steps(self.period):
            loss = replica.backward()
            total = total + loss * replica.own_count
            samples += replica.own_count
            state["samples"] += replica.scale
            replica.step()
            step = i + 1
            if to_send and step == self._due(to_send[0]) - self.tau:
                flying.append(self._send(to_send.pop(0), replica, group, state))
            if flying and step == self._due(flying[0].fragment):
                self._apply(flying.pop(0), replica, state)
        # only where the run ends within a round: merge at once what is left
        for sent in flying:
            self._apply(sent, replica, state)
        for fragment in to_send:
            self._apply(self._send(fragment, replica, group, state), replica, state)
        settle_moments(replica, group, self.moments, samples)
        return total / max(samples, 1)

    def consensus(self, replica: GradientReplica, group: Group, state: Tensors) -> Tensors:
        return {k: state[f"a/{k}"] for k in replica.params}

    def _due(self, fragment: int) -> int:
        return (fragment + 1) * self.period // self.fragments

    def _send(
        self, fragment: int, replica: GradientReplica, group: Group, state: Tensors
    ) -> "_Sent":
        # numerator and denominator are sent together: summing the weights first would cost all
        # ranks one more latency
        weight = state["samples"][fragment : fragment + 1].clone()
        state["samples"][fragment] = 0.0
        updates = {
            f"{k}[{fragment}]": (replica.params[k][run] - state[f"a/{k}"][run]).mul_(weight[0])
            for k, run in self._runs(fragment, replica)
        }
        return _Sent(
            fragment,
            updates,
            weight,
            (group.all_reduce({"weight": weight}), group.all_reduce(updates)),
        )

    def _apply(self, sent: "_Sent", replica: GradientReplica, state: Tensors) -> None:
        for work in sent.works:
            work.wait()
        for k, run in self._runs(sent.fragment, replica):
            a, v, x = state[f"a/{k}"][run], state[f"v/{k}"][run], replica.params[k][run]
            # -g, so v here is -v of the equation
            update = sent.updates[f"{k}[{sent.fragment}]"].div_(sent.weight[0].clamp(min=1e-30))
            v.mul_(self.momentum).add_(update)
            a.add_(update.add_(v, alpha=self.momentum), alpha=self.lr)
            x.mul_(self.alpha).add_(a, alpha=1 - self.alpha)

    def _runs(self, fragment: int, replica: GradientReplica) -> Iterator[tuple[str, slice]]:
        for k, x in replica.params.items():
            first, stop = (len(x) * f // self.fragments for f in (fragment, fragment + 1))
            if first < stop:
                yield k, slice(first, stop)


@dataclass(frozen=True)
class _Sent:
    """A fragment whose all-reduce is in flight."""

    fragment: int
    updates: Tensors
    weight: Tensor
    works: tuple[Work, ...]
