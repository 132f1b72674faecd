"""mh.Store, in this process, on servers of its own, and on a running `manyhands server --keep`."""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.core import Table
from manyhands.errors import CheckpointError
from manyhands.server.validate import NAMESPACE_END
from support.commands import CLI, Command, command
from support.docs import code_blocks
from support.paths import REPOSITORY


@contextmanager
def kept_server(folder: Path, *more: str) -> Iterator[tuple[Command, str, str]]:
    """A running server, its address and its token file."""
    with command(folder, [*CLI, "server", "--keep", *more]) as job:
        job.until(lambda: "stores " in job.out, "line about stores")
        address = re.search(r"server +at (127\.0\.0\.1:\d+)", job.out)
        token = re.search(r"token +(\S+),", job.out)
        assert address is not None and token is not None
        yield job, address[1], token[1]


Open = Callable[..., mh.Store]


@pytest.fixture(scope="module", params=["in process", "own servers", "running server"])
def opens(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Open]:
    """Opens a store of this kind; each test has a namespace of its own where they share servers."""
    if request.param == "in process":
        yield lambda **words: mh.Store(**words)
    elif request.param == "own servers":
        with mh.Store(servers=2, timeout_s=20.0) as first:
            at, token = first.address, first.token
            yield lambda **words: mh.Store(at, token=token, **words)
    else:
        folder = tmp_path_factory.mktemp("server")
        with kept_server(folder, "--shards", "2") as (_, address, token_file):
            yield lambda **words: mh.Store(address, token_file=token_file, **words)


@pytest.fixture
def store(opens: Open, request: pytest.FixtureRequest) -> Iterator[mh.Store]:
    plain = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)
    with opens(namespace=plain[:100]) as found:
        yield found


# -- rows --


def test_what_is_pushed_is_pulled(store: mh.Store) -> None:
    store.create("users", dim=3, optimizer="sgd", lr=0.5, init="zeros")
    handle = store.push("users", [1, -7, 1], [[1.0, 2, 3], [4, 5, 6], [1, 1, 1]])
    handle.wait()
    store.wait(handle)
    rows = store.pull("users", [1, -7, 5])
    assert isinstance(rows, torch.Tensor) and rows.dtype == torch.float32
    assert rows.tolist() == [[-1.0, -1.5, -2.0], [-2.0, -2.5, -3.0], [0.0, 0.0, 0.0]]
    store.push("users", [5], [[1.0, 1, 1]], lr=2.0)
    assert store.pull("users", [5]).tolist() == [[-2.0, -2.0, -2.0]]
    assert [h.timestamp for h in (handle, store.push("users", [1], [[0.0, 0, 0]]))] == [0, 2]


def test_a_dense_table_starts_from_its_values(store: mh.Store) -> None:
    store.create("w", values=torch.arange(1000.0), optimizer="sum")
    store.push("w", np.ones(1000))
    assert torch.equal(store.pull("w"), torch.arange(1000.0) + 1)
    store.create("w", values=torch.zeros(1000), optimizer="sum")  # harmless: it is there
    assert torch.equal(store.push_pull("w", torch.ones(1000)), torch.arange(1000.0) + 2)
    store.create("wide", values=np.zeros((3, 4)), optimizer="sum")
    assert store.pull("wide").dtype == torch.float64 and store.pull("wide").shape == (12,)


def test_several_tables_at_once(store: mh.Store) -> None:
    store.create("a", dim=2, init="zeros", optimizer="sum")
    store.create("w", length=5, optimizer="sum")
    handles = [store.push({"a": ([1, 2], np.ones((2, 2))), "w": np.ones(5)}) for _ in range(3)]
    store.wait(handles)
    store.wait()
    found = store.pull({"a": [1, 2, 3], "w": None})
    assert found["a"].tolist() == [[3, 3], [3, 3], [0, 0]] and found["w"].tolist() == [3] * 5
    again = store.push_pull({"a": ([1], [[1.0, 1]]), "w": torch.ones(5)})
    assert again["a"].tolist() == [[4, 4]] and again["w"].tolist() == [4] * 5
    assert store.pull_async("a", [2]).result().tolist() == [[3, 3]]


