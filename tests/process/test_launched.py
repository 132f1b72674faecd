"""Jobs of several processes, started as users start them.

What they print, their exit codes, and that nothing is left behind.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.recover.checkpoint import Checkpoints
from support.commands import (
    CLI,
    ENDLESS,
    STOPPED_S,
    Command,
    command,
    descendants,
    left_in_shared_memory,
    run,
    wait_until_gone,
)

RUN = [*CLI, "run", "job.py"]


def endless(folder: Path, ranks: int, *words: str) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.py").write_text(ENDLESS)
    return command(folder, [*RUN, f"data={ranks}", "save=1000000000", "--dir", "run", *words])


def assert_nothing_left(job: Command, pids: list[int]) -> None:
    wait_until_gone(pids, STOPPED_S)
    assert not left_in_shared_memory(pids)


# -- somebody dies --


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_when_a_worker_is_killed_the_others_stop_and_the_victim_is_named(
    tmp_path: Path, victim: int
) -> None:
    with endless(tmp_path, 3) as job:
        pids = job.pids(3)
        started = descendants(job.process.pid)
        assert set(pids) <= set(started)
        # a second run in the same directory is refused while the first one lives
        second = run(tmp_path / "second", [*CLI, "run", "../job.py", "--dir", "../run", "--resume"])
        assert second.process.returncode == 2 and "is in use by a live run (pid" in second.err
        os.kill(pids[victim], signal.SIGKILL)
        wait_until_gone(pids, STOPPED_S)
        assert job.end() == 128 + signal.SIGKILL
        assert (
            f"rank {victim} (pid {pids[victim]}) was killed by SIGKILL; the kernel does so when "
            "memory runs out" in job.err
        )
        assert "Traceback" not in job.err
        assert_nothing_left(job, started)


def test_when_the_launcher_is_killed_no_worker_and_no_memory_is_left(tmp_path: Path) -> None:
    with endless(tmp_path, 2) as job:
        started = [*job.pids(2), *descendants(job.process.pid)]
        job.process.kill()
        job.end()
        assert_nothing_left(job, started)


# -- somebody asks to stop --


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (signal.SIGINT, 2),
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_and_sigterm_save_a_checkpoint_first(
    tmp_path: Path, number: signal.Signals, ranks: int
) -> None:
    with endless(tmp_path, ranks) as job:
        started = [*job.pids(ranks), *descendants(job.process.pid)]
        job.process.send_signal(number)
        assert job.end() == 128 + number
        assert (
            f"stopped by {number.name}" in job.err.splitlines()[-1] and "Traceback" not in job.err
        )
        saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
        assert saved is not None and saved.round >= 1
        assert_nothing_left(job, started)


def test_a_second_ctrl_c_stops_at_once_though_a_rank_hangs(tmp_path: Path) -> None:
    with endless(tmp_path, 2) as job:
        started = [*job.pids(2), *descendants(job.process.pid)]
        (tmp_path / "block").touch()
        job.process.send_signal(signal.SIGINT)
        job.until(lambda: "Ctrl-C again stops at once" in job.err, "answer to the first Ctrl-C")
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
        assert_nothing_left(job, started)


def test_ctrl_c_while_workers_still_start_ends_them_too(tmp_path: Path) -> None:
    with endless(tmp_path, 2) as job:
        job.until(lambda: len(descendants(job.process.pid)) == 2, "two workers")
        started = descendants(job.process.pid)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
        assert "stopped by SIGINT" in job.err.splitlines()[-1] and "Traceback" not in job.err
        assert_nothing_left(job, started)


# -- something fails --

FAILING = """
import os, time
from pathlib import Path
import torch, manyhands as mh
from torch import nn

calls = 0

def step(model, batch):
    global calls
    calls += 1
    rank = os.environ["RANK"]
    if calls == 1:
        print(f"hello from {rank}")
        Path(f"{rank}.pid").write_text(str(os.getpid()))
    if calls == 5 and rank == "1":
        Path("failed").write_text(repr(time.time()))
        raise ValueError("boom on purpose")
    return model(batch[0]).mean()

