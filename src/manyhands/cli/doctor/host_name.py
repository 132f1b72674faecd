"""Check of the host name: the address at which other machines reach ranks of this one."""

from __future__ import annotations

import socket

from manyhands.cli.doctor import network_cards
from manyhands.cli.doctor.finding import Finding, Variables


def check(variables: Variables) -> Finding:
    name, cards = socket.gethostname(), network_cards.addresses()
    chosen = variables.get("GLOO_SOCKET_IFNAME", "")
    if chosen and not set(chosen.split(",")) <= cards.keys():
        known = ", ".join(f"{card} ({address})" for card, address in cards.items())
        found = f"GLOO_SOCKET_IFNAME={chosen}, but the network cards here are {known}"
        return Finding("fail", found, "set GLOO_SOCKET_IFNAME to one of these, or unset it")
    address, advice = network_cards.host_address(variables), _advice(cards)
    if address is None:
        return Finding("warn", f"{name} does not resolve", f"add it to /etc/hosts, or {advice}")
    card = next((card for card, a in cards.items() if a == address), "no card of this machine")
    found = f"{name}: ranks here are reached at {address} ({card})"
    if address.startswith("127."):
        found += ", from this machine only"
        return Finding("ok", found, f"for several machines: {advice}")
    if address not in cards.values():
        do = f"/etc/hosts or DNS gives another machine's address; correct it, or {advice}"
        return Finding("warn", found, do)
    return Finding("ok", found)


def _advice(cards: dict[str, str]) -> str:
    """The variables that make gloo and nccl use the card that leads out of this machine."""
    others = (card for card, address in cards.items() if not address.startswith("127."))
    card = network_cards.default_card() or next(others, None)
    if card is None:
        return "this machine has no other network card"
    return f"export GLOO_SOCKET_IFNAME={card} NCCL_SOCKET_IFNAME={card}"
