"""Mailboxes of many ranks in one process: what arrives, and how much memory they take."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from manyhands.exchange.mailbox import CHUNK_BYTES, HOST_BYTES, PAGE, SLOTS, Mailboxes


def mailboxes(size: int) -> list[Mailboxes]:
    store, words = dist.HashStore(), np.zeros(3 * size * size, np.int64)
    return [Mailboxes(r, size, words, store, lambda: None) for r in range(size)]


def message(source: int, to: int, length: int) -> torch.Tensor:
    return (torch.arange(length) * 31 + 7 * source + to).to(torch.uint8)


def deliver(boxes: list[Mailboxes], pairs: list[tuple[int, int]], length: int) -> None:
    got = {pair: torch.zeros(length, dtype=torch.uint8) for pair in pairs}
    parcels = [boxes[i].send(j, message(i, j, length)) for i, j in pairs]
    parcels += [boxes[j].receive(i, got[i, j]) for i, j in pairs]
    while not all(p.done for p in parcels):
        for box in boxes:
            box.progress()
    for (i, j), there in got.items():
        assert torch.equal(there, message(i, j, length)), (i, j)


def memory(boxes: list[Mailboxes]) -> int:
    """Of all ring buffers; each is held by its sender and its receiver."""
    rings = [ring for box in boxes for pair, ring in box._rings.items() if pair[0] == box._rank]
    return sum(ring.slots.nbytes + ring.lengths.nbytes for ring in rings)


@pytest.mark.parametrize("length", [1, 4095, 70_001])
def test_every_rank_reaches_every_other_however_small_its_buffers_are(length: int) -> None:
    boxes = mailboxes(16)
    try:
        for _ in range(2):  # the second message finds the counters where the first left them
            deliver(boxes, list(itertools.permutations(range(16), 2)), length)
    finally:
        for box in boxes:
            box.close()


@pytest.mark.parametrize("size", [2, 4, 16, 64])
def test_memory_of_a_hosts_mailboxes_is_bounded_where_all_pairs_talk(size: int) -> None:
    boxes = mailboxes(size)
    try:
        deliver(boxes, list(itertools.permutations(range(size), 2)), 100)
        # half of what is left each time, and a page where nothing is
        assert memory(boxes) <= HOST_BYTES + size * size * (PAGE + 64 * SLOTS)
    finally:
        for box in boxes:
            box.close()


def test_neighbours_of_a_short_pipeline_have_the_largest_buffers() -> None:
    boxes = mailboxes(4)
    try:
        deliver(boxes, [(1, 2), (1, 0)], 3 * CHUNK_BYTES)
        rings = boxes[1]._rings
        assert rings[1, 2].slots.shape == (SLOTS, CHUNK_BYTES)
        assert rings[1, 0].slots.shape == (SLOTS // 2, CHUNK_BYTES)
    finally:
        for box in boxes:
            box.close()
