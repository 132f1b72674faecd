"""Every example runs on two processes.

Those made for it equal one process, and the own loop equals `mh.train`.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands import datasets, own_loop
from manyhands import entry as running
from manyhands.assembly.rank_context import Options
from manyhands.cli.verify import verify
from manyhands.split.data import rank_range
from support.paths import EXAMPLES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path | None) -> Path:
    monkeypatch.chdir(tmp_path)
    if data_dir is not None:
        monkeypatch.setenv("MANYHANDS_DATA", str(data_dir))
    return tmp_path


@pytest.mark.parametrize("name", ["lenet", pytest.param("transformer", marks=pytest.mark.slow)])
def test_the_example_runs_on_two_processes(name: str, here: Path) -> None:
    body = functools.partial(
        running.work_script, str(EXAMPLES / f"{name}.py"), [], "data=2 steps=5"
    )
    result = running.start(body, "data=2 steps=5", Options(name, quiet=True))
    assert result.rounds == 5 and result.metrics["train_loss"] > 0
    assert (here / result.directory / "curves.png").exists() and result.checkpoint is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt", "data=2 tensor=2 pipe=2"),
        ("resnet", "pipe=2 micro=4"),
        ("tied", "pipe=2 shard=2 zero=1"),
    ],
)
def test_the_examples_of_split_models_run_as_they_say(name: str, words: str, here: Path) -> None:
    assert f"examples/{name}.py {words}" in (EXAMPLES / f"{name}.py").read_text()
    body = functools.partial(
        running.work_script, str(EXAMPLES / f"{name}.py"), [], f"{words} steps=2"
    )
    result = running.start(body, f"{words} steps=2", Options(name, quiet=True))
    assert result.rounds == 2 and result.metrics["train_loss"] > 0 and result.checkpoint is not None


def test_the_example_over_servers_runs_with_the_words_it_has(here: Path) -> None:
    script = EXAMPLES / "lenet_server.py"
    (words,) = re.findall(r'^    mh\.train\(task, "(.*)"\)$', script.read_text(), re.MULTILINE)
    body = functools.partial(running.work_script, str(script), [], f"{words} steps=5")
    result = running.start(body, f"{words} steps=5", Options("lenet_server", quiet=True))
    assert "servers=2" in words and result.rounds == 5 and result.metrics["train_loss"] > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("transformer", "data=2", marks=pytest.mark.slow),
        ("uneven_mlp", "data=3 batch=153"),
        ("lbfgs", "data=2"),
    ],
)
def test_several_processes_equal_one(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(EXAMPLES / f"{name}.py", words.split(), steps=4), capsys.readouterr().out


def test_the_uneven_example_is_uneven_where_it_says_so() -> None:
    samples = runpy.run_path(str(EXAMPLES / "uneven_mlp.py"))["SAMPLES"]
    assert samples % 64 == 13
    for size, batch, shares in (2, 64, [39, 38]), (3, 64, [26, 26, 25]), (3, 153, [1, 1, 0]):
        left = samples % (size * batch)
        assert [len(rank_range(left, rank, size)) for rank in range(size)] == shares


# -- a store of one's own --


def test_the_store_learns_from_two_clients_at_once_and_alike_everywhere() -> None:
    names = runpy.run_path(str(EXAMPLES / "store.py"))
    with mh.Store() as store:
        alone, rows = names["train"](store, 40), store.tables()["words"].rows
    with mh.Store(servers=2) as store:
        assert names["train"](store, 40) == alone > 0.7 and store.tables()["words"].rows == rows
        with mh.Store(store.address, token=store.token) as other:
            assert names["train"](other, 40, seed=1) > alone, "it goes on where the first has been"


# -- a loop of one's own --


def test_an_own_loop_differs_from_a_plain_one_in_five_lines() -> None:
    plain, own = (
        (EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("plain", "own_loop")
    )
    matched = sum(
        block.size
        for block in difflib.SequenceMatcher(None, plain, own, autojunk=False).get_matching_blocks()
    )
    changed = max(len(plain), len(own)) - matched
    assert 0 < changed <= 5


def test_own_loop_and_train_end_with_the_same_bits(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(
        "sys.last_value", raising=False
    )  # of a test that failed before: no script of ours has
    _, (x, y), test = datasets.images()
    few = x[:500].clone(), y[:500].clone()
    monkeypatch.setattr(datasets, "images", lambda: ("few", few, test))

    names = runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    own_loop.close_joined()

    def task() -> mh.Task:
        return mh.Task(
            model=nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
            loss=nn.functional.cross_entropy,
            train=few,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            batch=64,
            epochs=2,
        )

    result = mh.train(task, quiet=True, directory="trained")
    trained = mh.load(result.directory, task().model)  # type: ignore[arg-type]
    for name, value in trained.state_dict().items():
        assert torch.equal(names["model"].state_dict()[name], value), name


def test_the_plain_script_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, (x, y), (x_test, y_test) = datasets.images()
    monkeypatch.setattr(
        datasets, "images", lambda: ("few", (x[:200], y[:200]), (x_test[:50], y_test[:50]))
    )
    runpy.run_path(str(EXAMPLES / "plain.py"), run_name="__main__")
    assert capsys.readouterr().out.count("accuracy") == 2


# -- the notebook --


def test_the_cells_of_the_notebook_run_in_order(here: Path) -> None:
    """As a notebook runs them: one after the other in a `__main__` without a file. The last one
    only shows the picture.
    """
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    *lines, picture = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert "IPython" in picture
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in lines:
        exec(line.replace("data=2 epochs=1", "data=2 steps=3"), names)
    assert names["result"].rounds == 3 and isinstance(names["model"], names["Net"])
    assert len(list(here.glob("runs/notebook-*/curves.png"))) == 1


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert not any(c.get("outputs") or c.get("execution_count") for c in notebook["cells"])


@pytest.mark.parametrize("name", ["lenet", "transformer", "uneven_mlp"])
def test_the_example_is_what_the_commands_load(name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    assert running.defines_task(script)
    assert script.read_text().endswith('\n\nif __name__ == "__main__":\n    mh.train(task)\n')
