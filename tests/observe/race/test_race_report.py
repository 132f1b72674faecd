"""Race results from events written by hand; the table, picture and page made of them."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from manyhands.core import Event, Goal
from manyhands.errors import PlanError
from manyhands.observe.race import page, text_table
from manyhands.observe.race import picture as pictures
from manyhands.observe.race.results import (
    Entry,
    Point,
    Race,
    RunResult,
    follow,
    parse_target,
)
from support.recorded_runs import record

ZERO_S = 1_700_000_000.0
TARGET = Goal("accuracy", 0.8)


def run_by_hand(
    folder: Path, ranks: int = 4, waits: float = 0.1, exchange: str = "all_reduce"
) -> Path:
    """Ten rounds of one second; after every fifth an evaluation of two seconds. Launched at 0, the
    first round starts at 3.
    """
    for rank in range(ranks):
        at, events = (
            3.0,
            [Event(ZERO_S + 1, rank, 0, "start", value="data=4 merge=all_reduce")]
            if rank == 0
            else [],
        )
        events.append(
            Event(ZERO_S + 2, rank, 0, "all_reduce", 0.9, 7_000_000)
        )  # agreeing on the first weights
        for round in range(1, 11):
            events.append(Event(ZERO_S + at, rank, round, "round", 1.0))
            events.append(Event(ZERO_S + at + 0.9, rank, round, exchange, waits, 1000))
            at += 1
            if round % 5 == 0:
                # what an evaluation exchanges lies inside its span
                events.append(Event(ZERO_S + at + 1.0, rank, round, "all_reduce", 0.5, 5_000_000))
                value = {
                    "epoch": round / 5,
                    "step": float(round),
                    "loss": 1.0,
                    "accuracy": 0.08 * round,
                }
                events.append(Event(ZERO_S + at, rank, round, "evaluate", 2.0, value=value))
                at += 2
        record(folder, events, rank)
    return folder


def test_the_time_to_the_target_leaves_out_start_up_and_evaluations(tmp_path: Path) -> None:
    result = follow(run_by_hand(tmp_path / "run"), 7, TARGET, 500, ZERO_S)
    assert result.start_up_s == pytest.approx(3.0)
    assert [round(p.seconds, 6) for p in result.points] == [5.0, 10.0], (
        "the second one less the two seconds of the first"
    )
    assert result.reached == result.points[1] and result.time_s == pytest.approx(10.0)
    assert [p.samples for p in result.points] == [500, 1000] and result.reached.epoch == 2
    assert result.seconds == pytest.approx(10.0) and result.evaluate_s == pytest.approx(4.0)
    assert result.samples_per_s == pytest.approx(100.0)
    assert (result.seed, result.ranks, result.final, result.best) == (7, 4, 0.8, 0.8)
    assert result.words == "data=4 merge=all_reduce"


@pytest.mark.parametrize(
    ("exchange", "share"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_gather", 3 / 4),
        ("swap", 1.0),
        ("transfer", 1.0),
        ("push", 1.0),
        ("pull", 1.0),
    ],
)
def test_bytes_are_what_a_rank_must_send_and_not_those_of_the_start_or_of_evaluations(
    tmp_path: Path, exchange: str, share: float
) -> None:
    result = follow(run_by_hand(tmp_path / "run", exchange=exchange), 0, TARGET, 500)
    assert result.sent_bytes == pytest.approx(10 * 1000 * share)
    assert result.wait_share == pytest.approx(0.1)


def test_spans_that_a_full_file_lost_are_made_up_for(tmp_path: Path) -> None:
    whole = follow(run_by_hand(tmp_path / "whole"), 0, TARGET, 500)
    run_by_hand(tmp_path / "cut")
    for path in (tmp_path / "cut" / "events").iterdir():
        kept = [
            line
            for line in path.read_text().splitlines()
            if '"value":null' not in line or '"round":1,' in line
        ]
        path.write_text("\n".join(kept) + "\n")
    cut = follow(tmp_path / "cut", 0, TARGET, 500)
    assert cut.sent_bytes == pytest.approx(whole.sent_bytes)
    assert cut.time_s == whole.time_s and cut.seconds == pytest.approx(whole.seconds)


def test_ranks_that_go_at_their_own_pace_are_not_taken_for_files_that_lost_spans(
    tmp_path: Path,
) -> None:
    """Rank 0 does eight rounds and rank 1 two; then they meet, and both are in round eight."""
    for rank, rounds in enumerate((8, 2)):
        events = []
        for i in range(rounds):
            at = ZERO_S + i * 8 / rounds
            events += [
                Event(at, rank, i + 1, "push", 0.5, 1000),
                Event(at, rank, i + 1, "round", 8 / rounds),
            ]
        events.append(Event(ZERO_S + 8.0, rank, 8, "all_reduce", 0.0, 0))
        events.append(
            Event(ZERO_S + 8.0, rank, 8, "evaluate", 1.0, value={"epoch": 1.0, "accuracy": 0.9})
        )
        record(tmp_path / "run", events, rank)
    result = follow(tmp_path / "run", 0, TARGET, 500)
    assert result.sent_bytes == pytest.approx(
        (8000 + 2000) / 2
    ) and result.wait_share == pytest.approx((4 + 1) / 2 / 8)


def test_a_failed_run_is_told_as_far_as_it_came(tmp_path: Path) -> None:
    assert follow(tmp_path / "never", 1, TARGET, 500, error="OSError: no").error == "OSError: no"
    result = follow(run_by_hand(tmp_path / "run"), 0, TARGET, 500, error="Diverged: NaN")
    assert (
        result.error
        and result.points
        and Race(TARGET, [Entry("x", "", [result])]).entries[0].num_reached == 0
    )


def test_targets_are_read_as_at_least_and_at_most() -> None:
    assert parse_target("accuracy=0.88") == Goal("accuracy", 0.88)
    assert parse_target("-error=0.1") == Goal("error", 0.1, at_most=True)
    assert (
        parse_target("loss=0.3")
        == parse_target("-loss=0.3")
        == parse_target("-loss:0.3")
        == Goal("loss", 0.3, at_most=True)
    )
    for wrong in ("accuracy", "accuracy=high", "=0.3", "accuracy=nan", ""):
        with pytest.raises(PlanError, match=r"accuracy=0\.88"):
            parse_target(wrong)


def result(
    seed: int, seconds: float, value: float = 0.85, error: str = "", start: float = 0.5
) -> RunResult:
    """A run that climbs to `value` in `seconds`."""
    points = [
        Point(seconds * i / 10, i / 5, i * 100.0, start + (value - start) * i / 10)
        for i in range(1, 11)
    ]
    reached = next((p for p in points if TARGET.reached({"accuracy": p.value})), None)
    return RunResult(
        seed,
        points,
        reached,
        value,
        value,
        ranks=2,
        seconds=seconds,
        samples=1000.0,
        start_up_s=2.0,
        sent_bytes=1e6,
        wait_share=0.25,
        words="data=2 merge=x",
        error=error,
    )


def a_race(target: Goal = TARGET) -> Race:
    fast = Entry(
        "local_sgd period=8", "merge=local_sgd", [result(0, 4.0), result(1, 5.0), result(2, 6.0)]
    )
    peer = Entry("ddp", "ddp", [result(0, 20.0), result(1, 22.0), result(2, 24.0)], is_ddp=True)
    half = Entry(
        "easgd",
        "merge=easgd",
        [result(0, 3.0), result(1, 3.0, value=0.7), result(2, 3.0, value=0.75)],
    )
    broken = Entry(
        "bmuf",
        "merge=bmuf",
        [RunResult(s, error="Diverged: the loss <b>became</b> NaN") for s in range(3)],
    )
    return Race(target, [broken, half, peer, fast])


def test_plans_are_ranked_by_their_median_where_never_is_latest() -> None:
    race = a_race()
    assert [e.label for e in race.entries] == ["local_sgd period=8", "ddp", "easgd", "bmuf"]
    assert race.entries[0].time_s == pytest.approx(4.5) and race.ratio(
        race.entries[0]
    ) == pytest.approx(22 / 5)
    assert race.ratio(race.entries[1]) == 1.0 and math.isnan(race.ratio(race.entries[2]))
    numbers = race.plain()
    assert [p["time_s"] for p in numbers["plans"]][2:] == [None, None]  # type: ignore[attr-defined]


def test_the_table_says_median_range_best_and_failures() -> None:
    race = a_race()
    cells = {row[1]: row for row in text_table.rows(race)}
    titles = [c.title for c in text_table.columns(race)]
    assert all(len(row) == len(titles) for row in cells.values())
    assert cells["local_sgd period=8"][2:4] == ["4.50 s [3.60–5.40]", "4.40x"]
    assert cells["easgd"][2] == "not reached (1 of 3), best 0.8500" and cells["bmuf"][2] == "failed"
    assert "4.40 times sooner than ddp" in text_table.verdict(race)
    assert len(text_table.failures(race)) == 3
    alone = Race(TARGET, [Entry("x", "", [result(0, 4.0)])])
    assert "vs ddp" not in [
        c.title for c in text_table.columns(alone)
    ] and "ddp" not in text_table.verdict(alone)
    never = Race(TARGET, [Entry("x", "", [result(0, 4.0, value=0.6)])])
    assert text_table.verdict(never) == "no plan reached accuracy ≥ 0.8"


@pytest.mark.parametrize("width", [80, 110, 140, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    from rich.console import Console

    console = Console(width=width, record=True, file=__import__("io").StringIO(), color_system=None)
    console.print(text_table.table(a_race(), width))
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for words in ("local_sgd", "4.50 s", "4.40x", "failed", "0.8500", "accuracy"):
        assert words in text
    assert ("start-up" in text) == (width >= 140)


class Links(HTMLParser):
    """Everything in a page that would be fetched, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [
            v or ""
            for k, v in attrs
            if k in ("src", "href", "xlink:href", "srcset", "data")
            and not (v or "").startswith("#")
        ]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "img", "object") else []
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    out = page.write(
        a_race(),
        tmp_path / "race.html",
        "lenet.py",
        {"command": "manyhands race 'a & b'", "machine": "2 cores"},
    )
    html = out.read_text(encoding="utf-8")
    links = Links()
    links.feed(html)
    assert not links.open and links.fetched == []
    assert not re.search(r"url\((?!#)|@import|<!DOCTYPE svg|<\?xml", html)
    text = " ".join(links.text)
    for words in (
        "4.40x",
        "data=2 merge=x",
        "manyhands race 'a & b'",
        "2 cores",
        "the loss <b>became</b> NaN",
        "not reached",
        "start-up",
    ):
        assert words in text
    assert html.count("<svg") == 1 and "over seconds and over samples" in html


