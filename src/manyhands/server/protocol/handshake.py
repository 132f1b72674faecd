"""Handshake: both sides prove that they know the token, without sending it.

    server -> client   Hello    nonce s
    client -> server   Proof    nonce c, identity, HMAC(token, "client" s c identity)
    server -> client   Welcome  HMAC(token, "server" s c identity), or Refused with a reason

A recorded handshake cannot be replayed, since the next one has other nonces. Every step has a
deadline, so a peer that connects and sends nothing, or one byte per minute, is disconnected.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import ssl
import time
from pathlib import Path

from manyhands.server.protocol.frame import Channel, Closed, Malformed
from manyhands.server.protocol.messages import (
    Hello,
    Proof,
    Refused,
    ShardAddress,
    Welcome,
)

HANDSHAKE_S = 5.0
LINGER_S = 0.3  # for a refusal to be read before the connection goes


class HandshakeRefused(Exception):
    """The other side refused us, or could not prove that it knows the token."""


def _code(token: str, side: str, hello: Hello, proof: Proof) -> bytes:
    who = f"{side}/{proof.role}/{proof.shard}/{proof.worker}/{proof.incarnation}/".encode()
    return hmac.digest(token.encode(), who + hello.nonce + proof.nonce, hashlib.sha256)


def challenge(channel: Channel, token: str, instance: int, deadline: float) -> Proof:
    """The server's side; Malformed with the reason where the client is refused."""
    hello = Hello(secrets.token_bytes(16))
    channel.limit(HANDSHAKE_S, HANDSHAKE_S)
    channel.send(hello)
    try:
        _, proof = channel.receive(authenticated=False, deadline=deadline)
    except TimeoutError as e:
        raise Malformed("slow", f"no proof came within {HANDSHAKE_S:g} s") from e
    if not isinstance(proof, Proof):
        raise Malformed("garbage", f"a {type(proof).__name__} came before a proof")
    if not hmac.compare_digest(proof.code, _code(token, "client", hello, proof)):
        raise Malformed("token", "the token is not the one of this server; give both the same")
    channel.send(Welcome(_code(token, "server", hello, proof), instance))
    channel.limit(None)
    return proof


def prove(channel: Channel, token: str, proof: Proof, deadline: float) -> Welcome:
    """The client's side."""
    try:
        _, hello = channel.receive(authenticated=False, deadline=deadline)
        if isinstance(hello, Refused):
            raise HandshakeRefused(f"refused ({hello.reason}): {hello.text}")
        if not isinstance(hello, Hello):
            raise HandshakeRefused(
                f"it does not begin as a manyhands server does, but with a {type(hello).__name__}"
            )
        proof.nonce = secrets.token_bytes(16)
        proof.code = _code(token, "client", hello, proof)
        channel.send(proof)
        _, answer = channel.receive(authenticated=False, deadline=deadline)
    except Malformed as e:
        raise HandshakeRefused(str(e)) from e
    if isinstance(answer, Refused):
        raise HandshakeRefused(f"refused ({answer.reason}): {answer.text}")
    if not isinstance(answer, Welcome) or not hmac.compare_digest(
        answer.code, _code(token, "server", hello, proof)
    ):
        raise HandshakeRefused(
            "it does not know the token itself: another process answers at this address"
        )
    channel.limit(None)
    return answer


def refuse(channel: Channel, reason: str, text: str) -> None:
    """Send the reason and close. Bytes still on their way are read first: a close with unread
    bytes would reset the connection and discard the reason.
    """
    try:
        channel.limit(LINGER_S, LINGER_S)
        channel.send(Refused(reason, text))
        channel.sock.shutdown(socket.SHUT_WR)
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until and channel.sock.recv(65536):
            pass
    except (OSError, ssl.SSLError, Closed):
        pass
    channel.close()


# -- connections within one host --


def machine() -> str:
    """Identifies a boot and a network namespace: processes with the same value can reach each
    other's unix sockets. "" where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def process_gone(pid: int, where: ShardAddress) -> bool:
    """Whether a process of this machine has ended for sure; False: it runs, or nobody can tell."""
    if not pid or not where.machine or where.machine != machine():
        return False
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:  # it may have died and not been waited for
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError:
        return False


def local_name() -> str:
    """A name for a unix socket without a file: it ends with its process, however that ends. ""
    where the system has none.
    """
    return f"\0manyhands-{os.getpid()}-{secrets.token_hex(8)}" if machine() else ""


def connect(
    where: ShardAddress, timeout_s: float, local: bool, tls: ssl.SSLContext | None = None
) -> Channel:
    if local:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        try:
            sock.connect(where.local)
        except BaseException:
            sock.close()
            raise
        return Channel(sock)
    sock = socket.create_connection((where.host, where.port), timeout=timeout_s)
    if tls is not None:
        try:
            sock = tls.wrap_socket(sock, server_hostname=where.host if tls.check_hostname else None)
        except BaseException:
            sock.close()
            raise
    return Channel(sock)
