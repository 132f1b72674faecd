"""What the pages of docs/ say is so: words, options, defaults, strategies, verbs, links."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands import own_loop
from manyhands.core import Layout, Plan
from manyhands.exchange import algorithms
from manyhands.exchange.compression import CODECS
from manyhands.merge import STRATEGIES
from manyhands.plan import vocabulary, words
from manyhands.split.data import SPLITS
from support.docs import PAGES, code_blocks, name, rows
from support.paths import REPOSITORY

DOCS = REPOSITORY / "docs"
MAKE_STRATEGIES = runpy.run_path(str(DOCS / "make_strategies.py"))
MAKE_CLI = runpy.run_path(str(DOCS / "make_cli.py"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and "\n::: " not in file.read_text():  # those of docstrings: mkdocs looks at them
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
            }, f"{page.name}: {target}"


# -- plan words, compression, strategies --


def test_every_plan_word_is_on_its_page_with_its_values_and_default() -> None:
    page = (DOCS / "plan-words.md").read_text()
    table = {row[0].strip("`"): row[1:] for row in rows(page) if row[0].startswith("`")}
    chosen = {
        "merge": tuple(STRATEGIES),
        "then": tuple(STRATEGIES),
        "compress": ("none", *CODECS),
        "algorithm": ("native", *algorithms.NAMES),
        "split": ("auto", *SPLITS),
    }
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Layout)}
    defaults |= {
        f.name: f.default for f in dataclasses.fields(Plan) if f.name in (*words.PLAIN, *chosen)
    }
    choices = {k: get_args(kind) for k, kind in words.PLAIN.items() if vocabulary.choices(kind)}
    choices |= {**chosen, "compile": ("true", "false")}
    assert sorted(table) == sorted(defaults)
    for word, (values, default, meaning) in table.items():
        assert meaning, word
        assert default == ("-" if defaults[word] is None else f"`{words._text(defaults[word])}`"), (
            word
        )
        if word in choices:
            assert values == ", ".join(map(str, choices[word])), word


def test_every_codec_is_on_its_page_and_every_option_with_its_default() -> None:
    table = {row[0].strip("`"): row[1:] for row in rows((DOCS / "compression.md").read_text())}
    for codec, kind in CODECS.items():
        assert all(table[codec]), codec
        for field in dataclasses.fields(kind):
            of, default, meaning = table[f"compress.{field.name}"]
            defaults = dict(
                zip(re.findall(r"`(\w+)`", of), re.findall(r"`([^`]+)`", default), strict=True)
            )
            assert defaults[codec] == words._text(field.default) and meaning, (codec, field.name)
    listed = {
        word.removeprefix("compress.") for word in table if re.fullmatch(r"compress\.\w+", word)
    }
    assert listed == {f.name for kind in CODECS.values() for f in dataclasses.fields(kind)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_page_of_a_strategy_is_what_its_docstring_says_now(strategy: str) -> None:
    page = DOCS / "strategies" / f"{strategy}.md"
    assert page.read_text() == MAKE_STRATEGIES["page"](strategy), "run `make docs`"


def test_every_strategy_has_its_row_of_costs_and_its_page() -> None:
    folder = DOCS / "strategies"
    table = [
        re.fullmatch(r"\[`(\w+)`\]\((\w+)\.md\)", row[0])
        for row in rows((folder / "README.md").read_text())[1:]
    ]
    assert [(m[1], m[2]) for m in table if m] == [(name, name) for name in STRATEGIES]
    assert {p.stem for p in folder.glob("*.md")} == {*STRATEGIES, "README"}


# -- the rest --


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = re.findall(r"^ +- .*?([\w./-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert there == set(menu) and len(menu) == len(set(menu))


def test_the_page_of_the_command_line_is_what_the_verbs_say_now() -> None:
    assert (DOCS / "reference" / "cli.md").read_text() == MAKE_CLI["page"](), "run `make docs`"


def test_public_names_are_in_the_reference() -> None:
    pages = "".join((DOCS / "reference" / f"{page}.md").read_text() for page in ("api", "errors"))
    shown = {*re.findall(r'heading: "mh\.(\w+)"', pages), *vars(mh.errors)}
    assert set(mh.__all__) - shown == set()
    for module, member in re.findall(r"^::: ([\w.]+)\.(\w+)$", pages, re.MULTILINE):
        there = hasattr(importlib.import_module(module), member)
        assert there or importlib.util.find_spec(f"{module}.{member}"), f"{module}.{member}"


def test_the_own_loop_of_the_tutorial_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # of a test that failed before: no script of ours has one
    monkeypatch.delattr("sys.last_value", raising=False)
    loop = code_blocks(DOCS / "tutorials" / "own-loop.md", "python")[0]
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    names: dict[str, Any] = {
        "loss_fn": nn.functional.cross_entropy,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": (torch.randn(100, 3), torch.randint(2, (100,))),
    }
    exec(loop, names)
    result = own_loop.close_joined()
    assert result is not None and result["rounds"] == 4  # twice 100 samples in batches of 64
    assert not torch.equal(names["model"].weight, before)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    done = subprocess.run([*line, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):  # it is read without a network
        assert not re.findall(r'(?:src|link [^>]*href)="(?:https?:)?//', page.read_text()), page
