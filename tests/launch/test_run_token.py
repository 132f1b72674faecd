"""The run's token: no secret in the rendezvous, and nothing believed that is not signed."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist

from manyhands.core import Job, ProcessInfo
from manyhands.errors import LaunchError
from manyhands.exchange import segments
from manyhands.launch import run_token, servers
from manyhands.launch.hosts import HostsLauncher
from manyhands.launch.run_token import read_private, sign, verify


class Watched(dist.HashStore):
    """A store in which somebody reads everything."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        self.seen.append(value if isinstance(value, bytes) else value.encode())
        super().set(key, value)


def test_only_who_knows_the_token_can_sign_and_for_one_key_only() -> None:
    raw = sign("secret", "error/0", "it broke").encode()
    assert verify("secret", "error/0", raw) == "it broke"
    assert verify("guess", "error/0", raw) is None
    assert verify("secret", "error/1", raw) is None
    assert verify("secret", "error/0", raw[:-1] + b"!") is None
    assert verify("secret", "error/0", b"it broke") is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_token_is_not_in_the_rendezvous_and_its_file_is_gone(ranks: int) -> None:
    store = Watched()
    places = [ProcessInfo(r, ranks, host="here") for r in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        here = list(
            pool.map(
                lambda p: servers.start(1, p, store, workers=ranks, timeout_s=60.0, env={}), places
            )
        )
        assert len({each.token for each in here}) == 1 and len(here[0].token) == 64
        assert not any(here[0].token.encode() in value for value in store.seen)
        assert not list(Path(tempfile.gettempdir()).glob(f"{run_token.PREFIX}*"))
        list(pool.map(servers.Servers.close, here))


def test_ranks_of_several_machines_need_a_token_from_outside() -> None:
    place = ProcessInfo(0, 2, host="one", started_by="torchrun")
    with pytest.raises(LaunchError, match=r"need a token that all 2 ranks know.*MANYHANDS_TOKEN"):
        run_token.agree(place, dist.HashStore(), False, lambda key, what: b"")


def test_a_forged_error_is_not_believed_and_a_forged_address_is_refused() -> None:
    store = dist.HashStore()
    store.set("servers/error", '"the run is over"')
    with pytest.raises(LaunchError, match="waited in vain for server 0 to start"):
        servers._address(store, 0, time.monotonic() + 0.2, "secret")
    store.set("servers/error", sign("secret", "servers/error", "rank 1: no memory"))
    with pytest.raises(LaunchError, match=r"^rank 1: no memory$"):
        servers._address(store, 0, time.monotonic() + 5, "secret")
    store.set("servers/0", '{"address": "127.0.0.1:1"}')
    with pytest.raises(LaunchError, match="address of server 0 in the rendezvous is not signed"):
        servers._address(store, 0, time.monotonic() + 5, "secret")


@pytest.mark.parametrize("how", ["elsewhere", "other name", "readable", "link"])
def test_only_a_private_file_of_ours_is_read_as_a_token(how: str, tmp_path: Path) -> None:
    folder = tmp_path if how == "elsewhere" else Path(tempfile.gettempdir())
    handle, name = tempfile.mkstemp(
        prefix="other-" if how == "other name" else run_token.PREFIX, dir=folder
    )
    os.close(handle)
    path = Path(name)
    try:
        if how == "readable":
            path.chmod(0o644)
        if how == "link":
            path.unlink()
            path.symlink_to("/etc/hostname")
        with pytest.raises((LaunchError, OSError)):
            read_private(path)
    finally:
        path.unlink()


@pytest.mark.parametrize("how", ["elsewhere", "other name", "readable", "link", "short"])
def test_only_a_segment_of_ours_is_mapped(how: str, tmp_path: Path) -> None:
    folder = tmp_path if how == "elsewhere" else segments.directory()
    path = folder / f"{'other-' if how == 'other name' else segments.PREFIX}0-0-{os.getpid()}"
    path.write_bytes(bytes(4096))
    path.chmod(stat.S_IRUSR | stat.S_IWUSR | (stat.S_IROTH if how == "readable" else 0))
    if how == "link":
        path.unlink()
        (tmp_path / "target").write_bytes(bytes(4096))
        (tmp_path / "target").chmod(0o600)
        path.symlink_to(tmp_path / "target")
    try:
        with pytest.raises((LaunchError, OSError)):
            segments.attach(path, 8192 if how == "short" else 4096)
    finally:
        path.unlink()


def test_a_report_that_no_rank_has_signed_does_not_end_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody who reaches the rendezvous writes an error there before any rank does."""
    launcher = HostsLauncher()
    rendezvous = launcher._rendezvous

    def forged(port: int) -> dist.TCPStore:
        store = rendezvous(port)
        keys = dist.PrefixStore("manyhands/0", dist.TCPStore("127.0.0.1", store.port))
        keys.set("error/0", '{"kind": "TaskError", "text": "forged", "time": 0, "ours": true}')
        return store

    monkeypatch.setattr(launcher, "_rendezvous", forged)
    found = launcher.launch(Job(1, cloudpickle.dumps(lambda: {"trained": 1})))
    assert found == {"trained": 1}
