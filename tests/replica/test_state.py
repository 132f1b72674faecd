"""State by parameter name: a loaded replica continues with the same bits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lr

from manyhands.errors import CheckpointError
from manyhands.replica import state
from support.compare import same_tensors
from support.replicas import mlp, replica, rows, weights

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr.StepLR(o, 3, 0.5),
    "multi-step": lambda o: lr.MultiStepLR(o, [2, 5, 5, 7], 0.5),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.2, total_steps=12),
    "linear then cosine": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 8)], [3]
    ),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "chained": lambda o: lr.ChainedScheduler([lr.StepLR(o, 2, 0.9), lr.ExponentialLR(o, 0.95)]),
}
BATCHES = [rows(6, seed=s, dtype=torch.float32) for s in range(10)]


def build(optimizer: str, schedule: str | None, first: int = 0) -> tuple[nn.Module, Any]:
    model = mlp(torch.float32)
    made = None if schedule is None else SCHEDULES[schedule]
    return model, replica(
        model,
        [[b] for b in BATCHES[first:]],
        nominal=6,
        optimizer=OPTIMIZERS[optimizer],
        schedule=made,
    )


def steps(mine: Any, n: int) -> list[float]:
    rates = []
    for _ in range(n):
        mine.backward()
        mine.step()
        rates.append(float(mine.optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        *((o, None) for o in OPTIMIZERS),
        *(("momentum", s) for s in SCHEDULES),
        ("adam", "one cycle"),
    ],
    ids=str,
)
def test_four_steps_saved_and_loaded_into_a_fresh_model_then_six_are_ten_steps(
    optimizer: str, schedule: str | None
) -> None:
    whole, alone = build(optimizer, schedule)
    rates = steps(alone, 10)
    before, first = build(optimizer, schedule)
    steps(first, 4)
    tensors, meta = state.optimizer_state(before, first.optimizer)
    meta = json.loads(json.dumps(meta))  # a checkpoint's manifest is JSON
    kept = json.loads(
        json.dumps(None if first.schedule is None else state.to_plain(first.schedule.state_dict()))
    )
    saved = state.model_state(before)

    model, second = build(optimizer, schedule, first=4)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state.load_model(model, saved)
    state.load_optimizer(model, second.optimizer, tensors, meta)
    if second.schedule is not None:
        second.schedule.load_state_dict(state.from_plain(kept))
    assert steps(second, 6) == rates[4:]
    assert same_tensors(weights(model), weights(whole))


def test_saved_tensors_are_copies_that_later_steps_do_not_change() -> None:
    model, mine = build("adam", None)
    steps(mine, 2)
    saved, (tensors, _) = state.model_state(model), state.optimizer_state(model, mine.optimizer)
    copies = {k: v.clone() for k, v in (saved | tensors).items()}
    steps(mine, 1)
    assert same_tensors(copies, saved | tensors)


def test_groups_keep_their_own_settings_and_this_machine_chooses_its_own_kernels() -> None:
    def groups(model: nn.Module, rate: float, **how: Any) -> Optimizer:
        a, b = (
            [p for p in model.parameters() if p.ndim > 1],
            [p for p in model.parameters() if p.ndim <= 1],
        )
        return torch.optim.AdamW(
            [{"params": a, "weight_decay": 0.5}, {"params": b, "lr": rate * 10}], lr=rate, **how
        )

    ours, theirs = mlp(torch.float32), mlp(torch.float32)
    saved_from, loaded = groups(ours, 0.01, fused=True), groups(theirs, 0.5, foreach=False)
    tensors, meta = state.optimizer_state(ours, saved_from)
    state.load_optimizer(theirs, loaded, tensors, json.loads(json.dumps(meta)))
    assert [(g["lr"], g["weight_decay"]) for g in loaded.param_groups] == [(0.01, 0.5), (0.1, 0.01)]
    assert all(g["foreach"] is False and not g["fused"] for g in loaded.param_groups)
    fewer = torch.optim.AdamW(theirs.parameters())
    with pytest.raises(
        CheckpointError,
        match="the checkpoint's optimizer has 2 parameter groups, this one 1; use the same "
        "optimizer",
    ):
        state.load_optimizer(theirs, fewer, tensors, meta)


def test_a_checkpoint_of_another_model_is_refused_with_every_name_and_shape_that_differs() -> None:
    ours = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    theirs = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    before = weights(ours)
    with pytest.raises(CheckpointError) as refused:
        state.load_model(ours, state.model_state(theirs))
    text = str(refused.value)
    assert text.startswith("the checkpoint is of another model:")
    for line in (
        "only in the checkpoint: 1.running_mean (5,)",
        "other shape: 0.weight: model (3, 4), checkpoint (5, 4)",
        "other shape: 0.bias: model (3,), checkpoint (5,)",
        "other shape: 1.weight: model (2, 3), checkpoint (5,)",
    ):
        assert line in text
    assert same_tensors(before, weights(ours)), "nothing was loaded"
    with pytest.raises(CheckpointError, match=r"only in the model:      1\.weight \(2, 3\)"):
        state.load_model(ours, state.model_state(nn.Sequential(nn.Linear(4, 3))))


def test_tied_weights_are_saved_and_loaded() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    a, b = tied(), tied()
    state.load_model(b, state.model_state(a))
    assert same_tensors(weights(a), weights(b)) and b[1].weight is b[0].weight


def test_every_generator_goes_on_where_it_was() -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(())),
            float(torch.randn(())),
        ]

    state.seed_everything(7, 3)
    draw()
    saved = {k: v.clone() for k, v in state.rng_state(CPU).items()}
    assert all(v.dtype == torch.uint8 for v in saved.values())
    expected = draw() + draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    state.load_rng(saved, CPU)
    assert draw() + draw() == expected


def test_ranks_and_seeds_draw_different_numbers_and_the_same_again() -> None:
    seen = set()
    for seed in range(5):
        for rank in range(5):
            state.seed_everything(seed, rank)
            first = (random.random(), float(np.random.rand()), float(torch.rand(())))
            state.seed_everything(seed, rank)
            assert first == (random.random(), float(np.random.rand()), float(torch.rand(())))
            seen.add(first)
    assert len(seen) == 25


def test_a_scheduler_state_becomes_json_without_functions() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for make in SCHEDULES.values():
        json.dumps(state.to_plain(make(optimizer).state_dict()))
