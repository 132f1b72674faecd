"""Report of a disturbed run: tables for the terminal.

fault                 target                   at       recovery
kill server@5s        server 1 (pid 4711)      5.0 s    0.8 s
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.cli.chaos.ledger import Ledger, ShardPushes
from manyhands.observe.text import number, size, took


def lines(ledger: Ledger) -> list[str]:
    found = [
        f"undisturbed {took(ledger.calm_s)}, disturbed {took(ledger.chaos_s)}",
        "",
        *_faults(ledger),
        *_table(
            ("epoch", "samples once", "twice", "never"),
            [(e.epoch + 1, e.once, e.twice, e.never) for e in ledger.samples],
        ),
        *_table(
            _head(ledger.pushes),
            [_pushes(of) for of in ledger.pushes],
        ),
        *_table(
            ("metric", "undisturbed", "disturbed", "difference"),
            [
                (name, number(before), number(after), f"{after - before:+.2g}")
                for name, (before, after) in ledger.metrics.items()
            ],
        ),
    ]
    found += ledger.workers
    found += [f"server {server} was lost: {why}" for server, why in ledger.losses]
    found += [
        f"shard {shard} was copied to server {server}: {size(nbytes)} in {took(seconds)}"
        for shard, server, seconds, nbytes in ledger.copies
    ]
    gap = [""] if ledger.losses or ledger.copies or ledger.workers else []
    return [*found, *gap, *_verdict(ledger)]


def _faults(ledger: Ledger) -> list[str]:
    rows = []
    for fault in ledger.faults:
        recovered = "-" if fault.recovery_s is None else took(fault.recovery_s)
        target = fault.target if fault.injected else f"NOT INJECTED: {fault.why}"
        rows.append((fault.fault, target, f"{fault.at_s:.1f} s", recovered))
    return _table(("fault", "target", "at", "recovery"), rows)


def _head(pushes: Sequence[ShardPushes]) -> tuple[str, ...]:
    by_steps = any(of.steps is not None for of in pushes)
    wanted = ("steps",) if by_steps else ("pushes acknowledged", "commits")
    return ("shard", *wanted, "applied", "lost or twice")


def _pushes(of: ShardPushes) -> tuple[object, ...]:
    wanted = (of.acknowledged, of.commits) if of.steps is None else (of.steps,)
    applied = of.applied if of.steps is None else of.steps_applied
    lost = f"{of.lost} lost" if of.lost > 0 else f"{-of.lost} twice" if of.lost else "0"
    unknown = of.applied is None
    return (of.shard, *wanted, *(("-", "-") if unknown else (applied, lost)))


def _verdict(ledger: Ledger) -> list[str]:
    if not ledger.problems:
        pushes = "" if ledger.between_ranks else " and every push"
        return [f"NOTHING WAS LOST: every sample{pushes} counted once"]
    untried = sum(not fault.injected for fault in ledger.faults)
    head = "NOT PROVEN:" if untried == len(ledger.problems) else "LOST:"
    return [head, *(f"  {problem}" for problem in ledger.problems)]


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    """An empty line follows; nothing at all where there are no rows."""
    if not rows:
        return []
    cells = [[str(x) for x in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        *(
            "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ),
        "",
    ]
