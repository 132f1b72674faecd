"""Traced programs compute the forward pass, in both modes and for any batch.

What cannot be traced is refused with the line of the model that prevents it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.errors import PlanError, TaskError
from manyhands.parallel.pipeline.stage_modules import cut
from manyhands.parallel.trace.program import Input, TracedProgram
from manyhands.parallel.trace.source_location import is_library
from manyhands.parallel.trace.symbolic_sizes import SizeGuard, other_sizes
from manyhands.parallel.trace.trace_model import trace
from manyhands.split.stages import balance_stages
from support.traced_models import QUICK_AND_SLOW, model, same_as_whole, through

HERE = Path(__file__).name


def cuts(traced: TracedProgram, stages: int) -> list[int]:
    crossing = [0.0 if traced.cuttable(i) else math.inf for i in range(len(traced.nodes[True]))]
    return balance_stages(
        [1.0] * len(crossing), stages, trainable=traced.trainable, crossing=crossing
    )


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{HERE}:{next(i for i, line in enumerate(lines, 1) if line.strip() == text)}"


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_a_traced_model_gives_what_the_model_gives_in_any_number_of_stages_and_for_any_batch(
    name: str,
) -> None:
    whole, inputs = model(name)
    before = {k: v.clone() for k, v in whole.state_dict().items()}
    traced = trace(whole, inputs, pieces=4)
    assert all(torch.equal(v, before[k]) for k, v in whole.state_dict().items())
    assert all(type(t) in (Tensor, nn.Parameter) for t in (*whole.parameters(), *whole.buffers()))
    for stages in (1, 2, 4):
        made = cut(traced, cuts(traced, stages))
        for training, batch in ((True, 6), (True, 5), (False, 3), (False, 1)):
            same_as_whole(made, whole, tuple(x[:batch] for x in inputs), training)


def test_blocks_are_opened_where_they_make_too_few_pieces() -> None:
    whole, inputs = model("gpt")
    coarse, fine = trace(whole, inputs, pieces=4), trace(whole, inputs, pieces=12)
    assert "h.0" in {s.target for s in coarse.nodes[True]}
    assert "h.0.attn.c_attn" in {s.target for s in fine.nodes[True]}
    same_as_whole(cut(fine, cuts(fine, 12)), whole, inputs, training=True)


class Noisy(nn.Module):
    """In training it differs in constants and in nodes from what it does in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.a(x), 0.5, self.training)
        if self.training:
            x = x * 3 + torch.randn_like(x)
        return self.norm(self.b(x))


def test_train_and_eval_matter_after_tracing_outside_of_modules_too() -> None:
    torch.manual_seed(0)
    whole, x = Noisy().double(), torch.randn(6, 4, dtype=torch.float64)
    stages = cut(trace(whole, (x,)), [len(trace(whole, (x,)).nodes[True]) - 2])
    for training in (True, False, True):
        for stage in stages:
            stage.module.train(training)
        whole.train(training)
        torch.manual_seed(1)
        wanted = whole(x)
        torch.manual_seed(1)
        assert torch.equal(through(stages, (x,)), wanted)


def test_tracing_leaves_the_modes_of_parts_as_they_were() -> None:
    whole, inputs = model("cnn")
    whole.train()
    whole.bn.eval()  # type: ignore[union-attr]
    trace(whole, inputs)
    assert whole.training and not whole.bn.training  # type: ignore[union-attr]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if x.sum() > 1e9:
            x = x / x.sum()
        return self.three(self.two(x))


class Inside(nn.Module):
    """The same branch, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(4, 4), Branch(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.branch(self.first(x)))


def test_a_branch_on_a_value_is_refused_with_its_line_and_modules_to_cut_at() -> None:
    with pytest.raises(
        TaskError, match=rf"{line_of('if x.sum() > 1e9:')} .*asks for a value.*cut=two,three"
    ):
        trace(Branch(), (torch.randn(3, 4),), pieces=2)


def test_the_cut_that_is_offered_works_where_the_model_is_a_chain_of_its_modules() -> None:
    torch.manual_seed(0)
    whole, x = Branch().double(), torch.randn(3, 4, dtype=torch.float64)
    traced = trace(whole, (x,), cut=["two", "three"])
    same_as_whole(cut(traced, traced.cuts_at(["two", "three"], 3)), whole, (x,), training=True)


def test_where_no_cut_helps_another_axis_is_offered_and_not_a_cut() -> None:
    """Called by a step of the user's, or on several inputs, a model cannot run as a chain."""
    with pytest.raises(TaskError, match=r"use shard= or tensor= instead of pipe=") as refused:
        trace(Branch(), (torch.randn(3, 4),), pieces=2, call=lambda module, x: module(x))
    assert "cut=" not in str(refused.value)


