"""Contract of every codec between ranks, and what is particular to each.

All ranks get the same bits, messages have the stated size, and error feedback loses nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from manyhands.core import (
    Cargo,
    Group,
    Op,
    Strategy,
    Tensors,
)
from manyhands.errors import CheckpointError
from manyhands.exchange.compression import (
    CODECS,
    Bf16,
    CompressedGroup,
    Fp16,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
    refusal,
    wrap,
)
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from support.compare import identical_on_ranks
from support.compressed_exchange import ALL, FED_BACK, given, reduced, run, total

# -- every codec, any number of ranks, any length --


QUICK = (1, 2, 3, 4, 5, 8)  # alone, powers of two and others


@pytest.mark.parametrize(
    "size", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(1, 18)]
)
@pytest.mark.parametrize("name", ALL)
def test_all_ranks_end_with_the_same_finite_bits(name: str, size: int) -> None:
    def body(link: CompressedGroup) -> list[Tensor]:
        return [
            x
            for numel in (0, 1, 5, 16, 301)
            for op in ("sum", "mean")
            for x in reduced_named(link, numel, op)
        ]

    def reduced_named(link: CompressedGroup, numel: int, op: Op) -> list[Tensor]:
        got = []
        for step in range(2):
            x = given(link.rank, step, numel)
            link.all_reduce(
                {f"{op}{numel}": x, "count": (n := torch.tensor([link.rank]))}, op
            ).wait()
            assert int(n) == (sum(range(size)) if op == "sum" else sum(range(size)) // size)
            got.append(x)
        return got

    for x in identical_on_ranks(run(size, ALL[name], body)):
        assert x.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_other_floating_types_travel_too_and_stay_what_they_are(
    name: str, dtype: torch.dtype
) -> None:
    first, second = identical_on_ranks(
        run(3, ALL[name], lambda link: reduced(link, (0, 1), 700, dtype))
    )
    assert (
        first.dtype == second.dtype == dtype and first.isfinite().all() and second.isfinite().all()
    )
    if name in ("fp16", "bf16", "int8", "int8 stochastic"):
        torch.testing.assert_close(first.double(), total(3, 0, 700), rtol=0.05, atol=0.2)


@pytest.mark.parametrize("name", ALL)
def test_descent_with_every_codec_comes_to_the_same_minimum(name: str) -> None:
    """f_i(w) = |w - c_i|^2 / 2 on four ranks; the minimum of the mean is the mean of the c_i."""

    def body(link: CompressedGroup) -> list[Tensor]:
        w, c = torch.zeros(400), given(link.rank, 0, 400)
        for step in range(600):
            g = w - c
            link.all_reduce({"g": g}, "mean").wait()
            w -= (
                0.03 * 0.1 ** (step // 300) * g
            )  # what waits in residuals keeps w off the minimum by about lr/density
        return [w]

    (w,) = identical_on_ranks(run(4, ALL[name], body))
    needed = total(4, 0, 400).float() / 4
    start, end = needed.norm(), (w - needed).norm()
    assert end < 0.1 * start, f"{end / start:.3f} of the way is left"


# -- bounds --


@pytest.mark.parametrize(
    ("codec", "bound"), [(Fp16(), 2.0**-11), (Bf16(), 2.0**-8)], ids=["fp16", "bf16"]
)
@pytest.mark.parametrize("size", [2, 5, 9])
def test_casts_round_each_term_once_and_the_mean_once(codec: Any, bound: float, size: int) -> None:
    (mean,) = identical_on_ranks(
        run(size, codec, lambda link: reduced(link, (0,), 3000, op="mean"))
    )
    terms = torch.stack([given(r, 0, 3000) for r in range(size)]).abs().mean(0)
    needed = total(size, 0, 3000) / size
    assert ((mean - needed).abs() <= bound * (terms + needed.abs()) * 1.01 + 1e-7).all()


@pytest.mark.parametrize("size", [2, 5, 17])
def test_the_error_of_an_int8_mean_does_not_grow_with_the_ranks(size: int) -> None:
    """(scale of the terms + scale of the mean) / 2, where a block's scale is max/127."""
    (mean,) = identical_on_ranks(
        run(
            size,
            Int8(block=3000, feedback=False),
            lambda link: reduced(link, (0,), 3000, op="mean"),
        )
    )
    needed = total(size, 0, 3000) / size
    first = max(given(r, 0, 3000).abs().max() for r in range(size)) / 127
    second = (needed.abs().max() + first / 2) / 127
    assert (mean - needed).abs().max() <= (first + second) / 2 * 1.001


