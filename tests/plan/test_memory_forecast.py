"""Memory forecast against what the model really takes, at some tens of megabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from manyhands.core import Layout
from manyhands.errors import PlanError
from manyhands.merge import EASGD, AllReduce
from manyhands.observe.memory_peak import (
    LiveStorages,
    Meter,
    available_bytes,
    held_by,
)
from manyhands.parallel.pipeline.stage_modules import cut
from manyhands.parallel.trace.trace_model import trace
from manyhands.plan.memory_fit import changes, refuse
from manyhands.plan.memory_forecast import Forecast, Setting, Study
from manyhands.plan.static_memory import (
    guess_cuts,
    guess_stages,
    optimizer_bytes,
    strategy_bytes,
)
from manyhands.replica.flat import FlatParameters
from manyhands.replica.forward import autocast
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import WholeUpdate
from manyhands.split.schedules import max_in_flight
from manyhands.split.stages import balance_stages
from support.paths import zoo_file

CPU = torch.device("cpu")
MODELS = ("mlp", "cnn", "gpt", "seq2seq")


@dataclass
class Case:
    model: nn.Module
    values: tuple[Tensor, ...]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    precision: str = "fp32"

    def loss_of(self, module: nn.Module, values: Any) -> Tensor:
        *inputs, target = values
        with autocast(self.precision, CPU):
            return self.loss(module(*inputs), target)


def case(name: str, batch: int, precision: str = "fp32") -> Case:
    """A model of tests/support/zoo, wider."""
    torch.manual_seed(0)
    adam = lambda p: torch.optim.AdamW(p, lr=1e-3)
    momentum = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    if name == "mlp":
        sizes = (512, 1024, 1024, 1024, 10)
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())][:-1]
        return Case(
            nn.Sequential(*layers),
            (torch.randn(batch, 512), torch.randint(10, (batch,))),
            F.cross_entropy,
            momentum,
            precision,
        )
    found = zoo_file(name)
    if name == "cnn":
        values = (torch.randn(batch, 1, 16, 16), torch.randint(5, (batch,)))
        return Case(found["Net"](width=96), values, F.cross_entropy, momentum, precision)
    if name == "gpt":
        words = torch.randint(500, (2, batch, 12))
        return Case(
            found["GPT"](dim=256, vocabulary=500),
            (words[0], words[1]),
            found["loss"],
            adam,
            precision,
        )
    found["Seq2Seq"].__init__.__globals__["DIM"] = 256
    words = torch.randint(23, (3, batch, 7))
    return Case(found["Seq2Seq"](), (words[0], words[1], words[2]), found["loss"], adam, precision)


def measured(case: Case, micros: int, overlap: bool) -> int:
    """The peak of a replica as a rank has it, over its first rounds."""
    optimizer = case.optimizer(case.model.parameters())
    flat = FlatParameters(case.model, lambda n, dtype: torch.zeros(n, dtype=dtype), 1 << 20)
    drawn = iter(range(100))

    def next_loss() -> MicroLoss:
        values, number = tuple(v.clone() for v in case.values), next(drawn)
        return MicroLoss(
            case.loss_of(case.model, values), len(values[0]), (number + 1) % micros == 0
        )

    replica = ModuleReplica(
        flat,
        WholeUpdate(flat, case.model, optimizer),
        next_loss,
        nominal=len(case.values[0]) * micros,
    )
    meter = Meter(
        CPU, lambda: [*flat.values.values(), *flat.grads.values(), *held_by(case.model, optimizer)]
    )
    for _ in range(2):
        with meter:
            replica.backward((lambda grads: None) if overlap else None)
            replica.step()
    replica.close()
    assert meter.peak_bytes is not None
    return meter.peak_bytes


def forecast(case: Case, setting: Setting) -> Forecast:
    return Study(
        case.model, case.loss_of, case.values, case.optimizer(case.model.parameters()), LiveStorages
    ).forecast(setting)


WAYS = [(32, 1, False, "fp32"), (4, 1, True, "fp32"), (32, 3, True, "bf16")]
REPLICAS = [  # every model in one way, two of them in every way; the rest is slow
    pytest.param(
        name, *way, marks=() if way == WAYS[0] or name in ("mlp", "gpt") else (pytest.mark.slow,)
    )
    for name in MODELS
    for way in WAYS
]


@pytest.mark.parametrize(("name", "batch", "micros", "overlap", "precision"), REPLICAS)
def test_the_forecast_of_a_replica_is_what_it_takes(
    name: str, batch: int, micros: int, overlap: bool, precision: str
) -> None:
    made = case(name, batch, precision)
    expected = forecast(made, Setting(micros=micros, overlap=overlap))
    assert expected.total == pytest.approx(measured(made, micros, overlap), rel=0.02)
    assert expected.total > 20e6 and not expected.notes


@pytest.mark.parametrize("overlap", [False, True])
def test_an_optimizer_that_works_tensor_by_tensor_needs_room_besides(overlap: bool) -> None:
    made = case("mlp", 4)
    made.optimizer = lambda p: torch.optim.RMSprop(p, lr=1e-3)
    assert forecast(made, Setting(overlap=overlap)).total == pytest.approx(
        measured(made, 1, overlap), rel=0.15
    )


def stage_peak(case: Case, stages: list[Any], place: int, flights: int, micros: int) -> int:
    """Run one stage by hand, as a pipeline does: `flights` forward passes, of which only graphs are
    kept, then a way back; beside them the batch, and with each neighbour a message that goes and
    one that comes.
    """
    *inputs, target = case.values
    given: dict[str, Any] = {}
    with torch.no_grad():
        for stage in stages[:place]:
            given = stage.forward(tuple(inputs), given)
    stage = stages[place]
    held = list(stage.module.parameters())
    optimizer = case.optimizer(held)
    for p in held:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    flat = [torch.zeros_like(p) for p in held]
    live = LiveStorages([*flat, *held_by(stage.module, optimizer)])
    with live:
        whole = [[v.clone() for v in case.values] for _ in range(micros)]
        mail = [v.clone() for v in given.values() if isinstance(v, Tensor) for _ in range(2)]
        kept = []
        for i in range(flights):
            batch = tuple(whole[i][:-1])
            got = {
                k: v.clone().requires_grad_() if isinstance(v, Tensor) else v
                for k, v in given.items()
            }
            values = stage.forward(batch, got)
            ends = (
                [case.loss(values["output"], target.clone())]
                if stage.last
                else [v for v in values.values() if isinstance(v, Tensor)]
            )
            kept.append(
                (
                    batch,
                    [get_gradient_edge(v) for v in ends if v.requires_grad],
                    [v.shape for v in ends if v.requires_grad],
                )
            )
            if i == 0 and not stage.last:
                mail += [v.detach().clone() for v in ends for _ in range(2)]
            del values, ends, got, batch
        _, edges, shapes = kept.pop(0)
        torch.autograd.backward(edges, [torch.ones(s) for s in shapes])
    live.stop()
    return live.peak_bytes


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("mlp", "1f1b"),
        ("cnn", "gpipe"),
        ("gpt", "1f1b"),
        pytest.param("seq2seq", "gpipe", marks=pytest.mark.slow),
    ],
)
def test_the_forecast_of_each_stage_is_what_it_takes(name: str, schedule: str) -> None:
    made, micros, pipe = case(name, 24), 4, 2
    inputs = made.values[:-1]
    traced = trace(made.model, inputs, pieces=pipe)
    stages = cut(traced, balance_stages([1.0] * len(traced.nodes[True]), pipe))
    names = [frozenset(n for n, _ in s.module.named_parameters()) for s in stages]
    study = Study(
        made.model, made.loss_of, made.values, made.optimizer(made.model.parameters()), LiveStorages
    )
    found = study.forecasts(
        Setting(Layout(pipe=pipe), micros=micros, schedule=schedule, stages=names)
    )
    for place, expected in enumerate(found):
        flights = max_in_flight(schedule, pipe, place, micros)
        assert expected.total == pytest.approx(
            stage_peak(made, stages, place, flights, micros), rel=0.15
        ), (place, str(expected))


def test_more_micro_batches_in_flight_need_more_and_recomputing_needs_less() -> None:
    made = case("gpt", 16)
    study = Study(
        made.model, made.loss_of, made.values, made.optimizer(made.model.parameters()), LiveStorages
    )
    piped = {
        s: study.forecast(Setting(Layout(pipe=4), micros=16, schedule=s)).activations
        for s in ("gpipe", "1f1b", "zero_bubble")
    }
    assert piped["1f1b"] == piped["zero_bubble"] < piped["gpipe"] / 3
    again = study.forecast(Setting(Layout(pipe=4), micros=16, schedule="gpipe", recompute=True))
    assert again.activations < piped["gpipe"] / 3
    plain, recomputed = (study.forecast(Setting(recompute=r)) for r in (False, True))
    assert (
        recomputed.activations < 0.5 * plain.activations
        and recomputed.parameters == plain.parameters
    )


def test_recomputing_blocks_takes_what_was_forecast() -> None:
    from torch.utils.checkpoint import checkpoint

    made = case("gpt", 48)
    expected = forecast(made, Setting(recompute=True))
    for block in made.model.h:  # type: ignore[union-attr]
        block.forward = lambda x, whole=block.forward: checkpoint(whole, x, use_reentrant=False)
    assert expected.total == pytest.approx(measured(made, 1, False), rel=0.15)


@pytest.mark.parametrize("size", [2, 4])
def test_sharding_divides_what_each_stage_of_zero_says(size: int) -> None:
    made = case("gpt", 1)
    study = Study(
        made.model, made.loss_of, made.values, made.optimizer(made.model.parameters()), LiveStorages
    )
    whole = sum(p.nbytes for p in made.model.parameters())
    of = {
        z: study.forecast(Setting(Layout(shard=size), zero=z, overlap=True, bucket_bytes=1 << 20))
        for z in (1, 2, 3)
    }
    assert all(f.optimizer == pytest.approx(2 * whole / size, rel=1e-3) for f in of.values())
    assert of[1].parameters == of[2].parameters == whole and of[1].gradients >= whole
    assert of[2].gradients == whole // size + (1 << 20)
    assert (
        whole // size < of[3].parameters < whole // size + whole * 0.6
    )  # and two of four blocks gathered
    assert max(of[2].total, of[3].total) < of[1].total


def test_a_rank_of_a_tensor_group_holds_shards() -> None:
    made = case("gpt", 48)
    study = Study(
        made.model, made.loss_of, made.values, made.optimizer(made.model.parameters()), LiveStorages
    )
    one, two = study.forecast(Setting()), study.forecast(Setting(Layout(tensor=2)))
    assert (
        one.parameters / 2 < two.parameters < 0.55 * one.parameters
    )  # norms and positions stay whole
    assert (
        one.activations / 2 < two.activations < 0.8 * one.activations
    )  # the residual stream stays whole
    assert set(guess_cuts(made.model)) >= {
        "h.0.attn.c_attn.weight",
        "h.0.attn.c_proj.weight",
        "h.3.mlp.0.bias",
        "wte.weight",
    }
    uneven = study.forecast(Setting(Layout(tensor=3), cuts={"wte.weight": (0, 1)}))
    assert (
        one.parameters - uneven.parameters == (500 - 167) * 256 * 4
    )  # the first rank's share of 500 rows


def test_ranks_of_one_host_share_parameters_and_the_update() -> None:
    made = case("mlp", 8)
    plain, shared = (forecast(made, Setting(overlap=True, sharers=n, owners=n)) for n in (1, 2))
    assert shared.parameters == plain.parameters // 2 and shared.optimizer == plain.optimizer // 2
    assert shared.gradients == plain.gradients


def test_the_state_of_any_optimizer_is_counted() -> None:
    model = nn.Linear(300, 200)
    n = sum(p.numel() for p in model.parameters())
    kinds: dict[Callable[..., torch.optim.Optimizer], float] = {
        lambda p: torch.optim.SGD(p, lr=0.1): 0,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9): 4,
        lambda p: torch.optim.Adam(p, amsgrad=True): 12,
        lambda p: torch.optim.RMSprop(p): 4,
        lambda p: torch.optim.Adafactor(p): 4
        * (300 + 200 + 200)
        / n,  # a row and a column of the matrix, and the bias
    }
    for make, each in kinds.items():
        state, _, notes = optimizer_bytes(model, make(model.parameters()))
        assert sum(state.values()) == pytest.approx(each * n, rel=0.05, abs=64) and not notes


class Stubborn(torch.optim.SGD):
    """Asks for values, which tensors without memory do not have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if float(p.grad.sum()) >= 0:
                    self.state[p]["seen"] = torch.zeros_like(p, dtype=torch.float64)