def test_the_picture_has_two_panels_a_target_line_and_a_colour_a_plan(tmp_path: Path) -> None:
    race = a_race()
    figure = pictures.figure(race, "lenet.py")
    assert [a.get_xlabel() for a in figure.axes] == ["seconds of training", "samples"]
    for axes in figure.axes:
        level = [line for line in axes.lines if list(line.get_ydata()) == [0.8, 0.8]]
        assert len(level) == 1, "the target"
        assert axes.get_ylim()[0] < 0.8 < axes.get_ylim()[1]
    assert len(set(pictures.colors(race).values())) == 4
    words = {t.get_text() for t in figure.texts}
    assert {"local_sgd period=8", "ddp", "4.50 s [3.60–5.40]", "failed"} <= words
    picture = pictures.draw(race, "lenet.py", tmp_path / "race.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_the_strong_line_is_the_run_in_the_middle() -> None:
    entry = Entry(
        "x", "", [result(0, 9.0), result(1, 1.0), result(2, 5.0), result(3, 2.0, error="killed")]
    )
    chosen = pictures.middle(entry)
    assert chosen is not None and chosen.seed == 2


def test_nothing_at_all_can_be_drawn_too(tmp_path: Path) -> None:
    race = Race(
        Goal("loss", 0.1, at_most=True),
        [Entry("x", "", [RunResult(0, error="killed")]), Entry("y", "", [])],
    )
    pictures.draw(race, "nothing", tmp_path / "race.png")
    assert "no plan reached loss ≤ 0.1" in page.page(
        race, "nothing", {}
    ) and "not run yet" in page.page(race, "", {})
