"""ZeRO: n ranks equal one process on the union batch, in every stage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import (
    Group,
    Layout,
    Strategy,
    Tensors,
)
from manyhands.errors import PlanError, TaskError
from manyhands.exchange.inproc import World
from manyhands.exchange.shared import shard_memory
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.diloco import DiLoCo
from manyhands.merge.easgd import EASGD
from manyhands.merge.local_sgd import LocalSGD
from manyhands.parallel import sync_batchnorm
from manyhands.parallel.zero.full_state import gradient_state, load_model, model_state
from manyhands.parallel.zero.memory_use import Peak
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.replica import state
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import ModuleReplica
from manyhands.replica.update import WholeUpdate
from support.compare import assert_tensors_close, same_tensors
from support.zero_replicas import (
    OPTIMIZERS,
    Axis,
    NextLosses,
    alone,
    assert_same_as_alone,
    cut,
    data_of,
    even,
    loss_of,
    model_of,
    spread,
    together,
    without_dropout,
    zoo,
)

STAGES = [1, 2, 3]
MLP: dict[str, Any] = {"make": lambda: model_of("mlp"), "loss": loss_of("mlp")}


# -- equality --


def union_cases() -> list[Any]:
    """One model at all sizes, all models at one size; the rest of the product is slow."""
    found = []
    for name, stage, size in itertools.product(["mlp", "gpt", "seq2seq"], STAGES, [1, 2, 3, 4]):
        found.append(
            pytest.param(
                name, stage, size, marks=() if name == "mlp" or size == 3 else (pytest.mark.slow,)
            )
        )
    return found


@pytest.mark.parametrize(("name", "stage", "size"), union_cases())
def test_n_ranks_are_one_process_on_the_union_batch(name: str, stage: int, size: int) -> None:
    assert_same_as_alone(
        size,
        stage,
        lambda: model_of(name),
        data_of(name, 3, 8),
        loss_of(name),
        even(size, 8, 3),
        optimizer=OPTIMIZERS["adam"],
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_optimizer_that_treats_elements_by_themselves_is_the_same_in_slices(
    stage: int, optimizer: str
) -> None:
    assert_same_as_alone(
        3,
        stage,
        lambda: model_of("mlp"),
        data_of("mlp", 4, 9),
        loss_of("mlp"),
        even(3, 9, 4),
        optimizer=OPTIMIZERS[optimizer],
    )


@pytest.mark.parametrize("stage", STAGES)
def test_groups_of_parameters_a_schedule_and_a_clip_are_those_of_the_whole(stage: int) -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        return torch.optim.AdamW(
            [
                {"params": [p for p in every if p.ndim > 1], "weight_decay": 0.3},
                {"params": [p for p in every if p.ndim < 2], "lr": 0.03},
            ],
            lr=0.01,
            eps=1e-4,
        )

    assert_same_as_alone(
        3,
        stage,
        MLP["make"],
        data_of("mlp", 5, 12),
        MLP["loss"],
        even(3, 12, 5),
        optimizer=grouped,
        clip=0.05,
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shares", [[7, 1], [8, 0], [0, 8]], ids=str)
def test_uneven_shares_and_ragged_micro_batches_weigh_what_they_have(
    shares: list[int], stage: int
) -> None:
    assert_same_as_alone(
        2,
        stage,
        MLP["make"],
        data_of("mlp", 3, 8),
        MLP["loss"],
        [shares, [4, 4], shares],
        micros=3,
        optimizer=OPTIMIZERS["sgd"],
        clip=0.5,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_where_nobody_has_samples_nothing_moves(stage: int) -> None:
    batch = data_of("mlp", 1, 8)[0]
    group, nothing = cut(batch, [4, 4]), tuple(x[:0] for x in batch)
    got = together(
        2,
        stage,
        MLP["make"],
        [[[h] for h in group], [[nothing], [nothing]]],
        MLP["loss"],
        optimizer=OPTIMIZERS["sgd"],
    )
    one = MLP["make"]()
    alone(one, [batch], MLP["loss"], optimizer=OPTIMIZERS["sgd"])
    assert_tensors_close(got[0][1], state.model_state(one), rtol=1e-11)


class Partly(nn.Module):
    """Frozen ones, one that nobody uses, and one that only samples with a sign of their own use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.blocks[1].requires_grad_(False)
        self.blocks[2].bias.requires_grad_(False)
        self.unused, self.sometimes = nn.Linear(12, 12), nn.Parameter(torch.ones(12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)
        self.norm.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 0).any()):
            x = torch.where(x[:, :1] > 0, x * self.sometimes, x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.norm(x))


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_unused_parameters_stay_as_they_are(stage: int) -> None:
    data = data_of("mlp", 3, 8)
    for i, batch in enumerate(
        data
    ):  # the second rank never uses `sometimes`, and in the last step nobody does
        batch[0][4:, 0] = -1.0
        batch[0][:4, 0] = 1.0 if i < 2 else -1.0
    loss = MLP["loss"]
    before = Partly()
    assert_same_as_alone(
        2, stage, Partly, data, loss, even(2, 8, 3), optimizer=OPTIMIZERS["adamw"], clip=0.3
    )
    after = together(
        2,
        stage,
        Partly,
        [[[m] for m in cut(b, [4, 4])] for b in data],
        loss,
        optimizer=OPTIMIZERS["adamw"],
    )[0][1]
    for name in ("unused.weight", "blocks.1.weight", "blocks.2.bias", "norm.weight"):
        assert torch.equal(after[name], before.state_dict()[name]), name
    assert not torch.equal(after["sometimes"], before.sometimes)


