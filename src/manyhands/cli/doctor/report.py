"""Report of `manyhands doctor`: runs the checks in order and prints one row a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from manyhands.cli.doctor import (
    cores,
    devices,
    disk,
    free_memory,
    host_name,
    leftover_segments,
    packages,
    ports,
    python_version,
    shared_memory,
    system_clock,
    two_processes,
)
from manyhands.cli.doctor.finding import Finding, Variables, Verdict
from manyhands.launch import environment


def doctor(variables: Variables | None = None) -> int:
    """Run and print every check; the exit code is 1 if one of them failed."""
    return show(examine(environment.variables() if variables is None else variables))


def examine(variables: Variables) -> dict[str, Finding]:
    """The finding of every check, by the name of its row."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": python_version.check,
        "packages": packages.check,
        "cores": cores.check,
        "memory": free_memory.check,
        "shared memory": shared_memory.check,
        "leftovers": leftover_segments.check,
        "disk": disk.check,
        "clock": system_clock.check,
        "devices": lambda: devices.check(variables),
        "host name": lambda: host_name.check(variables),
        "ports": lambda: ports.check(variables),
        "two processes": two_processes.check,
    }
    return {name: safely(check) for name, check in checks.items()}


def safely(check: Callable[[], Finding]) -> Finding:
    """The finding of a check; an exception is a finding too, so the other checks still run."""
    try:
        return check()
    except Exception as e:
        return Finding(
            "fail",
            f"could not be checked: {type(e).__name__}: {e}",
            "if this machine works otherwise, please report this as a bug",
        )


def show(findings: Mapping[str, Finding]) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for name, finding in findings.items():
        verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        # escape: rich would read "[sklearn]" as a colour
        table.add_row(verdict, name, escape(finding.found), escape(finding.do))
    console = Console(soft_wrap=False)
    console.print(table)
    verdicts = [finding.verdict for finding in findings.values()]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in colours)
    console.print(f"\n{counts}", highlight=False)
    return 1 if "fail" in verdicts else 0
