"""Tabular data sets of ids and numbers: Adult, Open Bandit, and synthetic clicks."""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyhands.datasets.folders import DatasetNotFound, find
from manyhands.errors import TaskError

# ids int64 [N, columns], numbers float32 [N, columns], label float32 [N]
Labelled = tuple[Tensor, Tensor, Tensor]

ADULT_COLUMNS = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
).split()
ADULT_IDS = (
    "workclass",
    "education",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native-country",
)
ADULT_NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
OPEN_BANDIT_IDS = (
    "item_id",
    "position",
    *(f"user_feature_{i}" for i in range(4)),
    *(f"item_feature_{i}" for i in range(1, 4)),
)


def adult(data: Path | str | None = None) -> tuple[Labelled, Labelled]:
    """Adult (census income): 32,561 people to train and 16,281 to test.

    8 columns of ids, 5 of numbers with mean 0 and deviation 1 in training; the label is 1 where the
    income is above 50K. A missing field is an id like any other.
    """
    folder = find(data, "adult", ("adult.data", "adult.test"), "Adult (census income)")
    parts = []
    for name in ("adult.data", "adult.test"):
        rows = [
            [field.strip() for field in line.split(",")]
            for line in (folder / name).read_text().splitlines()
            if line.strip()
        ]
        bad = next((i for i, row in enumerate(rows) if len(row) != len(ADULT_COLUMNS)), None)
        if bad is not None:
            raise TaskError(
                f"{folder / name}: row {bad} has {len(rows[bad])} fields, "
                f"{len(ADULT_COLUMNS)} are needed; get it again"
            )
        columns = dict(zip(ADULT_COLUMNS, zip(*rows, strict=True), strict=True))
        ids = _ids({name: columns[name] for name in ADULT_IDS})
        numbers = torch.tensor(
            [_floats(folder / name, c, columns[c]) for c in ADULT_NUMBERS]
        ).T.contiguous()
        numbers[:, 2:4].log1p_()  # capital: mostly 0, up to 99,999
        label = torch.tensor([float(v.startswith(">50K")) for v in columns["income"]])
        parts.append((ids, numbers, label))
    (ids, numbers, label), (ids_test, numbers_test, label_test) = parts
    std, mean = torch.std_mean(numbers, 0)
    return (ids, (numbers - mean) / std, label), (ids_test, (numbers_test - mean) / std, label_test)


def open_bandit(data: Path | str | None = None) -> tuple[Labelled, Labelled]:
    """Open Bandit, the small version, both policies and all three campaigns.

    48,000 impressions to train and the later 12,000 to test. 9 columns of ids (item, position,
    features of user and item), 3 of numbers (the item's, and how much the user liked this item and
    all of them); the label is 1 where the item was clicked: in 287 rows.
    """
    names = [
        (policy, campaign) for policy in ("random", "bts") for campaign in ("all", "men", "women")
    ]
    needed = [f"{p}-{c}{end}" for p, c in names for end in (".csv.gz", "-item_context.csv")]
    folder = find(data, "open-bandit", needed, "The Open Bandit Dataset")
    parts: list[Labelled] = []
    tests: list[Labelled] = []
    for policy, campaign in names:
        with open(folder / f"{policy}-{campaign}-item_context.csv", newline="") as file:
            items = {row["item_id"]: row for row in csv.DictReader(file)}
        with gzip.open(folder / f"{policy}-{campaign}.csv.gz", "rt", newline="") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: row["timestamp"])
        joined = [{**row, **items[row["item_id"]]} for row in rows]
        values = {name: [row[name] for row in joined] for name in OPEN_BANDIT_IDS}
        # each campaign numbers its items from 0
        values["item_id"] = [f"{campaign}/{item}" for item in values["item_id"]]
        liked = [
            [float(v) for k, v in row.items() if k.startswith("user-item_affinity_")]
            for row in rows
        ]
        numbers = [
            (
                float(row["item_feature_0"]),
                math.log1p(all_[int(row["item_id"])]),
                math.log1p(sum(all_)),
            )
            for row, all_ in zip(joined, liked, strict=True)
        ]
        whole = (
            _ids(values),
            torch.tensor(numbers),
            torch.tensor([float(row["click"]) for row in rows]),
        )
        cut = len(rows) * 4 // 5
        parts.append((whole[0][:cut], whole[1][:cut], whole[2][:cut]))
        tests.append((whole[0][cut:], whole[1][cut:], whole[2][cut:]))
    return _joined(parts), _joined(tests)


def clicks(which: str = "adult", data: Path | str | None = None) -> tuple[str, Labelled, Labelled]:
    """`adult` or `open_bandit` if found, else synthetic rows; the name says which and why."""
    known = {"adult": adult, "open_bandit": open_bandit}
    if which not in known:
        raise TaskError(f"which={which!r}, but {' or '.join(known)} is needed")
    try:
        return which, *known[which](data)
    except DatasetNotFound as absent:
        return f"made-up clicks ({absent})", *made_up_clicks()


def made_up_clicks(
    num_train: int = 20_000, num_test: int = 5_000, seed: int = 0
) -> tuple[Labelled, Labelled]:
    """Synthetic clicks: power-law ids in 8 columns, 5 numbers, and a label that depends on both.

    They are the same on every machine.
    """
    dice = np.random.default_rng(seed)
    n = num_train + num_test
    ranks = np.minimum(dice.zipf(1.3, size=(n, 8)), 1000)
    ids = (ranks + 10_000 * np.arange(8)).astype(np.int64)
    weight = dice.normal(size=(8, 1001)) * 0.7
    numbers = dice.normal(size=(n, 5)).astype(np.float32)
    score = weight[np.arange(8), ranks].sum(1) + numbers @ dice.normal(size=5) * 0.5 - 1.0
    label = (dice.random(n) < 1 / (1 + np.exp(-score))).astype(np.float32)
    whole = torch.from_numpy(ids), torch.from_numpy(numbers), torch.from_numpy(label)
    train = whole[0][:num_train], whole[1][:num_train], whole[2][:num_train]
    return train, (whole[0][num_train:], whole[1][num_train:], whole[2][num_train:])


def hashed(column: str, value: str) -> int:
    """The id of a value in a column: 64 bits of a hash.

    The hash is the same everywhere; Python's own is salted.
    """
    return int.from_bytes(
        hashlib.blake2b(f"{column}={value}".encode(), digest_size=8).digest(), "little", signed=True
    )


def _ids(columns: Mapping[str, Sequence[str]]) -> Tensor:
    hashes = []
    for name, values in columns.items():
        of = {value: hashed(name, value) for value in set(values)}
        hashes.append([of[value] for value in values])
    return torch.tensor(hashes, dtype=torch.int64).T.contiguous()


def _floats(path: Path, column: str, values: Sequence[str]) -> list[float]:
    try:
        return [float(value) for value in values]
    except ValueError as e:
        raise TaskError(f"{path}: column {column}: {e}; get the file again") from e


def _joined(parts: list[Labelled]) -> Labelled:
    ids, numbers, label = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, numbers, label
