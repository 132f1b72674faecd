"""Claims and states in a directory: one holder, and no acknowledged save is lost by kill -9."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from manyhands import membership
from manyhands.errors import Fenced, MembershipError, RunBusy
from support.processes import start

KILLS = 20


def hold(where: str, who: str, parent: Connection) -> None:
    """Claim, say the term or what went wrong, and stay until told to end."""
    keeper = membership.open(where, "run")
    try:
        keeper.claim(who)
        parent.send(keeper.term)
    except RunBusy as e:
        parent.send(str(e))
    parent.recv()


@contextmanager
def holder(where: Path, who: str) -> Iterator[tuple[BaseProcess, int | str]]:
    process, ours = start(hold, (str(where), who))
    try:
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()


def state_of(number: int) -> bytes:
    """Of one to five pages, so that kills find writes half-way; all of it follows from `number`."""
    made = random.Random(number)
    return number.to_bytes(8, "little") + made.randbytes(made.randrange(20_000))


def save_numbers(where: str, parent: Connection) -> None:
    keeper = membership.open(where, "run")
    keeper.claim("writer")
    before = keeper.load()
    number = int.from_bytes(before[:8], "little") if before else 0
    while True:
        number += 1
        keeper.save(state_of(number))
        parent.send(number)


# -- one coordinator --


def test_a_second_coordinator_is_refused_while_the_first_lives_and_claims_after_its_kill(
    tmp_path: Path,
) -> None:
    with holder(tmp_path, "server 0") as (first, term):
        assert term == 1
        with holder(tmp_path, "server 1") as (_, refused):
            assert isinstance(refused, str)
            assert f"server 0 (pid {first.pid} on " in refused and "'run'" in refused
            assert "stop that process, or give this run another name" in refused
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        first.join()
        with holder(tmp_path, "server 1") as (_, term):
            assert term == 2


def test_one_that_waits_claims_when_the_other_gives_up(tmp_path: Path) -> None:
    first, second = membership.open(tmp_path, "run"), membership.open(tmp_path, "run")
    first.claim("first")
    with pytest.raises(RunBusy, match="first"):
        second.claim("second", wait_s=0.1)
    first.close()
    second.claim("second", wait_s=5)
    assert second.term > first.term
    with pytest.raises(Fenced, match="gave up its claim"):
        first.save(b"late")
    assert second.load() is None
    second.close()


def test_runs_do_not_see_each_other_whatever_they_are_called(tmp_path: Path) -> None:
    names = ["a", "a/b", "..", "a.state", "ü b"]
    keepers = [membership.open(tmp_path, name) for name in names]
    for keeper in keepers:
        keeper.claim("one")
        keeper.save(keeper.run.encode())
    assert [keeper.load() for keeper in keepers] == [name.encode() for name in names]
    for keeper in keepers:
        keeper.close()
    assert not list(tmp_path.parent.glob("*.claim"))


def test_a_fork_of_the_holder_keeps_no_claim_and_saves_nothing(tmp_path: Path) -> None:
    keeper = membership.open(tmp_path, "run")
    keeper.claim("parent")
    keeper.save(b"parent")
    reader, writer = os.pipe()
    end_reader, end_writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            keeper.save(b"child")
        except Fenced:
            os.write(writer, b"fenced")
        os.close(end_writer)
        os.read(end_reader, 1)
        os._exit(0)
    try:
        os.close(writer)
        assert os.read(reader, 6) == b"fenced"
        keeper.close()
        other = membership.open(tmp_path, "run")
        other.claim("other")  # though the child lives
        assert other.load() == b"parent"
        other.close()
    finally:
        for handle in (reader, end_reader, end_writer):
            os.close(handle)
        os.waitpid(child, 0)


def test_a_holder_whose_claim_file_was_deleted_is_fenced(tmp_path: Path) -> None:
    keeper = membership.open(tmp_path, "run")
    keeper.claim("first")
    keeper.save(b"kept")
    (tmp_path / "run.claim").unlink()
    with membership.open(tmp_path, "run") as other:
        other.claim("second")
        assert other.term > keeper.term
        assert not keeper.lost.is_set()
        with pytest.raises(Fenced, match=r"no longer coordinates run 'run'.*made anew"):
            keeper.save(b"late")
        assert keeper.lost.is_set() and other.load() == b"kept"
    keeper.close()


# -- the state --


def test_kills_at_any_moment_lose_no_acknowledged_save_and_yield_no_garbage(
    tmp_path: Path,
) -> None:
    chance = random.Random(0)
    for term in range(1, KILLS + 1):
        process, ours = start(save_numbers, (str(tmp_path),))
        last = ours.recv()
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        process.join()
        try:
            while True:
                last = ours.recv()
        except (EOFError, OSError):
            ours.close()
        reader = membership.open(tmp_path, "run")
        state = reader.load()
        assert state is not None
        found = int.from_bytes(state[:8], "little")
        assert last <= found <= last + 1 and state == state_of(found)
        with membership.open(tmp_path, "run") as keeper:
            keeper.claim("looks")
            assert keeper.term == 2 * term and keeper.load() == state
    assert last > KILLS


def test_a_reader_without_a_claim_sees_whole_states_while_another_saves(tmp_path: Path) -> None:
    process, ours = start(save_numbers, (str(tmp_path),))
    ours.recv()
    try:
        reader, before = membership.open(tmp_path, "run"), 0
        for _ in range(200):
            state = reader.load()
            assert state is not None
            number = int.from_bytes(state[:8], "little")
            assert state == state_of(number) and number >= before
            before = number
    finally:
        process.kill()
        process.join()
        ours.close()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_slot_leaves_the_state_before_and_two_are_named(
    tmp_path: Path, damage: str
) -> None:
    def spoil(slot: Path) -> None:
        raw = bytearray(slot.read_bytes())
        raw[-1] ^= 1
        content = {"cut": bytes(raw[:-1]), "flip": bytes(raw), "empty": b""}
        slot.unlink() if damage == "gone" else slot.write_bytes(content[damage])

    with membership.open(tmp_path, "run") as keeper:
        keeper.claim("first")
        keeper.save(b"older")
        keeper.save(b"newer")
    slots = sorted(tmp_path.glob("run.state.?"), key=lambda slot: b"newer" in slot.read_bytes())
    spoil(slots[1])
    with membership.open(tmp_path, "run") as keeper:
        assert keeper.load() == b"older"
        keeper.claim("second")
        assert keeper.term == 2 and keeper.load() == b"older"
        keeper.save(b"again")
        keeper.save(b"and again")
        assert keeper.load() == b"and again"
    for slot in slots:
        spoil(slot)
    reader = membership.open(tmp_path, "run")
    if damage == "gone":  # as the message says: a new start, whose term is new too
        assert reader.load() is None
    else:
        with pytest.raises(
            MembershipError, match=r"both slots .*run\.state\.0 and .*run\.state\.1"
        ):
            reader.load()
        with pytest.raises(MembershipError, match=r"both slots .* delete both to start"):
            reader.claim("third")
        for slot in slots:
            slot.unlink()
    with membership.open(tmp_path, "run") as keeper:
        keeper.claim("third")
        assert keeper.load() is None and keeper.term == 3


def test_states_of_any_size_are_kept_with_fsync_too(tmp_path: Path) -> None:
    with membership.open(tmp_path / "new" / "folder", "run", fsync=True) as keeper:
        assert keeper.load() is None
        keeper.claim("one")
        for state in (b"", b"x" * 3_000_000, b"short", b""):
            keeper.save(state)
            assert keeper.load() == state


def test_a_save_that_fails_is_an_error_and_leaves_the_one_before(tmp_path: Path) -> None:
    with membership.open(tmp_path, "run") as keeper:
        keeper.claim("one")
        keeper.save(b"kept")
        limit, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.SIG_IGN
        handler = signal.signal(signal.SIGXFSZ, ignored)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
        try:
            for _ in range(2):  # both try the same slot: the other has what was kept
                with pytest.raises(MembershipError, match=r"File too large.*saved last is as it"):
                    keeper.save(b"x" * 100_000)
                assert keeper.load() == b"kept"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, handler)
        keeper.save(b"after")
        assert keeper.load() == b"after"


# -- refused --


def test_what_cannot_be_used_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MembershipError, match="one character or more"):
        membership.open(tmp_path, "")
    with pytest.raises(MembershipError, match=r"ttl_s=3 .*leave ttl_s out"):
        membership.open(tmp_path, "run", ttl_s=3)
    with pytest.raises(MembershipError, match=r"redis://.*etcd://host:port"):
        membership.open("redis://here", "run")
    keeper = membership.open(tmp_path, "run")
    with pytest.raises(MembershipError, match="call claim first"):
        keeper.save(b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(MembershipError, match="Not a directory"):
        membership.open(tmp_path / "file" / "x", "run").claim("one")
    with pytest.raises(MembershipError, match="File name too long"):
        membership.open(tmp_path, "r" * 300).claim("one")
    with membership.open(tmp_path, "run") as claimed:
        claimed.claim("one")
        with pytest.raises(MembershipError, match="open another"):
            claimed.claim("one")

    def no_locks(*_: object) -> None:  # as NFS without its lock daemon answers
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(MembershipError, match=r"gives no locks \(No locks available\).*local disk"):
        keeper.claim("one")
