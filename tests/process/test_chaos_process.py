"""`manyhands chaos` breaks real runs: what it says was lost is what the model says was lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import CLI, STOPPED_S, Command, command, descendants, run, wait_until_gone
from support.small_task import saved_weights

BATCH, EPOCHS = 4, 8
# each sample moves its own number of the model, so that the model says how often each was seen
COUNTING = f"""
import time
import torch, manyhands as mh
from torch import nn

class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(200, dtype=torch.float64))
    def forward(self, x):
        time.sleep(0.01)
        return self.seen[x[:, 0].long()]

def task():
    x = torch.arange(200, dtype=torch.float64)[:, None]
    return mh.Task(model=Seen, loss=lambda out, y: out.mean(), train=(x, x), batch={BATCH},
                   optimizer=lambda p: torch.optim.SGD(p, lr=1.0), epochs={EPOCHS})
"""


def line(folder: Path, words: str, merge: str = "downpour") -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "counting.py").write_text(COUNTING)
    return [*CLI, "chaos", "counting.py", f"merge={merge}", *words.split(), "--dir", "d"]


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "d" / "chaos.json").read_text())
    return found


@pytest.mark.slow  # by default: servers that fail in one process, and chaos between ranks
@pytest.mark.timeout(300)  # two runs with six processes each
def test_killed_and_cut_servers_and_frames_sent_twice_lose_nothing(tmp_path: Path) -> None:
    faults = "--kill server@500ms --cut server:0@1s --duplicate 0.2 --seed 7"
    job = run(tmp_path, line(tmp_path, f"data=2 servers=3 replicas=2 {faults}"))
    found = report(tmp_path)
    assert job.process.returncode == 0, job.out + job.err
    assert found["lost_nothing"] and all(f["injected"] for f in found["faults"]), found
    assert [(e["once"], e["twice"], e["never"]) for e in found["samples"]] == [(200, 0, 0)] * EPOCHS
    for shard in found["pushes"]:
        assert shard["acknowledged"] == shard["applied"] == EPOCHS * 200 // BATCH
    assert len(found["losses"]) == 1
    for name in ("calm", "chaos"):  # the model agrees
        seen = -saved_weights(tmp_path / "d" / name)["seen"] * BATCH
        assert torch.equal(seen, torch.full_like(seen, EPOCHS)), name
    assert "NOTHING WAS LOST" in job.out and "| " in job.out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_without_replicas_is_a_loss_and_is_named(tmp_path: Path) -> None:
    job = run(tmp_path, line(tmp_path, "data=1 servers=2 --kill server:1@500ms"))
    assert job.process.returncode == 1, job.out + job.err
    assert "expect a loss" in job.out
    said = " ".join(report(tmp_path)["problems"])
    assert "the run did not finish" in said and "never computed" in said
    assert "with shard 1, 512 of 1024 slots are lost" in said, said


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    words = "data=2 servers=2 replicas=2 epochs=100000 --pause server@1s/60s"
    with command(tmp_path, line(tmp_path, words)) as job:
        job.until(lambda: "epoch 1/" in job.out, "training")
        started = descendants(job.process.pid)
        assert len(started) >= 6  # launcher, ranks, coordinator, servers
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
        wait_until_gone(started, STOPPED_S)
    assert "stopped by SIGINT" in job.err


@pytest.mark.slow
def test_a_killed_worker_and_a_full_disk_lose_nothing(tmp_path: Path) -> None:
    faults = "--kill worker:1@500ms --full-disk 1s/1s"
    words = f"servers=2 replicas=2 elastic=1:2 epochs={2 * EPOCHS} {faults}"
    job = run(tmp_path, line(tmp_path, words))
    found = report(tmp_path)
    assert job.process.returncode == 0, job.out + job.err
    assert found["lost_nothing"] and all(f["injected"] for f in found["faults"]), found
    for shard in found["pushes"]:
        assert shard["steps"] == shard["steps_applied"] == 2 * EPOCHS * 200 // BATCH
    assert any("rank 1 is lost" in said for said in found["workers"]), found["workers"]
    seen = -saved_weights(tmp_path / "d" / "chaos")["seen"] * BATCH
    assert torch.equal(seen, torch.full_like(seen, 2 * EPOCHS))


# -- between ranks --


def once(folder: Path, job: Command, epochs: int, global_batch: int) -> dict[str, Any]:
    """The report of a run that lost nothing, and whose model agrees."""
    assert job.process.returncode == 0, job.out + job.err
    found = report(folder)
    assert found["lost_nothing"] and all(f["injected"] for f in found["faults"]), found
    assert [(e["once"], e["twice"], e["never"]) for e in found["samples"]] == [(200, 0, 0)] * epochs
    assert "NOTHING WAS LOST: every sample counted once" in job.out
    for name in ("calm", "chaos"):
        seen = -saved_weights(folder / "d" / name)["seen"] * global_batch
        assert torch.allclose(seen, torch.full_like(seen, epochs), rtol=1e-9), (name, seen)
    return found


@pytest.mark.timeout(300)
def test_a_killed_rank_of_an_all_reduce_loses_nothing(tmp_path: Path) -> None:
    # a global batch of 10 divides 200: else the last step of an epoch would weigh its samples more
    words = "data=2 batch=5 elastic=1:2 epochs=16 --kill worker@random --seed 3"
    job = run(tmp_path, line(tmp_path, words, "all_reduce"))
    found = once(tmp_path, job, 16, 10)
    assert found["faults"][0]["recovery_s"] > 0
    assert "1 rank; without what was rank" in found["workers"][0], found["workers"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_launcher_leaves_nothing_and_its_run_resumes(tmp_path: Path) -> None:
    faults = "--slow worker:1@300ms/500ms*3 --pause worker@1s/300ms --full-disk 500ms/500ms"
    faults += " --kill launcher@2s"
    words = f"data=2 batch=5 epochs=16 {faults}"
    job = run(tmp_path, line(tmp_path, words, "all_reduce"))
    found = once(tmp_path, job, 16, 10)
    assert any(said.startswith("resumed at round") for said in found["workers"]), found["workers"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_local_steps_of_three_ranks_two_of_them_killed_lose_nothing(tmp_path: Path) -> None:
    faults = "--kill worker:0@1s --kill worker@2500ms"
    words = f"merge.period=4 data=3 elastic=1:3 epochs=32 {faults}"
    job = run(tmp_path, line(tmp_path, words, "local_sgd"))
    found = report(tmp_path)
    assert job.process.returncode == 0, job.out + job.err
    assert [(e["once"], e["twice"], e["never"]) for e in found["samples"]] == [(200, 0, 0)] * 32
