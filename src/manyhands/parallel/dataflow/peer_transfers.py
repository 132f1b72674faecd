"""Peer transfers: the messages between segments, with one `StageTransfers` for every peer.

In a pipeline a rank has one peer a direction. In a graph it may have any number, and both ends of
each pair must remember and forget the same message formats; so each pair keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manyhands.core import Group
from manyhands.parallel.pipeline.message_format import ReceivedValues, TensorMeta, Values
from manyhands.parallel.pipeline.transfers import BatchKey, ExpectedMessage, StageTransfers
from manyhands.parallel.tensor.sharding_rules import TensorAxis


class PeerTransfers:
    """`Transfers` with any number of peers."""

    def __init__(self, group: Group, device: torch.device, axis: TensorAxis | None = None):
        self._by_peer = {peer: StageTransfers(group, device, axis) for peer in range(group.size)}

    @property
    def nbytes(self) -> int:
        return sum(transfers.nbytes for transfers in self._by_peer.values())

    def start_step(
        self, expected: Mapping[int, Sequence[ExpectedMessage]], keys: Sequence[BatchKey]
    ) -> None:
        for peer, transfers in self._by_peer.items():
            transfers.start_step({peer: expected[peer]} if peer in expected else {}, keys)

    def end_step(self) -> None:
        for transfers in self._by_peer.values():
            transfers.end_step()

    def send_values(
        self, peer: int, stage: int, micro: int, values: Values, read: int
    ) -> list[Tensor]:
        return self._by_peer[peer].send_values(peer, stage, micro, values, read)

    def receive_values(self, peer: int, stage: int, micro: int) -> ReceivedValues:
        return self._by_peer[peer].receive_values(peer, stage, micro)

    def send_grads(
        self,
        peer: int,
        stage: int,
        micro: int,
        grads: Sequence[Tensor | None],
        metas: Sequence[TensorMeta],
        read: int,
    ) -> None:
        self._by_peer[peer].send_grads(peer, stage, micro, grads, metas, read)

    def receive_grads(self, peer: int, stage: int, micro: int) -> list[Tensor | None]:
        return self._by_peer[peer].receive_grads(peer, stage, micro)