def task():
    return mh.Task(model=nn.Linear(4, 1), step=step, train=(torch.randn(64, 4),), batch=2,
                   epochs=1000, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
"""


def test_the_failing_ranks_traceback_is_printed_once_and_last_and_the_others_stop(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(FAILING)
    with command(tmp_path, [*RUN, "data=3", "save=2", "--quiet"]) as job:
        pids = job.pids(3)
        job.until((tmp_path / "failed").exists, "failure of rank 1")
        wait_until_gone(pids, STOPPED_S + 1.0)
        assert (
            time.time() - float((tmp_path / "failed").read_text()) < STOPPED_S + 1.0
        )  # polling and a busy machine included
        assert job.end() == 1
    text = job.out + job.err
    assert (
        text.count("Traceback (most recent call last)") == 1 and text.count("boom on purpose") == 2
    ), "source line and message"
    assert job.err.rstrip().endswith("ValueError: boom on purpose") and "rank 1 failed:" in job.err
    assert "job.py" in job.err
    assert (
        "[rank1]: hello from 1\n" in job.out
        and "[rank2]: hello from 2\n" in job.out
        and "\nhello from 0\n" in f"\n{job.out}"
    )
    assert not left_in_shared_memory(pids)


FAILING_LOOP = """
import os
import torch, manyhands as mh
from torch import nn

run = mh.join()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4))
model, optimizer, data = run.prepare(model, optimizer, dataset, batch=2)
for number, (x,) in enumerate(data):
    run.step(model(x).mean())
    if number == 4 and run.rank == 1:
        raise ValueError("boom on purpose")
"""


@pytest.mark.parametrize(
    "leave",
    # slow: the tests of the launcher have it too
    ["sys.exit(3)", pytest.param("os._exit(3)", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "script",
    [FAILING, pytest.param(FAILING_LOOP, marks=pytest.mark.slow)],
    ids=["task", "own loop"],
)
def test_a_rank_that_leaves_with_an_exit_code_gives_it_to_the_command(
    tmp_path: Path, script: str, leave: str
) -> None:
    leaving = script.replace('raise ValueError("boom on purpose")', leave)
    (tmp_path / "job.py").write_text(leaving.replace("import os", "import sys, os", 1))
    job = run(tmp_path, [*RUN, "data=2", "save=off", "--quiet"])
    assert job.process.returncode == 3, job.err
    assert "\nrank 1 ended with exit code 3" in job.err and "Traceback" not in job.err


N = 40
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


def make(**changed: Any) -> mh.Task:
    known: dict[str, Any] = dict(
        model=nn.Linear(4, 1),
        step=lambda m, b: m(b[0]).square().mean(),
        train=(X,),
        batch=4,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    )
    return mh.Task(**{**known, **changed})


def nan_on_rank_1(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    loss = model(batch[0]).square().mean()
    nan_on_rank_1.calls += 1  # type: ignore[attr-defined]
    return loss * float("nan") if os.environ["RANK"] == "1" and nan_on_rank_1.calls == 8 else loss


nan_on_rank_1.calls = 0  # type: ignore[attr-defined]


def test_a_loss_that_becomes_nan_names_its_rank_round_and_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    with pytest.raises(mh.LaunchError) as failed:
        mh.train(
            lambda: make(step=nan_on_rank_1),
            "data=2 epochs=9 save=3",
            directory=tmp_path / "run",
            quiet=True,
        )
    text = str(failed.value)
    assert (
        "Diverged: the loss of rank 1 became NaN or infinite at round 8" in text
        and "Traceback" not in text
    )
    assert f"the last good checkpoint is {tmp_path}/run/checkpoints/step-00000006" in text
    assert failed.value.exit_code == 2 and str(failed.value).startswith("Diverged: the loss of")


def test_more_ranks_than_samples_are_refused_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(
        mh.LaunchError,
        match="PlanError: data=3 ranks, but only 2 samples: some ranks would never have any; set "
        "data=2 or fewer",
    ):
        mh.train(lambda: make(train=(X[:2],)), "data=3", directory=tmp_path / "run", quiet=True)


def test_a_task_that_cannot_be_sent_says_what_to_do_before_anything_starts(tmp_path: Path) -> None:
    lock = threading.Lock()

    def task() -> mh.Task:
        with lock:
            return make()

    with pytest.raises(
        mh.TaskError,
        match=r"the task cannot be sent to other processes \(TypeError: .*lock.*\); make locks, "
        r"sockets.* inside task\(\)",
    ):
        mh.train(task, "data=2", directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_taken_port_is_named_and_another_one_is_asked_for(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            mh.LaunchError,
            match=f"port {port} is taken on this machine; give another one with --port",
        ):
            mh.train(make, "data=2", directory=tmp_path / "run", port=port)


FULL = """
import resource
import torch, manyhands as mh
from torch import nn

def task():
    return mh.Task(model=nn.Linear(400, 400), step=lambda m, b: m(b[0]).square().mean(),
                   train=(torch.randn(8, 400),), batch=4,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.01))

mh.train(task, "steps=1", directory="run")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
result = mh.train(task, "steps=6 save=2", directory="run", resume=True)
print("rounds", result.rounds, result.checkpoint)
"""

FULL_ON_TWO = (
    FULL.partition("mh.train")[0]
    + """
class Full(mh.Callback):
    def on_round(self, run, round, loss):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

