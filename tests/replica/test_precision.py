"""Mixed precision: what must survive rounding survives.

All ranks skip steps and change the loss scale together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Group, Position
from manyhands.data.batches import IndexedBatches
from manyhands.data.sources import TensorSource
from manyhands.exchange.inproc import World
from manyhands.merge.all_reduce import AllReduce
from manyhands.replica import forward
from manyhands.replica.objective import Objective
from manyhands.split.data import DataSplit
from support.compare import assert_tensors_close, same_tensors
from support.replicas import mlp, replica, rows, train_alone, train_together, weights

CPU = torch.device("cpu")


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


def infinite(model: nn.Module, x: Tensor) -> Tensor:
    poison = torch.inf if bool((x[:, 0] > 100).any()) else 1.0
    return _Poisoned.apply((model(x) - x.clamp(max=9).sum(1).sin()).square().mean(), poison)


class _Poisoned(torch.autograd.Function):
    """The loss stays finite, its gradient does not: what an overflow in backward looks like."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


def poisoned(n: int, seed: int) -> Tensor:
    batch = rows(n, seed=seed, dtype=torch.float32)
    batch[0, 0] = 1000.0
    return batch


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale() -> None:
    good, bad = rows(4, dtype=torch.float32), poisoned(4, 1)
    made = [mlp(torch.float32) for _ in range(3)]

    def main(group: Group) -> list[Any]:
        model, rank = made[group.rank], group.rank
        mine = replica(
            model,
            [[good], [bad if rank == 1 else good], [good], [bad if rank == 2 else good], [good]],
            nominal=12,
            loss=infinite,
            optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
            scaler=scaler(init_scale=1024.0, growth_interval=1000),
            schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        )
        rule, trace = AllReduce(), []
        for _ in range(5):
            rule.round(mine, group, {})
            steps = {float(s["step"]) for s in mine.optimizer.state.values()}
            trace.append(
                (
                    mine.scaler.get_scale(),
                    mine.optimizer.param_groups[0]["lr"],
                    steps,
                    weights(model),
                )
            )
        return trace

    traces = World(3).run(main)
    for trace in traces:
        assert [t[0] for t in trace] == [1024.0, 512.0, 512.0, 256.0, 256.0]
        assert [t[1] for t in trace] == pytest.approx([0.005, 0.005, 0.0025, 0.0025, 0.00125])
        assert [t[2] for t in trace] == [{1.0}, {1.0}, {2.0}, {2.0}, {3.0}]
        assert (
            same_tensors(trace[0][3], trace[1][3])
            and same_tensors(trace[2][3], trace[3][3])
            and not same_tensors(trace[1][3], trace[2][3])
        )
    for k in range(5):
        assert same_tensors(traces[0][k][3], traces[1][k][3]) and same_tensors(
            traces[0][k][3], traces[2][k][3]
        )


def test_a_scale_that_is_a_power_of_two_leaves_every_bit_as_it_was() -> None:
    batches = [rows(6, seed=s, dtype=torch.float32) for s in range(3)]
    plain = train_alone(batches, make=lambda: mlp(torch.float32), clip=0.1)
    scaled = train_alone(
        batches, make=lambda: mlp(torch.float32), clip=0.1, scaler=scaler(init_scale=2.0**10)
    )
    assert same_tensors(plain, scaled), "clipping must see the true gradient, not the scaled one"


def test_the_scale_grows_after_its_interval_and_never_falls_under_one() -> None:
    good, bad = rows(4, dtype=torch.float32), poisoned(4, 1)
    mine = replica(
        mlp(torch.float32),
        [[b] for b in (good, good, bad, bad, bad, good)],
        nominal=4,
        loss=infinite,
        scaler=scaler(init_scale=2.0, growth_interval=2),
    )
    trace = []
    for _ in range(6):
        mine.backward()
        mine.step()
        trace.append(mine.scaler.get_scale())
    assert trace == [2.0, 4.0, 2.0, 1.0, 1.0, 1.0]


def test_a_rank_whose_first_round_has_no_samples_joins_a_scaled_step() -> None:
    batch = rows(4, dtype=torch.float32)
    made = [mlp(torch.float32) for _ in range(2)]

    def main(group: Group) -> float:
        mine = replica(
            made[group.rank],
            [[batch if group.rank == 0 else batch[:0]]],
            nominal=4,
            scaler=scaler(init_scale=8.0),
        )
        AllReduce().round(mine, group, {})
        return mine.scaler.get_scale()

    assert World(2).run(main) == [8.0, 8.0]
    assert same_tensors(weights(made[0]), weights(made[1]))


def task_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    precision: str,
    loss: Callable[..., Tensor] = nn.functional.mse_loss,
) -> forward.TaskLoss:
    source = TensorSource((x, y), CPU)
    walk = IndexedBatches(
        source,
        lambda epoch: torch.arange(len(x)),
        DataSplit(len(x), len(x), len(x), 0, 1),
        Position(),
    )
    return forward.TaskLoss(model, walk, Objective(loss), precision, CPU)


def test_an_update_that_bf16_would_lose_is_kept_by_the_fp32_parameters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 256.0)
    assert torch.tensor(256.0, dtype=torch.bfloat16) - 0.5 == 256.0, "bf16 has 8 significant bits"
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    loss = task_loss(
        model, torch.ones(2, 1), torch.zeros(2, 1), "bf16", loss=lambda out, y: out.mean()
    )
    mine = replica(model, [], nominal=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    mine.next_loss = loss
    mine.backward()
    mine.step()
    assert seen == [torch.bfloat16], "matrix work in bf16"
    assert model.weight.dtype == torch.float32 and model.weight.item() == 255.5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_short_types_follow_the_fp32_run_and_their_loss_is_fp32(precision: str) -> None:
    x = rows(32, dtype=torch.float32)
    y = x.sum(1, keepdim=True).sin()

    def train(kind: str) -> tuple[dict[str, Tensor], float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
        options = {"scaler": scaler()} if kind == "fp16" else {}
        mine = replica(
            model, [], nominal=32, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options
        )
        mine.next_loss = task_loss(model, x, y, kind)
        for _ in range(20):
            loss = mine.backward()
            assert loss.dtype == torch.float32
            mine.step()
        return weights(model), float(loss)

    (exact, loss), (short, short_loss) = train("fp32"), train(precision)
    assert_tensors_close(short, exact, rtol=0.05)
    assert short_loss == pytest.approx(loss, rel=0.05) and not same_tensors(short, exact)


def test_accumulation_with_scaling_equals_one_batch() -> None:
    batches = [rows(8, seed=s, dtype=torch.float32) for s in range(2)]
    steps = [[list(b[:5].split(2)), list(b[5:].split(1))] for b in batches]
    make = lambda: mlp(torch.float32)
    together = [train_together([s for s in steps], make=make, scaler=None)[0][0]]
    made = [mlp(torch.float32) for _ in range(2)]

    def main(group: Group) -> None:
        mine = replica(
            made[group.rank],
            [s[group.rank] for s in steps],
            nominal=8,
            scaler=scaler(init_scale=2.0**8),
        )
        for _ in steps:
            AllReduce().round(mine, group, {})

    World(2).run(main)
    assert_tensors_close(weights(made[0]), together[0], rtol=1e-6)
    assert same_tensors(weights(made[0]), weights(made[1]))
