"""mh.Store and runs as processes on one kept server: some are killed, the others go on."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

import manyhands as mh
from support.commands import CLI, command

PUSHES = """
import sys, torch, manyhands as mh
store = mh.Store(sys.argv[1])
store.create("t", dim=4, optimizer="sum", init="zeros")
for step in range(10**9):
    store.push("t", torch.arange(100), torch.ones(100, 4))
    if step == 20:
        print("pushing", flush=True)
"""

NOTEBOOK = """
import manyhands as mh
store = mh.Store(servers=2)
store.create("t", dim=4)
print("pids", *(child.process.pid for child in store._backend.servers.children), flush=True)
while True:
    store.push("t", range(100), [[1.0] * 4] * 100).wait()
"""

TRAINS = """
import sys, torch, manyhands as mh
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = mh.Embedding("users", 4), nn.Linear(4, 2)
    def forward(self, ids):
        return self.out(self.rows(ids))

def task():
    ids = torch.arange(64)
    return mh.Task(model=Model, loss=nn.functional.cross_entropy, train=(ids, ids % 2), batch=8,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

if __name__ == "__main__":
    mh.train(task, f"servers=1 merge=downpour steps={sys.argv[1]} save=off", argv=False, quiet=True)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


def settled(store: mh.Store) -> torch.Tensor:
    """The rows, when the server has read all that a dead client had sent."""
    rows = store.pull("t", range(100)).clone()
    while True:
        signal.sigtimedwait([], 0.2)
        again = store.pull("t", range(100)).clone()
        if torch.equal(rows, again):
            return rows
        rows = again


def test_a_client_that_is_killed_leaves_the_others_and_its_rows(tmp_path: Path) -> None:
    """kill -9 in the middle of pushes: each was applied as a whole or not at all."""
    with command(tmp_path / "server", [*CLI, "server", "--keep"], MANYHANDS_TOKEN="secret") as job:
        job.until(lambda: "stores " in job.out, "line about stores")
        found = re.search(r"at (127\.0\.0\.1:\d+)", job.out)
        assert found is not None
        address = found[1]
        with mh.Store(address, token="secret") as store:
            for number in range(2):
                words = [sys.executable, "-c", PUSHES, address]
                folder = tmp_path / f"client{number}"
                with command(folder, words, MANYHANDS_TOKEN="secret") as client:
                    client.until(lambda: "pushing" in client.out, "pushes")
                    store.push("t", range(100), torch.ones(100, 4)).wait()
                    client.process.kill()
                    client.process.wait()
                before = settled(store)
                assert torch.equal(before, before[:1, :1].expand(100, 4)) and before[0, 0] > 20
                store.push("t", range(100), torch.ones(100, 4)).wait()
                assert torch.equal(store.pull("t", range(100)), before + 1)
            assert store.tables()["t"].rows == 100 and "duplicates" not in store.stats()


def test_a_notebook_leaves_no_server_behind_however_it_ends(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        folder = tmp_path / number.name
        with command(folder, [sys.executable, "-c", NOTEBOOK]) as job:
            job.until(lambda: "pids" in job.out, "servers")
            pids = [int(pid) for pid in job.out.split()[1:]]
            assert len(pids) == 2 and all(map(alive, pids))
            job.process.send_signal(number)
            job.process.wait()
            for _ in range(200):
                if not any(map(alive, pids)):
                    break
                signal.sigtimedwait([], 0.05)
            assert not any(map(alive, pids)), number


@pytest.mark.slow  # namespaces of one server: tests/server/namespaces, in one process
def test_two_runs_and_a_store_share_a_server(tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    with command(tmp_path / "server", [*CLI, "server", "--keep"], MANYHANDS_TOKEN="secret") as job:
        job.until(lambda: "stores " in job.out, "line about stores")
        found = re.search(r"at (127\.0\.0\.1):(\d+)", job.out)
        assert found is not None
        env = dict(DMLC_PS_ROOT_URI=found[1], DMLC_PS_ROOT_PORT=found[2], MANYHANDS_TOKEN="secret")
        address = f"{found[1]}:{found[2]}"

        def run(name: str, steps: int, namespace: str):  # type: ignore[no-untyped-def]
            words = [sys.executable, str(tmp_path / "trains.py"), str(steps)]
            return command(tmp_path / name, words, **env, MANYHANDS_NAMESPACE=namespace)

        with run("one", 5, "a") as one, run("two", 9, "b") as two:
            assert (one.end(), two.end()) == (0, 0), one.err + two.err
        stores = [mh.Store(address, token="secret", namespace=name) for name in "ab"]
        assert [store.tables()["users"].rows for store in stores] == [40, 64]
        rows = stores[0].pull("users", range(64)).clone()
        with run("three", 5, "a") as three:  # tables of the run before it are not its own
            assert three.end() == 0, three.err
        assert torch.equal(stores[0].pull("users", range(64)), rows)
        assert job.process.poll() is None
        for store in stores:
            store.close()
