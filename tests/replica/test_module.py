"""One replica: what it computes is what a plain torch loop computes on the same samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.replica.flat import FlatParameters
from support.compare import assert_tensors_close, same_tensors
from support.replicas import memory, mlp, replica, rows, sgd, squared, train_alone, weights
from support.small_task import saved_weights, small_task

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def run(model: nn.Module, steps: list[list[Tensor]], **options: Any) -> list[float]:
    mine = replica(model, steps, **{"nominal": sum(map(len, steps[0])), **options})
    losses = []
    for _ in steps:
        losses.append(float(mine.backward()))
        mine.step()
    return losses


def plain(
    model: nn.Module,
    batches: list[Tensor],
    optimizer: Callable[[Any], Optimizer],
    clip: float | None = None,
) -> list[float]:
    made, losses = optimizer(model.parameters()), []
    for batch in batches:
        made.zero_grad()
        loss = squared(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_alone_it_is_a_plain_torch_loop_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    batches = [rows(6, seed=s, dtype=dtype) for s in range(5)]
    ours, theirs = mlp(dtype), mlp(dtype)
    losses = run(ours, [[b] for b in batches], optimizer=OPTIMIZERS[name])
    assert losses == plain(theirs, batches, OPTIMIZERS[name])
    assert same_tensors(weights(ours), weights(theirs))


def test_accumulated_micro_batches_are_one_batch_however_ragged() -> None:
    whole = [rows(12, seed=s) for s in range(3)]
    ragged = [
        list(whole[0].split([5, 1, 6])),
        list(whole[1].split([4, 4, 4])),
        list(whole[2].split([1, 10, 1])),
    ]
    ours = mlp()
    losses = run(ours, ragged, nominal=12)
    theirs = mlp()
    assert losses == pytest.approx(run(theirs, [[b] for b in whole]), rel=1e-12)
    assert_tensors_close(weights(ours), weights(theirs))


def test_token_counts_weigh_a_micro_batch_and_not_its_number_of_rows() -> None:
    """Means of means over-weight short sequences; a step that says its count does not."""
    tokens = rows(20)
    lengths = torch.tensor([9, 1, 2, 8])
    sequences = tokens.split(lengths.tolist())

    def masked(model: nn.Module, micro: Tensor) -> tuple[Tensor, int]:
        mask = micro.isnan().logical_not().all(-1)
        kept = micro[mask]
        return squared(model, kept), len(kept)

    padded = nn.utils.rnn.pad_sequence(
        list(sequences), batch_first=True, padding_value=float("nan")
    )
    ours, wrong = mlp(), mlp()
    run(
        ours, [[padded[:1], padded[1:2], padded[2:]]], loss=masked, nominal=4
    )  # nominal is a scale only
    run(
        wrong, [[padded[:1], padded[1:2], padded[2:]]], loss=lambda m, x: masked(m, x)[0], nominal=4
    )
    theirs = train_alone([tokens])
    assert_tensors_close(weights(ours), theirs)
    with pytest.raises(AssertionError):
        assert_tensors_close(weights(wrong), theirs, rtol=1e-3)


def test_a_partial_window_is_applied_and_divided_by_what_it_has() -> None:
    ours, theirs = mlp(), mlp()
    first, last = rows(12), rows(5, seed=1)
    run(ours, [list(first.split(4)), list(last.split(4))], nominal=12)
    run(theirs, [[first], [last]], nominal=12)
    assert_tensors_close(weights(ours), weights(theirs))


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_clipping_is_torchs_own_clip_of_the_whole_gradient(clip: float) -> None:
    batches = [rows(8, seed=s) for s in range(3)]
    ours, theirs = mlp(), mlp()
    run(ours, [list(b.split(3)) for b in batches], clip=clip)
    plain(theirs, batches, sgd, clip)
    assert_tensors_close(weights(ours), weights(theirs), rtol=1e-11)


# -- parameters of all kinds --


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (
            mlp(),
            nn.Linear(5, 5).double(),
            nn.Linear(5, 5).double(),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x + self.frozen(x))


def test_unused_parameters_are_named_once_and_left_as_they_are_also_by_weight_decay() -> None:
    torch.manual_seed(2)
    model = Partly()
    before, named = weights(model), []
    run(
        model,
        [[rows(4)]] * 3,
        optimizer=lambda p: torch.optim.AdamW(p, weight_decay=0.5),
        on_first=lambda unused, views: unused and named.append(unused),
    )
    after = weights(model)
    assert named == [["unused.weight", "unused.bias"]]
    for key in before:
        assert torch.equal(before[key], after[key]) == key.startswith(("unused", "frozen")), key


def test_a_parameter_used_in_one_micro_batch_only_keeps_that_gradient() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.extra = mlp(), nn.Linear(5, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.always(x) + (self.extra(x).squeeze(-1) if len(x) == 3 else 0)

    named: list[list[str]] = []
    models = []
    for order in ([3, 4], [4, 3]):
        torch.manual_seed(3)
        model = Sometimes()
        three, four = rows(3), rows(4, seed=1)
        seen: list[Any] = []
        mine = replica(
            model,
            [[three if n == 3 else four for n in order]],
            nominal=7,
            on_first=lambda unused, views: unused and named.append(unused),
            bucket_bytes=1,
        )
        mine.backward(on_ready=seen.append)
        mine.step()
        assert [name for part in seen for name in part] == [b.name for b in mine.flat.buckets], (
            "every bucket once, in order"
        )
        models.append(weights(model))
    assert not named
    assert_tensors_close(models[0], models[1])


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    ours, theirs = Tied(), Tied()
    mine = replica(ours, [[tokens]], nominal=4, loss=loss)
    assert [p.name for p in mine.flat.views] == ["embed.weight"]
    mine.backward()
    mine.step()
    optimizer = sgd(theirs.parameters())
    loss(theirs, tokens).backward()
    optimizer.step()
    assert ours.head.weight is ours.embed.weight
    assert_tensors_close(weights(ours), weights(theirs), rtol=1e-6)


def test_channels_last_weights_keep_their_layout_and_train_the_same() -> None:
    def images(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).double()

    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = make().to(memory_format=torch.channels_last), make()
    strides = [p.stride() for p in ours.parameters()]
    run(ours, [[x.to(memory_format=torch.channels_last)]], loss=images, nominal=2)
    run(theirs, [[x]], loss=images, nominal=2)
    assert [p.stride() for p in ours.parameters()] == strides
    assert_tensors_close(weights(ours), weights(theirs))


def test_parameters_of_several_dtypes_share_a_step_and_a_clip() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.single, self.double_ = nn.Linear(5, 4), nn.Linear(4, 1).double()
            self.short = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.double_((self.single(x.float()) * self.short).double()).squeeze(-1)

    ours, theirs = Mixed(), Mixed()
    batches = [rows(6, seed=s) for s in range(3)]
    run(ours, [[b] for b in batches], clip=0.5)
    plain(
        theirs,
        batches,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
        clip=0.5,
    )
    assert {v.dtype for v in replica(ours, [], nominal=1).params.values()} == {
        torch.float32,
        torch.float64,
        torch.bfloat16,
    }
    for k, v in weights(theirs).items():
        torch.testing.assert_close(
            weights(ours)[k], v, rtol=1e-2 if v.dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )


def test_parameter_groups_keep_their_own_settings() -> None:
    def groups(model: nn.Module) -> Optimizer:
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        return torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": 0.5},
                {"params": rest, "lr": 0.1, "weight_decay": 0.0},
            ],
            lr=0.01,
            fused=True,
        )

    batches = [rows(6, seed=s) for s in range(3)]
    ours, theirs = mlp(), mlp()
    run(ours, [[b] for b in batches], optimizer=lambda p: groups(ours))
    plain(theirs, batches, lambda p: groups(theirs))
    assert same_tensors(weights(ours), weights(theirs))


def test_a_schedule_moves_once_a_step_whatever_the_micro_batches() -> None:
    model = mlp()
    mine = replica(
        model,
        [list(rows(6).split(2))] * 4,
        nominal=6,
        schedule=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3], gamma=0.1),
    )
    rates = []
    for _ in range(4):
        mine.backward()
        mine.step()
        rates.append(mine.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.001, 0.001])


# -- flat vectors --


def test_parameters_are_aligned_views_of_one_vector_and_the_padding_stays_zero() -> None:
    model = mlp(torch.float32)
    before = weights(model)
    mine = replica(model, [[rows(4, dtype=torch.float32)]], nominal=4)
    assert same_tensors(before, weights(model)), "laying out must not change a value"
    (values,) = mine.params.values()
    inside = torch.zeros(len(values), dtype=torch.bool)
    for p in model.parameters():
        start = (p.data_ptr() - values.data_ptr()) // 4
        assert (p.data_ptr() - values.data_ptr()) % 64 == 0
        inside[start : start + p.numel()] = True
    mine.backward()
    mine.grads
    mine.step()
    assert not values[~inside].any() and inside.sum() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("bucket_bytes", [1, 100, 400, 2**20])
def test_buckets_cover_every_gradient_once_from_the_back(bucket_bytes: int) -> None:
    flat = FlatParameters(mlp(torch.float32), memory, bucket_bytes)
    order = [i for b in flat.buckets for i in reversed(b.views)]
    assert order == list(reversed(range(len(flat.views))))
    assert sum(b.grad.numel() for b in flat.buckets) == flat.grads["float32"].numel()
    assert len(flat.buckets) == (1 if bucket_bytes == 2**20 else len(flat.buckets)) and len(
        flat.buckets
    ) <= len(flat.views)


def test_the_first_bucket_leaves_while_backward_still_runs() -> None:
    model = mlp()
    mine = replica(model, [[rows(4)]], nominal=4, bucket_bytes=1)
    still_missing: list[int] = []
    mine.backward(
        on_ready=lambda part: still_missing.append(sum(not done for done in mine.window.in_flat))
    )
    assert still_missing == [5, 4, 3, 2, 1, 0]


def test_load_writes_through_to_the_module() -> None:
    ours, theirs = mlp(), mlp()
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(2).add_(1)
    a, b = replica(ours, [], nominal=1), replica(theirs, [], nominal=1)
    a.load({k: v.clone() for k, v in b.params.items()})
    assert same_tensors(weights(ours), weights(theirs))


def test_a_copy_of_the_model_made_before_is_not_touched() -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    before = weights(twin)
    run(model, [[rows(4)]])
    assert same_tensors(before, weights(twin))


def test_a_parameter_that_thaws_during_training_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
    net[0].requires_grad_(False)

    class Thaw(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            net[0].requires_grad_(True)

    with pytest.raises(mh.TaskError, match="frozen when training started"):
        mh.train(
            lambda: small_task(net),
            "steps=3",
            directory=tmp_path / "run",
            quiet=True,
            callbacks=(Thaw(),),
        )


class Again(nn.Module):
    """A layer that is used twice under reentrant checkpointing: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.again, x, use_reentrant=True)  # type: ignore[assignment]
        out: Tensor = self.last(x)
        return out


class Seen(nn.Module):
    """BatchNorm, a reshape by batch size that an empty batch would break, and a branch that only
    some ranks take.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.sometimes, self.last = nn.Linear(4 * 36, 4 * 36), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        x = x.view(x.size(0), -1)
        if float(x.detach().sum()) > 0:
            x = self.sometimes(x)
        out: Tensor = self.last(x.relu())
        return out


def test_over_ranks_reentrant_checkpoints_are_refused_and_batchnorm_keeps_its_order(
    tmp_path: Path,
) -> None:
    with pytest.raises(mh.LaunchError, match="use_reentrant=False"):
        mh.train(
            lambda: small_task(Again()),
            "data=2 steps=2 bucket_mb=0.0001",
            directory=tmp_path / "again",
            quiet=True,
        )
    images = (
        torch.randn(33, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(33) % 3,
    )  # one left over
    words = "data=2 epochs=2 bucket_mb=0.0001"
    result = mh.train(
        lambda: small_task(Seen(), train=images), words, directory=tmp_path / "seen", quiet=True
    )
    assert result.epochs == 2.0 and all(
        v.isfinite().all() for v in saved_weights(tmp_path / "seen").values()
    )
