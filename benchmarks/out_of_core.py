"""Linear models out of core: files larger than memory should be, trained within 1 GB of memory.

Files of sparse rows are generated (`SyntheticRows`: 100 non-zeros a row, a million columns), 5 GB
each; with --quick 100 MB. A process of its own fits LogisticRegression to the file, which converts
it to row shards and reads those once a round. Its peak memory is what the kernel says of it
(VmHWM): modules and everything else are in it.

    libsvm, parquet    1 GB against the peak
    pace               rounds a second out of core against rounds in memory, on 100 MB
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Claim, alternate, median

from manyhands.linear.data import RowShards, SyntheticRows, write_libsvm, write_parquet

FULL_BYTES, QUICK_BYTES, PACE_BYTES = 5_000_000_000, 100_000_000, 100_000_000
COLUMNS, PER_ROW = 1_000_000, 100
ROW_BYTES = {"libsvm": 1670, "parquet": 1210}  # of the files
SMALL_BYTES = 5_000_000
BOUND_MB = 1000.0
TOL = 1e-3  # duality gap, of the objective without features
BARS = {"libsvm": 1.0, "parquet": 1.0, "pace": 0.5}
LOOK_S = 0.01
MARK = "measured "


def rows_of(nbytes: int, kind: str) -> SyntheticRows:
    return SyntheticRows(nbytes // ROW_BYTES[kind], COLUMNS, PER_ROW, seed=7, popularity=0.5)


def generated(folder: Path, kind: str, nbytes: int) -> Path:
    path = folder / f"rows.{kind}"
    write = {"libsvm": write_libsvm, "parquet": write_parquet}[kind]
    write(rows_of(nbytes, kind).blocks(1 << 14), path)
    return path


# -- the process that is measured --


class Memory:
    """Peak of anonymous memory, looked at now and then; and of all memory, by the kernel."""

    def __init__(self) -> None:
        self.anonymous_mb, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.anonymous_mb = max(self.anonymous_mb, status_mb("RssAnon"))

    def end(self) -> dict[str, float]:
        self._over.set()
        self._thread.join()
        return {"anonymous_mb": self.anonymous_mb, "peak_mb": status_mb("VmHWM")}


def status_mb(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024 / 1e6


def forget(folder: Path) -> None:
    """Ask the kernel to drop what it has cached of the shards: the first round reads the disk."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fit(path: Path) -> dict[str, Any]:
    memory, began = Memory(), time.perf_counter()
    from manyhands.linear import LogisticRegression, shard_source

    # also files of --quick are large
    shard_source.IN_MEMORY_BYTES = min(shard_source.IN_MEMORY_BYTES, path.stat().st_size // 10)
    imported = time.perf_counter()
    shards, labels = shard_source.stored_rows(path)
    assert isinstance(shards, RowShards)
    del labels
    converted = time.perf_counter()
    forget(shards.directory)
    model = LogisticRegression(tol=TOL).fit(path)
    fitted = time.perf_counter()
    null = 0.6931471805599453 * shards.n_rows  # about: the classes are nearly balanced
    return {
        **memory.end(),
        "rows": shards.n_rows,
        "nonzeros": shards.n_nonzeros,
        "shards_gb": shards.nbytes / 1e9,
        "import_s": imported - began,
        "convert_s": converted - imported,
        "fit_s": fitted - converted,
        "solver": model.solver_,
        "rounds": int(model.n_iter_[0]),
        "relative_gap": model.dual_gap_ / null,
    }


def in_a_process(path: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    line = next(x for x in ended.stdout.splitlines() if x.startswith(MARK))
    return dict(json.loads(line.removeprefix(MARK)))


# -- claims --


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="manyhands-out-of-core-") as folder:
        yield Path(folder)


def memory_claim(kind: str, nbytes: int) -> Claim:
    with scratch() as folder:
        start = time.perf_counter()
        path = generated(folder, kind, nbytes)
        generated_s, size_gb = time.perf_counter() - start, path.stat().st_size / 1e9
        (small := folder / "small").mkdir()
        in_a_process(generated(small, kind, SMALL_BYTES))  # compiles what is not compiled yet
        found = in_a_process(path)
    detail = {
        "file": f"{size_gb:.2f} GB, {found['rows']:,} rows, {found['nonzeros']:,} non-zeros, "
        f"generated in {generated_s:.0f} s",
        "shards": f"{found['shards_gb']:.2f} GB, written in {found['convert_s']:.1f} s",
        "fit": f"{found['solver']}, {found['rounds']} rounds in {found['fit_s']:.1f} s, duality "
        f"gap {found['relative_gap']:.1e} of the objective at zero",
        "anonymous memory": f"{found['anonymous_mb']:.0f} MB of the peak",
    }
    peak = found["peak_mb"]
    return Claim(kind, peak, BOUND_MB, "MB", BOUND_MB / peak, BARS[kind], detail)


def pace_claim(times: int) -> Claim:
    """The same fit from shards and from memory, in turn."""
    import warnings

    import numpy as np
    import scipy.sparse as sparse

    from manyhands.linear import LogisticRegression
    from manyhands.linear.data import write_shards
    from manyhands.linear.data.blocks import concatenate

    warnings.simplefilter("ignore")
    rows = rows_of(PACE_BYTES, "parquet")
    block = concatenate(rows.blocks(), np.float64, COLUMNS)
    shape = (block.rows, COLUMNS)
    x = sparse.csr_matrix((block.values, block.indices, block.indptr), shape=shape)
    model = LogisticRegression(solver="sdca", tol=1e-12, max_iter=10)

    def rate(fit: Any) -> float:
        start = time.perf_counter()
        fit()
        return 10 / (time.perf_counter() - start)

    with scratch() as folder:
        shards = write_shards(rows.blocks(), folder / "shards")
        runs = {
            "shards": lambda: rate(lambda: model.fit(shards)),
            "memory": lambda: rate(lambda: model.fit(x, block.labels)),
        }
        for run in runs.values():
            run()
        found = {name: median(values) for name, values in alternate(runs, times).items()}
    ratio = found["shards"] / found["memory"]
    return Claim("pace", found["shards"], found["memory"], "rounds/s", ratio, BARS["pace"])


def measure(quick: bool, only: list[str]) -> list[Claim]:
    nbytes = QUICK_BYTES if quick else FULL_BYTES
    claims = []
    for name in BARS:
        if only and name not in only:
            continue
        if not Path("/proc/self/status").exists() and name != "pace":
            claims.append(Claim(name, skipped="needs Linux, which says what a process has used"))
            continue
        if name == "pace":
            claims.append(pace_claim(3 if quick else 7))
        else:
            claims.append(memory_claim(name, nbytes))
    return claims


if __name__ == "__main__":
    print(MARK + json.dumps(fit(Path(sys.argv[1]))))
