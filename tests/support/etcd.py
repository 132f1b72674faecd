"""A real etcd of one member, on free ports, and a proxy before it that loses or delays answers."""

from __future__ import annotations

import http.client
import http.server
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None,
    reason="needs the program etcd 3.4 or later (Debian, Ubuntu: apt install etcd-server)",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Etcd:
    """`tls`: with a certificate that it makes itself."""

    def __init__(self, folder: Path, tls: bool = False, gateway: bool = True):
        self.folder, self.port = folder, free_port()
        scheme, peer = "https" if tls else "http", f"http://127.0.0.1:{free_port()}"
        client = f"{scheme}://127.0.0.1:{self.port}"
        self._line = ["etcd", f"--data-dir={folder}/data", "--log-outputs=stderr"]
        self._line += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        self._line += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        self._line += [f"--initial-cluster=default={peer}"]
        self._line += ["--heartbeat-interval=50", "--election-timeout=500"]
        self._line += ["--auto-tls"] if tls else []
        self._line += [] if gateway else ["--enable-grpc-gateway=false"]
        self._tls, self._process = tls, None
        self.start()

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def start(self) -> None:
        log = (self.folder / "etcd.log").open("ab")
        with log:
            self._process = subprocess.Popen(self._line, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((self.folder / "etcd.log").read_text()[-3000:])
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _healthy(self) -> bool:
        try:
            if self._tls:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
            connection.request("GET", "/health")
            return b"true" in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False


class Proxy:
    """Hands requests on to `port`. `lose`: how many next saves it carries out and never answers.

    `delay`: how many next saves it keeps until `released`, and only then carries out. `which`: what
    is in the text of a save, and of no other request; or of a claim.
    """

    def __init__(self, port: int):
        proxy = self
        self.lose = self.delay = 0
        self.which = b'"MOD"'
        self.released = threading.Event()
        self.carried_out = threading.Event()  # all that were delayed

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                saves = proxy.which in body
                if saves and proxy.delay:
                    proxy.delay -= 1
                    proxy.released.wait(30)
                    proxy._ask(port, self.command, self.path, body)
                    proxy.carried_out.set()
                    self.close_connection = True
                    return
                status, raw = proxy._ask(port, self.command, self.path, body)
                if saves and proxy.lose:
                    proxy.lose -= 1
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @staticmethod
    def _ask(port: int, verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(verb, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read()
        connection.close()
        return response.status, raw

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
