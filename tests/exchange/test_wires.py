"""What a compressed link promises: the same bits on all ranks, the bytes it says, nothing lost that is fed back.

In the World first; then the same in two processes over gloo, which must end with the World's bits.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import cloudpickle
import pytest
import torch
from torch import Tensor

from manyhands.core import Cargo, Group, Job, Op, Tensors
from manyhands.errors import CheckpointError
from manyhands.exchange import collective
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import Observed
from manyhands.exchange.solo import SoloGroup
from manyhands.exchange.wires import WIRES, Bf16, Compressed, Fp16, Int8, OneBit, PowerSGD, RandomK, TopK, refusal, wrap
from manyhands.launch.local import LocalLauncher

ALL: dict[str, Any] = {
    "fp16": Fp16(),
    "bf16": Bf16(),
    "int8": Int8(block=32),
    "int8 stochastic": Int8(rounding="stochastic"),
    "onebit": OneBit(block=64),
    "topk": TopK(density=0.05),
    "dgc": TopK(density=0.01, momentum=0.9, warmup=6),
    "randomk": RandomK(density=0.1),
    "randomk unbiased": RandomK(density=0.5, feedback=False),
    "powersgd": PowerSGD(rank=2),
    "powersgd later": PowerSGD(rank=2, start_after=2),
}
FED_BACK = ("int8", "onebit", "topk", "randomk", "powersgd")


def given(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64).to(dtype)


def total(size: int, step: int, numel: int) -> Tensor:
    return torch.stack([given(r, step, numel, torch.float64) for r in range(size)]).sum(0)


def run(size: int, wire: Any, body: Callable[[Compressed], Any], sends: Cargo = "gradients", **more: Any) -> list[Any]:
    return World(size).run(lambda link: body(Compressed(link, wire, sends, **{"smallest": 1, **more})))


def reduced(
    link: Compressed, steps: Sequence[int], numel: int, dtype: torch.dtype = torch.float32, op: Op = "sum"
) -> list[Tensor]:
    got = []
    for step in steps:
        x = given(link.rank, step, numel, dtype)
        link.all_reduce({"x": x}, op).wait()
        got.append(x)
    return got


def same(results: list[list[Tensor]]) -> list[Tensor]:
    for theirs in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], theirs, strict=True))
    return results[0]


# -- every wire, any number of ranks, any length --


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("name", ALL)
def test_all_ranks_end_with_the_same_finite_bits(name: str, size: int) -> None:
    def body(link: Compressed) -> list[Tensor]:
        return [x for numel in (0, 1, 5, 16, 301) for op in ("sum", "mean") for x in reduced_named(link, numel, op)]

    def reduced_named(link: Compressed, numel: int, op: Op) -> list[Tensor]:
        got = []
        for step in range(2):
            x = given(link.rank, step, numel)
            link.all_reduce({f"{op}{numel}": x, "count": (n := torch.tensor([link.rank]))}, op).wait()
            assert int(n) == (sum(range(size)) if op == "sum" else sum(range(size)) // size)
            got.append(x)
        return got

    for x in same(run(size, ALL[name], body)):
        assert x.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_other_floating_types_travel_too_and_stay_what_they_are(name: str, dtype: torch.dtype) -> None:
    first, second = same(run(3, ALL[name], lambda link: reduced(link, (0, 1), 700, dtype)))
    assert first.dtype == second.dtype == dtype and first.isfinite().all() and second.isfinite().all()
    if name in ("fp16", "bf16", "int8", "int8 stochastic"):
        torch.testing.assert_close(first.double(), total(3, 0, 700), rtol=0.05, atol=0.2)


@pytest.mark.parametrize("name", ALL)
def test_descent_with_every_wire_comes_to_the_same_minimum(name: str) -> None:
    """f_i(w) = |w - c_i|^2 / 2 on four ranks; the minimum of the mean is the mean of the c_i."""

    def body(link: Compressed) -> list[Tensor]:
        w, c = torch.zeros(400), given(link.rank, 0, 400)
        for step in range(600):
            g = w - c
            link.all_reduce({"g": g}, "mean").wait()
            w -= 0.03 * 0.1 ** (step // 300) * g  # what waits in residuals keeps w off the minimum by about lr/density
        return [w]

    (w,) = same(run(4, ALL[name], body))
    needed = total(4, 0, 400).float() / 4
    start, end = needed.norm(), (w - needed).norm()
    assert end < 0.05 * start, f"{end / start:.3f} of the way is left"


# -- bounds --


@pytest.mark.parametrize(("wire", "bound"), [(Fp16(), 2.0**-11), (Bf16(), 2.0**-8)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("size", [2, 5, 9])
def test_casts_round_each_term_once_and_the_mean_once(wire: Any, bound: float, size: int) -> None:
    (mean,) = same(run(size, wire, lambda link: reduced(link, (0,), 3000, op="mean")))
    terms = torch.stack([given(r, 0, 3000) for r in range(size)]).abs().mean(0)
    needed = total(size, 0, 3000) / size
    assert ((mean - needed).abs() <= bound * (terms + needed.abs()) * 1.01 + 1e-7).all()


@pytest.mark.parametrize("size", [2, 5, 17])
def test_the_error_of_an_int8_mean_does_not_grow_with_the_ranks(size: int) -> None:
    """(scale of the terms + scale of the mean) / 2, where a block's scale is max/127."""
    (mean,) = same(run(size, Int8(block=3000, feedback=False), lambda link: reduced(link, (0,), 3000, op="mean")))
    needed = total(size, 0, 3000) / size
    first = max(given(r, 0, 3000).abs().max() for r in range(size)) / 127
    second = (needed.abs().max() + first / 2) / 127
    assert (mean - needed).abs().max() <= (first + second) / 2 * 1.001


