"""Commands and code of README and docs: all parse, the quick ones run, and with -m slow all run."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from manyhands.assembly.rank_context import Options
from manyhands.cli.main import app
from manyhands.cli.verify import verify
from manyhands.entry import defines_task, start, work_script
from manyhands.errors import LaunchError
from manyhands.launch import lab
from manyhands.plan import words as plan_words
from support.commands import CLI, environ
from support.docs import PAGES, Shown, block_commands, code_blocks, inline_commands, name
from support.paths import EXAMPLES, REPOSITORY

README = REPOSITORY / "README.md"
IN_BLOCKS = [shown for page in PAGES for shown in block_commands(page)]
ALL = [*IN_BLOCKS, *(shown for page in PAGES for shown in inline_commands(page))]
BENCHMARKS = {p.stem.replace("_", "-") for p in (REPOSITORY / "benchmarks").glob("*.py")}
# what ends otherwise than well, on purpose
ENDS_WITH = {
    "manyhands run mine.py dat=2": 2,
    "manyhands verify mine.py data=2 merge=local_sgd": 1,
}
# needs other hosts, waits for somebody, or takes minutes
NOT_RUN = ("manyhands server", "manyhands bench", "manyhands chaos", "torchrun", "srun", "mpirun")


def example() -> str:
    """The twelve lines, which pages call mine.py."""
    return next(code for code in code_blocks(README, "python") if "mh.train(task)" in code)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path | None) -> Path:
    """A folder with the files that pages name."""
    if data_dir is not None:
        monkeypatch.setenv("MANYHANDS_DATA", str(data_dir))
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "mine.py").write_text(example())
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "_*"))
    for script in "script.py", "lenet.py":
        shutil.copy(EXAMPLES / "lenet.py", tmp_path / script)
    (tmp_path / "plan.toml").write_text("data = 2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- all parse --


def test_pages_show_commands() -> None:
    assert len(IN_BLOCKS) > 50 and len(ALL) > len(IN_BLOCKS) + 10
    assert {shown.page for shown in IN_BLOCKS} > {"README.md", "docs/tutorials/first-run.md"}


def check(words: list[str]) -> None:
    """Raises where the command could not be started as it is written."""
    program, *rest = words
    if program == "manyhands":
        check_verb(rest)
    elif rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]) is not None, rest[1]
    else:
        script = next(word for word in rest if word.endswith(".py"))
        assert Path(script).is_file(), script


def check_verb(words: list[str]) -> None:
    verb, *arguments = words
    for word in arguments:
        if word.startswith("runs/"):
            Path(word).mkdir(parents=True, exist_ok=True)
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert verb in commands, verb
    if not arguments or "--help" in arguments:
        return
    given = commands[verb].make_context(verb, arguments).params
    match verb:
        case "run" | "verify":
            plan_words.parse(given["words"] or [])
        case "race":
            for plan in given["plans"] or []:
                if plan.split()[:1] != ["ddp"]:
                    plan_words.parse(plan_words.overlay(*given["common"] or [], plan))
        case "lab":
            lab.parse(*(given[key] for key in ("hosts", "rate", "delay", "loss")))
            check_verb([word for word in given["command"] if word != "--"])
        case "bench":
            assert given["name"] in {*BENCHMARKS, "all"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_of_a_page_can_be_started_as_they_are_written(page: Path, sandbox: Path) -> None:
    for shown in (*block_commands(page), *inline_commands(page)):
        try:
            check(shown.words)
        except Exception as e:
            if ENDS_WITH.get(shown.line) == 2 and "did you mean" in str(e):
                continue
            pytest.fail(f"{shown}: {type(e).__name__}: {e}")


def test_plans_of_the_readme_parse() -> None:
    """Those of the table "I want to ...", in its right column."""
    wanted = re.search(r"^## I want to \.\.\.\n(.*?)^## ", README.read_text(), re.S | re.M)
    assert wanted is not None
    cells = [
        cell for row in re.findall(r"^\|.*\|$", wanted[1], re.M) for cell in row.split("|")[2:3]
    ]
    plans = [p for cell in cells for p in re.findall(r"`([a-z_.]+=[^`]*)`", cell)]
    assert len(plans) > 15
    for plan in plans:
        plan_words.parse(plan_words.overlay("data=5", plan))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_blocks_compile(page: Path) -> None:
    for code in code_blocks(page, "python"):
        ast.parse(textwrap.dedent(code))
    for code in code_blocks(page, "toml"):
        tomllib.loads(code)
    for code in code_blocks(page, "json"):
        json.loads(code)


def test_the_file_of_the_tutorial_is_that_of_the_readme() -> None:
    tutorial = REPOSITORY / "docs" / "tutorials" / "first-run.md"
    assert example() in code_blocks(tutorial, "python")


def test_blocks_that_need_nothing_run(capsys: pytest.CaptureFixture[str]) -> None:
    how_to = REPOSITORY / "docs" / "how-to"
    for page, said in (
        ("add-a-merge-strategy.md", "[1.0, 1.0, 1.0]"),
        ("add-a-pipeline-schedule.md", "16 "),
        ("add-a-server-optimizer.md", ""),
        ("add-a-compression.md", ""),
    ):
        exec(code_blocks(how_to / page, "python")[0], {"__name__": "page"})
        assert said in capsys.readouterr().out


# -- the quick ones run: all plans of one rank here, all of two ranks in one job --


def plans(size: int) -> list[tuple[str, str]]:
    """(script, words) of every `manyhands run` in a block that takes so many ranks, each once.

    Words that say how long are left out: here each takes two steps.
    """
    found = {}
    for shown in IN_BLOCKS:
        if shown.words[:2] != ["manyhands", "run"] or shown.line in ENDS_WITH:
            continue
        script, *rest = (w for w in shown.words[2:] if not w.startswith(("--", "runs/")))
        long = ("epochs=", "steps=", "save=")
        words = [w for w in rest if not w.startswith(long) and not w.endswith(".toml")]
        if plan_words.parse(words).layout.size == size:
            found[script.replace("examples/lenet.py", "lenet.py"), " ".join(words)] = None
    return list(found)


def run_each(cases: list[tuple[str, str]], words: Any, options: Options) -> dict[str, Any]:
    """One rank's part in the runs of all cases, one after the other."""
    for i, (script, plan) in enumerate(cases):
        short = {"steps": 2, "save": "off"} if defines_task(Path(script)) else {"save": "off"}
        own = Options(Path(script).stem, f"runs/{i}", quiet=True)
        given = {**plan_words.overlay(plan), **short, "threads": 1}
        work_script(script, [], given, plan_words.parse(given), own)
    return {}


