"""Reduce-scatter and all-gather on every group: who owns what, and that both make an all-reduce."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core import Group, Op
from manyhands.exchange import collective
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.reduce_scatter import equal_part
from manyhands.exchange.shared import SharedGroup, shard_memory
from manyhands.exchange.solo import SoloGroup


def given(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(numel).mul(rank + 1).remainder(29).to(dtype)


def reduced(size: int, numel: int, dtype: torch.dtype, op: Op) -> Tensor:
    every = torch.stack([given(r, numel, dtype) for r in range(size)])
    total = every.amax(0) if op == "max" else every.sum(0, dtype=dtype)
    return (
        total / size
        if op == "mean" and dtype.is_floating_point
        else total // size
        if op == "mean"
        else total
    )


def on_threads(link: str, size: int, main: Callable[[Group], object]) -> None:
    """Real links, on ranks that are threads."""
    store, errors = dist.HashStore(), []

    def body(rank: int) -> None:
        try:
            group = (
                SharedGroup(rank, size, store, timeout_s=20.0)
                if link == "shared"
                else collective.connect(rank, size, store, "gloo", 20.0)
            )
            try:
                main(group)
            finally:
                group.close()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=body, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def on_link(link: str, size: int, main: Callable[[Group], object]) -> None:
    if link == "inproc":
        World(size).run(main)
    elif link == "solo":
        main(SoloGroup())
    else:
        on_threads(link, size, main)


LINKS = [
    ("solo", 1),
    *(("inproc", n) for n in (1, 2, 3, 4)),
    ("gloo", 2),
    ("gloo", 3),
    ("shared", 2),
    ("shared", 3),
]


@pytest.mark.parametrize(("link", "size"), LINKS)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_the_owner_has_the_sum_and_a_gather_gives_it_to_all(link: str, size: int, op: Op) -> None:
    def main(group: Group) -> None:
        for watched in (group, ObservedGroup(group, lambda event: None)):
            memory, _ = shard_memory(watched)
            for numel, dtype in (
                (12 * size, torch.float32),
                (7, torch.float64),
                (1, torch.float32),
                (60_007, torch.bfloat16),
            ):
                x = memory(numel, dtype)
                x.copy_(given(group.rank, numel, dtype))
                needed = reduced(size, numel, dtype, op)
                watched.reduce_scatter({"x": x}, op).wait()
                (own,) = watched.own(x)
                assert torch.equal(x[own], needed[own])
                watched.all_gather({"x": x}).wait()
                assert torch.equal(x, needed)

    on_link(link, size, main)


@pytest.mark.parametrize(("link", "size"), LINKS)
def test_a_slice_of_a_vector_has_parts_of_its_own_and_its_neighbours_stay_as_they_are(
    link: str, size: int
) -> None:
    def main(group: Group) -> None:
        memory, _ = shard_memory(group)
        x = memory(100 * size, torch.float64)
        x.fill_(group.rank + 1)
        inside = x[10 : 10 + 6 * size]
        group.reduce_scatter({"x": inside}).wait()
        group.all_gather({"x": inside}).wait()
        assert group.own(inside) == [slice(6 * group.rank, 6 * group.rank + 6)]
        assert (inside == size * (size + 1) / 2).all()
        assert (x[:10] == group.rank + 1).all() and (x[10 + 6 * size :] == group.rank + 1).all()

    on_link(link, size, main)


def test_parts_cover_a_vector_once_however_short() -> None:
    for numel in (0, 1, 5, 64, 1001):
        for size in (1, 2, 3, 8):
            cut = [equal_part(numel, r, size) for r in range(size)]
            assert cut[0].start == 0 and cut[-1].stop == numel
            assert all(a.stop == b.start for a, b in itertools.pairwise(cut))
            assert max(c.stop - c.start for c in cut) - min(c.stop - c.start for c in cut) <= 1


def test_several_exchanges_are_under_way_at_once_and_compute_goes_on() -> None:
    def main(group: Group) -> None:

        vectors = [given(group.rank, 12, torch.float64) + i for i in range(4)]
        works = [group.reduce_scatter({str(i): v}) for i, v in enumerate(vectors)]
        for work in reversed(works):
            work.wait()
            work.wait()  # once more changes nothing
        for i, v in enumerate(vectors):
            (own,) = group.own(v)
            assert torch.equal(v[own], reduced(3, 12, torch.float64, "sum")[own] + 3 * i)

    World(3).run(main)


def test_memory_that_is_common_to_all_is_written_by_its_owners_and_read_by_all() -> None:
    def main(group: Group) -> None:
        _, common = shard_memory(group)
        assert common is not None
        x = common(10, torch.float32)
        (own,) = group.own(x)
        x[own] = float(group.rank + 1)
        group.all_gather({"x": x}).wait()
        assert x.tolist() == [1.0] * 5 + [2.0] * 5

    on_link("shared", 2, main)


def test_what_does_not_lie_in_one_piece_is_refused() -> None:
    def main(group: Group) -> None:
        group.reduce_scatter({"x": torch.ones(4, 4).t()})

    with pytest.raises(
        ValueError, match=r"contiguous vector has equal parts; give x.contiguous\(\)"
    ):
        World(2).run(main)
