"""Compiled kernels are cached on disk and recompiled when one of their files changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import manyhands
import manyhands.kernels.compile

CONSTANT = """
from manyhands.kernels.compile import compiled
NUMBER = {number}
@compiled
def unused(x):
    return x
"""
LOOP = """
from manyhands.kernels.compile import compiled
from constant import NUMBER
@compiled
def loop(x):
    return x + NUMBER
"""
ASK = """
import sys
from pathlib import Path
import manyhands.kernels.compile
manyhands.kernels.compile.PACKAGE = Path(sys.argv[1])
manyhands.kernels.compile._sources.cache_clear()  # importing manyhands has asked for it
sys.path.insert(0, sys.argv[1])
from loops import loop
print(loop(1), sum(loop.stats.cache_hits.values()))
"""


def _ask(folder: Path) -> list[str]:
    command = [sys.executable, "-B", "-c", ASK, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_machine_code_is_kept_until_a_file_that_it_was_made_of_changes(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOP)
    (tmp_path / "constant.py").write_text(CONSTANT.format(number=1))
    assert _ask(tmp_path) == ["2", "0"]
    assert _ask(tmp_path) == ["2", "1"]
    (tmp_path / "constant.py").write_text(
        CONSTANT.format(number=5)
    )  # numba alone would not notice: loops.py is the same
    assert _ask(tmp_path) == ["6", "0"]
    assert _ask(tmp_path) == ["6", "1"]


def test_all_files_that_compile_are_looked_at() -> None:
    sources = {
        path: path.read_text()
        for path in manyhands.kernels.compile.PACKAGE.rglob("*.py")
        if path.name != "compile.py"
    }
    assert not [path for path, text in sources.items() if "njit" in text], (
        "use manyhands.kernels.compile"
    )
    assert Path(manyhands.__file__).parent == manyhands.kernels.compile.PACKAGE
