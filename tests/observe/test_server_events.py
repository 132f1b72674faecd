"""Counters of parameter servers as events, and how every sink shows them."""

from __future__ import annotations

import io
import math
from pathlib import Path

import msgspec
import pytest
import torch

from manyhands.core import Event, Table
from manyhands.observe import curves
from manyhands.observe.chrome_trace import write_trace
from manyhands.observe.events import read
from manyhands.observe.progress import Progress, describe, fit
from manyhands.observe.server_events import figures, server_event
from manyhands.observe.text import rate
from manyhands.server.local_store import LocalStore
from support.recorded_runs import ZERO_S, progress, record, whole_run

STATS = {
    "pulled_rows": 2e6,
    "pushed_rows": 5e5,
    "pulled_bytes": 5e8,
    "pushed_bytes": 1.4e8,
    "server_requests": 100.0,
    "stale_0": 10.0,
    "stale_1": 10.0,
    "stale_3_4": 20.0,
    "stale_2": 0.0,
    "cache_hits": 300.0,
    "cache_lookups": 400.0,
    "refused/token": 2.0,
    "refused/garbage": 1.0,
    "hot/users/7": 0.25,
    "hot/items/9": 0.5,
    "now/queue": 3.0,
    "now/balance": 1.5,
    "duplicates": 4.0,
}
SERVED = server_event(STATS, ZERO_S + 1.5, 7, seconds=2.0)


def test_counts_become_rates_and_shares_and_everything_else_keeps_its_name() -> None:
    assert (SERVED.time_s, SERVED.rank, SERVED.round, SERVED.name) == (ZERO_S + 1.5, 0, 7, "server")
    assert SERVED.value == {
        **{"rows_per_s": 1.25e6, "bytes_per_s": 3.2e8, "requests_per_s": 50.0},
        **{
            "staleness": (10 * 1 + 20 * 3.5) / 40,
            "stale_0": 0.25,
            "stale_1": 0.25,
            "stale_3_4": 0.5,
        },
        **{
            "hit_rate": 0.75,
            "hottest": 0.5,
            "refused": 3.0,
            "queue": 3.0,
            "balance": 1.5,
            "duplicates": 4.0,
        },
    }


def test_the_names_are_those_that_a_store_uses() -> None:
    store = LocalStore(0, 1)
    store.create(Table("rows", dim=2))
    ids = torch.arange(1000)
    for _ in range(20):
        store.pull({"rows": ids})
        store.push({"rows": ids}, {"rows": torch.ones(1000, 2)}).wait()
    told = figures(store.stats(), 1.0)
    assert told["rows_per_s"] == 40_000 and told["bytes_per_s"] == 40_000 * 2 * 4
    assert told["staleness"] == 0.0 and told["stale_0"] == 1.0 and told["rows"] == 1000
    assert 0 < told["hottest"] < 0.1 and told["balance"] >= 1.0


def test_it_reads_back_from_the_run_directory(tmp_path: Path) -> None:
    assert read(record(tmp_path, [SERVED])) == [SERVED]


def test_the_line_of_progress_tells_rows_and_staleness_and_drops_them_where_it_is_narrow() -> None:
    stream = io.StringIO()
    shown = Progress(stream)
    shown.write([progress(1, 0.5), SERVED, progress(7, 0.7)])
    shown.close()
    exchange, before, stale, after = stream.getvalue().splitlines()
    assert exchange.startswith("legend      exch") and stale.startswith("legend      stale: upd")
    assert "rows/s" not in before and after.endswith(
        "exchange 4%  1.2M rows/s  stale 2.0  eta 0:41"
    )
    assert isinstance(SERVED.value, dict) and isinstance(progress(1, 0.5).value, dict)
    fields = describe({**SERVED.value, **progress(1, 0.5).value})  # type: ignore[dict-item]
    fit(fields, 70)
    assert "server" not in fields and "rate" in fields


def test_a_store_that_counts_nothing_yet_adds_nothing() -> None:
    assert "server" not in describe({"rows_per_s": math.nan, "staleness": 0.0})
    assert describe({"rows_per_s": 0.0, "bytes_per_s": 25_800_000.0})["server"] == "25.8 MB/s", (
        "a dense model has no rows"
    )


def test_traces_have_counters_and_the_caption_its_medians(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run", epochs=1)
    record(
        run,
        [
            SERVED,
            Event(ZERO_S + 3, 0, 9, "server", value={"rows_per_s": 750_000.0, "staleness": 2.25}),
        ],
    )
    found = msgspec.json.decode(write_trace(run, tmp_path / "trace.json").read_bytes())[
        "traceEvents"
    ]
    counters = {row["name"]: row["args"] for row in found if row["ph"] == "C"}
    assert counters["server rows/s"] == {"server rows/s": 750_000.0} and counters[
        "server queue"
    ] == {"server queue": 3.0}
    assert "1.0M rows/s   ·   staleness 2.1   ·" in curves._caption(curves.collect(read(run)))


def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    from manyhands.observe.loggers.tensorboard import TensorBoard

    sink = TensorBoard(tmp_path)
    sink.write([progress(1, 0.5), SERVED])
    sink.close()
    found = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [x.value for x in found.Scalars("server/staleness")] == [2.0]
    assert {"server/rows_per_s", "server/queue", "server/stale_0"} <= set(found.Tags()["scalars"])


def test_rates_read_well() -> None:
    assert [rate(x) for x in (0, 640, 12_345, 999_400, 1_234_567, 2.5e9)] == [
        "0",
        "640",
        "12.3k",
        "999k",
        "1.2M",
        "2.5G",
    ]
