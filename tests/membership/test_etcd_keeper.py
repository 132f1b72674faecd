"""Claims and states in a real etcd: pauses, restarts, lost answers, wrong clocks."""

from __future__ import annotations

import ast
import base64
import itertools
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from manyhands import membership
from manyhands.errors import Fenced, MembershipError, RunBusy
from manyhands.membership.etcd_gateway import Gateway, parse
from support.etcd import Etcd, Proxy, free_port, needs_etcd
from support.paths import PACKAGE
from support.processes import start

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path_factory.mktemp("etcd"))
    yield etcd
    etcd.kill()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd that the test may stop."""
    etcd = Etcd(tmp_path)
    yield etcd
    etcd.kill()


@pytest.fixture
def proxy(running: Etcd) -> Iterator[Proxy]:
    made = Proxy(running.port)
    yield made
    made.close()


def ask(etcd: Etcd, path: str, **body: Any) -> dict[str, Any]:
    gateway, limit = Gateway(parse(f"127.0.0.1:{etcd.port}"), 5), time.monotonic() + 5
    try:
        return gateway.call(path, body, lambda: limit)
    finally:
        gateway.close()


def key(run: str, of: str) -> str:
    return base64.b64encode(f"/manyhands/{run}/{of}".encode()).decode()


def hold(where: str, run: str, ttl_s: int, parent: Connection) -> None:
    """Claim, save, then at every word of the parent try to save again."""
    keeper = membership.open(where, run, ttl_s=ttl_s)
    keeper.claim("old coordinator", wait_s=20)
    keeper.save(b"of the old one")
    parent.send(keeper.term)
    while True:
        word = parent.recv()
        try:
            keeper.save(word)
            parent.send("saved")
        except Fenced as e:
            parent.send(f"lost={keeper.lost.is_set()} {e}")


# -- one coordinator --


def test_one_holds_the_claim_the_next_gets_it_with_the_state(running: Etcd) -> None:
    first = membership.open(running.url, "turns")
    assert first.load() is None
    first.claim("server 0 of alpha")
    for state in (b"", b"a", bytes(range(256)) * 40):
        first.save(state)
        assert first.load() == state
    second = membership.open(running.url, "turns")
    with pytest.raises(
        RunBusy,
        match=rf"run 'turns' has a coordinator already.*server 0 of alpha \(pid {os.getpid()} on .*"
        r"stop that process, or give this run another name.*lease \(5 s",
    ):
        second.claim("server 1")
    with membership.open(running.url, "other/run") as other:
        other.claim("of another run")
        assert other.load() is None
    first.close()
    second.claim("server 1")
    assert second.term > first.term > 0 and second.load() == state
    with pytest.raises(Fenced, match="gave up"):
        first.save(b"late")
    second.close()
    kept = ask(running, "/v3/kv/range", key=key("turns", "claim"))
    assert "kvs" not in kept


def test_a_killed_holder_is_followed_when_its_lease_ends(running: Etcd) -> None:
    process, ours = start(hold, (running.url, "killed", 4))
    old = ours.recv()
    process.kill()
    process.join()
    ours.close()
    with membership.open(running.url, "killed", ttl_s=2) as keeper:
        with pytest.raises(RunBusy, match="old coordinator"):
            keeper.claim("new")
        keeper.claim("new", wait_s=30)
        assert keeper.term > old and keeper.load() == b"of the old one"


def test_a_holder_paused_past_its_lease_is_fenced_when_it_goes_on(running: Etcd) -> None:
    process, ours = start(hold, (running.url, "paused", 3))
    assert process.pid is not None
    try:
        ours.recv()
        ours.send(b"before")
        assert ours.recv() == "saved"
        os.kill(process.pid, signal.SIGSTOP)
        with membership.open(running.url, "paused", ttl_s=3) as keeper:
            keeper.claim("new coordinator", wait_s=30)
            assert keeper.load() == b"before"
            keeper.save(b"of the new one")
            ours.send(b"late")  # before it can notice anything
            os.kill(process.pid, signal.SIGCONT)
            answer = ours.recv()
            assert answer.startswith("lost=True") and "'paused'" in answer
            assert keeper.load() == b"of the new one"
            keeper.save(b"and goes on")
    finally:
        process.kill()
        process.join()
        ours.close()


def test_etcd_alone_fences_a_holder_that_still_believes_in_its_lease(running: Etcd) -> None:
    """Its clock has stopped, as that of a suspended machine: the compare must do it."""
    old = membership.open(running.url, "believes", ttl_s=100)
    old.claim("old")
    old.save(b"before")
    revoked = ask(running, "/v3/lease/revoke", ID=old._lease)  # type: ignore[attr-defined]
    assert "header" in revoked
    with membership.open(running.url, "believes") as new:
        new.claim("new")
        assert not old.lost.is_set()
        with pytest.raises(Fenced, match=r"gave the claim to new \(pid"):
            old.save(b"late")
        assert old.lost.is_set() and new.load() == b"before"
    old.close()


def test_a_claim_that_somebody_deletes_is_noticed_without_a_save(running: Etcd) -> None:
    with membership.open(running.url, "deleted", ttl_s=2) as keeper:
        keeper.claim("one")
        ask(running, "/v3/kv/deleterange", key=key("deleted", "claim"))
        assert keeper.lost.wait(30)
        with pytest.raises(Fenced, match=r"deleted its claim.*End this process"):
            keeper.check()


# -- time --


def test_the_time_of_day_does_not_matter(running: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = itertools.cycle([0.0, 4e9, -1e6, 1e12])
    monkeypatch.setattr("time.time", lambda: next(jumps))
    monkeypatch.setattr("time.time_ns", lambda: int(next(jumps)))
    with membership.open(running.url, "skew", ttl_s=3) as keeper:
        keeper.claim("one")
        end = time.monotonic() + 4  # longer than its lease
        while time.monotonic() < end:
            keeper.save(b"goes on")
            time.sleep(0.05)
        with membership.open(running.url, "skew", ttl_s=3) as other, pytest.raises(RunBusy):
            other.claim("two")
        assert not keeper.lost.is_set()


def test_no_file_of_the_room_asks_for_the_time_of_day() -> None:
    files = sorted((PACKAGE / "membership").glob("*.py"))
    assert len(files) > 5
    for path in files:
        names = {
            ast.unparse(n)
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Attribute)
        }
        assert not {n for n in names if n.startswith(("time.", "datetime."))} - {
            "time.monotonic",
            "time.sleep",
        }, path


# -- etcd comes and goes --


def test_a_restart_of_etcd_is_sat_out(own: Etcd) -> None:
    with membership.open(own.url, "run", ttl_s=20) as keeper:
        keeper.claim("one")
        keeper.save(b"before")
        own.kill()
        own.start()
        keeper.save(b"after")
        assert keeper.load() == b"after" and not keeper.lost.is_set()
        with membership.open(own.url, "run") as other, pytest.raises(RunBusy, match="one"):
            other.claim("two")


def test_a_holder_without_etcd_for_its_lease_is_lost(own: Etcd) -> None:
    with membership.open(own.url, "run", ttl_s=2) as keeper:
        keeper.claim("one")
        keeper.save(b"before")
        own.kill()
        with pytest.raises(Fenced, match=r"was not renewed for 1\.6 s of 2"):
            keeper.save(b"nobody has this")
        assert keeper.lost.is_set()
        own.start()
        with pytest.raises(Fenced):  # for good: it must not go on when etcd is back
            keeper.save(b"late")
        with membership.open(own.url, "run", ttl_s=2) as other:
            other.claim("two", wait_s=30)
            assert other.load() == b"before"


# -- answers that are lost or late --


def test_a_save_whose_answer_was_lost_is_repeated_and_kept_once(
    running: Etcd, proxy: Proxy
) -> None:
    with membership.open(f"etcd://127.0.0.1:{proxy.port}", "answers") as keeper:
        keeper.claim("one")
        keeper.save(b"first")
        proxy.lose = 3
        keeper.save(b"second")
        assert proxy.lose < 3 and keeper.load() == b"second"
        proxy.lose = 0
        keeper.save(b"third")
        kept = ask(running, "/v3/kv/range", key=key("answers", "state"))["kvs"][0]
        assert kept["version"] == "3"


def test_a_claim_whose_answer_was_lost_is_recognised_as_our_own(proxy: Proxy) -> None:
    with membership.open(f"etcd://127.0.0.1:{proxy.port}", "claims") as keeper:
        proxy.which, proxy.lose = b'"CREATE"', 2
        keeper.claim("one")
        assert proxy.lose < 2 and keeper.term > 0
        proxy.lose = 0
        keeper.save(b"mine")
        assert keeper.load() == b"mine"


def test_a_save_that_was_given_up_never_replaces_a_later_one(running: Etcd, proxy: Proxy) -> None:
    where = f"etcd://127.0.0.1:{proxy.port},127.0.0.1:{running.port}"
    with membership.open(where, "late", ttl_s=4) as keeper:
        keeper.claim("one")
        proxy.delay = 1
        keeper.save(b"slow")  # given up at the proxy, and saved by the other
        assert proxy.delay == 0
        keeper.save(b"newer")
        proxy.released.set()
        assert proxy.carried_out.wait(30)
        assert keeper.load() == b"newer"
        keeper.save(b"newest")
        assert keeper.load() == b"newest"


def test_a_state_changed_by_another_program_is_not_written_over(running: Etcd) -> None:
    with membership.open(running.url, "foreign") as keeper:
        keeper.claim("one")
        keeper.save(b"mine")
        value = base64.b64encode(b"x").decode()
        ask(running, "/v3/kv/put", key=key("foreign", "state"), value=value)
        for act in (keeper.load, lambda: keeper.save(b"mine again")):
            with pytest.raises(MembershipError, match="is no state of a coordinator; delete"):
                act()
        ask(running, "/v3/kv/deleterange", key=key("foreign", "state"))
        with pytest.raises(MembershipError, match="another program changed the state"):
            keeper.save(b"mine again")


def test_a_state_too_large_for_etcd_is_refused_and_the_one_before_stays(running: Etcd) -> None:
    with membership.open(running.url, "large") as keeper:
        keeper.claim("one")
        keeper.save(b"small")
        with pytest.raises(MembershipError, match=r"2000000 bytes is too large.*max-request-bytes"):
            keeper.save(bytes(2_000_000))
        assert keeper.load() == b"small"
        keeper.save(b"small again")


# -- several members --


def test_a_member_that_does_not_answer_is_passed_over(running: Etcd) -> None:
    proxy = Proxy(running.port)
    where = f"127.0.0.1:{free_port()},127.0.0.1:{proxy.port},localhost:{running.port}"
    with membership.open(f"etcd://{where}", "members") as keeper:
        keeper.claim("one")
        keeper.save(b"by the proxy")
        proxy.close()
        keeper.save(b"by the last")
        assert keeper.load() == b"by the last"


def test_members_of_two_clusters_are_refused(running: Etcd, own: Etcd) -> None:
    where = f"{running.url},127.0.0.1:{own.port}"
    with pytest.raises(MembershipError, match=r"several etcd clusters .* one cluster"):
        membership.open(where, "run")
    gateway = Gateway(parse(where.removeprefix("etcd://")), 1)
    gateway.cluster = ask(own, "/v3/kv/range", key="YQ==")["header"]["cluster_id"]
    limit = time.monotonic() + 10
    answer = gateway.call("/v3/kv/range", {"key": "YQ=="}, lambda: limit)
    assert answer["header"]["cluster_id"] == gateway.cluster  # the first member was passed over
    gateway.close()
