"""Frames over real sockets: what is sent arrives.

What is no frame is refused before memory is allocated for it.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from manyhands.server.protocol import (
    arena as arenas,
)
from manyhands.server.protocol import (
    elastic_messages,
    frame,
    handshake,
    messages,
    replication_messages,
    row_encoding,
    table_messages,
)
from manyhands.server.protocol.arrays import pack, unpack
from manyhands.server.protocol.frame import Channel, Malformed
from manyhands.server.protocol.key_lists import KeyLists
from manyhands.server.protocol.messages import (
    Done,
    Exchange,
    Proof,
    PushMessage,
    TableRequest,
)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    a, b = (Channel(s) for s in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def proof(role: str = "data") -> Proof:
    return Proof(b"", role, 0, 3, 1, b"")  # type: ignore[arg-type]


def test_a_frame_arrives_as_it_was_sent(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    message = Exchange(
        7,
        3,
        [TableRequest("users", 5, messages.IDS_SENT, 99)],
        [TableRequest("w", 4)],
        PushMessage(2, lr=0.1, pending=True),
        "bf16",
    )
    ids, numbers = np.arange(5), np.ones(300_000, np.float32)
    sender = threading.Thread(target=lambda: a.send(message, 42, [ids, numbers]))
    sender.start()  # more than a socket holds
    head, got = b.receive()
    memory = np.empty(head.payload_bytes, np.uint8)
    b.body(memory.data)
    sender.join()
    assert (head.number, got) == (42, message)
    cursor = frame.Cursor(memory)
    assert np.array_equal(cursor.take(5, np.int64), ids) and np.array_equal(
        cursor.take(300_000, np.float32), numbers
    )
    assert cursor.at == memory.size and memory.size % frame.ALIGN == 0
    with pytest.raises(Malformed, match="shorter"):
        cursor.take(1, np.int64)


def test_every_kind_of_message_has_a_number_of_its_own() -> None:
    kinds = {
        k
        for module in (messages, replication_messages, table_messages, elastic_messages)
        for k in vars(module).values()
        if isinstance(k, type) and issubclass(k, messages.Message)
    }
    parts = {
        messages.Message,
        messages.TableRequest,
        messages.PushMessage,
        messages.ArenaRange,
        messages.ArraySpec,
        messages.ShardAddress,
        messages.ServerEntry,
        messages.ShardChain,
        table_messages.StoredPart,
    }
    assert set(frame.KINDS.values()) == kinds - parts


def test_a_pause_within_a_frame_is_no_end(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    b.limit(0.02)
    sent = frame.encode(Done(5), 1)
    with pytest.raises(TimeoutError):
        b.receive()
    a.sock.sendall(sent[:10])
    reader = threading.Thread(target=lambda: got.append(b.receive()))
    got: list[object] = []
    reader.start()
    reader.join(0.1)  # several time-outs of the kernel
    a.sock.sendall(sent[10:])
    reader.join(10)
    assert got and got[0][1] == Done(5)  # type: ignore[index]


def head(
    magic: bytes = b"mhps",
    version: int = frame.VERSION,
    kind: int = 1,
    size: int = 0,
    more: int = 0,
    good: bool = True,
) -> bytes:
    raw = struct.pack("<4sHHIQQ", magic, version, kind, size, more, 0)
    return raw + struct.pack("<I", zlib.crc32(raw) ^ (not good))


@pytest.mark.parametrize(
    ("raw", "reason", "words"),
    [
        (head(b"GET "), "garbage", "GET"),
        (head(version=1), "version", "version 1 was given, 2 is needed"),
        (head(good=False), "garbage", "checksum"),
        (head(kind=9999), "garbage", "no kind 9999"),
        (head(size=1 << 31), "size", "more than is allowed"),
        (head(more=1 << 60), "size", "more than is allowed"),
    ],
)
def test_what_is_no_header_of_ours_is_refused_by_name(raw: bytes, reason: str, words: str) -> None:
    with pytest.raises(Malformed, match=words) as e:
        frame.header(raw)
    assert e.value.reason == reason


def test_an_unauthenticated_peer_may_send_less() -> None:
    frame.header(head(size=1 << 16, more=1 << 20))
    with pytest.raises(Malformed):
        frame.header(head(size=1 << 16), authenticated=False)
    with pytest.raises(Malformed):
        frame.header(head(more=1), authenticated=False)


def test_a_message_that_is_none_is_garbage() -> None:
    for raw in (b"\xff\xff", os.urandom(64), b"\x91\xc3"):
        with pytest.raises(Malformed):
            frame.decode(frame.KIND_OF[Exchange], raw)


def shake(token: str, other: str) -> tuple[object, object]:
    """What server and client come to."""
    a, b = (Channel(s) for s in socket.socketpair())
    found: list[object] = []

    def serve() -> None:
        try:
            found.append(handshake.challenge(a, token, 5, time.monotonic() + 5))
        except Malformed as e:
            found.append(e.reason)
            handshake.refuse(a, e.reason, str(e))

    server = threading.Thread(target=serve)
    server.start()
    try:
        client: object = handshake.prove(b, other, proof(), time.monotonic() + 5)
    except handshake.HandshakeRefused as e:
        client = str(e)
    b.close()
    server.join()
    a.close()
    return found[0], client


def test_both_sides_prove_that_they_know_the_token() -> None:
    server, client = shake("secret", "secret")
    assert (
        isinstance(server, Proof) and server.worker == 3 and getattr(client, "instance", None) == 5
    )
    server, client = shake("secret", "wrong")
    assert server == "token" and "refused (token)" in str(client)


def test_an_impostor_who_says_welcome_without_the_token_is_not_believed() -> None:
    a, b = (Channel(s) for s in socket.socketpair())

    def pretend() -> None:
        a.send(messages.Hello(b"0" * 16))
        a.receive()
        a.send(messages.Welcome(b"0" * 32, 1))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(handshake.HandshakeRefused, match="does not know the token"):
        handshake.prove(b, "secret", proof(), time.monotonic() + 5)
    thread.join()
    a.close()
    b.close()


def test_the_token_never_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = Channel.send

    def record(self: Channel, message: messages.Message, *rest: object) -> int:
        sent.append(frame.encode(message))
        return send(self, message, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Channel, "send", record)
    shake("a rather long secret", "a rather long secret")
    assert len(sent) == 3 and not any(b"secret" in raw for raw in sent)


def test_one_who_says_nothing_is_sent_away_when_the_time_is_over(
    pair: tuple[Channel, Channel],
) -> None:
    a, b = pair
    b.sock.sendall(b"mh")  # and then nothing
    with pytest.raises(Malformed) as e:
        handshake.challenge(a, "secret", 1, time.monotonic() + 0.05)
    assert e.value.reason == "slow"


# -- payloads --

BOUNDS = {"bf16": lambda x: 2**-8 * np.abs(x), "fp16": lambda x: 2**-11 * np.abs(x) + 3e-8}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("code", ["none", "bf16", "fp16", "int8"])
def test_what_is_decoded_is_within_the_bound_of_its_code(
    code: messages.RowCodec, dtype: str
) -> None:
    width = 24
    x = np.random.default_rng(0).normal(size=100 * width).astype(dtype)
    x[:width] *= 1e-3
    x[5] = 0
    raw, y = (
        np.empty(row_encoding.nbytes(code, x.size, x.itemsize, width), np.uint8),
        np.empty_like(x),
    )
    row_encoding.encode(code, x, raw, width)
    row_encoding.decode(code, raw, y, width)
    if code == "none":
        assert np.array_equal(x, y)
    elif code == "int8":
        scale = np.abs(x).reshape(-1, width).max(1, keepdims=True) / 127
        assert (np.abs(x - y).reshape(-1, width) <= 0.5001 * scale).all()
        assert raw.size < x.size + 8 * 100 + frame.ALIGN
    else:
        assert (np.abs(x - y) <= BOUNDS[code](x)).all() and raw.size == 2 * x.size


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("code", ["none", "bf16", "fp16", "int8"])
def test_what_is_not_finite_stays_so(code: messages.RowCodec, bad: float) -> None:
    x = np.ones(64, np.float32)
    x[40] = bad
    raw, y = np.empty(row_encoding.nbytes(code, 64, 4, 16), np.uint8), np.empty_like(x)
    row_encoding.encode(code, x, raw, 16)
    row_encoding.decode(code, raw, y, 16)
    assert not np.isfinite(y).all() and np.isfinite(y[:32]).all()


def test_bf16_rounds_to_even_as_torch_does() -> None:
    import torch

    x = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    raw, y = np.empty(2 * x.size, np.uint8), np.empty_like(x)
    row_encoding.encode("bf16", x, raw, 1)
    row_encoding.decode("bf16", raw, y, 1)
    there = torch.from_numpy(x).bfloat16().float().numpy()
    finite = np.isfinite(x)
    assert np.array_equal(y[finite], there[finite]) and np.array_equal(np.isnan(y), np.isnan(x))


def test_arrays_are_packed_and_unpacked_and_strange_ones_refused() -> None:
    arrays = {"ids": np.arange(3), "values": np.ones((3, 5), np.float32), "step": np.array([7])}
    described, parts = pack(arrays)
    memory = np.zeros(sum(frame.aligned(p.nbytes) for p in parts), np.uint8)
    at = 0
    for part in parts:
        memory[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
        at += frame.aligned(part.nbytes)
    assert all(np.array_equal(arrays[k], v) for k, v in unpack(described, memory).items())
    for strange in (
        messages.ArraySpec("x", "|O", [3]),
        messages.ArraySpec("x", "<f4", [-1]),
        messages.ArraySpec("x", "<f4", [1 << 40]),
    ):
        with pytest.raises(Malformed):
            unpack([strange], memory)


# -- key lists --


def test_both_ends_forget_the_same_key_lists() -> None:
    here, there = KeyLists(), KeyLists()
    rng = np.random.default_rng(0)
    known = 0
    for _ in range(500):
        table, key = "users", int(rng.integers(1, 40))
        if here.know(table, key, key) is not None:
            known += 1
            assert there.know(table, key, key) is not None
        else:
            here.learn(table, key, key)
            there.learn(table, key, key, np.arange(key))
    assert 0 < known < 500


def test_a_list_of_another_length_is_another_list() -> None:
    lists = KeyLists()
    lists.learn("users", 5, 100)
    assert lists.know("users", 5, 100) is not None
    assert lists.know("users", 5, 99) is None and lists.know("items", 5, 100) is None


# -- memory --


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_of_memory_never_overlap_and_are_used_again(shared: bool) -> None:
    arena, rng = arenas.Arena(shared), np.random.default_rng(0)
    live: list[tuple[arenas.ArenaBlock, int]] = []
    for i in range(400):
        if live and rng.random() < 0.5:
            region, mark = live.pop(int(rng.integers(len(live))))
            assert (region.memory == mark % 251).all()
            arena.release(region)
        else:
            region = arena.allocate(int(rng.integers(1, 200_000)))
            region.memory[:] = i % 251
            live.append((region, i))
    for region, mark in live:
        assert (region.memory == mark % 251).all()
        arena.release(region)
    assert len(arena.segments) == 1 and not arena.segments[0].live
    arena.close()


def test_memory_that_is_lent_stays_as_long_as_its_array() -> None:
    arena = arenas.Arena(False)
    region = arena.allocate(1024)
    array = region.memory[:100]
    arena.lend(region, array)
    arena.release(region)
    assert arena.allocate(64).at == 1024
    del array
    assert arena.allocate(1024).at == 0


def test_shared_memory_is_seen_by_both_and_cannot_be_taken_away() -> None:
    segment = arenas.create_shared(1, 1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 0)
    other = arenas.attach(1, 1 << 20, os.dup(segment.descriptor))
    segment.memory[5:8] = 7
    assert other.memory[4:9].tolist() == [0, 7, 7, 7, 0]
    segment.close()


def test_a_file_that_could_shrink_under_the_server_is_not_mapped(tmp_path: object) -> None:
    with pytest.raises(ValueError, match="announced"):
        arenas.attach(1, 4096, os.memfd_create("small"))
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    with pytest.raises(ValueError, match="not sealed"):
        arenas.attach(1, 4096, loose)
    plain = os.open(f"{tmp_path}/file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(plain, 4096)
    with pytest.raises(ValueError, match="cannot be sealed"):
        arenas.attach(1, 4096, plain)