def names_of_events(folder: Path) -> set[str]:
    lines = (line for file in folder.glob("runs/*/events/*.jsonl") for line in file.open())
    return {json.loads(line)["name"] for line in lines}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2])
def test_the_plans_that_pages_show_train(size: int, sandbox: Path) -> None:
    cases = plans(size)
    assert len(cases) > size
    if size == 1:
        run_each(cases, {}, Options(quiet=True))
    else:
        start(functools.partial(run_each, cases), "data=2 timeout_s=60", Options(quiet=True))
    assert len(list(sandbox.glob("runs/*/events/rank-0.jsonl"))) == len(cases)
    page = (REPOSITORY / "docs" / "reference" / "events.md").read_text()
    assert {event for event in names_of_events(sandbox) if f"`{event}`" not in page} <= {"server"}


def test_the_verdict_that_the_tutorial_shows(sandbox: Path, capsys: Any) -> None:
    assert verify(Path("mine.py"), ["data=2"], steps=2)
    assert "EQUAL up to the order of summation" in capsys.readouterr().out


# -- all run, page by page, as they are written --


def runnable(page: Path) -> list[Shown]:
    shown = [s for s in block_commands(page) if not s.line.startswith(NOT_RUN)]
    return shown if lab_works() else [s for s in shown if "manyhands lab" not in s.line]


@functools.cache
def lab_works() -> bool:
    try:
        return lab.run(lab.parse(1, None, None, None), ["doctor"]) == 0
    except LaunchError:
        return False


def newest(word: str) -> str:
    """A run directory that a page names with its time: the last one that was made."""
    if not (dated := re.fullmatch(r"(runs/\w+-)\d{8}-\d{6}", word)):
        return word
    return max(map(str, Path().glob(f"{dated[1]}*")))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", [p for p in PAGES if block_commands(p)], ids=name)
def test_commands_of_a_page_run_in_order(page: Path, sandbox: Path) -> None:
    for shown in runnable(page):
        program, *rest = [newest(word) for word in shown.words]
        line = [*CLI, *rest] if program == "manyhands" else [sys.executable, *rest]
        done = subprocess.run(
            line, env=environ(OMP_NUM_THREADS="1"), capture_output=True, text=True
        )
        if "sch_netem" in done.stderr:  # this kernel cannot delay or lose packets
            continue
        wanted = ENDS_WITH.get(shown.line, 0)
        assert done.returncode == wanted, f"{shown}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
