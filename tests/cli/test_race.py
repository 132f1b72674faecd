"""`manyhands race`: refused before it starts, or run to its end beside torch's DDP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.cli import main
from manyhands.cli.race import ddp
from manyhands.cli.race.command import first_error_line
from manyhands.cli.race.race_plans import parse_plans
from manyhands.cli.race.request import RACE, resolve_request
from manyhands.core import Goal
from manyhands.errors import PlanError
from manyhands.observe.events import read

JOB = """
import os, signal
from pathlib import Path
import torch, manyhands as mh
from torch import nn

G = torch.Generator().manual_seed(0)
X, W = torch.randn(1003, 12, generator=G), torch.randn(12, 4, generator=G)
Y = (X @ W).argmax(1)

def loss(outputs, target):
    if len(target) > 300:
        raise ValueError("a batch that this task does not like")
    third = list(Path("out").glob("03-*"))
    if os.environ.get("RANK") == "0" and third and not Path("interrupted").exists():
        Path("interrupted").touch()
        stop = signal.getsignal(signal.SIGTERM).__self__
        os.kill(int(os.environ["MANYHANDS_LAUNCHER"]), signal.SIGINT)  # it tells the workers
        while not stop.requested:
            os.sched_yield()
    return nn.functional.cross_entropy(outputs, target)

def task():
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
    return mh.Task(model=model, loss=loss, train=(X[:803], Y[:803]), test=(X[803:], Y[803:]),
                   batch=16, epochs=8, metrics={"accuracy": mh.accuracy},
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), clip=5.0,
                   schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.999))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["manyhands", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return 0 if end.value.code is None else int(end.value.code)


# -- refused before anything starts --


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["job.py"], "no plan is given"),
        (["job.py", "ddp"], "no --target is given"),
        (["job.py", "ddp", "--target", "accuracy"], "METRIC=NUMBER is needed"),
        (["job.py", "ddp", "--target", "f1=0.8"], "has no such metric; it has loss, accuracy"),
        (
            ["job.py", "ddp", "data=2 merge=locl_sgd", "--target", "accuracy=0.8"],
            "plan 2 ('data=2 merge=locl_sgd'): unknown merge=",
        ),
        (["job.py", "dpp", "--target", "accuracy=0.8"], "plan 1 ('dpp'): 'dpp' is no plan word"),
        (
            ["job.py", "ddp data=2 merge=bmuf", "--target", "accuracy=0.8"],
            "merge=bmuf: torch's DDP knows all_reduce and local_sgd only",
        ),
        (
            ["job.py", "ddp data=2 compress=topk", "--target", "accuracy=0.8"],
            "compress=topk: torch's DDP knows none, fp16, bf16, powersgd",
        ),
        (
            ["job.py", "ddp merge=local_sgd compress=fp16", "--target", "accuracy=0.8"],
            "torch averages parameters without compression",
        ),
        (
            ["job.py", "data=2 until=accuracy:0.5", "--target", "accuracy=0.8"],
            "until= cannot be set in a race",
        ),
        (
            ["job.py", "data=2", "--with", "bath=3", "--target", "accuracy=0.8"],
            "did you mean batch?",
        ),
        (["job.py", "--resume"], "there is no race of 'job' to resume"),
        (["job.py", "--resume", "--dir", "nowhere"], "there is no race to resume in nowhere"),
        (["loop.py", "data=2", "--target", "accuracy=0.8"], "defines no task()"),
    ],
)
def test_a_mistake_is_said_before_anything_starts(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    (here / "loop.py").write_text("import manyhands as mh\nrun = mh.join()\n")
    assert call(monkeypatch, "race", *words) == 2
    said = capsys.readouterr()
    assert says in said.err and "Traceback" not in said.out + said.err
    assert not (here / "runs").exists()


def test_words_for_all_that_mean_nothing_to_ddp_are_left_out_for_it() -> None:
    peer, ours = parse_plans(
        ["ddp", "merge=local_sgd"], "data=2 link=gloo save=epoch seed=3", Goal("accuracy", 0.8)
    )
    assert set(peer.words) == {"data", "seed", "until"} and peer.plan.until == Goal("accuracy", 0.8)
    assert ours.words["link"] == "gloo" and ours.words["save"] == "epoch", (
        "what is said beats what a race would choose"
    )
    with pytest.raises(PlanError, match="link: has no meaning for ddp"):
        ddp.check({"data": 2, "link": "gloo"})


def test_plans_are_called_by_what_they_differ_in() -> None:
    plans = [
        "ddp data=2",
        "data=2",
        "data=2 merge=local_sgd merge.period=8",
        "data=2 merge=local_sgd merge.period=4",
        "data=2",
    ]
    made = parse_plans(plans, "", Goal("accuracy", 0.8))
    assert [m.label for m in made] == [
        "ddp",
        "all_reduce",
        "local_sgd period=8",
        "local_sgd period=4",
        "all_reduce #2",
    ]
    assert made[2].folder == "03-local-sgd-period-8" and len({m.folder for m in made}) == 5


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rank 1 failed:\nDiverged: the loss became NaN\nmore", "Diverged: the loss became NaN"),
        (
            "rank 0 failed:\nTraceback (most recent call last):\n  File x\nValueError: no\n  note",
            "ValueError: no",
        ),
        (
            "rank 0 (pid 7) was killed by SIGKILL; memory\n  tail",
            "rank 0 (pid 7) was killed by SIGKILL; memory",
        ),
    ],
)
def test_an_error_is_told_in_its_own_first_line(text: str, line: str) -> None:
    assert first_error_line(text) == line


