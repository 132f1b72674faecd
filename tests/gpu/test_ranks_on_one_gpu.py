"""Several ranks on one card: every layout computes what one process computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.paths import EXAMPLES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "words",
    [
        "data=2",
        "data=2 precision=fp32 accumulate=2",
        "tensor=2",
        "pipe=2",
        "shard=2 zero=1",
        "shard=2 zero=2",
        "shard=2 zero=3",
        "data=2 tensor=2 ranks_per_gpu=4",
    ],
)
def test_a_layout_is_equal_to_one_process(words: str) -> None:
    if "ranks_per_gpu" not in words:
        words += " ranks_per_gpu=2"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "manyhands", "verify", str(EXAMPLES / "transformer.py")),
            *(*words.split(), "device=cuda", "--steps", "3"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL" in done.stdout


def test_a_run_over_a_server_trains_on_one_card(tmp_path: object) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "manyhands", "run", str(EXAMPLES / "click.py")),
            *("data=2", "servers=1", "device=cuda", "ranks_per_gpu=2", "steps=20"),
            *("--dir", f"{tmp_path}/run"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
