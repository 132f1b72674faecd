"""Tests of `manyhands doctor`: real checks of this machine; cgroup files and timings are given."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cli.doctor import (
    cgroup,
    cores,
    disk,
    doctor,
    free_memory,
    host_name,
    leftover_segments,
    network_cards,
    ports,
    python_version,
    report,
    two_processes,
)
from manyhands.cli.doctor.finding import Finding
from manyhands.exchange import segments


def test_a_healthy_machine_gets_exit_code_0_and_a_row_for_every_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor({"HOME": str(tmp_path)}) == 0
    printed = capsys.readouterr().out
    for row in (
        "python",
        "packages",
        "cores",
        "memory",
        "leftovers",
        "disk",
        "clock",
        "devices",
        "host name",
        "ports",
        "two processes",
    ):
        assert row in printed
    assert "0 fail" in printed and "failed" not in printed
    assert "shared" in printed and "gloo" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_gives_exit_code_1_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = host_name.check({"GLOO_SOCKET_IFNAME": "nosuchcard0"})
    assert report.show({"python": python_version.check(), "host name": bad}) == 1
    printed = capsys.readouterr().out
    assert "unset it" in printed and "1 ok, 0 warn, 1 fail" in printed


def test_a_check_that_cannot_be_made_is_a_finding_and_not_a_crash() -> None:
    finding = report.safely(lambda: [][0])
    assert finding.verdict == "fail" and "IndexError" in finding.found


def test_square_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    report.show({"packages": Finding("warn", "no [1] and no [sklearn]", "pip install x[sklearn]")})
    printed = capsys.readouterr().out
    assert "no [1] and no [sklearn]" in printed and "pip install x[sklearn]" in printed


@pytest.mark.parametrize(
    ("measured", "verdict", "words"),
    [
        ({"shared": 0.005, "gloo": 0.030}, "ok", ""),
        ({"shared": 0.050, "gloo": 0.030}, "warn", "set link=gloo"),
        ({"shared": 0.005, "gloo": "no address"}, "warn", "GLOO_SOCKET_IFNAME"),
        ({"shared": "no space", "gloo": 0.030}, "warn", "link=gloo"),
        ({"shared": "no space", "gloo": "no address"}, "fail", "data=1"),
    ],
)
def test_the_link_is_judged_by_what_was_measured(
    measured: dict[str, float | str], verdict: str, words: str
) -> None:
    finding = two_processes.judge(measured)
    assert finding.verdict == verdict and words in finding.do
    assert all(word in finding.found for word in measured.values() if isinstance(word, str))


@pytest.mark.parametrize(
    ("code", "found"),
    [("raise ValueError('no memory')", "no memory"), ("raise SystemExit(3)", "exit code 3")],
)
def test_a_probe_that_ends_with_an_error_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, code: str, found: str
) -> None:
    monkeypatch.setattr(two_processes, "PROBE", [sys.executable, "-c", code])
    finding = two_processes.check()
    assert finding.verdict == "fail" and found in finding.found


def test_segments_of_dead_processes_are_removed_and_those_of_the_living_stay() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = segments.directory() / f"{segments.PREFIX}{dead.pid}-0-test"
    left.touch()
    path, memory = segments.create(64)
    try:
        assert left.name in leftover_segments.check().found
        assert not left.exists() and path.exists()
    finally:
        path.unlink()
        memory.close()


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_tightest_cgroup_above_us_counts(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1\n",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/kubepods/pod1/memory.max": "2147483648\n",
            "sys/fs/cgroup/kubepods/pod1/memory.current": "1610612736\n",
            "sys/fs/cgroup/kubepods/memory.max": "max\n",
        },
    )
    assert cgroup.cpu_quota(root) == 1.5
    assert cgroup.memory_left(root) == 2**29
    assert free_memory.check(root).verdict == "warn"
    assert "cgroup" in cores.check(root).found


def test_a_cgroup_of_version_1_and_a_path_that_only_the_host_knows_are_read(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/docker/abc\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert cgroup.cpu_quota(root) == 0.5
    assert cgroup.memory_left(root) is None
    assert cores.check(root).verdict == "warn"


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert cgroup.cpu_quota(tmp_path) is None and cgroup.memory_left(tmp_path) is None


@pytest.mark.skipif(
    not network_cards.addresses(), reason="network cards can be listed on Linux only"
)
def test_the_card_named_in_the_variable_is_the_one_that_is_used() -> None:
    assert network_cards.addresses()["lo"] == "127.0.0.1"
    assert network_cards.host_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert "127.0.0.1 (lo)" in host_name.check({"GLOO_SOCKET_IFNAME": "lo"}).found


def test_a_port_that_nobody_answers_is_an_error() -> None:
    with pytest.raises(OSError):
        ports.reach("192.0.2.1")  # reserved for documentation: no machine has it to bind
    assert ports.reach("127.0.0.1") > 0


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to"
)
def test_a_folder_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    assert disk.check().verdict == "fail"


def test_a_host_name_is_found_for_this_machine() -> None:
    assert socket.gethostname() in host_name.check({}).found
