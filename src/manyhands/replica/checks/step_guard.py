"""Step guard: refuses optimizer steps and clipping of user code that would go past the run.

A script that was not ported, or a loop that calls optimizer.step() instead of run.step(loss), would
train one separate model on each rank, without an error; clip_grad_norm_ beside run.step(loss) finds
no gradient and clips nothing; an optimizer made anew after run.prepare is never stepped. While the
guard is installed, torch calls it before every optimizer step, and so do two functions of torch
that have no hook: `Optimizer.add_param_group`, and the norm inside `clip_grad_norm_`. Steps of our
own loop are marked by `merged_steps`, the user's code that it calls by `UserCode`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.errors import TaskError
from manyhands.replica.several_optimizers.named_optimizers import named

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


class UserCode:
    """Context in which a training loop of ours calls the user's code: steps in it are refused.

    A class, not a generator: every forward pass enters it."""

    def __enter__(self) -> None:
        self._token = _merging.set(False)

    def __exit__(self, *_: object) -> None:
        _merging.reset(self._token)


class StepGuard:
    """Pre-hook on optimizer steps and clipping in one process of `ranks`. The run sets what it
    prepared or trains."""

    def __init__(self, ranks: int):
        self.ranks, self.joined = ranks, False
        self.prepared: Optimizer | None = None  # what run.prepare was given
        self.parameters: list[nn.Parameter] = []  # of the model that run.prepare was given
        self.trained: set[int] = set()  # ids of parameters that a task() trains
        self._local: list[Optimizer] = []
        self._hook: Any = register_optimizer_step_pre_hook(self._check)
        self._replaced: list[tuple[Any, str, Any]] = []
        self._replace(Optimizer, "add_param_group", self._check_group)
        # clip_grad_norm_ and clip_grad_value_ call these, wherever they were imported from
        for name in ("_get_total_norm", "_group_tensors_by_device_and_dtype"):
            if hasattr(clip_grad, name):
                self._replace(clip_grad, name, self._check_clipped)
        self._replace(torch.amp.GradScaler, "scale", self._check_scaled)

    def close(self) -> None:
        self._hook.remove()
        for where, name, plain in self._replaced:
            setattr(where, name, plain)

    def _replace(self, where: Any, name: str, check: Any) -> None:
        """Call `check` before a function of torch."""
        plain = getattr(where, name)

        @functools.wraps(plain)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return plain(*args, **kwargs)

        self._replaced.append((where, name, plain))
        setattr(where, name, checked)

    def _check_group(self, optimizer: Optimizer, group: Any, *_: Any, **__: Any) -> None:
        if self.prepared is None or _merging.get():
            return
        if self._name_of(optimizer) is not None:
            raise TaskError(
                "parameters were added to the optimizer after run.prepare, which cannot merge "
                "them; give the model all its layers before (requires_grad=True and lr=0 for "
                "those that train later)"
            )
        known = {id(p) for g in self.prepared.param_groups for p in g["params"]}
        given = group.get("params", ()) if isinstance(group, dict) else ()
        params = [given] if isinstance(given, nn.Parameter) else given
        if isinstance(params, list | tuple) and any(id(p) in known for p in params):
            raise TaskError(
                f"{type(optimizer).__name__} was made over parameters of the run, but run.step "
                "goes on with the optimizer that run.prepare was given; change that one: "
                "optimizer.param_groups[0]['lr'] = ..."
            )

    def _check_clipped(self, tensors: Any, *_: Any, **__: Any) -> None:
        if _merging.get() or (self.prepared is None and not self.trained):
            return
        # clip_grad_value_ gives a list of lists
        grads = tensors[0] if len(tensors) and isinstance(tensors[0], list | tuple) else tensors
        if not len(grads):
            raise TaskError(
                "a gradient was to be clipped, but there is none outside of the step: backward, "
                "exchange and optimizer step are one; clip by the plan: clip=1.0"
            )
        if self.ranks > 1 and any(g is p.grad for p in self.parameters for g in grads):
            raise TaskError(
                "a gradient was to be clipped before run.step(), which merges it with those of "
                f"the other {self.ranks - 1} ranks: clipped first, it is another one than one "
                "process would have; clip by the plan: clip=1.0"
            )

    def _check_scaled(self, scaler: Any, *_: Any, **__: Any) -> None:
        if self.prepared is not None and not _merging.get() and scaler.is_enabled():
            raise TaskError(
                "GradScaler.scale(loss) was called, but a run scales losses and gradients itself; "
                "leave the GradScaler out (scale, unscale_, step, update), and say precision=fp16 "
                "in the plan"
            )

    def _name_of(self, optimizer: Optimizer) -> str | None:
        """Of one that run.prepare was given; "": it was given without a name."""
        if self.prepared is None:
            return None
        return next((n for n, o in named(self.prepared).items() if o is optimizer), None)

    def keep_local(self, optimizer: Optimizer) -> None:
        """Let this optimizer step: what it trains is each rank's own business."""
        self._local.append(optimizer)

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _merging.get() or any(optimizer is known for known in self._local):
            return
        if (ours := self._name_of(optimizer)) is not None:
            call = f"run.step(loss, optimizer={ours!r})" if ours else "run.step(loss)"
            raise TaskError(
                "optimizer.step() was called on the optimizer that run.prepare returned, which "
                f"would step by this rank's gradient alone; call {call} instead of "
                "loss.backward(), optimizer.step() and zero_grad()"
            )
        name = type(optimizer).__name__
        if self.trained and self.prepared is None:
            steps = (p for g in optimizer.param_groups for p in g["params"])
            if any(id(p) in self.trained for p in steps):
                raise TaskError(
                    f"the task called {name}.step() on parameters that the run trains, by this "
                    "rank's gradient alone; return the loss, the run steps its own optimizer"
                )
            return
        if self.ranks == 1:
            return
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


@contextmanager
def over_task(parameters: Iterable[nn.Parameter], ranks: int) -> Iterator[None]:
    """Guard the code of a task() that trains these parameters."""
    ours = not _installed
    guard = install(ranks)
    guard.trained = {id(p) for p in parameters}
    try:
        yield
    finally:
        guard.trained = set()
        if ours:
            remove()
