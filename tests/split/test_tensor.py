"""Tensor split: which layers are sharded follows from how the model uses them.

What stays whole is reported; what cannot be sharded is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.errors import PlanError, TaskError
from manyhands.parallel.tensor.dry_run import prepare_dry_run
from manyhands.split.tensor import (
    Cut,
    TensorCuts,
    derive,
    named_tensors,
    shard_specs,
)
from support.paths import zoo_task


def zoo(name: str) -> Any:
    return zoo_task(name)


def derived(name: str, size: int = 2, overrides: dict[str, str] | None = None) -> TensorCuts:
    task = zoo(name)
    *inputs, target = (t[:4] for t in task.train)
    return derive(
        task.model, prepare_dry_run(task.model, inputs, size, task.loss, target), size, overrides
    )


def of(
    model: nn.Module, *inputs: Tensor, size: int = 2, overrides: dict[str, str] | None = None
) -> TensorCuts:
    return derive(model, prepare_dry_run(model, inputs, size), size, overrides)


def test_linear_layers_pair_up_as_column_and_row() -> None:
    assert derived("mlp").cuts == {
        "0.weight": Cut(0),
        "0.bias": Cut(0),
        "2.weight": Cut(1),
        "4.weight": Cut(0),
        "4.bias": Cut(0),
        "6.weight": Cut(1),
    }


def test_fused_q_k_v_are_cut_in_three_blocks_and_a_tied_matrix_under_both_its_names() -> None:
    found = derived("gpt")
    for i in range(4):
        assert (
            found.cuts[f"h.{i}.attn.c_attn.weight"]
            == found.cuts[f"h.{i}.attn.c_attn.bias"]
            == Cut(0, 3)
        )
        assert (
            found.cuts[f"h.{i}.attn.c_proj.weight"] == found.cuts[f"h.{i}.mlp.2.weight"] == Cut(1)
        )
        assert f"h.{i}.attn.c_proj.bias" not in found.cuts
    assert found.cuts["wte.weight"] == found.cuts["lm_head.weight"] == Cut(0)
    assert found.notes == [
        "wpe stays whole on each of 2 ranks: a table of 12 rows is cheaper to hold than to "
        "exchange",
        "26 vectors (norms, and biases that are added after a sum over ranks) stay whole",
    ]


def test_convolutions_pair_up_inside_blocks_with_the_batchnorm_between_them() -> None:
    found = derived("cnn")
    for i in range(3):
        assert found.cuts[f"blocks.{i}.conv1.weight"] == Cut(0) and found.cuts[
            f"blocks.{i}.conv2.weight"
        ] == Cut(1)
        assert all(
            found.cuts[f"blocks.{i}.bn1.{n}"] == Cut(0)
            for n in ("weight", "bias", "running_mean", "running_var")
        )
        assert f"blocks.{i}.bn2.weight" not in found.cuts
    assert any(s.startswith("stem stays whole") and "residual" in s for s in found.notes)
    assert any(s.startswith("blocks.1.short stays whole") for s in found.notes)


def test_every_multihead_attention_is_cut_by_heads() -> None:
    cuts = derived("seq2seq", 4).cuts
    for where in ("encoders.0.attention", "decoders.1.own", "decoders.1.across"):
        assert cuts[f"{where}.in_proj_weight"] == Cut(0, 3) and cuts[
            f"{where}.out_proj.weight"
        ] == Cut(1)


def test_fused_q_k_v_may_also_be_viewed_as_three() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 2).permute(2, 0, 3, 1, 4)
            return self.out(
                F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            )

    cuts = of(Attention(), torch.randn(3, 5, 8)).cuts
    assert cuts["qkv.weight"] == Cut(0, 3) and cuts["out.weight"] == Cut(1)


def test_gates_and_scales_are_cut_with_what_they_scale() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down, self.scale = (
                nn.Linear(6, 10),
                nn.Linear(6, 10),
                nn.Linear(10, 6),
                nn.Parameter(torch.ones(10)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.silu(self.gate(x)) * self.up(x) * self.scale)

    cuts = of(Gated(), torch.randn(3, 6)).cuts
    assert cuts["gate.weight"] == cuts["up.weight"] == cuts["scale"] == Cut(0) and cuts[
        "down.weight"
    ] == Cut(1)


def test_a_layer_whose_output_is_needed_whole_stays_whole_and_the_others_do_not_suffer() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.up, self.down = (
                nn.Linear(5, 8),
                nn.LayerNorm(8),
                nn.Linear(8, 16),
                nn.Linear(16, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(self.norm(self.embed(x)))))

    found = of(Normed(), torch.randn(3, 5))
    assert found.cuts == {"up.weight": Cut(0), "up.bias": Cut(0), "down.weight": Cut(1)}
    assert found.notes[0] == (
        "embed stays whole on each of 2 ranks: its output goes into layer_norm, which needs "
        "all of it"
    )


def test_a_large_embedding_is_cut_by_its_rows_also_where_nothing_is_tied_to_it() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    assert of(model, torch.tensor([[1, 2]])).cuts["0.weight"] == Cut(0)


def test_a_loss_that_needs_all_logits_keeps_the_last_layer_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 6))
    x = torch.randn(3, 4)
    assert "4.weight" in of(model, x).cuts
    strange = derive(
        model, prepare_dry_run(model, (x,), 2, lambda out, _: torch.linalg.svdvals(out)), 2
    )
    assert (
        "4.weight" not in strange.cuts
        and "0.weight" in strange.cuts
        and strange.notes[0].startswith("4 stays whole")
    )
    assert "linalg_svdvals" in strange.notes[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class WithFunction(nn.Module):
    def __init__(self, last: bool):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(4, 8), nn.Linear(8, 4), last

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return Doubled.apply(self.down(y)) if self.last else self.down(Doubled.apply(y))


def test_shards_never_go_into_a_function_with_a_backward_of_its_own() -> None:
    x = torch.randn(2, 4, 4)
    found = of(WithFunction(last=False), x)
    assert "up.weight" not in found.cuts
    assert found.notes[0].startswith(
        "up stays whole on each of 2 ranks: its output goes into Doubled.apply"
    )
    assert "up.weight" in of(WithFunction(last=True), x).cuts
    model = WithFunction(last=True)
    along = derive(model, prepare_dry_run(model, (x,), 2, sequence=True), 2)
    assert "up.weight" in along.cuts, "the input of Doubled.apply is gathered along the sequence"


def test_a_model_that_looks_at_its_values_is_tried_with_real_ones() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 3000), nn.Linear(3000, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x))) if float(x.sum()) != 0.5 else x

    # as few samples as are too much work to be tried with real numbers first
    assert len(of(Looks(), torch.zeros(40_000, 4)).cuts) == 3


def test_deriving_changes_neither_the_model_nor_the_stream_of_random_numbers() -> None:
    task = zoo("cnn")
    before = {n: v.clone() for n, v in task.model.state_dict().items()}
    state = torch.get_rng_state()
    derive(task.model, prepare_dry_run(task.model, [task.train[0][:4]], 2), 2)
    assert torch.equal(state, torch.get_rng_state())
    assert (
        all(torch.equal(v, before[n]) for n, v in task.model.state_dict().items())
        and type(task.model.stem) is nn.Conv2d
    )


@pytest.mark.parametrize(
    "name, where, heads", [("gpt", "h.0.attn", 4), ("seq2seq", "encoders.0.attention", 4)]
)
def test_heads_that_do_not_divide_are_refused(name: str, where: str, heads: int) -> None:
    with pytest.raises(
        PlanError, match=rf"^tensor=3 does not divide {heads} heads of {where}; use 1, 2 or 4$"
    ):
        derived(name, 3)


def test_heads_that_do_not_divide_may_be_left_whole() -> None:
    cuts = derived("gpt", 3, {"h.*.attn": "replicate"}).cuts
    assert "h.0.attn.c_attn.weight" not in cuts and "h.0.mlp.0.weight" in cuts


def test_outputs_fewer_than_ranks_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 8))
    found = of(model, torch.randn(2, 4), size=4)
    assert found.cuts == {"2.weight": Cut(0), "2.bias": Cut(0)}
    assert found.notes[0].endswith("3 outputs are too few for 4 ranks")


def test_the_task_decides_by_patterns_and_a_later_one_beats_an_earlier_one() -> None:
    cuts = derived("mlp", 2, {"[02]": "replicate", "4": "row", "6": "column"}).cuts
    assert cuts == {"4.weight": Cut(1), "6.weight": Cut(0), "6.bias": Cut(0)}
    assert "0.weight" in derived("mlp", 2, {"*": "replicate", "0": "column"}).cuts
    assert derived("gpt", 2, {"wpe": "vocabulary"}).cuts["wpe.weight"] == Cut(0)
    assert derived("gpt", 2, {"h.*.attn.c_attn": "heads"}).cuts["h.1.attn.c_attn.weight"] == Cut(
        0, 3
    )
    found = derived("gpt", 2, {"h.0": "replicate"})
    assert "h.0.mlp.0.weight" not in found.cuts and "h.1.mlp.0.weight" in found.cuts
    assert "h.*.mlp.* stays whole on each of 2 ranks: the task says so" in found.notes
    assert "h.0.attn.c_attn stays whole on each of 2 ranks: the task says so" in found.notes


@pytest.mark.parametrize(
    "overrides, error, said",
    [
        (
            {"h.*.atn": "replicate"},
            TaskError,
            r"has no module of that name; the nearest is 'h.\d.attn'",
        ),
        (
            {"h.*.attn": "collumn"},
            TaskError,
            r"'collumn' is none of column, row.*did you mean 'column'",
        ),
        (
            {"h": "column"},
            TaskError,
            r"no module of that name has parameters of its own; name the layers",
        ),
        (
            {"ln_f": "column"},
            PlanError,
            r"asks for ln_f=column, but a layer that multiplies with its weight is needed",
        ),
    ],
)
def test_wishes_that_cannot_be_are_refused(
    overrides: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        derived("gpt", 2, overrides)


def test_a_wish_for_more_ranks_than_there_are_elements_is_refused_with_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(
        PlanError,
        match=r"asks to cut 3 elements of 0.weight over tensor=4 ranks.*use tensor=3 or less",
    ):
        of(model, torch.randn(2, 4), size=4, overrides={"0": "column"})


def test_a_model_that_does_not_run_on_its_data_is_said_so() -> None:
    with pytest.raises(TaskError, match="does not run on an example of its data"):
        of(nn.Linear(4, 4), torch.randn(2, 5))


def test_the_parts_of_all_ranks_are_the_whole_each_element_once() -> None:
    model = zoo("gpt").model
    cuts = derived("gpt").cuts
    for name, value in named_tensors(model):
        counted = torch.zeros_like(value)
        held = [shard_specs(named_tensors(model), cuts, 2, i)[name] for i in range(2)]
        for part in held if name in cuts else held[:1]:
            more = torch.zeros_like(value)
            part.insert(torch.ones(part.local_shape), more)
            counted += more
        assert (counted == 1).all()
