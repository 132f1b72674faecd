"""Data sets are found where the docstring says, complete; damage is refused with a reason."""

from __future__ import annotations

import gzip
import hashlib
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from manyhands import datasets
from manyhands.errors import TaskError

NOWHERE = "http://127.0.0.1:9/"  # the discard port: refuses at once


def idx(shape: tuple[int, ...], fill: bytes) -> bytes:
    return gzip.compress(
        struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape) + fill, mtime=0
    )


def write_small_fashion_mnist(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", 6), ("t10k", 4)):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(
            idx((n, 28, 28), bytes([0, 255]) * (n * 392))
        )
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx((n,), bytes(range(n))))
    return folder


@pytest.fixture(autouse=True)
def no_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing of this machine's data and cache is seen."""
    monkeypatch.delenv("MANYHANDS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def download_host(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = write_small_fashion_mnist(tmp_path / "served")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", folder
    server.shutdown()
    server.server_close()
    thread.join()


# -- Fashion-MNIST --


@pytest.mark.parametrize("under", ["", "fashion-mnist"])
def test_files_are_found_in_the_folder_or_its_sub_folder(tmp_path: Path, under: str) -> None:
    write_small_fashion_mnist(tmp_path / "d" / under)
    (x, y), (x_test, y_test) = datasets.fashion_mnist(tmp_path / "d", home=NOWHERE)
    assert (x.shape, x.dtype, y.dtype) == ((6, 1, 28, 28), torch.float32, torch.int64)
    assert y.tolist() == [0, 1, 2, 3, 4, 5] and y_test.tolist() == [0, 1, 2, 3] and len(x_test) == 4
    assert x[0, 0, 0, :2].tolist() == pytest.approx([-0.2860 / 0.3530, (1 - 0.2860) / 0.3530])


def test_the_variable_names_a_folder_and_an_argument_comes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_fashion_mnist(tmp_path / "variable")
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path / "variable"))
    assert len(datasets.fashion_mnist(home=NOWHERE)[0][0]) == 6
    given = write_small_fashion_mnist(tmp_path / "given")
    (given / "t10k-labels-idx1-ubyte.gz").write_bytes(idx((4,), bytes([9] * 4)))
    assert datasets.fashion_mnist(given, home=NOWHERE)[1][1].tolist() == [9] * 4


def test_unpacked_files_do_as_well(tmp_path: Path) -> None:
    folder = write_small_fashion_mnist(tmp_path / "d")
    for path in list(folder.iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert len(datasets.fashion_mnist(folder, home=NOWHERE)[0][0]) == 6


def test_what_is_nowhere_is_an_error_that_names_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path / "variable"))
    with pytest.raises(TaskError, match="download failed") as caught:
        datasets.fashion_mnist(tmp_path / "given", home=NOWHERE)
    for place in ("given", "variable", "cache"):
        assert str(tmp_path / place) in str(caught.value)


def test_a_download_is_checked_kept_and_not_repeated(
    download_host: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, folder = download_host
    sums = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in datasets.FASHION_MNIST_SHA256
    }
    monkeypatch.setattr(datasets.image_data, "FASHION_MNIST_SHA256", sums)
    assert len(datasets.fashion_mnist(home=home)[0][0]) == 6
    kept = tmp_path / "cache" / "manyhands" / "fashion-mnist"
    assert {p.name for p in kept.iterdir()} == set(sums)
    assert len(datasets.fashion_mnist(home=NOWHERE)[0][0]) == 6


def test_a_download_with_other_bytes_is_refused_and_leaves_no_file(
    download_host: tuple[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=r"download failed: .* has sha256"):
        datasets.fashion_mnist(home=download_host[0])
    assert list((tmp_path / "cache" / "manyhands" / "fashion-mnist").iterdir()) == []


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "starts with nothing"),
        (b"PK\x03\x04 not this", "starts with 504b0304"),
        (struct.pack(">I", 0x0D01) + bytes(8), "starts with 00000d01"),  # floats
        (struct.pack(">II", 0x0803, 5), "truncated in its header, 8 of 16 bytes"),
        (
            struct.pack(">II", 0x0801, 5) + bytes(4),
            "truncated, 12 bytes where shape \\[5\\] needs 13",
        ),
        (struct.pack(">II", 0x0801, 5) + bytes(6), "too long, 14 bytes"),
        (
            struct.pack(">IIII", 0x0803, 2**32 - 1, 2**32 - 1, 2**32 - 1),
            "truncated, 16 bytes where",
        ),
        (idx((50,), bytes(range(50)))[:-20], "damaged gzip file"),
        (b"\x1f\x8b\x08\x00" + bytes(20), "damaged gzip file"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(
    tmp_path: Path, raw: bytes, complaint: str
) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(raw)
    with pytest.raises(TaskError, match=complaint):
        datasets.read_idx(path)


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path: Path) -> None:
    folder = write_small_fashion_mnist(tmp_path)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(idx((7,), bytes(7)))
    with pytest.raises(
        TaskError, match="train images of shape \\[6, 28, 28\\] with labels of shape \\[7\\]"
    ):
        datasets.fashion_mnist(folder, home=NOWHERE)


