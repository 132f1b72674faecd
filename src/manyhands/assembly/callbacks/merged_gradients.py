"""Gradient hooks of a plan: `on_gradient` needs the whole merged gradient on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.spec import TrainingSpec
from manyhands.callbacks.gradient_hook import GradientHook
from manyhands.callbacks.hooks import overrides
from manyhands.core import Group, Plan
from manyhands.errors import PlanError
from manyhands.replica.module import ModuleReplica
from manyhands.task import Callback
from manyhands.train import Trainer


def callbacks_of(context: RankContext, spec: TrainingSpec) -> tuple[Callback, ...]:
    """The user's: of the task, and of `mh.train`."""
    return (*spec.callbacks, *context.options.callbacks)


def wants_gradients(context: RankContext, spec: TrainingSpec) -> bool:
    return bool(_with_hook(callbacks_of(context, spec)))


def check_gradient_hooks(context: RankContext, plan: Plan, spec: TrainingSpec) -> None:
    """Refuse the hook where gradients are never merged, or no rank has the whole of one."""
    found = _with_hook(callbacks_of(context, spec))
    if not found:
        return
    name = f"the callback {type(found[0]).__name__}.on_gradient"
    if context.splits_model:
        raise PlanError(
            f"{name} wants the whole gradient, but shard=, tensor= and pipe= split it over ranks; "
            "use data= alone, or leave it out (clip=1.0 clips under every plan)"
        )
    for word, strategy in (("merge", plan.strategy), ("then", plan.next_strategy)):
        if strategy is None or (strategy.link is Group and strategy.sends == "gradients"):
            continue
        raise PlanError(
            f"{name} wants the merged gradient, but {word}={getattr(plan, word)} never merges "
            "gradients on a rank; use merge=all_reduce or robust, or a hook of the optimizer, "
            "which sees each rank's own"
        )


def hook_gradients(trainer: Trainer, replica: ModuleReplica) -> None:
    """From now on every step calls the hook."""
    if replica.line_search is not None:
        raise PlanError(
            "a callback's on_gradient is called before the optimizer's step, but mh.LBFGS "
            "computes several gradients within one; leave it out, or use another optimizer"
        )
    hook = GradientHook(replica.flat.views, trainer.call_gradient_hooks)
    trainer.gradient_hook = replica.optimizer_step.before_step = hook


def _with_hook(callbacks: Sequence[Callback]) -> list[Callback]:
    return [c for c in callbacks if overrides(c, "on_gradient")]