def test_what_cannot_run_without_memory_is_run_with_it_and_that_is_said() -> None:
    state, _, notes = optimizer_bytes(
        model := nn.Linear(300, 200), Stubborn(model.parameters(), lr=0.1)
    )
    assert sum(state.values()) == 8 * (300 * 200 + 200) and not notes

    made = case("mlp", 32)
    plain = forecast(made, Setting())
    before = {k: v.clone() for k, v in made.model.state_dict().items()}
    made.loss = lambda outputs, target: (
        F.cross_entropy(outputs, target) * (1 if float(outputs.detach().sum()) else 2)
    )
    drawn = torch.get_rng_state()
    looked = forecast(made, Setting())
    assert (
        looked.total == pytest.approx(plain.total, rel=0.01)
        and "real micro-batch" in looked.notes[0]
    )
    assert all(
        torch.equal(v, before[k]) for k, v in made.model.state_dict().items()
    ) and torch.equal(drawn, torch.get_rng_state())
    assert all(p.grad is None for p in made.model.parameters())


def test_a_dry_run_leaves_no_trace_in_the_model() -> None:
    made = case("cnn", 4)
    before = {k: v.clone() for k, v in made.model.state_dict().items()}
    forecast(made, Setting(recompute=True))
    assert all(torch.equal(v, before[k]) for k, v in made.model.state_dict().items())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in made.model.modules())
    assert all(p.grad is None and p.device == CPU for p in made.model.parameters())


