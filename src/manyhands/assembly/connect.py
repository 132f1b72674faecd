"""Process groups and device of a rank: the fastest group for all ranks, and one for each axis."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from manyhands.core import Group, Plan, ProcessInfo, Store
from manyhands.errors import PlanError
from manyhands.exchange import collective, hierarchical
from manyhands.exchange.elastic import ElasticGroup
from manyhands.exchange.interruption import Interruption, wait_for_keys
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.shared import SharedGroup
from manyhands.exchange.solo import SoloGroup


def axis_group(
    plan: Plan,
    process: ProcessInfo,
    store: dist.Store,
    device: torch.device,
    group: ObservedGroup,
    axis: str,
    interruption: Interruption | None = None,
) -> ObservedGroup:
    """The group of ranks that differ from this one along `axis` only; `group` has all ranks."""
    peers = plan.layout.peers(process.rank, axis)
    if len(peers) == process.size:
        return group
    if len(peers) == 1:
        return ObservedGroup(SoloGroup(), group.emit, beside=group)
    among = dataclasses.replace(process, rank=peers.index(process.rank), size=len(peers))
    keys = dist.PrefixStore(f"{axis}/{peers[0]}", store)
    inner, _ = connect(plan, among, keys, device, interruption=interruption)
    return ObservedGroup(inner, group.emit, beside=group)


def connect(
    plan: Plan,
    process: ProcessInfo,
    store: dist.Store,
    device: torch.device,
    elastic_launcher: bool = False,
    interruption: Interruption | None = None,
) -> tuple[Group, str]:
    """The fastest group that joins all ranks, or the one the plan names; and its name.
    `elastic_launcher`: what started them replaces ranks that die. `interruption`: ends waits."""
    if plan.elastic is not None:
        if not elastic_launcher and interruption is None:
            raise PlanError(
                f"elastic={plan.elastic}: who starts the processes must also replace them, and "
                f"{process.started_by} does not; start them with manyhands run"
            )
        if plan.strategy.link is Store:
            return ElasticGroup(process.rank, process.size), "servers"
    if process.size == 1:
        return SoloGroup(), "none"
    # by name and machine: two machines may have the same name
    me = f"{process.host} {process.machine}"
    hosts = _gather(store, "host", process, me, plan.timeout_s, interruption)
    one_host, shares = len(set(hosts)) == 1, len(set(hosts)) < process.size
    kind = plan.link
    if kind == "auto" and device.type == "cuda":
        kind = "nccl" if plan.ranks_per_gpu == 1 else "gloo"  # nccl refuses two ranks on one card
    elif kind == "auto":
        kind = "shared" if one_host else "hierarchical" if shares else "gloo"
    if kind == "shared" and not one_host:
        raise PlanError(
            f"link=shared joins processes of one host, but there are {len(set(hosts))}: "
            f"{', '.join(sorted(h.partition(' ')[0] for h in set(hosts)))}; set link=hierarchical"
        )
    if kind == "nccl" and device.type != "cuda":
        raise PlanError(
            "link=nccl moves bytes between GPUs, but this rank computes on the CPU; set link=auto"
        )
    prefixed = dist.PrefixStore(f"link/{kind}", store)
    if kind == "shared":
        return SharedGroup(
            process.rank,
            process.size,
            prefixed,
            timeout_s=plan.timeout_s,
            interruption=interruption,
        ), kind
    if kind == "hierarchical":
        return hierarchical.connect(
            process.rank, process.size, hosts, prefixed, plan.timeout_s, interruption
        ), kind
    return collective.connect(
        process.rank, process.size, prefixed, kind, plan.timeout_s, device, interruption
    ), kind


def choose_device(plan: Plan, process: ProcessInfo) -> torch.device:
    each = plan.ranks_per_gpu
    if plan.device == "cpu" or (
        plan.device == "auto" and not torch.cuda.is_available() and each == 1
    ):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        word = "device=cuda" if plan.device == "cuda" else f"ranks_per_gpu={each}"
        raise PlanError(
            f"{word}, but torch sees no GPU here; set device=cpu, or install a CUDA build of torch"
        )
    cards, card = torch.cuda.device_count(), process.local_rank // each
    if card >= cards:
        needed = -(-process.local_size // cards)
        raise PlanError(
            f"{process.local_size} ranks on this host, but torch sees {cards} GPUs, and "
            f"ranks_per_gpu={each}; set data={cards * each}, ranks_per_gpu={needed} or device=cpu"
        )
    torch.cuda.set_device(card)
    # one stream of our own for everything: a captured step must not touch the default stream
    torch.cuda.set_stream(torch.cuda.Stream())
    return torch.device("cuda", card)


def _gather(
    store: dist.Store,
    key: str,
    process: ProcessInfo,
    value: str,
    timeout_s: float,
    interruption: Interruption | None,
) -> list[str]:
    store.set(f"{key}/{process.rank}", value)
    keys = [f"{key}/{r}" for r in range(process.size)]
    wait_for_keys(store, keys, timeout_s, interruption)
    return [store.get(k).decode() for k in keys]
