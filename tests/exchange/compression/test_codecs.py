"""What the codecs' codecs promise, each by itself, without ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.errors import PlanError
from manyhands.exchange.compression import (
    CODECS,
    Bf16,
    Fp16,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
)
from manyhands.exchange.compression.quantised import Quantised, cut
from manyhands.exchange.compression.topk import select

LENGTHS = (0, 1, 7, 8, 9, 255, 256, 257, 2047, 2049, 5000)


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def there_and_back(
    codec: Quantised, x: Tensor, error: Tensor | None = None, seed: int = 1
) -> Tensor:
    packed = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    codec.pack(x, packed, error, seed)
    out = torch.full_like(x, 7.0)
    codec.unpack(packed, out)
    total = x.clone()
    codec.unpack_add(packed, total)
    assert torch.equal(total.isnan(), (x + out).isnan())
    torch.testing.assert_close(total, x + out, rtol=1e-6, atol=1e-6, equal_nan=True)
    return out


def blocks(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


# -- casts --


@pytest.mark.parametrize(
    ("codec", "bound"), [(Fp16(), 2.0**-11), (Bf16(), 2.0**-8)], ids=["fp16", "bf16"]
)
@pytest.mark.parametrize("numel", LENGTHS)
def test_a_cast_keeps_its_relative_error(codec: Quantised, bound: float, numel: int) -> None:
    x = torch.randn(numel, generator=dice())
    x = torch.where(x.abs() < 1e-4, 1.0, x)  # below 6e-5 fp16 has fewer digits
    assert ((there_and_back(codec, x) - x).abs() <= bound * x.abs()).all()
    assert codec.nbytes(numel) * 2 == x.nbytes


def test_what_fp16_cannot_hold_becomes_infinite_and_bf16_holds_it() -> None:
    x = torch.tensor([1e5, -1e5])
    assert there_and_back(Fp16(), x).tolist() == [torch.inf, -torch.inf]
    assert ((there_and_back(Bf16(), x) - x).abs() <= 2.0**-8 * x.abs()).all()


# -- int8 --


@pytest.mark.parametrize("block", [1, 16, 256, 1000])
@pytest.mark.parametrize("numel", LENGTHS)
def test_int8_is_off_by_half_a_scale_at_most(block: int, numel: int) -> None:
    x = torch.randn(numel, generator=dice()) * 3
    scale = (blocks(x, block).abs().amax(1) / 127).repeat_interleave(block)[:numel]
    assert ((there_and_back(Int8(block=block), x) - x).abs() <= scale * 0.50001).all()


def test_int8_takes_a_quarter_of_the_bytes_and_four_a_block() -> None:
    assert Int8().nbytes(2560) == 2560 + 4 * 10
    assert Int8().nbytes(2561) == 2561 + 4 * 11


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-38])
def test_blocks_of_zeros_and_of_almost_nothing_stay_finite(rounding: Any, value: float) -> None:
    x = torch.zeros(600)
    x[5], x[300] = value, -value
    out = there_and_back(Int8(rounding=rounding), x)
    assert ((out - x).abs() <= 1.2e-38).all()


@pytest.mark.parametrize("codec", [Int8(), OneBit()], ids=["int8", "onebit"])
@pytest.mark.parametrize("numel", LENGTHS)
def test_feedback_keeps_exactly_what_was_lost(codec: Quantised, numel: int) -> None:
    x, before = torch.randn(numel, generator=dice()), torch.randn(numel, generator=dice(1)) / 100
    error = before.clone()
    q = there_and_back(codec, x, error)
    torch.testing.assert_close(q + error, x + before, rtol=1e-6, atol=1e-6)


def test_stochastic_rounding_is_right_on_average() -> None:
    """The mean of 4000 roundings of each of 512 values; z = its deviation in standard errors is
    like a normal variable.
    """
    codec, times = Int8(rounding="stochastic"), 4000
    x = torch.randn(512, generator=dice(3))
    scale = (blocks(x, 256).abs().amax(1) / 127).repeat_interleave(256)
    mean = torch.zeros(512, dtype=torch.float64)
    for seed in range(times):
        q = there_and_back(codec, x, seed=seed * 7919)
        assert ((q - x).abs() < scale * 1.0001).all()
        mean += q / times
    part = (x / scale).double() - (x / scale).double().floor()
    deviation = scale * (part * (1 - part) / times).sqrt()
    unsure = deviation > scale * 1e-3  # the largest of a block is hit exactly, every time
    z = ((mean - x) / deviation)[unsure]
    assert (
        unsure.sum() > 500 and z.abs().max() < 5 and abs(z.mean()) < 0.2 and 0.85 < z.std() < 1.15
    )


def test_stochastic_rounding_repeats_with_its_seed_and_only_then() -> None:
    x, codec = torch.randn(5000, generator=dice()), Int8(rounding="stochastic")
    assert torch.equal(there_and_back(codec, x, seed=3), there_and_back(codec, x, seed=3))
    assert not torch.equal(there_and_back(codec, x, seed=3), there_and_back(codec, x, seed=4))


# -- one bit --


@pytest.mark.parametrize("numel", LENGTHS)
def test_one_bit_sends_the_means_of_both_signs(numel: int) -> None:
    x = torch.randn(numel, generator=dice()) + 0.3
    out = there_and_back(OneBit(block=64), x)
    for part, got in zip(x.split(64), out.split(64), strict=True):
        for side in (part >= 0, part < 0):
            if side.any():
                torch.testing.assert_close(
                    got[side], part[side].mean().expand(int(side.sum())), rtol=1e-4, atol=1e-5
                )


def test_one_bit_takes_a_bit_a_value_and_eight_bytes_a_block() -> None:
    assert OneBit().nbytes(4096) == 4096 // 8 + 2 * 8
    assert OneBit().nbytes(4097) == 513 + 3 * 8


@pytest.mark.parametrize(
    "x",
    [torch.zeros(3000), torch.ones(3000), -torch.ones(3000)],
    ids=["zeros", "ones", "minus ones"],
)
def test_one_bit_is_exact_where_a_sign_has_one_value(x: Tensor) -> None:
    assert torch.equal(there_and_back(OneBit(), x), x)


# -- the same on other devices: there the codecs are torch operations --


@pytest.mark.parametrize("numel", [n for n in LENGTHS if n])
@pytest.mark.parametrize("feedback", [False, True])
def test_int8_in_torch_operations_makes_the_same_bytes(numel: int, feedback: bool) -> None:
    codec, x = Int8(), torch.randn(numel, generator=dice())
    ours, theirs = (
        torch.randn(numel, generator=dice(2)) / 50 if feedback else None for _ in range(2)
    )
    packed, other = (torch.empty(codec.nbytes(numel), dtype=torch.uint8) for _ in range(2))
    codec.pack(x, packed, ours, 0)
    codec._pack(x, *codec._parts(other, numel), theirs, 0)
    (scales, codes), (s, c) = codec._parts(packed, numel), codec._parts(other, numel)
    assert (
        torch.equal(scales, s)
        and (codes - c).abs().max() <= 1
        and (codes != c).float().mean() < 0.01
    )  # x/s and x*(1/s)
    assert (
        torch.equal(
            codec._unpack(*codec._parts(packed, numel)),
            there_and_back(codec, x, None if ours is None else 0 * x),
        )
        or feedback
    )
    if ours is not None and theirs is not None:
        torch.testing.assert_close(ours[codes == c], theirs[codes == c], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numel", [n for n in LENGTHS if n])
def test_one_bit_in_torch_operations_makes_the_same_bytes(numel: int) -> None:
    codec, x = OneBit(block=64), torch.randn(numel, generator=dice())
    packed, other = (torch.empty(codec.nbytes(numel), dtype=torch.uint8) for _ in range(2))
    ours, theirs = torch.zeros(numel), torch.zeros(numel)
    codec.pack(x, packed, ours, 0)
    codec._pack(x, *codec._parts(other, numel), theirs)
    (means, signs), (m, s) = codec._parts(packed, numel), codec._parts(other, numel)
    assert torch.equal(signs, s)
    torch.testing.assert_close(means, m, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(codec._unpack(means, signs, numel), there_and_back(codec, x))


# -- what is not finite --


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "codec", [Fp16(), Bf16(), Int8(), Int8(rounding="stochastic"), OneBit()], ids=str
)
def test_what_is_not_finite_arrives_so_and_leaves_no_residual(codec: Quantised, bad: float) -> None:
    x = torch.randn(3000, generator=dice())
    x[2500] = bad
    error = torch.zeros(3000) if codec.uses_error_feedback("gradients") else None
    out = there_and_back(codec, x, error)
    assert not out[2500].isfinite() or not out[2048:].isfinite().all()
    assert out[:2048].isfinite().all(), "blocks without it are as they were"
    assert error is None or error.isfinite().all()


# -- top-k --


def largest(x: Tensor, k: int) -> Tensor:
    """By a stable sort: of equal magnitudes the first. NaN counts as largest."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    return torch.sort(bits, descending=True, stable=True).indices[:k].sort().values.int()


