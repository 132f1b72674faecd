"""The benchmark `recovery` reads gap, joined and lost steps from the lines of ranks."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from support.paths import REPOSITORY


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = REPOSITORY / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    spec = spec_from_file_location("recovery", folder / "recovery.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recovery", module)
    spec.loader.exec_module(module)
    return module


def trained(bench: ModuleType, pids: list[int], start_s: float, first: int, count: int) -> list:
    """Steps of 0.1 s each; ranks end them one after the other."""
    return [
        bench.Step(start_s + 0.1 * i + 0.001 * rank, first + i, rank, pid)
        for i in range(count)
        for rank, pid in enumerate(pids)
    ]


def test_a_step_under_way_may_still_end_and_the_gap_is_up_to_the_first_one_after_it(
    bench: ModuleType,
) -> None:
    before = trained(bench, [10, 11, 12, 13], 0.0, 1, 10)  # the last one ends at 0.903
    under_way = trained(bench, [10, 11, 12], 1.0, 11, 1)
    alone = trained(bench, [10, 11, 12], 2.5, 12, 10)
    again = trained(bench, [10, 11, 12, 14], 3.6, 22, 10)
    kill = bench.Kill(0.95, 13)
    assert bench.recovery(before + under_way, kill, 4, 99.0) is None
    found = bench.recovery(before + under_way + alone, kill, 4, 99.0)
    assert found.gap_s == pytest.approx(2.5 - 0.95)
    assert found.joined_s is None and found.lost == 0
    found = bench.recovery(before + under_way + alone + again, kill, 4, 99.0)
    assert found.joined_s == pytest.approx(3.603 - 0.95)


def test_where_all_ranks_are_started_again_steps_are_lost(bench: ModuleType) -> None:
    before = trained(bench, [10, 11, 12, 13], 0.0, 1, 30)
    after = trained(bench, [20, 21, 22, 23], 9.0, 21, 10)  # from a checkpoint after step 20
    found = bench.recovery(before + after, bench.Kill(2.95, 11), 4, 99.0)
    assert found.gap_s == pytest.approx(9.0 - 2.95)
    assert found.joined_s == pytest.approx(9.003 - 2.95)
    assert found.lost == 10