def test_gradients_of_all_stages_are_the_same() -> None:
    data = data_of("gpt", 1, 6)
    steps = [[cut(mine, [1, 2]) for mine in cut(b, [3, 3])] for b in data]
    look = lambda replica: gradient_state(replica.flat)
    got = {
        s: together(
            2, s, lambda: model_of("gpt"), steps, loss_of("gpt"), look, optimizer=OPTIMIZERS["sgd"]
        )[1][2]
        for s in STAGES
    }
    assert_tensors_close(got[2], got[1])
    assert_tensors_close(got[3], got[1])


@pytest.mark.parametrize("stage", STAGES)
def test_batchnorm_sees_the_union_of_all_ranks(stage: int) -> None:
    def synced(model: nn.Module, group: Group) -> nn.Module:
        return sync_batchnorm.synchronise(
            model, lambda values: group.all_reduce({"norm": values}).wait()
        )

    assert_same_as_alone(
        2,
        stage,
        lambda: model_of("cnn"),
        data_of("cnn", 3, 8),
        loss_of("cnn"),
        even(2, 8, 3),
        optimizer=OPTIMIZERS["sgd"],
        prepare=synced,
        overlap=False,
    )


# -- state, by the names of the whole --


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_saved_as_one_process_would_and_goes_on_at_another_size_and_stage(
    optimizer: str,
) -> None:
    data, loss, make = data_of("mlp", 6, 12), MLP["loss"], OPTIMIZERS[optimizer]
    one = MLP["make"]()
    _, first = alone(one, data[:3], loss, optimizer=make)
    needed, meta = first.update.save(lambda values: None)

    def saves(replica: ModuleReplica) -> Any:
        return replica.update.save(), model_state(replica.flat)

    steps = [[[m] for m in cut(b, [4, 4, 4])] for b in data]
    (tensors, ours), params = together(3, 2, MLP["make"], steps[:3], loss, saves, optimizer=make)[
        0
    ][2]
    assert_tensors_close(
        {k: v.double() for k, v in tensors.items()},
        {k: v.double() for k, v in needed.items()},
        rtol=1e-10,
    )
    assert [g["params"] for g in ours["groups"]] == [g["params"] for g in meta["groups"]]
    whole = MLP["make"]()
    alone(whole, data, loss, optimizer=make)

    def goes_on(group: Group) -> Tensors:
        model = MLP["make"]()
        next_loss = NextLosses(model, [[cut(b, [6, 6])[group.rank]] for b in data[3:]], loss, True)
        mine = spread(group, model, 3, next_loss, nominal=12, optimizer=make)
        load_model(mine.flat, params)
        mine.update.load(tensors, ours)
        for _ in data[3:]:
            mine.backward()
            mine.step()
        return model_state(mine.flat)

    for model in World(2).run(goes_on):
        assert_tensors_close(model, state.model_state(whole), rtol=1e-10)


