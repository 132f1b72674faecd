"""What README and docs say is so: the example runs, the tree is the tree, every word, verb and link exists."""

from __future__ import annotations

import dataclasses
import inspect
import re
import runpy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands import api as running
from manyhands.cli.main import app
from manyhands.core import Layout, Plan
from manyhands.exchange import algorithms
from manyhands.exchange.compression import CODECS
from manyhands.merge import STRATEGIES
from manyhands.plan import words
from manyhands.split.data import SPLITS
from support.paths import REPOSITORY

SOURCE = REPOSITORY / "src" / "manyhands"
README = (REPOSITORY / "README.md").read_text()
BENCHMARKS = {
    p.stem.replace("_", "-") for p in (REPOSITORY / "benchmarks").glob("*.py") if p.stem != "common"
}
MAKE_RULES = runpy.run_path(str(REPOSITORY / "docs" / "make_rules.py"))
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]


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


def rows(page: str) -> list[list[str]]:
    """The body of every table: cells without their bars."""
    lines = [
        line for line in page.splitlines() if line.startswith("|") and not line.startswith("|---")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


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


def test_the_own_loop_trains(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(
        "sys.last_value", raising=False
    )  # of a test that failed before: no script of ours has
    loop = code(section("Your own loop, five lines"))
    assert len(loop.splitlines()) == 5
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    names: dict[str, Any] = {
        "mh": mh,
        "nn": nn,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": (torch.randn(100, 3), torch.randint(2, (100,))),
    }
    exec(loop, names)
    result = running._close_joined()
    assert result is not None and result["rounds"] == 2  # 100 samples in batches of 64
    assert not torch.equal(names["model"].weight, before)


# -- the tree --


def test_the_tree_names_every_file_and_nothing_else() -> None:
    tree = re.search(r"```\nsrc/manyhands/\n(.*?)```", section("The tree"), re.DOTALL)
    assert tree is not None
    named, room = set(), ""
    for line in tree[1].splitlines():
        indent, path, phrase = re.fullmatch(r"( +)(\S+) +(\S.*)", line).groups()  # type: ignore
        assert len(indent) in (2, 4) and phrase
        room = room if len(indent) == 4 else path if path.endswith("/") else ""
        if not path.endswith("/"):
            named.add(f"{room}{path}")
    there = {
        p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*.py") if p.name != "__init__.py"
    }
    assert there - named == set(), "files that the tree in README.md leaves out"
    assert named - there == set(), "files of the tree in README.md that do not exist"


# -- verbs, words, benchmarks, links --


def test_the_verbs_are_those_of_the_command_line() -> None:
    listed = [re.match(r"`manyhands (\w+)", row[0]) for row in rows(section("Commands"))[1:]]
    assert [m[1] for m in listed if m] == [
        c.name or c.callback.__name__ for c in app.registered_commands if c.callback
    ]


def test_the_plan_words_of_the_readme_can_be_used() -> None:
    shown = [
        word
        for row in rows(section("Plan words"))[1:]
        for word in re.findall(r"`(\S+=\S+)`", row[0])
    ]
    assert len(shown) > 8
    for word in shown:
        words.parse(word)


def test_the_benchmarks_are_those_that_are_there() -> None:
    assert {row[0].strip("`") for row in rows(section("Benchmarks"))[1:]} == BENCHMARKS
    bench = next(
        c.callback for c in app.registered_commands if c.callback and c.callback.__name__ == "bench"
    )
    said = get_args(inspect.get_annotations(bench, eval_str=True)["name"])[1].help
    assert set(said.rstrip(".").replace("or ", "").split(", ")) == {*BENCHMARKS, "all"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
            }, f"{page.name}: {target}"


# -- docs/plan-words.md, docs/wires.md, docs/rules/ --


def test_every_plan_word_is_on_its_page_with_its_values_and_default() -> None:
    page = (REPOSITORY / "docs" / "plan-words.md").read_text()
    table = {row[0].strip("`"): row[1:] for row in rows(page) if row[0].startswith("`")}
    chosen = {
        "merge": tuple(STRATEGIES),
        "then": tuple(STRATEGIES),
        "compress": ("none", *CODECS),
        "algorithm": ("native", *algorithms.NAMES),
        "split": tuple(SPLITS),
    }
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Layout)}
    defaults |= {
        f.name: f.default for f in dataclasses.fields(Plan) if f.name in (*words.PLAIN, *chosen)
    }
    choices = {k: get_args(kind) for k, kind in words.PLAIN.items() if words._choices(kind)}
    choices |= {**chosen, "compile": ("true", "false")}
    assert sorted(table) == sorted(defaults)
    for word, (values, default, meaning) in table.items():
        assert meaning, word
        assert default == ("-" if defaults[word] is None else f"`{words._text(defaults[word])}`"), (
            word
        )
        if word in choices:
            assert values == ", ".join(map(str, choices[word])), word


def test_every_wire_is_on_its_page_and_every_option_with_its_default() -> None:
    table = {
        row[0].strip("`"): row[1:] for row in rows((REPOSITORY / "docs" / "wires.md").read_text())
    }
    for name, kind in CODECS.items():
        assert all(table[name]), name
        for field in dataclasses.fields(kind):
            of, default, meaning = table[f"wire.{field.name}"]
            defaults = dict(
                zip(re.findall(r"`(\w+)`", of), re.findall(r"`([^`]+)`", default), strict=True)
            )
            assert defaults[name] == words._text(field.default) and meaning, (name, field.name)
    listed = {word.removeprefix("wire.") for word in table if re.fullmatch(r"wire\.\w+", word)}
    assert listed == {f.name for kind in CODECS.values() for f in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_page_of_a_rule_is_what_its_docstring_says_now(name: str) -> None:
    page = REPOSITORY / "docs" / "rules" / f"{name}.md"
    assert page.read_text() == MAKE_RULES["page"](name), "run `make docs`"


def test_every_rule_has_its_row_in_the_table_of_costs_and_no_page_is_of_a_rule_that_is_gone() -> (
    None
):
    folder = REPOSITORY / "docs" / "rules"
    table = [
        re.fullmatch(r"\[`(\w+)`\]\((\w+)\.md\)", row[0])
        for row in rows((folder / "README.md").read_text())[1:]
    ]
    assert [(m[1], m[2]) for m in table if m] == [(name, name) for name in STRATEGIES]
    assert {p.stem for p in folder.glob("*.md")} == {*STRATEGIES, "README"}
