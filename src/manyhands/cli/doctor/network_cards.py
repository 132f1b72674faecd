"""Network interfaces ("cards"): their addresses, the default route, and where gloo listens."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from manyhands.cli.doctor.finding import Variables

SIOCGIFADDR = 0x8915  # Linux: the address of a network interface


def host_address(variables: Variables) -> str | None:
    """Where gloo listens: on the card of GLOO_SOCKET_IFNAME, else where the host name points."""
    chosen = variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if chosen:
        return addresses().get(chosen)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def addresses() -> dict[str, str]:
    """IPv4 address of every card that has one; empty where the system cannot be asked."""
    try:
        from fcntl import ioctl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, card in socket.if_nameindex():
            try:
                answer = ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", card.encode()))
            except OSError:
                continue
            found[card] = socket.inet_ntoa(answer[20:24])
    return found


def default_card() -> str | None:
    """The card of the default route."""
    try:
        lines = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return None
    rows = [line.split() for line in lines]
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)
