"""ZeRO over real processes, through gloo and shared memory, equals one process."""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.exchange import collective
from manyhands.exchange.shared import SharedGroup, shard_memory
from manyhands.parallel.zero.full_state import model_state
from manyhands.parallel.zero.memory_use import Peak
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.replica.module import MicroLoss, ModuleReplica
from support.processes import PRELOAD

STEPS, BATCH, LIMIT_S = 3, 12, 60.0
STAGES = (1, 2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batches() -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, 16, generator=chance, dtype=torch.float64) for _ in range(STEPS)]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sin()).square().mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def alone() -> dict[str, Tensor]:
    model = Net()
    made = optimizer(model.parameters())
    for batch in batches():
        made.zero_grad()
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        made.step()
    return {k: v.detach() for k, v in model.state_dict().items()}


def trained(
    rank: int, size: int, link: str, stage: int, store: dist.Store
) -> tuple[float, dict[str, Any], list[str], int]:
    group = (
        SharedGroup(rank, size, store, timeout_s=LIMIT_S)
        if link == "shared"
        else collective.connect(rank, size, store, "gloo", LIMIT_S)
    )
    model, mine = Net(), [b.tensor_split(size)[rank] for b in batches()]
    memory, in_common = shard_memory(group)
    made = optimizer(model.parameters())
    flat = ShardedParameters(
        model,
        group,
        stage,
        allocate=memory,
        common=in_common,
        bucket_bytes=40_000,
        block_bytes=10**6,
    )

    def next_loss() -> MicroLoss:
        x = mine.pop(0)
        return MicroLoss(loss(model, x), len(x), True)

    replica = ModuleReplica(flat, ShardUpdate(flat, made), next_loss, nominal=BATCH, clip=0.5)
    peak = Peak(flat, made)
    for _ in range(STEPS):
        replica.backward()
        replica.step()
    with replica.holding(None), torch.no_grad():
        seen = float(loss(model, batches()[0]))
    whole, (saved, _) = model_state(flat), replica.update.save()
    replica.close()
    found = seen, {k: v.numpy().copy() for k, v in whole.items()}, sorted(saved), peak.nbytes
    group.close()
    return found


def rank_main(rank: int, size: int, link: str, store: str, pipe: Connection) -> None:
    """Every stage, one after the other in the same processes: starting them costs more."""
    torch.set_num_threads(1)
    try:
        common = dist.FileStore(store, size)
        pipe.send(
            {
                stage: trained(rank, size, link, stage, dist.PrefixStore(str(stage), common))
                for stage in STAGES
            }
        )
    except BaseException:
        pipe.send(traceback.format_exc())


@functools.cache
def ran(link: str, size: int) -> list[Any]:
    started = multiprocessing.get_context("forkserver")
    started.set_forkserver_preload(PRELOAD)
    ends, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            ours, theirs = started.Pipe()
            process = started.Process(
                target=rank_main, args=(rank, size, link, f"{folder}/store", theirs)
            )
            process.start()
            ends.append(ours)
            processes.append(process)
        try:
            return [end.recv() if end.poll(LIMIT_S) else "did not answer" for end in ends]
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("link", "size"), [("gloo", 2), ("shared", 2)])
def test_processes_are_one_on_the_union_batch(link: str, size: int, stage: int) -> None:
    answers = ran(link, size)
    assert not any(isinstance(a, str) for a in answers), answers
    got = [a[stage] for a in answers]
    needed = alone()
    model = Net()
    model.load_state_dict(needed)
    evaluated = float(loss(model, batches()[0]).detach())
    for seen, whole, saved, _ in got:
        assert seen == pytest.approx(evaluated, rel=1e-10)
        for name, value in needed.items():
            torch.testing.assert_close(torch.from_numpy(whole[name]), value, rtol=1e-10, atol=1e-12)
        assert saved == sorted(
            f"{n}/{k}" for n in needed for k in ("exp_avg", "exp_avg_sq", "step")
        )
    p = sum(v.nbytes for v in needed.values())
    most = {1: 2 * p + 2 * p / size, 2: p + 3 * p / size, 3: 4 * p / size}[stage]
    assert max(g[3] for g in got) < most + 5 * 70_000  # and what is on its way: a block is 66 kB
