"""Frames that are sent twice or late, and connections that are cut at once: nothing is lost."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest

from manyhands.server.local_store import LocalStore
from manyhands.server.network.cut_connections import SIGNAL, cut_at_signal
from manyhands.server.protocol import frame_faults
from manyhands.server.protocol.frame_faults import FrameFaults
from support.compare import assert_same_steps
from support.servers import batches, create, joined, play, servers


@pytest.fixture
def faults() -> Iterator[FrameFaults]:
    given = FrameFaults(delay_s=0.001, duplicate=1.0, random=random.Random(7))
    frame_faults.install(given)
    yield given
    frame_faults.install(None)


def test_frames_that_are_sent_twice_count_once(faults: FrameFaults) -> None:
    with servers(shards=2) as (server,), joined(server) as store:
        assert_same_steps(play(store), play(LocalStore()))
        stats = store.stats()
        assert stats["duplicates"] > 8 and faults.repeated > 8 and faults.delayed > faults.repeated
        counts = store.push_counts()
        assert counts["applied"] == [a + counts["commits"] for a in counts["acknowledged"]]
        store.close()


def test_without_faults_a_connection_shares_memory_and_sends_nothing_twice() -> None:
    assert frame_faults.installed() is None
    with servers() as (server,), joined(server) as store:
        create(store)
        assert store._sender.connections[0].shared
        assert store._sender.connections[0]._faults is None
        store.close()


def test_a_cut_server_goes_on_and_nothing_is_lost() -> None:
    assert SIGNAL is not None
    before = signal.getsignal(SIGNAL)
    with servers() as (server,), joined(server) as store:
        cut_at_signal(server._listener, None, server.held)
        try:
            create(store)
            for rows, updates in batches():
                store.push(rows, updates, lr=0.05)
                os.kill(os.getpid(), SIGNAL)
            store.flush()
        finally:
            signal.signal(SIGNAL, before)
        assert store.stats()["client_reconnects"] > 0
        counts = store.push_counts()
        assert counts["acknowledged"] == counts["applied"] == [len(batches())]
        store.close()
