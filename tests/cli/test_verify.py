"""How far a plan may be from one process: what rounding explains, and what it does not.

Recorded runs are made here by torch alone; one sum is done in another order, or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from manyhands.cli.verify import command
from manyhands.cli.verify.deviation import CEILING, LOSS, Deviation, measure
from manyhands.cli.verify.random_rounding import RandomRounding
from manyhands.core import Tensors

STEPS, SAMPLES = 4, 12


class InFloat32(nn.Module):
    """RMSNorm as many public models write it: float32, whatever the model is."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)


class Rotation(nn.Module):
    """A rotary embedding by complex numbers, whose table `double()` leaves complex64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.float().reshape(-1, 4, 2)) * self.table
        return torch.view_as_real(turned).flatten(1).type_as(x)


class SoftmaxOfKeys(nn.Module):
    """Attention in float32 whose keys have a bias: its gradient is zero except for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.keys(x).T).softmax(-1, dtype=torch.float32).type_as(x)
        return torch.as_tensor(x + scores @ self.values(x))


def float64() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), InFloat32(), nn.Linear(8, 8), Rotation(), nn.Linear(8, 3))


def with_keys() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), SoftmaxOfKeys(), nn.Linear(8, 3))


class Cancellation(nn.Module):
    """Large numbers whose difference is small: what rounding does to them is large in it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1e5) - 1e5


def amplifying() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Cancellation(), nn.Tanh(), nn.Linear(8, 3))


MODELS = (float64, with_norm, with_keys, amplifying)


def train(
    make: Callable[[], nn.Module],
    parts: int = 1,
    rounding: RandomRounding | None = None,
    wrong: Callable[[Tensors], None] = lambda _: None,
) -> list[Tensors]:
    """One process: the gradient is a sum over `parts` of the batch, as over as many ranks."""
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(STEPS * SAMPLES, 6, dtype=torch.float64)
    y = torch.randint(0, 3, (STEPS * SAMPLES,))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    kept: Tensors = {}
    for step in range(STEPS):
        here = slice(step * SAMPLES, (step + 1) * SAMPLES)
        total, sums = 0.0, {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        with rounding or torch.enable_grad():
            inputs, targets = x[here], y[here]
            for a, b in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                model.zero_grad()
                loss = nn.functional.cross_entropy(model(a), b)
                loss.backward()
                total += float(loss.detach()) * len(a)
                for name, parameter in model.named_parameters():
                    sums[name] += parameter.grad * len(a) / SAMPLES
        wrong(sums)
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].clone()
            kept[f"gradient/{step}/{name}"] = sums[name]
        kept[f"loss/{step}"] = torch.tensor([total, SAMPLES], dtype=torch.float64)
        optimizer.step()
    return [kept | {f"parameter/{n}": p.detach() for n, p in model.named_parameters()}]


def rounded(make: Callable[[], nn.Module]) -> list[list[Tensors]]:
    return [train(make, rounding=RandomRounding(seed)) for seed in range(3)]


def in_thirds(make: Callable[[], nn.Module], **more: object) -> list[Tensors]:
    return train(make, parts=1 if make is with_keys else 3, **more)  # type: ignore[arg-type]


# -- the verdict --


def test_where_all_is_float64_the_bound_stays_what_orders_of_summation_need() -> None:
    alone = train(float64)
    plain = measure(in_thirds(float64), alone, 1e-12)
    assert plain.equal and not plain.lifted
    again = measure(in_thirds(float64), alone, 1e-12, rounded(float64))
    assert again.equal and not again.lifted
    assert all(0 < moved < 1e-13 for moved in again.rounding.values())


def test_a_model_that_computes_in_float32_inside_is_equal_by_the_precision_that_it_has() -> None:
    alone, ours = train(with_norm), in_thirds(with_norm)
    assert not measure(ours, alone, 1e-12).equal
    deviation = measure(ours, alone, 1e-12, rounded(with_norm))
    assert deviation.equal and deviation.lifted, deviation
    assert all(1e-9 < moved < 1e-5 for moved in deviation.rounding.values())


def test_a_model_that_amplifies_rounding_is_equal_by_how_much_it_does() -> None:
    alone, ours = train(amplifying), train(amplifying, rounding=RandomRounding(9))
    assert not measure(ours, alone, 1e-12).equal
    deviation = measure(ours, alone, 1e-12, rounded(amplifying))
    assert deviation.equal and deviation.lifted, deviation
    assert max(deviation.rounding.values()) < 1e-9


def test_a_gradient_that_is_zero_except_for_float32_rounding_is_left_out() -> None:
    """AdamW makes steps of full size of it, each in a direction that rounding chose."""
    alone = train(with_keys)
    other = train(with_keys, rounding=RandomRounding(9))
    assert measure(other, alone, 1e-12).parameter > 1e-4
    deviation = measure(other, alone, 1e-12, rounded(with_keys))
    assert deviation.noise == ["1.keys.bias"]
    assert deviation.equal, deviation


def scaled(sums: Tensors) -> None:
    for value in sums.values():
        value.mul_(1.001)


def one_entry(sums: Tensors) -> None:
    value = next(iter(sums.values()))
    value.view(-1)[value.abs().argmax()] *= 1.001


def lost(sums: Tensors) -> None:
    """As if one rank's all-reduce of one parameter were missing."""
    next(iter(sums.values())).mul_(2 / 3)


