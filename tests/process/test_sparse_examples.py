"""Examples with embeddings run on workers and servers, and learn.

Those that are made for it equal one process.
"""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import pytest

from manyhands import entry as running
from manyhands.assembly.rank_context import Options
from manyhands.cli.verify import verify
from support.paths import EXAMPLES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path | None) -> Path:
    monkeypatch.chdir(tmp_path)
    if data_dir is not None:
        monkeypatch.setenv("MANYHANDS_DATA", str(data_dir))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words", "at_most"),
    [
        # always the more frequent answer: 0.55, and of the made-up rows 0.63
        ("click", "data=1 servers=1 steps=150 cache=1000 cache_age=2", 0.55),
        pytest.param("click", "data=2 servers=1 steps=100", 0.55, marks=pytest.mark.slow),
        pytest.param(
            "click", "data=2 servers=2 steps=100 hot_rows=0.02", 0.55, marks=pytest.mark.slow
        ),
        # the variance is 1.0, the mean 3
        pytest.param("factorise", "data=2 servers=2 steps=300", 1.2, marks=pytest.mark.slow),
    ],
)
def test_the_example_learns_with_its_rows_elsewhere(name: str, words: str, at_most: float) -> None:
    body = functools.partial(running.work_script, str(EXAMPLES / f"{name}.py"), [], words)
    result = running.start(body, words, Options(name, quiet=True))
    assert result.metrics["loss"] < at_most and result.checkpoint is not None


def test_workers_whose_rows_learn_together_equal_one_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verify(EXAMPLES / "click.py", "data=2 servers=1 embeddings=sync".split(), steps=4), (
        capsys.readouterr().out
    )


def test_the_examples_are_what_the_commands_load() -> None:
    for name in ("click", "factorise"):
        assert running.defines_task(EXAMPLES / f"{name}.py")
        assert (
            (EXAMPLES / f"{name}.py")
            .read_text()
            .endswith('\n\nif __name__ == "__main__":\n    mh.train(task)\n')
        )


def test_crossed_columns_do_not_meet_by_chance() -> None:
    names = runpy.run_path(str(EXAMPLES / "click.py"))
    _, (ids, _, _), _ = names["datasets"].clicks()
    ids = ids[:3000]
    crossed = names["crossed"](ids)
    pairs = {(i, j) for i in range(8) for j in range(i + 1, 8)}
    triples = {(*p, k) for p in pairs for k in range(p[1] + 1, 8)}
    groups = [ids[:, list(columns)].unique(dim=0) for columns in [*sorted(pairs), *sorted(triples)]]
    assert crossed.shape[1] == len(groups) == 84
    assert len(crossed.unique()) == sum(map(len, groups))