def test_the_notice_and_the_comparison_read_well() -> None:
    found = Forecast(96_000_000, 96_000_000, 192_000_000, 28_400_000)
    assert (
        str(found)
        == "about 412 MB a rank: parameters 96, gradients 96, optimizer 192, activations 28.4"
    )
    assert found.against(430_000_000) == "measured 430 MB, forecast 412"
    assert str(Forecast(50 * 10**9, 0, 0, 0)).startswith("about 50 GB a rank: parameters 50")


def test_what_does_not_fit_is_refused_with_numbers_and_the_smallest_change_that_fits() -> None:
    made = case("gpt", 48)
    study = Study(
        made.model, made.loss_of, made.values, made.optimizer(made.model.parameters()), LiveStorages
    )
    setting = Setting(Layout(data=2), overlap=True)
    needed = study.forecast(setting)
    assert refuse(needed, needed.total) is None
    with pytest.raises(
        PlanError,
        match=r"about 99\.4 MB a rank.* but a rank has 89\.\d MB here; set recompute=true "
        r".*--anyway",
    ):
        refuse(needed, int(0.9 * needed.total), changes(study, setting, 48))
    offered = dict(changes(study, setting, 48))
    best = min(offered, key=lambda words: offered[words].total)
    with pytest.raises(PlanError, match=f"set {best} "):
        refuse(needed, offered[best].total, offered.items())
    with pytest.raises(PlanError, match="no single change"):
        refuse(needed, 1_000_000, changes(study, setting, 48))
    said = refuse(needed, 1_000_000, anyway=True)
    assert said is not None and said.endswith("running anyway")


