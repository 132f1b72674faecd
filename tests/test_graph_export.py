"""Graph export: a trained model as a file that runs without its Python code."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.cli import main
from manyhands.errors import PlanError, TaskError
from support.small_task import small_data

X, Y = small_data(29)
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
JOB = """
import torch, manyhands as mh
from torch import nn

def task():
    g = torch.Generator().manual_seed(3)
    data = torch.randn(29, 8, generator=g), torch.randint(0, 3, (29,), generator=g)
    return mh.Task(model=nn.Linear(8, 3), loss=nn.functional.cross_entropy, train=data, batch=16,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
    )


def task(model: Callable[[], Any] = net, **given: Any) -> mh.Task:
    loss = {} if "step" in given else {"loss": nn.functional.cross_entropy}
    return mh.Task(
        model=model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch=8,
        **{"train": (X, Y), **loss, **given},
    )


def trained(made: mh.Task, folder: Path) -> Path:
    mh.train(made, "device=cpu epochs=1", directory=folder, quiet=True)
    return folder


def run_file(file: Path, *inputs: Tensor) -> Tensor:
    found: Tensor = torch.export.load(file).module()(*inputs)
    return found


def test_the_graph_of_a_trained_model_gives_its_outputs_for_any_number_of_samples(
    tmp_path: Path,
) -> None:
    run = trained(task(), tmp_path / "run")
    found = mh.export(task(), run, tmp_path / "model.pt2")
    model = mh.load(run, net()).eval()
    assert found.samples is None and found.compared
    for n in (1, 2, 29):
        with torch.no_grad():
            assert torch.allclose(run_file(tmp_path / "model.pt2", X[:n]), model(X[:n]), atol=1e-6)


def test_a_model_called_by_names_in_a_step_is_captured_as_it_is_called(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
            return {"logits": self.last(x * mask)}

    def step(model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0], mask=(batch[0] > 0).float())
        return nn.functional.cross_entropy(outputs["logits"], batch[1])

    made = task(Masked, step=step)
    run = trained(made, tmp_path / "run")
    assert mh.export(made, run, tmp_path / "model.pt2").samples is None
    model, mask = mh.load(run, Masked()), (X > 0).float()
    graph = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.allclose(graph(X, mask=mask)["logits"], model(X, mask=mask)["logits"])


def test_one_of_several_models_is_exported_by_name(tmp_path: Path) -> None:
    def step(models: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(models["head"](models["body"](batch[0])), batch[1])

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    made = mh.Task(
        model={"body": lambda: nn.Linear(8, 6), "head": lambda: nn.Linear(6, 3)},
        optimizer={"body": sgd, "head": sgd},
        train=(X, Y),
        step=step,
        batch=8,
    )
    run = trained(made, tmp_path / "run")
    with pytest.raises(TaskError, match=r"several models \(body, head\).*--part body"):
        mh.export(made, run, tmp_path / "model.pt2")
    with pytest.raises(TaskError, match="no part 'tail'; it has body, head"):
        mh.export(made, run, tmp_path / "model.pt2", part="tail")
    mh.export(made, run, tmp_path / "head.pt2", part="head")
    assert run_file(tmp_path / "head.pt2", torch.zeros(4, 6)).shape == (4, 3)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x)
        return found if x.sum() > 0 else -found


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x + torch.randn_like(x))
        return found


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Branches, "torch.export cannot capture Branches as a graph"),
        (Draws, "the graph gives other outputs than the model"),
    ],
)
def test_what_has_no_graph_is_refused_and_leaves_no_file(
    tmp_path: Path, model: type[nn.Module], says: str
) -> None:
    run = trained(task(model), tmp_path / "run")
    with pytest.raises(TaskError, match=says):
        mh.export(task(model), run, tmp_path / "model.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_part_with_rows_on_servers_is_refused_and_another_is_exported(tmp_path: Path) -> None:
    class Clicks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = mh.Embedding("ids", 4)
            self.last = nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.last(self.table(ids))
            return found

    made = task(Clicks, ids=lambda batch: {"ids": batch[0]}, train=(Y, Y))
    run = trained(made, tmp_path / "run")
    with pytest.raises(TaskError, match=r"rows of mh.Embedding.*--part NAME"):
        mh.export(made, run, tmp_path / "model.pt2")
    mh.export(made, run, tmp_path / "last.pt2", part="last")
    assert run_file(tmp_path / "last.pt2", torch.zeros(7, 4)).shape == (7, 3)


@pytest.mark.parametrize(
    ("name", "says"),
    [("model.pt", "onnx or .pt2 is needed"), ("no/model.pt2", "there is no directory")],
)
def test_a_file_that_could_not_be_written_is_refused_first(
    tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        mh.export(task(), tmp_path, tmp_path / name)


def test_a_file_that_exists_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    out.write_text("mine")
    with pytest.raises(PlanError, match=r"exists; give another name, or --overwrite"):
        mh.export(task(), tmp_path, out)
    mh.export(task(), trained(task(), tmp_path / "run"), out, overwrite=True)
    assert run_file(out, X).shape == (29, 3)


@pytest.mark.skipif(HAS_ONNX, reason="onnx is installed")
def test_onnx_is_refused_by_the_package_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"onnx.* not installed: pip install manyhands\[onnx\]"):
        mh.export(task(), tmp_path, tmp_path / "model.onnx")


@pytest.mark.skipif(not HAS_ONNX, reason="onnx, onnxscript and onnxruntime are not installed")
def test_an_onnx_file_gives_the_outputs_of_the_model(tmp_path: Path) -> None:
    onnxruntime = importlib.import_module("onnxruntime")
    run, out = trained(task(), tmp_path / "run"), tmp_path / "model.onnx"
    found = mh.export(task(), run, out)
    session = onnxruntime.InferenceSession(str(out))
    [name] = [each.name for each in session.get_inputs()]
    model = mh.load(run, net()).eval()
    assert found.samples is None and found.compared
    for n in (1, 29):
        [outputs] = session.run(None, {name: X[:n].numpy()})
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(outputs), model(X[:n]), atol=1e-5)


def test_the_command_exports_the_last_run_of_a_script_and_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)

    def call(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["manyhands", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    assert call("run", "job.py", "epochs=1", "device=cpu", "--dir", "runs/job-1", "--quiet") == 0
    assert call("export", "runs/job-1", "a.pt2") == 0
    assert call("export", "job.py", "b.pt2", "--dir", "runs/job-1") == 0
    assert call("export", "job.py", "c.safetensors", "--dir", "runs/job-1") == 0
    assert torch.equal(run_file(Path("a.pt2"), X), run_file(Path("b.pt2"), X))
    assert call("export", "runs/job-1", "d.safetensors", "--part", "x") == 2
    assert "--part=x has no effect" in capsys.readouterr().err
