"""The zoo's outcomes as a page of the docs: a table, and what is refused and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from support.zoo.matrix import DIFFERENT, EQUAL, LAYOUTS, RAW, REFUSED, STEPS, Outcome
from support.zoo.public_models import MODELS

HEAD = """# Public models, under every layout

Models that nobody here wrote, as their packages have them: tiny configurations, random weights and
data, {steps} steps in float64. `manyhands verify` compares each with one process. A number is the
largest relative deviation of loss, gradients and parameters: EQUAL up to the order of summation,
or, where (r) follows, up to what rounding alone does to this model on one process. *refused* means
that the run stops before its first step, with a sentence that names the part of the model and what
to do instead (below).

{versions}.

Written by `PYTHONPATH=src:tests python -m support.zoo.report --write`; the same pairs are the slow
test `tests/process/test_zoo.py`.
"""


def page(found: Sequence[Outcome], versions: Mapping[str, str]) -> str:
    known = {(o.model, o.layout): o for o in found}
    names = [n for n in MODELS if any(o.model == n for o in found)]
    text = HEAD.format(steps=STEPS, versions=", ".join(f"{k} {v}" for k, v in versions.items()))
    text += f"\n{summary(found)}\n\n"
    text += f"| | {' | '.join(f'`{w}`' for w in LAYOUTS)} |\n|---|{'---|' * len(LAYOUTS)}\n"
    for name in names:
        cells = [cell(known.get((name, w))) for w in LAYOUTS]
        text += f"| {name} | {' | '.join(cells)} |\n"
    for kind, title in (
        (REFUSED, "What is refused, and why"),
        (DIFFERENT, "What differs"),
        (RAW, "What fails without a reason that helps"),
    ):
        text += section(title, [o for o in found if o.kind == kind])
    return text


def cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.kind == EQUAL:
        return f"{outcome.deviation:.0e}" + " (r)" * outcome.rounding
    if outcome.kind == DIFFERENT:
        return f"**DIFFERENT** {outcome.deviation:.0e}"
    return "*refused*" if outcome.kind == REFUSED else "**raw error**"


def section(title: str, found: Sequence[Outcome]) -> str:
    """The same sentence is written once for all layouts it was said under."""
    if not found:
        return ""
    together: dict[tuple[str, str], list[str]] = {}
    for o in found:
        said = o.text.strip()
        said = " ".join(said.split()) if o.kind == REFUSED else (said.splitlines() or [""])[-1]
        together.setdefault((o.model, said), []).append(o.layout)
    text = f"\n## {title}\n\n| model | layouts | |\n|---|---|---|\n"
    for (model, said), layouts in together.items():
        where = "<br>".join(f"`{w}`" for w in layouts)
        text += f"| {model} | {where} | {said.replace('|', chr(92) + '|').replace('<', '&lt;')} |\n"
    return text


def summary(found: Sequence[Outcome]) -> str:
    counts = Counter(o.kind for o in found)
    parts = ", ".join(f"{counts[k]} {k}" for k in (EQUAL, REFUSED, DIFFERENT, RAW) if counts[k])
    good = sum(o.good for o in found)
    share = f" ({good / len(found):.1%} equal or refused)" if found else ""
    return f"{len(found)} pairs: {parts}{share}."
