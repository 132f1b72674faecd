"""Admission to a run under way: more or fewer replicas on request, and processes from outside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from manyhands.launch.elastic.roster import Roster
from manyhands.launch.elastic.run_requests import difference


class Admission:
    """`needs`: what a process from outside must have. `admit(member, request)`: it was let in."""

    def __init__(
        self,
        roster: Roster,
        needs: dict[str, Any],
        admit: Callable[[int, dict[str, Any]], None],
    ):
        self._roster, self._needs, self._admit = roster, needs, admit

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked.get("verb") == "scale":
            return self._scale(int(asked["data"]))
        if asked.get("verb") == "join":
            return self._join(asked)
        return {"refused": f"{asked.get('verb')!r} is no request that this version knows"}

    def _scale(self, data: int) -> dict[str, Any]:
        roster = self._roster
        least, most, before = roster.least, roster.most, roster.want
        if not least <= data <= most:
            return {
                "refused": f"data={data}, but the run was started with elastic={least}:{most}; "
                f"{least} to {most} replicas are possible"
            }
        roster.scale(data)
        print(f"manyhands: data={data} was asked for, {before} before", file=sys.stderr, flush=True)
        return {"before": before, "data": data}

    def _join(self, asked: dict[str, Any]) -> dict[str, Any]:
        """It gets an empty seat, or makes the run one replica larger, or waits as a spare."""
        if why := difference(self._needs, asked["has"]):
            return {"refused": f"{why}; start it with what the run has"}
        roster = self._roster
        seats = [s for s in roster.missing() if s is not None] or sorted(roster.given_up)
        if not seats and roster.want >= roster.most:
            return {
                "refused": f"all {roster.most} replicas of elastic={roster.least}:{roster.most} "
                "are there already"
            }
        member = roster.add(seats[0] if seats else None)
        if not seats:
            coming = len(roster.free) + sum(s is None for s in roster.starting.values())
            if coming - roster.spares >= roster.inner:
                roster.want += 1
        self._admit(member, asked)
        who = f"process {asked['pid']} of {asked['host']}"
        print(f"manyhands: {who} joins from outside", file=sys.stderr, flush=True)
        return {"member": member}
