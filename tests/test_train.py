"""The training loop: what ranks see when they evaluate, and what is saved.

Ranks are threads of one process, on a virtual clock.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.callbacks.stop_request import StopRequest
from manyhands.core import Position, Table
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.exchange.observed import ObservedGroup
from manyhands.limits import Limits
from manyhands.merge.downpour import Downpour
from manyhands.recover.checkpoint import Checkpoints, read_manifest
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import WholeUpdate
from manyhands.server.clock import Clock
from manyhands.server.inproc_store import InprocStore
from manyhands.server.shard import Shard
from manyhands.train import Trainer
from manyhands.trainer_parts import ActiveStrategy
from support.small_task import small_data, small_task

SIZE = 3


def trainer(group: InprocGroup, store: InprocStore) -> Trainer:
    """Over a table of one number, which every rank wants to be smaller."""
    model = nn.Linear(1, 1, bias=False).double()
    flat = FlatParameters(model, lambda n, dtype: torch.zeros(n, dtype=dtype), 2**20)
    update = WholeUpdate(flat, model, torch.optim.SGD(model.parameters(), lr=1.0))
    replica = ModuleReplica(flat, update, lambda: MicroLoss(model.weight.sum(), 1, True), nominal=1)
    for key, vector in flat.values.items():
        store.create(
            Table(
                key, length=vector.numel(), dtype="float64", optimizer="sgd", options={"lr": 1.0}
            ),
            torch.zeros_like(vector),
        )
    strategy = Downpour()
    group_of_all = ObservedGroup(group, lambda event: None)
    context = SimpleNamespace(
        group=group_of_all,
        data_group=group_of_all,
        device=torch.device("cpu"),
        recorder=SimpleNamespace(emit=lambda event: None, flush=lambda: None),
        directory="",
    )
    nothing = SimpleNamespace(position=Position(), samples=None)
    return Trainer(
        cast(Any, context),
        ActiveStrategy("merge", "downpour", strategy, store, strategy.init(replica)),
        replica,
        Limits(nothing, epochs=math.inf, steps=math.inf),
        cast(Any, SimpleNamespace(has_data=False, average_buffers=lambda: None)),
        checkpoints=cast(Any, None),
        stop=StopRequest(SimpleNamespace(requested=0)),
        tables=cast(Any, SimpleNamespace(flush=store.flush)),
    )


def weight(replica: Any) -> float:
    (piece,) = replica.flat.views
    return float(piece.parameter.detach())


@pytest.mark.parametrize("slow", range(SIZE))
def test_an_evaluation_sees_what_all_ranks_have_pushed_and_nothing_that_comes_after(
    slow: int,
) -> None:
    world, shards, clock = World(SIZE), [Shard()], Clock(SIZE)

    def main(group: InprocGroup) -> list[float]:
        store = InprocStore(world, group.rank, shards, clock)
        mine = trainer(group, store)
        seen = []
        for _ in range(2):
            world.spend(
                group.rank, 100.0 if group.rank == slow else 1.0
            )  # the others are there long before it pushes
            mine._round()
            with mine.merged():
                world.spend(
                    group.rank, 500.0 if group.rank == slow else 1.0
                )  # ... and would go on long before it is through
                seen += [
                    weight(mine.replica),
                    float(store.pull(dict.fromkeys(mine.replica.params))["float64"][0]),
                ]
        return seen

    for seen in world.run(main):
        assert seen == [-3.0, -3.0, -6.0, -6.0], (
            "three ranks, each a step of 1; held and on the server"
        )


def test_parameters_that_became_nan_behind_a_finite_loss_are_not_saved(tmp_path: Path) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.line(x)
            return out + (out * 0).abs().sqrt()  # 0, with a gradient of 0 times infinity

    with pytest.raises(mh.Diverged, match="though the loss was"):
        mh.train(
            lambda: small_task(Root()), "steps=3 save=1", directory=tmp_path / "run", quiet=True
        )
    assert not Checkpoints(tmp_path / "run/checkpoints").all()


def test_the_best_checkpoint_is_one_that_was_evaluated(tmp_path: Path) -> None:
    mh.train(
        lambda: small_task(test=small_data(30)),
        "epochs=3 save=4 best=-loss keep=9",
        directory=tmp_path / "run",
        quiet=True,
    )
    saved = Checkpoints(tmp_path / "run/checkpoints", best="-loss")
    known = {p.name: read_manifest(p)["metrics"] for p in saved.all()}
    assert known["step-00000004"] == {} and known["step-00000006"] and known["step-00000012"]
    assert saved.best_path() is not None


def test_a_run_that_ends_in_the_middle_of_an_epoch_is_evaluated(tmp_path: Path) -> None:
    result = mh.train(
        lambda: small_task(test=small_data(30)), "steps=2", directory=tmp_path / "run", quiet=True
    )
    assert "loss" in result.metrics


def test_a_request_ends_a_block_of_local_steps_after_the_step_in_which_it_came(
    tmp_path: Path,
) -> None:
    calls = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        return nn.functional.cross_entropy(out, y)

    words = "merge=local_sgd merge.period=500 epochs=1000"
    task = dataclasses.replace(small_task(), loss=loss)
    with pytest.raises(mh.LaunchError, match=r"stopped by SIGUSR1; go on with --resume") as e:
        mh.train(task, words, directory=tmp_path / "run", quiet=True, argv=False)
    assert e.value.exit_code == 128 + signal.SIGUSR1
    saved = Checkpoints(tmp_path / "run/checkpoints").latest()
    assert saved is not None and (saved.round, saved.position.steps) == (1, 5)