class Named(nn.ModuleDict):
    """A container that can be called, as torchvision's IntermediateLayerGetter."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.values():
            x = module(x)
        return x


class OfNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(4, 4), Named({"a": nn.Linear(4, 4), "b": nn.Tanh()})
        self.heads = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.heads[0](x / x.sum().item())


def test_a_cut_is_offered_at_what_can_be_called_and_not_at_a_list() -> None:
    with pytest.raises(TaskError, match=r"cut=body,heads\.0$"):
        trace(OfNamed(), (torch.randn(3, 4),), pieces=2)


def test_code_of_a_package_whose_name_begins_like_torch_is_the_users() -> None:
    beside = Path(torch.__file__).parents[1]
    assert not is_library(str(beside / "torchvision" / "models" / "resnet.py"))
    assert is_library(str(beside / "torch" / "nn" / "functional.py"))


@pytest.mark.parametrize("named", [["branch", "last"], []])
def test_a_module_that_looks_at_values_runs_as_a_whole(named: list[str]) -> None:
    torch.manual_seed(0)
    whole, x = Inside().double(), torch.randn(3, 4, dtype=torch.float64)
    traced = trace(whole, (x,), cut=named, pieces=3)
    assert "branch" in {s.target for s in traced.nodes[True]}
    made = cut(traced, traced.cuts_at(["branch", "last"], 3))
    same_as_whole(made, whole, (x,), training=True)
    same_as_whole(made, whole, (torch.randn(7, 4, dtype=torch.float64),), training=False)


def test_more_pieces_than_a_model_that_looks_at_values_has_are_refused_with_its_line() -> None:
    with pytest.raises(TaskError, match=line_of("if x.sum() > 1e9:")):
        trace(Inside(), (torch.randn(3, 4),), pieces=4)


@pytest.mark.parametrize(
    ("names", "stages", "said"),
    [
        (["h.1", "ln_g"], 3, "cut=ln_g.*did you mean ln_f"),
        (["h.1"], 3, "names 1 modules.*3 stages have 2"),
        (["h.2", "h.1"], 3, "does not follow the order"),
        (["wte"], 2, "none at the very start"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(names: list[str], stages: int, said: str) -> None:
    whole, inputs = model("gpt")
    with pytest.raises(PlanError, match=said):
        trace(whole, inputs, cut=names).cuts_at(names, stages)


def test_a_cut_at_a_name_begins_the_stage_there() -> None:
    whole, inputs = model("gpt")
    traced = trace(whole, inputs, cut=["h.1", "h.3"])
    made = cut(traced, traced.cuts_at(["h.1", "h.3"], 3))
    assert "h.0.ln_1.weight" in dict(made[0].module.named_parameters())
    assert next(iter(dict(made[1].module.named_parameters()))) == "h.1.ln_1.weight"


class BySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.size(0) > 4:
            x = x * 2
        return self.b(x)


def test_a_batch_that_would_take_another_way_is_refused_rather_than_computed_wrongly() -> None:
    made = cut(trace(BySize(), (torch.randn(6, 4),)), [2])
    through(made, (torch.randn(5, 4),))
    with pytest.raises(
        TaskError, match=rf"batch of shape \(3, 4\).*does not hold, asked for near .*{HERE}"
    ):
        through(made, (torch.randn(3, 4),))
    with pytest.raises(TaskError, match=r"shape \(6, 5\).*\(any, 4\)"):
        through(made, (torch.randn(6, 5),))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 7


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Doubled.apply(self.a(x)))


def test_a_backward_pass_of_ones_own_is_never_lost_in_silence() -> None:
    with pytest.raises(TaskError, match=r"autograd\.Function|nobody saw"):
        trace(Own(), (torch.randn(3, 4),), pieces=2)


def test_a_loss_can_be_traced_with_the_model() -> None:
    whole, (x,) = model("mlp")
    y = torch.randint(5, (len(x),))

    def call(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(module(batch["x"]), batch["y"]), batch["y"].size(0)

    made = cut(trace(whole, ({"x": x, "y": y},), call=call), [3])
    got, count = through(made, ({"x": x[:4], "y": y[:4]},))
    assert torch.equal(got, F.cross_entropy(whole(x[:4]), y[:4])) and count == 4


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return self.b(self.a(x))


def test_a_buffer_that_would_no_longer_be_updated_is_refused() -> None:
    with pytest.raises(
        TaskError,
        match=r"Counting puts a new tensor in place of its buffer seen; change it in place",
    ):
        trace(Counting(), (torch.randn(3, 4),), pieces=2)


class Between(nn.Module):
    """Two layers, and between them a module, or code that calls torch."""

    def __init__(self, inner: nn.Module, code: Any = None) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.code = nn.Linear(8, 8), inner, nn.Linear(8, 8), code

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.first(x))
        return self.last(self.code(y) if self.code else y[0] if isinstance(y, tuple) else y)


CONV = nn.Conv2d(1, 1, 3, padding=1)
ASKING = {
    "conv": (
        Between(nn.Sequential(CONV, nn.GroupNorm(1, 1), nn.ConvTranspose2d(1, 1, 3, padding=1))),
        (1, 8, 8),
    ),
    "pad": (Between(nn.Identity(), lambda y: F.pad(y[..., :4], (0, 4))), (5, 8)),
    "pad module": (Between(nn.ConstantPad1d((4, -4), 0.0)), (5, 8)),
    "gru": (Between(nn.GRU(8, 8, batch_first=True)), (5, 8)),
    "lstm": (Between(nn.LSTM(8, 8, batch_first=True)), (5, 8)),
    "unfold": (Between(CONV, lambda y: F.unfold(y, (2, 4)).transpose(1, 2)), (1, 8, 8)),
    "pool": (
        Between(CONV, lambda y: F.adaptive_avg_pool2d(y, (4, 8)).flatten(1).view(y.size(0), 4, 8)),
        (1, 8, 8),
    ),
    "interpolate": (Between(CONV, lambda y: F.interpolate(y, scale_factor=2)[..., :8]), (1, 8, 8)),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_torch_asks_of_sizes_inside_of_a_step_binds_no_later_batch(name: str) -> None:
    torch.manual_seed(0)
    whole, shape = ASKING[name][0].double(), ASKING[name][1]
    traced = trace(whole, (torch.randn(2, *shape, dtype=torch.float64),), pieces=2)
    made = cut(traced, traced.cuts_at(["last"], 2))
    for training, batch in ((True, 2), (False, 40), (True, 3)):
        same_as_whole(made, whole, (torch.randn(batch, *shape, dtype=torch.float64),), training)


class Few(nn.Module):
    """How many rows it gives depends on how many it has, and nothing but a plain number tells."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(int(x.size(0)), 1) * x.mean() if x.size(0) < 16 else x


