"""Stage transfers: the messages between the stages of a pipeline, one a micro-batch and direction.

A message is as long as its format says, so both ends must hold the same format. They do: a format
belongs to a stage and to the shapes of a micro-batch, which all ranks of a pipeline read for
themselves, and messages arrive in order. The sender describes a format when a shape is new, and
when something has changed that the batch does not show.

A group need not buffer. So no rank waits for a message that it sends: the message is over when
something comes that the peer sent after it had read it (the lists of actions say so), or at the end
of the step. And one receive from every peer is always posted before it is needed, so that messages
travel while stages compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from manyhands.core import Group, Work
from manyhands.parallel.pipeline.message_format import (
    HEADER_BYTES,
    MessageFormat,
    ReceivedValues,
    TensorMeta,
    Values,
    encode,
    message_bytes,
    tensor_views,
)
from manyhands.parallel.tensor.sharding_rules import TensorAxis

MOST_FORMATS = 256  # that one end keeps; both ends forget at the same message
BatchKey = tuple[Any, ...]  # what both ends know of a micro-batch: the shapes of its tensors


class ExpectedMessage(NamedTuple):
    """A message that this rank will receive: for which of its stages, and which of the peer's
    actions sends it."""

    kind: Literal["F", "B"]
    stage: int
    micro: int
    sent: int


class Transfers(Protocol):
    """Sends and receives the values and gradients of a step."""

    @property
    def nbytes(self) -> int:
        """Sent and received so far."""
        ...

    def start_step(
        self, expected: Mapping[int, Sequence[ExpectedMessage]], keys: Sequence[BatchKey]
    ) -> None:
        """`expected`: by peer, all that it sends to this rank in this step; `keys`: of every
        micro-batch."""
        ...

    def end_step(self) -> None: ...

    def send_values(
        self, peer: int, stage: int, micro: int, values: Values, read: int
    ) -> list[Tensor]:
        """Send what `stage` of `peer` needs, which reads it in its action `read`. Returns the
        tensors that get a gradient."""
        ...

    def receive_values(self, peer: int, stage: int, micro: int) -> ReceivedValues: ...

    def send_grads(
        self,
        peer: int,
        stage: int,
        micro: int,
        grads: Sequence[Tensor | None],
        metas: Sequence[TensorMeta],
        read: int,
    ) -> None:
        """Send `stage` of `peer` the gradients of the values that it sent and wants gradients for;
        None where there is none."""
        ...

    def receive_grads(self, peer: int, stage: int, micro: int) -> list[Tensor | None]:
        """One for each tensor of `stage` that `send_values` returned."""
        ...


@dataclass
class _PeerQueue:
    """What one peer sends in this step, in order, and what was sent to it and may not have
    arrived."""

    expected: deque[ExpectedMessage]
    posted: tuple[Tensor, Work] | None = None  # the receive of expected[0], once it has begun
    # with the peer's action that reads it
    sent: deque[tuple[int, Work]] = field(default_factory=deque)


class StageTransfers:
    """`Transfers` over a group. Where both ends are on one rank, values are handed over as they
    are."""

    def __init__(self, group: Group, device: torch.device, axis: TensorAxis | None = None):
        self._group, self._device, self._axis = group, device, axis
        # (receiving stage, batch key) -> the format that the other end knows
        self._sent_formats: dict[tuple[int, BatchKey], MessageFormat] = {}
        self._received_formats: dict[tuple[int, BatchKey], MessageFormat] = {}
        self._queues: dict[int, _PeerQueue] = {}
        self._keys: Sequence[BatchKey] = ()
        self._arrived: dict[tuple[str, int, int], Any] = {}  # (kind, stage, micro), not read yet
        # (stage, micro) -> gradients that will come back to it
        self._awaited: dict[tuple[int, int], list[TensorMeta]] = {}
        self.nbytes = 0

    def start_step(
        self, expected: Mapping[int, Sequence[ExpectedMessage]], keys: Sequence[BatchKey]
    ) -> None:
        self._queues = {peer: _PeerQueue(deque(messages)) for peer, messages in expected.items()}
        self._keys = keys
        self._arrived.clear()
        self._awaited.clear()
        for peer in self._queues:
            self._post(peer)

    def end_step(self) -> None:
        for peer, queue in self._queues.items():
            while queue.expected:  # not read: gradients that turned out to be none
                self._accept(peer)
            while queue.sent:
                queue.sent.popleft()[1].wait()
        self._queues = {}

    # -- forward --

    def send_values(
        self, peer: int, stage: int, micro: int, values: Values, read: int
    ) -> list[Tensor]:
        tensors: list[Tensor] = []
        tree = encode(values, tensors, stage)
        wanted = [t for t in tensors if t.requires_grad]
        self._awaited[stage - 1, micro] = [TensorMeta(tuple(t.shape), t.dtype) for t in wanted]
        if peer == self._group.rank:
            grads = [t.requires_grad for t in tensors]
            self._arrived["F", stage, micro] = ReceivedValues(
                tree, [t.detach() for t in tensors], grads, self._axis
            )
            return wanted
        now, key = MessageFormat.of(tree, tensors), (stage, self._keys[micro])
        known = self._sent_formats.get(key)
        if known is None or known.text != now.text:
            self._send_format(peer, known, now, read)
            _remember(self._sent_formats, key, now)
        message = torch.empty(message_bytes(now.metas), dtype=torch.uint8, device=self._device)
        message[:8].zero_()
        for view, tensor in zip(tensor_views(message, now.metas), tensors, strict=True):
            view.copy_(tensor.detach())
        self._send(peer, message, read)
        self._post(peer)  # now it is known how long the answer will be
        return wanted

    def _send_format(
        self, peer: int, known: MessageFormat | None, now: MessageFormat, read: int
    ) -> None:
        """Two messages: one as long as the peer expects, whose header announces the second, the
        format."""
        text = torch.frombuffer(bytearray(now.text.encode()), dtype=torch.uint8).to(self._device)
        expected_bytes = HEADER_BYTES if known is None else message_bytes(known.metas)
        notice = torch.empty(expected_bytes, dtype=torch.uint8, device=self._device)
        notice[:8].view(torch.int64).fill_(len(text))
        self._send(peer, notice, read)
        self._send(peer, text, read)

    def receive_values(self, peer: int, stage: int, micro: int) -> ReceivedValues:
        return cast(ReceivedValues, self._read(peer, "F", stage, micro))

    # -- backward --

    def send_grads(
        self,
        peer: int,
        stage: int,
        micro: int,
        grads: Sequence[Tensor | None],
        metas: Sequence[TensorMeta],
        read: int,
    ) -> None:
        if not grads:
            return
        if peer == self._group.rank:
            self._arrived["B", stage, micro] = list(grads)
            return
        nbytes = message_bytes(metas, len(grads))
        message = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        message[: len(grads)] = torch.tensor([g is not None for g in grads], dtype=torch.uint8)
        for view, grad in zip(tensor_views(message, metas, len(grads)), grads, strict=True):
            if grad is not None:
                view.copy_(grad)
        self._send(peer, message, read)

    def receive_grads(self, peer: int, stage: int, micro: int) -> list[Tensor | None]:
        if not self._awaited[stage, micro]:
            return []
        got = self._read(peer, "B", stage, micro)
        del self._awaited[stage, micro]
        return cast(list[Tensor | None], got)

    # -- messages --

    def _send(self, peer: int, message: Tensor, read: int) -> None:
        self.nbytes += message.nbytes
        self._queues[peer].sent.append((read, self._group.transfer({peer: message}, {})))

    def _read(self, peer: int, kind: str, stage: int, micro: int) -> Any:
        # the peer sends in the order of its queue, so what comes before this message comes first
        while (kind, stage, micro) not in self._arrived:
            self._accept(peer)
        return self._arrived.pop((kind, stage, micro))

    def _post(self, peer: int) -> None:
        """Begin the next receive from `peer`, if its length is known."""
        queue = self._queues[peer]
        if queue.posted is None and queue.expected and (n := self._bytes_of(queue.expected[0])):
            queue.posted = self._receive(peer, n)

    def _bytes_of(self, expected: ExpectedMessage) -> int:
        """Length of the message; 0: it is not known yet, or there will be no message."""
        if expected.kind == "F":
            known = self._received_formats.get((expected.stage, self._keys[expected.micro]))
            return HEADER_BYTES if known is None else message_bytes(known.metas)
        metas = self._awaited.get((expected.stage, expected.micro))
        return message_bytes(metas, len(metas)) if metas else 0

    def _accept(self, peer: int) -> None:
        """Wait for the next message of `peer`."""
        self._post(peer)
        queue = self._queues[peer]
        expected = queue.expected.popleft()
        if queue.posted is None:  # no gradient is wanted, so none is sent
            assert expected.kind == "B" and not self._awaited[expected.stage, expected.micro]
            return self._post(peer)
        (message, work), queue.posted = queue.posted, None
        work.wait()
        if expected.kind == "F":
            self._arrived["F", expected.stage, expected.micro] = self._unpack(
                peer, expected, message
            )
        else:
            metas = self._awaited[expected.stage, expected.micro]
            present = message[: len(metas)].tolist()
            grads = tensor_views(message, metas, len(metas))
            self._arrived["B", expected.stage, expected.micro] = [
                g if is_there else None for g, is_there in zip(grads, present, strict=True)
            ]
        while queue.sent and queue.sent[0][0] <= expected.sent:  # the peer had read it by then
            queue.sent.popleft()[1].wait()
        self._post(peer)

    def _unpack(self, peer: int, expected: ExpectedMessage, message: Tensor) -> ReceivedValues:
        key = (expected.stage, self._keys[expected.micro])
        if format_bytes := int(message[:8].view(torch.int64)):
            text, work = self._receive(peer, format_bytes)
            work.wait()
            now = MessageFormat.parse(bytes(text.tolist()).decode())
            _remember(self._received_formats, key, now)
            message, work = self._receive(peer, message_bytes(now.metas))
            work.wait()
        known = self._received_formats[key]
        tensors = list(tensor_views(message, known.metas))
        return ReceivedValues(known.tree, tensors, [m.grad for m in known.metas], self._axis)

    def _receive(self, peer: int, nbytes: int) -> tuple[Tensor, Work]:
        self.nbytes += nbytes
        message = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return message, self._group.transfer({}, {peer: message})


def _remember(
    formats: dict[tuple[int, BatchKey], MessageFormat],
    key: tuple[int, BatchKey],
    now: MessageFormat,
) -> None:
    if key not in formats and len(formats) >= MOST_FORMATS:
        formats.clear()
    formats[key] = now
