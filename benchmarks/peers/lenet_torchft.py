"""LeNet under torchft: a lighthouse, and replica groups of one rank each over gloo.

    python lenet_torchft.py REPLICAS FOLDER

It starts itself: the first process holds the lighthouse, and starts a replica anew as soon as its
process ends, which is sooner than a torchrun for each of them would. Heartbeats and time-outs are
as short as they can be where four processes share two cores; torchft's own defaults (5 s without a
heartbeat, 60 s for a collective) would make every recovery longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lenet import StepLog, batches, lenet, sgd
from torch import nn
from torch.distributed import TCPStore

HEARTBEAT_MS, DEAD_AFTER_MS, TICK_MS, JOIN_MS = 20, 100, 10, 50
TIMEOUT = timedelta(seconds=5)  # of a collective or a state that is fetched: neither waits so long


def supervise(folder: Path, replicas: int) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=JOIN_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=DEAD_AFTER_MS,
    )
    port = lighthouse.address().rpartition(":")[2]
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

    def start(replica: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, str(replicas), str(replica), str(folder)]
        return subprocess.Popen(command, env=environment)

    processes = [start(r) for r in range(replicas)]
    while True:
        for replica, process in enumerate(processes):
            if process.poll() is not None:
                processes[replica] = start(replica)
        time.sleep(0.01)


def train(folder: Path, replicas: int, replica: int) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = lenet()
    inner = sgd(plain)

    def load(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{replica}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=HEARTBEAT_MS),
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=30),
    )
    model, optimizer = DistributedDataParallel(manager, plain), Optimizer(manager, inner)
    log, epoch = StepLog(folder), 0
    while True:
        for x, y in batches(folder, replica, replicas, epoch):
            optimizer.zero_grad()  # asks the lighthouse who takes part
            nn.functional.cross_entropy(model(x), y).backward()
            before = manager.current_step()
            took_part = manager.is_participating()  # one that fetches the state adds nothing yet
            optimizer.step()
            if took_part and manager.current_step() > before:  # else the step was thrown away
                log.write(manager.current_step(), replica)
        epoch += 1


if __name__ == "__main__":
    *numbers, folder = sys.argv[1:]
    (train if len(numbers) == 2 else supervise)(Path(folder), *map(int, numbers))
