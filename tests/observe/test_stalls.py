"""Stalls: from heartbeats to the rank that holds up the others."""

from __future__ import annotations

import dataclasses
from typing import Any

from manyhands.observe.rank_heartbeat import (
    LONG_S,
    SHORT_S,
    RankHeartbeat,
    Sighting,
    allowed,
    numbers,
)
from manyhands.observe.stalls import Stall, diagnose

LIMIT_S, STALE_S = 8.0, 3.0
BUSY = RankHeartbeat(0, "a", "m", 4000, 9, 512, "compute", "", 9.0, 1559, 9.0, 0.05, 0.07)


def sighting(
    rank: int, call: str = "all_reduce #1560", age_s: float = 0.5, **more: Any
) -> Sighting:
    state = more.pop("state", "S")
    beat = dataclasses.replace(BUSY, rank=rank, pid=4000 + rank, call=call, **more)
    return Sighting(beat, age_s, state)


def stall(*seen: Sighting) -> Stall | None:
    return diagnose({s.beat.rank: s for s in seen}, LIMIT_S, STALE_S)


def text(*seen: Sighting) -> str:
    found = stall(*seen)
    assert found is not None
    return found.text


def test_a_rank_that_computes_while_others_wait_is_the_culprit_with_its_stack() -> None:
    busy = sighting(2, call="", stack=("job.py:7 in step: spin()",))
    found = stall(sighting(0), sighting(1), busy, sighting(3))
    assert found is not None and found.culprits == (2,)
    assert found.text == (
        "rank 2 (host a, pid 4002) is in compute; no round has ended for 9.5 s (usual: 50 ms)\n"
        "  job.py:7 in step: spin()\n"
        "ranks 0, 1, 3 wait for it in all_reduce #1560"
    )


def test_a_stopped_rank_is_the_culprit_though_it_was_inside_an_exchange() -> None:
    found = stall(sighting(0), sighting(1, age_s=9.0, stuck_s=0.1, state="T"), sighting(2))
    assert found is not None and found.culprits == (1,)
    assert "rank 1 (host a, pid 4001) is stopped (SIGSTOP, Ctrl-Z); kill -CONT 4001" in found.text
    assert "no heartbeat for 9.0 s, the last was in all_reduce #1560" in found.text
    assert found.text.endswith("ranks 0, 2 wait for it in all_reduce #1560")


def test_what_the_system_says_of_a_silent_process_is_told() -> None:
    silent = {"age_s": 9.0, "stuck_s": 0.1}
    assert "holds the GIL" in text(sighting(0), sighting(1, state="R", **silent))
    assert "waits for a disk" in text(sighting(0), sighting(1, state="D", **silent))
    assert "is gone" in text(sighting(0), sighting(1, state="gone", **silent))
    assert "py-spy dump --pid 4001" in text(sighting(0), sighting(1, state="", **silent))


def test_nobody_is_stuck_within_the_usual_round_and_the_limit() -> None:
    assert stall(sighting(0, stuck_s=7.0), sighting(1, call="", stuck_s=7.0)) is None
    slow = {"stuck_s": 30.0, "allowed_s": 25.0}
    assert stall(sighting(0, **slow), sighting(1, call="", **slow)) is None


def test_ranks_that_wait_for_one_in_a_long_phase_report_nothing() -> None:
    writes = sighting(0, call="", doing="checkpoint", allowed_s=LONG_S)
    assert stall(writes, sighting(1), sighting(2)) is None
    hangs = sighting(0, call="", doing="checkpoint", allowed_s=0.5, in_rounds=False)
    assert "is in checkpoint, for 9.5 s" in text(hangs, sighting(1))


def test_a_stopped_rank_is_named_in_any_phase_and_only_those_held_up_wait_for_it() -> None:
    stopped = sighting(2, call="", doing="evaluation", allowed_s=LONG_S, age_s=9.0, state="T")
    passing = sighting(1, call="pull #7", call_s=0.0, stuck_s=0.1)
    found = text(sighting(0, allowed_s=LONG_S), passing, stopped)
    assert "rank 2 (host a, pid 4002) is stopped" in found
    assert found.endswith("rank 0 waits for it in all_reduce #1560")