# -- run --


def test_a_race_is_run_interrupted_and_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plans = ["ddp", "", "merge=local_sgd merge.period=4", "batch=400"]
    target = ["--target", "accuracy=0.8", "--with", "data=2 threads=1 evaluate=10"]
    assert call(monkeypatch, "race", "job.py", *plans, *target, "--dir", "out") == 130
    said = capfd.readouterr()
    assert (
        "stopped in plan 3 of 4, seed 1; continue with: manyhands race job.py --resume --dir out"
        in said.err
    )
    assert "plan 1 of 4, seed 1 of 1: ddp" in said.out and "reached     accuracy 0.8" in said.out
    first = (here / "out" / "01-ddp" / "seed-0" / "events" / "rank-0.jsonl").read_bytes()

    assert call(monkeypatch, "race", "job.py", "ddp", *target, "--dir", "out") == 2
    assert "holds an earlier race" in capfd.readouterr().err
    assert call(monkeypatch, "race", "job.py", "ddp", "data=2", "--resume", "--dir", "out") == 2
    assert (
        "is a race of other plans: ddp |  | merge=local_sgd merge.period=4"
        in capfd.readouterr().err
    )
    assert (
        call(monkeypatch, "race", "job.py", "--target", "accuracy=0.9", "--resume", "--dir", "out")
        == 2
    )
    assert "is a race of other --target: accuracy=0.8" in capfd.readouterr().err

    assert call(monkeypatch, "race", "job.py", "--resume", "--dir", "out") == 1, (
        "one plan cannot run"
    )
    said = capfd.readouterr()
    assert (
        "ddp (done before)" in said.out
        and "ValueError: a batch that this task does not like" in said.out
    )
    assert (here / "out" / "01-ddp" / "seed-0" / "events" / "rank-0.jsonl").read_bytes() == first, (
        "what was over stays"
    )

    found = json.loads((here / "out" / "results.json").read_text())
    by_label = {p["label"]: p for p in found["plans"]}
    assert set(by_label) == {"ddp", "all_reduce", "local_sgd period=4", "all_reduce batch=400"}
    assert all(
        by_label[label]["time_s"] > 0 and by_label[label]["runs"][0]["ranks"] == 2
        for label in list(by_label)[:3]
    )
    assert (
        by_label["all_reduce batch=400"]["runs"][0]["error"].startswith("ValueError")
        and by_label["ddp"]["ratio_to_ddp"] == 1.0
    )
    assert (here / "out" / "race.png").stat().st_size > 20_000 and "local_sgd" in (
        here / "out" / "race.html"
    ).read_text()

    # DDP by hand is the same computation as our all_reduce: same batches, same schedule, same
    # clipping, same evaluations
    curves = {}
    for label, folder in {"ddp": "01-ddp", "ours": "02-all-reduce"}.items():
        events = [
            e
            for e in read(here / "out" / folder / "seed-0")
            if e.name == "evaluate" and e.rank == 0
        ]
        curves[label] = [
            (e.value["step"], e.value["loss"], e.value["accuracy"])
            for e in events
            if isinstance(e.value, dict)
        ]
    assert len(curves["ddp"]) == len(curves["ours"]) > 2
    assert [x for point in curves["ddp"] for x in point] == pytest.approx(
        [x for point in curves["ours"] for x in point], rel=1e-3
    )
    bytes_sent = {label: by_label[label]["runs"][0]["sent_bytes_per_rank"] for label in by_label}
    steps = curves["ddp"][-1][0]
    assert bytes_sent["ddp"] == steps * 4 * (12 * 24 + 24 + 24 * 4 + 4)
    assert bytes_sent["ddp"] <= bytes_sent["all_reduce"] < 1.2 * bytes_sent["ddp"]


@pytest.mark.slow
def test_ddp_runs_with_the_hooks_of_torch(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hooks = ["compress=fp16", "compress=bf16", "compress=powersgd", "merge=local_sgd"]
    plans = ["ddp", *(f"ddp {words}" for words in hooks)]
    target = ["--target", "accuracy=0.8", "--with", "data=2 threads=1 evaluate=10"]
    assert call(monkeypatch, "race", "job.py", *plans, *target, "--dir", "out") == 0
    found = json.loads((here / "out" / "results.json").read_text())
    sent = {
        p["label"]: p["runs"][0]["sent_bytes_per_rank"] / p["runs"][0]["samples"]
        for p in found["plans"]
    }
    assert set(sent) == {
        "ddp",
        "ddp compress=fp16",
        "ddp compress=bf16",
        "ddp compress=powersgd",
        "ddp local_sgd",
    }
    assert sent["ddp compress=fp16"] == pytest.approx(sent["ddp"] / 2, rel=0.01)
    assert sent["ddp local_sgd"] == pytest.approx(sent["ddp"] / 8, rel=0.05)
    assert sent["ddp compress=powersgd"] < sent["ddp"]


def test_a_changed_script_is_another_race(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = resolve_request(None, here / "job.py", ["ddp"], "accuracy=0.8", None, [])
    (here / "out").mkdir()
    (here / "out" / RACE).write_text(json.dumps(asked))
    assert resolve_request(here / "out", here / "job.py", [], None, 5, [])["seeds"] == 5, (
        "more seeds are more runs of the same race"
    )
    (here / "job.py").write_text(JOB + "\n# changed\n")
    with pytest.raises(PlanError, match="has changed since"):
        resolve_request(here / "out", here / "job.py", [], None, None, [])