@pytest.mark.parametrize(
    "ids",
    [
        [3, 4],
        (3, 4),
        range(3, 5),
        np.array([3, 4]),
        np.array([3, 4], np.uint8),
        np.array([3, 4], np.uint64),
        torch.tensor([3, 4], dtype=torch.int32),
        torch.arange(10)[3:5],
        torch.arange(10)[3:5][None],
        np.arange(20)[6:10:2] // 2,
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_ids_are_lists_arrays_or_tensors_of_any_shape(ids: Any) -> None:
    with mh.Store() as store:
        store.create("t", dim=2, optimizer="sum", init="zeros")
        store.push("t", [3, 4], [[1.0, 2], [3, 4]])
        rows = store.pull("t", ids)
        shape = tuple(ids.shape) if hasattr(ids, "shape") else (2,)
        assert rows.shape == (*shape, 2) and rows.reshape(2, 2).tolist() == [[1, 2], [3, 4]]
        store.push("t", ids, rows)
        assert store.pull("t", 3).tolist() == [2, 4]


def test_keys_of_ps_lite_keep_their_64_bits() -> None:
    with mh.Store() as store:
        store.create("t", optimizer="sum", init="zeros")
        store.push("t", np.array([2**64 - 1], np.uint64), [1.0])
        assert store.pull("t", [-1]).tolist() == [[1.0]]


def test_no_ids_are_fine(store: mh.Store) -> None:
    store.create("t", dim=2)
    store.push("t", [], np.ones((0, 2))).wait()
    assert store.pull("t", []).shape == (0, 2) and store.delete("t", []) == 0


def test_rows_can_be_used_after_the_store_was_closed(opens: Open) -> None:
    with opens(namespace="closed") as store:
        store.create("t", dim=4, optimizer="sum", init="zeros")
        store.push("t", range(1000), np.ones((1000, 4)))
        rows = store.pull("t", range(1000))
    assert rows.sum() == 4000


# -- tables --


def test_tables_are_listed_with_their_rows(store: mh.Store) -> None:
    assert store.tables() == {} and len(store) == 0 and "users" not in store
    store.create("users", dim=16, optimizer="adagrad", lr=0.1)
    store.create(Table("w", length=9, optimizer="sum"))
    store.push("users", range(50), np.ones((50, 16)))
    store.wait()
    users = store.tables()["users"]
    assert (users.rows, users.dim, users.optimizer, users.options) == (
        50,
        16,
        "adagrad",
        {"lr": 0.1},
    )
    assert users.bytes >= 50 * 32 * 4 and store.tables()["w"].rows == 9
    assert list(store) == ["users", "w"] and "users" in store and len(store) == 2
    assert re.fullmatch(
        r"StoredTable\('users', dim=16, optimizer='adagrad', lr=0.1: 50 rows, .* kB\)", repr(users)
    )
    assert "tables users, w" in repr(store) and store.stats()["pushed_rows"] >= 50


def test_a_second_store_reads_what_the_first_made(opens: Open, store: mh.Store) -> None:
    if store.address is None:
        pytest.skip("tables in this process are this store's own")
    store.create("t", dim=2, optimizer="sum", init="zeros")
    store.push("t", [1], [[1.0, 2]]).wait()
    name = store._backend.where.rpartition("namespace ")[2].strip("'")
    with opens(namespace=name) as other:
        assert other.pull("t", [1]).tolist() == [[1, 2]]
        other.push("t", [1], [[1.0, 2]]).wait()
    assert store.pull("t", [1]).tolist() == [[2, 4]]
    with opens(namespace="elsewhere") as stranger, pytest.raises(mh.StoreError, match="unknown"):
        stranger.pull("t", [1])
    with opens() as plain:
        assert not any(NAMESPACE_END in table for table in plain)


def test_deleted_rows_start_anew(store: mh.Store) -> None:
    store.create("t", dim=2, optimizer="adagrad", lr=0.1)
    first = store.pull("t", [1, 2]).clone()
    store.push("t", [1, 2, 3], np.ones((3, 2)))
    assert store.delete("t", [1, 1, 2, 9]) == 2 and store.tables()["t"].rows == 1
    assert torch.equal(store.pull("t", [1, 2]), first)
    store.push("t", [1], np.ones((1, 2)))
    store.push("t", [7], np.ones((1, 2)))
    assert store.tables()["t"].rows == 3 and store.items("t")[0].tolist() == [1, 3, 7]


def test_a_dropped_table_can_be_made_with_another_shape(store: mh.Store) -> None:
    store.create("t", dim=2, optimizer="sum", init="zeros")
    store.push("t", [1], [[1.0, 2]])
    with pytest.raises(mh.StoreError, match=r"'t' is there with dim=2; given: dim=3"):
        store.create("t", dim=3, optimizer="sum", init="zeros")
    store.drop_table("t")
    store.create("t", dim=3, optimizer="sum", init="zeros")
    store.push("t", [1], [[1.0, 2, 3]])
    assert store.pull("t", [1]).tolist() == [[1, 2, 3]]


def test_saved_tables_come_back_as_they_were(store: mh.Store, tmp_path: Path) -> None:
    store.create("t/with a name", dim=2, optimizer="adagrad", lr=0.1)
    store.create("w", values=torch.arange(100.0), optimizer="momentum", momentum=0.9, lr=0.1)
    grads = torch.randn(30, 2)

    def train() -> None:
        store.push({"t/with a name": (torch.arange(30), grads), "w": torch.ones(100)})

    train()
    store.save(tmp_path / "saved")
    train()
    expected = store.pull({"t/with a name": range(40), "w": None})
    store.save(tmp_path / "saved" / "later")
    store.load(tmp_path / "saved")
    train()
    assert same(store.pull({"t/with a name": range(40), "w": None}), expected)
    with mh.Store() as other:
        other.load(tmp_path / "saved" / "later")
        assert same(other.pull({"t/with a name": range(40), "w": None}), expected)
        other.save(tmp_path / "saved" / "later")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_folders_that_are_somebody_elses_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with mh.Store() as store:
        with pytest.raises(CheckpointError, match="holds no saved tables"):
            store.save(tmp_path / "mine")
        with pytest.raises(CheckpointError, match="holds no tables that can be read"):
            store.load(tmp_path / "mine")


def test_the_page_shows_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = REPOSITORY / "docs" / "store.md"
    names: dict[str, Any] = {}
    for code in code_blocks(page, "python")[:3]:
        exec(code, names)
    assert capsys.readouterr().out.strip() in page.read_text()
    assert repr(names["store"]) == "mh.Store(closed)" and (tmp_path / "saved").is_dir()


# -- refusals --


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda s: s.pull("user", [1]), r"table 'user' is unknown; the store has 't', 'w'"),
        (lambda s: s.push("t", [1.0], [[1.0, 1]]), "ids are float64 of shape .1,.; whole numbers"),
        (lambda s: s.pull("t", torch.ones(2)), "ids are float32 of shape .2,.; whole numbers"),
        (lambda s: s.pull("t", [True]), "ids are bool"),
        (lambda s: s.pull("t", ["a"]), "ids are <U1"),
        (lambda s: s.pull("t", [[1], [2, 3]]), "ids are list"),
        (lambda s: s.push("t", [1], [[1.0]]), r"shape \(1, 1\) for ids of shape \(1,\); \(1, 2\)"),
        (lambda s: s.push("t", [1], [["a", "b"]]), "gradients are list; real numbers"),
        (lambda s: s.push("t", [1], torch.ones(1, 2, dtype=torch.cfloat)), "are complex64; real"),
        (lambda s: s.push("t", [5, 6], [[1.0, 1], [math.nan, 1]]), r"not finite \(ids 6\)"),
        (lambda s: s.push("t", [5], [[1e300, 1]]), r"not finite \(ids 5\)"),
        (lambda s: s.push("w", [math.inf] * 4), "not finite"),
        (lambda s: s.push("w", [1.0]), r"shape \(1,\); 4 numbers are needed"),
        (lambda s: s.push("w", [1], [1.0]), "'w' is dense: push"),
        (lambda s: s.push("t", [1]), "'t' is sparse: push.'t', ids, grads"),
        (lambda s: s.push({"t": np.ones(2)}), "'t' is sparse"),
        (lambda s: s.push({"t": ([1], [[1.0, 1]])}, [1]), "all that is pushed is in the dict"),
        (lambda s: s.pull("w", [1]), "'w' is dense: pull"),
        (lambda s: s.pull("t"), "'t' is sparse: pull"),
        (lambda s: s.delete("w", [1]), "dense: it has no rows"),
        (lambda s: s.items("w"), "dense and has no ids"),
        (lambda s: s.drop_table("user"), "table 'user' is unknown"),
        (lambda s: s.create("x", rows=3), "no option 'rows'; known: lr"),
        (lambda s: s.create("x", lr="fast"), "lr='fast'.*options of an optimizer are numbers"),
        (lambda s: s.create("x", dim=0), "dim=0; 1 or more"),
        (lambda s: s.create("a::b"), "without :: is needed"),
        (lambda s: s.create(Table("x"), dim=3), "give a Table, or a name and keywords"),
    ],
)
def test_mistakes_are_named_and_change_nothing(act: Callable[[mh.Store], Any], said: str) -> None:
    with mh.Store() as store:
        store.create("t", dim=2)
        store.create("w", length=4)
        with pytest.raises(mh.StoreError, match=said):
            act(store)
        assert store.tables()["t"].rows == 0 and not store.pull("w").any()


