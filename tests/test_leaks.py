"""The guard of conftest.py fails a test that leaves something behind: every test here leaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LEAKY = """
import os, signal, subprocess, sys, threading
import torch.distributed as dist
from manyhands.exchange import segments

process = None
end = threading.Event()

def test_process():
    global process
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def test_thread():
    threading.Thread(target=end.wait, name="forgotten").start()

def test_segment():
    segments.create(64)

def test_variable():
    os.environ["FORGOTTEN"] = "yes"

def test_handler():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_tidy(monkeypatch):
    monkeypatch.setenv("FORGOTTEN", "no")
    assert subprocess.run([sys.executable, "-c", ""]).returncode == 0
    threading.Thread(target=print).start()

def test_end():
    end.set()
    process.communicate()
"""


def test_a_test_that_leaks_is_an_error_and_a_tidy_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        (Path(__file__).parent / "conftest.py")
        .read_text()
        .replace("GRACE_S = 3.0", "GRACE_S = 0.2")
    )
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    for leak in (
        "child process",
        "thread 'forgotten'",
        "shared memory",
        "environment variable FORGOTTEN: None became 'yes'",
        "process group",
        "a handler of SIGUSR1",
    ):
        assert done.stdout.count(leak) >= 1, done.stdout
    assert "8 passed, 6 errors" in done.stdout, done.stdout
