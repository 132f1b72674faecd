"""Fork server: a rank that it forks is as one that was started anew, and ends as one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from manyhands.core import Job
from manyhands.errors import LaunchError
from manyhands.launch import environment
from manyhands.launch.fork_server import choice
from manyhands.launch.fork_server.client import ForkServer, ForkServers
from manyhands.launch.fork_server.forked_rank import ForkedRank, NotForked
from manyhands.launch.hosts import HostsLauncher
from manyhands.launch.worker_process import send
from support.commands import STOPPED_S, wait_until_gone

pytestmark = pytest.mark.skipif(bool(choice.why_not()), reason=choice.why_not())
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    started = ForkServer()
    yield started
    started.close()


def rank_of(server: ForkServer, work: Callable[[], Any], **more: str) -> ForkedRank:
    """A rank that does `work` instead of what `worker` does with a result."""
    env = {**environment.variables(), "OMP_NUM_THREADS": "1", **more}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    rank = server.start(env, piped=True)
    send(rank, cloudpickle.dumps(_Instead(work)))
    return rank


class _Instead:
    """Unpickled by a rank before it looks for a rendezvous, which it does not have here."""

    def __init__(self, work: Callable[[], Any]):
        self._work = work

    def __reduce__(self) -> Any:
        return _do, (self._work,)


def _do(work: Callable[[], Any]) -> None:
    print(work(), flush=True)
    os._exit(0)


cloudpickle.register_pickle_by_value(sys.modules[__name__])


def told(rank: ForkedRank) -> str:
    assert rank.stdout is not None and rank.stdin is not None
    text = rank.stdout.read().decode()
    assert rank.wait(LIMIT_S) == 0, text
    rank.stdin.close()
    rank.stdout.close()
    return text.strip()


def release(rank: ForkedRank) -> None:
    for pipe in (rank.stdin, rank.stdout):
        assert pipe is not None
        pipe.close()


def waiting() -> Any:
    import threading

    print("ready", flush=True)
    threading.Event().wait()


def begun(server: ForkServer) -> ForkedRank:
    rank = rank_of(server, waiting)
    assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
    return rank


# -- what a rank finds --


def test_ranks_are_children_of_one_process_each_in_a_session_of_its_own(server: ForkServer) -> None:
    def where() -> Any:
        return os.getppid(), os.getsid(0) == os.getpid()

    ranks = [rank_of(server, where) for _ in range(2)]
    assert {told(r) for r in ranks} == {str((server.process.pid, True))}


def test_a_rank_has_its_own_variables_and_no_others_and_its_folder_and_search_path(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONLY_IN_THE_LAUNCHER_NOW", "yes")
    monkeypatch.syspath_prepend(str(tmp_path / "of the launcher"))

    def what() -> Any:
        now = os.environ
        return now["RANK"], now["ONLY_IN_THE_LAUNCHER_NOW"], os.getcwd(), sys.path[:2]

    found = told(rank_of(server, what, RANK="7"))
    expected = ("7", "yes", str(tmp_path), ["", str(tmp_path / "of the launcher")])
    assert found == str(expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_and_numpy_use_as_many_threads_as_the_rank_s_variables_say(
    server: ForkServer, threads: int
) -> None:
    def used() -> Any:
        import torch
        from threadpoolctl import threadpool_info

        alone = len(os.listdir("/proc/self/task"))
        torch.ones(1 << 20).exp_()
        more = len(os.listdir("/proc/self/task")) - alone
        blas = [p["num_threads"] for p in threadpool_info() if p["internal_api"] == "openblas"]
        return torch.get_num_threads(), more, blas

    found = told(rank_of(server, used, OMP_NUM_THREADS=str(threads)))
    assert found == str((threads, threads - 1, [min(threads, environment.cores())]))


def test_what_ranks_draw_differs_where_it_would_between_processes(server: ForkServer) -> None:
    def drawn() -> Any:
        import random

        import numpy as np
        import torch

        return np.random.rand(), random.random(), float(torch.rand(1))

    first, second = (
        dict(enumerate(told(rank_of(server, drawn)).strip("()").split(", "))) for _ in range(2)
    )
    assert first[0] != second[0] and first[1] != second[1]
    assert first[2] == second[2]  # torch begins every process with one seed


def test_a_rank_inherits_no_file_of_the_launcher_or_of_other_ranks(server: ForkServer) -> None:
    def files() -> Any:
        return sorted(
            os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
            for fd in os.listdir("/proc/self/fd")
            if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
        )

    other = begun(server)
    alone = told(rank_of(server, files))
    other.send_signal(signal.SIGKILL)
    assert other.wait(LIMIT_S) == -signal.SIGKILL
    release(other)
    # its lifeline, the channel that it reads its work from, the channel on which it says its end
    assert eval(alone).count("socket") == 1 and eval(alone).count("pipe") == 2, alone


# -- how a rank ends --


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_signal_that_killed_a_rank_is_known(server: ForkServer, number: int) -> None:
    rank = begun(server)
    assert rank.poll() is None
    rank.send_signal(number)
    assert rank.wait(LIMIT_S) == -number
    rank.send_signal(number)  # of one that has ended: nothing
    release(rank)


def test_a_rank_ends_when_its_pipe_does(server: ForkServer) -> None:
    rank = begun(server)
    assert rank.stdin is not None
    rank.stdin.close()
    assert rank.wait(STOPPED_S) == 1
    release(rank)


# -- the fork server ends --


def test_ranks_outlive_a_killed_fork_server_and_their_ends_are_still_noticed() -> None:
    server = ForkServer()
    ranks = [begun(server) for _ in range(2)]
    server.process.kill()
    server.process.wait()
    assert [r.poll() for r in ranks] == [None, None]
    with pytest.raises(NotForked, match=r"it has ended|Broken pipe"):
        server.start(environment.variables(), piped=True)
    ranks[0].send_signal(signal.SIGKILL)
    assert ranks[1].stdin is not None
    ranks[1].stdin.close()
    assert [r.wait(STOPPED_S) for r in ranks] == [-signal.SIGKILL, -signal.SIGKILL]
    for rank in ranks:
        release(rank)
    server.close()


def test_a_fork_server_without_a_launcher_ends_also_while_it_loads(tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text(
        "import threading, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'loading')!r}).touch()\n"
        "threading.Event().wait()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        server = ForkServer(preload=["slow_to_load"])
    finally:
        sys.path.remove(str(tmp_path))
    while not (tmp_path / "loading").exists():
        assert server.process.poll() is None
    assert server.process.stdin is not None
    server.process.stdin.close()
    wait_until_gone([server.process.pid], STOPPED_S)
    server.close()


def test_with_a_second_thread_it_forks_no_rank_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        job = Job(1, cloudpickle.dumps(os.getppid), preload=("starts_a_thread",))
        servers = ForkServers()
        servers.begin("here", job.preload, (), environment.variables(), early=False)
        assert servers.start("here", environment.variables(), piped=True) is None
        servers.close()
    finally:
        sys.path.remove(str(tmp_path))
    assert "gives no ranks any more: a library that it has loaded started 1 threads" in (
        capsys.readouterr().err
    )


# -- the choice --


def test_a_person_can_have_each_rank_started_as_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> Any:
        raise RuntimeError(f"child of {os.getppid()}")

    monkeypatch.setenv("MANYHANDS_START", "exec")
    assert choice.why_not() == "MANYHANDS_START=exec"
    with pytest.raises(LaunchError, match=f"child of {os.getpid()}$"):
        HostsLauncher().launch(Job(1, cloudpickle.dumps(fails)))


@pytest.mark.parametrize(
    ("visible", "start", "forks"),
    [(None, "", False), ("0", "", False), ("", "", True), ("-1", "", True), ("0", "fork", True)],
)
def test_ranks_are_not_forked_where_a_gpu_is_visible_unless_a_person_wants_it(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, start: str, forks: bool
) -> None:
    monkeypatch.setattr(choice, "_has_gpu", lambda: True)
    monkeypatch.setenv("MANYHANDS_START", start)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ("a GPU is visible" in choice.why_not()) is not forks


def test_a_rank_or_a_lab_begins_no_fork_server_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not choice.started_by_others()
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MANYHANDS_LAB"):
        with monkeypatch.context() as within:
            within.setenv(name, "0")
            assert choice.started_by_others()


def test_a_word_that_is_no_way_to_start_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_START", "spawn")
    with pytest.raises(LaunchError, match="MANYHANDS_START=spawn; needed: exec or fork"):
        choice.why_not()
