"""A run directory has one owner at a time, and to resume means the run that was meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.errors import CheckpointError, RunBusy
from manyhands.recover.directory import choose, claim, read_words, write_plan


def run(base: Path, name: str) -> Path:
    (base / name / "checkpoints").mkdir(parents=True)
    return base / name


def test_a_new_run_gets_a_new_directory_also_in_the_same_second(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        paths.append(choose(tmp_path, "lenet", None, False))
        paths[-1].mkdir(parents=True)
    assert len(set(paths)) == 3 and all(p.name.startswith("lenet-2") for p in paths)


def test_to_resume_means_the_newest_run_of_exactly_this_name(tmp_path: Path) -> None:
    for name in (
        "lenet-20260101-100000",
        "lenet-20260102-100000-2",
        "lenet-20260102-100000-10",
        "lenet-20260102-100000",
        "lenet-big-20260103-100000",
    ):
        run(tmp_path, name)
    (tmp_path / "lenet-20260109-100000").mkdir()  # no checkpoint: nothing to resume
    assert choose(tmp_path, "lenet", None, True).name == "lenet-20260102-100000-10"
    assert choose(tmp_path, "lenet-big", None, True).name == "lenet-big-20260103-100000"
    with pytest.raises(
        CheckpointError,
        match=r"there is no run of 'mlp' to resume in .*; give its directory with --dir, or start "
        r"anew",
    ):
        choose(tmp_path, "mlp", None, True)


def test_a_given_directory_is_taken_but_an_earlier_run_in_it_is_not_overwritten(
    tmp_path: Path,
) -> None:
    assert choose(tmp_path, "x", str(tmp_path / "mine"), False) == tmp_path / "mine"
    earlier = run(tmp_path, "earlier")
    with pytest.raises(
        RunBusy,
        match=r"earlier holds an earlier run; resume it \(--resume\), or give another directory",
    ):
        choose(tmp_path, "x", str(earlier), False)
    assert choose(tmp_path, "x", str(earlier), True) == earlier
    with pytest.raises(
        CheckpointError, match=r"there is no run to resume in .*none: the directory does not exist"
    ):
        choose(tmp_path, "x", str(tmp_path / "none"), True)


@pytest.mark.parametrize("name", ["plan.toml", "words.txt", "owner", "events", "curves.png"])
def test_a_folder_of_the_user_is_refused_where_a_run_would_write_over_its_files(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    file.mkdir() if name == "events" else file.write_text("data = 2")
    (tmp_path / "job.py").touch()
    for resume in (False, True):
        with pytest.raises(
            RunBusy,
            match=rf"is not a run directory but holds {name}, which a run would write over; give an"
            r" empty or a new directory with --dir",
        ):
            choose(tmp_path, "x", str(tmp_path), resume)


def test_a_folder_with_other_files_or_of_a_run_without_checkpoints_is_taken(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").touch()
    assert choose(tmp_path, "x", str(tmp_path), False) == tmp_path
    claim(tmp_path).close()
    write_plan(tmp_path, "data = 2\n", "data=2")
    assert read_words(tmp_path) == "data=2"
    assert choose(tmp_path, "x", str(tmp_path), False) == tmp_path


def test_a_run_directory_that_cannot_be_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for resume in (False, True):
        with pytest.raises(
            CheckpointError, match=r"file is a file, and a run needs a directory; give another one"
        ):
            choose(tmp_path, "x", str(tmp_path / "file"), resume)
    with pytest.raises(
        CheckpointError,
        match=r"file/inside cannot be made or written \(Not a directory\); free space or permit "
        r"writing there, or give another directory with --dir",
    ):
        claim(choose(tmp_path, "x", str(tmp_path / "file" / "inside"), False))


def test_a_full_disk_at_the_start_is_said_in_a_sentence(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    (tmp_path / "plan.toml").symlink_to(full)
    with pytest.raises(CheckpointError, match=r"\(No space left on device\); free space"):
        write_plan(tmp_path, "data = 2\n", "data=2")


HOLD = """
import sys
from pathlib import Path
from manyhands.recover.directory import claim
handle = claim(Path(sys.argv[1]))
print("owned", flush=True)
sys.stdin.read()
"""


def test_a_directory_in_use_by_a_live_process_is_refused_and_free_when_that_is_killed(
    tmp_path: Path,
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"owned\n"
    with pytest.raises(
        RunBusy,
        match=rf"is in use by a live run \(pid {owner.pid}\); wait for it, stop it, or give "
        r"another directory",
    ):
        claim(tmp_path)
    owner.kill()
    owner.communicate()
    claim(tmp_path).close()
    claim(tmp_path).close()
