"""Outcome of a public model under a layout: `verify` says equal or different, or it is refused.

A refusal counts only if its sentence names a part of the model and says what to do; every other
error is a raw one.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch
from torch import nn

from manyhands import errors
from manyhands.cli.verify import compare
from manyhands.errors import LaunchError, ManyhandsError
from manyhands.plan import words
from support.zoo.public_models import maker, task_of

STEPS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LAYOUTS = (
    "data=3",
    "tensor=2",
    "tensor=4",
    "tensor=2 sequence=true",
    *(f"pipe=2 schedule={s}" for s in SCHEDULES),
    "pipe=2 cut=graph",
    *(f"shard=2 zero={z}" for z in (1, 2, 3)),
    "data=2 tensor=2 pipe=2",
)
EQUAL, DIFFERENT, REFUSED, RAW = "EQUAL", "DIFFERENT", "refused", "raw error"
GOOD = (EQUAL, REFUSED)
# sentences of ours end with what to do
REMEDY = re.compile(
    r"\b(set|use|give|move|leave|cut|choose|call|pass|make|take|write|replace|raise|install)\b"
)
REFUSALS = ("PlanError", "TaskError")


@dataclass(frozen=True)
class Outcome:
    model: str
    layout: str
    kind: str
    deviation: float | None = None
    bound: float | None = None
    rounding: bool = False  # whether the bound is how far rounding moves this model
    text: str = ""  # the sentence of a refusal, the error, or the modules that differ
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.kind in GOOD


def outcome(model: str, layout: str, steps: int = STEPS) -> Outcome:
    """Train `model` for a few steps under `layout` and on one process, and compare."""
    began = time.monotonic()
    plan = words.parse(f"{layout} device=cpu threads=1 timeout_s=60")
    torch.set_num_threads(1)
    try:
        found = compare(maker(model), plan, steps=steps, float32=False)
    except Exception as e:
        kind, text = judged(made_model(model), e)
        return Outcome(model, layout, kind, text=text, seconds=time.monotonic() - began)
    worst = sorted(found.by_module.items(), key=lambda kv: -kv[1])[:3]
    return Outcome(
        model,
        layout,
        EQUAL if found.equal else DIFFERENT,
        max(found.loss, found.gradient, found.parameter),
        found.rtol,
        getattr(found, "lifted", False),  # versions of verify that do not measure it have none
        "" if found.equal else ", ".join(f"{n or '(top)'} {v:.0e}" for n, v in worst),
        time.monotonic() - began,
    )


def made_model(name: str) -> nn.Module:
    made = task_of(name).model
    assert isinstance(made, nn.Module)
    return made


def judged(model: nn.Module, error: Exception) -> tuple[str, str]:
    """Whether an error is a refusal with a reason and a remedy, or a raw one; and its text."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, LaunchError):  # a rank's error, as text
        inner = re.match(r"(?:rank \d+ failed:\n)?(\w+): (.*)", text, re.DOTALL)
        if inner is not None and isinstance(getattr(errors, inner[1], None), type):
            kind, text = inner[1], inner[2]
    elif not isinstance(error, ManyhandsError):
        text = f"{kind}: {text}"
    text = re.sub(r"/[^\s:]*/site-packages/", "", text.strip())  # not where this machine has it
    refused = kind in REFUSALS and REMEDY.search(text) and names_part(model, text)
    return (REFUSED if refused else RAW), text


def names_part(model: nn.Module, text: str) -> bool:
    """Whether `text` names a module or parameter of the model, or the class of one."""
    names = {n for n, _ in model.named_modules()} | {n for n, _ in model.named_parameters()}
    names |= {type(m).__name__ for m in model.modules()}
    return any(re.search(rf"(?<![\w.]){re.escape(n)}(?!\w)", text) for n in names if n)
