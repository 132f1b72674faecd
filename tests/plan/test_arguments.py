"""Plan words, --resume and --dir on a script's command line; the rest stays the script's."""

from __future__ import annotations

import pytest

from manyhands.errors import PlanError
from manyhands.plan.arguments import read
from manyhands.plan.words import brief, continued, parse


def test_words_and_the_two_options_are_found_in_any_place() -> None:
    found = read("--lr 0.1 epochs=3 --dir runs/a merge.period=4 input.txt --resume -v".split())
    assert found.words == ("epochs=3", "merge.period=4")
    assert (found.resume, found.directory, found.unknown) == (True, "runs/a", ())
    assert read(["--dir=b"]).directory == "b" and not read(["--dir=b"]).resume


def test_what_looks_like_a_word_and_is_none_is_left_to_the_script_and_said() -> None:
    found = read(["epoch=3", "hidden=64", "--x=1", "a/b=c"])
    assert found.words == () and found.unknown == ("epoch=3", "hidden=64")
    assert "epoch=3 (did you mean epochs=?)" in found.notice and "hidden=64" in found.notice
    assert read(["--lr", "0.1"]).notice == ""


def test_an_option_of_the_same_name_that_takes_a_file_is_the_scripts_own() -> None:
    assert not read(["--resume", "checkpoint.pth"]).resume
    assert not read(["--resume=checkpoint.pth"]).resume
    assert read(["--resume", "epochs=3"]).resume and read(["--resume", "--lr", "1"]).resume


def test_what_stands_after_two_dashes_is_the_scripts_own() -> None:
    assert read(["data=2", "--", "epochs=3", "--resume"]).words == ("data=2",)
    with pytest.raises(PlanError, match="--dir needs the run directory after it"):
        read(["--dir"])


@pytest.mark.parametrize(
    ("saved", "given", "size", "now"),
    [
        ("data=2 epochs=3", "", None, "data=2 epochs=3"),
        ("data=2 epochs=3", "epochs=5", None, "data=2 epochs=5"),
        ("epochs=3", "steps=9", None, "steps=9"),
        ("data=2 tensor=2 sequence=true", "data=3", None, "data=3"),
        ("merge=local_sgd merge.period=4 keep=2", "merge=easgd", None, "keep=2 merge=easgd"),
        ("merge=local_sgd merge.period=4", "merge.period=8", None, "merge.period=8"),
        ("staleness=4 servers=1", "merge=all_reduce", None, "servers=1 merge=all_reduce"),
        ("data=2 clip=1", "", 3, "clip=1"),
        ("compress=int8 compress.block=64", "compress=none", None, "compress=none"),
    ],
)
def test_a_resumed_run_goes_on_with_its_words_where_none_are_given(
    saved: str, given: str, size: int | None, now: str
) -> None:
    got = " ".join(f"{k}={v}" for k, v in continued(saved, given, size).items())
    if given == "merge.period=8":
        assert got == "merge=local_sgd merge.period=8"
    else:
        assert got == now


def test_the_line_at_the_start_names_what_differs_from_the_defaults() -> None:
    assert brief(parse("")) == "data=1"
    assert brief(parse("data=2 merge=local_sgd merge.period=8 split=shuffled")) in (
        "data=2 merge=local_sgd",
        "data=2 merge=local_sgd merge.period=8",
    )
    assert brief(parse("clip=0.5 seed=3 threads=1 split=ordered")) == (
        "data=1 split=ordered seed=3 clip=0.5"
    )


def test_options_named_like_plan_words_are_told_apart_by_the_scripts_text() -> None:
    line = ["--epochs=1", "--data", "2", "--lr", "0.1"]
    parser = 'parser.add_argument("--epochs")'
    assert read(line).notice == ""
    found = read(line, parser)
    assert found.words == () and "--data (a plan word has no dashes: data=...)" in found.notice
    assert "--epochs" not in found.notice and "--lr" not in found.notice
    assert "--epochs" in read(line, "").notice


@pytest.mark.parametrize("line", [["--resume", "runs/a"], ["--resume=runs/a"]])
def test_a_run_named_after_resume_is_refused_unless_the_script_takes_it(line: list[str]) -> None:
    with pytest.raises(PlanError, match=r"write --resume --dir runs/a"):
        read([*line, "epochs=3"], "no options here")
    for script in ('add_argument("--resume", type=str)', None):
        found = read([*line, "epochs=3"], script)
        assert not found.resume and found.words == ("epochs=3",)