def test_a_damaged_file_does_not_pass_as_absent(tmp_path: Path) -> None:
    folder = write_small_fashion_mnist(tmp_path)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(b"oops")
    with pytest.raises(TaskError, match="starts with"):
        datasets.images(folder, home=NOWHERE)


# -- digits and the choice --


def test_digits_have_the_shape_of_fashion_mnist_and_are_the_same_each_time() -> None:
    (x, y), (x_test, y_test) = datasets.digits()
    assert x.shape == (1437, 1, 28, 28) and x_test.shape == (360, 1, 28, 28)
    assert (
        x.dtype == torch.float32
        and y.dtype == torch.int64
        and set(y_test.tolist()) == set(range(10))
    )
    assert abs(x.mean().item()) < 1e-4 and abs(x.std().item() - 1) < 1e-4
    assert torch.equal(datasets.digits()[0][0], x)


def test_images_falls_back_on_digits_and_the_name_says_why(tmp_path: Path) -> None:
    name, (x, _), _ = datasets.images(tmp_path / "empty", home=NOWHERE)
    assert (
        name.startswith("digits (Fashion-MNIST not found in ")
        and "download failed" in name
        and str(tmp_path / "empty") in name
    )
    assert len(x) == 1437


def test_images_takes_fashion_mnist_where_it_is(tmp_path: Path) -> None:
    name, (x, _), _ = datasets.images(write_small_fashion_mnist(tmp_path), home=NOWHERE)
    assert name == "Fashion-MNIST" and len(x) == 6


def test_the_real_files_have_the_published_counts_and_moments(data_dir: Path | None) -> None:
    name, (x, y), (x_test, y_test) = datasets.images(data_dir, home=NOWHERE)
    if name == "Fashion-MNIST":
        assert len(x) == 60_000 and len(x_test) == 10_000
        assert (
            torch.bincount(y).tolist() == [6000] * 10
            and torch.bincount(y_test).tolist() == [1000] * 10
        )
    assert abs(x.mean().item()) < 1e-3 and abs(x.std().item() - 1) < 1e-3
    assert x.shape[1:] == x_test.shape[1:] == (1, 28, 28)


# -- text --


@pytest.mark.parametrize("under", ["", "text"])
def test_text_rows_hold_the_characters_and_their_successors(tmp_path: Path, under: str) -> None:
    (tmp_path / under).mkdir(exist_ok=True)
    (tmp_path / under / "tinyshakespeare.txt").write_text("abcd" * 25)
    (x, y), (x_test, y_test), vocabulary = datasets.tinyshakespeare(tmp_path, block=4)
    assert vocabulary == 4 and x.dtype == torch.int64
    assert x.shape == y.shape == (22, 4) and x_test.shape == (
        2,
        4,
    )  # 90 and 10 characters, the last has no successor
    assert x[0].tolist() == [0, 1, 2, 3] and y[0].tolist() == [1, 2, 3, 0]
    assert torch.equal(x.view(-1)[1:], y.view(-1)[:-1]) and torch.equal(
        x_test.view(-1)[1:], y_test.view(-1)[:-1]
    )


def test_without_the_file_the_text_is_synthetic_and_says_so(tmp_path: Path) -> None:
    name, (x, _), _, vocabulary = datasets.text(tmp_path)
    assert name.startswith("synthetic text (tinyshakespeare.txt not found in ")
    assert x.shape[1] == 64 and len(x) > 2000 and 20 < vocabulary < 65
    with pytest.warns(UserWarning, match="synthetic text"):
        again = datasets.tinyshakespeare(tmp_path)
    assert torch.equal(again[0][0], x)


def test_a_block_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text("short")
    with pytest.raises(TaskError, match="block=64"):
        datasets.text(tmp_path)


