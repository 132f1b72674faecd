"""Commands that only read their arguments answer without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "numba", "matplotlib")
CODE = """
import json, sys
sys.argv = ["manyhands", *json.loads(sys.argv[1])]
code = 0
try:
    from manyhands.cli import main
    main()
except SystemExit as e:
    code = e.code
print(json.dumps([code or 0, sorted(set(sys.modules) & set({heavy}))]))
"""


def answer(folder: Path, *words: str) -> tuple[int, list[str], str]:
    """Exit code, heavy modules that were imported, and what was printed."""
    code = CODE.replace("{heavy}", repr([*HEAVY, "rich"]))
    command = [sys.executable, "-c", code, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    *said, last = done.stdout.splitlines()
    exit_code, found = json.loads(last)
    return exit_code, found, "\n".join(said) + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--help"], 0, "Train a script's task"),
        (["run", "--help"], 0, "--resume"),
        (["rnu", "mine.py"], 2, "No such command 'rnu'"),
        (["run", "missing.py"], 2, "missing.py"),
        (["run", "mine.py", "--reusme"], 2, "--reusme"),
    ],
)
def test_help_and_a_mistyped_command_do_not_wait_for_torch(
    tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    (tmp_path / "mine.py").write_text("def task(): ...\n")
    exit_code, found, said = answer(tmp_path, *words)
    assert exit_code == code and says in said, said
    assert not set(found) & set(HEAVY)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "mine.py", "dta=2"], "unknown plan word 'dta'; did you mean data?"),
        (["run", "mine.py", "data=0"], "data=0, but at least 1 rank is needed"),
        (["run", "mine.py", "merge=local_sdg"], "did you mean local_sgd?"),
        (["run", "mine.py", "merge=local_sgd", "merge.perid=8"], "has merge.period"),
        (["run", "mine.py", "compress=zip"], "unknown compress='zip'"),
        (["run", "mine.py", "split=orderd"], "did you mean ordered?"),
        (["run", "mine.py", "algorithm=rign"], "did you mean ring?"),
        (["run", "mine.py", "precision=bf61"], "one of fp32, bf16, fp16 is needed"),
        (["run", "mine.py", "epochs=many"], "float is needed"),
        (["run", "mine.py", "wire=int8"], "the word is now compress"),
        (["run", "mine.py", "missing.toml"], "plan file missing.toml does not exist"),
        (["verify", "mine.py", "dta=2"], "did you mean data?"),
        (["chaos", "mine.py", "dta=2"], "did you mean data?"),
        (["scale", ".", "dta=2"], "did you mean data?"),
        (["join", ".", "mine.py", "dta=2"], "did you mean data?"),
    ],
)
def test_a_typo_in_a_plan_does_not_wait_for_torch(
    tmp_path: Path, words: list[str], says: str
) -> None:
    (tmp_path / "mine.py").write_text("def task(): ...\n")
    exit_code, found, said = answer(tmp_path, *words)
    assert exit_code == 2 and says in said, said
    assert not found and "Traceback" not in said
