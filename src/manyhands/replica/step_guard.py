"""Step guard: refuses optimizer steps of user code that no run would merge.

A script that was not ported, or a loop that calls optimizer.step() instead of run.step(loss), would
train one separate model on each rank, without an error. While the guard is installed, torch calls
it before every optimizer step; steps of our own loop are marked by `merged_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.errors import TaskError

# a greenlet has variables of its own: true in the coroutine of a training loop, false in the
# user's code that it takes turns with
_merging: ContextVar[bool] = ContextVar("merging", default=False)

PORT = "join it with run = manyhands.join(), run.prepare(...) and run.step(loss), or define task()"


@contextmanager
def merged_steps() -> Iterator[None]:
    """Optimizer steps in here are those of a training loop of ours."""
    token = _merging.set(True)
    try:
        yield
    finally:
        _merging.reset(token)


class StepGuard:
    """Guard of one process among `ranks`. What it knows of the script's run is set from outside."""

    def __init__(self, ranks: int):
        self.ranks, self.joined = ranks, False
        self.prepared: Optimizer | None = None  # what run.prepare was given
        self._local: list[Optimizer] = []
        self._hook: Any = register_optimizer_step_pre_hook(self._check)

    def close(self) -> None:
        self._hook.remove()

    def keep_local(self, optimizer: Optimizer) -> None:
        """Let this optimizer step: what it trains is each rank's own business."""
        self._local.append(optimizer)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _merging.get() or any(optimizer is known for known in self._local):
            return
        if optimizer is self.prepared:
            raise TaskError(
                "optimizer.step() was called on the optimizer that run.prepare returned, which "
                "would step by this rank's gradient alone; call run.step(loss) instead of "
                "loss.backward(), optimizer.step() and zero_grad()"
            )
        if self.ranks == 1:
            return
        name = type(optimizer).__name__
        if self.prepared is None:
            missing = "called run.prepare(...)" if self.joined else "joined the run"
            raise TaskError(
                f"{name}.step() was called, but the script has not {missing}: {self.ranks} ranks "
                f"would train {self.ranks} separate models; {PORT}"
            )
        raise TaskError(
            f"a second optimizer, {name}, steps parameters that are not part of the run: each of "
            f"{self.ranks} ranks would train its own copy; put all parameters into the one model "
            "and optimizer of run.prepare, or, if each rank is to have its own (an inner loop, a "
            "probe), say run.keep_local(optimizer)"
        )


_installed: list[StepGuard] = []


def install(ranks: int) -> StepGuard:
    """The guard of this process: the one that is there already, or a new one."""
    if not _installed:
        _installed.append(StepGuard(ranks))
    return _installed[0]


def remove() -> None:
    while _installed:
        _installed.pop().close()