# -- memory --


def peak_cases() -> list[Any]:
    """Every stage once, and the one that gathers also without looking ahead and on more ranks; the
    rest of the product is slow.
    """
    found = []
    for stage, size, lookahead in itertools.product(STAGES, [2, 4], [0, 1]):
        quick = (size, lookahead) == (2, 1) or (stage, size, lookahead) == (3, 4, 0)
        found.append(
            pytest.param(stage, size, lookahead, marks=() if quick else (pytest.mark.slow,))
        )
    return found


@pytest.mark.parametrize(("stage", "size", "lookahead"), peak_cases())
def test_the_peak_of_what_is_held_is_the_formula(stage: int, size: int, lookahead: int) -> None:
    gpt = zoo("gpt")["GPT"]

    def main(group: Group) -> tuple[int, int, int, int]:
        torch.manual_seed(0)
        model = without_dropout(gpt(vocabulary=29, dim=64, heads=4, layers=6))
        parameters, unit = (sum(p.nbytes for p in m.parameters()) for m in (model, model.h[0]))
        chance = torch.Generator().manual_seed(group.rank)
        ids = torch.randint(29, (2, 13), generator=chance)
        next_loss = NextLosses(
            model,
            [[(ids[:1, :-1], ids[:1, 1:]), (ids[1:, :-1], ids[1:, 1:])]] * 2,
            loss_of("gpt"),
            True,
        )
        mine = spread(
            group,
            model,
            stage,
            next_loss,
            nominal=2 * size,
            optimizer=torch.optim.AdamW,
            bucket_bytes=100_000,
            lookahead=lookahead,
        )
        peak = Peak(mine.flat, mine.optimizer)
        for _ in range(2):
            mine.backward()
            mine.step()
        assert sum(v.nbytes for v in mine.params.values()) <= 1.02 * parameters / size
        return peak.nbytes, parameters, unit, max(s.length * 4 for s in mine.flat.spans)

    for measured, p, unit, bucket in World(size).run(main):
        g, o, here = p, 2 * p, 1 + lookahead  # at work, and beside it
        formula = {
            1: p + g + o / size,
            2: p + (g + o) / size + here * bucket,
            3: (p + g + o) / size + here * 2 * unit,
        }[stage]
        assert abs(measured / formula - 1) < 0.05, (
            f"{measured} bytes held, {formula:.0f} by the formula"
        )


# -- merging between replicas that are themselves spread --

