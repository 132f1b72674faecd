"""Compressed groups: what they do not encode, the order of messages, and real processes.

First in the World; then in two processes over each kind of group, with the World's bits.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core import (
    EXACT,
    Group,
    Job,
    Tensors,
)
from manyhands.exchange import collective, hierarchical
from manyhands.exchange.compression import (
    Bf16,
    CompressedGroup,
    Int8,
    PowerSGD,
    TopK,
    wrap,
)
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.shared import SharedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.launch.hosts import HostsLauncher
from support.compare import identical_on_ranks
from support.compressed_exchange import ALL, given, reduced, run, total

# -- what is left alone --


@pytest.mark.parametrize("name", ALL)
def test_short_vectors_integers_and_maxima_pass_unchanged(name: str) -> None:
    def body(link: Group) -> list[Tensor]:
        over = wrap(link, ALL[name])
        short, whole, most = (
            given(link.rank, 0, 1023),
            torch.full((5000,), link.rank),
            given(link.rank, 0, 5000),
        )
        over.all_reduce({"short": short, "whole": whole}).wait()
        over.all_reduce({"most": most}, "max").wait()
        assert over.state == {}
        return [short, whole, most]

    short, whole, most = identical_on_ranks(World(3).run(body))
    torch.testing.assert_close(short.double(), total(3, 0, 1023), rtol=1e-5, atol=1e-6)
    assert (whole == 3).all()
    assert torch.equal(most, torch.stack([given(r, 0, 5000) for r in range(3)]).amax(0))


@pytest.mark.parametrize("name", ALL)
def test_alone_nothing_is_encoded(name: str) -> None:
    link = wrap(SoloGroup(), ALL[name])
    x = given(0, 0, 5000)
    link.all_reduce({"x": x}).wait()
    assert torch.equal(x, given(0, 0, 5000)) and link.state == {}


def test_it_is_a_group() -> None:
    assert isinstance(wrap(SoloGroup(), Bf16()), Group)


@pytest.mark.parametrize("name", ALL)
def test_a_broadcast_is_exact(name: str) -> None:
    def body(link: CompressedGroup) -> Tensor:
        x = given(link.rank, 0, 5000)
        link.broadcast({"x": x}, source=1).wait()
        link.barrier()
        return x

    for x in run(2, ALL[name], body):
        assert torch.equal(x, given(1, 0, 5000))


def test_transfers_pass_as_they_are() -> None:
    def body(link: CompressedGroup) -> Tensor:
        into = torch.empty(2000)
        link.transfer({1 - link.rank: given(link.rank, 0, 2000)}, {1 - link.rank: into}).wait()
        return into

    assert torch.equal(run(2, Int8(), body)[0], given(1, 0, 2000))


def test_tensors_of_any_shape_and_layout_are_reduced_in_place() -> None:
    def body(link: CompressedGroup) -> list[Tensor]:
        matrix = given(link.rank, 0, 2000).view(40, 50).t()
        every_second = torch.zeros(4000)[::2].copy_(given(link.rank, 1, 2000))
        leaf = torch.nn.Parameter(given(link.rank, 2, 2000))
        link.all_reduce({"matrix": matrix, "every_second": every_second, "leaf": leaf}).wait()
        return [matrix.t().reshape(-1), every_second, leaf.detach()]

    for step, x in enumerate(identical_on_ranks(run(2, Bf16(), body))):
        torch.testing.assert_close(x.double(), total(2, step, 2000), rtol=0.01, atol=0.04)


# -- order and overlap --


@pytest.mark.parametrize("name", ALL)
def test_several_exchanges_may_be_under_way_and_be_waited_for_in_any_order_and_twice(
    name: str,
) -> None:
    def together(link: CompressedGroup) -> list[Tensor]:
        xs = [given(link.rank, i, 200 + 77 * i) for i in range(5)]
        works = [
            link.all_reduce({f"x{i}": x, "n": torch.ones(1, dtype=torch.int64)})
            for i, x in enumerate(xs)
        ]
        for work in (works[3], works[1], *works):
            work.wait()
        return xs

    def apart(link: CompressedGroup) -> list[Tensor]:
        xs = [given(link.rank, i, 200 + 77 * i) for i in range(5)]
        for i, x in enumerate(xs):
            link.all_reduce({f"x{i}": x}).wait()
        return xs

    got, needed = (
        identical_on_ranks(run(3, ALL[name], together)),
        identical_on_ranks(run(3, ALL[name], apart)),
    )
    assert all(torch.equal(a, b) for a, b in zip(got, needed, strict=True))


def test_a_name_that_is_under_way_is_finished_before_it_travels_again() -> None:
    def body(link: CompressedGroup) -> list[Tensor]:
        a, b = given(link.rank, 0, 300), given(link.rank, 1, 300)
        first, second = link.all_reduce({"x": a}), link.all_reduce({"x": b})
        second.wait()
        first.wait()
        return [a, b]

    got, needed = (
        identical_on_ranks(run(3, TopK(density=0.1), body)),
        identical_on_ranks(run(3, TopK(density=0.1), lambda link: reduced(link, (0, 1), 300))),
    )
    assert all(torch.equal(a, b) for a, b in zip(got, needed, strict=True))


def test_stage_one_travels_while_the_ranks_compute() -> None:
    """Five exchanges of 10 s a stage and 100 s of work: only stage two is left when the work is
    over.
    """
    world = World(2, cost=lambda what, nbytes, peers: 10.0)

    def body(link: Any) -> float:
        over = CompressedGroup(link, Bf16(), smallest=1)
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
    def body(link: CompressedGroup) -> list[Tensors]:
        right, left = (link.rank + 1) % 3, (link.rank - 1) % 3
        x = given(link.rank, 0, 2000)
        got = link.swap({"x": x.view(20, 100), "n": torch.tensor([link.rank])}, [left, right])
        assert [int(g["n"]) for g in got] == [left, right]
        return [*got, {"x": x.view(20, 100)}]

    results = run(3, ALL[name], body)
    for sender in range(3):
        receiver = (sender + 1) % 3
        assert torch.equal(results[sender][2]["x"], results[receiver][0]["x"]), (
            "what was given is what its readers read"
        )
    for receiver, (*got, _) in enumerate(results):
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
    def body(link: CompressedGroup) -> tuple[Tensor, Tensor]:
        heard = torch.zeros(600, dtype=torch.float64)
        for step in range(6):
            if step == 3:
                assert (
                    link.swap({"x": given(link.rank, 99, 600)}, []) == []
                )  # to nobody: nothing leaves the residual
                continue
            heard += link.swap({"x": given(link.rank, step, 600)}, [1 - link.rank])[0]["x"]
        return heard, link.state["error/swap/x"].clone()

    (heard, _), (_, left) = run(2, ALL[name], body)
    needed = sum(given(1, s, 600, torch.float64) for s in range(6) if s != 3)
    torch.testing.assert_close(heard + left, needed, rtol=1e-4, atol=1e-5)


def test_a_codec_that_only_all_ranks_can_read_swaps_in_plain() -> None:
    got = run(
        2,
        PowerSGD(),
        lambda link: link.swap({"x": given(link.rank, 0, 2000)}, [1 - link.rank])[0]["x"],
    )
    assert torch.equal(got[0], given(1, 0, 2000))


# -- two processes --


def every_codec(link: Group) -> dict[str, list[Tensor]]:
    results = {}
    for name, codec in ALL.items():
        over = wrap(link, codec)
        results[name] = reduced(over, range(2), 3001)
        xs = [given(link.rank, 5 + i, 2000 + i) for i in range(3)]
        works = [
            over.all_reduce({f"x{i}": x, "n": torch.ones(1)}, "mean") for i, x in enumerate(xs)
        ]
        for work in works:
            work.wait()
        results[name] += [*xs, over.swap({"y": given(link.rank, 9, 1500)}, [1 - link.rank])[0]["y"]]
    return results


def process() -> dict[str, Any]:
    from manyhands.launch import environment

    here = environment.process_info()
    store = environment.store(here, 60)
    links = {
        "gloo": collective.connect(
            here.rank, here.size, dist.PrefixStore("gloo", store), "gloo", 30.0
        ),
        "shared": SharedGroup(
            here.rank, here.size, dist.PrefixStore("shared", store), timeout_s=30.0
        ),
        "hierarchical": hierarchical.connect(
            here.rank, here.size, ["a", "b"], dist.PrefixStore("hierarchical", store), 30.0
        ),
    }
    return {name: over(link) for name, link in links.items()}


def over(link: Group) -> dict[str, list[str]]:
    results = every_codec(link)
    agree = {k: [x.clone() for x in v[:-1]] for k, v in results.items()}  # all but what was swapped
    for xs in agree.values():
        for x in xs:
            other = torch.empty_like(x)
            link.transfer({1 - link.rank: x}, {1 - link.rank: other}).wait()
            assert torch.equal(x, other)
    link.close()
    return {k: digest(v) for k, v in results.items()}  # what a process returns travels as JSON


def digest(xs: list[Tensor]) -> list[str]:
    return [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in xs]


@functools.cache
def in_processes() -> dict[str, dict[str, list[str]]]:
    return HostsLauncher().launch(Job(2, bytes(cloudpickle.dumps(process)), threads=1))


@functools.cache
def in_the_world() -> dict[str, list[str]]:
    return {k: digest(v) for k, v in World(2).run(every_codec)[0].items()}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("link", ["gloo", "shared", "hierarchical"])
def test_two_processes_end_with_the_bits_of_the_world(link: str, name: str) -> None:
    assert in_processes()[link][name] == in_the_world()[name]


@pytest.mark.parametrize("codec", [Bf16(), Int8()])
def test_a_transfer_with_a_name_is_encoded_and_one_that_must_be_exact_is_not(
    codec: Bf16 | Int8,
) -> None:
    """What gossip sends: to one or more ranks, encoded once, read by each of them alone."""
    values = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))

    def main(group: Group) -> tuple[Tensor, Tensor, int]:
        seen = ObservedGroup(group, lambda event: None)
        link = wrap(seen, codec, "parameters")
        to, source = (group.rank + 1) % 3, (group.rank - 1) % 3
        got = [torch.empty(5000), torch.empty(5000)]
        link.transfer({to: values[group.rank]}, {source: got[0]}, "float32").wait()
        encoded = seen.nbytes
        link.transfer({to: values[group.rank]}, {source: got[1]}, f"{EXACT}float32").wait()
        return got[0], got[1], encoded

    for rank, (rounded, exact, nbytes) in enumerate(World(3).run(main)):
        theirs = values[(rank - 1) % 3]
        assert torch.equal(exact, theirs) and not torch.equal(rounded, theirs)
        torch.testing.assert_close(rounded, theirs, rtol=0.02, atol=0.02)
        assert nbytes == codec.nbytes(5000) < theirs.nbytes
