"""A request that names shared memory which is not there is refused before any of it is applied."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from manyhands.core import Table
from manyhands.server.network.request_loop import RequestLoop
from manyhands.server.network.shard_endpoint import ServerStatus, ShardEndpoint
from manyhands.server.protocol import arena
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Malformed
from manyhands.server.shard import Shard
from manyhands.server.table_updates import TablePull

IDS, DIM = 4, 2
PAYLOAD = 64 + 64  # ids and updates, each at a multiple of 64


@pytest.mark.parametrize(
    "answer_at", [64, 1 << 20, -64, 33], ids=["inside", "behind", "before", "between"]
)
def test_a_push_is_applied_only_where_there_is_room_for_the_answer(answer_at: int) -> None:
    shard = Shard()
    endpoint = ShardEndpoint(ServerStatus(epoch=1), shard)
    shard.create(Table("rows", dim=DIM, optimizer="sum", init="zeros"))
    here, there = socket.socketpair()
    with here, there:
        loop = RequestLoop(endpoint, Channel(here), m.Proof(b"", "data", 0, 0, 0, b""))
        memory = np.zeros(1 << 12, np.uint8)
        memory[: 8 * IDS].view(np.int64)[:] = np.arange(IDS)
        memory[64 : 64 + 4 * IDS * DIM].view(np.float32)[:] = 1
        loop._segments.of[1] = arena.ArenaSegment(1, memory)
        keyed = [m.TableRequest("rows", IDS, m.IDS_SENT)]
        wanted = m.Exchange(
            1, 0, keyed, [], m.PushMessage(), arena=m.ArenaRange(1, 0, PAYLOAD, answer_at, 64)
        )
        good = answer_at == 64
        if good:
            loop._exchange(0, wanted, memory[:0])
        else:
            with pytest.raises(Malformed):
                loop._exchange(0, wanted, memory[:0])
    out = np.empty((IDS, DIM), np.float32)
    shard.pull(0, [TablePull("rows", np.arange(IDS))], [out])
    assert (out == (1 if good else 0)).all()
