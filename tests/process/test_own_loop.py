"""Own training loops end with the bits of `mh.train`, on one rank and on two.

They stop, save and resume like it.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import manyhands as mh
from manyhands.own_loop import joined_runs
from manyhands.recover.checkpoint import Checkpoints
from support.commands import CLI, command, run
from support.compare import same_tensors

N = 38
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 6, generator=G), torch.randint(3, (N,), generator=G)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], Y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[i], Y[i]) for i in range(N)])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def task() -> mh.Task:
    return mh.Task(
        model=model(),
        loss=nn.functional.cross_entropy,
        train=(X, Y),
        batch=4,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
    )


def saved(directory: Path) -> dict[str, Tensor]:
    found = Checkpoints(directory / "checkpoints").latest()
    assert found is not None
    return found.params


def own(
    directory: Path,
    words: str = "",
    epochs: int = 2,
    stop_after: int | None = None,
    data: Any = None,
    **options: Any,
) -> mh.Run:
    """The loop that a user keeps, in this process."""
    run = mh.join(words, directory=directory, quiet=True, **options)
    net = model()
    net, optimizer, batches = run.prepare(
        net, torch.optim.Adam(net.parameters(), lr=0.01), (X, Y) if data is None else data, batch=4
    )
    done = 0
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            run.step(nn.functional.cross_entropy(net(x), y))
            done += 1
            if done == stop_after:
                run.close()
                return run
        run.log(extra=done)
    run.close()
    return run


# -- alone, in this process --


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("", lambda: (X, Y)),
        ("accumulate=2", lambda: (X, Y)),
        ("clip=0.1 precision=bf16", lambda: (X, Y)),
        ("precision=fp16", lambda: (X, Y)),
        ("", Rows),
        ("", lambda: DataLoader(Rows(), batch_size=4, shuffle=True)),
        ("split=ordered", Stream),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_it_ends_with_the_bits_of_train(tmp_path: Path, words: str, data: Any) -> None:
    own(tmp_path / "own", words, data=data())
    mh.train(task, f"{words} epochs=2", directory=tmp_path / "trained", quiet=True)
    assert same_tensors(saved(tmp_path / "own"), saved(tmp_path / "trained"))


@pytest.mark.parametrize(
    ("stop_after", "words"), [(5, ""), (10, ""), (13, ""), (6, "accumulate=2")]
)
def test_a_loop_that_ended_in_mid_epoch_goes_on_from_there_exactly(
    tmp_path: Path, stop_after: int, words: str
) -> None:
    own(tmp_path / "whole", words)
    own(tmp_path / "halves", words, stop_after=stop_after)
    own(tmp_path / "halves", words, resume=True)
    assert same_tensors(saved(tmp_path / "whole"), saved(tmp_path / "halves"))


def test_what_is_logged_is_in_the_events_and_closing_twice_is_closing_once(tmp_path: Path) -> None:
    run = own(tmp_path / "run")
    run.close()
    assert run not in joined_runs
    lines = [
        json.loads(line)
        for line in (tmp_path / "run" / "events" / "rank-0.jsonl").read_text().splitlines()
    ]
    logged = [e["value"] for e in lines if e["name"] == "log"]
    assert [value["extra"] for value in logged] == [10.0, 20.0]
    assert all(set(value) == {"extra", "step"} for value in logged)
    assert (run.rank, run.size) == (0, 1)


def test_what_makes_no_sense_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        mh.PlanError,
        match="epochs= and steps= have no effect here: in a loop of your own, the loop says when "
        "to stop",
    ):
        mh.join("epochs=3", directory=tmp_path / "a")
    run = mh.join(directory=tmp_path / "b", quiet=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _, _, batches = run.prepare(net, optimizer, (X, Y), batch=5)
    assert len(batches) == 8
    with pytest.raises(mh.TaskError, match="one run trains one model"):
        run.prepare(net, optimizer, (X, Y))
    with pytest.raises(
        mh.TaskError,
        match=r"run\.step\(loss\) needs a batch from the data that run\.prepare returned; iterate "
        r"over that",
    ):
        run.step(torch.zeros(()))
    with pytest.raises(mh.TaskError, match=r"the run has trained nothing: run\.step\(loss\) was"):
        run.close()


# -- on two ranks --

LOOP = """
import os, sys
from pathlib import Path
import torch, manyhands as mh
from torch import nn

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(38, 6, generator=G), torch.randint(3, (38,), generator=G)
torch.manual_seed(0)
run = mh.join("accumulate=2")
model = nn.Sequential(
    nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(X, Y)
model, optimizer, data = run.prepare(model, optimizer, dataset, batch=4)
samples = 0
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
    for x, y in data:
        optimizer.zero_grad()
        run.step(nn.functional.cross_entropy(model(x), y))
        samples += len(x)
        if samples > 60:
            Path(f"{run.rank}.part").write_text(str(os.getpid()))
            os.rename(f"{run.rank}.part", f"{run.rank}.pid")
    run.log(samples=samples)
sys.stdout.write(f"samples {samples}\\n")  # in one piece: ranks share this output
sys.exit(0)
"""


def test_on_two_ranks_with_an_uneven_last_batch_and_accumulation_it_ends_with_the_bits_of_train(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text(LOOP)
    job = run(tmp_path, [*CLI, "run", "job.py", "data=2", "--dir", "own", "--quiet"])
    assert job.process.returncode == 0, job.err
    totals = [int(line.split()[-1]) for line in job.out.splitlines() if "samples" in line]
    assert len(totals) == 2 and sum(totals) == 2 * N, "every sample once an epoch, over both ranks"
    mh.train(task, "data=2 accumulate=2 epochs=2", directory=tmp_path / "trained", quiet=True)
    assert same_tensors(saved(tmp_path / "own"), saved(tmp_path / "trained"))
    assert "accumulate = 2" in (tmp_path / "own" / "plan.toml").read_text(), (
        "what the script says, where the command says nothing"
    )


def test_sigterm_stops_an_own_loop_with_a_checkpoint_and_it_goes_on_after(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        LOOP.replace("range(int", "range(10**9) if not Path('go').exists() else range(int")
    )
    with command(
        tmp_path, [*CLI, "run", "job.py", "data=2", "save=1000000", "--dir", "own"]
    ) as job:
        job.pids(2)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 143
        assert "stopped by SIGTERM" in job.err.splitlines()[-1] and "Traceback" not in job.err
    stopped = Checkpoints(tmp_path / "own" / "checkpoints").latest()
    assert stopped is not None and stopped.round > 7
    (tmp_path / "go").touch()
    again = run(tmp_path, [*CLI, "run", "job.py", "data=2", "--dir", "own", "--resume"])
    assert again.process.returncode == 0, again.err
    assert f"resumed at round {stopped.round}" in again.out


def test_alone_as_a_script_it_is_a_world_of_one_and_saves_when_it_ends(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(LOOP)
    job = run(tmp_path, [sys.executable, "job.py", "1"])
    assert job.process.returncode == 0, job.err
    (directory,) = (tmp_path / "runs").iterdir()
    assert (
        directory.name.startswith("job-")
        and saved(directory)
        and (directory / "curves.png").exists()
    )