def test_every_change_that_is_offered_needs_less_and_is_said_in_words_of_a_plan() -> None:
    made = case("gpt", 8)
    study = Study(
        made.model, made.loss_of, made.values, made.optimizer(made.model.parameters()), LiveStorages
    )
    offered = dict(changes(study, Setting(), 8))
    assert list(offered) == [
        "recompute=true",
        "micro=2",
        "micro=4",
        "micro=8",
        "shard=2",
        "tensor=2",
        "pipe=2",
        "batch=4",
        "batch=2",
        "batch=1",
    ]
    assert offered["batch=1"].activations < offered["batch=4"].activations


def test_stages_are_guessed_about_even_and_every_parameter_is_in_one() -> None:
    model = case("gpt", 1).model
    stages, sizes = guess_stages(model, 4), {n: p.nbytes for n, p in model.named_parameters()}
    assert sorted(n for s in stages for n in s) == sorted(sizes)
    assert max(sum(sizes[n] for n in s) for s in stages) < 1.3 * sum(sizes.values()) / 4
    with pytest.raises(PlanError, match="pipe=3, but 4 stages"):
        made = case("gpt", 1)
        forecast(made, Setting(Layout(pipe=3), stages=stages))


def test_what_a_strategy_remembers_is_counted() -> None:
    assert strategy_bytes(AllReduce(), {torch.float32: 1000}) == 0
    assert strategy_bytes(EASGD(), {torch.float32: 1000}) == 4000


def test_available_memory_is_the_tightest_limit_shared_by_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_bytes(CPU, 2, root=tmp_path) == 4000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.current").write_text("1000000\n")
    assert available_bytes(CPU, 4, own=7, root=tmp_path) == 1_000_007
    (group / "memory.max").write_text("max\n")
    assert available_bytes(CPU, 1, root=tmp_path) == 8000 * 1024