# -- error feedback --


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("name", FED_BACK)
def test_all_that_went_in_has_come_out_or_is_in_the_state(
    name: str, op: Op, dtype: torch.dtype
) -> None:
    size, steps, numel = 3, 7, 500

    def body(link: CompressedGroup) -> tuple[Tensor, Tensors]:
        return torch.stack(reduced(link, range(steps), numel, dtype, op)).sum(0), link.state

    results = run(size, ALL[name], body)
    out = results[0][0].double()
    errors = torch.stack([state["error/x"][:numel].double() for _, state in results])
    needed = torch.stack([total(size, s, numel) for s in range(steps)]).sum(0)
    if op == "mean":
        needed, left = needed / size, errors.mean(0)
    else:
        left = errors.sum(0)
    if "second/x" in results[0][1]:
        left = left + torch.cat([state["second/x"].double() for _, state in results])
    assert errors.abs().max() > 0 and results[0][1]["error/x"].dtype == dtype
    torch.testing.assert_close(out + left, needed, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "codec", [Int8(), Int8(feedback=False), Int8(rounding="stochastic")], ids=str
)
def test_parameters_and_unbiased_rounding_are_not_fed_back(codec: Int8) -> None:
    def kept(sends: Cargo) -> set[str]:
        return set(
            run(2, codec, lambda link: (reduced(link, (0,), 2000), set(link.state))[1], sends)[0]
        )

    steps = {"steps/x"} if codec.rounding == "stochastic" else set()
    assert kept("parameters") == steps
    assert kept("updates") == (
        {"error/x", "second/x"} if codec.feedback and codec.rounding == "nearest" else steps
    )


def test_casts_keep_nothing() -> None:
    assert run(2, Bf16(), lambda link: (reduced(link, (0,), 2000), dict(link.state))[1]) == [{}, {}]


# -- equal to no compression at all --


@pytest.mark.parametrize(
    "codec", [TopK(density=1.0), RandomK(density=1.0), PowerSGD(rank=40)], ids=str
)
@pytest.mark.parametrize("numel", [1024, 1500])
def test_with_everything_sent_the_result_is_the_sum(codec: Any, numel: int) -> None:
    def body(link: CompressedGroup) -> list[Tensor]:
        return reduced(link, range(3), numel)

    for step, x in enumerate(identical_on_ranks(run(4, codec, body))):
        torch.testing.assert_close(x.double(), total(4, step, numel), rtol=1e-4, atol=1e-5)


# -- state --


@pytest.mark.parametrize("name", ALL)
def test_a_restored_codec_goes_on_to_the_bit(name: str) -> None:
    def whole(link: CompressedGroup) -> list[Tensor]:
        return reduced(link, range(8), 900)

    def halves(link: CompressedGroup) -> list[Tensor]:
        first = reduced(link, range(4), 900)
        saved = {k: v.clone() for k, v in link.state.items()}
        again = CompressedGroup(link.group, ALL[name], smallest=1)
        again.load_state(saved)
        return first + reduced(again, range(4, 8), 900)

    assert all(
        torch.equal(a, b)
        for a, b in zip(
            identical_on_ranks(run(3, ALL[name], whole)),
            identical_on_ranks(run(3, ALL[name], halves)),
            strict=True,
        )
    )


def test_state_is_loaded_before_anything_travels_and_must_fit() -> None:
    def late(link: CompressedGroup) -> None:
        reduced(link, (0,), 100)
        link.load_state({})

    with pytest.raises(ValueError, match="after the first exchange"):
        run(2, TopK(), late)

    def other(link: CompressedGroup) -> None:
        link.load_state({"error/x": torch.zeros(99)})
        reduced(link, (0,), 100)

    with pytest.raises(
        CheckpointError, match=r"'error' of 'x' has 99 elements, but 100 are needed"
    ):
        run(2, TopK(), other)


