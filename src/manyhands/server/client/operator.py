"""Operator: asks the coordinator of a run about its servers, and moves what they hold."""

from __future__ import annotations

import json
import ssl
from typing import Any

from manyhands.server.client.connection import Connection
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r


class Operator:
    """`coordinator` is HOST:PORT."""

    def __init__(
        self,
        coordinator: str,
        token: str,
        *,
        timeout_s: float = 10.0,
        tls: ssl.SSLContext | None = None,
    ):
        host, _, port = coordinator.rpartition(":")
        self._connection = Connection(
            m.ShardAddress(host.strip("[]"), int(port)),
            token,
            lambda: m.Proof(b"", "operator", 0, 0, 0, b""),
            timeout_s=timeout_s,
            transport="tcp",
            tls=tls,
        )

    def status(self) -> dict[str, Any]:
        """Servers with what they hold, chains, and moves under way."""
        found: dict[str, Any] = json.loads(self._connection.ask(r.GetStatus(), "status").text)
        return found

    def drain(self, server: int) -> None:
        """Move everything away from a server; it then ends."""
        self._connection.ask(r.Drain(server), f"drain of server {server}")

    def rebalance(self) -> bool:
        """Even out the load of servers; False: no move would help."""
        return bool(self._connection.ask(r.Rebalance(), "rebalance").value)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
