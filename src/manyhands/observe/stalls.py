"""Stalls: which rank holds up the others, from the heartbeats of all ranks.

    late       no round has ended for longer than allowed, and `limit_s` more; or stopped so long
    culprit    a late rank without a fresh heartbeat (stopped, or its GIL is held), or one that is
               late and waits for nobody
    victim     a rank with a fresh heartbeat, inside an exchange for long: it waits for a culprit

Where the host only queues exchanges for a device (nccl), ranks wait outside of them: then those are
culprits that have begun the fewest exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.observe.rank_heartbeat import LONG_S, RankHeartbeat, Sighting, numbers
from manyhands.observe.text import took

TO_SERVERS = ("pull", "push", "flush", "deal")  # calls that wait for servers, not for ranks
STATES = {
    "T": "is stopped (SIGSTOP, Ctrl-Z); kill -CONT {pid} wakes it",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a device (state D)",
    "R": "runs, but none of its Python threads does: native code holds the GIL",
    "S": "sleeps, and none of its Python threads runs: native code may hold the GIL",
    "Z": "has ended",
    "gone": "is gone",
}


@dataclass(frozen=True)
class Stall:
    """Who is stuck, since when, and the sentences that say so."""

    culprits: tuple[int, ...]  # none: all wait, for servers or in calls that do not match
    stuck_s: float
    text: str
    held_up: bool = True  # whether others wait for them


def diagnose(seen: Mapping[int, Sighting], limit_s: float, stale_s: float) -> Stall | None:
    """The present stall; None: there is none. A heartbeat is stale after `stale_s`."""
    live = {r: s for r, s in seen.items() if not s.beat.ended}
    late = [r for r, s in live.items() if _is_late(s, limit_s)]
    stale = [r for r, s in live.items() if s.age_s > stale_s]
    if any(r not in stale and live[r].beat.in_rounds for r in late):
        # the first round is over: a last heartbeat from before it excuses nobody
        first = [r for r in stale if live[r].beat.doing == "start-up" and r not in late]
        late += [r for r in first if live[r].age_s > limit_s]
    # a process that is gone is its launcher's business, unless others wait for it
    if not any(live[r].state not in ("gone", "Z") for r in late):
        return None
    waiting = [r for r in live if r not in stale and live[r].beat.call]
    culprits = [r for r in late if r in stale or r not in waiting]
    if not culprits and any(r not in late and r not in waiting for r in live):
        return None  # that rank is at work on something that may take long
    if len(culprits) > 1 and not waiting and not stale:
        fewest = min(live[r].beat.calls for r in culprits)
        culprits = [r for r in culprits if live[r].beat.calls == fewest]
    since = max(live[r].stuck_s for r in late)
    if not culprits:
        return Stall((), since, _all_wait(live, waiting, since))
    held = [r for r in waiting if live[r].beat.call_s + live[r].age_s > limit_s / 4]
    victims = held or [r for r in late if r not in culprits]
    patient = all(live[r].beat.patient and live[r].stuck_s < LONG_S for r in culprits)
    if patient and not victims and not stale:
        return None
    told = [_culprit(live[r], r in stale) for r in sorted(culprits)[:4]]
    if len(culprits) > 4:
        told.append(f"and {numbers(sorted(culprits)[4:])} likewise")
    text = "\n".join([*told, *_victims(live, victims)])
    return Stall(tuple(sorted(culprits)), since, text, bool(victims))


def _is_late(s: Sighting, limit_s: float) -> bool:
    stopped = s.state == "T" and s.age_s > limit_s  # in whatever phase
    return stopped or s.stuck_s > s.beat.allowed_s + limit_s


def _culprit(s: Sighting, stale: bool) -> str:
    beat = s.beat
    since = f"; no round has ended for {took(s.stuck_s)} (usual: {took(beat.usual_s)})"
    if not stale:
        long = since if beat.in_rounds else f", for {took(s.stuck_s)}"
        return "\n".join([f"{beat.name} is in {beat.doing}{long}", *_stack(beat)])
    how = STATES.get(s.state, "does not answer").format(pid=beat.pid)
    if not s.state:
        how = f"does not answer; look at it there (py-spy dump --pid {beat.pid})"
    was = f"in {beat.call}" if beat.call else f"in {beat.doing}"
    text = f"{beat.name} {how}; no heartbeat for {took(s.age_s)}, the last was {was}"
    return "\n".join([text + since * beat.in_rounds, *_stack(beat)])


def _stack(beat: RankHeartbeat) -> list[str]:
    return [f"  {line}" for line in beat.stack]


def _victims(live: Mapping[int, Sighting], ranks: Sequence[int]) -> list[str]:
    found = []
    for call, among in _by_call(live, ranks).items():
        verb = "waits" if len(among) == 1 else "wait"
        found.append(f"{numbers(among)} {verb} for it" + (f" in {call}" if call else ""))
    return found


def _all_wait(live: Mapping[int, Sighting], waiting: Sequence[int], since: float) -> str:
    calls = _by_call(live, waiting)
    where = ", ".join(f"{numbers(ranks)} in {call}" for call, ranks in calls.items())
    text = f"no round has ended for {took(since)}, and every rank waits: {where}"
    if all(call.split()[0] in TO_SERVERS for call in calls):
        return f"{text}; the servers do not answer: look at their logs"
    if len({call.split()[0] for call in calls}) > 1:
        return f"{text}; the calls do not match: ranks have gone different ways"
    return f"{text}; nothing arrives: look at the network between them"


def _by_call(live: Mapping[int, Sighting], ranks: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for r in sorted(ranks):
        found.setdefault(live[r].beat.call, []).append(r)
    return found


def over(stall: Stall, seen: Mapping[int, Sighting], seconds: float) -> str:
    """That a stall is over."""
    who = [seen[r].beat.name for r in stall.culprits if r in seen] or ["training"]
    return f"{', '.join(who)} went on after {took(seconds)}"