def test_another_number_of_ranks_takes_over_what_fits_and_loses_only_the_owners_residual() -> None:
    def first(link: CompressedGroup) -> Tensors:
        reduced(link, range(3), 900)
        return link.state

    saved = run(3, Int8(block=32), first)
    kept = torch.stack([s["error/x"] for s in saved]).double()

    def second(link: CompressedGroup) -> list[Tensor]:
        link.load_state(saved[link.rank])
        (x,) = reduced(link, (3,), 900)
        assert link.state["second/x"].numel() == 450
        return [x, link.state["error/x"]]

    got = run(2, Int8(block=32), second)
    out = got[0][0] + got[0][1] + got[1][1]
    torch.testing.assert_close(
        out.double(), total(2, 3, 900) + kept[0] + kept[1], rtol=0, atol=0.1
    )  # two encodings of the sum
    assert torch.equal(got[0][0], got[1][0])


# -- bytes --


def sent_bytes(size: int, codec: Any, numel: int, op: Op = "sum") -> int:
    def body(link: Group) -> int:
        observed = ObservedGroup(link, lambda event: None)
        wrap(observed, codec).all_reduce({"x": given(link.rank, 0, numel)}, op).wait()
        return observed.nbytes

    return World(size).run(body)[0]


@pytest.mark.parametrize("size", [2, 4])
def test_every_codec_sends_the_bytes_it_says(size: int) -> None:
    n = 65_536
    shard = n // size
    stages = 2 * (size - 1)
    assert sent_bytes(size, Fp16(), n) == sent_bytes(size, Bf16(), n) == stages * 2 * shard
    assert sent_bytes(size, Int8(block=256), n) == stages * (shard + 4 * shard // 256)
    assert sent_bytes(size, OneBit(block=2048), n) == stages * (shard // 8 + 8 * shard // 2048)
    assert sent_bytes(size, TopK(density=0.01), n) == (size - 1) * 8 * 655
    assert (
        sent_bytes(size, RandomK(density=0.01), n) == 4 * 655
    )  # an all-reduce counts what it is given
    assert sent_bytes(size, PowerSGD(rank=2), n) == 4 * 2 * (256 + 256)


@pytest.mark.parametrize("name", ALL)
def test_tensors_without_memory_send_as_many_bytes(name: str) -> None:
    """So the simulator can forecast what a codec costs."""

    def body(link: Group) -> list[int]:
        counted = []
        for device in ("cpu", "meta"):
            observed = ObservedGroup(link, lambda event: None)
            over = wrap(observed, ALL[name])
            for _ in range(3):
                over.all_reduce({"x": torch.zeros(5000, device=device)}).wait()
            counted.append(observed.nbytes)
        return counted

    real, forecast = World(3).run(body)[0]
    assert real == forecast > 0


def test_swap_sends_encoded_values() -> None:
    def body(link: Group) -> int:
        observed = ObservedGroup(link, lambda event: None)
        wrap(observed, Int8(), "parameters").swap(
            {"x": torch.ones(2048), "n": torch.ones(3)}, [1 - link.rank]
        )
        return observed.nbytes

    assert World(2).run(body) == [2048 + 4 * 8 + 12] * 2


# -- the single codecs --


def test_momentum_correction_without_masking_is_momentum_and_with_masking_is_none() -> None:
    """With everything sent: sum_i of u_t = mu u_{t-1} + g_t, what momentum SGD applies; masked, u
    is g.
    """
    steps, numel = 6, 1200

    def sent(codec: TopK) -> list[Tensor]:
        return identical_on_ranks(run(3, codec, lambda link: reduced(link, range(steps), numel)))

    u = torch.zeros(numel, dtype=torch.float64)
    for step, x in enumerate(sent(TopK(density=1.0, momentum=0.9, masking=False))):
        u = 0.9 * u + total(3, step, numel)
        torch.testing.assert_close(x.double(), u, rtol=1e-4, atol=1e-5)
    for step, x in enumerate(sent(TopK(density=1.0, momentum=0.9))):
        torch.testing.assert_close(x.double(), total(3, step, numel), rtol=1e-4, atol=1e-5)


def test_momentum_correction_accumulates_where_nothing_is_sent() -> None:
    """DGC by hand on one rank's share: the other sends zeros of its own."""
    mu, numel, k = 0.5, 1000, 10

    def body(link: CompressedGroup) -> list[Tensor]:
        got = []
        for step in range(5):
            x = given(0, step, numel) if link.rank == 0 else torch.zeros(numel)
            link.all_reduce({"x": x}).wait()
            got.append(x)
        return got

    u, v = torch.zeros(numel), torch.zeros(numel)
    for step, x in enumerate(
        identical_on_ranks(run(2, TopK(density=k / numel, momentum=mu), body))
    ):
        u = mu * u + given(0, step, numel)
        v = v + u
        mask = torch.zeros(numel, dtype=torch.bool)
        mask[v.abs().topk(k).indices] = True
        torch.testing.assert_close(x, v * mask, rtol=1e-5, atol=1e-6)
        u[mask], v[mask] = 0, 0


def test_random_places_without_feedback_are_right_on_average_with_the_variance_of_n_over_k() -> (
    None
):
    numel, k, times = 60, 15, 3000

    def body(link: CompressedGroup) -> tuple[Tensor, Tensor]:
        mean, square = (
            torch.zeros(numel, dtype=torch.float64),
            torch.zeros(numel, dtype=torch.float64),
        )
        for _ in range(times):
            x = given(link.rank, 0, numel)
            link.all_reduce({"x": x}).wait()
            mean += x / times
            square += x.double().square() / times
        return mean, square - mean.square()

    mean, variance = run(2, RandomK(density=k / numel, feedback=False), body)[0]
    needed = total(2, 0, numel)
    deviation = ((numel / k - 1) * needed.square() / times).sqrt()
    assert ((mean - needed).abs() < 5 * deviation).all()
    ratio = variance / ((numel / k - 1) * needed.square())
    assert ((ratio - 1).abs() < 0.25).all() and abs(ratio.mean() - 1) < 0.03


def test_powersgd_compresses_the_mean() -> None:
    """Linear: ranks with their own gradients end where ranks that all hold the mean do."""
    numel = 2000

    def own(link: CompressedGroup) -> list[Tensor]:
        return reduced(link, range(4), numel, op="mean")

    def mean(link: CompressedGroup) -> list[Tensor]:
        got = []
        for step in range(4):
            x = (total(4, step, numel) / 4).float()
            link.all_reduce({"x": x}, "mean").wait()
            got.append(x)
        return got

    codec = PowerSGD(rank=3)
    for a, b in zip(
        identical_on_ranks(run(4, codec, own)), identical_on_ranks(run(4, codec, mean)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_powersgd_finds_a_low_rank_gradient_and_keeps_the_same_factors_everywhere() -> None:
    a, b = given(7, 0, 64 * 2).view(64, 2), given(8, 0, 2 * 64).view(2, 64)

    def body(link: CompressedGroup) -> list[Tensor]:
        x = ((link.rank + 1) * a @ b).view(-1)
        link.all_reduce({"x": x}).wait()
        return [x, link.state["q/x"]]

    x, _ = identical_on_ranks(run(3, PowerSGD(rank=2), body))
    torch.testing.assert_close(x, 6 * (a @ b).view(-1), rtol=1e-4, atol=1e-4)


def test_powersgd_that_knows_the_shapes_compresses_matrices_and_leaves_the_rest_exact() -> None:
    """A bias, a matrix, a gap, a matrix too small to gain, a convolution."""
    shapes = {
        "x": [
            (slice(0, 40), torch.Size([40])),
            (slice(40, 1640), torch.Size([40, 40])),
            (slice(1648, 1656), torch.Size([2, 4])),
            (slice(1656, 2376), torch.Size([20, 4, 3, 3])),
        ]
    }

    def body(link: Group) -> tuple[Tensor, int]:
        observed = ObservedGroup(link, lambda event: None)
        x = given(link.rank, 0, 2376)
        CompressedGroup(observed, PowerSGD(rank=2), shapes=shapes).all_reduce({"x": x}).wait()
        return x, observed.nbytes

    (x, nbytes), *others = World(3).run(body)
    assert all(torch.equal(x, y) for y, _ in others)
    needed = total(3, 0, 2376)
    assert not x[1640:1648].any(), "nobody's elements"
    for exact in (slice(0, 40), slice(1648, 1656)):
        torch.testing.assert_close(x[exact].double(), needed[exact], rtol=1e-5, atol=1e-6)
    for s, m in ((slice(40, 1640), 40), (slice(1656, 2376), 20)):
        assert torch.linalg.matrix_rank(x[s].view(m, -1), rtol=1e-4) == 2
        assert (x[s] - needed[s]).norm() < needed[s].norm()
    assert nbytes == 4 * (2 * (40 + 40) + 2 * (20 + 36) + 56)


def test_powersgd_starts_after_so_many_plain_steps() -> None:
    plain, later = identical_on_ranks(
        run(3, PowerSGD(rank=1, start_after=1), lambda link: reduced(link, (0, 1), 2000))
    )
    torch.testing.assert_close(plain.double(), total(3, 0, 2000), rtol=1e-5, atol=1e-6)
    assert (later - total(3, 1, 2000)).norm() > 0.5 * later.norm()


def test_powersgd_lives_through_a_zero_gradient() -> None:
    def body(link: CompressedGroup) -> list[Tensor]:
        got = []
        for scale in (1.0, 0.0, 0.0, 1.0, 1.0, 1.0):
            x = scale * torch.outer(torch.arange(1.0, 41), torch.arange(1.0, 41)).view(-1)
            link.all_reduce({"x": x}, "mean").wait()
            got.append(x)
        return got

    first, none, _, *_, last = identical_on_ranks(run(2, PowerSGD(rank=2), body))
    torch.testing.assert_close(first, last, rtol=1e-3, atol=1e-2)
    assert none.abs().max() < 1e-2


# -- NaN --


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_comes_out_at_once_and_is_gone_with_the_next_step(
    name: str, dtype: torch.dtype, bad: float
) -> None:
    def body(link: CompressedGroup) -> list[Tensor]:
        got = []
        for step in range(12):
            x = given(link.rank, step, 2000, dtype)
            if link.rank == 1 and step == 3:
                x[1234] = bad
            link.all_reduce({"x": x}).wait()
            got.append(x.clone())
        return got

    got = run(3, ALL[name], body)
    for step, x in enumerate(got[0]):
        assert bool(x.isfinite().all()) == (step != 3), step
        assert all(torch.equal(x.isfinite(), other[step].isfinite()) for other in got)


# -- which codec for which rule --


class Averages(Strategy[Any, Group]):
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "parameters"


class Gossips(Strategy[Any, Group]):
    link: ClassVar[type] = Group
    sends: ClassVar[Cargo] = "updates"
    swaps: ClassVar[bool] = True


class Sums(Strategy[Any, Group]):
    link: ClassVar[type] = Group


def test_a_codec_that_cannot_carry_a_strategy_says_why_and_which_can() -> None:
    for name in ("onebit", "topk", "randomk", "powersgd"):
        said = refusal(CODECS[name](), Averages)
        assert (
            said is not None
            and f"compress={name}" in said
            and "sends parameters" in said
            and "compress=fp16 or bf16 or int8" in said
        )
        assert refusal(CODECS[name], Averages) == said
    said = refusal(PowerSGD(), Gossips)
    assert (
        said is not None
        and "swap" in said
        and "compress=fp16 or bf16 or int8 or onebit or topk or randomk" in said
    )
    for name in ("fp16", "bf16", "int8"):
        assert refusal(CODECS[name](), Averages) is None
    for name, kind in CODECS.items():
        assert refusal(kind(), Sums) is None
        assert name == "powersgd" or refusal(kind(), Gossips) is None