def test_a_closed_store_says_so() -> None:
    store = mh.Store()
    store.close()
    store.close()
    for act in (store.tables, store.wait, lambda: store.pull("t", [1]), store.__enter__):
        with pytest.raises(mh.StoreError, match="this store was closed"):
            act()
    assert repr(store) == "mh.Store(closed)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"token": "x"}, "token= is for a running server"),
        ({"address": "127.0.0.1:1", "servers": 1}, "give the address of servers that run, or how"),
        ({"address": "127.0.0.1:1", "optimizers": ["m"]}, "a running server has those of its"),
        ({"address": "nowhere"}, "HOST:PORT is needed"),
        ({"servers": -1}, "1 or more is needed"),
        ({"namespace": "a b"}, "letters, digits"),
    ],
)
def test_contradictions_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(mh.StoreError, match=said):
        mh.Store(**words)


def test_no_server_at_an_address_is_told_at_once() -> None:
    with pytest.raises(mh.ServerLost, match=r"no server answers at 127\.0\.0\.1:1 .*manyhands"):
        mh.Store("127.0.0.1:1")


def test_optimizers_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halving.py").write_text(
        "class Half:\n"
        "    state = {}\n"
        "    def update(self, w, grads, state, lr):\n"
        "        w += grads / 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with mh.Store(optimizers=["halving"]) as store:
        store.create("t", dim=2, optimizer="halving:Half", init="zeros")
        store.push("t", [1], [[1.0, 2]])
        assert store.pull("t", [1]).tolist() == [[0.5, 1]]


