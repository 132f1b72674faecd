"""Compression, as links that wrap a link: one wire, one file; its name here is its name in a plan: `wire=topk wire.density=0.01`.

Nothing here loads numba before the first tensor is encoded.
"""

from collections.abc import Mapping
from typing import Any

from manyhands.core import Cargo, Group, Store
from manyhands.exchange.wires.bf16 import Bf16
from manyhands.exchange.wires.compressed import Compressed
from manyhands.exchange.wires.fp16 import Fp16
from manyhands.exchange.wires.int8 import Int8
from manyhands.exchange.wires.onebit import OneBit
from manyhands.exchange.wires.powersgd import PowerSGD
from manyhands.exchange.wires.randomk import RandomK
from manyhands.exchange.wires.topk import TopK
from manyhands.exchange.wires.wire import Shapes, Wire

WIRES: dict[str, Any] = {
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "onebit": OneBit,
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": PowerSGD,
}


OF_SERVERS = ("fp16", "bf16", "int8")  # payloads of `exchange.server`: each message is whole, nothing is left for the next one


def wrap(group: Group, wire: Wire, sends: Cargo = "gradients", shapes: Mapping[str, Shapes] | None = None) -> Compressed:
    return Compressed(group, wire, sends, shapes)


def refusal(wire: Wire | type[Wire], rule: type) -> str | None:
    """Why this wire cannot carry what this rule sends; None: it can."""
    sends, swaps = getattr(rule, "sends", "gradients"), getattr(rule, "swaps", False)
    if getattr(rule, "link", Group) is Store:
        return _refused_by_servers(wire, rule)
    able = [name for name, kind in WIRES.items() if sends in kind.carries and (kind.point_to_point or not swaps)]
    word = next((name for name, kind in WIRES.items() if kind is wire or isinstance(wire, kind)), "?")
    merge = rule.__module__.rpartition(".")[2]
    if sends not in wire.carries:
        return (
            f"wire={word} with merge={merge}, which sends {sends}: {word} leaves part of every message for the next one to make good, "
            f"and of {sends} there is no part; needed: a wire that carries {sends}: set wire={' or '.join(able)}"
        )
    if swaps and not wire.point_to_point:
        return (
            f"wire={word} with merge={merge}, whose ranks swap with their neighbours: only all ranks together can read {word}; "
            f"needed: a wire that one peer can read: set wire={' or '.join(able)}"
        )
    return None


def _refused_by_servers(wire: Wire | type[Wire], rule: type) -> str | None:
    word = next(name for name, kind in WIRES.items() if kind is wire or isinstance(wire, kind))
    merge = rule.__module__.rpartition(".")[2]
    if word not in OF_SERVERS:
        return f"wire={word} with merge={merge}, which talks to servers: they read each message by itself; set wire={' or '.join(OF_SERVERS)}"
    if not isinstance(wire, type) and wire != WIRES[word]():
        return f"options of wire={word} have no effect with merge={merge}: servers know it in one form; leave them out"
    return None
