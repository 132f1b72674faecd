"""Groups over torch.distributed: dtypes the backend does not know, several groups, closing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from manyhands.errors import PeerLost, PlanError
from manyhands.exchange import collective
from manyhands.exchange.collective import CollectiveGroup


def on_ranks(
    size: int, main: Callable[[CollectiveGroup], object], keep: list[CollectiveGroup] | None = None
) -> None:
    """Run `main` on ranks that are threads: gloo does not mind, and it is quick."""
    store, errors = dist.HashStore(), []

    def body(rank: int) -> None:
        try:
            link = collective.connect(rank, size, store, "gloo", 20.0)
            try:
                main(link)
            finally:
                link.close() if keep is None else keep.append(link)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=body, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("dtype", list(collective.SENT_AS), ids=str)
def test_every_dtype_is_summed_and_maximised(dtype: torch.dtype) -> None:
    def main(link: CollectiveGroup) -> None:
        x, y = (torch.tensor([0, 1, link.rank]).to(dtype) for _ in range(2))
        link.all_reduce({"x": x}).wait()
        link.all_reduce({"y": y}, "max").wait()
        assert x.dtype == dtype and torch.equal(x, torch.tensor([0, 3, 3]).to(dtype))
        assert torch.equal(y, torch.tensor([0, 1, 2]).to(dtype))

    on_ranks(3, main)


def test_a_dtype_that_cannot_travel_is_refused_at_the_door() -> None:
    with pytest.raises(
        ValueError, match=r"all_reduce of 'x', which is torch.complex64; needed: one of float32"
    ):
        on_ranks(2, lambda link: link.all_reduce({"x": torch.ones(1, dtype=torch.complex64)}))


def test_one_process_holds_several_groups_and_torch_knows_of_none() -> None:
    def main(outer: CollectiveGroup) -> None:
        store.set(f"there/{outer.rank}", "1")
        inner = collective.connect(outer.rank, 2, dist.PrefixStore("inner", store), "gloo", 20.0)
        for link in (outer, inner, outer):
            x = torch.ones(3)
            link.all_reduce({"x": x}).wait()
            assert (x == 2).all()
        inner.close()
        assert not dist.is_initialized()

    store = dist.HashStore()
    on_ranks(2, main)


def test_close_ends_threads_and_sockets() -> None:
    def held(what: str) -> int:
        return len(os.listdir(f"/proc/self/{what}"))

    links: list[CollectiveGroup] = []
    sockets, threads = held("fd"), held("task")
    on_ranks(3, lambda link: link.all_reduce({"x": torch.ones(1)}).wait(), keep=links)
    assert held("fd") > sockets and held("task") > threads
    for link in links:
        link.close()
        link.close()
    assert held("fd") == sockets
    deadline = time.monotonic() + 5.0
    while held("task") > threads:  # one that has been joined is listed for a moment longer
        assert time.monotonic() < deadline
    with pytest.raises(PeerLost, match="closed"):
        links[0].all_reduce({"x": torch.ones(1)})


def test_a_process_group_that_is_lent_stays_open() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        CollectiveGroup(dist.group.WORLD).close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "backend", ["carrier pigeon", *([] if dist.is_nccl_available() else ["nccl"])]
)
def test_a_backend_that_is_not_there_is_a_matter_of_the_plan(backend: str) -> None:
    with pytest.raises(PlanError, match=backend):
        collective.connect(0, 1, dist.HashStore(), backend)
