"""L-BFGS: a quasi-Newton optimizer over a full gradient, with a strong Wolfe line search.

    d_k = -H_k g_k                          H_k: of the last m pairs (`quasi_newton.two_loop`)
    x_{k+1} = x_k + a_k d_k                 a_k by `quasi_newton.strong_wolfe`
    s_k = x_{k+1} - x_k,   y_k = g_{k+1} - g_k

Every loss and gradient of a step must be of the same samples: then loss and slope belong to one
function, which the search needs, and y is a difference of two gradients of it. The search tries
a = lr first (min(1, 1/|g|) lr where there are no pairs yet), which nearly always holds once the
history is filled. A step costs one gradient at its start and one for each a; `continued` says that
the step goes on where the last one ended, on the same samples, and spares the first.

Where ranks hold slices of all parameters, `dot` sums over them. Then gradient, direction and
history are sharded, and only dot products travel.

If no a lowers the loss, the history is dropped and the next step is along -g; if that finds none
either, the parameters are at a minimum, as far as rounding lets it be seen, and stay.

Papers: Liu & Nocedal 1989 (doi:10.1007/BF01589116); Dean et al. 2012, "Large Scale Distributed
Deep Networks" (NIPS), whose Sandblaster is the sharded one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import quasi_newton
from manyhands.errors import TaskError
from manyhands.quasi_newton import CurvaturePair, History, strong_wolfe, two_loop

NOISE_EPS = 10.0  # rounding of a loss, in units of its dtype's smallest step


class LBFGS(Optimizer):
    """L-BFGS with a strong Wolfe line search, of a run: `Task(optimizer=mh.LBFGS)`.

    `history` is the number of curvature pairs, each two vectors of the model's length; `c1` and
    `c2` are the constants of the Wolfe conditions, `max_evaluations` bounds the gradients of one
    search, and `lr` is the step that a search tries first. `balance=True`: ranks claim small shards
    of the batch, each at its own pace, and an idle one repeats the slowest (see docs/lbfgs.md).

    Outside a run `step(closure)` works as that of torch.optim.LBFGS, one iteration a call.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        history: int = 10,
        c1: float = 1e-4,
        c2: float = 0.9,
        max_evaluations: int = 25,
        balance: bool = False,
    ):
        _check("lr", lr, lr > 0, "more than 0")
        _check("history", history, history >= 1, "1 pair or more")
        _check("c1, c2", (c1, c2), 0 < c1 < c2 < 1, "0 < c1 < c2 < 1")
        _check("max_evaluations", max_evaluations, max_evaluations >= 1, "1 or more")
        defaults: dict[str, Any] = {
            "lr": lr,
            "history": history,
            "c1": c1,
            "c2": c2,
            "max_evaluations": max_evaluations,
            # of the history: [slot, s . y, y . y] of each pair, oldest first; the vectors are in
            # `state`, by slot
            "pairs": [],
            "loss": None,  # at the end of the last step, where its gradient is kept
        }
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise TaskError(
                f"LBFGS got {len(self.param_groups)} parameter groups, but its direction is one "
                "vector over all parameters, with one lr; give it the parameters as one list"
            )
        held = self.param_groups[0]["params"]
        if len(kinds := {p.dtype for p in held}) != 1:
            raise TaskError(
                f"LBFGS got parameters of {len(kinds)} dtypes ({', '.join(map(str, kinds))}), but "
                "dot products over all of them need one; convert the model: model.float()"
            )
        self.balance = balance  # of this run: a checkpoint says nothing about it
        self._begin()

    # -- what is saved --

    @property
    def per_element(self) -> tuple[str, ...]:
        """Keys of the state that has a parameter's shape."""
        slots = range(self.param_groups[0]["history"])
        return (*(f"{k}{i}" for i in slots for k in "sy"), "gradient")

    @property
    def state_vectors(self) -> int:
        """Vectors of the parameters' length that are kept between two steps: the state, and the
        parameters themselves."""
        return len(self.per_element) + 1

    @property
    def work_vectors(self) -> int:
        """Further ones in a step: the direction, a trial point and its gradient."""
        return 3

    def _begin(self) -> None:
        first = self.param_groups[0]["params"][0]
        self.dot: quasi_newton.Dot = quasi_newton.dot
        self._empty = torch.empty(0, dtype=first.dtype, device=first.device)
        self._recall()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "balance": self.balance}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "dot" in self.__dict__:
            self._recall()
        else:  # a copy
            self._begin()

    def _recall(self) -> None:
        """The history as `state` and `param_groups` have it."""
        group = self.param_groups[0]
        self._history = History(group["history"], lambda a, b: self.dot(a, b))
        for slot, sy, yy in group["pairs"]:
            s, y = (self._kept(f"{k}{slot}") for k in "sy")
            self._history.restore(CurvaturePair(s, y, sy, yy))
        self._gradient = None if group["loss"] is None else self._kept("gradient")
        self._x: Tensor | None = None  # parameters at the end of the last step; None: as they are
        self._stuck = False  # there is no lower loss along -g from there

    def _kept(self, key: str) -> Tensor:
        """A vector of the state; from here on the state has views of it."""
        parts = [self.state[p].get(key) for p in self._parameters()]
        if any(part is None for part in parts):
            raise TaskError(
                f"the state of LBFGS lacks {key} of some parameters: it was saved with others; "
                "start anew without it"
            )
        return self._keep(key, self._joined([part for part in parts if part is not None]))

    def _keep(self, key: str, vector: Tensor) -> Tensor:
        for p, part in zip(self._parameters(), self._parts(vector), strict=True):
            self.state[p][key] = part
        return vector

    def forget(self) -> None:
        """Drop the last gradient: the next step is of other samples, or of other random numbers."""
        self._gradient = self._x = self.param_groups[0]["loss"] = None
        for p in self._parameters():
            self.state[p].pop("gradient", None)

    def can_continue(self) -> bool:
        """Whether loss and gradient at the present parameters are known."""
        unmoved = self._x is None or torch.equal(self._x, self._values())
        return self._gradient is not None and unmoved

    # -- the step --

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, continued: bool = False
    ) -> float:
        """One iteration; returns the loss at its start. `closure()` computes the gradient and
        returns the loss, on the same samples at every call."""
        if closure is None:
            raise TypeError("LBFGS.step needs closure, which computes the gradient again")
        evaluate = torch.enable_grad()(closure)
        if continued and self._gradient is not None:
            loss, g = self.param_groups[0]["loss"], self._gradient
            if self._stuck:
                return float(loss)
        else:
            loss, g = float(evaluate()), self._gradients()
        d, slope = self._direction(g)
        if slope == 0:  # a gradient of zero
            self._end(loss, g, self._values())
            return loss
        if not (math.isfinite(loss) and math.isfinite(slope)):
            return math.nan  # nothing has moved
        self._search(evaluate, loss, g, d, slope)
        return loss

    def _direction(self, g: Tensor) -> tuple[Tensor, float]:
        d = two_loop(g, self._history, dot=self.dot)
        slope = self.dot(g, d)
        if not slope < 0 and len(self._history):
            self._drop_history()
            return self._direction(g)
        return d, slope

    def _search(
        self, evaluate: Callable[[], Any], loss: float, g: Tensor, d: Tensor, slope: float
    ) -> None:
        group, x = self.param_groups[0], self._values()
        first = 1.0 if len(self._history) else min(1.0, 1.0 / math.sqrt(-slope))
        reached: list[Tensor] = [g]  # the gradient at the last a

        def phi(a: float) -> tuple[float, float]:
            self._move(torch.add(x, d, alpha=a))
            value, reached[0] = float(evaluate()), self._gradients()
            return value, self.dot(reached[0], d)

        found = strong_wolfe(
            phi,
            loss,
            slope,
            first * float(group["lr"]),
            group["c1"],
            group["c2"],
            group["max_evaluations"],
            NOISE_EPS * torch.finfo(x.dtype).eps,
        )
        if found.step == 0:
            self._move(x)
            self._stuck = not len(self._history)
            self._drop_history()
            self._end(loss, g, x)
            return
        self._stuck = False
        here = self._values()
        self._add_pair(here - x, reached[0] - g)
        self._end(found.loss, reached[0], here)

    def _end(self, loss: float, g: Tensor, x: Tensor) -> None:
        self.param_groups[0]["loss"] = loss
        self._gradient, self._x = self._keep("gradient", g), x

    # -- the history --

    def _add_pair(self, s: Tensor, y: Tensor) -> None:
        if not self._history.add(s, y):
            return
        group = self.param_groups[0]
        # a pair keeps its slot: the oldest one leaves it to the newest
        slot = group["pairs"][0][0] if len(group["pairs"]) == group["history"] else None
        used = group["pairs"] if slot is None else group["pairs"][1:]
        slot = len(used) if slot is None else slot
        *_, newest = self._history
        group["pairs"] = [*used, [slot, newest.sy, newest.yy]]
        self._keep(f"s{slot}", s)
        self._keep(f"y{slot}", y)

    def _drop_history(self) -> None:
        self._history.clear()
        self.param_groups[0]["pairs"] = []
        for p in self._parameters():
            for key in self.per_element[:-1]:
                self.state[p].pop(key, None)

    # -- vectors --

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.param_groups[0]["params"] if p.requires_grad]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([self._empty, *(part.reshape(-1) for part in parts)])

    def _parts(self, vector: Tensor) -> list[Tensor]:
        held = self._parameters()
        cut = vector.split([p.numel() for p in held]) if held else ()
        return [part.view(p.shape) for p, part in zip(held, cut, strict=True)]

    def _values(self) -> Tensor:
        return self._joined([p.detach() for p in self._parameters()])

    def _gradients(self) -> Tensor:
        return self._joined(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters()]
        )

    def _move(self, x: Tensor) -> None:
        for p, part in zip(self._parameters(), self._parts(x), strict=True):
            p.copy_(part)


def _check(name: str, given: Any, holds: bool, needed: str) -> None:
    if not holds:
        raise TaskError(f"LBFGS got {name}={given}, but {needed} is needed")
