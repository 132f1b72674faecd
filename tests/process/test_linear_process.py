"""Linear models on several processes, as users start them: from a script without a guard, under
torchrun and `manyhands run`; stopped, killed, restarted; and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from manyhands.launch.process_state import named
from manyhands.recover.checkpoint import Checkpoints
from support.commands import (
    CLI,
    STOPPED_S,
    Command,
    command,
    descendants,
    left_in_shared_memory,
    run,
    wait_until_gone,
)

# no `if __name__ == "__main__"`: a cell of a notebook has none either
DATA = """
import json, os, sys, warnings
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from manyhands.linear import LogisticRegression
warnings.simplefilter("ignore", ConvergenceWarning)
rng = np.random.default_rng(0)
X = rng.standard_normal((600, 20))
y = X @ rng.standard_normal(20) + rng.standard_normal(600) > 0

def fit(name, **options):
    model = LogisticRegression(**{"tol": 1e-9, "max_iter": 1000, **options}).fit(X, y)
    np.save(name, np.append(model.coef_, model.intercept_))
    return model
"""
# whose end is far away
ENDLESS = """
fit("never.npy", solver="sdca", C=1e6, tol=1e-13, max_iter=10**7, directory="run", **OPTIONS)
"""
PYTHON = [sys.executable, "-"]


def coefficients(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy")


def assert_nothing_left(pids: list[int]) -> None:
    wait_until_gone(pids, STOPPED_S)
    assert not left_in_shared_memory(pids)


def ranks_of(job: Command) -> list[int]:
    """Processes of the ranks, once each has finished a round."""
    events = [job.folder / "run" / "events" / f"rank-{r}.jsonl" for r in range(2)]
    job.until(
        lambda: all(e.exists() and b'"round","' in e.read_bytes() for e in events),
        "round on every rank",
    )
    return [pid for pid in descendants(job.process.pid) if is_rank(pid)]


def is_rank(pid: int) -> bool:
    return named(pid).startswith("rank ")


# -- where a fit is started from --


def test_fits_on_two_ranks_equal_those_of_one_process(tmp_path: Path) -> None:
    script = f"""{DATA}
fit("one", solver="newton")
fit("rows", solver="newton", plan="data=2")
fit("dual", solver="sdca", plan="data=2", tol=1e-7)
fit("l1", solver="scd", l1_ratio=1.0)
fit("columns", solver="scd", l1_ratio=1.0, plan="tensor=2 split=by_feature")
from manyhands.linear.data import write_shards
write_shards(X, "shards", shard_bytes=20_000, labels=y * 1.0)
model = LogisticRegression(solver="newton", plan="data=2", tol=1e-9).fit("shards")
np.save("shards.npy", np.append(model.coef_, model.intercept_))
print("directories", os.listdir())
"""
    job = run(tmp_path, PYTHON, script)
    assert job.process.returncode == 0, job.err
    one, l1 = coefficients(tmp_path, "one"), coefficients(tmp_path, "l1")
    for name in ("rows", "shards"):
        np.testing.assert_allclose(coefficients(tmp_path, name), one, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(coefficients(tmp_path, "dual"), one, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(coefficients(tmp_path, "columns"), l1, rtol=1e-3, atol=1e-4)
    assert "runs" not in job.out  # without directory= none is made
    assert not left_in_shared_memory([job.process.pid])


def torchrun(script: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0",
        "--standalone", script,
    ]  # fmt: skip


@pytest.mark.slow
def test_under_torchrun_the_ranks_of_a_job_fit_together(tmp_path: Path) -> None:
    text = f"""{DATA}
rank = os.environ["RANK"]
fit(f"alone-{{rank}}", solver="newton")
fit(f"together-{{rank}}", solver="newton", plan="data=2", directory="run")
try:
    LogisticRegression(directory="other").fit(X, y)
except ValueError as e:
    print("refused:", e)
X[0, 0] += float(rank)
try:
    fit("different", solver="newton", plan="data=2")
except ValueError as e:
    print("refused:", e)
"""
    tmp_path.joinpath("fit.py").write_text(text)
    job = run(tmp_path, torchrun("fit.py"))
    assert job.process.returncode == 0, job.err[-3000:]
    found = [coefficients(tmp_path, f"{kind}-{r}") for kind in ("alone", "together") for r in "01"]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[3])
    np.testing.assert_allclose(found[2], found[0], rtol=1e-6, atol=1e-9)
    assert {p.name for p in (tmp_path / "run" / "events").iterdir()} == {
        "rank-0.jsonl", "rank-1.jsonl"
    }  # fmt: skip
    assert "let them fit together with plan='data=2'" in job.out
    assert "the 2 ranks of this job were given different rows" in job.out


def test_manyhands_run_starts_the_ranks_that_a_plan_wants(tmp_path: Path) -> None:
    text = f"""{DATA}
