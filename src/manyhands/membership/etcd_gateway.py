"""etcd's JSON gateway: calls of its v3 API over HTTP, at the first of several members that answers.

    gateway.call("/v3/kv/range", {"key": text(b"name")}, until)

A call that no member answered may have been carried out all the same: its answer was lost. Callers
make calls that can be repeated, or see from a later answer what became of them.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from manyhands.errors import MembershipError

DEFAULT_PORT = 2379
LONGEST_ANSWER = 64 << 20
PAUSE_S = 0.05
OLDEST = (3, 4)  # the first whose gateway is at /v3
# gRPC's codes after which another member, or a later try, may do it: cancelled, unknown, deadline
# exceeded, resource exhausted, internal, unavailable
_AWAY = {1, 2, 4, 8, 13, 14}
_HTTPS = b"HTTPS"  # in the answer of some TLS ports to plain HTTP; etcd's own only hangs up


class EtcdUnreachable(MembershipError):
    """No member of the etcd cluster answered."""


class EtcdRefused(MembershipError):
    """etcd answered with an error; `code` is gRPC's."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class _Fault(Exception):
    """Why one endpoint is of no use now."""


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def parse(endpoints: str) -> tuple[Endpoint, ...]:
    """`host:port[,host:port]`; port 2379 where none is given."""
    found = []
    for part in endpoints.split(","):
        try:
            url = urlsplit(f"//{part.strip()}")
            (url.hostname or "").encode("idna")
            port = url.port if url.port is not None else DEFAULT_PORT
        except ValueError:  # UnicodeError is one
            url, port = urlsplit(""), 0
        if not url.hostname or not port or url.path.strip("/") or url.query or url.username:
            raise MembershipError(
                f"{part.strip()!r} of etcd://{endpoints} is no address of an etcd member; give "
                "etcd://host:port, several with commas between them"
            )
        found.append(Endpoint(url.hostname, port))
    return tuple(found)


