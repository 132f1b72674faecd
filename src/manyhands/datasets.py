"""Small real data sets for the demo, the examples and the tests, as tensors that a `Task` takes as they are.

    fashion_mnist()     70,000 pictures of clothes, [N, 1, 28, 28]       from a folder, the cache or its home on GitHub
    digits()             1,797 handwritten digits, enlarged to the same shape           inside scikit-learn, no network
    images()             the first of the two that is there, and its name
    tinyshakespeare()    1.1 million characters in rows of `block`               from a folder; else synthetic sentences
    text()               the same, and its name
    adult()             48,842 people of a census and whether they earn more than 50K, as ids and numbers    from a folder
    open_bandit()       60,000 pieces of clothing shown in a shop and whether they were clicked               from a folder
    clicks()             one of the two, or rows made up; and its name

Folders are searched in this order: the one given, $MANYHANDS_DATA, the user's cache.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import os
import random
import tempfile
import time
import urllib.request
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import TaskError

Pair = tuple[Tensor, Tensor]
Labelled = tuple[
    Tensor, Tensor, Tensor
]  # ids int64 [N, columns], numbers float32 [N, columns], label float32 [N]

FASHION_MNIST_HOME = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
)
FASHION_MNIST_SHA256 = {  # smallest first: without a network the first one fails and no time is lost
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
}
FASHION_MNIST_MEAN, FASHION_MNIST_STD = 0.2860, 0.3530  # of the training pixels scaled to 0-1
DOWNLOAD_S = 120.0  # all four files, 31 MB; a slower line is better served by a browser


# -- pictures --


def fashion_mnist(
    data: Path | str | None = None, *, home: str = FASHION_MNIST_HOME, timeout_s: float = 5.0
) -> tuple[Pair, Pair]:
    """(x, y) to train and (x, y) to test; x float32 [N, 1, 28, 28] with mean 0 and deviation 1, y int64 [N]."""
    folder = _fashion_mnist_folder(data, home, timeout_s)
    return _fashion_mnist_part(folder, "train"), _fashion_mnist_part(folder, "t10k")


def digits() -> tuple[Pair, Pair]:
    """Scikit-learn's 8x8 digits enlarged to [N, 1, 28, 28], shuffled once and for all: 1,437 to train, 360 to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise TaskError(
            "the digits data set comes with scikit-learn, which is not installed: pip install 'manyhands[sklearn]', "
            "or set MANYHANDS_DATA to a folder with Fashion-MNIST"
        ) from e
    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).to(torch.float32).view(-1, 1, 8, 8) / 16
    x = torch.nn.functional.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    y = torch.from_numpy(labels).to(torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    std, mean = torch.std_mean(x[train])
    x = (x - mean) / std
    return (x[train], y[train]), (x[test], y[test])


def images(
    data: Path | str | None = None, *, home: str = FASHION_MNIST_HOME, timeout_s: float = 5.0
) -> tuple[str, Pair, Pair]:
    """Fashion-MNIST where it can be had, else digits; the name says which and why. Damaged files are an error."""
    try:
        folder = _fashion_mnist_folder(data, home, timeout_s)
    except TaskError as absent:
        train, test = digits()
        return f"digits ({absent})", train, test
    return (
        "Fashion-MNIST",
        _fashion_mnist_part(folder, "train"),
        _fashion_mnist_part(folder, "t10k"),
    )


def read_idx(path: Path) -> np.ndarray:
    """The array of bytes in an IDX file, gzipped or not: magic 0x0000_08_<dims>, one uint32 a dim, then the bytes."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as e:
            raise TaskError(f"{path}: damaged gzip file ({e}); delete it and get it again") from e
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or not 1 <= raw[3] <= 4:
        raise TaskError(
            f"{path}: starts with {raw[:4].hex() or 'nothing'}, an IDX file of bytes starts with 000008 and 01 to 04"
        )
    num_dims = raw[3]
    header = 4 + 4 * num_dims
    if len(raw) < header:
        raise TaskError(
            f"{path}: truncated in its header, {len(raw)} of {header} bytes; get it again"
        )
    shape = [int(n) for n in np.frombuffer(raw, dtype=">u4", count=num_dims, offset=4)]
    needed = header + int(np.prod(shape, dtype=object))
    if len(raw) != needed:
        what = "truncated" if len(raw) < needed else "too long"
        raise TaskError(
            f"{path}: {what}, {len(raw)} bytes where shape {shape} needs {needed}; get it again"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


def _fashion_mnist_part(folder: Path, part: str) -> Pair:
    pixels = read_idx(_either(folder, f"{part}-images-idx3-ubyte.gz"))
    labels = read_idx(_either(folder, f"{part}-labels-idx1-ubyte.gz"))
    if pixels.shape[1:] != (28, 28) or labels.shape != pixels.shape[:1]:
        raise TaskError(
            f"{folder}: {part} images of shape {list(pixels.shape)} with labels of shape {list(labels.shape)}; "
            "Fashion-MNIST has [N, 28, 28] and [N]"
        )
    x = torch.from_numpy(pixels.astype(np.float32)).unsqueeze(1)
    # (p / 255 - mean) / std, in place: 188 MB are moved twice, not four times
    x.sub_(255 * FASHION_MNIST_MEAN).div_(255 * FASHION_MNIST_STD)
    return x, torch.from_numpy(labels.astype(np.int64))


def _fashion_mnist_folder(data: Path | str | None, home: str, timeout_s: float) -> Path:
    searched = _folders(data)
    for folder in searched:
        for place in (folder / "fashion-mnist", folder):
            if all(_either(place, name).is_file() for name in FASHION_MNIST_SHA256):
                return place
    target = cache() / "fashion-mnist"
    try:
        deadline = time.monotonic() + DOWNLOAD_S
        for name, sha256 in FASHION_MNIST_SHA256.items():
            if not (target / name).is_file():
                _download(home.rstrip("/") + "/" + name, target / name, sha256, timeout_s, deadline)
    except (
        OSError,
        ValueError,
    ) as e:  # URLError is an OSError; ValueError: an address that is none
        raise TaskError(
            f"Fashion-MNIST not found in {', '.join(map(str, searched))} (or fashion-mnist/ there), download failed: {e}; "
            "set MANYHANDS_DATA to a folder that has it"
        ) from e
    return target


def _download(address: str, path: Path, sha256: str, timeout_s: float, deadline: float) -> None:
    """Fetch, check, and only then let it appear under its name: other processes see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with open(fd, "wb") as file, urllib.request.urlopen(address, timeout=timeout_s) as response:
            while chunk := response.read(1 << 18):
                digest.update(chunk)
                file.write(chunk)
                if time.monotonic() > deadline:
                    raise OSError(f"{address} takes longer than {DOWNLOAD_S:.0f} s")
        if digest.hexdigest() != sha256:
            raise OSError(f"{address} has sha256 {digest.hexdigest()}, not {sha256}")
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


# -- text --


def tinyshakespeare(data: Path | str | None = None, block: int = 64) -> tuple[Pair, Pair, int]:
    """Rows of `block` character ids and the same moved on by one: ((x, y) train, (x, y) test, how many characters there are)."""
    name, train, test, vocabulary = text(data, block)
    if name != "tinyshakespeare":
        warnings.warn(f"using {name}", stacklevel=2)
    return train, test, vocabulary


def text(data: Path | str | None = None, block: int = 64) -> tuple[str, Pair, Pair, int]:
    """Tinyshakespeare where it is found, else synthetic sentences; the name says which. First 90% train, the rest test."""
    searched = _folders(data)
    places = [
        place / "tinyshakespeare.txt" for folder in searched for place in (folder / "text", folder)
    ]
    found = next((p for p in places if p.is_file()), None)
    if found is not None:
        name, characters = "tinyshakespeare", found.read_text(encoding="utf-8")
    else:
        name, characters = (
            f"synthetic text (tinyshakespeare.txt not found in {', '.join(map(str, searched))})",
            _sentences(),
        )
    codes = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)
    alphabet, ids = np.unique(codes, return_inverse=True)
    cut = len(ids) * 9 // 10
    train, test = _rows(ids[:cut], block), _rows(ids[cut:], block)
    return name, train, test, len(alphabet)


