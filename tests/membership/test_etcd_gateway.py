"""Addresses at which no usable etcd is are refused within seconds, with what to do."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manyhands import membership
from manyhands.errors import MembershipError
from manyhands.membership.etcd_gateway import Endpoint, parse
from support.etcd import Etcd, free_port, needs_etcd


@contextmanager
def http_server(answer: bytes, status: int = 200) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def refused(where: str) -> str:
    with pytest.raises(MembershipError) as caught:
        membership.open(f"etcd://{where}", "run")
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"<html>hello</html>", "answers HTTP (200), but not as etcd does: is it another program?"),
        (b'{"version": 7}', "answers HTTP, but not as etcd does"),
        (b'{"etcdserver": "2.3.8"}', "is etcd 2.3.8; 3.4 or later is needed, whose API v3"),
        (b'{"etcdserver": "3.3.1"}', "is etcd 3.3.1; 3.4 or later is needed"),
        (b'{"etcdserver": "3.5.0"}', "answers JSON, but not as etcd does"),
    ],
)
def test_http_that_is_no_etcd_or_an_old_one(answer: bytes, said: str) -> None:
    with http_server(answer) as port:
        message = refused(f"127.0.0.1:{port}")
    assert f"no etcd answers at etcd://127.0.0.1:{port}: 127.0.0.1:{port} {said}" in message
    assert "Start etcd 3.4 or later there, give the client address of one that runs" in message


def test_a_web_server_that_wants_tls() -> None:
    with http_server(b"Client sent an HTTP request to an HTTPS server.", 400) as port:
        assert "speaks TLS; plain HTTP is needed" in refused(f"127.0.0.1:{port}")


def test_nothing_listens_there() -> None:
    ports = free_port(), free_port()
    message = refused(f"127.0.0.1:{ports[0]},[::1]:{ports[1]}")
    assert f"127.0.0.1:{ports[0]} cannot be used (Connection refused); [::1]:{ports[1]} " in message


def test_a_listener_that_never_answers_or_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "does not answer in time" in refused(f"127.0.0.1:{silent.getsockname()[1]}")

    def hang_up(listener: socket.socket, words: bytes) -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(words)
        connection.close()

    for words, said in (
        (b"", "closes the connection without an answer"),
        (b"\x15\x03\x01\x00\x02\x02\x16", "not in HTTP: another program, or TLS"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=hang_up, args=(listener, words))
            thread.start()
            assert said in refused(f"127.0.0.1:{listener.getsockname()[1]}")
            thread.join()


def test_a_name_that_cannot_be_looked_up() -> None:
    message = refused("no-such-host.invalid:2379")
    assert "has a name that cannot be looked up" in message or "was not looked up" in message


@needs_etcd
def test_an_etcd_that_wants_tls_or_has_no_gateway(tmp_path: Path) -> None:
    for name, options, said in (
        ("tls", {"tls": True}, "without an answer, as TLS ports do; plain HTTP is needed"),
        ("grpc", {"gateway": False}, "has no JSON gateway at /v3"),
    ):
        (tmp_path / name).mkdir()
        etcd = Etcd(tmp_path / name, **options)
        try:
            assert said in refused(f"127.0.0.1:{etcd.port}")
        finally:
            etcd.kill()


def test_addresses() -> None:
    assert parse("a:1, b:2,c") == (Endpoint("a", 1), Endpoint("b", 2), Endpoint("c", 2379))
    assert str(parse("[::1]:7")[0]) == "[::1]:7"
    for wrong in ("", "a:1,", ":2379", "a:x", "a:99999", "a:1/v3", "me:secret@a:1", "a..b:1"):
        with pytest.raises(MembershipError, match="is no address of an etcd member; give etcd://"):
            membership.open(f"etcd://{wrong}", "run")
    for ttl_s in (0, 1, -5, 2.5, True):
        with pytest.raises(MembershipError, match="whole seconds from 2 to 3600"):
            membership.open("etcd://a:1", "run", ttl_s=ttl_s)  # type: ignore[arg-type]