def test_a_size_that_became_a_number_inside_of_a_step_binds_later_batches() -> None:
    whole = Between(Few(), lambda y: torch.ones(y.size(0), 8) * y[:, :1])
    made = cut(trace(whole, (torch.randn(4, 8),), pieces=2), [2])
    through(made, (torch.randn(4, 8),))
    for rows in (5, 40):
        with pytest.raises(TaskError, match=rf"batch of shape \({rows}, 8\).*does not hold"):
            through(made, (torch.randn(rows, 8),))


def test_a_name_that_is_like_no_module_is_refused_with_those_there_are() -> None:
    whole, inputs = model("gpt")
    with pytest.raises(PlanError, match=r"cut=nosuch: the model has no such module; it has \w+, "):
        trace(whole, inputs, cut=["nosuch"])


def test_sizes_are_found_that_answer_a_question_otherwise() -> None:
    rows, length = sympy.symbols("rows length", positive=True, integer=True)
    left = {sympy.Ne(rows, 48), sympy.Ne(rows * length, 24), sympy.Ne(rows, 1)}
    tried = list(other_sizes({rows: 4, length: 12}, {rows}, lambda: left))
    assert any(sizes[rows] == 48 for sizes in tried)
    assert any(sizes[rows] * sizes[length] == 24 for sizes in tried)
    assert all(
        size > 1 for sizes in tried for size in sizes.values()
    )  # torch takes that for a constant
    assert all(tried.count(sizes) == 1 for sizes in tried)


def test_one_row_is_bound_by_what_the_model_asked_and_not_by_what_torch_asked_inside() -> None:
    rows = sympy.Symbol("rows", positive=True, integer=True)
    one = (torch.zeros(1, 7),)
    SizeGuard({Input(0, 0): (rows, 7)}, [], [(sympy.Ne(7 * rows, 7), "there")], {})(one)
    with pytest.raises(TaskError, match=r"batch of shape \(1, 7\).*asked for near there"):
        SizeGuard({Input(0, 0): (rows, 7)}, [(sympy.Ne(7 * rows, 7), "there")], [], {})(one)
    with pytest.raises(TaskError, match=r"batch of shape \(3, 7\).*asked for near there"):
        SizeGuard({Input(0, 0): (rows, 7)}, [], [(sympy.Ne(7 * rows, 21), "there")], {})(
            (torch.zeros(3, 7),)
        )
