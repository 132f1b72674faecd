"""libsvm files: equal to scikit-learn's reader bit for bit, and every bad line named."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file, load_svmlight_file, load_svmlight_files

from manyhands.linear.data import RowBlock, iter_libsvm, read_libsvm, write_libsvm
from manyhands.linear.data.blocks import concatenate


def written(folder: Path, text: str | bytes, name: str = "rows") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def same(block: RowBlock, X, y) -> None:
    assert (block.rows, block.n_features) == X.shape
    assert block.indptr.dtype == np.int64 and block.indices.dtype == np.int32
    assert block.values.dtype == X.dtype and block.labels.dtype == np.float64
    np.testing.assert_array_equal(block.indptr, X.indptr)
    np.testing.assert_array_equal(block.indices, X.indices)
    assert block.values.tobytes() == X.data.tobytes()  # also the sign of zero
    np.testing.assert_array_equal(block.labels, y)


@pytest.mark.parametrize("name", ["a9a", "a9a.t", "heart_scale"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_real_files_are_read_as_scikit_learn_reads_them(
    data_dir: Path | None, name: str, dtype
) -> None:
    if data_dir is None or not (data_dir / "libsvm" / name).exists():
        pytest.skip(f"needs libsvm/{name} in $MANYHANDS_DATA")
    path = data_dir / "libsvm" / name
    X, y = load_svmlight_file(str(path), dtype=dtype)
    same(read_libsvm(path, dtype=dtype), X, y)
    parts = list(iter_libsvm(path, block_bytes=10_000, dtype=dtype))
    assert len(parts) > 2
    np.testing.assert_array_equal(
        [p.start for p in parts], np.cumsum([0] + [p.rows for p in parts])[:-1]
    )
    same(concatenate(parts, dtype, X.shape[1]), X, y)


ODD_BUT_RIGHT = (
    "# a file comment: 0:0\n"
    "\n"
    "+1 1:+1 3:1e-3 7:-2.5E+2   # a comment 1:1\n"
    "   \t \n"
    "-1\t2:.5  4:5. \t \r\n"
    "0.25 1:1#glued\r\n"
    "3 # no values\n"
    "1e1 1:-0 2:0 3:-0.0 9:00012 10:1.7976931348623157e308 11:4.9e-324\n"
    "2 +5:1 007:2"
)


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_comments_blank_lines_and_all_forms_of_numbers(tmp_path: Path, block_bytes: int) -> None:
    path = written(tmp_path, ODD_BUT_RIGHT)
    X, y = load_svmlight_file(str(path))
    same(read_libsvm(path), X, y)
    parts = list(iter_libsvm(path, block_bytes=block_bytes))
    same(concatenate(parts, np.float64, X.shape[1]), X, y)


def test_numbers_are_rounded_correctly(tmp_path: Path) -> None:
    """Random bits as repr, with 16 and 25 digits, and halves between two floats."""
    random.seed(3)
    texts = [
        "9007199254740993",  # halfway
        "9007199254740992.99999999999999999999999",
        "9007199254740993.00000000000000000000001",
        "2.2250738585072011e-308",
        "1e22",
        "1e23",
        "123456789012345678901234567890",
        "0." + "0" * 330 + "1e300",
        "8.5e-22",
        "1" + "0" * 40 + "e-40",
        "1e-100001",
    ]
    while len(texts) < 30_000:
        (x,) = struct.unpack("<d", random.randbytes(8))
        if np.isfinite(x):
            texts += [repr(x), f"{x:.15e}", f"{x:.24e}", f"{random.gauss(0, 1):.16g}"]
    path = written(tmp_path, "".join(f"{t} 1:{t}\n" for t in texts))
    block = read_libsvm(path)
    want = np.array([float(t) for t in texts])
    assert block.values.tobytes() == want.tobytes()
    assert block.labels.tobytes() == want.tobytes()


@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False),
            st.dictionaries(
                st.integers(1, 3000), st.floats(allow_nan=False, allow_infinity=False), max_size=6
            ),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 300),
)
def test_what_scikit_learn_reads_of_any_rows(tmp_path_factory, rows, block_bytes: int) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows"
    path.write_text(
        "".join(
            f"{y!r} " + " ".join(f"{j}:{x!r}" for j, x in sorted(fields.items())) + "\n"
            for y, fields in rows
        )
    )
    X, y = load_svmlight_file(str(path), n_features=3001, zero_based=False)
    parts = iter_libsvm(path, block_bytes, n_features=3001, zero_based=False)
    same(concatenate(parts, np.float64, 3001), X, y)


def test_indices_count_from_0_where_one_is_0_in_any_file(tmp_path: Path) -> None:
    one = written(tmp_path, "1 1:1 4:2\n", "one")
    zero = written(tmp_path, "1 2:1\n2 # 0:1\n-1 0:1 4:2\n", "zero")
    for paths in ([one], [zero], [one, zero], [zero, one]):
        *expected, _ = load_svmlight_files([str(p) for p in paths])
        block = read_libsvm(paths)
        assert block.n_features == expected[0].shape[1]
        found = load_svmlight_files([str(p) for p in paths])[::2]
        np.testing.assert_array_equal(block.indices, np.concatenate([X.indices for X in found]))
    assert read_libsvm(one, zero_based=True).n_features == 5
    assert read_libsvm(one, n_features=4).n_features == 4
    assert read_libsvm(str(tmp_path / "*e*")).rows == 4  # a pattern: one, zero
    empty = read_libsvm(written(tmp_path, "# nothing\n\n", "empty"))
    assert (empty.rows, empty.nonzeros, empty.n_features) == (0, 0, 0)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files(tmp_path: Path, compress) -> None:
    stream = io.BytesIO()
    X = np.random.default_rng(0).normal(size=(500, 8))
    dump_svmlight_file(X, np.arange(500), stream)
    packed = written(tmp_path, compress(stream.getvalue()), "packed")
    plain = written(tmp_path, stream.getvalue(), "plain")
    blocks = list(iter_libsvm(packed, block_bytes=20_000))
    assert len(blocks) > 3
    same(concatenate(blocks, np.float64, 8), *load_svmlight_file(str(plain)))
    torn = written(tmp_path, compress(stream.getvalue())[:-500], "torn")
    with pytest.raises(ValueError, match=r"torn is damaged, it cannot be decompressed"):
        read_libsvm(torn)


BAD = {
    "x 1:1": r"could not convert the label to float: 'x'",
    "1_0 1:1": r"label to float: '1_0'",
    "1,2 1:1": r"names several classes; multilabel files are not supported",
    "1:1 2:2": r"the label is missing: the line begins with '1:1'",
    "nan 1:1": r"Input y contains NaN or infinity: 'nan'",
    "1e999 1:1": r"Input y contains infinity or a value too large for dtype\('float64'\): '1e999'",
    "1 qid:3 1:1": r"'qid:3' is a query id",
    "1 1:1 2:nan": r"Input X contains NaN or infinity: '2:nan'",
    "1 1:1 2:-inf": r"Input X contains NaN or infinity: '2:-inf'",
    "1 1:1 2:1e400 3:1": r"Input X contains infinity or a value too large .*: '2:1e400'",
    "1 1": r"'1' does not parse; index:value",
    "1 1:": r"'1:' does not parse",
    "1 :1": r"':1' does not parse",
    "1 1:2:3": r"'1:2:3' does not parse",
    "1 1:0x10": r"'1:0x10' does not parse",
    "1 1:1_0": r"'1:1_0' does not parse",
    "1 1:1e": r"'1:1e' does not parse",
    "1 1:.": r"'1:.' does not parse",
    "1 a:1": r"'a:1' does not parse",
    "1 1.5:1": r"'1.5:1' does not parse",
    "1 1:1,2:2": r"'1:1,2:2' does not parse",
    "1 \xe9:1": "'\xe9:1' does not parse",
    "1 " + "y" * 100: r"'y{60}\.\.\.' does not parse",
    "1 2:1 1:1": r"should be sorted and unique, but 1 follows 2",
    "1 2:1 2:1": r"should be sorted and unique, but 2 follows 2",
    "1 0:1": r"Invalid index 0 in SVMlight/LibSVM data file; .* pass zero_based=True or 'auto'",
    "1 -3:1": r"Invalid index -3 in SVMlight",
    "1 10:1": r"n_features was set to 9, but the line has index 10 \(indices count from 1\)",
    "1 99999999999999999999:1": r"n_features was set to 9, but the line has index 9{20}",
}


@pytest.mark.parametrize("block_bytes", [30, 1 << 20])
@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:20])
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: str, block_bytes: int) -> None:
    good = "1 1:1 2:0.123456789012345678\n# comment\n\n-1 9:1\n"
    path = written(tmp_path, good + line + "\n" + good)
    with pytest.raises(ValueError, match=f"{path.name}, line 5: .*{BAD[line]}"):
        list(iter_libsvm(path, block_bytes, n_features=9, zero_based=False))


def test_a_value_that_float32_cannot_hold_is_refused_and_one_that_it_rounds_is_not(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "1 1:1\n1 1:1e39\n")
    with pytest.raises(ValueError, match=r"line 2: .* too large for dtype\('float32'\): '1:1e39'"):
        read_libsvm(path, dtype=np.float32)
    path = written(tmp_path, "1e39 1:1.00000001\n")
    block = read_libsvm(path, dtype=np.float32)
    assert block.values[0] == np.float32(1) and block.labels[0] == 1e39


def test_an_index_beyond_32_bits_and_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "1 1:1 2147483648:1\n")
    with pytest.raises(ValueError, match=r"line 1: index 2147483648 is too large"):
        read_libsvm(path)
    for options in ({"n_features": 0}, {"dtype": np.int32}, {"zero_based": "yes"}):
        with pytest.raises(ValueError, match=r"is given; .* is needed"):
            read_libsvm(path, **options)
    with pytest.raises(ValueError, match="block_bytes=0 is given"):
        iter_libsvm(path, block_bytes=0)  # at once, not at the first block
    with pytest.raises(FileNotFoundError, match="no file matches"):
        read_libsvm(tmp_path / "none*")


# -- writing --


@pytest.mark.parametrize("digits", [1, 6, 15])
@pytest.mark.parametrize("zero_based", [False, True])
def test_written_numbers_have_the_digits_asked_for(
    tmp_path: Path, digits: int, zero_based: bool
) -> None:
    random = np.random.default_rng(digits)
    values = random.normal(size=2000) * 10.0 ** random.integers(-30, 30, 2000)
    values[:6] = 0.0, 1.0, -10.0, 999999.9, 0.99999999, 1e-5
    indptr = np.arange(0, 2001, 5)
    indices = np.tile(np.arange(0, 25, 5, dtype=np.int32), 400)
    block = RowBlock(indptr, indices, values, np.where(np.arange(400) % 3, 1.0, -1.0))
    path = tmp_path / "rows"
    assert write_libsvm([block, block], path, digits, zero_based) == 800
    back = read_libsvm(path, zero_based=zero_based)
    np.testing.assert_array_equal(back.indices, np.tile(indices, 2))
    np.testing.assert_array_equal(back.labels, np.tile(block.labels, 2))
    rounded = np.array([float(f"{v:.{digits - 1}e}") for v in values])
    # a product that is almost halfway may be rounded to its other neighbour
    np.testing.assert_allclose(back.values[:2000], rounded, rtol=2 * 10.0 ** (1 - digits))
    assert np.mean(back.values[:2000] == rounded) > (0.999 if digits < 10 else 0.8)
    same(back, *load_svmlight_file(str(path), zero_based=zero_based))


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    block = RowBlock(np.array([0, 1]), np.zeros(1, np.int32), np.array([np.nan]), np.ones(1))
    with pytest.raises(ValueError, match="contains NaN or infinity"):
        write_libsvm([block], tmp_path / "rows")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="digits=17 is given; 1 to 15 is needed"):
        write_libsvm([], tmp_path / "rows", digits=17)
