"""Stage modules hold exactly what they use, under its own names.

Their costs are measured, and the cut is as good as any.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from manyhands.errors import PlanError
from manyhands.parallel.pipeline.node_costs import measure
from manyhands.parallel.pipeline.stage_modules import Stage, cut
from manyhands.parallel.trace.trace_model import trace
from manyhands.split.stages import balance_stages
from support.stage_cuts import brute_force, slowest
from support.traced_models import QUICK_AND_SLOW, model, through


def names(stage: Stage) -> list[str]:
    return [name for name, _ in stage.module.named_parameters()]


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_every_parameter_and_buffer_has_its_name_in_the_whole_model_and_a_stage(name: str) -> None:
    whole, inputs = model(name)
    traced = trace(whole, inputs, pieces=4)
    stages = cut(
        traced, balance_stages([1.0] * len(traced.nodes[True]), 4, trainable=traced.trainable)
    )
    order = [n for n, _ in whole.named_parameters()]
    assert {n for s in stages for n in names(s)} == set(order)
    assert {n for s in stages for n, _ in s.module.named_buffers()} == {
        n for n, _ in whole.named_buffers()
    }
    for stage in stages:
        assert names(stage), "an optimizer needs something to do"
        assert names(stage) == [n for n in order if n in names(stage)], "in the model's own order"
        assert set(stage.module.state_dict()) <= set(whole.state_dict())
        assert all(stage.module.get_parameter(n) is whole.get_parameter(n) for n in names(stage))
    for n in order:
        holders = [s.index for s in stages if n in names(s)]
        assert all(stages[k].tied.get(n, [k]) == holders for k in holders)


def test_a_tied_weight_stands_under_one_name_in_all_stages_that_use_it() -> None:
    whole, inputs = model("gpt")
    traced = trace(whole, inputs)
    first, last = cut(traced, traced.cuts_at(["h.2"], 2))
    assert (
        "wte.weight" in names(first)
        and "wte.weight" in names(last)
        and "lm_head.weight" not in names(last)
    )
    assert first.tied == last.tied == {"wte.weight": [0, 1]}
    assert last.module.get_submodule("lm_head").weight is last.module.get_parameter("wte.weight")


def test_a_value_needed_later_is_passed_on_by_the_stages_between() -> None:
    whole, inputs = model("skips")
    traced = trace(whole, inputs)
    stages = cut(traced, traced.cuts_at(["b", "c", "d"], 4))
    (first,) = stages[0].sends
    assert all(first in stage.receives for stage in stages[1:])
    assert [s.inputs for s in stages] == [(0,), (), (), (1,)] or 1 in stages[-1].inputs


def test_positions_and_masks_are_made_again_and_not_sent() -> None:
    whole, inputs = model("llama")
    traced = trace(whole, inputs)
    stages = cut(traced, traced.cuts_at(["model.layers.1", "model.layers.2"], 3))
    assert all(
        isinstance(v, Tensor) and v.is_floating_point()
        for v in stages[0].forward(inputs, {}).values()
    )


def test_what_no_stage_of_this_rank_uses_is_let_go() -> None:
    whole, inputs = model("mlp")
    kept, dropped = (
        weakref.ref(whole.get_parameter("6.weight")),
        weakref.ref(whole.get_parameter("0.weight")),
    )
    mine = cut(trace(whole, inputs), [4])[1]
    del whole
    gc.collect()
    assert kept() is not None and dropped() is None
    assert names(mine) == ["4.weight", "4.bias", "6.weight", "6.bias"]


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 4),
            nn.ReLU(inplace=True),
            nn.Linear(4, 4),
            nn.ReLU(inplace=True),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_no_cut_lies_between_a_value_and_what_changes_it_in_place() -> None:
    for whole in (Changing(), Changing().layers):
        x = torch.randn(3, 4)
        traced = trace(whole, (x,))
        costs = measure(traced, (x,), repeats=1)
        assert [math.isinf(c.crossing_bytes) for c in costs] == [False, True, False, True, False]
        stages = cut(
            traced,
            balance_stages(
                [0.0, 9, 0, 9, 0],
                3,
                trainable=traced.trainable,
                crossing=[c.crossing_bytes for c in costs],
            ),
        )
        values: dict[str, Tensor] = {}
        for (
            stage
        ) in stages:  # as a pipeline does it: what is received is a leaf of the next stage's graph
            values = {k: v.detach().requires_grad_() for k, v in values.items()}
            values = stage.forward((x,), values)
        torch.testing.assert_close(values["output"], whole(x), rtol=0, atol=0)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


def test_running_statistics_that_two_stages_would_update_are_refused() -> None:
    with pytest.raises(
        PlanError, match="norm keeps running statistics and is used in stages 0 and 1"
    ):
        cut(trace(Shared(), (torch.randn(3, 4),)), [2])


def test_more_stages_than_pieces_are_refused_with_both_numbers() -> None:
    whole, inputs = model("mlp")
    traced = trace(whole, inputs, pieces=9)
    with pytest.raises(PlanError, match=r"9 stages are wanted, but no more than 4 can be cut"):
        balance_stages([1.0] * len(traced.nodes[True]), 9, trainable=traced.trainable)


@pytest.mark.parametrize(
    ("stages", "name"),
    [(2, "mlp"), (2, "cnn"), (2, "gpt"), (4, "mlp"), (4, "gpt")]
    + [
        pytest.param(*c, marks=pytest.mark.slow)
        for c in ((4, "cnn"), (2, "seq2seq"), (4, "seq2seq"))
    ],
)
def test_the_automatic_cut_is_about_as_good_as_the_best_there_is(name: str, stages: int) -> None:
    whole, inputs = model(name)
    traced = trace(whole, inputs, pieces=stages)
    costs = measure(traced, inputs, repeats=1)
    seconds = [c.seconds for c in costs]
    where = balance_stages(
        seconds, stages, trainable=traced.trainable, crossing=[c.crossing_bytes for c in costs]
    )
    assert all(type(i) is int for i in where)
    able = [
        w
        for w in itertools.combinations(range(1, len(seconds)), stages - 1)
        if valid(traced.trainable, w)
    ]
    assert slowest(seconds, where) <= 1.15 * min(slowest(seconds, w) for w in able)
    assert brute_force(seconds, stages) <= min(slowest(seconds, w) for w in able)


def valid(trainable: list[bool], where: tuple[int, ...]) -> bool:
    edges = [0, *where, len(trainable)]
    return all(any(trainable[a:b]) for a, b in itertools.pairwise(edges))


def test_measuring_counts_bytes_once_and_leaves_everything_as_it_was() -> None:
    whole, inputs = model("cnn")
    before = {k: v.clone() for k, v in whole.state_dict().items()}
    chance = torch.get_rng_state()
    traced = trace(whole, inputs)
    ticks = itertools.count()
    costs = measure(traced, inputs, repeats=2, clock=lambda: float(next(ticks)))
    assert {c.seconds for c in costs} == {1.0}
    assert sum(c.parameter_bytes for c in costs) == sum(p.nbytes for p in whole.parameters())
    assert all(torch.equal(v, before[k]) for k, v in whole.state_dict().items())
    assert all(p.grad is None for p in whole.parameters()) and torch.equal(
        torch.get_rng_state(), chance
    )
    # what a cut sends is what goes into the next step: the image after the first block
    at = [s.target for s in traced.nodes[True]].index("blocks.1")
    assert costs[at].crossing_bytes == 6 * 8 * 8 * 8 * 8


def test_activations_are_counted_as_autograd_keeps_them() -> None:
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    costs = measure(trace(whole, (torch.randn(3, 4),)), (torch.randn(3, 4),), repeats=1)
    assert [c.kept_bytes for c in costs] == [
        0,
        3 * 8 * 4,
        0,
    ]  # the input is the batch's own; tanh keeps what it gives


def test_a_stage_can_be_given_nothing_but_what_it_reads() -> None:
    whole, inputs = model("seq2seq")
    traced = trace(whole, inputs)
    stages = cut(traced, traced.cuts_at(["encoders.1", "decoders.0"], 3))
    assert stages[0].inputs == (0,) and stages[1].inputs == (1,) and stages[2].inputs == ()
    assert torch.equal(through(stages, inputs), whole(*inputs))
