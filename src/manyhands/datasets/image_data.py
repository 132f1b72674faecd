"""Image data sets: Fashion-MNIST, and scikit-learn's digits where that cannot be had."""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
import time
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyhands.datasets.folders import cache, folders
from manyhands.errors import TaskError

Pair = tuple[Tensor, Tensor]

FASHION_MNIST_HOME = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
)
# smallest first: without a network the first one fails and no time is lost
FASHION_MNIST_SHA256 = {
    "t10k-labels-idx1-ubyte.gz": (
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
    ),
    "train-labels-idx1-ubyte.gz": (
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
    ),
    "train-images-idx3-ubyte.gz": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
    ),
}
FASHION_MNIST_MEAN, FASHION_MNIST_STD = 0.2860, 0.3530  # of the training pixels scaled to 0-1
DOWNLOAD_S = 120.0  # limit for all four files, 31 MB; on a slower connection use a browser


def fashion_mnist(
    data: Path | str | None = None, *, home: str = FASHION_MNIST_HOME, timeout_s: float = 5.0
) -> tuple[Pair, Pair]:
    """Fashion-MNIST: (x, y) to train and (x, y) to test.

    x is float32 [N, 1, 28, 28] with mean 0 and deviation 1, y is int64 [N].
    """
    folder = _fashion_mnist_folder(data, home, timeout_s)
    return _fashion_mnist_part(folder, "train"), _fashion_mnist_part(folder, "t10k")


def digits() -> tuple[Pair, Pair]:
    """Scikit-learn's 8x8 digits enlarged to [N, 1, 28, 28]: 1,437 to train, 360 to test.

    The order is shuffled with a fixed seed, so it is the same everywhere.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise TaskError(
            "the digits data set comes with scikit-learn, which is not installed: "
            "pip install 'manyhands[sklearn]', or set MANYHANDS_DATA to a folder with Fashion-MNIST"
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
    """Fashion-MNIST where it can be had, else digits; the name says which and why.

    Damaged files are an error.
    """
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
    """The array of bytes in an IDX file, gzipped or not.

    The format: magic 0x0000_08_<dims>, one uint32 a dim, then the bytes.
    """
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as e:
            raise TaskError(f"{path}: damaged gzip file ({e}); delete it and get it again") from e
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or not 1 <= raw[3] <= 4:
        raise TaskError(
            f"{path}: starts with {raw[:4].hex() or 'nothing'}, "
            "an IDX file of bytes starts with 000008 and 01 to 04"
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
            f"{folder}: {part} images of shape {list(pixels.shape)} "
            f"with labels of shape {list(labels.shape)}; Fashion-MNIST has [N, 28, 28] and [N]"
        )
    x = torch.from_numpy(pixels.astype(np.float32)).unsqueeze(1)
    # (p / 255 - mean) / std, in place: 188 MB are moved twice, not four times
    x.sub_(255 * FASHION_MNIST_MEAN).div_(255 * FASHION_MNIST_STD)
    return x, torch.from_numpy(labels.astype(np.int64))


def _fashion_mnist_folder(data: Path | str | None, home: str, timeout_s: float) -> Path:
    searched = folders(data)
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
    except (OSError, ValueError) as e:  # URLError is an OSError; ValueError: not an address
        raise TaskError(
            f"Fashion-MNIST not found in {', '.join(map(str, searched))} "
            f"(or fashion-mnist/ there), download failed: {e}; "
            "set MANYHANDS_DATA to a folder that has it"
        ) from e
    return target


def _download(address: str, path: Path, sha256: str, timeout_s: float, deadline: float) -> None:
    """Fetch, check, then rename: other processes see the whole file or none."""
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


def _either(folder: Path, name: str) -> Path:
    """The gzipped file; the unpacked one where only that exists."""
    plain = folder / name.removesuffix(".gz")
    return plain if plain.is_file() and not (folder / name).is_file() else folder / name
