"""Runs whose ranks are forked: what happens to them when the fork server, or a rank, is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from manyhands.cli.chaos.run_processes import descendants, workers
from manyhands.launch.fork_server import choice
from manyhands.launch.fork_server.client import NAME
from manyhands.launch.process_state import named
from support.commands import CLI, ENDLESS, Command, command, left_in_shared_memory, wait_until_gone

pytestmark = pytest.mark.skipif(bool(choice.why_not()), reason=choice.why_not())
RUN = [*CLI, "run", "job.py", "save=1000000000", "--dir", "run"]
ENDED_S = 10.0


def fork_server(job: Command) -> int:
    (found,) = [pid for pid in descendants(job.process.pid) if named(pid) == NAME]
    return found


def ranks(job: Command) -> dict[int, int]:
    return {rank: pid for rank, pid in workers(job.process.pid).items()}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_go_on_without_their_fork_server_and_stop_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ENDLESS)
    with command(tmp_path, [*RUN, "data=2"]) as job:
        pids = job.pids(2)
        server = fork_server(job)
        assert sorted(ranks(job).values()) == sorted(pids)
        assert {parent(pid) for pid in pids} == {server}
        os.kill(server, signal.SIGKILL)
        wait_until_gone([server], ENDED_S)
        assert not [pid for pid in pids if named(pid)[:4] != "rank"]
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM, job.err
        assert "stopped by SIGTERM; go on with --resume" in job.err
        wait_until_gone(pids, ENDED_S)
        assert not left_in_shared_memory(pids)


@pytest.mark.slow
def test_an_elastic_run_forks_the_process_that_replaces_a_rank(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ENDLESS)
    with command(tmp_path, [*RUN, "data=2", "elastic=1:2"]) as job:
        pids = job.pids(2)
        server = fork_server(job)
        os.kill(pids[1], signal.SIGKILL)
        known = {job.process.pid, server, *pids}

        def others() -> list[int]:
            return [p for p in ranks(job).values() if p not in known]

        job.until(lambda: bool(others()), "process in place of the one that was killed")
        (new,) = others()
        assert parent(new) == server
        job.process.send_signal(signal.SIGTERM)
        job.end()
        wait_until_gone([server, new, *pids], ENDED_S)
        assert not left_in_shared_memory([new, *pids])


@pytest.mark.slow
def test_sixty_four_ranks_train_twenty_steps_on_any_number_of_cores(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ENDLESS.replace("torch.randn(64, 4)", "torch.randn(4096, 4)"))
    with command(tmp_path, [*RUN, "data=64", "steps=20"]) as job:
        pids = job.pids(64)
        assert job.end() == 0, job.err
        wait_until_gone(pids, ENDED_S)
        assert not left_in_shared_memory(pids)