def spiked(numel: int) -> Tensor:
    """Zero but where a regular sample looks: it takes everything for large, and nothing of the
    rest.
    """
    x = torch.zeros(numel)
    x[:: numel // 131_071] = torch.rand(len(x[:: numel // 131_071]), generator=dice()) + 1
    return x


def hidden(numel: int) -> Tensor:
    """Small where a regular sample looks, large elsewhere."""
    x = torch.rand(numel, generator=dice()) + 1
    x[:: numel // 131_071] = 1e-3
    return x


VECTORS = {
    "normal": lambda n: torch.randn(n, generator=dice()),
    "constant": lambda n: torch.full((n,), -2.5),
    "zeros": lambda n: torch.zeros(n),
    "few values": lambda n: torch.randint(-3, 4, (n,), generator=dice()).float(),
    "mostly zero": lambda n: (
        torch.randn(n, generator=dice()) * (torch.rand(n, generator=dice(1)) < 0.003)
    ),
    "many sizes": lambda n: (
        torch.randn(n, generator=dice()).mul(20).exp() * torch.randn(n, generator=dice(1)).sign()
    ),
    "not numbers": lambda n: torch.where(
        torch.rand(n, generator=dice(1)) < 0.001, torch.nan, torch.randn(n, generator=dice())
    ),
    "sorted": lambda n: torch.arange(n) / n,
    "spiked": lambda n: spiked(max(n, 300_000)),
    "hidden": lambda n: hidden(max(n, 300_000)),
}


@pytest.mark.parametrize("numel", [1, 33, 2000, 300_007, 1_000_003])
@pytest.mark.parametrize("vector", VECTORS)
def test_selection_is_exactly_the_k_largest_and_of_equal_ones_the_first(
    vector: str, numel: int
) -> None:
    x = VECTORS[vector](numel)
    for density in (1e-6, 0.001, 0.01, 0.25, 1.0):
        k = max(1, int(x.numel() * density))
        index = torch.full((k,), -1, dtype=torch.int32)
        select(x, index)
        assert torch.equal(index, largest(x, k)), (k, density)


def test_what_top_k_leaves_is_less_than_its_share() -> None:
    x = torch.randn(10_000, generator=dice())
    for k in (1, 100, 5000, 10_000):
        index = torch.empty(k, dtype=torch.int32)
        select(x, index)
        rest = x.clone()
        rest[index.long()] = 0
        assert rest.square().sum() <= (1 - k / 10_000) * x.square().sum()


def test_density_falls_by_a_quarter_through_the_warm_up() -> None:
    codec = TopK(density=0.001, warmup=40)
    assert [codec.density_at(s) for s in (0, 9, 10, 20, 30, 39, 40, 1000)] == [
        0.25,
        0.25,
        0.0625,
        0.015625,
        0.00390625,
        0.00390625,
        0.001,
        0.001,
    ]
    assert [codec.count(10_000, s) for s in (0, 10, 20, 30, 40)] == [2500, 625, 156, 39, 10]
    assert TopK(density=0.01).density_at(0) == 0.01
    assert TopK(density=1e-9).count(10, 0) == 1


# -- random-k --


@pytest.mark.parametrize("numel", [1, 10, 999, 4096])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.3, 1.0])
def test_places_are_k_different_ones_and_each_has_the_same_chance(
    numel: int, density: float
) -> None:
    codec = RandomK(density=density)
    hits = torch.zeros(numel)
    for seed in range(300):
        places, lengths = codec.positions(numel, seed)
        assert len(places) == max(1, round(density * numel)) and len(places.unique()) == len(places)
        assert lengths.sum() == numel and int(places.min()) >= 0 and int(places.max()) < numel
        hits[places] += 1
    expected = 300 * len(places) / numel
    assert abs(hits.mean() - expected) < 1e-3
    if 5 < expected < 295 and numel >= 10:
        # cells differ in length by one where k does not divide n, so chances do by as much
        assert (hits - expected).abs().max() < 6 * expected**0.5 + expected / min(map(int, lengths))