@pytest.mark.parametrize("wrong", [scaled, one_entry, lost])
@pytest.mark.parametrize("make", MODELS)
def test_an_error_in_the_method_is_found_whatever_the_precision_is(
    make: Callable[[], nn.Module], wrong: Callable[[Tensors], None]
) -> None:
    deviation = measure(in_thirds(make, wrong=wrong), train(make), 1e-12, rounded(make))
    assert not deviation.equal and not deviation.undecided
    assert deviation.unexplained or deviation.gradient > deviation.bound("gradient")


@pytest.mark.parametrize("make", MODELS)
def test_a_sample_that_is_lost_is_found(make: Callable[[], nn.Module]) -> None:
    alone = train(make)
    ours = train(lambda: Loses(make()))
    ours = [{k.replace("model.", ""): v for k, v in ours[0].items()}]
    deviation = measure(ours, alone, 1e-12, rounded(make))
    assert not deviation.equal and not deviation.undecided


class Loses(nn.Module):
    """The last sample of a batch becomes the one before it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.model(torch.cat([x[:-1], x[-2:-1]])))


def test_the_loss_is_listed_among_the_deviations() -> None:
    alone = train(float64)
    ours = [{**alone[0], "loss/2": alone[0]["loss/2"] * torch.tensor([1.01, 1.0])}]
    deviation = measure(ours, alone, 1e-12)
    assert max(deviation.by_module, key=lambda k: deviation.by_module[k]) == LOSS
    assert math.isclose(deviation.by_module[LOSS], 0.01, rel_tol=1e-3)


def test_a_bound_is_never_so_wide_that_an_error_could_hide() -> None:
    far = {"loss": 0.0, "gradient": 3e-3, "parameter": 1e-7}
    deviation = Deviation(0.0, 2e-2, 1e-8, {}, 1e-12, rounding=far)
    assert deviation.bound("gradient") == CEILING and deviation.bound("loss") == 1e-12
    assert not deviation.equal and deviation.undecided
    deviation.gradient = 0.05  # more than ten roundings
    assert not deviation.equal and not deviation.undecided


def test_the_command_says_what_rounding_explains_and_lists_the_loss(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text("task = None")

    def said(gradient: float) -> str:
        far = {"loss": 1e-9, "gradient": 3e-3, "parameter": 1e-7}
        found = Deviation(
            1e-9, gradient, 0.0, {LOSS: 1e-9, "": gradient}, 1e-12, [], far, torch.float32
        )
        monkeypatch.setattr(command, "compare", lambda *_: found)
        assert command.verify(tmp_path / "job.py", ["data=2"]) is found.equal
        return capsys.readouterr().out

    moves = (
        "the model computes partly in float32: one rounding of every operation moves, on one "
        "process, loss 1.0e-09, gradients 3.0e-03, parameters 1.0e-07; bounds are 10 times that"
    )
    bounds = "loss 1.0e-08, gradients 1.0e-04, parameters 1.0e-06"
    assert moves in (text := said(5e-5)) and f"EQUAL up to rounding (bounds: {bounds})" in text
    assert moves in (text := said(2e-2)) and "UNDECIDED: rounding alone explains" in text
    text = said(5e-1)
    assert f"DIFFERENT: more than {bounds}. By module, largest first:" in text
    assert text.endswith("  5.00e-01  (top)\n  1.00e-09  (loss)\n")


# -- random rounding --


def test_random_rounding_moves_results_by_one_rounding_of_their_own_dtype() -> None:
    x = torch.rand(1000, dtype=torch.float64) + 1.5
    rounding = RandomRounding(0)
    with rounding:
        fine, coarse = x * 1.5, x.float() * 1.5
    for got, exact in ((fine, x * 1.5), (coarse, x.float() * 1.5)):
        eps = torch.finfo(got.dtype).eps
        moved = ((got - exact) / exact).abs().double()
        assert 0 < float(moved.max()) < 3 * eps and float((moved > 0).double().mean()) > 0.2
    assert rounding.coarsest is torch.float32


def test_random_rounding_leaves_whole_numbers_choices_and_random_numbers_alone() -> None:
    x = torch.linspace(0.1, 2.0, 20, dtype=torch.float64)
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    rounding = RandomRounding(0)
    with rounding:
        assert torch.equal((x > 1).float() * 3, (x > 1) * 3.0)
        assert bool((x == x.max()).any()) and int((x * 10).round().long().sum()) == 210
        grown = x.clone().requires_grad_()
        grown.amax().backward()
    assert grown.grad is not None and float(grown.grad.sum()) == 1.0
    torch.manual_seed(3)
    with rounding:
        x.sin()
    assert torch.equal(torch.rand(()), expected)
    assert rounding.coarsest is torch.float64
