"""Compression, as links that wrap a link: one wire, one file; its name here is its name in a plan: `compress=topk compress.density=0.01`.

Nothing here loads numba before the first tensor is encoded.
"""

from collections.abc import Mapping
from typing import Any

from manyhands.core import Cargo, Group, Store, Strategy
from manyhands.exchange.compression.bf16 import Bf16
from manyhands.exchange.compression.codec import Codec, Shapes
from manyhands.exchange.compression.compressed_group import CompressedGroup
from manyhands.exchange.compression.fp16 import Fp16
from manyhands.exchange.compression.int8 import Int8
from manyhands.exchange.compression.onebit import OneBit
from manyhands.exchange.compression.powersgd import PowerSGD
from manyhands.exchange.compression.randomk import RandomK
from manyhands.exchange.compression.topk import TopK

CODECS: dict[str, Any] = {
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "onebit": OneBit,
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": PowerSGD,
}


SERVER_CODECS = (
    "fp16",
    "bf16",
    "int8",
)  # payloads of `server`: each message is whole, nothing is left for the next one


def wrap(
    group: Group,
    wire: Codec,
    sends: Cargo = "gradients",
    shapes: Mapping[str, Shapes] | None = None,
) -> CompressedGroup:
    return CompressedGroup(group, wire, sends, shapes)


def refusal(wire: Codec | type[Codec], rule: type[Strategy[Any, Any]]) -> str | None:
    """Why this wire cannot carry what this rule sends; None: it can."""
    sends, swaps = rule.sends, rule.swaps
    if rule.link is Store:
        return _refused_by_servers(wire, rule)
    able = [
        name
        for name, kind in CODECS.items()
        if sends in kind.carries and (kind.point_to_point or not swaps)
    ]
    word = next(
        (name for name, kind in CODECS.items() if kind is wire or isinstance(wire, kind)), "?"
    )
    merge = rule.__module__.rpartition(".")[2]
    if sends not in wire.carries:
        return (
            f"compress={word} with merge={merge}, which sends {sends}: {word} leaves part of every message for the next one to make good, "
            f"and of {sends} there is no part; needed: a wire that carries {sends}: set compress={' or '.join(able)}"
        )
    if swaps and not wire.point_to_point:
        return (
            f"compress={word} with merge={merge}, whose ranks swap with their neighbours: only all ranks together can read {word}; "
            f"needed: a wire that one peer can read: set compress={' or '.join(able)}"
        )
    return None


def _refused_by_servers(wire: Codec | type[Codec], rule: type[Strategy[Any, Any]]) -> str | None:
    word = next(name for name, kind in CODECS.items() if kind is wire or isinstance(wire, kind))
    merge = rule.__module__.rpartition(".")[2]
    if word not in SERVER_CODECS:
        return f"compress={word} with merge={merge}, which talks to servers: they read each message by itself; set compress={' or '.join(SERVER_CODECS)}"
    if not isinstance(wire, type) and wire != CODECS[word]():
        return f"options of compress={word} have no effect with merge={merge}: servers know it in one form; leave them out"
    return None