fit(f"together-{{os.environ['RANK']}}", solver="newton", plan="data=2")
"""
    tmp_path.joinpath("fit.py").write_text(text)
    job = run(tmp_path, [*CLI, "run", "fit.py", "data=2", "--dir", "run"])
    assert job.process.returncode == 0, job.err[-3000:]
    one, other = (coefficients(tmp_path, f"together-{r}") for r in "01")
    np.testing.assert_array_equal(one, other)
    assert Checkpoints(tmp_path / "run" / "checkpoints").all()
    wrong = run(tmp_path / "wrong", [*CLI, "run", "../fit.py", "data=2", "merge=local_sgd"])
    assert wrong.process.returncode == 2
    assert "merge=local_sgd has no effect on a linear model" in wrong.err


# -- stopped, killed --


def endless(folder: Path, options: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "fit.py").write_text(DATA + f"OPTIONS = {options}\n" + ENDLESS)
    return [sys.executable, "fit.py"]


def rounds_of(folder: Path) -> int:
    return int(Checkpoints(folder / "run" / "checkpoints").all()[-1].name.partition("-")[2])


def straight(folder: Path, rounds: int) -> np.ndarray:
    """The same fit without a stop: as many rounds."""
    script = (
        DATA
        + f"""
options = dict(solver="sdca", C=1e6, tol=1e-13, max_iter={rounds}, plan="data=2 save=off")
fit("straight", directory="straight", **options)
"""
    )
    job = run(folder, PYTHON, script)
    assert job.process.returncode == 0, job.err
    return coefficients(folder, "straight")


def resumed(folder: Path, rounds: int) -> np.ndarray:
    script = (
        DATA
        + f"""
options = dict(solver="sdca", C=1e6, tol=1e-13, max_iter={rounds}, plan="data=2")
fit("resumed", directory="run", resume=True, **options)
"""
    )
    job = run(folder, PYTHON, script)
    assert job.process.returncode == 0, job.err
    return coefficients(folder, "resumed")


def test_ctrl_c_saves_a_checkpoint_from_which_a_fit_goes_on_exactly(tmp_path: Path) -> None:
    with command(tmp_path, endless(tmp_path, "dict(plan='data=2')")) as job:
        pids = ranks_of(job)
        job.process.send_signal(signal.SIGINT)
        assert job.end() != 0
    done = rounds_of(tmp_path)
    assert f"stopped by SIGINT after {done} rounds: go on with directory='run', resume=True" in (
        job.err
    )
    assert_nothing_left(pids)
    limit = done + 7
    np.testing.assert_array_equal(resumed(tmp_path, limit), straight(tmp_path, limit))


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_from_its_coefficients(tmp_path: Path) -> None:
    script = f"""{DATA}
fit("two", solver="sdca", max_iter=5, tol=1e-300, plan="data=2 link=gloo", directory="run")
fit("one", solver="sdca", plan="data=1", directory="run", resume=True)
fit("alone", solver="sdca")
"""
    job = run(tmp_path, PYTHON, script)
    assert job.process.returncode == 0, job.err
    assert "saved by 2 ranks, and these are 1: coefficients go on" in job.err
    one, alone = coefficients(tmp_path, "one"), coefficients(tmp_path, "alone")
    np.testing.assert_allclose(one, alone, rtol=1e-3, atol=1e-4)


def test_a_killed_rank_is_named_and_ends_the_fit(tmp_path: Path) -> None:
    with command(tmp_path, endless(tmp_path, "dict(plan='data=2')")) as job:
        pids = ranks_of(job)
        victim = pids[-1]
        os.kill(victim, signal.SIGKILL)
        assert job.end() != 0
    assert f"(pid {victim}) was killed by SIGKILL" in job.err
    assert_nothing_left(pids)


@pytest.mark.slow
def test_with_restarts_a_fit_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    options = "dict(plan='data=2 save=10 restarts=1')"
    with command(tmp_path, endless(tmp_path, options)) as job:
        first = ranks_of(job)
        job.until(lambda: bool(Checkpoints(tmp_path / "run" / "checkpoints").all()), "checkpoint")
        os.kill(first[0], signal.SIGKILL)
        at = rounds_of(tmp_path)
        second: list[int] = []

        def begun_again() -> bool:
            second[:] = [p for p in descendants(job.process.pid) if is_rank(p) and p not in first]
            return bool(second) and rounds_of(tmp_path) > at + 20

        job.until(begun_again, "rounds after the restart")
        job.process.send_signal(signal.SIGINT)
        job.end()
    done = rounds_of(tmp_path)
    assert_nothing_left([*first, *second])
    limit = done + 3
    np.testing.assert_array_equal(resumed(tmp_path, limit), straight(tmp_path, limit))


STREAM = f"""{DATA}
from manyhands.linear.solvers.ftrl import FTRL
solver = FTRL(batch=8, passes=6)
def objective(name, **options):
    print(name, fit(name, solver=solver, **{{"tol": 1e-300, "max_iter": 6, **options}}).objective_)
