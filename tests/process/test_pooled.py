"""Forms of data, BatchNorm and precision on three real ranks against one process.

All of them run in one job, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.entry import work
from manyhands.recover.checkpoint import Checkpoints
from support.pooled import start

SIZE, BATCH = 3, 4
N = 2 * SIZE * BATCH + 2  # two full steps, then two samples: rank 2 has none
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 6, generator=G, dtype=torch.float64), torch.randint(3, (N,), generator=G)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], Y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[i], Y[i]) for i in range(N)])


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)
    ).double()


def in_order(y_true: Any, y_pred: Any) -> float:
    """How far outputs and targets are in the order of the test data."""
    return float((y_true == Y[: len(y_true)].numpy()).mean() + np.arange(len(y_pred)) @ y_pred)


METRICS = {
    "accuracy": mh.accuracy,
    "f1": mh.metrics.F1(),
    "perplexity": mh.metrics.Perplexity(),
    "gathered": mh.metrics.Gathered(in_order, lambda outputs: outputs[:, 0]),
}


def counted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Only targets other than 0 count, as padding does not."""
    kept = batch["y"] != 0
    losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * kept).sum() / max(1, int(kept.sum())), int(kept.sum())


class Odd(nn.Module):
    """A frozen layer, one that is never used, one used twice, two dtypes, weights that lie
    channels-last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.pixels = nn.Conv2d(6, 4, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)
        self.double()
        self.single = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(self.frozen(x)).tanh()).tanh()
        return self.single(self.pixels(x[:, :, None, None]).flatten(1).float())


def groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.1, "weight_decay": 0.5}, {"params": rest, "amsgrad": True}],
        lr=0.01,
    )


def unseeded() -> nn.Module:
    """What a script that forgets to seed makes: other weights on every rank, trained, frozen and
    buffered ones.
    """
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
    model = nn.Sequential(
        nn.Linear(6, 16).requires_grad_(False), nn.BatchNorm1d(16), nn.Linear(16, 3)
    ).double()
    model.register_buffer("table", torch.randn(5, dtype=torch.float64))
    return model


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([float(i % 3) for i in range(N)], 30)


class Hardest(Sampler[int]):
    """Draws from three sources of random numbers, and counts its own epochs."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        first = [random.randrange(N), int(np.random.randint(N)), int(torch.randint(N, ()))]
        return iter([*first, *range(self.epochs, 20)][:20])


