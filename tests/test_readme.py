"""README and docs are true: examples run, every word, verb, path and link exists."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import get_args

import pytest

from manyhands.cli.main import app
from support.docs import rows
from support.paths import REPOSITORY

SOURCE = REPOSITORY / "src" / "manyhands"
README = (REPOSITORY / "README.md").read_text()
BENCHMARKS = {
    p.stem.replace("_", "-") for p in (REPOSITORY / "benchmarks").glob("*.py") if p.stem != "common"
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path | None) -> Path:
    """An empty folder to run in, with real data where there is any."""
    monkeypatch.chdir(tmp_path)
    if data_dir is not None:
        monkeypatch.setenv("MANYHANDS_DATA", str(data_dir))
    return tmp_path


def section(title: str) -> str:
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE
    )
    assert found is not None, title
    return found[1]


def code(text: str) -> str:
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


# -- examples --


def test_the_example_has_twelve_lines_and_trains(here: Path) -> None:
    example = code(section("Twelve lines"))
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
    assert example.endswith('if __name__ == "__main__":\n    mh.train(task)\n')
    (here / "mine.py").write_text(
        example.replace("mh.train(task)", 'result = mh.train(task, "steps=3", directory="run")')
    )
    result = runpy.run_path("mine.py", run_name="__main__")["result"]
    assert result.rounds == 3 and result.metrics["train_loss"] > 0
    assert (here / "run" / "curves.png").exists()


# -- the tree --


def test_the_tree_names_every_room_and_nothing_that_does_not_exist() -> None:
    tree = re.search(r"```\nsrc/manyhands/\n(.*?)```", section("The tree"), re.DOTALL)
    assert tree is not None
    named, room = [], ""
    for line in tree[1].splitlines():
        indent, path, phrase = re.fullmatch(r"( +)(\S+) +(\S.*)", line).groups()  # type: ignore
        assert len(indent) in (2, 4) and phrase
        room = room if len(indent) == 4 else path
        named.append(path if len(indent) == 2 else f"{room}{path}")
    assert len(named) == len(set(named))
    for path in named:
        there = SOURCE / path
        assert there.is_dir() if path.endswith("/") else there.is_file(), f"{path} does not exist"
    rooms = {f"{p.parent.relative_to(SOURCE).as_posix()}/" for p in SOURCE.rglob("__init__.py")}
    assert rooms - {"./"} - set(named) == set(), "the tree leaves these out"


# -- verbs, words, benchmarks, links --


def test_the_verbs_are_those_of_the_command_line() -> None:
    listed = [re.match(r"`manyhands (\w+)", row[0]) for row in rows(section("Commands"))[1:]]
    assert [m[1] for m in listed if m] == [
        c.name or c.callback.__name__ for c in app.registered_commands if c.callback
    ]


def test_the_benchmarks_are_those_that_are_there() -> None:
    assert {row[0].strip("`") for row in rows(section("Benchmarks"))[1:]} == BENCHMARKS
    bench = next(
        c.callback for c in app.registered_commands if c.callback and c.callback.__name__ == "bench"
    )
    said = get_args(inspect.get_annotations(bench, eval_str=True)["name"])[1].help
    assert set(said.rstrip(".").replace("or ", "").split(", ")) == {*BENCHMARKS, "all"}
