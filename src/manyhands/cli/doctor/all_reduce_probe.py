"""All-reduce probe: one of the two processes that `two_processes.py` starts.

    python -m manyhands.cli.doctor.all_reduce_probe RANK FOLDER

Rank 0 prints a JSON object: by link, the seconds of one all-reduce or the message of its error.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.cli.doctor.two_processes import PROBE_BYTES, PROBE_S
from manyhands.exchange.shared import SharedGroup

TIMEOUT_S = PROBE_S / 2  # of one link: the other still gets its turn


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    measured: dict[str, float | str] = {}
    for link, probe in {"shared": shared_s, "gloo": gloo_s}.items():
        try:
            measured[link] = probe(rank, dist.PrefixStore(link, store))
        except Exception as e:  # reported, and the other link is still measured
            measured[link] = next(iter(str(e).strip().splitlines()), type(e).__name__)
    if rank == 0:
        print(json.dumps(measured), flush=True)


def shared_s(rank: int, store: dist.Store) -> float:
    group = SharedGroup(rank, 2, store, timeout_s=TIMEOUT_S)
    values = group.allocate(PROBE_BYTES // 4, torch.float32)
    seconds = median_s(values, lambda: group.all_reduce({"values": values}).wait())
    group.close()
    return seconds


def gloo_s(rank: int, store: dist.Store) -> float:
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    values = torch.zeros(PROBE_BYTES // 4)
    seconds = median_s(values, lambda: dist.all_reduce(values))
    dist.destroy_process_group()
    return seconds


def median_s(values: Tensor, all_reduce: Callable[[], object], times: int = 7) -> float:
    """Median seconds of `all_reduce`, which sums `values` over the two ranks in place."""
    values.fill_(1)
    all_reduce()  # the first call makes connections and touches pages
    if not bool((values == 2).all()):
        wrong = values[values != 2][0].item()
        raise RuntimeError(f"all-reduce of 1 over two ranks gave {wrong:g} instead of 2")
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        all_reduce()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
