"""What people who join rely on: hooks, workflow, changelog, citation and papers fit the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import manyhands
from manyhands.merge import STRATEGIES
from support.paths import REPOSITORY

yaml = pytest.importorskip("yaml", reason="PyYAML comes with pre-commit, of the extra `dev`")


def read(path: str) -> Any:
    return yaml.safe_load((REPOSITORY / path).read_text())


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return found


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert str(citation["version"]) == manyhands.__version__ == project()["version"]
    assert citation["license"] == project()["license"]


def test_hooks_run_the_tools_of_make_check() -> None:
    loop = re.search(
        r"^check:.*?for tool in (.*?);",
        (REPOSITORY / "Makefile").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert loop is not None
    tools = [quoted or word for quoted, word in re.findall(r'"([^"]+)"|(\S+)', loop[1])]
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["entry"].removeprefix(".venv/bin/") for hook in hooks] == tools
    assert {hook["language"] for hook in hooks} == {"system"}, "others would need a network"


def test_the_workflow_runs_every_python_that_the_package_allows() -> None:
    job = read(".github/workflows/ci.yml")["jobs"]["test"]
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project()["requires-python"])
    assert bounds is not None
    assert job["strategy"]["matrix"]["python"] == [
        f"3.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))
    ]
    last = job["steps"][-1]
    assert last["run"] == ".ci/run"
    assert "PYTHON" in last["env"], "make would take any python3 that it finds"


@pytest.mark.parametrize(
    "form",
    sorted((REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*_*.yml")),
    ids=lambda path: path.stem,
)
def test_forms_have_what_github_asks_for(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= content.keys()
    ids = [part["id"] for part in content["body"] if part["type"] != "markdown"]
    assert ids and len(set(ids)) == len(ids)
    if form.stem == "wrong_numbers":
        assert {"verify", "doctor"} <= set(ids)


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    sections = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"


@pytest.mark.parametrize("rule", STRATEGIES)
def test_every_strategy_has_its_paper(rule: str) -> None:
    rows = [
        line
        for line in (REPOSITORY / "docs/papers.md").read_text().splitlines()
        if line.startswith("|")
    ]
    assert any(f"`merge={rule}" in row for row in rows), (
        f"add a row with `merge={rule}` to docs/papers.md"
    )


def test_pins_are_sorted_and_hold_every_tool_of_dev() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    names = [plain(line.split("==")[0]) for line in lines if not line.startswith("#")]
    assert names == sorted(set(names))
    extras = project()["optional-dependencies"]
    installed, left = set[str](), ["dev", "release", "docs"]  # what users alone add is not pinned
    while left:
        for name in extras[left.pop()]:
            if name.startswith("manyhands["):
                left += name.removeprefix("manyhands[").rstrip("]").split(",")
            else:
                installed.add(plain(name))
    assert {"pytest", "scikit-learn", "twine"} <= installed <= set(names)


def plain(name: str) -> str:
    """A package's name as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()
