"""Worker process: what one of the launcher's children is, and what it leaves."""

import subprocess

import pytest

from manyhands.launch.worker_process import WorkerProcess, pump


def test_lines_of_a_worker_are_passed_on_and_its_pipe_is_closed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with subprocess.Popen(["printf", r"one\ntwo\n"], stdout=subprocess.PIPE) as process:
        worker = WorkerProcess(1, process, [], None)
        pump(worker)
        assert process.stdout is not None
        assert process.stdout.closed  # an open one is a ResourceWarning in every fit on ranks
    assert worker.tail == ["one\n", "two\n"]
    assert capsys.readouterr().out == "[rank1]: one\n[rank1]: two\n"
