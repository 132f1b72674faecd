"""Page of a race: one HTML file without scripts that loads nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

from manyhands.observe.race.picture import colors, svg
from manyhands.observe.race.results import Race, say_target
from manyhands.observe.race.text_table import (
    columns,
    failures,
    rows,
    verdict,
)
from manyhands.observe.text import took

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 2.2rem 1.6rem 4rem; max-width: 76rem;
       background: #fff; color: #111827;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.55rem; margin: 0 0 .2rem; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
.verdict { font-size: 1.1rem; margin: 0 0 1.2rem; }
.muted, th, caption { color: #6b7280; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 500; font-size: .82rem; vertical-align: bottom;
     padding: .3rem .6rem; }
td { text-align: right; padding: .45rem .6rem; border-top: 1px solid #e5e7eb; white-space: nowrap; }
th.left, td.left { text-align: left; white-space: normal; }
td.plan { font-weight: 600; min-width: 9rem; }
.best td { background: #f0fdf4; }
.range { display: block; color: #6b7280; font-size: .8rem; }
.failed { color: #b91c1c; }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%;
       margin-right: .5rem; }
code, pre { font: .84rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
            monospace; }
pre { background: #f9fafb; border: 1px solid #e5e7eb; border-radius: 6px; padding: .7rem .9rem;
      white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0; }
dt { color: #6b7280; } dd { margin: 0; overflow-wrap: anywhere; }
li { margin: .2rem 0; }
"""

MEASURED = (
    "<b>Time to the target</b> runs from the start of the first training step to the start of the "
    "evaluation that reached it, by the clock of rank 0. The seconds and bytes of evaluations are "
    "left out for every plan; exchanges and the loading of data are included. Starting processes "
    "and building the task come before and are the column “start-up”.",
    "<b>Evaluations</b> show whether a plan has reached the target, so a time is rounded up to the "
    "next evaluation, for every plan alike. <code>evaluate=N</code> evaluates every N steps.",
    "<b>Sent</b> is the least that a rank must send for its exchanges: 2n(p−1)/p for an all-reduce "
    "of n bytes on p ranks, half of that for a reduce-scatter or an all-gather, and the message "
    "itself to a peer; with servers, what it pushed and what they sent for its pulls. Inside one "
    "host the bytes go through memory.",
    "<b>Waiting</b> is the share of training in which a rank waited in an exchange, on average "
    "over ranks; exchanges that overlap with computing are not in it. For DDP it is torch’s own "
    "measurement of its backward pass.",
    "<b>DDP</b> is torch’s DistributedDataParallel on the same task, batches, optimizer, schedule "
    "and test, over gloo on CPUs and nccl on GPUs.",
    "<b>Several seeds</b>: the median, and in brackets the smallest and the largest. A run that "
    "did not reach the target counts as infinitely late. The plans run in turn, seed by seed, so "
    "that a busy minute of the machine affects all of them.",
)


def write(race: Race, out: Path, title: str, about: Mapping[str, str]) -> Path:
    """Write the page; `about` lists facts of the race beside its numbers, name to text."""
    out.write_text(page(race, title, about), encoding="utf-8")
    return out


def page(race: Race, title: str, about: Mapping[str, str]) -> str:
    parts = [
        f"<h1>{_e(title)}</h1>",
        f'<p class="verdict">{_e(verdict(race))}.</p>',
        f'<div role="img" aria-label="{_e(race.target.name)} over seconds and over samples, '
        f'one line for each plan">{svg(race)}</div>',
        '<p class="muted">Left: which plan is faster here. Right: which plan learns more from a '
        "sample, on any machine. The strong line is the median run, thin lines are other seeds; a "
        "dot is where the target was reached, a cross where a run ended without.</p>",
        f'<div class="wide">{_table(race)}</div>',
        _failures(race),
        "<h2>The plans in full</h2>",
        *(_plan(race, i) for i in range(len(race.entries))),
        "<h2>How it was measured</h2>",
        f"<ul>{''.join(f'<li>{text}</li>' for text in MEASURED)}</ul>",
        "<h2>Where and with what</h2>",
        f"<dl>{''.join(f'<dt>{_e(k)}</dt><dd>{_e(v)}</dd>' for k, v in about.items())}</dl>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{_e(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(filter(None, parts))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _table(race: Race) -> str:
    paint = colors(race)
    heads = "".join(
        f'<th{_left(i)} title="{_e(c.hint)}">{_e(c.title)}</th>'
        for i, c in enumerate(columns(race))
    )
    body = []
    for row, (entry, cells) in enumerate(zip(race.entries, rows(race), strict=True)):
        tds = []
        for i, cell in enumerate(cells):
            text, bracket, rest = cell.partition(" [")
            inner = _e(text) + (
                f'<span class="range">{_e(rest.replace("]", ""))}</span>'
                if bracket and i > 1
                else _e(bracket + rest)
            )
            if i == 1:
                inner = f'<span class="dot" style="background:{paint[id(entry)]}"></span>{_e(cell)}'
            tds.append(f"<td{_left(i)}>{inner}</td>")
        kind = (
            ' class="best"'
            if row == 0 and entry.num_reached
            else ' class="failed"'
            if not entry.ran
            else ""
        )
        body.append(f"<tr{kind}>{''.join(tds)}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _left(i: int) -> str:
    return ' class="left plan"' if i == 1 else ' class="left"' if i == 0 else ""


def _failures(race: Race) -> str:
    lines = "".join(
        f"<li><b>{_e(label)}</b>, seed {result.seed}: "
        f'<span class="failed">{_e(result.error)}</span></li>'
        for label, result in failures(race)
    )
    return f"<h2>What failed</h2><ul>{lines}</ul>" if lines else ""


def _plan(race: Race, i: int) -> str:
    entry = race.entries[i]
    result = next((c for c in entry.runs if c.words), None)
    given = f"<code>{_e(entry.given or '(nothing: the defaults)')}</code>"
    if result is None:
        return f"<p><b>{_e(entry.label)}</b>, given as {given}</p>"
    spent = f"{took(result.seconds)} of training, {took(result.evaluate_s)} of evaluation"
    about = f'<span class="muted">{_e(result.model)}; seed {result.seed}: {spent}</span>'
    return (
        f"<p><b>{_e(entry.label)}</b>, given as {given}<br>{about}</p><pre>{_e(result.words)}</pre>"
    )


def title(script: str, race: Race) -> str:
    return f"{script}: the race to {say_target(race.target)}"


def _e(text: str) -> str:
    return html.escape(text)
