"""Groups of ranks: which hosts are one host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from manyhands.assembly.connect import connect
from manyhands.core import ProcessInfo
from manyhands.errors import PlanError
from manyhands.plan.words import parse


def test_two_machines_of_one_name_share_no_memory() -> None:
    store, plan = dist.HashStore(), parse("data=2 link=shared timeout_s=10")
    ranks = [ProcessInfo(r, 2, host="node", machine=f"boot-{r}") for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(connect, plan, p, store, torch.device("cpu")) for p in ranks]
    for each in made:
        with pytest.raises(PlanError, match="processes of one host, but there are 2: node, node"):
            each.result()