# -- error feedback --


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("name", FED_BACK)
def test_all_that_went_in_has_come_out_or_is_in_the_state(name: str, op: Op, dtype: torch.dtype) -> None:
    size, steps, numel = 3, 7, 500

    def body(link: Compressed) -> tuple[Tensor, Tensors]:
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


@pytest.mark.parametrize("wire", [Int8(), Int8(feedback=False), Int8(rounding="stochastic")], ids=str)
def test_parameters_and_unbiased_rounding_are_not_fed_back(wire: Int8) -> None:
    def kept(sends: Cargo) -> set[str]:
        return set(run(2, wire, lambda link: (reduced(link, (0,), 2000), set(link.state))[1], sends)[0])

    steps = {"steps/x"} if wire.rounding == "stochastic" else set()
    assert kept("parameters") == steps
    assert kept("updates") == ({"error/x", "second/x"} if wire.feedback and wire.rounding == "nearest" else steps)


def test_casts_keep_nothing() -> None:
    assert run(2, Bf16(), lambda link: (reduced(link, (0,), 2000), dict(link.state))[1]) == [{}, {}]


# -- equal to no compression at all --


@pytest.mark.parametrize("wire", [TopK(density=1.0), RandomK(density=1.0), PowerSGD(rank=40)], ids=str)
@pytest.mark.parametrize("numel", [1024, 1500])
def test_with_everything_sent_the_result_is_the_sum(wire: Any, numel: int) -> None:
    def body(link: Compressed) -> list[Tensor]:
        return reduced(link, range(3), numel)

    for step, x in enumerate(same(run(4, wire, body))):
        torch.testing.assert_close(x.double(), total(4, step, numel), rtol=1e-4, atol=1e-5)


# -- state --


@pytest.mark.parametrize("name", ALL)
def test_a_restored_wire_goes_on_to_the_bit(name: str) -> None:
    def whole(link: Compressed) -> list[Tensor]:
        return reduced(link, range(8), 900)

    def halves(link: Compressed) -> list[Tensor]:
        first = reduced(link, range(4), 900)
        saved = {k: v.clone() for k, v in link.state.items()}
        again = Compressed(link.group, ALL[name], smallest=1)
        again.load_state(saved)
        return first + reduced(again, range(4, 8), 900)

    assert all(torch.equal(a, b) for a, b in zip(same(run(3, ALL[name], whole)), same(run(3, ALL[name], halves)), strict=True))


def test_state_is_loaded_before_anything_travels_and_must_fit() -> None:
    def late(link: Compressed) -> None:
        reduced(link, (0,), 100)
        link.load_state({})

    with pytest.raises(ValueError, match="after the first exchange"):
        run(2, TopK(), late)

    def other(link: Compressed) -> None:
        link.load_state({"error/x": torch.zeros(99)})
        reduced(link, (0,), 100)

    with pytest.raises(CheckpointError, match=r"'error' of 'x' has 99 elements, but 100 are needed"):
        run(2, TopK(), other)


