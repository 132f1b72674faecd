"""Unmade parameters: the values that are made later are those of a plain build, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils import parametrizations

from manyhands.replica.deferred import unmade


class Tied(nn.Module):
    """Ties, initialisation that comes later, copies of parameters, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2
        )
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.table.weight
        self.apply(self._initial)
        self.free = nn.Parameter(torch.randn(4, 5) * 0.02)
        self.turned = nn.Parameter(self.free.detach().t().clone())
        at = torch.arange(50.0)[:, None] * torch.exp(torch.arange(0, 16, 2) * -0.5)
        positions = torch.zeros(50, 16)
        positions[:, 0::2], positions[:, 1::2] = at.sin(), at.cos()
        self.register_buffer("positions", positions, persistent=False)
        self.mask = torch.ones(6, 6).triu(1).bool()

    def _initial(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0, 0.02)


class AsksForValues(nn.Module):
    """Its structure depends on numbers that it draws."""

    def __init__(self) -> None:
        super().__init__()
        first = torch.randn(3)
        width = 4 if first[0] > 0 else 5
        self.scale = float(first.abs().sum())
        self.one = nn.Linear(width, 4)
        order = torch.tensor(torch.randperm(4).tolist())
        self.two = nn.Parameter(self.one.weight.detach().index_select(0, order) * self.scale)
        kept = self.one.bias.detach()
        self.three = nn.Parameter(kept[kept > 0].sum() + torch.rand(3))


class OfArrays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        drawn = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
        self.given = nn.Parameter(torch.from_numpy(drawn))
        self.copied = nn.Parameter(torch.empty(5, 4))
        self.copied.data.copy_(torch.from_numpy(drawn) * 2)
        drawn[:] = 0  # later changes of an array that was copied do not count
        self.listed = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.drawn = nn.Parameter(torch.zeros(random.randint(3, 9)))
        own = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.empty(7).uniform_(generator=own))
        self.more = nn.Parameter(torch.randn(6, generator=own))


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        one = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU())
        self.parts = nn.ModuleList(copy.deepcopy(one) for _ in range(3))
        with torch.no_grad():
            self.parts[1][0].weight.mul_(2).add_(self.parts[0][0].weight)
            self.parts[0][0].weight.zero_()
        self.parts[2][0].load_state_dict(self.parts[1][0].state_dict())
        self.to("cpu").half().float()


def weight(fill: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = nn.Linear(30, 20)
        fill(module.weight)
        return module

    return build


def linear_with(around: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: around(nn.Linear(5, 6))


FILLS = (
    "kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ orthogonal_ trunc_normal_ "
    "zeros_ ones_ eye_ normal_ uniform_"
)
DEFERRED: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "values": AsksForValues,
    "arrays": OfArrays,
    "copies": Copies,
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    "lstm": lambda: nn.LSTM(5, 6, 2),
    "gru": lambda: nn.GRU(5, 6, bidirectional=True),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "bag": lambda: nn.EmbeddingBag(9, 4, padding_idx=1),
    "convolutions": lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.GroupNorm(1, 3)),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
    "spectral": linear_with(parametrizations.spectral_norm),
    "weight_norm": linear_with(parametrizations.weight_norm),
    "double": lambda: nn.Linear(5, 6).double(),
    "half": lambda: nn.Linear(5, 6, dtype=torch.bfloat16),
    "frozen": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3).requires_grad_(False)),
    "sparse": weight(lambda w: init.sparse_(w, 0.1)),
    "constant": weight(lambda w: init.constant_(w, 3.0)),
    **{name: weight(getattr(init, name)) for name in FILLS.split()},
}


def both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, str]:
    """A plain build, the deferred one, and why it is none; both leave the same random state."""
    made: list[Any] = []
    after = []
    for make in (lambda: (build(), ""), lambda: unmade.deferred(build)):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        made.append(make())
        after.append((random.random(), np.random.random(), torch.rand(3).tolist()))
    assert after[0] == after[1]
    return made[0][0], *made[1]


