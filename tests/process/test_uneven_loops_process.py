"""Own loops on three ranks and on one: an uneven last batch, and a state between batches.

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
X = torch.randn(26, 6, generator=G, dtype=torch.float64)  # of 3 x 4: in the end rank 2 has none
Y = X.sum(1, keepdim=True)

def loss(net, x, y):
    return nn.functional.mse_loss(net(x), y)

def by_loss(net, x, y):
    run.step(loss(net, x, y))

def by_gradients(net, x, y):
    loss(net, x, y).backward()
    run.step()

def by_closures(net, x, y):
    run.step(lambda: loss(net, x, y))

ADAM, LBFGS = (lambda p: torch.optim.Adam(p, lr=0.01)), mh.LBFGS
BODIES = {by_loss: ADAM, by_gradients: ADAM, by_closures: LBFGS}
for body, make in BODIES.items():
    run = mh.join("split=ordered", directory=f"runs/{sys.argv[1]}-{body.__name__}", quiet=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    seen = 0
    optimizer = make(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    net, optimizer, data = run.prepare(
        net, optimizer, (X, Y), batch=12 // run.size, schedule=schedule)
    for epoch in range(2):
        for x, y in data:
            assert len(x)
            seen += len(x)
            body(net, x, y)
    assert run.sum(seen) == 52
    run.close()
    if run.rank == 0:
        torch.save(net.state_dict(), f"{body.__name__}-{run.size}.pt")

# a state that is carried from batch to batch, each sequence's at its place in the batch
run = mh.join("split=ordered", directory=f"runs/{sys.argv[1]}-hidden", quiet=True)
torch.manual_seed(0)
net = nn.GRUCell(6, 6).double()
loader = torch.utils.data.DataLoader(list(X), batch_size=12 // run.size, drop_last=True)
net, optimizer, data = run.prepare(net, ADAM(net.parameters()), loader)
for epoch in range(3):
    hidden = None
    for x in data:
        hidden = net(x, None if hidden is None else hidden.detach())
        run.step((hidden - x).square().mean())
run.close()
if run.rank == 0:
    torch.save(net.state_dict(), f"hidden-{run.size}.pt")
"""
BODIES = ("by_loss", "by_gradients", "by_closures", "hidden")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    (folder / "job.py").write_text(SCRIPT)
    for size in (1, 3):
        job = run(folder, [*CLI, "run", "job.py", f"data={size}", "--quiet", "--", str(size)])
        assert job.process.returncode == 0, job.err
    return folder


@pytest.mark.parametrize("body", BODIES)
def test_three_ranks_take_the_steps_of_one_process(trained: Path, body: str) -> None:
    one, three = (torch.load(trained / f"{body}-{size}.pt") for size in (1, 3))
    for name, value in one.items():
        torch.testing.assert_close(three[name], value, rtol=1e-9, atol=1e-11)
