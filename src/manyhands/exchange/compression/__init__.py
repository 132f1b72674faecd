"""Compression of messages: one codec per file, and the group that applies it.

To add one: write `compression/NAME.py` with a frozen dataclass that has the methods of
`codec.Codec` (its fields are the options; derive from `Quantised` if it encodes values one by
one), add it to `CODECS`, and `compress=NAME compress.option=value` works in a plan. Nothing is
compiled on import.

    codec               the protocol, and the state that a codec keeps per tensor
    compressed_group    CompressedGroup: a group that sends compressed vectors over another group
    bf16, fp16, int8, onebit    values encoded one by one (quantised)
    topk, randomk, powersgd     a part of the values, or a low-rank approximation
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

# what `server` sends: each message is decoded by itself, nothing is left for the next one
SERVER_CODECS = ("fp16", "bf16", "int8")


def wrap(
    group: Group,
    codec: Codec,
    sends: Cargo = "gradients",
    shapes: Mapping[str, Shapes] | None = None,
) -> CompressedGroup:
    return CompressedGroup(group, codec, sends, shapes)


def refusal(codec: Codec | type[Codec], strategy: type[Strategy[Any, Any]]) -> str | None:
    """Why this codec cannot encode what this strategy sends; None: it can."""
    name = _name(codec)
    with_merge = f"compress={name} with merge={strategy.__module__.rpartition('.')[2]}"
    if strategy.link is Store:
        return _server_refusal(codec, name, with_merge)
    if strategy.shares_parameters:
        return (
            f"{with_merge}, whose ranks share memory and send nothing: there is nothing to "
            "compress; set compress=none"
        )
    sends, swaps = strategy.sends, strategy.swaps
    able = [
        other
        for other, kind in CODECS.items()
        if sends in kind.carries and (kind.point_to_point or not swaps)
    ]
    instead = f"set compress={' or '.join(able)}"
    if sends not in codec.carries:
        return (
            f"{with_merge}, which sends {sends}: {name} sends a part now and the rest by error "
            f"feedback later, which works for gradients and updates only; needed: a compression "
            f"that carries {sends}: {instead}"
        )
    if swaps and not codec.point_to_point:
        return (
            f"{with_merge}, whose ranks swap with their neighbours: only all ranks together can "
            f"decode {name}; needed: a compression that one peer can decode: {instead}"
        )
    return None


def _server_refusal(codec: Codec | type[Codec], name: str, with_merge: str) -> str | None:
    if name not in SERVER_CODECS:
        return (
            f"{with_merge}, which uses servers: they decode each message by itself; "
            f"set compress={' or '.join(SERVER_CODECS)}"
        )
    if not isinstance(codec, type) and codec != CODECS[name]():
        return f"options of {with_merge} have no effect: servers use its defaults; leave them out"
    return None


def _name(codec: Codec | type[Codec]) -> str:
    return next(name for name, kind in CODECS.items() if kind is codec or isinstance(codec, kind))
