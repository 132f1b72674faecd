"""Own loops that draw their own batches, on two ranks: the step is that of one process.

All of it runs in one job, run after run: starting processes costs more than any of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.commands import CLI, run

SCRIPT = """
import sys
import torch, manyhands as mh
from torch import nn

torch.set_num_threads(1)
G = torch.Generator().manual_seed(0)
X = torch.randn(64, 6, generator=G, dtype=torch.float64)
Y = X.sum(1, keepdim=True)
BATCHES = [torch.randperm(64, generator=G)[:10] for _ in range(12)]

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()

def loss(net, at):
    return nn.functional.mse_loss(net(X[at]), Y[at])

def mine(at):  # uneven on purpose
    return at if run.size == 1 else at[:3] if run.rank == 0 else at[3:]

def plain(batches=BATCHES):
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    run.keep_local(optimizer)
    for at in batches:
        optimizer.zero_grad()
        loss(net, at).backward()
        optimizer.step()
    return net

def by_loss(net, optimizer):
    for at in map(mine, BATCHES):
        run.step(loss(net, at), count=len(at))

def by_gradients(net, optimizer):
    for at in map(mine, BATCHES):
        optimizer.zero_grad()
        for one in at:
            (loss(net, one[None]) / len(at)).backward()
        run.step(count=len(at))

def by_closures(net, optimizer):
    for at in map(mine, BATCHES):
        def closure():
            optimizer.zero_grad()
            found = loss(net, at)
            found.backward()
            return found
        run.step(closure, count=len(at))

def in_turns(net, optimizer):
    for k, at in enumerate(BATCHES):
        if run.rank == k % run.size:
            run.step(loss(net, at), count=len(at))
        else:
            run.step(None, count=0)

def one_ends_early(net, optimizer):
    for k, at in enumerate(BATCHES):
        if run.rank == 0 and k == 4:
            break
        run.step(*((loss(net, at), len(at)) if run.rank else (None, 0)))
    steps = run.steps
    run.close()
    assert steps == (12 if run.rank else 4) and run.round in (12, 3), (steps, run.round)

def seeds_that_differ(net, optimizer):
    drawn = torch.rand(1)
    assert float(run.sum(drawn)) != 2 * float(drawn), "ranks draw the same numbers"
    by_loss(net, optimizer)

for body in (by_loss, by_gradients, by_closures, in_turns, one_ends_early, seeds_that_differ):
    run = mh.join(directory=f"runs/{body.__name__}", quiet=True)
    net = model()
    net, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
    body(net, optimizer)
    pairs = zip(net.parameters(), plain().parameters())
    far = max(float((p - q).detach().abs().max()) for p, q in pairs)
    run.close()
    sys.stdout.write(f"DONE {body.__name__} {far:.1e}\\n")
"""

BODIES = (
    "by_loss",
    "by_gradients",
    "by_closures",
    "in_turns",
    "one_ends_early",
    "seeds_that_differ",
)


def distances(folder: Path, words: list[str]) -> dict[str, float]:
    (folder / "job.py").write_text(SCRIPT)
    job = run(folder, [*CLI, "run", "job.py", "data=2", *words, "--quiet"])
    assert job.process.returncode == 0, job.err
    found = [line.split("DONE ")[1].split() for line in job.out.splitlines() if "DONE" in line]
    assert len(found) == 2 * len(BODIES), job.out
    return {name: float(far) for name, far in found}


@pytest.mark.parametrize("link", ["shared", "gloo"])
def test_two_ranks_take_the_steps_of_one_process_whatever_each_draws(
    tmp_path: Path, link: str
) -> None:
    found = distances(tmp_path, [f"link={link}"])
    assert found.keys() == set(BODIES) and max(found.values()) < 1e-12


@pytest.mark.slow
def test_local_steps_end_on_all_ranks_and_stay_near(tmp_path: Path) -> None:
    found = distances(tmp_path, ["merge=local_sgd", "merge.period=5"])
    assert min(found["by_loss"], found["in_turns"]) > 1e-6, "replicas step alone in a block"
    assert max(found.values()) < 0.3


SAVES = """
import torch, manyhands as mh

run = mh.join()
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
net, optimizer = run.prepare(net, optimizer)
for step in range(4):
    run.step(net(torch.randn(8, 4)).square().mean())
if run.rank == 0:  # as scripts do: no other rank takes part
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, "own.pt")
    torch.save(net, "whole.pt")
run.close()

run = mh.join(directory="runs/named")
models = {"a": torch.nn.Linear(4, 1), "b": torch.nn.Linear(3, 1)}
optimizers = {k: torch.optim.Adam(m.parameters(), lr=0.1) for k, m in models.items()}
models, optimizers = run.prepare(models, optimizers)
for step in range(4):
    for name, n in ("a", 4), ("b", 3):
        run.step(models[name](torch.randn(8, n)).square().mean(), optimizer=name)
if run.rank == 0:
    torch.save({k: o.state_dict() for k, o in optimizers.items()}, "named.pt")
"""


@pytest.mark.slow
def test_rank_0_saves_model_and_optimizer_by_itself(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SAVES)
    job = run(tmp_path, [*CLI, "run", "job.py", "data=2", "--quiet"])
    assert job.process.returncode == 0, job.err
    saved = torch.load(tmp_path / "own.pt")
    moments = saved["optimizer"]["state"]
    assert {k: tuple(v["exp_avg"].shape) for k, v in moments.items()} == {0: (1, 4), 1: (1,)}
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(whole.weight, saved["model"]["weight"])
    for name, n in ("a", 4), ("b", 3):
        moments = torch.load(tmp_path / "named.pt")[name]["state"]
        assert {k: tuple(v["exp_avg"].shape) for k, v in moments.items()} == {0: (1, n), 1: (1,)}


SAME = """
import torch, manyhands as mh

run = mh.join()
net = torch.nn.Linear(4, 1)
run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
torch.manual_seed(0)
for _ in range(6):
    run.step(net(torch.randn(8, 4)).square().mean())
"""

WAITS = """
import torch, manyhands as mh

run = mh.join()
net = torch.nn.Linear(4, 1)
run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for step in range(4):
    run.step(net(torch.randn(8, 4)).square().mean())
if run.rank == 0:
    run.sum(1.0)
"""


def test_ranks_that_draw_the_same_batches_are_told(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SAME)
    job = run(tmp_path, [*CLI, "run", "job.py", "data=2", "--quiet"])
    assert job.process.returncode == 0
    assert job.err.count("they seem to draw the same batches") == 1, job.err


def test_a_rank_whose_loop_is_over_while_another_waits_for_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAITS)
    job = run(tmp_path, [*CLI, "run", "job.py", "data=2", "--quiet"])
    assert job.process.returncode != 0
    assert (
        "rank 0 waits for all ranks in run.sum, but the loop of rank 1 is over after 4" in job.err
    )
