"""Report of a race: table on the terminal, picture, page and numbers in the race directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyhands.cli.race.race_plans import RacePlan, TaskFacts
from manyhands.core import Goal
from manyhands.observe.race import page, picture, text_table
from manyhands.observe.race.results import Entry, Race, RunResult, follow

OUTCOME, RESULTS, PICTURE, PAGE = "outcome.json", "results.json", "race.png", "race.html"


def run_folder(path: Path, plan: RacePlan, k: int) -> Path:
    """The run directory of a plan and its k-th seed."""
    return path / plan.folder / f"seed-{k}"


def outcome(run: Path) -> dict[str, Any]:
    """How a run ended, from its file; empty while it has not ended."""
    try:
        return dict(json.loads((run / OUTCOME).read_text()))
    except (OSError, ValueError):
        return {}


def run_result(run: Path, facts: TaskFacts, goal: Goal) -> RunResult:
    """The result of a run that has ended."""
    ended = outcome(run)
    return follow(
        run, ended["seed"], goal, facts.samples, ended["launched_s"], ended.get("error", "")
    )


def summary(result: RunResult, goal: Goal) -> tuple[str, str]:
    """One line about a run: (label, text)."""
    if result.error:
        return "failed", result.error
    if result.reached is None:
        return (
            "ended",
            f"not reached: best {goal.name} {result.best:.4g} "
            f"in {text_table.seconds(result.seconds)}",
        )
    return (
        "reached",
        f"{goal.name} {result.reached.value:.4g} after {text_table.seconds(result.time_s)}, "
        f"epoch {result.reached.epoch:.2f}",
    )


def gather(path: Path, plans: list[RacePlan], seeds: int, facts: TaskFacts, goal: Goal) -> Race:
    """The results of all runs that have ended."""
    entries = []
    for plan in plans:
        done = [k for k in range(seeds) if outcome(run_folder(path, plan, k))]
        runs = [run_result(run_folder(path, plan, k), facts, goal) for k in done]
        entries.append(Entry(plan.label, plan.given, runs, plan.is_ddp))
    return Race(goal, entries)


def report(
    found: Race, path: Path, script: Path, request: dict[str, Any], facts: TaskFacts, quiet: bool
) -> None:
    """Write page, picture and numbers, and print the table."""
    # here: importing rich draws from Python's random numbers
    from rich.console import Console

    title = page.title(script.name, found)
    (path / RESULTS).write_text(json.dumps(found.plain(), indent=1) + "\n")
    about = {
        "task": facts.name or script.name,
        "samples": "a stream" if facts.samples is None else f"{facts.samples:,} an epoch",
        "for all plans": request["with"] or "–",
        "seeds": ", ".join(str(facts.seed + k) for k in range(request["seeds"])),
        **request["machine"],
        "command": request["command"],
        "directory": str(path),
    }
    page.write(found, path / PAGE, title, about)
    picture.draw(found, title, path / PICTURE)
    console = Console(highlight=False)
    console.print()
    console.print(text_table.table(found, console.width))
    for label, result in text_table.failures(found):
        console.print(f"{label}, seed {result.seed}: {result.error}", style="red", markup=False)
    console.print(text_table.verdict(found), style="bold", markup=False)
    if not quiet:
        for name, file in (("picture", PICTURE), ("page", PAGE), ("numbers", RESULTS)):
            console.print(f"{name:<12}{path / file}", markup=False, soft_wrap=True)
