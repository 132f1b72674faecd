"""Paths of the repository that tests read: the package, the examples, the zoo of small tasks."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
REPOSITORY = TESTS.parent
PACKAGE = REPOSITORY / "src" / "manyhands"
EXAMPLES = REPOSITORY / "examples"
ZOO = SUPPORT / "zoo"


def zoo_file(name: str) -> dict[str, Any]:
    """The names that a file of the zoo defines; `task` is the function that makes its task."""
    return runpy.run_path(str(ZOO / f"{name}.py"))


def zoo_task(name: str) -> Any:
    return zoo_file(name)["task"]()
