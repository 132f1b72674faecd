"""Runs of real processes are told to stop: they save between two steps, or say that they did not;
and runs that fail start themselves again, but not for ever."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manyhands.recover.checkpoint import Checkpoints
from support.commands import CLI, Command, command, descendants, run
from support.small_task import saved_weights

BATCH, SAMPLES = 4, 400
# each sample moves its own number of the model, so that the model says how often each was seen;
# a step of rank 1 takes longer than one of rank 0
COUNTING = f"""
import os, threading, time
from pathlib import Path
import torch, manyhands as mh
from torch import nn

RANK = os.environ.get("RANK", "0")

class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros({SAMPLES}, dtype=torch.float64))
    def forward(self, x):
        time.sleep(0.01 + 0.01 * int(RANK))
        Path(f"{{RANK}}.started").touch()
        trouble()
        return self.seen[x[:, 0].long()]

def trouble():
    if Path("hang").exists():
        threading.Event().wait()

def task():
    x = torch.arange({SAMPLES}, dtype=torch.float64)[:, None]
    return mh.Task(model=Seen, loss=lambda out, y: out.mean(), train=(x, x), epochs=1,
                   optimizer=lambda p: torch.optim.SGD(p, lr=1.0), batch={BATCH})
"""
# one outer step of plain averaging: the model is the mean of what ranks have counted
LONG_BLOCK = "merge=diloco merge.period=500 merge.lr=1 merge.momentum=0"


def line(folder: Path, words: str, text: str = COUNTING) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "counting.py").write_text(text)
    return [*CLI, "run", "counting.py", *words.split(), "device=cpu", "--dir", "run"]


def at_work(job: Command, ranks: int = 2) -> None:
    job.until(
        lambda: all((job.folder / f"{r}.started").exists() for r in range(ranks)),
        "step on every rank",
    )


def seen(folder: Path, ranks: int = 2) -> Tensor:
    """How often each sample was seen; every sample is of one rank, and the model the mean."""
    return -saved_weights(folder / "run")["seen"] * BATCH * ranks


def told(folder: Path, words: str, tell: list[str] | signal.Signals) -> Command:
    """A run that is told to stop in the middle of its first block."""
    with command(folder, line(folder, words)) as job:
        at_work(job)
        if isinstance(tell, signal.Signals):
            job.process.send_signal(tell)
        else:
            (folder / tell[0]).touch()
        job.end()
    return job


@pytest.mark.parametrize(
    ("tell", "code", "by"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, "SIGTERM"),
        pytest.param(signal.SIGUSR1, 128 + signal.SIGUSR1, "SIGUSR1", marks=pytest.mark.slow),
        pytest.param(
            ["leave"],
            128 + signal.SIGTERM,
            "the file leave (preempt_file)",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["SIGTERM", "SIGUSR1", "preempt_file"],
)
def test_a_long_block_ends_between_two_steps_and_resumes_where_it_was(
    tmp_path: Path, tell: list[str] | signal.Signals, code: int, by: str
) -> None:
    job = told(tmp_path, f"data=2 {LONG_BLOCK} preempt_file=leave grace_s=40", tell)
    assert job.process.returncode == code, job.err
    assert f"{by}: saving and stopping, within grace_s=40" in job.err
    assert f"stopped by {by}; go on with --resume" in job.err.splitlines()[-1]
    saved = Checkpoints(tmp_path / "run/checkpoints").latest()
    assert saved is not None and saved.round == 1, "the block was cut, and is a round"
    at = saved.position
    assert 0 < at.steps < SAMPLES // BATCH // 2 and at.offset == at.steps * BATCH * 2
    counted = seen(tmp_path)
    assert float(counted.sum()) == pytest.approx(at.offset), "only steps that both have done"
    assert set(counted.round().tolist()) == {0.0, 1.0}

    (tmp_path / "leave").unlink(missing_ok=True)
    again = run(tmp_path, [*CLI, "run", "counting.py", "--dir", "run", "--resume"])
    assert again.process.returncode == 0, again.err
    assert torch.allclose(seen(tmp_path), torch.ones(SAMPLES, dtype=torch.float64))


@pytest.mark.slow
def test_a_block_with_exchanges_inside_ends_between_two_steps_too(tmp_path: Path) -> None:
    words = "data=2 merge=streaming_diloco merge.period=40 merge.fragments=4 merge.tau=3"
    job = told(tmp_path, words, signal.SIGTERM)
    assert job.process.returncode == 128 + signal.SIGTERM, job.err
    saved = Checkpoints(tmp_path / "run/checkpoints").latest()
    assert saved is not None and saved.position.offset == saved.position.steps * BATCH * 2


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "one"])
def test_under_torchrun_a_long_block_ends_whoever_is_told(tmp_path: Path, who: str) -> None:
    text = COUNTING.replace(
        "def task():",
        "Path(f'{RANK}.pid').write_text(str(os.getpid()))\n\ndef task():",
    )
    script = text + f"\nif __name__ == '__main__':\n    mh.train(task, 'device=cpu {LONG_BLOCK}')\n"
    (tmp_path / "job.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "job.py"]
    with command(tmp_path, [*torchrun, "--dir", "run"]) as job:
        at_work(job)
        pids = job.pids(2)
        for pid in pids if who == "all" else pids[1:]:
            os.kill(pid, signal.SIGUSR1)
        assert job.end() != 0
    saved = Checkpoints(tmp_path / "run/checkpoints").latest()
    assert saved is not None and 0 < saved.position.steps < SAMPLES // BATCH // 2, job.err
    assert "stopped by SIGUSR1; go on with --resume" in job.err or who == "one"


@pytest.mark.slow
def test_ranks_that_do_not_save_in_time_are_named_and_so_is_what_is_lost(tmp_path: Path) -> None:
    words = "data=2 steps=1 save=1"
    first = run(tmp_path, line(tmp_path, words))
    assert first.process.returncode == 0, first.err
    for file in tmp_path.glob("*.started"):
        file.unlink()
    more = ["run", "counting.py", "steps=50", "save=40", "grace_s=1", "--dir", "run", "--resume"]
    with command(tmp_path, [*CLI, *more]) as job:
        at_work(job)
        (tmp_path / "hang").touch()
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
    newest = Path("run/checkpoints/step-00000001")
    assert (
        "stopped by SIGTERM: ranks 0, 1 had not saved within grace_s=1 and were killed: nothing "
        f"newer than {newest} is on disk; go on from it with --resume" in job.err
    ), job.err


def test_a_preempt_file_that_is_there_already_is_refused(tmp_path: Path) -> None:
    words = line(tmp_path, "data=2 preempt_file=leave")
    (tmp_path / "leave").touch()
    job = run(tmp_path, words)
    assert job.process.returncode == 2 and "preempt_file=leave exists already" in job.err


# -- restarts --

KILLED_ONCE = COUNTING.replace(
    "def trouble():",
    """def trouble():
    if RANK == "1" and Path("run/checkpoints/step-00000020").exists():
        if not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), 9)""",
)


def test_a_run_whose_rank_is_killed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    job = run(tmp_path, line(tmp_path, "data=2 save=10 restarts=2", KILLED_ONCE))
    assert job.process.returncode == 0, job.err
    assert "was killed by SIGKILL" in job.err
    assert "restarts: going on in 1 s from run/checkpoints/step-000000" in job.err
    weights = -saved_weights(tmp_path / "run")["seen"] * BATCH * 2
    assert torch.allclose(weights, torch.ones(SAMPLES, dtype=torch.float64)), "every sample once"


def test_the_same_error_twice_at_the_same_round_ends_the_run(tmp_path: Path) -> None:
    text = COUNTING.replace(
        "def trouble():",
        "COUNT = [0]\n\ndef trouble():\n    COUNT[0] += 1\n"
        "    if COUNT[0] == 7:\n        raise ValueError('a sample that nobody likes')",
    )
    job = run(tmp_path, line(tmp_path, "data=1 restarts=9", text))
    assert job.process.returncode == 1, job.err
    assert job.err.count("restarts: going on in 1 s from the beginning: there is no check") == 1
    assert "failed twice at round 7 with the same error: a restart would fail again" in job.err
    assert "a sample that nobody likes" in job.err


@pytest.mark.slow
def test_who_starts_the_processes_must_restart_them(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        COUNTING + "\nif __name__ == '__main__':\n    mh.train(task, 'device=cpu restarts=2')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "job.py"]
    job = run(tmp_path, torchrun)
    assert "restarts=2: who starts the processes must start them again" in job.err


@pytest.mark.slow
def test_a_run_that_has_lost_its_server_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    words = "data=2 servers=1 staleness=0 on_loss=restore save=10"
    with command(tmp_path, line(tmp_path, words)) as job:
        saved = tmp_path / "run/checkpoints/step-00000010"
        job.until(saved.exists, "checkpoint")
        workers = descendants(job.process.pid)
        (server,) = [p for p in workers if "manyhands.server" in cmdline(p)]
        os.kill(server, signal.SIGKILL)
        assert job.end() == 0, job.err
    assert "ServerLost" in job.err
    assert "on_loss=restore: going on in 1 s from run/checkpoints/step-000000" in job.err
    weights = -saved_weights(tmp_path / "run")["seen"] * BATCH * 2
    assert torch.allclose(weights, torch.ones(SAMPLES, dtype=torch.float64)), "every sample once"


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
