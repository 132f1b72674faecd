"""A worker ends with its launcher, also while it is still being imported."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from manyhands.launch.lifeline import SOURCE


def started(folder: Path, source: str) -> subprocess.Popen[bytes]:
    (folder / "slow_to_import.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, "-c", SOURCE, "slow_to_import"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_it_ends_when_the_pipe_does_whatever_is_still_to_be_read(tmp_path: Path) -> None:
    source = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    with started(tmp_path, source) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.stdin.write(b"a payload that nobody has read")
        process.stdin.flush()
        assert process.poll() is None
        closed = time.monotonic()
        process.stdin.close()
        assert process.wait(10.0) == 1 and time.monotonic() - closed < 2.0


def test_it_is_the_main_module_and_reads_its_own_input(tmp_path: Path) -> None:
    source = (
        "import sys\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].started\n"
        "print(sys.argv[1:], sys.stdin.buffer.read(2), flush=True)\n"
    ).replace("import sys\n", "import sys\nstarted = True\n", 1)
    with started(tmp_path, source) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"hi")
        process.stdin.flush()
        assert process.stdout.readline() == b"[] b'hi'\n"
        assert process.wait(10.0) == 0