mh.train(task, "data=2 steps=3", directory="two", callbacks=[Full()])
"""
)


def test_a_full_disk_does_not_stop_training_but_a_run_that_is_not_saved_has_failed(
    tmp_path: Path,
) -> None:
    job = run(tmp_path, [sys.executable, "-"], stdin=FULL)
    assert job.process.returncode == 1, job.err
    for round in (2, 4, 6):
        assert f"checkpoint at round {round} failed: " in job.out + job.err
    assert (
        "training goes on, the last good one is run/checkpoints/step-00000001" in job.out + job.err
    )
    assert "training ended at round 6, but its last checkpoint could not be saved" in job.err
    saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert saved is not None and saved.round == 1
    # every rank fails; the one that knows the reason is reported
    job = run(tmp_path, [sys.executable, "-"], stdin=FULL_ON_TWO)
    assert "could not be saved (" in job.err and "PeerLost" not in job.err, job.err


# -- other ways to start --

# no main guard, and everything lives in __main__: a class, a dataset, a function, a constant
UNGUARDED = """
import torch, manyhands as mh
from torch import nn

WIDTH = 5

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, WIDTH)
    def forward(self, x):
        return helper(self.layer(x))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 30
    def __getitem__(self, i):
        return torch.full((4,), float(i)), i % WIDTH

def helper(x):
    return x * 0.1

def task():
    return mh.Task(model=Net(), loss=nn.functional.cross_entropy, train=Rows(), test=Rows(),
                   batch=5, metrics={"accuracy": mh.accuracy},
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.01))

result = mh.train(task, "data=2 epochs=2", directory="run", quiet=True)
print("trained", result.rounds, sorted(result.metrics))
"""


# typed is slow: the notebook of the examples is such a `__main__` too
@pytest.mark.parametrize(
    ("script", "typed"),
    [("job.py", ""), pytest.param("-", UNGUARDED, marks=pytest.mark.slow)],
    ids=["a file", "typed"],
)
def test_a_script_without_a_main_guard_trains_on_two_processes_as_a_file_and_as_a_notebook_would(
    tmp_path: Path, script: str, typed: str
) -> None:
    (tmp_path / "job.py").write_text(UNGUARDED)
    job = run(tmp_path, [sys.executable, script], typed)
    assert job.process.returncode == 0, job.err
    assert "trained 6 ['accuracy', 'loss', 'train_loss']" in job.out
    assert job.out.count("trained") == 1, "the script itself ran once"


def test_under_manyhands_run_such_a_script_is_told_to_guard_its_call(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(UNGUARDED)
    job = run(tmp_path, [*RUN])
    assert job.process.returncode == 2
    assert (
        "TaskError: job.py calls train() while its task() is loaded; put that call under: if "
        "__name__ == '__main__':" in job.err
    )


TORCHRUN = """
import os
import torch, manyhands as mh
from torch import nn

torch.manual_seed(0)
X = torch.randn(30, 4)

def task():
    return mh.Task(model=nn.Linear(4, 1), step=lambda m, b: m(b[0]).square().mean(), train=(X,),
                   batch=5, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))

if __name__ == "__main__":
    try:
        mh.train(task, "data=3", directory="contradicts")
    except mh.PlanError as e:
        print("refused", e)
    first = mh.train(task, "epochs=2", directory="first", quiet=True)
    second = mh.train(task, "epochs=1", directory="second", quiet=True)
    run = mh.join(directory="third", quiet=True)
    model = nn.Linear(4, 1)
    dataset = torch.utils.data.TensorDataset(X)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, data = run.prepare(model, optimizer, dataset, batch=5)
    for (x,) in data:
        run.step(model(x).square().mean())
    rounds = f"{first.rounds} {second.rounds}"
    print(f"rank {run.rank} of {run.size}: {rounds} {first.directory}\\n", end="")
"""


def test_torchrun_starts_the_same_script_several_runs_in_a_row_and_a_contradiction_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(TORCHRUN)
    job = run(
        tmp_path,
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "job.py",
        ],
    )
    assert job.process.returncode == 0, job.err
    assert (
        job.out.count(
            "refused the plan data=3 needs 3 ranks, but 2 were started; set data=2 or start 3"
        )
        == 2
    )
    for rank in range(2):
        assert f"rank {rank} of 2: 6 3 first\n" in job.out
    for name, round in (("first", 6), ("second", 3), ("third", 3)):
        saved = Checkpoints(tmp_path / name / "checkpoints").latest()
        assert saved is not None and saved.round == round


def test_a_port_that_is_taken_for_the_rendezvous_of_other_launchers_is_named(
    tmp_path: Path,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        job = run(
            tmp_path,
            [sys.executable, "-"],
            stdin=TORCHRUN,
            RANK="0",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
    assert job.process.returncode == 1
    assert (
        f"LaunchError: port {port} is taken on 127.0.0.1; set MASTER_PORT to a free one" in job.err
    )