def test_another_number_of_ranks_takes_over_what_fits_and_loses_only_the_owners_residual() -> None:
    def first(link: Compressed) -> Tensors:
        reduced(link, range(3), 900)
        return link.state

    saved = run(3, Int8(block=32), first)
    kept = torch.stack([s["error/x"] for s in saved]).double()

    def second(link: Compressed) -> list[Tensor]:
        link.load_state(saved[link.rank])
        (x,) = reduced(link, (3,), 900)
        assert link.state["second/x"].numel() == 450
        return [x, link.state["error/x"]]

    got = run(2, Int8(block=32), second)
    out = got[0][0] + got[0][1] + got[1][1]
    torch.testing.assert_close(out.double(), total(2, 3, 900) + kept[0] + kept[1], rtol=0, atol=0.1)  # two encodings of the sum
    assert torch.equal(got[0][0], got[1][0])


# -- bytes --


def sent_bytes(size: int, wire: Any, numel: int, op: Op = "sum") -> int:
    def body(link: Group) -> int:
        observed = Observed(link, lambda event: None)
        wrap(observed, wire).all_reduce({"x": given(link.rank, 0, numel)}, op).wait()
        return observed.nbytes

    return World(size).run(body)[0]


@pytest.mark.parametrize("size", [2, 4])
def test_every_wire_sends_the_bytes_it_says(size: int) -> None:
    n = 65_536
    shard = n // size
    stages = 2 * (size - 1)
    assert sent_bytes(size, Fp16(), n) == sent_bytes(size, Bf16(), n) == stages * 2 * shard
    assert sent_bytes(size, Int8(block=256), n) == stages * (shard + 4 * shard // 256)
    assert sent_bytes(size, OneBit(block=2048), n) == stages * (shard // 8 + 8 * shard // 2048)
    assert sent_bytes(size, TopK(density=0.01), n) == (size - 1) * 8 * 655
    assert sent_bytes(size, RandomK(density=0.01), n) == 4 * 655  # an all-reduce counts what it is given
    assert sent_bytes(size, PowerSGD(rank=2), n) == 4 * 2 * (256 + 256)


def test_swap_sends_encoded_values() -> None:
    def body(link: Group) -> int:
        observed = Observed(link, lambda event: None)
        wrap(observed, Int8(), "parameters").swap({"x": torch.ones(2048), "n": torch.ones(3)}, [1 - link.rank])
        return observed.nbytes

    assert World(2).run(body) == [2048 + 4 * 8 + 12] * 2


# -- what is left alone --


@pytest.mark.parametrize("name", ALL)
def test_short_vectors_integers_and_maxima_pass_unchanged(name: str) -> None:
    def body(link: Group) -> list[Tensor]:
        over = wrap(link, ALL[name])
        short, whole, most = given(link.rank, 0, 1023), torch.full((5000,), link.rank), given(link.rank, 0, 5000)
        over.all_reduce({"short": short, "whole": whole}).wait()
        over.all_reduce({"most": most}, "max").wait()
        assert over.state == {}
        return [short, whole, most]

    short, whole, most = same(World(3).run(body))
    torch.testing.assert_close(short.double(), total(3, 0, 1023), rtol=1e-5, atol=1e-6)
    assert (whole == 3).all()
    assert torch.equal(most, torch.stack([given(r, 0, 5000) for r in range(3)]).amax(0))


@pytest.mark.parametrize("name", ALL)
def test_alone_nothing_is_encoded(name: str) -> None:
    link = wrap(SoloGroup(), ALL[name])
    x = given(0, 0, 5000)
    link.all_reduce({"x": x}).wait()
    assert torch.equal(x, given(0, 0, 5000)) and link.state == {}


def test_it_is_a_group_but_has_no_parts_to_own() -> None:
    link = wrap(SoloGroup(), Bf16())
    assert isinstance(link, Group)
    assert not any(hasattr(link, name) for name in ("own", "reduce_scatter", "all_gather", "allocate"))

    class Placed(SoloGroup):
        def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(numel, dtype=dtype)

    assert wrap(Placed(), Bf16()).allocate(3, torch.float32).numel() == 3


def test_transfers_pass_as_they_are() -> None:
    def body(link: Compressed) -> Tensor:
        into = torch.empty(2000)
        link.transfer({1 - link.rank: given(link.rank, 0, 2000)}, {1 - link.rank: into}).wait()
        return into

    assert torch.equal(run(2, Int8(), body)[0], given(1, 0, 2000))


def test_tensors_of_any_shape_and_layout_are_reduced_in_place() -> None:
    def body(link: Compressed) -> list[Tensor]:
        matrix = given(link.rank, 0, 2000).view(40, 50).t()
        every_second = torch.zeros(4000)[::2].copy_(given(link.rank, 1, 2000))
        leaf = torch.nn.Parameter(given(link.rank, 2, 2000))
        link.all_reduce({"matrix": matrix, "every_second": every_second, "leaf": leaf}).wait()
        return [matrix.t().reshape(-1), every_second, leaf.detach()]

    for step, x in enumerate(same(run(2, Bf16(), body))):
        torch.testing.assert_close(x.double(), total(2, step, 2000), rtol=0.01, atol=0.04)


# -- order and overlap --


@pytest.mark.parametrize("name", ALL)
def test_several_exchanges_may_be_under_way_and_be_waited_for_in_any_order_and_twice(name: str) -> None:
    def together(link: Compressed) -> list[Tensor]:
        xs = [given(link.rank, i, 200 + 77 * i) for i in range(5)]
        works = [link.all_reduce({f"x{i}": x, "n": torch.ones(1, dtype=torch.int64)}) for i, x in enumerate(xs)]
        for work in (works[3], works[1], *works):
            work.wait()
        return xs

    def apart(link: Compressed) -> list[Tensor]:
        xs = [given(link.rank, i, 200 + 77 * i) for i in range(5)]
        for i, x in enumerate(xs):
            link.all_reduce({f"x{i}": x}).wait()
        return xs

    got, needed = same(run(3, ALL[name], together)), same(run(3, ALL[name], apart))
    assert all(torch.equal(a, b) for a, b in zip(got, needed, strict=True))


def test_a_name_that_is_under_way_is_finished_before_it_travels_again() -> None:
    def body(link: Compressed) -> list[Tensor]:
        a, b = given(link.rank, 0, 300), given(link.rank, 1, 300)
        first, second = link.all_reduce({"x": a}), link.all_reduce({"x": b})
        second.wait()
        first.wait()
        return [a, b]

    got, needed = same(run(3, TopK(density=0.1), body)), same(run(3, TopK(density=0.1), lambda link: reduced(link, (0, 1), 300)))
    assert all(torch.equal(a, b) for a, b in zip(got, needed, strict=True))


def test_stage_one_travels_while_the_ranks_compute() -> None:
    """Five exchanges of 10 s a stage and 100 s of work: only stage two is left when the work is over."""
    world = World(2, cost=lambda what, nbytes, peers: 10.0)

    def body(link: Any) -> float:
        over = Compressed(link, Bf16(), smallest=1)
        works = []
        for i in range(5):
            works.append(over.all_reduce({f"x{i}": given(link.rank, i, 100)}))
            world.spend(link.rank, 20.0)
        for work in works:
            work.wait()
        return world.now[link.rank]

    assert world.run(body) == [150.0, 150.0]


# -- swap --


@pytest.mark.parametrize("name", [n for n in ALL if "powersgd" not in n])
def test_swapped_values_arrive_as_their_sender_encoded_them(name: str) -> None:
    def body(link: Compressed) -> list[Tensors]:
        right, left = (link.rank + 1) % 3, (link.rank - 1) % 3
        x = given(link.rank, 0, 2000)
        got = link.swap({"x": x.view(20, 100), "n": torch.tensor([link.rank])}, [left, right])
        assert torch.equal(x, given(link.rank, 0, 2000)), "what is given is not changed"
        assert [int(g["n"]) for g in got] == [left, right]
        return got

    results = run(3, ALL[name], body)
    for receiver, got in enumerate(results):
        for sender, theirs in zip(((receiver - 1) % 3, (receiver + 1) % 3), got, strict=True):
            x = theirs["x"]
            assert x.shape == (20, 100) and x.dtype == torch.float32
            third = next(r for r in range(3) if r not in (sender, receiver))
            place = [(third - 1) % 3, (third + 1) % 3].index(sender)
            assert torch.equal(x, results[third][place]["x"])
            if name in ("fp16", "bf16", "int8", "int8 stochastic"):
                torch.testing.assert_close(x.view(-1), given(sender, 0, 2000), rtol=0.01, atol=0.05)


@pytest.mark.parametrize("name", ["int8", "onebit", "topk", "randomk"])
def test_what_a_swap_leaves_out_follows_later(name: str) -> None:
    def body(link: Compressed) -> tuple[Tensor, Tensor]:
        heard = torch.zeros(600, dtype=torch.float64)
        for step in range(6):
            if step == 3:
                assert link.swap({"x": given(link.rank, 99, 600)}, []) == []  # to nobody: nothing leaves the residual
                continue
            heard += link.swap({"x": given(link.rank, step, 600)}, [1 - link.rank])[0]["x"]
        return heard, link.state["error/swap/x"].clone()

    (heard, _), (_, left) = run(2, ALL[name], body)
    needed = sum(given(1, s, 600, torch.float64) for s in range(6) if s != 3)
    torch.testing.assert_close(heard + left, needed, rtol=1e-4, atol=1e-5)


def test_a_wire_that_only_all_ranks_can_read_swaps_in_plain() -> None:
    got = run(2, PowerSGD(), lambda link: link.swap({"x": given(link.rank, 0, 2000)}, [1 - link.rank])[0]["x"])
    assert torch.equal(got[0], given(1, 0, 2000))


# -- the single wires --


def test_momentum_correction_without_masking_is_momentum_and_with_masking_is_none() -> None:
    """With everything sent: sum_i of u_t = mu u_{t-1} + g_t, what momentum SGD applies; masked, u is g."""
    steps, numel = 6, 1200

    def sent(wire: TopK) -> list[Tensor]:
        return same(run(3, wire, lambda link: reduced(link, range(steps), numel)))

    u = torch.zeros(numel, dtype=torch.float64)
    for step, x in enumerate(sent(TopK(density=1.0, momentum=0.9, masking=False))):
        u = 0.9 * u + total(3, step, numel)
        torch.testing.assert_close(x.double(), u, rtol=1e-4, atol=1e-5)
    for step, x in enumerate(sent(TopK(density=1.0, momentum=0.9))):
        torch.testing.assert_close(x.double(), total(3, step, numel), rtol=1e-4, atol=1e-5)


def test_momentum_correction_accumulates_where_nothing_is_sent() -> None:
    """DGC by hand on one rank's share: the other sends zeros of its own."""
    mu, numel, k = 0.5, 1000, 10

    def body(link: Compressed) -> list[Tensor]:
        got = []
        for step in range(5):
            x = given(0, step, numel) if link.rank == 0 else torch.zeros(numel)
            link.all_reduce({"x": x}).wait()
            got.append(x)
        return got

    u, v = torch.zeros(numel), torch.zeros(numel)
    for step, x in enumerate(same(run(2, TopK(density=k / numel, momentum=mu), body))):
        u = mu * u + given(0, step, numel)
        v = v + u
        mask = torch.zeros(numel, dtype=torch.bool)
        mask[v.abs().topk(k).indices] = True
        torch.testing.assert_close(x, v * mask, rtol=1e-5, atol=1e-6)
        u[mask], v[mask] = 0, 0


def test_random_places_without_feedback_are_right_on_average_with_the_variance_of_n_over_k() -> None:
    numel, k, times = 60, 15, 3000

    def body(link: Compressed) -> tuple[Tensor, Tensor]:
        mean, square = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
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

    def own(link: Compressed) -> list[Tensor]:
        return reduced(link, range(4), numel, op="mean")

    def mean(link: Compressed) -> list[Tensor]:
        got = []
        for step in range(4):
            x = (total(4, step, numel) / 4).float()
            link.all_reduce({"x": x}, "mean").wait()
            got.append(x)
        return got

    wire = PowerSGD(rank=3)
    for a, b in zip(same(run(4, wire, own)), same(run(4, wire, mean)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_powersgd_finds_a_low_rank_gradient_and_keeps_the_same_factors_everywhere() -> None:
    a, b = given(7, 0, 64 * 2).view(64, 2), given(8, 0, 2 * 64).view(2, 64)

    def body(link: Compressed) -> list[Tensor]:
        x = ((link.rank + 1) * a @ b).view(-1)
        link.all_reduce({"x": x}).wait()
        return [x, link.state["q/x"]]

    x, _ = same(run(3, PowerSGD(rank=2), body))
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
        observed = Observed(link, lambda event: None)
        x = given(link.rank, 0, 2376)
        Compressed(observed, PowerSGD(rank=2), shapes=shapes).all_reduce({"x": x}).wait()
        return x, observed.nbytes

    (x, nbytes), *others = World(3).run(body)
    assert all(torch.equal(x, y) for y, _ in others)
    needed = total(3, 0, 2376)
    for exact in (slice(0, 40), slice(1640, 1656)):
        torch.testing.assert_close(x[exact].double(), needed[exact], rtol=1e-5, atol=1e-6)
    for s, m in ((slice(40, 1640), 40), (slice(1656, 2376), 20)):
        assert torch.linalg.matrix_rank(x[s].view(m, -1), rtol=1e-4) == 2
        assert (x[s] - needed[s]).norm() < needed[s].norm()
    assert nbytes == 4 * (2 * (40 + 40) + 2 * (20 + 36) + 56)


def test_powersgd_starts_after_so_many_plain_steps() -> None:
    plain, later = same(run(3, PowerSGD(rank=1, start_after=1), lambda link: reduced(link, (0, 1), 2000)))
    torch.testing.assert_close(plain.double(), total(3, 0, 2000), rtol=1e-5, atol=1e-6)
    assert (later - total(3, 1, 2000)).norm() > 0.5 * later.norm()


def test_powersgd_lives_through_a_zero_gradient() -> None:
    def body(link: Compressed) -> list[Tensor]:
        got = []
        for scale in (1.0, 0.0, 0.0, 1.0, 1.0, 1.0):
            x = scale * torch.outer(torch.arange(1.0, 41), torch.arange(1.0, 41)).view(-1)
            link.all_reduce({"x": x}, "mean").wait()
            got.append(x)
        return got

    first, none, _, *_, last = same(run(2, PowerSGD(rank=2), body))
    torch.testing.assert_close(first, last, rtol=1e-3, atol=1e-2)
    assert none.abs().max() < 1e-2


# -- NaN --


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_comes_out_at_once_and_is_gone_with_the_next_step(name: str, dtype: torch.dtype, bad: float) -> None:
    def body(link: Compressed) -> list[Tensor]:
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


# -- which wire for which rule --


class Averages:
    sends: ClassVar[Cargo] = "parameters"


class Gossips:
    sends: ClassVar[Cargo] = "updates"
    swaps: ClassVar[bool] = True


class Sums: ...


def test_a_wire_that_cannot_carry_a_rule_says_why_and_which_can() -> None:
    for name in ("onebit", "topk", "randomk", "powersgd"):
        said = refusal(WIRES[name](), Averages)
        assert said is not None and f"wire={name}" in said and "sends parameters" in said and "wire=fp16 or bf16 or int8" in said
        assert refusal(WIRES[name], Averages) == said
    said = refusal(PowerSGD(), Gossips)
    assert said is not None and "swap" in said and "wire=fp16 or bf16 or int8 or onebit or topk or randomk" in said
    for name in ("fp16", "bf16", "int8"):
        assert refusal(WIRES[name](), Averages) is None
    for name, kind in WIRES.items():
        assert refusal(kind(), Sums) is None
        assert name == "powersgd" or refusal(kind(), Gossips) is None


# -- two processes over gloo --


def every_wire(link: Group) -> dict[str, list[Tensor]]:
    results = {}
    for name, wire in ALL.items():
        over = wrap(link, wire)
        results[name] = reduced(over, range(2), 3001)
        xs = [given(link.rank, 5 + i, 2000 + i) for i in range(3)]
        works = [over.all_reduce({f"x{i}": x, "n": torch.ones(1)}, "mean") for i, x in enumerate(xs)]
        for work in works:
            work.wait()
        results[name] += [*xs, over.swap({"y": given(link.rank, 9, 1500)}, [1 - link.rank])[0]["y"]]
    return results


def process() -> dict[str, Any]:
    from manyhands.launch import environment

    here = environment.place()
    link = collective.connect(here.rank, here.size, environment.store(here, 60), "gloo", 30.0)
    results = every_wire(link)
    agree = {k: [x.clone() for x in v[:-1]] for k, v in results.items()}  # all but what was swapped
    for xs in agree.values():
        for x in xs:
            other = torch.empty_like(x)
            link.transfer({1 - here.rank: x}, {1 - here.rank: other}).wait()
            assert torch.equal(x, other)
    link.close()
    return {k: digest(v) for k, v in results.items()}  # what a process returns travels as JSON


def digest(xs: list[Tensor]) -> list[str]:
    return [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in xs]


@functools.cache
def over_gloo() -> dict[str, list[str]]:
    return LocalLauncher().launch(Job(2, bytes(cloudpickle.dumps(process)), threads=1))


@functools.cache
def in_the_world() -> dict[str, list[str]]:
    return {k: digest(v) for k, v in World(2).run(every_wire)[0].items()}


@pytest.mark.parametrize("name", ALL)
def test_two_processes_over_gloo_end_with_the_bits_of_the_world(name: str) -> None:
    assert over_gloo()[name] == in_the_world()[name]