def test_the_same_seed_draws_the_same_places_everywhere() -> None:
    codec = RandomK(density=0.1)
    assert torch.equal(codec.positions(1000, 5)[0], codec.positions(1000, 5)[0])
    assert not torch.equal(codec.positions(1000, 5)[0], codec.positions(1000, 6)[0])


# -- options --


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(density=0), "compress.density=0: more than 0 and at most 1 is needed"),
        (lambda: TopK(density=1.5), "compress.density=1.5: more than 0 and at most 1 is needed"),
        (lambda: TopK(density=float("nan")), "compress.density=nan"),
        (lambda: TopK(momentum=1.0), "compress.momentum=1.0: at least 0 and less than 1"),
        (lambda: TopK(masking=False), "compress.masking=false has no effect without momentum"),
        (lambda: TopK(warmup=-1), "compress.warmup=-1"),
        (lambda: TopK(density=0.5, warmup=10), "compress.warmup=10 has no effect"),
        (lambda: RandomK(density=-0.1), "compress.density=-0.1"),
        (lambda: Int8(block=0), "compress.block=0: at least 1"),
        (lambda: Int8(rounding="up"), "compress.rounding=up: nearest or stochastic"),
        (lambda: OneBit(block=12), "compress.block=12: a multiple of 8"),
        (lambda: PowerSGD(rank=0), "compress.rank=0: at least 1"),
        (lambda: PowerSGD(start_after=-1), "compress.start_after=-1"),
    ],
)
def test_options_without_sense_are_refused_with_what_is_needed(make: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("(", r"\(")):
        make()


def test_every_codec_lies_in_the_file_of_its_name() -> None:
    for name, kind in CODECS.items():
        assert kind.__module__ == f"manyhands.exchange.compression.{name}"


def test_importing_the_codecs_compiles_nothing() -> None:
    code = """
import manyhands.exchange.compression
from manyhands.kernels import codec_kernels
assert not any(getattr(f, "signatures", ()) for f in vars(codec_kernels).values())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(("numel", "size"), [(10, 3), (2, 5), (0, 4), (17, 1)])
def test_shards_cover_everything_once_and_differ_by_one(numel: int, size: int) -> None:
    shards = cut(numel, size)
    assert [i for s in shards for i in range(numel)[s]] == list(range(numel))
    assert np.ptp([s.stop - s.start for s in shards]) <= 1
