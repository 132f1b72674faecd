"""Tables that servers save themselves: runs that are killed, resumed, changed and looked into."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.cli.export import export
from manyhands.recover.checkpoint import Checkpoints
from support.commands import CLI, command, descendants, wait_until_gone
from support.saved_tables import assert_same_rows, saved_rows

N = 96
G = torch.Generator().manual_seed(0)
IDS, Y = torch.randint(0, 500, (N, 3), generator=G), torch.randn(N, 1, generator=G)

JOB = """
import os, threading
from pathlib import Path
import torch, manyhands as mh
from torch import nn

G = torch.Generator().manual_seed(0)
IDS, Y = torch.randint(0, 3000, (832, 3), generator=G), torch.randn(832, 1, generator=G)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = mh.Embedding("users", 8, optimizer="adam", lr=0.05, expire_after=6)
        self.items = mh.Embedding("items", 4, optimizer="adagrad", lr=0.05)
        self.last = nn.Linear(36, 1)

    def forward(self, ids):
        return self.last(torch.cat([self.users(ids).flatten(1), self.items(ids).flatten(1)], 1))

class Hold(mh.Callback):
    def on_round(self, run, round, loss):
        if not Path(f"{run.rank}.pid").exists():
            Path(f"{run.rank}.part").write_text(str(os.getpid()))
            os.rename(f"{run.rank}.part", f"{run.rank}.pid")
        if round == 28 and Path("hold").exists():
            threading.Event().wait()  # until somebody kills us

def task():
    return mh.Task(model=Model(), loss=nn.functional.mse_loss, train=(IDS, Y), batch=16,
                   test=(IDS[:50], Y[:50]),
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.05), callbacks=[Hold()])
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_saved_in_increments_killed_and_resumed_ends_with_the_same_bits(
    tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    size = f"data={ranks} servers={ranks} batch={32 // ranks}"
    plan = f"{size} embeddings=sync steps=32 save=20 best=-loss save_tables=incremental"
    line = [*CLI, "run", "job.py", *plan.split(), "--quiet"]
    with command(tmp_path, [*line, "--dir", "whole"]) as job:
        assert job.end() == 0, job.err
    for file in tmp_path.glob("*.pid"):
        file.unlink()
    (tmp_path / "hold").touch()
    with command(tmp_path, [*line, "--dir", "killed"]) as job:
        pids = job.pids(ranks)
        checkpoints = Checkpoints(tmp_path / "killed" / "checkpoints")
        job.until(
            lambda: [p.name for p in checkpoints.all()] == ["step-00000020", "step-00000026"],
            "checkpoint at the end of the epoch",
        )
        for pid in {*pids, *descendants(job.process.pid), job.process.pid}:
            os.kill(pid, signal.SIGKILL)
        job.end()
        wait_until_gone(pids, 5.0)
    assert len(list((checkpoints.path(26) / "tables").iterdir())) > 2 * ranks, (
        "an increment, and its base"
    )
    (tmp_path / "hold").unlink()
    with command(tmp_path, [*line, "--dir", "killed", "--resume"]) as job:
        assert job.end() == 0, job.err
    whole, resumed = saved_rows(tmp_path / "whole"), saved_rows(tmp_path / "killed")
    assert whole["users"]["ids"].size > 200 and whole["users"]["version"][0] == 32
    assert_same_rows(resumed, whole)
    a, b = (Checkpoints(tmp_path / name / "checkpoints").latest() for name in ("whole", "killed"))
    assert a is not None and b is not None and a.round == b.round == 32
    assert all(torch.equal(a.params[k], b.params[k]) for k in a.params)


# -- in this process --


class Rows(nn.Module):
    def __init__(self, optimizer: str = "adagrad", dim: int = 2):
        super().__init__()
        self.rows = mh.Embedding("rows", dim, optimizer=optimizer, lr=0.1)
        self.last = nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.rows(ids).sum(2))
        return out


