"""Announcements: what rank 0 says at the start of a run, or where it goes on with other ranks."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import nn

from manyhands.assembly.model_parallel import ModelPart
from manyhands.assembly.own_state import saved_layout
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.resume import Start
from manyhands.core import Event, Plan
from manyhands.plan import words


def notice_resumed(context: RankContext, begin: Start) -> None:
    if (saved := begin.saved) is not None:
        at = saved.position
        context.notice(
            f"resumed at round {saved.round} (epoch {at.epoch}, {at.offset} samples into it) "
            f"from {context.checkpoints.last_good}"
        )
        if context.options.kept:
            context.notice(f"as before: {context.options.kept} (a word given anew changes it)")
        then, now = saved_layout(saved), begin.plan.layout
        if then != now:
            context.notice(
                f"on {words.layout_line(now)} from here on, {words.layout_line(then)} before"
            )


def announce(
    context: RankContext, plan: Plan, module: nn.Module, global_batch: int, part: ModelPart | None
) -> None:
    """Events at the start of a run, from rank 0, and the resolved plan in the run directory."""
    if not context.leads:
        return
    resolved = dataclasses.replace(plan, threads=torch.get_num_threads())
    context.write_plan(words.to_toml(resolved))
    here = sum(p.numel() for p in module.parameters())
    model = f"{type(module).__name__}, {here:,} parameters"
    if part is not None:
        model = f"{part.name}, {here:,} of them on rank 0"
    where = context.device.type
    if context.process.size > 1:
        where = f"{context.process.size} x {where} over {context.group_name}"
    texts = {
        "start": words.brief(resolved),
        "model": f"{model}; {global_batch} samples a step; {where}",
        "run": str(context.directory),
    }
    for name, text in texts.items():
        context.recorder.emit(Event(time.time(), 0, context.group.round, name, value=text))
    context.recorder.flush()


def announce_regrouped(context: RankContext, round: int) -> None:
    """The run goes on with other ranks than before: who, from where, and how long it stood."""
    regrouping = context.regrouping
    if not context.leads:
        return
    seconds = time.time() - regrouping.since
    again = regrouping.rolled_back
    why = f"{regrouping.epoch.why}; " if regrouping.epoch.why else ""
    text = (
        f"{why}{words.layout_line(context.plan.layout)} from round {round} on "
        f"(epoch {regrouping.epoch.number} of the ranks"
        + (f"; {again} round{'s' * (again != 1)} computed again" if again else "")
        + f"; {seconds:.2f} s)"
    )
    event = Event(time.time() - seconds, 0, round, "regroup", seconds, value=text)
    context.recorder.emit(event)
    context.recorder.flush()
