"""Quadratic problems for merge strategies: rank i minimises f_i(x) = x'A_i x/2 - b_i'x in float64.

    optimum of sum_i w_i f_i   =   (sum_i w_i A_i)^-1 sum_i w_i b_i

`spread` is how far the b_i are apart, `mixed` how far the A_i are. With a common A, local steps are
the same linear map on all ranks, so strategies that average reach the optimum itself; with
different A_i those without a correction stop near it. The replica is the real one over two
parameters, so there are views, padding and any torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import (
    Group,
    Store,
    Table,
    Tensors,
)
from manyhands.embedding.server_optimizer import server_optimizer_of
from manyhands.exchange.inproc import (
    Cost,
    InprocGroup,
    World,
    one_tick,
)
from manyhands.exchange.observed import ObservedGroup
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import WholeUpdate
from manyhands.server.clock import Clock
from manyhands.server.inproc_store import InprocStore
from manyhands.server.shard import Shard
from manyhands.split.skeleton import Units

DIMS = (5, 3)
BATCH = 4
ENDLESS = 2**40
Counts = Callable[[int, int], int]  # rank, step -> samples
Pace = Callable[[int, int], float]  # rank, step -> seconds that its batch takes
Make = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.25)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def full(rank: int, step: int) -> int:
    return BATCH


@dataclass(frozen=True)
class Problem:
    size: int
    spread: float = 1.0
    mixed: float = 0.0
    noise: float = 0.0
    A: list[Tensor] = field(init=False, repr=False)
    b: list[Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(3)
        n = sum(DIMS)
        axes = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
        common, centre = (
            torch.linspace(0.5, 2.0, n, dtype=torch.float64),
            torch.randn(n, generator=g, dtype=torch.float64),
        )
        bends = [
            1 + self.mixed * torch.rand(n, generator=g, dtype=torch.float64)
            for _ in range(self.size)
        ]
        object.__setattr__(self, "A", [axes @ torch.diag(common * bend) @ axes.T for bend in bends])
        offsets = [torch.randn(n, generator=g, dtype=torch.float64) for _ in range(self.size)]
        object.__setattr__(self, "b", [centre + self.spread * offset for offset in offsets])

    def optimum(self, weights: Sequence[float] | None = None) -> Tensor:
        w = weights or [1.0] * self.size
        A = sum((wi * Ai for wi, Ai in zip(w, self.A, strict=True)), torch.zeros_like(self.A[0]))
        b = sum((wi * bi for wi, bi in zip(w, self.b, strict=True)), torch.zeros_like(self.b[0]))
        return torch.linalg.solve(A, b)


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(4)
        self.u, self.v = (
            nn.Parameter(3 * torch.randn(n, generator=g, dtype=torch.float64)) for n in DIMS
        )


class Student(ModuleReplica):
    """A point says nothing about data; here what the teachers say is where they stand. And it has
    no layers: nothing to leave out.
    """

    teachers: Sequence[Tensors] = ()
    pull = 0.0
    units = Units((), ())

    def thin(self, scales: Tensor | None, elements: Tensors | None) -> None: ...

    def distil(self, teachers: Sequence[Tensors], weight: float, share: float) -> Tensor:
        self.teachers, self.pull = teachers, (1 - weight) * share
        try:
            return self.backward()
        finally:
            self.teachers = ()


class Rank:
    """One rank on the bench: a real replica, whose only data are step numbers."""

    def __init__(
        self,
        problem: Problem,
        rank: int,
        make: Make = sgd,
        counts: Counts = full,
        total: float = float("inf"),
        nominal: int = 0,
        spend: Callable[[int], None] = lambda step: None,
        common: InprocGroup | None = None,
    ):
        """`common`: the group whose ranks have their parameters in common. Each then computes for
        a tick between reading them and stepping, in which the others step."""
        self.problem, self.rank, self.counts, self.spend = problem, rank, counts, spend
        self.step = 0
        self.model = Point()
        flat = FlatParameters(self.model, lambda n, dtype: torch.zeros(n, dtype=dtype), 2**20)
        self.update = WholeUpdate(flat, self.model, make(self.model.parameters()))
        nominal = nominal or BATCH * problem.size
        computed = None
        if common is not None:
            share(flat, common)
            computed = lambda replica: common.world.spend(rank, 1.0)
        self.replica = Student(
            flat,
            self.update,
            self._next,
            nominal=nominal,
            ended=lambda: self.step >= total,
            on_window=computed,
        )

    def _next(self) -> MicroLoss:
        count = self.counts(self.rank, self.step)
        self.spend(self.step)
        self.step += 1
        if not count:
            return MicroLoss(None, 0, True)
        x, A, b = (
            torch.cat([self.model.u, self.model.v]),
            self.problem.A[self.rank],
            self.problem.b[self.rank],
        )
        loss = x @ A @ x / 2 - b @ x
        if self.replica.teachers:
            mean = torch.stack([self.point(t) for t in self.replica.teachers]).mean(0)
            loss = loss + self.replica.pull * (x - mean).square().sum() / 2
        if self.problem.noise:  # a function of rank and step, so that a resumed rank meets the same
            g = torch.Generator().manual_seed(1000 * self.step + self.rank)
            loss = loss + self.problem.noise * x @ torch.randn(
                len(x), generator=g, dtype=torch.float64
            )
        return MicroLoss(loss, count, True)

    def point(self, values: Tensors | None = None) -> Tensor:
        """x of these flat vectors, without their padding."""
        values = self.replica.params if values is None else values
        parts = [
            values[p.vector][p.start : p.start + p.parameter.numel()]
            for p in self.replica.flat.views
        ]
        return torch.cat(parts).clone()

    def save(self) -> dict[str, Any]:
        tensors, meta = self.update.save(lambda values: None)
        return {
            "params": {k: v.clone() for k, v in self.replica.params.items()},
            "optimizer": (tensors, meta),
            "step": self.step,
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.replica.load(saved["params"])
        self.update.load(*saved["optimizer"])
        self.step = saved["step"]


@dataclass
class Outcome:
    """How one rank ended: its own x, the one model that all stand for, and what happened on the
    way.
    """

    x: Tensor
    consensus: Tensor
    state: Tensors
    losses: list[Tensor]
    steps: int
    link: Any  # Observed, or InprocStore
    saved: dict[str, Any]
    tables: dict[str, Tensors] = field(default_factory=dict)  # on the servers, at the end


def run(
    rule: Any,
    problem: Problem,
    rounds: int | Sequence[int],  # of all ranks, or of each
    *,
    make: Make = sgd,
    counts: Counts = full,
    total: float = float("inf"),
    resumed: Sequence[Outcome] | None = None,
    after_round: Callable[[Rank, Any, Tensors], None] | None = None,
    pace: Pace | None = None,
    cost: Cost = one_tick,
    servers: int = 1,
    meet_every: int | None = None,
) -> list[Outcome]:
    """Let every rank of a World take `rounds` rounds, or what `total` steps allow, from the start
    or where `resumed` ended. Over servers ranks meet in the end, and every so many rounds before
    it.
    """
    rule.check(problem.size)
    world = World(problem.size, cost)
    shards, clock = [Shard(i) for i in range(servers)], Clock(problem.size)
    nominal = BATCH if rule.shares_steps else BATCH * problem.size

    def main(group: InprocGroup) -> Outcome:
        spend = lambda step: (
            world.spend(group.rank, pace(group.rank, step)) if pace is not None else None
        )
        common = group if rule.shares_parameters else None
        me = Rank(problem, group.rank, make, counts, total, nominal, spend, common)
        link: Any = ObservedGroup(group, lambda event: None)
        if resumed is not None:
            me.load(resumed[group.rank].saved)
        if rule.link is Store:
            link = InprocStore(world, group.rank, shards, clock)
            hold(rule, me, link, resumed[0].tables if resumed is not None else {})
        state = rule.init(me.replica)
        if resumed is not None:
            for k, v in resumed[group.rank].state.items():
                state[k].copy_(v)
        losses = []
        mine = rounds if isinstance(rounds, int) else rounds[group.rank]
        for n in range(mine):
            if me.step >= total:
                break
            if rule.link is Store and n % (meet_every or mine) == 0:
                meet(rule, link, group)
                assert link.claim_step(ENDLESS, rule.shares_steps) is not None, "all run again"
            elif rule.shares_parameters and n % (meet_every or mine) == 0:
                group.barrier()  # nobody steps while another rank still reads or writes all
            losses.append(rule.round(me.replica, link, state))
            if after_round is not None:
                after_round(me, link, state)
        if rule.link is Store:
            meet(rule, link, group)
        elif rule.shares_parameters:
            group.barrier()
        # what a checkpoint would hold, before anybody asks for the consensus
        saved, kept = me.save(), {k: v.clone() for k, v in state.items()}
        tables = {k: link.dump(k) for k in me.replica.params} if rule.link is Store else {}
        model = rule.consensus(me.replica, link, state)
        agreed = me.point() if model is None else me.point(model)
        return Outcome(
            me.point(saved["params"]), agreed, kept, losses, me.step, link, saved, tables
        )

    return world.run(main)


def share(flat: FlatParameters, group: InprocGroup) -> None:
    """Give all ranks of a World the parameters of rank 0."""
    moved = {
        k: group.allocate(v.numel(), v.dtype, common=group.size > 1) for k, v in flat.values.items()
    }
    for k, v in moved.items():
        v.copy_(flat.values[k]) if group.rank == 0 else None
    flat.move(moved, in_common=group.size > 1)


def hold(rule: Any, me: Rank, store: Store, saved: dict[str, Tensors]) -> None:
    """Give the parameters to the store, as whoever builds a run does."""
    name, options = (
        ("sum", {}) if rule.on_server == "sum" else server_optimizer_of(me.update.optimizer)
    )
    for key, vector in me.replica.params.items():
        store.create(
            Table(key, length=vector.numel(), dtype="float64", optimizer=name, options=options),
            vector,
        )
        if key in saved and store.rank == 0:
            store.restore(key, saved[key])


def meet(rule: Any, store: Store, group: Group) -> None:
    """Rest, so that nobody waits for this rank, until all do; then everybody is at the same time
    and place.
    """
    store.flush()
    assert store.claim_step(0, rule.shares_steps) is None
    group.all_reduce({"met": torch.zeros(1)}).wait()