objective("here")
"""


def test_ftrl_keeps_its_columns_on_servers(tmp_path: Path) -> None:
    script = f"""{STREAM}
objective("two", plan="data=2 servers=2 compress=fp16", directory="two")
"""
    job = run(tmp_path, PYTHON, script)
    assert job.process.returncode == 0, job.err
    found = {line.split()[0]: float(line.split()[1]) for line in job.out.splitlines()}
    assert abs(found["two"] / found["here"] - 1.0) < 0.1
    assert not (tmp_path / "two" / "servers.json").exists()
    assert not left_in_shared_memory([job.process.pid])


@pytest.mark.slow
def test_ftrl_over_servers_resumes_with_what_they_held(tmp_path: Path) -> None:
    script = f"""{STREAM}
objective("first", plan="servers=1", directory="one", max_iter=2)
objective("resumed", plan="servers=1", directory="one", resume=True)
"""
    job = run(tmp_path, PYTHON, script)
    assert job.process.returncode == 0, job.err
    here, resumed = coefficients(tmp_path, "here"), coefficients(tmp_path, "resumed")
    np.testing.assert_allclose(resumed, here, rtol=1e-8, atol=1e-10)


SEARCH = f"""{DATA}
from manyhands.linear import GridSearch, cross_validate
"""


@pytest.mark.slow
def test_processes_share_out_the_folds_of_a_cross_validation(tmp_path: Path) -> None:
    script = f"""{SEARCH}
labels = np.where(y, "yes", "no")
model = LogisticRegression(solver="newton", tol=1e-9)
search = lambda plan: GridSearch(model, {{"C": [0.1, 1.0, 10.0]}}, plan=plan).fit(X, labels)
one, two = search(""), search("data=2 timeout_s=60")
for name, value in one.cv_results_.items():
    if "time" not in name:
        np.testing.assert_array_equal(two.cv_results_[name], value)
print("equal", two.best_params_)
try:
    cross_validate(LogisticRegression(solver="newton", l1_ratio=1.0), X, y, plan="data=2")
except Exception as e:
    print("refused:", e)
"""
    job = run(tmp_path, PYTHON, script)
    assert job.process.returncode == 0, job.err
    assert "equal {'C'" in job.out and "supports only 'l2'" in job.out
    assert set(os.listdir(tmp_path)) == {"stdin", "stdout", "stderr"}
    assert not left_in_shared_memory([job.process.pid])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_cross_validation_that_is_ended_says_how(tmp_path: Path, how: str) -> None:
    script = f"""{SEARCH}
class Slow(LogisticRegression):
    def fit(self, *given, **options):
        open(f"{{os.environ['RANK']}}.pid", "w").write(str(os.getpid()))
        return super().fit(*given, **options)
Slow.__init__ = LogisticRegression.__init__
slow = Slow(solver="sdca", C=1e6, tol=1e-13, max_iter=300)
GridSearch(slow, {{"C": np.logspace(5, 6, 100)}}, plan="data=2").fit(X, y)
"""
    with command(tmp_path, PYTHON, script) as job:
        pids = job.pids(2)
        if how == "killed":
            os.kill(pids[1], signal.SIGKILL)
        else:
            job.process.send_signal(signal.SIGINT)
        assert job.end() != 0
    if how == "killed":
        assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in job.err
    else:
        assert "stopped by SIGINT: nothing of a cross-validation is kept" in job.err
    assert_nothing_left(pids)


@pytest.mark.slow
def test_the_data_is_not_copied_by_ranks(tmp_path: Path) -> None:
    """Ranks map what the calling process holds: their own memory does not grow with the data."""
    script = (
        DATA
        + """
X = rng.random((150_000, 400)); y = X[:, 0] > 0.5
LogisticRegression(solver="newton_cg", plan="data=2", directory="run").fit(X, y)
"""
    )
    with command(tmp_path, PYTHON, script) as job:
        pids = ranks_of(job)
        own = [private_mb(pid) for pid in pids]
        mapped = [Path(f"/proc/{pid}/maps").read_text().count("memfd:manyhands") for pid in pids]
        job.end()
    # values and indices of a rank's rows are 360 MB; its modules and vectors are the rest
    assert own and max(own) < 450 and min(mapped) >= 5, (own, mapped)


def private_mb(pid: int) -> float:
    """Memory that is no file's; what it has in common with its fork server counts by shares."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.split("Pss_Anon:")[1].split()[0]) / 1024