def _rows(ids: np.ndarray, block: int) -> Pair:
    if not 1 <= block < len(ids):
        raise TaskError(
            f"block={block}, but the text has {len(ids)} characters to cut from; use 1 to {len(ids) - 1}"
        )
    n = (len(ids) - 1) // block
    stream = torch.from_numpy(ids.astype(np.int64))
    return stream[: n * block].view(n, block).clone(), stream[1 : n * block + 1].view(
        n, block
    ).clone()


def _sentences(num_characters: int = 200_000) -> str:
    """English-looking lines with a grammar to learn, the same on every machine."""
    dice = random.Random(0)
    nouns = "king queen fool ghost soldier sister letter crown river winter garden morning".split()
    verbs = "sees follows forgets praises fears answers carries betrays".split()
    adjectives = "old bright silent gentle broken wicked golden weary".split()
    lines: list[str] = []
    length = 0
    while length < num_characters:
        subject, other = dice.sample(nouns, 2)
        line = f"The {dice.choice(adjectives)} {subject} {dice.choice(verbs)} the {other}"
        line += (
            dice.choice(
                [".", "!", f", and the {dice.choice(adjectives)} {other} {dice.choice(verbs)} him."]
            )
            + "\n"
        )
        lines.append(line)
        length += len(line)
    return "".join(lines)