# -- a server's secret, and its end --


def test_a_wrong_token_is_refused_and_the_right_one_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept_server(tmp_path) as (job, address, token_file):
        plain = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        plain.close()  # somebody who looks whether a server is there
        for words in ({}, {"token": "guessed"}):
            with pytest.raises(mh.StoreError, match="use token= or token_file=, or set MANYHANDS"):
                mh.Store(address, **words)
        monkeypatch.setenv("MANYHANDS_TOKEN_FILE", token_file)
        monkeypatch.setenv("MANYHANDS_NAMESPACE", "team-a")
        with mh.Store(address) as store:
            assert repr(store) == f"mh.Store(at {address}, namespace 'team-a')"
            store.create("t", optimizer="sum", init="zeros")
            store.push("t", [1], [1.0])
        with mh.Store(address) as store:
            assert store.pull("t", [1]).tolist() == [[1.0]], "tables outlive their stores"
        assert job.process.poll() is None
        job.process.terminate()
        assert job.end() == 0 and job.out.endswith("stopped\n") and job.err == ""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_a_store_speaks_tls(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1".split()
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *words, *names, *files], check=True, capture_output=True)
    with (
        kept_server(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)) as (_, at, token),
        mh.Store(at, token_file=token, tls_ca=cert) as store,
    ):
        store.create("t", dim=2, optimizer="sum", init="zeros")
        store.push("t", [1, 2], np.ones((2, 2)))
        assert store.delete("t", [1]) == 1 and store.pull("t", [2]).tolist() == [[1, 1]]
