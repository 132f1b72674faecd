"""Row pieces of a sparse table: every row of a range once, whatever happens between pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manyhands.core import Table
from manyhands.server.snapshots.copy_on_write import ErasedIds, TableCut
from manyhands.server.snapshots.row_pieces import END, load_piece, read_piece, read_pieces
from manyhands.server.tables.hashing import hash_ids
from manyhands.server.tables.sparse import SparseTable


def make(name: str = "t", **words: Any) -> SparseTable:
    given = {"dim": 3, "optimizer": "adagrad", **words}
    return SparseTable(Table(name, **given), huge=False)


def push(table: SparseTable, ids: Any, dice: np.random.Generator) -> None:
    ids = np.asarray(ids, np.int64)
    table.push(ids, dice.standard_normal((ids.size, table.dim)).astype(table.dtype))


def content(table: SparseTable) -> dict[int, tuple[float, ...]]:
    ids, values, state, meta = table.items()
    return {
        int(i): (*values[j], *(x for k, s in state.items() if k != "step" for x in s[j]), *meta[j])
        for j, i in enumerate(ids)
    }


def of_pieces(table: SparseTable, pieces: Any) -> dict[int, tuple[float, ...]]:
    found: dict[int, tuple[float, ...]] = {}
    for piece in pieces:
        assert np.all(np.diff(piece.ids) > 0), "each id once, in order"
        for j, i in enumerate(piece.ids):
            assert int(i) not in found, "every row is in one piece"
            found[int(i)] = (*piece.rows[j], int(piece.counts[j]), int(piece.times[j]))
    return found


def uppers(table: SparseTable, ids: np.ndarray) -> np.ndarray:
    hashes = np.empty(ids.size, np.uint64)
    hash_ids(ids, table.storage.seeds[0], hashes)
    return (hashes >> np.uint64(32)).astype(np.int64)


@pytest.mark.parametrize("rows", [0, 1, 5, 200, 30_000])
def test_pieces_hold_every_row_once(rows: int) -> None:
    table, dice = make(), np.random.default_rng(rows)
    push(table, dice.choice(10 * rows + 1, rows, replace=False), dice)
    assert of_pieces(table, read_pieces(table)) == content(table)


@pytest.mark.parametrize("seed", range(40))
def test_a_range_is_what_brute_force_finds(seed: int) -> None:
    table, dice = make(), np.random.default_rng(seed)
    a, b, since = int(dice.integers(0, END)), int(dice.integers(0, END)), int(dice.integers(-1, 12))
    a, b = (0, END) if seed == 0 else (a, END) if seed % 5 == 0 else (a, b)
    for _ in range(10):
        push(table, dice.integers(-500, 500, 60), dice)
        table.erase(dice.integers(-500, 500, 5))
    lo, hi = min(a, b), max(a, b) + (a == b)
    until = int(dice.integers(0, 12))
    found, at = {}, lo
    while at < hi:
        piece = read_piece(table, at, hi, since=since, until=until, most=7)
        assert at < piece.stop <= hi
        found |= of_pieces(table, [piece])
        at = piece.stop
    ids, _, _, meta = table.items()
    upper = uppers(table, ids)
    mine = (upper >= lo) & (upper < hi) & (meta[:, 1] > since) & (meta[:, 1] <= until)
    everything = content(table)
    assert found == {int(i): everything[int(i)] for i in ids[mine]}


def test_rows_that_stay_are_found_while_the_index_grows_between_pieces() -> None:
    table, dice = make(), np.random.default_rng(0)
    stay = np.arange(2000)
    push(table, stay, dice)
    seen: list[int] = []
    for n, piece in enumerate(read_pieces(table, until=1)):
        seen += piece.ids.tolist()
        push(table, dice.integers(10_000, 10**9, 5000), dice)
        assert n < 50
    assert sorted(seen) == stay.tolist()


def test_pieces_bring_another_table_to_the_same_rows() -> None:
    """All rows, then those changed since, then the last ones: how a shard is copied."""
    table, copy, dice = make(optimizer="adam"), make(optimizer="adam"), np.random.default_rng(1)
    push(table, np.arange(5000), dice)
    table.erased = ErasedIds()
    at, erased, since = table.version, table.erased.position, -1
    for _ in range(3):
        for piece in read_pieces(table, since=since):
            load_piece(copy, piece)
            push(table, dice.integers(0, 9000, 50), dice)
        table.erase(dice.integers(0, 5000, 20))
        gone = table.erased.since(erased)
        assert gone is not None
        copy.erase(gone)
        since, at, erased = at, table.version, table.erased.position
    # the last round: nobody pushes any more
    for piece in read_pieces(table, since=since):
        load_piece(copy, piece)
    copy.version, copy.optimizer.step = table.version, table.optimizer.step
    assert content(copy) == content(table)


def test_an_index_that_expects_rows_need_not_grow_for_them() -> None:
    table, copy, dice = make(), make(), np.random.default_rng(4)
    push(table, np.arange(20_000), dice)
    push(copy, np.arange(-50, 0), dice)
    copy.storage.expect(20_050)
    moves = copy.storage.moves
    for piece in read_pieces(table):
        load_piece(copy, piece)
    assert copy.storage.moves == moves and copy.rows == 20_050
    expected = content(table)
    assert {i: row for i, row in content(copy).items() if i >= 0} == expected


def test_coarse_times_give_a_superset() -> None:
    table, dice = make(expire_after=2**22), np.random.default_rng(2)
    assert table.storage.time_shift > 0
    for v in range(200):
        push(table, [v], dice)
    for since in (0, 50, 199):
        found = of_pieces(table, read_pieces(table, since=since))
        assert {v for v in range(200) if v + 1 > since} <= found.keys()


# -- copy on write --


@pytest.mark.parametrize("side", [64, 1 << 12, 1 << 24])
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_cut_is_the_table_at_that_moment(seed: int, incremental: bool, side: int) -> None:
    table, dice = make(), np.random.default_rng(seed)
    for _ in range(5):
        push(table, dice.integers(0, 3000, 300), dice)
    since = 3 if incremental else -1
    expected = {i: row for i, row in content(table).items() if row[-1] > since}
    pieces: list[Any] = []
    cut = TableCut(table, since, pieces.append, side)
    cut.begin()
    while not cut.done:
        for _ in range(int(dice.integers(0, 3))):
            match dice.integers(0, 4):
                case 0:
                    table.erase(dice.integers(0, 3000, 100))
                case 1:
                    push(table, dice.integers(0, 30_000, 2000), dice)  # the index grows
                case _:
                    push(table, dice.integers(0, 3000, 100), dice)
        piece = read_piece(table, cut.copied, since=since, until=cut.version, most=100)
        cut.copied = piece.stop
        pieces.append(piece)
    cut.end()
    pieces += cut.take_side()
    assert of_pieces(table, pieces) == expected
    assert cut.peak_bytes <= max(side, 3000 * 60), "the side buffer is bounded"
    assert table.cut is None and not cut.failure


def test_a_cut_survives_that_times_are_counted_anew_and_fails_when_they_are_lost() -> None:
    table, dice = make(), np.random.default_rng(5)
    table.version = 2**20 - 5
    push(table, np.arange(300), dice)
    expected, pieces = content(table), []
    cut = TableCut(table, spill=pieces.append)
    cut.begin()
    for _ in range(10):  # entries hold times of 20 bits
        push(table, dice.integers(0, 600, 20), dice)
    assert table.storage.time_base > 0
    while not cut.done:
        pieces.append(cut.next_piece())
    pieces += cut.take_side()
    assert of_pieces(table, pieces) == expected
    cut.end()
    late = TableCut(table)
    late.begin()
    table.version += 2**20
    push(table, [1], dice)
    assert late.next_piece() is None and "more than 500 000 pushes" in str(late.failure)


def test_rows_loaded_meanwhile_end_the_snapshot() -> None:
    table, dice = make(), np.random.default_rng(3)
    push(table, np.arange(10), dice)
    cut = TableCut(table)
    cut.begin()
    load_piece(table, read_piece(table))
    assert "meanwhile" in str(cut.failure) and table.cut is None


def test_erased_ids_are_told_from_any_position_that_is_remembered() -> None:
    log = ErasedIds(most=10)
    log.add(np.array([3, 4]))
    at = log.position
    log.add(np.array([5, 3]))
    known = log.since(at)
    assert known is not None and known.tolist() == [3, 5]
    log.forget(at)
    assert log.since(0) is None and log.since(at) is not None
    log.add(np.arange(20))
    assert log.since(at) is None, "too many were erased"
