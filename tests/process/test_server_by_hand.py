"""Servers started by hand: `manyhands server`, and workers that find it by DMLC_ variables."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manyhands.core import Table
from manyhands.errors import ServerLost, StoreError
from manyhands.server.client.server_store import ServerStore
from support.commands import CLI, Command, command, environ

pytestmark = pytest.mark.slow  # processes by the dozen: run by hand, -m slow

SUM = Table("sum", dim=2, optimizer="sum", init="zeros")
SERVER = [*CLI, "server"]


def said(job: Command, pattern: str) -> re.Match[str]:
    job.until(lambda: re.search(pattern, job.out) is not None, f"line with {pattern!r}")
    found = re.search(pattern, job.out)
    assert found is not None
    return found


def use(address: str, token: str, shards: int) -> None:
    store = ServerStore(address, 0, 1, token, timeout_s=60.0)
    assert len(store._sender.connections) == shards
    store.create(SUM)
    ids = torch.arange(-500, 500)
    store.push({"sum": ids}, {"sum": torch.ones(1000, 2)}).wait()
    assert store.pull({"sum": ids})["sum"].sum().item() == 2000.0
    store.close()


def test_one_server_says_what_workers_need_and_ends_with_their_run(tmp_path: Path) -> None:
    with command(tmp_path, [*SERVER, "--shards", "2", "--memory", "64MiB"]) as job:
        address = said(job, r"server +at (127\.0\.0\.1:\d+), 2 shards, coordinates 1 server")[1]
        root = said(job, r"workers +(DMLC_.*) manyhands run SCRIPT data=N servers=1")[1]
        env = dict(word.split("=", 1) for word in root.split())
        assert f"{env['DMLC_PS_ROOT_URI']}:{env['DMLC_PS_ROOT_PORT']}" == address
        secret = Path(env["MANYHANDS_TOKEN_FILE"])
        with pytest.raises(StoreError, match="the token is not the one of this server"):
            ServerStore(address, 0, 1, "guessed", timeout_s=5.0)
        use(address, secret.read_text().strip(), shards=2)
        assert (
            job.end() == 0
            and job.out.endswith("the run is over: all workers have left\n")
            and job.err == ""
        )
        assert not secret.exists(), "a token made for this time only goes with the server"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_also_while_a_worker_is_there(
    tmp_path: Path, number: signal.Signals
) -> None:
    with command(tmp_path, SERVER, MANYHANDS_TOKEN="of this run") as job:
        address = said(job, r"server +at (127\.0\.0\.1:\d+), 1 shard")[1]
        said(job, r"workers ")
        store = ServerStore(address, 0, 1, "of this run", timeout_s=2.0)
        job.process.send_signal(number)
        assert job.end() == 0 and job.out.endswith("stopped\n") and job.err == ""
        with pytest.raises(ServerLost, match=f"server {address}"):
            store.tick(0)
        store.close()  # who is gone needs no goodbye


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, Command, list[Command]]]:
    """A scheduler and two servers by PS-Lite's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "2",
    }
    root |= {"MANYHANDS_TOKEN": "of this run"}
    with (
        command(
            tmp_path / "one", SERVER, **root, DMLC_ROLE="server"
        ) as one,  # before the scheduler: it waits
        command(tmp_path / "two", SERVER, **root, DMLC_ROLE="server") as two,
        command(tmp_path / "scheduler", SERVER, **root, DMLC_ROLE="scheduler") as scheduler,
    ):
        said(
            scheduler, rf"coordinator +at 127\.0\.0\.1:{port}, coordinates 2 servers for 1 workers"
        )
        for job in (one, two):
            said(
                job,
                r"server +at 127\.0\.0\.1:\d+, 1 shard, joins the coordinator at "
                rf"127\.0\.0\.1:{port}",
            )
        yield f"127.0.0.1:{port}", scheduler, [one, two]


def test_a_scheduler_and_two_servers_end_with_the_run(
    cluster: tuple[str, Command, list[Command]],
) -> None:
    address, scheduler, servers = cluster
    use(address, "of this run", shards=2)
    for job in (scheduler, *servers):
        assert (
            job.end() == 0
            and job.out.endswith("the run is over: all workers have left\n")
            and job.err == ""
        )


def test_servers_whose_scheduler_was_killed_say_so(
    cluster: tuple[str, Command, list[Command]],
) -> None:
    address, scheduler, servers = cluster
    store = ServerStore(address, 0, 1, "of this run", timeout_s=2.0)  # all have met
    scheduler.process.kill()
    for job in servers:
        assert (
            job.end() == 1
            and f"the coordinator at {address} is gone" in job.err
            and "Traceback" not in job.err
        )
    with pytest.raises(ServerLost, match=f"server {address}"):
        store.tick(0)
    store.close()


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        ([], {"DMLC_ROLE": "worker"}, "a worker is the training script, not a server"),
        (["--bind", "203.0.113.1", "--token-file", "made"], {}, "cannot listen on 203.0.113.1"),
    ],
)
def test_what_cannot_be_served_is_one_message(
    tmp_path: Path, words: list[str], env: dict[str, str], says: str
) -> None:
    with command(tmp_path, [*SERVER, *words], **env) as job:
        assert job.end() in (1, 2)
    assert says in job.err and "Traceback" not in job.err and job.out == ""


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with command(tmp_path, [*SERVER, "--port", str(port)]) as job:
            assert job.end() in (1, 2)
    assert (
        f"port {port} on 127.0.0.1 is in use by another process" in job.err
        and "Traceback" not in job.err
    )


def test_on_a_terminal_one_line_tells_how_it_goes(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        SERVER, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environ()
    )
    os.close(theirs)
    text = ""
    try:
        while not re.search(r"\x1b\[2K0 rows  0 B  0 rows/s  0 B/s", text):
            text += os.read(ours, 4096).decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


TLS = """
import sys, ssl
import torch
from manyhands.core import Table
from manyhands.server.client.server_store import ServerStore
address, token, ca = sys.argv[1:]
store = ServerStore(address, 0, 1, token, timeout_s=30.0, tls=ssl.create_default_context(cafile=ca))
store.create(Table("sum", dim=2, optimizer="sum", init="zeros"))
store.push({"sum": torch.arange(9)}, {"sum": torch.ones(9, 2)}).wait()
print(store.pull({"sum": torch.arange(9)})["sum"].sum().item())
store.close()
"""


def test_with_tls_workers_check_the_certificate(tmp_path: Path) -> None:
    openssl = subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -addext "
        "subjectAltName=IP:127.0.0.1 "
        "-keyout key.pem -out cert.pem".split(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    if openssl.returncode:
        pytest.skip(f"no certificate can be made here: {openssl.stderr[-200:]}")
    (tmp_path / "token").write_text("of this run")
    words = ["--tls-cert", "cert.pem", "--tls-key", "key.pem", "--token-file", "token"]
    with command(tmp_path, [*SERVER, *words]) as job:
        address = said(job, r"server +at (127\.0\.0\.1:\d+), 1 shard")[1]
        client = [sys.executable, "-c", TLS, address, "of this run", str(tmp_path / "cert.pem")]
        done = subprocess.run(client, capture_output=True, text=True, env=environ(), timeout=90)
        assert done.stdout == "18.0\n", done.stderr[-2000:]
        assert job.end() == 0
