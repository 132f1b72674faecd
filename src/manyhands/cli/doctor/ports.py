"""Check of TCP ports: a free port can be bound and reached, on loopback and the host's address."""

from __future__ import annotations

import socket

from manyhands.cli.doctor import network_cards
from manyhands.cli.doctor.finding import Finding, Variables

LOOPBACK = "127.0.0.1"


def check(variables: Variables) -> Finding:
    """One machine needs the loopback; several machines need the host's address."""
    reached = []
    for address in dict.fromkeys([LOOPBACK, network_cards.host_address(variables) or LOOPBACK]):
        try:
            reached.append(f"{address}:{reach(address)}")
        except OSError as e:
            found = f"{address} cannot be bound and reached: {e}"
            if address.startswith("127."):
                do = "a firewall or sandbox blocks the loopback: allow it"
                return Finding("fail", found, do)
            return Finding("warn", found, "correct /etc/hosts or set GLOO_SOCKET_IFNAME")
    return Finding("ok", f"bound and reached {', '.join(reached)}")


def reach(address: str) -> int:
    """Bind a free port of `address`, send a byte to it and return the port."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(2)
        port: int = server.getsockname()[1]
        with socket.create_connection((address, port), timeout=2) as client:
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"?")
                accepted.settimeout(2)
                if accepted.recv(1) != b"?":
                    raise OSError("the connection opened, but what was sent did not arrive")
    return port
