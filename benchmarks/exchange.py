"""All-reduce between two processes of one host: shared memory against gloo, driven alike.

TCP has the same congestion control for all, cubic where it can be set (see `peers/tuning.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import cloudpickle
import torch
from common import Claim, median
from peers import tuning

from manyhands.core import Job
from manyhands.launch.hosts import HostsLauncher


def body(times: int) -> dict[str, float]:
    import torch.distributed as dist

    from manyhands.exchange.shared import SharedGroup
    from manyhands.launch import environment

    here = environment.process_info()
    store = environment.store(here, 60)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("gloo", store), rank=here.rank, world_size=here.size
    )
    group = SharedGroup(here.rank, here.size, dist.PrefixStore("shared", store))
    found = {}
    for size, mb in (("1mb", 1), ("25mb", 25)):
        n = mb * 2**20 // 4
        placed, foreign, theirs = group.allocate(n, torch.float32), torch.empty(n), torch.empty(n)
        ways: dict[str, tuple[torch.Tensor, Callable[[], object]]] = {
            "inplace": (placed, lambda placed=placed: group.all_reduce({"x": placed}).wait()),
            "copy": (foreign, lambda foreign=foreign: group.all_reduce({"x": foreign}).wait()),
            "gloo": (theirs, lambda theirs=theirs: dist.all_reduce(theirs)),
        }
        seconds: dict[str, list[float]] = {k: [] for k in ways}
        for _ in range(times + 2):
            for k, (values, call) in ways.items():
                values.fill_(here.rank + 1.0)
                dist.barrier()
                start = time.perf_counter()
                call()
                seconds[k].append(time.perf_counter() - start)
                assert values[0] == 3.0 and values[-1] == 3.0
        found |= {f"{k}_{size}": median(v[2:]) for k, v in seconds.items()}
    dist.barrier()
    dist.destroy_process_group()
    return found


def measure(quick: bool, only: list[str]) -> list[Claim]:
    job = Job(2, bytes(cloudpickle.dumps(functools.partial(body, 5 if quick else 60))), threads=1)
    with tuning.loopback_control() as control:
        runs = [HostsLauncher().launch(job) for _ in range(1 if quick else 3)]
    s = {k: median([r[k] for r in runs]) * 1e3 for k in runs[0]}
    bars = {"inplace_25mb": 6.0, "copy_25mb": 3.0, "inplace_1mb": 4.0}
    return [
        Claim(
            name,
            s[name],
            s[f"gloo_{name.split('_')[1]}"],
            "ms",
            s[f"gloo_{name.split('_')[1]}"] / s[name],
            bar,
            {"congestion control": control},
        )
        for name, bar in bars.items()
        if not only or name in only
    ]