def test_the_real_text_has_65_characters(data_dir: Path | None) -> None:
    name, (x, _), (x_test, _), vocabulary = datasets.text(data_dir)
    if name == "tinyshakespeare":
        assert vocabulary == 65 and len(x) == 15685 and len(x_test) == 1742


# -- rows of ids and numbers --

PERSON = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, ?, White, Male, "
    "2174, 0, 40, United-States, {}"
)


def write_small_adult(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    people = [
        PERSON.format("<=50K"),
        PERSON.replace("39", "50").replace("13", "9").format(">50K"),
        "",
    ]
    (folder / "adult.data").write_text("\n".join(people))
    (folder / "adult.test").write_text(PERSON.format(">50K.") + "\n")
    return folder


@pytest.mark.parametrize("under", ["", "adult"])
def test_people_become_ids_numbers_and_a_label(tmp_path: Path, under: str) -> None:
    write_small_adult(tmp_path / under)
    (ids, numbers, label), (ids_test, numbers_test, label_test) = datasets.adult(tmp_path)
    assert (
        ids.shape == (2, 8)
        and ids.dtype == torch.int64
        and numbers.shape == (2, 5)
        and numbers.dtype == torch.float32
    )
    assert label.tolist() == [0.0, 1.0] and label_test.tolist() == [1.0]
    assert (
        ids[0].tolist() == ids[1].tolist() == ids_test[0].tolist()
        and len(set(ids[0].tolist())) == 8
    )
    assert ids[0, 6] == datasets.hashed("sex", "Male") != datasets.hashed("race", "Male")
    assert numbers[:, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5]) and torch.equal(
        numbers_test[0, 0], numbers[0, 0]
    )


def test_the_hash_of_a_value_is_the_same_everywhere() -> None:
    assert datasets.hashed("sex", "Male") == -8878503060353660894


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("39, State-gov", "row 0 has 2 fields, 15 are needed"),
        (PERSON.replace("39", "old"), "column age: could not convert"),
    ],
)
def test_a_damaged_row_is_refused(tmp_path: Path, row: str, complaint: str) -> None:
    folder = write_small_adult(tmp_path)
    (folder / "adult.data").write_text(row + "\n")
    with pytest.raises(TaskError, match=complaint):
        datasets.adult(tmp_path)


def test_clicks_are_made_up_where_there_are_none_and_the_name_says_so(tmp_path: Path) -> None:
    for which, what in (("adult", "Adult"), ("open_bandit", "The Open Bandit Dataset")):
        name, (ids, numbers, label), test = datasets.clicks(which, tmp_path)
        assert name.startswith(f"made-up clicks ({what}") and str(tmp_path) in name
        assert (
            ids.shape == (20_000, 8)
            and numbers.shape == (20_000, 5)
            and 0.2 < label.mean() < 0.5
            and len(test[0]) == 5000
        )
    again = datasets.made_up_clicks()
    assert torch.equal(again[0][0], ids) and torch.equal(again[1][2], test[2])
    assert datasets.clicks("adult", write_small_adult(tmp_path))[0] == "adult"
    (tmp_path / "adult.data").write_text("damaged")
    with pytest.raises(TaskError, match="fields"):
        datasets.clicks("adult", tmp_path)
    with pytest.raises(TaskError, match="which='adults', but adult or open_bandit is needed"):
        datasets.clicks("adults")


def test_the_real_people_have_the_published_counts(data_dir: Path | None) -> None:
    name, (ids, numbers, label), (ids_test, _, label_test) = datasets.clicks("adult", data_dir)
    if name == "adult":
        assert (len(ids), int(label.sum())) == (32_561, 7841) and (
            len(ids_test),
            int(label_test.sum()),
        ) == (16_281, 3846)
        assert [len(column.unique()) for column in ids.T] == [9, 16, 7, 15, 6, 5, 2, 42]
        assert numbers.mean(0).abs().max() < 1e-4 and (numbers.std(0) - 1).abs().max() < 1e-4
    else:
        assert len(ids) == 20_000


def test_the_real_impressions_have_the_published_counts(data_dir: Path | None) -> None:
    name, (ids, numbers, label), (ids_test, _, label_test) = datasets.clicks(
        "open_bandit", data_dir
    )
    if name == "open_bandit":
        assert (
            len(ids) == 48_000
            and len(ids_test) == 12_000
            and int(label.sum() + label_test.sum()) == 287
        )
        assert (
            len(ids[:, 0].unique()) == 80 + 34 + 46
            and len(ids[:, 1].unique()) == 3
            and numbers.isfinite().all()
        )
    else:
        assert len(ids) == 20_000