class Gateway:
    """Calls of one thread, over a connection that stays open. `sent`: when the last call that was
    answered left, by time.monotonic.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...], attempt_s: float):
        self.endpoints, self.attempt_s = endpoints, attempt_s
        self.sent = 0.0
        self.cluster = ""  # the id of the cluster that all endpoints must belong to
        self._best = 0
        self._connection: _Connection | None = None
        self._pid = 0

    def __str__(self) -> str:
        return "etcd://" + ",".join(map(str, self.endpoints))

    def twin(self) -> Gateway:
        """The same for another thread."""
        twin = Gateway(self.endpoints, self.attempt_s)
        twin.cluster, twin._best = self.cluster, self._best
        return twin

    def probe(self, limit_s: float) -> None:
        """See whether etcd answers, is new enough, and is one cluster; raise within `limit_s`."""
        each_s, faults = limit_s / len(self.endpoints), []
        clusters: dict[str, str] = {}
        for i, endpoint in enumerate(self.endpoints):
            deadline = time.monotonic() + each_s
            try:
                self._drop()
                _check_version(self._exchange(i, "GET", "/version", b"", deadline))
                body = json.dumps({"key": text(b"/manyhands")}).encode()
                answer = self._exchange(i, "POST", "/v3/kv/range", body, deadline)
                self._best = self._best if clusters else i
                clusters[str(endpoint)] = _cluster(answer)
            except _Fault as e:
                faults.append(f"{endpoint} {e}")
        self._drop()
        if not clusters:
            raise self._unreachable(faults)
        if len(set(clusters.values())) > 1:
            named = ", ".join(f"{where} is of {which}" for where, which in clusters.items())
            raise MembershipError(
                f"{self} names members of several etcd clusters ({named}); each would let in a "
                "coordinator of its own: name members of one cluster"
            )
        self.cluster = next(iter(clusters.values()))

    def call(self, path: str, body: dict[str, Any], until: Callable[[], float]) -> dict[str, Any]:
        """etcd's answer. Tries members in turn until time.monotonic() is `until()`."""
        raw, faults = json.dumps(body).encode(), dict[int, str]()
        while True:
            for _ in self.endpoints:
                started = time.monotonic()
                deadline = min(started + self.attempt_s, until())
                if deadline <= started:
                    named = (f"{self.endpoints[i]} {fault}" for i, fault in faults.items())
                    raise self._unreachable(list(named))
                try:
                    answer = self._exchange(self._best, "POST", path, raw, deadline)
                    self.sent = started
                    return answer
                except _Fault as e:
                    faults[self._best] = str(e)
                    self._drop()
                    self._best = (self._best + 1) % len(self.endpoints)
            time.sleep(PAUSE_S)

    def close(self) -> None:
        self._drop()

    # -- one endpoint --

    def _exchange(
        self, i: int, verb: str, path: str, body: bytes, deadline: float
    ) -> dict[str, Any]:
        """The answer of endpoint `i`. Raises _Fault, or EtcdRefused, as any member would refuse."""
        kept = self._connection is not None
        try:
            status, raw = self._once(i, verb, path, body, deadline)
        except (ConnectionError, http.client.BadStatusLine) as e:
            if not kept:
                raise _Fault(_said(e)) from e
            self._drop()  # etcd may only have closed a connection that was idle
            try:
                status, raw = self._once(i, verb, path, body, deadline)
            except (OSError, http.client.HTTPException) as again:
                raise _Fault(_said(again)) from again
        except (OSError, http.client.HTTPException) as e:
            raise _Fault(_said(e)) from e
        return self._read(status, raw, path)

    def _once(
        self, i: int, verb: str, path: str, body: bytes, deadline: float
    ) -> tuple[int, bytes]:
        if self._connection is not None and self._pid != os.getpid():
            self._drop()  # it belongs to the process that we were forked from
        if self._connection is None:
            self._connection, self._pid = _Connection(self.endpoints[i]), os.getpid()
        self._connection.limit(deadline)
        self._connection.request(verb, path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        raw = response.read(LONGEST_ANSWER + 1)
        if len(raw) > LONGEST_ANSWER:
            raise OSError("sends without end, which etcd does not")
        return response.status, raw

    def _read(self, status: int, raw: bytes, path: str) -> dict[str, Any]:
        if status == 400 and _HTTPS in raw:
            raise _Fault("speaks TLS; plain HTTP is needed")
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            if status == 404 and path.startswith("/v3/"):
                raise _Fault("has no JSON gateway at /v3: start etcd with --enable-grpc-gateway")
            raise _Fault(f"answers HTTP ({status}), but not as etcd does: is it another program?")
        if status != 200 or "error" in answer:
            code, why = answer.get("code"), answer.get("error", status)
            if code in _AWAY or not isinstance(code, int):
                raise _Fault(f"says: {why}")
            raise EtcdRefused(f"{self} refuses: {why}", code)
        if path.startswith("/v3/"):
            cluster = _cluster(answer)
            if cluster != (self.cluster or cluster):
                raise _Fault(f"is of etcd cluster {cluster}; the others are of {self.cluster}")
        return answer

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _unreachable(self, faults: list[str]) -> EtcdUnreachable:
        return EtcdUnreachable(
            f"no etcd answers at {self}: {'; '.join(faults) or 'no time was left to ask'}. Start "
            "etcd 3.4 or later there, give the client address of one that runs, or give a directory"
        )


class _Connection(http.client.HTTPConnection):
    """An HTTP connection whose every part ends by a time of time.monotonic: names are looked up in
    a thread, because a lookup has no limit of its own.
    """

    def __init__(self, endpoint: Endpoint):
        super().__init__(endpoint.host, endpoint.port)
        self._deadline = 0.0

    def limit(self, deadline: float) -> None:
        self._deadline = deadline
        if self.sock is not None:
            self.sock.settimeout(self._left())

    def connect(self) -> None:
        error: OSError = TimeoutError()
        for family, address in _look_up(self.host, self.port, self._left()):
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.settimeout(self._left())
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(self._left())
            except OSError as e:
                connection.close()
                error = e
                continue
            self.sock = connection
            return
        raise error

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 1e-3)


def _look_up(host: str, port: int, limit_s: float) -> list[tuple[int, Any]]:
    try:
        version = ipaddress.ip_address(host).version
        return [(socket.AF_INET if version == 4 else socket.AF_INET6, (host, port))]
    except ValueError:
        pass
    found: queue.SimpleQueue[list[tuple[int, Any]] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.put([(family, address) for family, _, _, _, address in answers])
        except OSError as e:
            found.put(e)

    threading.Thread(target=ask, name=f"look up {host}", daemon=True).start()
    try:
        answer = found.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"the name {host} was not looked up in time") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _cluster(answer: dict[str, Any]) -> str:
    try:
        return str(answer.get("result", answer)["header"]["cluster_id"])
    except (KeyError, TypeError):
        raise _Fault("answers JSON, but not as etcd does: is it another program?") from None


def _check_version(answer: dict[str, Any]) -> None:
    version = answer.get("etcdserver")
    if not isinstance(version, str):
        raise _Fault("answers HTTP, but not as etcd does: is it another program?")
    numbers = tuple(int(n) if n.isdigit() else 0 for n in version.split(".")[:2])
    if numbers < OLDEST:
        raise _Fault(f"is etcd {version}; 3.4 or later is needed, whose API v3 is at /v3")


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"does not answer in time{f' ({error})' if str(error) != 'timed out' else ''}"
    if isinstance(error, socket.gaierror):
        return f"has a name that cannot be looked up ({error.strerror})"
    if isinstance(error, http.client.RemoteDisconnected):
        return "closes the connection without an answer, as TLS ports do; plain HTTP is needed"
    if isinstance(error, http.client.HTTPException):
        return "answers, but not in HTTP: another program, or TLS, where plain HTTP is needed"
    return f"cannot be used ({getattr(error, 'strerror', None) or error})"