def assert_alike(plain: nn.Module, late: nn.Module) -> None:
    for mine, yours in (
        (plain.state_dict(), late.state_dict()),
        (dict(plain.named_buffers()), dict(late.named_buffers())),
    ):
        assert list(mine) == list(yours)
        for name, value in mine.items():
            assert torch.equal(value, yours[name]), name
            assert (value.dtype, value.stride()) == (yours[name].dtype, yours[name].stride())
    needs = [[(n, p.requires_grad) for n, p in m.named_parameters()] for m in (plain, late)]
    assert needs[0] == needs[1]


@pytest.mark.parametrize("name", DEFERRED)
def test_parameters_that_are_made_later_have_the_bits_of_a_plain_build(name: str) -> None:
    plain, late, why = both(DEFERRED[name])
    assert not why
    parameters = list(late.parameters())
    random.Random(2).shuffle(parameters)  # in any order
    if name != "lstm" and name != "gru":  # these keep views of their weights, made at once
        assert any(map(unmade.is_unmade, parameters))
    unmade.make_parameters(parameters)
    assert not unmade.unmade_parameters(late)
    assert_alike(plain, late)


def test_a_value_is_made_in_new_memory_each_time_and_leaves_the_generator_alone() -> None:
    plain, late, _ = both(Tied)
    state = torch.get_rng_state()
    first, again = (unmade.value_of(late.table.weight) for _ in range(2))
    assert torch.equal(first, plain.table.weight) and torch.equal(again, first)
    assert first.data_ptr() != again.data_ptr()
    assert torch.equal(torch.get_rng_state(), state)
    assert unmade.is_unmade(late.head.weight) and late.head.weight is late.table.weight


def test_tensors_that_are_no_parameters_are_made_at_once() -> None:
    plain, late, _ = both(Tied)
    assert torch.equal(late.mask, plain.mask)
    assert torch.equal(late.positions, plain.positions)


class KeepsAnAddress(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.weight.detach().numpy()[1] = 7.0


class ReadsAConjugate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj())


@pytest.mark.parametrize("build", [KeepsAnAddress, ReadsAConjugate])
def test_what_cannot_be_recorded_is_built_as_a_whole_and_the_reason_is_given(
    build: type[nn.Module],
) -> None:
    plain, late, why = both(build)
    assert why
    assert not unmade.unmade_parameters(late)
    assert_alike(plain, late)


def test_a_tensor_on_the_meta_device_is_the_users_and_stays_there() -> None:
    _, late, why = both(lambda: nn.Linear(3, 4, device="meta"))
    assert "meta" in why
    assert late.weight.is_meta


def test_an_error_of_the_model_function_is_raised_as_it_is() -> None:
    def build() -> nn.Module:
        raise ValueError("no such width")

    with pytest.raises(ValueError, match="no such width"):
        unmade.deferred(build)


def test_unmade_parameters_take_no_memory_and_no_values() -> None:
    _, late, _ = both(lambda: nn.Linear(64, 64))
    assert unmade.is_unmade(late.weight)
    assert late.weight.device.type == "cpu" and not late.weight.any()


def test_a_cast_holds_for_values_that_are_made_later() -> None:
    plain, late, _ = both(Tied)
    unmade.cast(late, torch.float64)
    assert late.table.weight.dtype == torch.float64
    assert unmade.is_unmade(late.table.weight)
    unmade.make_parameters(late.parameters())
    assert_alike(plain.double(), late)


def test_digests_tell_models_of_other_random_numbers_apart() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(unmade.digest(unmade.deferred(Tied)[0]))
    assert found[0] == found[1] != found[2]


def test_code_that_reads_a_parameter_finds_its_value() -> None:
    plain, late, _ = both(Tied)
    with unmade.MadeOnRead(late.parameters()):
        norm = late.table.weight.norm()
    assert torch.equal(norm, plain.table.weight.norm())
    assert not unmade.is_unmade(late.table.weight)
    assert unmade.is_unmade(late.free)


def test_loaded_weights_are_read_when_a_parameter_is_made() -> None:
    _, late, _ = both(lambda: nn.Linear(3, 4))
    given = torch.rand(4, 3)
    read: list[int] = []

    def reads() -> Tensor:
        read.append(1)
        return given

    unmade.load(late.weight, reads)
    assert not read
    unmade.make_parameters(late.parameters())
    assert read == [1] and torch.equal(late.weight, given)
    late.weight.data.zero_()
    assert given.any()  # what was given is not the parameter's memory