# -- rows of ids and numbers --

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
    """32,561 people to train and 16,281 to test: 8 columns of ids, 5 of numbers with mean 0 and deviation 1 in training, and 1
    where the income is above 50K. A missing field is an id like any other."""
    folder = _find(data, "adult", ("adult.data", "adult.test"), "Adult (census income)")
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
                f"{folder / name}: row {bad} has {len(rows[bad])} fields, {len(ADULT_COLUMNS)} are needed; get it again"
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
    """The small version, both policies and all three campaigns: 48,000 impressions to train and the later 12,000 to test. 9
    columns of ids (item, position, what is known of user and item), 3 of numbers (the item's, and how much the user liked this
    item and all of them), and 1 where it was clicked: in 287 rows."""
    names = [
        (policy, campaign) for policy in ("random", "bts") for campaign in ("all", "men", "women")
    ]
    needed = [f"{p}-{c}{end}" for p, c in names for end in (".csv.gz", "-item_context.csv")]
    folder = _find(data, "open-bandit", needed, "The Open Bandit Dataset")
    parts: list[Labelled] = []
    tests: list[Labelled] = []
    for policy, campaign in names:
        with open(folder / f"{policy}-{campaign}-item_context.csv", newline="") as file:
            items = {row["item_id"]: row for row in csv.DictReader(file)}
        with gzip.open(folder / f"{policy}-{campaign}.csv.gz", "rt", newline="") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: row["timestamp"])
        joined = [{**row, **items[row["item_id"]]} for row in rows]
        values = {name: [row[name] for row in joined] for name in OPEN_BANDIT_IDS}
        values["item_id"] = [
            f"{campaign}/{item}" for item in values["item_id"]
        ]  # campaigns number their items apart
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
    """`adult` or `open_bandit` where it is found, else rows made up; the name says which and why."""
    known = {"adult": adult, "open_bandit": open_bandit}
    if which not in known:
        raise TaskError(f"which={which!r}, but {' or '.join(known)} is needed")
    try:
        return which, *known[which](data)
    except Absent as absent:
        return f"made-up clicks ({absent})", *made_up_clicks()


def made_up_clicks(
    num_train: int = 20_000, num_test: int = 5_000, seed: int = 0
) -> tuple[Labelled, Labelled]:
    """Power-law ids in 8 columns, 5 numbers, and a label that depends on both: the same on every machine."""
    dice = np.random.default_rng(seed)
    n = num_train + num_test
    ranks = np.minimum(dice.zipf(1.3, size=(n, 8)), 1000)
    ids = (ranks + 10_000 * np.arange(8)).astype(np.int64)
    weight = dice.normal(size=(8, 1001)) * 0.7
    numbers = dice.normal(size=(n, 5)).astype(np.float32)
    score = weight[np.arange(8), ranks].sum(1) + numbers @ dice.normal(size=5) * 0.5 - 1.0
    label = (dice.random(n) < 1 / (1 + np.exp(-score))).astype(np.float32)
    whole = torch.from_numpy(ids), torch.from_numpy(numbers), torch.from_numpy(label)
    return tuple(t[:num_train] for t in whole), tuple(t[num_train:] for t in whole)  # type: ignore[return-value]


def hashed(column: str, value: str) -> int:
    """The id of a value in a column: 64 bits of a hash that is the same everywhere (Python's own is salted)."""
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


def _find(data: Path | str | None, under: str, names: Iterable[str], what: str) -> Path:
    searched = _folders(data)
    for folder in searched:
        for place in (folder / under, folder):
            if all((place / name).is_file() for name in names):
                return place
    raise Absent(
        f"{what} not found in {', '.join(map(str, searched))} (or {under}/ there); set MANYHANDS_DATA to a folder that has it"
    )


class Absent(TaskError):
    """A data set that is nowhere: what can do without catches this, and nothing that is damaged."""


# -- where things are --


def cache() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/manyhands, else ~/.cache/manyhands."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "manyhands"


def _folders(data: Path | str | None) -> list[Path]:
    named = [data, os.environ.get("MANYHANDS_DATA"), cache()]
    return list(dict.fromkeys(Path(folder).expanduser() for folder in named if folder))


def _either(folder: Path, name: str) -> Path:
    """The gzipped file, or its unpacked twin where only that is there."""
    plain = folder / name.removesuffix(".gz")
    return plain if plain.is_file() and not (folder / name).is_file() else folder / name
