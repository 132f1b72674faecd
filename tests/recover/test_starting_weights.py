"""Weights to start from: every kind of file, names with prefixes, and one message for what does not
fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import TaskError
from manyhands.recover.starting_weights import Weights
from support.docs import code_blocks
from support.paths import REPOSITORY


class Net(nn.Module):
    """A body with a buffer, a head, and an output that is tied to the input."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.embed.weight
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.tied(self.embed(x))))


def trained(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.norm.running_mean.fill_(0.5)
    return net


def untied(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in net.state_dict().items() if k != "tied.weight"}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def safetensors_file(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def torch_file(folder: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save(tensors, folder / "model.pt")
    return folder / "model.pt"


def lightning_file(folder: Path, tensors: dict[str, Tensor]) -> Path:
    inner = {f"model.{k}": v for k, v in tensors.items()}
    torch.save({"epoch": 3, "state_dict": inner, "optimizer_states": [{}]}, folder / "a.ckpt")
    return folder / "a.ckpt"


def hugging_face_folder(folder: Path, tensors: dict[str, Tensor]) -> Path:
    names, where = list(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({k: tensors[k] for k in part}, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "write",
    [
        safetensors_file,
        torch_file,
        lightning_file,
        hugging_face_folder,
        lambda folder, tensors: safetensors_file(folder, tensors).parent,
        lambda folder, tensors: str(torch_file(folder, tensors)),
        lambda folder, tensors: tensors,
        lambda folder, tensors: {"model": tensors, "step": 5},
    ],
)
def test_every_kind_of_file_gives_the_same_weights(
    tmp_path: Path, write: Callable[[Path, dict[str, Tensor]], Any]
) -> None:
    net, wanted = Net(), trained()
    assert not same(net, wanted)
    Weights(write(tmp_path, untied(wanted))).load_into(net)
    assert same(net, wanted) and net.tied.weight is net.embed.weight


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_left_out(prefix: str) -> None:
    net, wanted = Net(), trained()
    Weights({f"{prefix}{k}": v for k, v in untied(wanted).items()}).load_into(net)
    assert same(net, wanted)


def test_a_prefix_that_is_the_models_own_stays() -> None:
    net = nn.ModuleDict({"model": nn.Linear(2, 1), "module": nn.Linear(2, 1)})
    wanted = nn.ModuleDict({"model": nn.Linear(2, 1), "module": nn.Linear(2, 1)})
    Weights(wanted.state_dict()).load_into(net)
    assert same(net, wanted)


def test_lower_precision_is_cast_to_the_models(tmp_path: Path) -> None:
    net, wanted = Net(), trained().bfloat16()
    Weights(safetensors_file(tmp_path, untied(wanted))).load_into(net)
    assert net.head.weight.dtype == torch.float32
    assert torch.equal(net.head.weight, wanted.head.weight.float())


def test_a_new_head_keeps_what_the_model_was_made_with() -> None:
    net, wanted = Net(classes=5), trained()
    head = net.head.weight.clone()
    Weights(untied(wanted), skip="head.*").load_into(net)
    assert torch.equal(net.head.weight, head)
    assert torch.equal(net.embed.weight, wanted.embed.weight)
    assert torch.equal(net.norm.running_mean, wanted.norm.running_mean)
    # a part that only the weights have, under a prefix
    given = {f"module.{k}": v for k, v in untied(wanted).items()}
    Weights({**given, "module.old.bias": torch.ones(1)}, skip=["head.*", "old.*"]).load_into(net)


def test_what_does_not_fit_is_one_message_and_changes_nothing() -> None:
    net, wanted = Net(classes=5), trained()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    given = {**untied(wanted), "extra.bias": torch.ones(1)}
    del given["norm.weight"]
    with pytest.raises(TaskError) as refused:
        Weights(given).load_into(net)
    said = str(refused.value)
    assert "only in the model: norm.weight" in said and "only in the weights: extra.bias" in said
    assert "head.weight (model (5, 4), given (2, 4))" in said and 'skip="head*"' in said
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_long_lists_are_cut() -> None:
    with pytest.raises(TaskError, match=r"x\.7 and 12 more"):
        Weights({f"x.{i}": torch.ones(1) for i in range(20)}, skip="head*").load_into(Net())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda folder: nn.Linear(1, 1), r"its state dict is needed: model.state_dict\(\)"),
        (lambda folder: 3, "the weights are a int"),
        (lambda folder: folder / "none.pt", "do not exist"),
        (lambda folder: folder, "is a directory without weights"),
        (lambda folder: {"epoch": 3}, "holds no tensors by name"),
        (lambda folder: _written(folder / "a.txt"), "has no ending of weights"),
        (lambda folder: _written(folder / "a.safetensors"), "cannot be read"),
        (lambda folder: _whole_model(folder / "a.pt"), "save model.state_dict"),
    ],
)
def test_what_holds_no_weights_is_refused(
    tmp_path: Path, given: Callable[[Path], Any], says: str
) -> None:
    with pytest.raises(mh.ManyhandsError, match=says):
        Weights(given(tmp_path)).load_into(Net())


def _written(path: Path) -> Path:
    path.write_text("no tensors")
    return path


def _whole_model(path: Path) -> Path:
    torch.save(Net(), path)
    return path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"skip": "haed.*"}, r"skip='haed.\*' has no effect: neither the model nor the weights"),
        ({"best": "accuracy"}, "best='accuracy' has no effect: a state dict is no run directory"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        Weights(untied(trained()), **options).load_into(Net())


# -- runs --

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def train(folder: Path, words: str = "", resume: bool = False, **given: Any) -> mh.Result:
    plain = {
        "model": Net,
        "train": (X, Y),
        "loss": nn.functional.cross_entropy,
        "batch": 16,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    task = mh.Task(**{**plain, **given})
    return mh.train(
        task, f"device=cpu {words}", directory=folder, quiet=True, argv=False, resume=resume
    )


def frozen(p: Any) -> torch.optim.Optimizer:
    """No step changes anything, so that the model of a run is what it started from."""
    return torch.optim.SGD(p, lr=0.0)


def test_a_run_starts_from_another_runs_newest_or_best_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "a", "epochs=3 keep=9", test=(X, Y), metrics={"accuracy": mh.accuracy})
    newest, best = Net().eval(), Net().eval()
    mh.load(tmp_path / "a", newest)
    mh.load(tmp_path / "a", best, best="-loss")
    for init, wanted in (
        (tmp_path / "a", newest),
        (tmp_path / "a" / "checkpoints" / "step-00000012", newest),
        (Weights(tmp_path / "a", best="-loss"), best),
    ):
        folder = tmp_path / f"b{id(init)}"
        train(folder, "steps=1", init=init, optimizer=frozen)
        assert torch.equal(mh.load(folder, Net()).head.weight, wanted.head.weight)


def test_a_resumed_run_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    file = torch_file(tmp_path, untied(trained()))
    train(tmp_path / "whole", "steps=3", init=file)
    train(tmp_path / "run", "steps=2", init=file)
    file.unlink()  # it is not even looked at
    train(tmp_path / "run", "steps=3", init=file, resume=True)
    assert same(mh.load(tmp_path / "run", Net()), mh.load(tmp_path / "whole", Net()))


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])
    (code,) = code_blocks(REPOSITORY / "docs" / "fine-tuning.md", "python")
    exec(code, {"__name__": "page"})
    assert capsys.readouterr().out.strip().endswith("1.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["data=2", "data=2 merge=local_sgd", "tensor=2", "pipe=2", "shard=2"]
)
def test_all_ranks_and_layouts_start_from_the_weights(tmp_path: Path, words: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    torch.manual_seed(5)
    wanted = model()
    train(
        tmp_path / "run",
        f"{words} steps=1",
        model=model,
        init=wanted.state_dict(),
        optimizer=frozen,
    )
    assert same(mh.load(tmp_path / "run", model()), wanted)
