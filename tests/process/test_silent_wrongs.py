"""Habits that once trained nothing, or something else, with exit code 0: honoured or refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.commands import CLI, Command, run

HEAD = """
import sys, torch, manyhands as mh
from torch import nn
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()
"""

TASK = (
    HEAD
    + """
def task():
    return mh.Task(model=nn.Linear(4, 2), loss=nn.functional.cross_entropy, train=(x, y), batch=8,
                   epochs=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), name=str(sys.argv[1:]))
if __name__ == "__main__":
    result = mh.train(task)
    print("epochs", result.epochs)
"""
)

PLAIN = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
print("trained")
"""

LOOP = (
    HEAD
    + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--how", default="step")
how = parser.parse_args().how
run = mh.join()
torch.manual_seed(0)
model = nn.Linear(4, 2)
model, optimizer, data = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y),
                                     batch=8)
other = nn.Linear(2, 2)
second = torch.optim.SGD(other.parameters(), lr=0.1)
if how == "probe":
    run.keep_local(second)
for _ in range(2):
    for a, b in data:
        loss = nn.functional.cross_entropy(model(a), b)
        if how == "own":
            loss.backward()
            optimizer.step()
        elif how != "nothing":
            run.step(loss)
        if how == "data":
            for p in model.parameters():
                p.data = p.data * 0.5
        if how in ("second", "probe"):
            other(model(a).detach()).sum().backward()
            second.step()
if how == "closed":
    run.close()
print("looped", f"weights {model.weight.square().sum().item():.4f}")
"""
)


def manyhands(folder: Path, script: str, *words: str) -> Command:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(script)
    return run(folder, [*CLI, "run", "mine.py", *words])


def code(job: Command) -> int:
    return int(job.process.returncode)


def test_a_script_that_joins_no_run_is_an_error(tmp_path: Path) -> None:
    job = manyhands(tmp_path, "print('hello')", "data=2")
    assert code(job) == 2 and "has trained nothing under manyhands" in job.err


def test_a_script_that_was_not_ported_trains_no_separate_models(tmp_path: Path) -> None:
    job = manyhands(tmp_path, PLAIN, "data=2")
    assert code(job) == 2 and "2 ranks would train 2 separate models" in job.err
    assert "trained\n" not in job.out


@pytest.mark.parametrize(
    ("how", "ranks", "says"),
    [
        ("own", 1, "call run.step(loss) instead of"),
        ("nothing", 2, "batch 1 of the epoch had no run.step(loss)"),
        ("second", 2, "a second optimizer, SGD, steps parameters that are not part of the run"),
    ],
)
def test_a_loop_that_no_run_would_merge_is_refused(
    tmp_path: Path, how: str, ranks: int, says: str
) -> None:
    job = manyhands(tmp_path, LOOP, f"data={ranks}", "--", "--how", how)
    assert code(job) == 2 and says in job.err, job.err
    assert "looped" not in job.out


def test_an_optimizer_that_was_declared_local_may_step_and_arguments_reach_the_script(
    tmp_path: Path,
) -> None:
    job = manyhands(tmp_path, LOOP, "data=1", "merge=local_sgd", "--", "--how", "probe")
    assert code(job) == 0 and "looped" in job.out, job.err


def test_a_loop_may_close_its_run_and_end_among_local_steps(tmp_path: Path) -> None:
    words = ("data=1", "merge=local_sgd", "merge.period=5")
    job = manyhands(tmp_path, LOOP, *words, "--", "--how", "closed")
    assert code(job) == 0 and "looped" in job.out, job.err


UNSEEDED = (
    HEAD
    + """
import random
x = torch.tensor([[random.SystemRandom().random()] * 4 for _ in range(64)])
def task():
    return mh.Task(model=nn.Linear(4, 2), loss=nn.functional.cross_entropy, train=(x, y), batch=8,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""
)


def test_ranks_whose_data_differs_are_refused_and_seeds_are_alike_at_import(
    tmp_path: Path,
) -> None:
    job = manyhands(tmp_path / "a", UNSEEDED, "data=2")
    assert code(job) == 2 and "the training data of this rank is not that of the others" in job.err
    seeded = UNSEEDED.replace("random.SystemRandom().random()", "random.random()")
    job = manyhands(tmp_path / "b", seeded, "data=2")
    assert code(job) == 0, job.err


OBJECT = (
    HEAD
    + """
model = nn.Linear(4, 2)
task = mh.Task(model=model, loss=nn.functional.cross_entropy, train=(x, y), test=(x, y), batch=8,
               optimizer=lambda p: torch.optim.SGD(p, lr=0.5), metrics={"accuracy": mh.accuracy})
if __name__ == "__main__":
    result = mh.train(task, "data=2 epochs=3", directory="run")
    own = float((model(x).argmax(1) == y).float().mean())
    print("same", abs(own - result.metrics["accuracy"]) < 1e-6)
"""
)


def test_a_model_object_is_trained_after_a_run_on_other_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OBJECT)
    job = run(tmp_path, [sys.executable, "mine.py"])
    assert code(job) == 0 and "same True" in job.out, job.err
    told = manyhands(tmp_path, OBJECT, "epochs=1")
    assert "the call of train() in line" in told.err


def test_parameters_given_other_memory_are_trained_alike_on_one_rank_and_on_two(
    tmp_path: Path,
) -> None:
    ended = []
    for ranks in (1, 2):
        job = manyhands(
            tmp_path / str(ranks),
            LOOP,
            f"data={ranks}",
            f"batch={8 // ranks}",
            "split=ordered",
            "--",
            "--how",
            "data",
        )
        assert code(job) == 0, job.err
        ended.append({w for w in re.findall(r"weights (-?[\d.]+)", job.out)})
    assert ended[0] == ended[1] and len(ended[0]) == 1


def test_a_script_reads_plan_words_resume_and_dir_from_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    python = [sys.executable, "mine.py"]
    first = run(tmp_path, [*python, "epochs=1", "data=2", "--dir", "D", "epoch=7"])
    assert code(first) == 0 and "epochs 1.0" in first.out, first.err
    assert "epoch=7 (did you mean epochs=?)" in first.err
    again = run(tmp_path, [*python, "epochs=3", "--resume", "--dir", "D"])
    assert code(again) == 0 and "epochs 3.0" in again.out, again.err
    assert "resumed at round 4" in again.out and "as before: data=2" in again.out
    assert "2 x cpu" in again.out


def test_arguments_after_two_dashes_are_the_tasks_too(tmp_path: Path) -> None:
    job = manyhands(tmp_path, TASK, "epochs=1", "--", "--lr", "0.1")
    assert code(job) == 0 and "['--lr', '0.1']" in job.out, job.err
    wrong = manyhands(tmp_path / "wrong", TASK, "--lr", "0.1")
    assert code(wrong) == 2 and "go after --" in " ".join(wrong.err.replace("│", "").split())
