"""Compression: what encoding and decoding a gradient of 100 MB costs one thread.

    GB/s = bytes of the gradient / (seconds to encode + seconds to decode)

With error feedback where the codec has it. `int8_gbps`, `bf16_gbps` and `topk_gbps` are compared
with the speed at which a codec pays on the networks it is for; `topk_vs_torch` is the selection
alone against `torch.topk(x.abs(), k)` on the same tensor. With a GPU the same codecs are timed
there too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common import Claim, alternate, median

from manyhands.exchange.compression import CODECS, Int8, TopK
from manyhands.exchange.compression.codec import Memory
from manyhands.exchange.compression.topk import select

NUMEL = 25_000_000
BARS = {"int8": 1.5, "bf16": 3.0, "topk": 0.8}  # GB/s
RANKS = 2  # for which the share of bytes is given


def gradient(device: str) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(device)


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def turns(device: str) -> dict[str, Callable[[], float]]:
    """One encoding and decoding of each codec that one peer can decode, into allocated memory."""
    x, out = gradient(device), torch.empty(NUMEL, device=device)
    codecs: dict[str, Any] = {name: kind() for name, kind in CODECS.items() if kind.point_to_point}
    codecs["int8 stochastic"] = Int8(rounding="stochastic")
    codecs["topk momentum"] = TopK(momentum=0.9)
    runs = {}
    for name, codec in codecs.items():
        memory = Memory(name, {}, 0, "gradients")

        def turn(codec: Any = codec, memory: Memory = memory) -> float:
            return seconds(lambda: codec.decode(codec.encode(x, memory), out, memory), device)

        turn()  # compiles
        runs[name] = turn
    return runs


def share(name: str, codec: Any) -> float:
    """Bytes that each of two ranks sends in an all-reduce, over those of float32 in two stages."""
    plain = 4 * NUMEL * 2 * (RANKS - 1) / RANKS
    if name == "topk":
        return 8 * codec.count(NUMEL, 0) * (RANKS - 1) / plain
    if name == "randomk":
        return codec.density
    if name == "powersgd":
        return 4 * codec.rank * 2 * NUMEL**0.5 / (4 * NUMEL)
    return 2 * (RANKS - 1) * codec.nbytes(NUMEL // RANKS) / plain


def rates(device: str, times: int) -> dict[str, float]:
    return {
        name: 4 * NUMEL / median(s) / 1e9 for name, s in alternate(turns(device), times).items()
    }


def selection(times: int) -> tuple[float, float]:
    x, index = gradient("cpu"), torch.empty(NUMEL // 100, dtype=torch.int32)
    runs = {
        "ours": lambda: seconds(lambda: select(x, index), "cpu"),
        "torch": lambda: seconds(lambda: torch.topk(x.abs(), NUMEL // 100), "cpu"),
    }
    select(x, index)
    s = {k: median(v) * 1e3 for k, v in alternate(runs, times).items()}
    return s["ours"], s["torch"]


def measure(quick: bool, only: list[str]) -> list[Claim]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(3 if quick else 15, only)
    finally:
        torch.set_num_threads(threads)


def _measure(times: int, only: list[str]) -> list[Claim]:
    claims = []
    if not only or any(f"{name}_gbps" in only for name in BARS):
        cpu = rates("cpu", times)
        gpu = rates("cuda", times) if torch.cuda.is_available() else {}
        table = {}
        for name in (*cpu, "powersgd"):
            parts = [
                f"{cpu[name]:.2f} GB/s on one thread"
                if name in cpu
                else "no codec: two products with the gradient"
            ]
            parts += [f"{gpu[name]:.0f} GB/s on the GPU"] if name in gpu else []
            parts += [f"{share(name, CODECS[name]()):.2%} of the bytes"] if name in CODECS else []
            table[name] = ", ".join(parts)
        for name, bar in BARS.items():
            if not only or f"{name}_gbps" in only:
                detail = table if not claims else None
                claims.append(
                    Claim(f"{name}_gbps", cpu[name], bar, "GB/s", cpu[name] / bar, 1.0, detail)
                )
    if not only or "topk_vs_torch" in only:
        ours, theirs = selection(max(3, times // 3))
        claims.append(Claim("topk_vs_torch", ours, theirs, "ms", theirs / ours, 3.0))
    return claims
