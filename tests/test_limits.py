"""Limits of size and of names: short files and functions, narrow lines, one name for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.paths import PACKAGE, REPOSITORY

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
FILES_OF_A_FOLDER = 18
COLUMNS = 100
# one merge strategy a file: the folder grows with every strategy
CATALOGUES = {"merge"}
# every command imports what it needs when it is called, so that `manyhands --help` is fast
IMPORTS_LATE = {"cli/main.py", "cli/run_verbs.py"}
# pairs of module names that share a stem, and why both names are right
SAME_STEM = {
    ("checkpoint", "checkpointing"): "the files, and when a run writes and reads them",
    ("core", "cores"): "the types of the package, and the doctor's count of processor cores",
    ("loss", "losses"): "a loss over sharded classes, and the losses of linear models",
    ("module", "modules"): "one replica's nn.Module, and the embedding modules of a model",
    ("observe", "observed"): "the room of recording, and the group that is recorded",
    ("server", "servers"): "the parameter server, and the server processes of a run",
    ("shard", "shared"): "two words: a server's shard, and the group over shared memory",
    ("trace", "tracer"): "recorded programs, and what records them",
    ("train", "trainer"): "the loop, and how its parts are assembled",
}


# -- files --


def files(*roots: str, suffix: str) -> list[Path]:
    """Files below `roots`, but for caches and hidden folders."""
    found = (f for root in roots for f in sorted((REPOSITORY / root).rglob(f"*{suffix}")))
    return [
        f
        for f in found
        if not any(p.startswith((".", "__pycache__")) for p in f.relative_to(REPOSITORY).parts)
    ]


PYTHON = files("src", "tests", "benchmarks", "examples", "docs", suffix=".py")
PROSE = [
    *sorted(REPOSITORY.glob("*.md")),
    *files("src", "tests", "benchmarks", "examples", "docs", suffix=".md"),
]
SOURCES = [f for f in PYTHON if f.is_relative_to(PACKAGE)]


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_are_files_to_look_at() -> None:
    assert len(SOURCES) > 150 and len(PYTHON) > len(SOURCES) + 100 and len(PROSE) > 20


# -- sizes --


def test_a_file_of_the_package_has_one_idea_and_at_most_400_lines() -> None:
    long = {name(f): n for f in SOURCES if (n := len(f.read_text().splitlines())) > LINES_OF_A_FILE}
    assert not long


def test_a_function_of_the_package_has_at_most_60_lines() -> None:
    long = {}
    for path in SOURCES:
        for node in functions(path):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LINES_OF_A_FUNCTION:
                long[f"{name(path)}:{node.lineno} {node.name}"] = lines
    assert not long


def test_a_folder_of_the_package_has_at_most_18_files() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in SOURCES:
        counts[path.parent.relative_to(PACKAGE).as_posix()] += 1
    crowded = {k: n for k, n in counts.items() if n > FILES_OF_A_FOLDER and k not in CATALOGUES}
    assert not crowded


def only_a_link(line: str) -> bool:
    """A link or a picture that fills its line, in a list or not: Markdown cannot break it."""
    return bool(
        re.fullmatch(r"\s*([-*] |\d+\. )?(!?\[.*?\]\(\S+\)|<?https?://\S+>?)[.,;]?\s*", line)
    )


def test_lines_have_at_most_100_columns() -> None:
    """In prose but for tables and links that fill their line: neither can be broken."""
    long = []
    for path in PYTHON + PROSE:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            table = path.suffix == ".md" and (line.lstrip().startswith("|") or only_a_link(line))
            if len(line) > COLUMNS and not table:
                long.append(f"{name(path)}:{number}: {len(line)} columns")
    assert not long, "\n".join(long)


# -- names --


def test_no_two_public_classes_have_one_name() -> None:
    where = defaultdict(list)
    for path in SOURCES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name(path))
    assert not {k: v for k, v in where.items() if len(v) > 1}


def stem(word: str) -> str:
    """`word` without its grammatical ending: serve, served, serving, server, serves -> serv."""
    for ending in ("ings", "ing", "ers", "er", "ed", "es", "s", "d"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word.removesuffix(ending)
            break
    if len(word) > 3 and word[-1] == word[-2]:  # planned: plann
        word = word[:-1]
    return word.rstrip("e")


def stems(module: str) -> tuple[str, ...]:
    return tuple(stem(word) for word in module.split("_"))


@pytest.mark.parametrize(
    "forms", ["serve served serving server", "plan planned plans", "trace tracer"]
)
def test_forms_of_a_word_have_one_stem(forms: str) -> None:
    assert len({stem(form) for form in forms.split()}) == 1


def test_words_that_only_look_alike_have_different_stems() -> None:
    assert len({stem(word) for word in ("red", "reduce", "ring", "tree", "train")}) == 5


def test_no_two_module_names_differ_only_in_their_grammatical_form() -> None:
    """The same name in two rooms is fine: the room tells them apart."""
    found = defaultdict(set)
    for path in SOURCES:
        module = path.parent.name if path.name == "__init__.py" else path.stem
        if not module.startswith("__"):
            found[stems(module)].add(module)
    alike = {tuple(sorted(names)) for names in found.values() if len(names) > 1}
    assert alike <= SAME_STEM.keys()
    assert alike >= SAME_STEM.keys(), "the list names pairs that are no longer there"


# -- how files begin --


def test_no_function_imports_a_module_of_the_package() -> None:
    late = []
    for path in SOURCES:
        if path.relative_to(PACKAGE).as_posix() in IMPORTS_LATE:
            continue
        for function in functions(path):
            for node in ast.walk(function):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if any(m.split(".")[0] == "manyhands" for m in modules):
                    late.append(f"{name(path)}:{function.lineno} {function.name}")
    assert not late


def test_every_module_says_in_its_first_line_what_it_is() -> None:
    wrong = []
    for path in SOURCES:
        lines = (ast.get_docstring(tree(path)) or "").splitlines() or [""]
        if not lines[0].endswith((".", ":")) or len(lines[0]) > COLUMNS - 3:
            wrong.append(f"{name(path)}: {lines[0]!r}")
    assert not wrong, "\n".join(wrong)