def test_a_rank_silent_since_its_start_is_named_once_others_have_had_rounds() -> None:
    silent = sighting(
        1, call="", doing="start-up", in_rounds=False, allowed_s=LONG_S, age_s=9.0, state="R"
    )
    assert "holds the GIL" in text(sighting(0), silent)
    starting = sighting(0, in_rounds=False, allowed_s=LONG_S)
    assert stall(starting, silent) is None


def test_a_process_that_is_gone_is_no_stall_where_the_others_go_on() -> None:
    gone = sighting(1, age_s=60.0, state="gone")
    assert stall(sighting(0, stuck_s=0.1), gone) is None
    assert stall(sighting(0, stuck_s=0.1), dataclasses.replace(gone, state="T")) is not None


def test_a_rank_that_has_ended_is_no_culprit() -> None:
    assert stall(sighting(0, stuck_s=0.1), sighting(1, age_s=60.0, ended=True)) is None


def test_where_all_compute_those_with_the_fewest_exchanges_are_culprits() -> None:
    found = stall(*(sighting(r, call="", calls=99 - (r == 2)) for r in range(4)))
    assert found is not None and found.culprits == (2,)
    assert found.text.endswith("ranks 0, 1, 3 wait for it")
    found = stall(*(sighting(r, call="") for r in range(2)))
    assert found is not None and found.culprits == (0, 1)


def test_where_all_wait_no_rank_is_blamed() -> None:
    found = stall(sighting(0), sighting(1, call="barrier #1560"))
    assert found is not None and not found.culprits
    assert "rank 0 in all_reduce #1560, rank 1 in barrier #1560; the calls do not match" in (
        found.text
    )
    assert "the servers do not answer" in text(sighting(0, call="pull #3"))
    assert "look at the network" in text(sighting(0), sighting(1))


def test_long_phases_may_take_twice_what_they_took_before() -> None:
    rounds = [0.1] * 20
    assert allowed("start-up", "rounds", [], {}, False) == (0.0, LONG_S)
    assert allowed("evaluation", "rounds", rounds, {}, False) == (0.1, LONG_S)
    assert allowed("evaluation", "rounds", rounds, {"evaluation": 20.0}, False) == (0.1, 40.0)
    assert allowed("evaluation", "rounds", rounds, {"evaluation": 0.1}, False) == (0.1, SHORT_S)


def test_what_is_usual_is_known_after_some_rounds_and_forgets_a_stall() -> None:
    assert allowed("rounds", "rounds", [0.1, 0.1], {}, False) == (0.1, LONG_S)
    assert allowed("rounds", "rounds", [0.1, 0.2, 0.3], {}, False) == (0.2, 0.3)
    assert allowed("rounds", "rounds", [0.1] * 19 + [15.0], {}, False) == (0.1, 0.1)
    longest = {"rounds": 60.0}  # ever: an evaluation in a loop of the user's
    assert allowed("rounds", "rounds", [0.1] * 19, longest, True) == (0.1, 60.0)


def test_a_long_round_of_all_ranks_is_no_stall_where_it_is_to_be_expected() -> None:
    alone = [sighting(r, call="", patient=True) for r in range(2)]
    assert stall(*alone) is None
    held = stall(alone[0], sighting(1))
    assert held is not None and held.culprits == (0,) and held.held_up
    late = [sighting(r, call="", patient=True, stuck_s=LONG_S + 1) for r in range(2)]
    found = stall(*late)
    assert found is not None and not found.held_up


def test_rank_numbers_are_short() -> None:
    assert [numbers(n) for n in ([3], [0, 1], [5, 0, 1, 2, 7])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0-2, 5, 7",
    ]