SUM: dict[str, Any] = {
    "reduction": "sum",
    "optimizer": lambda p: torch.optim.SGD(p, lr=0.005, momentum=0.9),
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensors": ("", {}),
    "dataset": ("", {"train": Rows(), "test": Rows()}),
    "loaders": ("loaders=2", {"train": Rows(), "test": Rows()}),
    "stream": ("split=ordered", {"train": Stream(), "test": Stream()}),
    "sampled": ("split=sampled", {}),
    "accumulate": ("accumulate=2", {}),
    "counted": (
        "",
        {
            "train": {"x": X, "y": Y},
            "test": {"x": X, "y": Y},
            "loss": None,
            "step": counted,
            "metrics": {},
        },
    ),
    "gloo": ("link=gloo bucket_mb=0.0001", {}),
    "clip": ("clip=0.05", {}),
    "rmsprop": ("", {"optimizer": lambda p: torch.optim.RMSprop(p, lr=0.01)}),
    "adam": ("", {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01)}),
    "adagrad": ("", {"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)}),
    "groups": ("", {"optimizer": groups}),
    "groups over gloo": ("link=gloo", {"optimizer": groups}),
    "odd": ("", {"model": Odd}),
    "odd over gloo": ("link=gloo bucket_mb=0.0001", {"model": Odd}),
    "unseeded": ("", {"model": unseeded}),
    "unseeded over gloo": ("link=gloo", {"model": unseeded}),
    "batchnorm": ("", {"model": normed}),
    "batchnorm dataset": ("", {"model": normed, "train": Rows(), "test": Rows()}),
    "batchnorm loaders": ("loaders=2", {"model": normed, "train": Rows(), "test": Rows()}),
    "batchnorm stream": ("split=ordered", {"model": normed, "train": Stream(), "test": Stream()}),
    "batchnorm gloo": ("link=gloo bucket_mb=0.0001", {"model": normed}),
    "local batchnorm": (
        "batchnorm=local",
        {"model": normed, "train": (X[:-2], Y[:-2])},
    ),  # of one sample there is no variance
    "fp16": (
        "precision=fp16",
        {"model": lambda: plain().float(), "train": (X.float(), Y), "test": (X.float(), Y)},
    ),
    "bf16": (
        "precision=bf16",
        {"model": lambda: plain().float(), "train": (X.float(), Y), "test": (X.float(), Y)},
    ),
    "sum": ("", {"loss": functools.partial(nn.functional.cross_entropy, reduction="sum"), **SUM}),
    "sum of a step": ("accumulate=2", {"loss": None, "metrics": {}, "step": summed, **SUM}),
    "metrics": ("", {"metrics": METRICS}),
    "metrics of a stream": ("", {"metrics": METRICS, "test": Stream()}),
    "metrics of fewer samples than ranks": ("", {"metrics": METRICS, "test": (X[:2], Y[:2])}),
    "metrics of a step": (
        "link=gloo",
        {
            "loss": None,
            "step": counted,
            "predict": lambda model, batch: (model(batch["x"]), batch["y"]),
            "train": {"x": X, "y": Y},
            "test": {"x": X, "y": Y},
            "metrics": METRICS,
        },
    ),
    "in order": ("", {"train": DataLoader(Rows(), BATCH, shuffle=False)}),
    "drop_last": ("", {"train": DataLoader(Rows(), BATCH, shuffle=True, drop_last=True)}),
    "drop_last stream": ("", {"train": DataLoader(Stream(), BATCH, drop_last=True)}),
    "weighted sampler": ("", {"train": DataLoader(Rows(), BATCH, sampler=weighted())}),
    "sampler with loaders": (
        "",
        {"train": DataLoader(Rows(), BATCH, sampler=weighted(), num_workers=2)},
    ),
    "own sampler": ("", {"train": DataLoader(Rows(), BATCH, sampler=Hardest())}),
    "subsets": (
        "",
        {
            "train": DataLoader(Rows(), BATCH, sampler=SubsetRandomSampler(range(20))),
            "test": DataLoader(Rows(), BATCH, sampler=SubsetRandomSampler(range(20, N))),
        },
    ),
}
# by their nature: another computation, another rounding, other weights to start from
DIFFERENT = ("local batchnorm", "fp16", "bf16", "unseeded", "unseeded over gloo")


def make(case: str, batch: int) -> mh.Task:
    known: dict[str, Any] = dict(
        model=plain,
        loss=nn.functional.cross_entropy,
        train=(X, Y),
        test=(X, Y),
        metrics={"accuracy": mh.accuracy},
        epochs=2,
        batch=batch,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    return mh.Task(**{**known, **CASES[case][1]})


class Keep(mh.Callback):
    """Every rank's own model and metrics after each epoch."""

    def __init__(self, folder: str):
        self.folder = folder

    def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
        state = run.trainer.replica.update.module.state_dict()
        numbers = {f"metric/{k}": torch.tensor(v, dtype=torch.float64) for k, v in metrics.items()}
        save_file(
            {**{k: v.clone().contiguous() for k, v in state.items()}, **numbers},
            f"{self.folder}/{epoch}-{run.rank}.safetensors",
        )


def one(case: str, folder: Path, words: dict[str, Any], batch: int, options: Options) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    given = dict(word.split("=") for word in CASES[case][0].split())
    kept = dataclasses.replace(
        options, directory=str(folder / "run"), callbacks=(Keep(str(folder)),)
    )
    work(functools.partial(make, case, batch), {**words, **given}, kept)


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    for case in CASES:
        one(case, Path(folder) / case, words, BATCH, options)
    return {}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pooled")
    start(functools.partial(every, str(folder)), f"data={SIZE} timeout_s=20", Options(quiet=True))
    return folder


def read(folder: Path, rank: int = 0, epoch: int = 1) -> dict[str, Tensor]:
    return load_file(folder / f"{epoch}-{rank}.safetensors")


@pytest.mark.parametrize("case", [c for c in CASES if c not in DIFFERENT])
def test_three_ranks_end_with_the_numbers_of_one_and_evaluate_the_same(
    ran: Path, case: str, tmp_path: Path
) -> None:
    one(case, tmp_path, {}, BATCH * SIZE, Options(quiet=True))
    ours, alone = read(ran / case), read(tmp_path)
    assert ours.keys() == alone.keys()
    for key in alone:
        rtol = (
            1e-5 if key == "metric/accuracy" or "odd" in case else 1e-10
        )  # a metric's own mean is float32, as is half of Odd
        torch.testing.assert_close(
            ours[key], alone[key], rtol=rtol, atol=rtol / 100, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_hold_the_same_bits_and_metrics_when_they_evaluate(ran: Path, case: str) -> None:
    for epoch in range(2):
        first = read(ran / case, 0, epoch)
        for rank in range(1, SIZE):
            other = read(ran / case, rank, epoch)
            assert first.keys() == other.keys() and all(
                torch.equal(first[k], other[k]) for k in first
            )


def test_local_batchnorm_evaluates_and_saves_the_average_of_the_ranks_statistics(ran: Path) -> None:
    folder = ran / "local batchnorm"
    saved = Checkpoints(folder / "run" / "checkpoints").latest()
    assert saved is not None
    last = read(folder)
    assert torch.equal(saved.params["1.running_mean"], last["1.running_mean"])
    net = normed()
    net.load_state_dict(saved.params)
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(net.eval()(X), Y)) == pytest.approx(
            float(last["metric/loss"]), rel=1e-12
        )
    assert not torch.allclose(last["1.running_mean"], read(ran / "batchnorm")["1.running_mean"]), (
        "another computation"
    )


@pytest.mark.parametrize("case", ["fp16", "bf16"])
def test_short_types_stay_near_and_their_scale_is_saved(ran: Path, case: str) -> None:
    for key, value in read(ran / "tensors").items():
        if not key.startswith("metric"):
            torch.testing.assert_close(read(ran / case)[key].double(), value, rtol=0.1, atol=0.02)
    saved = Checkpoints(ran / case / "run" / "checkpoints").latest()
    assert saved is not None and (saved.meta["scaler"] is None) == (case == "bf16")
    if case == "fp16":
        assert saved.meta["scaler"]["scale"] == 65536.0


def test_a_run_with_fewer_samples_a_step_than_ranks_goes_on_though_one_rank_never_has_any(
    tmp_path: Path,
) -> None:
    """Two samples a step were two ranks' one each; on three ranks the third only listens, from its
    first round on.
    """
    small = functools.partial(make, "fp16", 1)
    mh.train(small, "data=1 batch=2 precision=fp16 steps=3", directory=tmp_path / "run", quiet=True)
    result = mh.train(
        small,
        f"data={SIZE} precision=fp16 steps=6 timeout_s=20",
        directory=tmp_path / "run",
        resume=True,
        quiet=True,
    )
    assert result.rounds == 6
    assert os.listdir(tmp_path / "run" / "checkpoints")
