"""`manyhands demo` trains, measures, and names the picture it wrote.

A wrong data folder is refused before any process starts.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from manyhands import datasets
from manyhands.cli import demo as verb
from manyhands.errors import TaskError


def small_fashion_mnist(folder: Path, train: int = 300, test: int = 50) -> Path:
    """A folder of the real layout with few pictures: each label is a bright row of its own."""
    folder.mkdir(parents=True)
    dice = np.random.default_rng(0)
    for part, n in ("train", train), ("t10k", test):
        labels = dice.integers(0, 10, n, dtype=np.uint8)
        pixels = dice.integers(0, 40, (n, 28, 28), dtype=np.uint8)
        pixels[np.arange(n), 4 + 2 * labels] = 255
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, n) + labels.tobytes()
        )
        (folder / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, n, 28, 28) + pixels.tobytes()
        )
    return folder


def test_the_demo_ends_with_accuracy_speed_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "RUNS", 1)
    monkeypatch.setattr(verb, "TIMED_STEPS", 5)
    small_fashion_mnist(tmp_path / "data" / "fashion-mnist")
    verb.demo(tmp_path / "data", workers=2, epochs=2)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert (
        f"Fashion-MNIST, found in {tmp_path / 'data'}: 300 pictures to train on, 50 to test"
        in lines["data"]
    )
    assert "2 processes" in lines["training"]
    assert "% of the test pictures" in lines["accuracy"]
    assert "x over one process (medians: " in lines["speed-up"] and "samples/s" in lines["speed-up"]
    assert (tmp_path / lines["picture"].split()[1]).stat().st_size > 1000
    assert [p.name.split("-")[0] for p in (tmp_path / "runs").iterdir()] == [
        "demo"
    ]  # the timed runs leave nothing


def test_one_process_is_compared_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verb.demo(small_fashion_mnist(tmp_path / "data"), workers=1, epochs=1)
    assert "speed-up    not measured" in capsys.readouterr().out


def test_a_wrong_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"--data .*missing: there is no such folder; give the one"):
        verb.demo(tmp_path / "missing", workers=2, epochs=1)
    with pytest.raises(
        TaskError,
        match=r"does not hold Fashion-MNIST: t10k-labels.* are needed there or in fashion-mnist/ "
        r"there",
    ):
        verb.demo(tmp_path, workers=2, epochs=1)
    (small_fashion_mnist(tmp_path / "torn") / "train-images-idx3-ubyte").write_bytes(
        b"\x00\x00\x08\x03"
    )
    with pytest.raises(TaskError, match="truncated"):
        verb.demo(tmp_path / "torn", workers=2, epochs=1)


def test_the_demo_says_why_it_uses_which_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MANYHANDS_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert verb._where(None) == ""
    small_fashion_mnist(datasets.cache() / "fashion-mnist")
    assert verb._where(None) == "found in the cache"
    small_fashion_mnist(tmp_path / "MANYHANDS_DATA")
    assert verb._where(None) == "found in MANYHANDS_DATA"


def test_the_speed_up_is_the_ratio_of_medians() -> None:
    text = verb.describe({1: [100.0, 90.0, 5000.0], 2: [150.0, 10.0, 160.0]}, 2)
    assert text.startswith("1.50x over one process (medians: 100 and 150 samples/s")
