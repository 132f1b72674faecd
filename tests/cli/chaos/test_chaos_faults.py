"""Faults as the command line names them: what is understood, and what is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.chaos.command import ChaosOptions, chaos
from manyhands.cli.chaos.faults import (
    Fault,
    check_faults,
    draw_times,
    parse_fault,
    parse_seconds,
    parse_share,
    risks,
)
from manyhands.cli.chaos.rank_faults import SlowProcess, outlived
from manyhands.errors import PlanError, RunBusy
from manyhands.plan import words as plan_words

SERVED = "data=2 merge=downpour servers=3 replicas=2"


@pytest.mark.parametrize(
    ("kind", "text", "fault"),
    [
        ("kill", "server@20s", Fault("kill", "server", None, 20.0)),
        ("kill", "server:2@500ms", Fault("kill", "server", 2, 0.5)),
        ("kill", "worker@random", Fault("kill", "worker", None, None)),
        ("kill", "worker:0@1.5s", Fault("kill", "worker", 0, 1.5)),
        ("kill", "coordinator@2m", Fault("kill", "coordinator", None, 120.0)),
        ("pause", "server:1@5s/3s", Fault("pause", "server", 1, 5.0, 3.0)),
        ("pause", "worker@random/250ms", Fault("pause", "worker", None, None, 0.25)),
        ("pause", "coordinator@1s/1s", Fault("pause", "coordinator", None, 1.0, 1.0)),
        ("cut", "server:0@8s", Fault("cut", "server", 0, 8.0)),
        ("cut", "server@random", Fault("cut", "server", None, None)),
        ("kill", "launcher@8s", Fault("kill", "launcher", None, 8.0)),
        ("slow", "worker:1@5s/10s*4", Fault("slow", "worker", 1, 5.0, 10.0, 4.0)),
        ("slow", "worker@random/1s*1.5", Fault("slow", "worker", None, None, 1.0, 1.5)),
        ("cut", "host:1@8s", Fault("cut", "host", 1, 8.0)),
        ("full-disk", "6s/4s", Fault("full-disk", "", None, 6.0, 4.0)),
        ("full-disk", "random/4s", Fault("full-disk", "", None, None, 4.0)),
    ],
)
def test_a_fault_is_a_target_and_a_time(kind: Any, text: str, fault: Fault) -> None:
    assert parse_fault(kind, text) == fault


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("kill", "disk@2s", "disk cannot be its target; known: server, worker, coordinator"),
        ("kill", "", "nothing cannot be its target"),
        ("kill", "server", "its time is missing"),
        ("kill", "server@", "'' is no time"),
        ("kill", "server@20", "'20' is no time; needed: a number with ms, s or m"),
        ("kill", "server@soon", "or random"),
        ("kill", "server@-1s", "'-1s' is no time"),
        ("kill", "server:x@2s", "its number is no number"),
        ("kill", "server:@2s", "its number is no number"),
        ("kill", "coordinator:0@2s", "there is one coordinator"),
        ("kill", "server@2s/3s", "a kill has no duration"),
        ("cut", "server@2s/3s", "a cut has no duration"),
        ("cut", "worker@2s", "worker cannot be its target; known: server, host"),
        ("kill", "launcher:0@2s", "there is one launcher"),
        ("slow", "server@2s/3s*2", "server cannot be its target; known: worker"),
        ("slow", "worker@2s", "its duration is missing"),
        ("slow", "worker@2s/3s", "how many times slower"),
        ("slow", "worker@2s/3s*1", "more than 1"),
        ("slow", "worker@2s/0s*2", "a duration of 0 breaks nothing"),
        ("pause", "server@2s", "its duration is missing"),
        ("pause", "server@2s/0s", "a duration of 0 breaks nothing"),
        ("pause", "server@2s/random", "'random' is no time"),
        ("full-disk", "6s", "its duration is missing"),
        ("full-disk", "server@6s/4s", "'server@6s' is no time"),
    ],
)
def test_what_is_no_fault_is_refused_by_name(kind: Any, text: str, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse_fault(kind, text)
    assert says in str(refused.value) and f"--{kind} {text}" in str(refused.value)


def test_delays_and_shares() -> None:
    assert parse_seconds("5ms", "--delay") == 0.005
    assert parse_share(None) == 0 and parse_share(0.05) == 0.05 and parse_share(1) == 1
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(PlanError, match="0 to 1"):
            parse_share(share)
    with pytest.raises(PlanError, match="--delay: 'long' is no time"):
        parse_seconds("long", "--delay")


@pytest.mark.parametrize(
    ("words", "faults", "says"),
    [
        (SERVED, [], "nothing to break"),
        ("data=2", ["server@2s"], "the plan has no servers"),
        ("data=2", ["coordinator@2s"], "the plan has no servers"),
        ("data=2", ["worker@2s"], "its plan has no elastic="),
        ("data=3 elastic=1:3", ["worker:3@2s"], "there are 3 workers, 0 to 2"),
        ("data=2 save=off", ["launcher@2s"], "save=off saves nothing"),
        (SERVED, ["launcher@2s"], "servers end with the launcher"),
        (SERVED, ["server:3@2s"], "there are 3 servers, 0 to 2"),
        (SERVED, ["worker@2s"], "its plan has no elastic="),
        ("merge=downpour servers=1 elastic=1:2", ["worker:2@2s"], "there are 2 workers, 0 to 1"),
        (f"{SERVED} until=accuracy:0.9", ["server@2s"], "give epochs= or steps="),
    ],
)
def test_faults_that_a_plan_has_no_target_for_are_refused(
    words: str, faults: list[str], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        check_faults([parse_fault("kill", f) for f in faults], False, plan_words.parse(words))


def test_frames_alone_are_faults_too_and_elastic_workers_may_be_killed() -> None:
    check_faults([], True, plan_words.parse(SERVED))
    elastic = plan_words.parse("merge=downpour servers=1 elastic=1:2")
    check_faults([parse_fault("kill", "worker:1@2s")], False, elastic)
    with pytest.raises(PlanError, match="no servers"):
        check_faults([], True, plan_words.parse("data=2"))


def test_runs_between_ranks_have_workers_a_launcher_and_in_a_lab_hosts() -> None:
    ranks, elastic = plan_words.parse("data=2"), plan_words.parse("data=4 elastic=1:4")
    faults = [
        parse_fault("pause", "worker:1@2s/1s"),
        parse_fault("slow", "worker:1@2s/1s*4"),
        parse_fault("full-disk", "2s/1s"),
        parse_fault("kill", "launcher@2s"),
    ]
    check_faults(faults, False, ranks)
    check_faults([*faults, parse_fault("kill", "worker@random")], False, elastic)
    check_faults(
        [parse_fault("cut", "host:2@2s"), parse_fault("cut", "host@2s")], False, elastic, 2
    )
    for text, plan, hosts, says in (
        ("host:1@2s", elastic, 0, "manyhands lab --hosts 2"),
        ("host:3@2s", elastic, 2, "host:1 to host:2"),
        ("host:0@2s", elastic, 2, "host:1 to host:2"),
        ("host:1@2s", ranks, 2, "add elastic=1:4"),
    ):
        with pytest.raises(PlanError, match=says):
            check_faults([parse_fault("cut", text)], False, plan, hosts)


def test_a_slow_process_stands_still_most_of_the_time_and_goes_on_at_the_end() -> None:
    """Of a process that counts as fast as it can."""
    counting = "import time\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", counting]) as process:
        try:
            slow = SlowProcess(process.pid, 5.0)
            before, clock = cpu_s(process.pid), time.monotonic()
            slept = threading.Event().wait(1.5)
            used, passed = cpu_s(process.pid) - before, time.monotonic() - clock
            slow.close()
            assert not slept and used < 0.4 * passed, (used, passed)
            assert state(process.pid) != "T"
        finally:
            process.kill()
    SlowProcess(process.pid, 2.0).close()  # it is gone


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_outlives_a_launcher_is_named_and_ended() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        (said,) = outlived([process.pid])
        assert f"these still ran: pid {process.pid}" in said and process.wait() == -9
    assert outlived([process.pid]) == []


def test_without_replicas_a_killed_server_is_announced_as_a_loss() -> None:
    faults = [parse_fault("kill", "server@2s"), parse_fault("pause", "server@2s/1s")]
    assert risks(faults, plan_words.parse(SERVED)) == []
    (said,) = risks(faults, plan_words.parse("data=2 merge=downpour servers=2"))
    assert "replicas=1" in said and "kill server@2s" in said


def test_random_times_are_in_the_middle_and_follow_from_the_seed() -> None:
    faults = [parse_fault("kill", "server@random") for _ in range(50)]
    times = [t.at_s for t in draw_times(faults, 10.0, seed=7)]
    assert times == sorted(times) and 2.0 <= times[0] < times[-1] <= 8.0
    assert times == [t.at_s for t in draw_times(faults, 10.0, seed=7)]
    assert times != [t.at_s for t in draw_times(faults, 10.0, seed=8)]
    late = parse_fault("kill", "server@99s")
    assert [t.at_s for t in draw_times([late], 10.0, seed=7)] == [99.0]


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    given = ChaosOptions(kill=("server@1s",))
    with pytest.raises(RunBusy, match="exists already"):
        chaos(tmp_path / "job.py", SERVED.split(), given, tmp_path, [])


def test_servers_that_were_started_by_hand_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", "9400")
    given = ChaosOptions(kill=("server@1s",))
    with pytest.raises(PlanError, match="started by hand"):
        chaos(tmp_path / "job.py", SERVED.split(), given, tmp_path / "d", [])