RULES: dict[str, Strategy[Any, Any]] = {
    "all_reduce": AllReduce(),
    "local_sgd": LocalSGD(period=2, moments="average"),
    "diloco": DiLoCo(period=2),
    "easgd": EASGD(period=2),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rule", RULES)
def test_a_strategy_between_spread_replicas_does_what_it_does_between_plain_ones(
    rule: str, stage: int
) -> None:
    data, loss, strategy = data_of("mlp", 4, 16), MLP["loss"], RULES[rule]
    rounds = 4 if rule == "all_reduce" else 2
    nominal = 16 if rule == "all_reduce" else 8
    shares = [10, 6]  # of the two replicas

    def plain(group: Group) -> Tensors:
        model = MLP["make"]()
        made = OPTIMIZERS["adam"](model.parameters())
        flat = FlatParameters(model, lambda n, t: torch.zeros(n, dtype=t), 2**20)
        next_loss = NextLosses(model, [[cut(b, shares)[group.rank]] for b in data], loss, False)
        return merged(
            ModuleReplica(flat, WholeUpdate(flat, model, made), next_loss, nominal=nominal),
            group,
            model,
        )

    def merged(mine: ModuleReplica, link: Group, model: nn.Module) -> Tensors:
        kept = strategy.init(mine)
        for _ in range(rounds):
            strategy.round(mine, link, kept)
        spread_out = isinstance(mine.flat, ShardedParameters)
        return model_state(mine.flat) if spread_out else state.model_state(model)

    layout = Layout(data=2, shard=2)

    def both(world: Group) -> Tensors:
        where, model = layout.coordinates(world.rank), MLP["make"]()
        inside, between = (
            Axis(world, layout.peers(world.rank, axis)) for axis in ("shard", "data")
        )
        steps = []
        for b in data:
            of_replica = cut(b, shares)[where["data"]]
            n = len(of_replica[0])
            steps.append([cut(of_replica, [n - n // 3, n // 3])[where["shard"]]])
        mine = spread(
            inside,
            model,
            stage,
            NextLosses(model, steps, loss, True),
            nominal=nominal,
            optimizer=OPTIMIZERS["adam"],
        )
        return merged(mine, between, model)

    needed, got = World(2).run(plain), World(4).run(both)
    for rank, model in enumerate(got):
        assert_tensors_close(model, needed[layout.coordinates(rank)["data"]], rtol=1e-10)


# -- the rest of what a replica can --


@pytest.mark.parametrize("stage", STAGES)
def test_other_values_are_held_for_a_while_and_the_model_runs_on_them(stage: int) -> None:
    data, loss = data_of("gpt", 2, 4), loss_of("gpt")
    plain = model_of("gpt")
    with torch.no_grad():
        before = float(loss(plain, data[1]))
        for p in plain.parameters():
            p.mul_(0.5)
        smaller = float(loss(plain, data[1]))

    def main(group: Group) -> None:
        model = model_of("gpt")
        mine = spread(group, model, stage, None, nominal=4, optimizer=OPTIMIZERS["sgd"])
        half = {k: v * 0.5 for k, v in mine.params.items()}
        with torch.no_grad():
            with mine.holding(half):
                assert float(loss(model, data[1])) == pytest.approx(smaller, rel=1e-12)
            with mine.holding(None):
                assert float(loss(model, data[1])) == pytest.approx(before, rel=1e-12)
        mine.load(half)
        with mine.holding(None), torch.no_grad():
            assert float(loss(model, data[1])) == pytest.approx(smaller, rel=1e-12)

    World(3).run(main)


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_is_skipped_by_all(stage: int) -> None:
    def main(group: Group) -> tuple[Tensors, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 5))
        x = torch.ones(4, 12) * (1e38 if group.rank == 1 else 1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        next_loss = NextLosses(model, [[(x,)]], lambda m, b: m(b[0]).square().mean(), True)
        mine = spread(
            group, model, stage, next_loss, nominal=8, optimizer=OPTIMIZERS["sgd"], scaler=scaler
        )
        start = model_state(mine.flat)
        mine.backward()
        mine.step()
        assert same_tensors(model_state(mine.flat), start)
        return start, scaler.get_scale()

    assert [scale for _, scale in World(2).run(main)] == [2.0**9, 2.0**9]


@pytest.mark.parametrize("stage", STAGES)
def test_closed_it_leaves_no_hook_behind(stage: int) -> None:
    def main(group: Group) -> None:
        model = model_of("gpt")
        mine = spread(group, model, stage, None, nominal=4, optimizer=OPTIMIZERS["sgd"])
        mine.close()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert all(type(m._parameters) is dict for m in model.modules())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    World(2).run(main)


def test_what_cannot_be_is_refused() -> None:
    def main(group: Group) -> None:
        memory, _ = shard_memory(group)
        model = model_of("mlp")
        with pytest.raises(PlanError, match="zero=4; needed: 1"):
            ShardedParameters(model, group, 4, allocate=memory)
        with pytest.raises(TaskError, match="LBFGS is not known to treat every element by itself"):
            ShardUpdate(
                ShardedParameters(model, group, 1, allocate=memory),
                torch.optim.LBFGS(model.parameters()),
            )
        next_loss = NextLosses(
            model, [[tuple(x[:0] for x in data_of("mlp", 1, 4)[0])]], MLP["loss"], False
        )
        mine = spread(group, model_of("mlp"), 3, next_loss, nominal=4, optimizer=OPTIMIZERS["sgd"])
        with pytest.raises(TaskError, match="no samples and did not run it"):
            mine.backward()
        with pytest.raises(TaskError, match="no parameter of the model trains"):
            ShardedParameters(model_of("mlp").requires_grad_(False), group, 2, allocate=memory)

    World(1).run(main)