def train(directory: Path, words: str, *, resume: bool = False, **changed: Any) -> mh.Result:
    task: dict[str, Any] = dict(
        model=Rows,
        loss=nn.functional.mse_loss,
        train=(IDS, Y),
        batch=4,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
    make = lambda: mh.Task(**{**task, **changed})
    return mh.train(make, words, directory=directory, resume=resume, quiet=True)


@pytest.mark.parametrize("servers", ["", "servers=2"])
def test_saved_rows_are_loaded_exported_and_looked_up(tmp_path: Path, servers: str) -> None:
    train(tmp_path, f"steps=28 save=24 keep=1 save_tables=incremental data=1 {servers}")
    rows = saved_rows(tmp_path)["rows"]
    model = mh.load(tmp_path, Rows())
    ids = torch.from_numpy(rows["ids"])
    with torch.no_grad():
        assert torch.equal(model.rows(ids), torch.from_numpy(rows["values"]))
    exported = load_file(export(tmp_path, tmp_path / "model.safetensors"))
    assert exported["table/rows/ids"].tolist() == rows["ids"].tolist()
    assert torch.equal(exported["table/rows/values"], torch.from_numpy(rows["values"]))
    table = mh.saved_table(tmp_path, "rows")
    values, found = table.rows(np.arange(-10, 600))
    assert np.array_equal(np.arange(-10, 600)[found], rows["ids"])
    assert np.array_equal(values[found], rows["values"])
    changed = mh.changed_rows(tmp_path, "rows", since_round=24)
    pushed = np.sort(rows["ids"][rows["meta"][:, 1] > 24])
    assert changed.round == 28 and np.array_equal(np.sort(changed.ids), pushed)
    assert 0 < pushed.size < rows["ids"].size and not changed.erased.size
    where = np.searchsorted(rows["ids"], changed.ids)
    assert np.array_equal(changed.values, rows["values"][where])
    with pytest.raises(mh.CheckpointError, match="no table 'users'; it has rows"):
        mh.saved_table(tmp_path, "users")
    with pytest.raises(mh.CheckpointError, match=r"round 3.*rounds 24, 28"):
        mh.changed_rows(tmp_path, "rows", since_round=3)


def test_rows_of_another_optimizer_are_refused_or_keep_their_values(tmp_path: Path) -> None:
    train(tmp_path, "steps=6 save=6 data=1")
    before = saved_rows(tmp_path)["rows"]
    changed: Any = {"model": lambda: Rows("adam")}
    with pytest.raises(mh.CheckpointError, match=r"'rows'.*'adagrad'.*'adam'.*table_state=drop"):
        train(tmp_path, "steps=7", resume=True, **changed)
    with pytest.raises(mh.CheckpointError, match=r"'rows' with dim=2.*with dim=3"):
        train(tmp_path, "steps=7 table_state=drop", resume=True, model=lambda: Rows(dim=3))
    train(tmp_path, "steps=7 table_state=drop", resume=True, **changed)
    after = saved_rows(tmp_path)["rows"]
    there = np.isin(after["ids"], before["ids"]) & (after["meta"][:, 1] <= 6)
    old = np.searchsorted(before["ids"], after["ids"][there])
    assert there.sum() > 20 and np.array_equal(after["values"][there], before["values"][old])
    assert not after["state/exp_avg"][there].any() and after["version"].tolist() == [7, 1]


def test_rows_that_an_older_version_saved_as_tensors_come_back(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    train(new, "steps=6 save=6 data=1")
    shutil.copytree(new, old)
    saved = Checkpoints(new / "checkpoints").latest()
    assert saved is not None
    rows = saved_rows(new)["rows"]
    saved.state |= {f"table/rows/{k}": torch.from_numpy(x.copy()) for k, x in rows.items()}
    shutil.rmtree(old / "checkpoints")
    older = Checkpoints(old / "checkpoints")
    older.save(saved, {})
    older.wait()
    model, ids = mh.load(old, Rows()), torch.from_numpy(rows["ids"].copy())
    with torch.no_grad():
        assert torch.equal(model.rows(ids), torch.from_numpy(rows["values"].copy()))
    exported = load_file(export(old, tmp_path / "old.safetensors"))
    assert torch.equal(exported["table/rows/ids"], ids)
    for run in (new, old):
        train(run, "steps=9", resume=True)
    assert_same_rows(saved_rows(old), saved_rows(new))


class Watched(nn.Module):
    """Whose gradients are finite, whatever its rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = mh.Embedding("rows", 2, optimizer=f"{__name__}:Overflows", lr=0.1)
        self.last = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids).sum((1, 2)).nan_to_num(0, 0, 0)[:, None] * 0.0 + self.last


class Overflows:
    """A server optimizer of one's own: the row of every third push becomes infinite."""

    state: ClassVar[dict[str, str]] = {"pushes": "row"}

    def update(self, values: Any, grads: Any, state: Any, lr: float) -> None:
        state["pushes"] += 1
        values -= lr * grads
        values[state["pushes"][:, 0] > 3] = np.inf


def test_a_row_that_is_not_finite_is_named_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    # every id comes once an epoch; its fourth push is in the fourth
    distinct = torch.arange(N * 3).view(N, 3)
    with pytest.raises(mh.Diverged, match=r"(?s)'rows': rows are NaN or infinite.*step-00000072"):
        train(
            tmp_path,
            "epochs=9 save=24 data=1",
            train=(distinct, Y),
            model=Watched,
        )
    saved = Checkpoints(tmp_path / "checkpoints").all()
    assert [p.name for p in saved][-1] == "step-00000072"
    assert np.isfinite(saved_rows(tmp_path)["rows"]["values"]).all()


def test_words_about_tables_are_refused_where_they_have_no_effect(tmp_path: Path) -> None:
    plain: Any = {"model": lambda: nn.Linear(3, 1), "train": (IDS.float(), Y)}
    for words in ("save_tables=incremental", "table_state=drop"):
        with pytest.raises(mh.PlanError, match=f"{words} has no effect: the model has no"):
            train(tmp_path, f"data=1 steps=1 {words}", **plain)
    with pytest.raises(mh.PlanError, match="no effect with save=off"):
        train(tmp_path, "data=1 steps=1 save=off save_tables=incremental")
    with pytest.raises(mh.PlanError, match="one of full, incremental"):
        train(tmp_path, "data=1 steps=1 save_tables=some")
