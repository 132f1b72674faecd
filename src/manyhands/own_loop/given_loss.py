"""Given loss: what `run.step` was given, as the loss of one micro-batch of this rank.

    run.step(loss)                  a loss, of which the run computes the gradient
    run.step(), run.step(number)    the gradient is there already, by loss.backward() of the user's
    run.step(closure)               a function that computes one or the other
    run.step(None, count=0)         this rank has nothing

With optimizer="d" they are the gradients of its parameters, and those of others are cleared. A
gradient that is there is taken for that of a mean over `count`, as a loss is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core import Plan
from manyhands.errors import TaskError
from manyhands.replica.checks.step_guard import UserCode
from manyhands.replica.module import MicroLoss
from manyhands.replica.objective import scalar_loss

GIVEN = "run.step was given"


class GivenLoss:
    """Reads the losses of one run; `parameters` are those that it trains, `owner` the name of the
    optimizer of each, by id."""

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        owner: Mapping[int, str],
        plan: Plan,
        has_rows: bool,
        notice: Callable[[str], None],
    ):
        self._parameters, self._plan, self._has_rows = parameters, plan, has_rows
        self._owner = owner
        self._notice, self._said = notice, False

    def gradients(self, optimizer: str | None = None) -> list[tuple[nn.Parameter, Tensor]]:
        """Those that are there, of the parameters that this optimizer steps; None: all."""
        there = [(p, p.grad) for _, p in self._parameters if p.grad is not None]
        return [(p, g) for p, g in there if optimizer in (None, self._owner.get(id(p)))]

    def read(self, loss: Any, count: int, in_step: bool, optimizer: str | None = None) -> MicroLoss:
        """`in_step`: the gradients of micro-batches before are there."""
        found = next((name for name, p in self._parameters if p.grad is not None), None)
        found = None if in_step else found
        if loss is None and found is None and count == 0:
            return MicroLoss(None, 0, True, optimizer=optimizer)
        if loss is None or (found and isinstance(loss, Tensor) and not loss.requires_grad):
            return self._of_gradients(loss, count, found, optimizer)
        loss = scalar_loss(loss, GIVEN)
        if found is not None:
            raise TaskError(
                f"{found} has a gradient before run.step(loss), which runs backward itself; leave "
                "out loss.backward(), add auxiliary losses to the loss, and clip gradients by the "
                "plan (clip=1.0); or call run.step() without a loss, which takes the gradients "
                "that are there for this rank's"
            )
        # a mean over nothing is 0/0
        loss = loss if count else loss.nan_to_num()
        return MicroLoss(loss, count, True, optimizer=optimizer)

    def of_closure(
        self, closure: Callable[[], Any], count: int, optimizer: str | None = None
    ) -> MicroLoss:
        """The loss of one call, in whichever of the two ways the closure computes its gradient."""
        with UserCode(), torch.enable_grad():
            loss = closure()
            if not isinstance(loss, Tensor):
                raise TaskError(
                    f"{GIVEN} a function that returned {loss!r:.60}, but the loss is needed, as a "
                    "tensor: end it with return loss"
                )
            there = bool(self.gradients())
            return self.read(loss.detach() if there else loss, count, False, optimizer)

    def _of_gradients(
        self, loss: Tensor | None, count: int, found: str | None, optimizer: str | None
    ) -> MicroLoss:
        if found is not None and not self.gradients(optimizer):
            raise TaskError(
                f"run.step(optimizer={optimizer!r}) takes the gradients that are there, but none "
                f"of its parameters has one ({found} has); every run.step clears all gradients: "
                "call loss.backward() right before the step that is by it"
            )
        if found is None:
            raise TaskError(
                "run.step() without a loss takes the gradients that are there, but no parameter of "
                "the run has one; call loss.backward() before, or run.step(loss); where this rank "
                "has nothing to add: run.step(None, count=0)"
            )
        self._refuse_gradients()
        if not count:
            for _, p in self._parameters:
                p.grad = None
            return MicroLoss(None, 0, True, optimizer=optimizer)
        if loss is None:
            loss = self._parameters[0][1].new_zeros(())
            if not self._said:
                self._notice(
                    "run.step() without a loss: progress and curves show a loss of 0; "
                    "run.step(loss.detach()) shows it"
                )
            self._said = True
        elif loss.numel() != 1:
            raise TaskError(f"the loss has shape {tuple(loss.shape)}, but one number is needed")
        loss = loss.detach().reshape(())
        return MicroLoss(loss, count, True, has_gradients=True, optimizer=optimizer)

    def _refuse_gradients(self) -> None:
        plan = self._plan
        several = f"accumulate={plan.accumulate}" if plan.accumulate > 1 else ""
        several = f"micro={plan.micro}" if (plan.micro or 1) > 1 else several
        if several:
            raise TaskError(
                f"{several} makes one step of several run.step(loss), but run.step() without a "
                "loss takes the gradients that are there for a whole step; leave "
                f"{several.partition('=')[0]}= out, the loop accumulates itself"
            )
        if plan.precision == "fp16":
            raise TaskError(
                "precision=fp16 scales a loss before its backward pass, but run.step() was given "
                "none; call run.step(loss) instead of loss.backward(), or set precision=bf16"
            )
        if self._has_rows:
            raise TaskError(
                "mh.Embedding collects the gradients of its rows in the backward pass of a step, "
                "but run.step() was given no loss; call run.step(loss) instead of loss.backward()"
            )
