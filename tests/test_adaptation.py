"""Runs that adapt: they stop at a goal, evaluate on time, and change their merge strategy.

A step, an epoch or a metric says when.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.core import Goal
from manyhands.entry import work
from manyhands.errors import PlanError
from manyhands.recover.checkpoint import Checkpoints
from support.pooled import start

G = torch.Generator().manual_seed(0)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long()


def task() -> mh.Task:
    return mh.Task(
        model=nn.Linear(6, 2),
        loss=nn.functional.cross_entropy,
        train=(X, Y),
        test=(X, Y),
        metrics={"accuracy": mh.accuracy},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch=10,
        epochs=10,
    )


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for file in sorted(run.glob("events/*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return [e for e in lines if e["name"] == name]


def test_until_ends_the_run_at_the_evaluation_that_reaches_it(tmp_path: Path) -> None:
    result = mh.train(task, "until=accuracy:0.9 evaluate=3", directory=tmp_path / "run", quiet=True)
    found = [e["value"] for e in events(tmp_path / "run", "evaluate")]
    assert found[-1]["accuracy"] >= 0.9 and all(v["accuracy"] < 0.9 for v in found[:-1])
    assert result.rounds == found[-1]["step"] < 120
    assert result.metrics["accuracy"] == found[-1]["accuracy"]


def test_at_most_is_said_with_a_minus(tmp_path: Path) -> None:
    result = mh.train(task, "until=-loss:0.4 evaluate=1", directory=tmp_path / "run", quiet=True)
    found = [e["value"]["loss"] for e in events(tmp_path / "run", "evaluate")]
    assert result.rounds < 120 and found[-1] <= 0.4 < min(found[:-1])


def test_evaluate_every_n_steps_counts_steps_and_not_rounds(tmp_path: Path) -> None:
    mh.train(
        task,
        "evaluate=5 steps=12 merge=local_sgd merge.period=4",
        directory=tmp_path / "run",
        quiet=True,
    )
    steps = [e["value"]["step"] for e in events(tmp_path / "run", "evaluate")]
    assert steps == [8, 12], "at the end of the block in which the fifth, and the tenth, step lies"


def test_a_strategy_changes_at_a_step_and_the_checkpoint_knows_which_one_is_at_work(
    tmp_path: Path,
) -> None:
    words = "then=diloco then.period=4 at=step:8 steps=24"
    mh.train(task, words, directory=tmp_path / "run", quiet=True)
    notices = [e["value"] for e in events(tmp_path / "run", "notice")]
    assert any("diloco from here on: step:8" in n for n in notices)
    saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert saved is not None and saved.meta["strategy"] == "diloco" and saved.state
    assert saved.round == 8 + 16 // 4
    result = mh.train(
        task, words.replace("24", "32"), directory=tmp_path / "run", resume=True, quiet=True
    )
    assert result.rounds == 8 + 24 // 4, "it goes on with the second rule"


def test_a_strategy_changes_when_a_metric_says_so(tmp_path: Path) -> None:
    mh.train(
        task,
        "then=local_sgd at=accuracy:0.8 evaluate=2 steps=40",
        directory=tmp_path / "run",
        quiet=True,
    )
    notice = next(
        e for e in events(tmp_path / "run", "notice") if "local_sgd from here on" in e["value"]
    )
    reached = next(e for e in events(tmp_path / "run", "evaluate") if e["value"]["accuracy"] >= 0.8)
    assert notice["round"] == reached["round"]


def test_switching_on_one_rank_to_blocks_of_one_rank_changes_nothing(tmp_path: Path) -> None:
    """Alone, every one of these rules is plain SGD, so whatever is carried over must be carried
    over whole.
    """
    mh.train(task, "steps=30", directory=tmp_path / "plain", quiet=True)
    mh.train(
        task,
        "steps=30 merge=local_sgd then=model_average at=step:13",
        directory=tmp_path / "changed",
        quiet=True,
    )
    a, b = (mh.load(tmp_path / name, nn.Linear(6, 2)).state_dict() for name in ("plain", "changed"))
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("until=accuracy", "until=accuracy: NAME:NUMBER is needed"),
        ("until=accuracy:high", "until=accuracy:high: a number is needed after the colon"),
        ("then=local_sgd", "then= alone has no effect: add the other half, such as at=epoch:5"),
        ("at=epoch:5", "at= alone has no effect: add the other half, such as then="),
        ("then=nothing at=epoch:5", "unknown then="),
        ("then.period=4", "then.period has no effect without then="),
        ("then=local_sgd then.period=0 at=epoch:5", "then.period=0"),
        ("evaluate=0", "evaluate=0: epoch or a number of steps"),
        ("until=precision:0.9", "until=precision:0.9: no such metric; the task has loss, accuracy"),
        ("then=local_sgd at=precision:0.9", "no such metric"),
        ("merge=downpour", "merge=downpour pulls from and pushes to a parameter server"),
    ],
)
def test_a_goal_or_a_change_that_cannot_be_is_refused(
    words: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as refused:
        mh.train(task, words, directory=tmp_path / "run", quiet=True)
    assert says in str(refused.value)


def test_a_goal_is_what_it_says() -> None:
    assert Goal.parse("accuracy:0.88").reached({"accuracy": 0.88}) and not Goal.parse(
        "accuracy:0.88"
    ).reached({"accuracy": 0.87})
    assert Goal.parse("-loss:0.3").reached({"loss": 0.2}) and not Goal.parse("-loss:0.3").reached(
        {"loss": 0.4}
    )
    assert not Goal.parse("accuracy:0.5").reached({}), "what nobody has measured is not reached"
    assert Goal.parse(str(Goal.parse("-loss:0.1"))) == Goal("loss", 0.1, at_most=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_an_own_loop_that_ends_among_local_steps_has_them_merged_when_asked_for_the_model(
    tmp_path: Path,
) -> None:
    run = mh.join("merge=easgd merge.period=4 seed=0", directory=tmp_path / "run", quiet=True)
    torch.manual_seed(0)
    model, optimizer = Model(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = run.prepare(model, optimizer, (X, Y), batch=10)
    for i, (x, y) in enumerate(data):
        run.step(nn.functional.cross_entropy(model(x), y))
        if i == 5:
            break
    own = model.state_dict()["layer.weight"].clone()
    with run.merged():
        merged = model.state_dict()["layer.weight"].clone()
    assert not torch.equal(own, merged) and torch.equal(own, model.state_dict()["layer.weight"])
    run.close()
    saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert saved is not None and saved.round == 2 and saved.position.steps == 6, (
        "four steps, and the two that were left"
    )


# -- a resumed run is the run it would have been --


def weights(run: Path) -> Tensor:
    saved = Checkpoints(run / "checkpoints").latest()
    assert saved is not None
    return torch.cat([v.flatten() for v in saved.params.values()])


def test_resumed_right_where_its_strategy_changes_it_changes_first(tmp_path: Path) -> None:
    words = "merge=local_sgd merge.period=4 then=diloco then.period=4 at=epoch:1"
    mh.train(task, f"{words} epochs=2", directory=tmp_path / "whole", quiet=True)
    mh.train(task, f"{words} epochs=1", directory=tmp_path / "halves", quiet=True)
    mh.train(task, f"{words} epochs=2", directory=tmp_path / "halves", resume=True, quiet=True)
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "halves"))


def test_a_strategy_can_be_followed_by_itself_with_other_options(tmp_path: Path) -> None:
    words = "merge=local_sgd merge.period=1 then=local_sgd then.period=6 at=epoch:1 epochs=2"
    assert mh.train(task, words, directory=tmp_path / "run", quiet=True).rounds == 12 + 2


def test_a_goal_that_is_reached_stays_reached_when_resumed(tmp_path: Path) -> None:
    words = "until=accuracy:0.8 evaluate=2"
    first = mh.train(task, words, directory=tmp_path / "run", quiet=True)
    again = mh.train(task, words, directory=tmp_path / "run", resume=True, quiet=True)
    assert again.rounds == first.rounds


def test_the_last_round_is_evaluated_also_where_a_checkpoint_falls_on_it(tmp_path: Path) -> None:
    result = mh.train(task, "steps=6 save=3", directory=tmp_path / "run", quiet=True)
    assert {"accuracy", "loss"} <= result.metrics.keys()
    saved = {
        p.name: json.loads((p / "manifest.json").read_text())["metrics"]
        for p in (tmp_path / "run" / "checkpoints").iterdir()
    }
    assert (
        saved["step-00000003"] == {}
        and saved["step-00000006"]["accuracy"] == result.metrics["accuracy"]
    )


def test_saving_changes_nothing_also_where_the_optimizer_remembers_nothing_yet(
    tmp_path: Path,
) -> None:
    def decaying() -> mh.Task:
        return dataclasses.replace(
            task(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)
        )

    for save in (
        "1",
        "100",
    ):  # momentum is forgotten after every block, so every checkpoint finds none
        mh.train(
            decaying,
            f"merge=bmuf merge.period=4 steps=24 save={save}",
            directory=tmp_path / save,
            quiet=True,
        )
    assert torch.equal(weights(tmp_path / "1"), weights(tmp_path / "100"))


def test_a_schedule_counts_the_steps_of_a_loop_and_not_the_end_of_its_block(tmp_path: Path) -> None:
    run = mh.join("merge=local_sgd merge.period=4 seed=0", directory=tmp_path / "run", quiet=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, data = run.prepare(model, optimizer, (X, Y), batch=10, schedule=schedule)
    for i, (x, y) in enumerate(data):
        run.step(nn.functional.cross_entropy(model(x), y))
        if i == 5:
            break
    run.close()
    saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert saved is not None and saved.meta["schedule"]["last_epoch"] == 6


@pytest.mark.parametrize("rule", ["admm", pytest.param("robust", marks=pytest.mark.slow)])
def test_half_precision_trains_as_full_does_where_a_strategy_works_on_gradients(
    rule: str, tmp_path: Path
) -> None:
    """The loss scale is in the gradients a rule sees, and an overflow at first is no reason to stop
    for ever.
    """

    def both(words: dict[str, Any], options: Options) -> dict[str, Any]:
        """One after the other in the same three processes."""
        for precision in ("fp32", "fp16"):
            here = dataclasses.replace(options, directory=str(tmp_path / precision))
            found = work(steep, {**words, "precision": precision}, here)
        return found

    start(both, f"data=3 merge={rule} steps=24 timeout_s=30 threads=1", Options(quiet=True))
    full, half = weights(tmp_path / "fp32"), weights(tmp_path / "fp16")
    moved = float((full - weights_at_start()).norm())
    assert moved > 0.01 and float((half - full).norm()) < 0.5 * moved


def steep() -> mh.Task:
    torch.manual_seed(0)
    loss = lambda outputs, target: (
        30 * nn.functional.cross_entropy(outputs, target)
    )  # overflows at the first scale
    return dataclasses.replace(
        task(), model=nn.Linear(6, 2), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.002)
    )


def weights_at_start() -> Tensor:
    torch.manual_seed(0)
    return torch.cat([v.flatten() for v in nn.Linear(6, 2).state_dict().values()])
