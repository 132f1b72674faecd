"""What the stages of a pipeline send each other: one message a micro-batch and direction, of all tensors that cross a cut.

    forward     header | tensor | tensor ...      header: 0 = described as before; n = not so: n bytes of description come in a
                                                  message of their own, and then the tensors once more
    backward    header | gradient ...             header: a byte a gradient, 1 where there is one; what needs none has no place

A message is as long as its description says, so both ends must hold the same one. They do: a description belongs to a stage
and to the shapes of a micro-batch, which all ranks of a pipeline read for themselves, and messages arrive in order. It travels
when a shape is new, and when something changed that the batch does not show. Nothing is pickled.

A link need not buffer. So nobody waits for a message that it sends: it is over when something comes that the peer sent after
it had read it (the lists of actions tell), or at the end of the step. And one receive from every peer is always under way
ahead of its use, so that messages travel while stages compute.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from manyhands.core import Group, Work
from manyhands.errors import TaskError
from manyhands.parallel.tensor.sharding_rules import ShardedValue, TensorAxis

HEADER = 64  # bytes; every tensor begins at a multiple of it
MOST_FORMATS = 256  # descriptions that one end keeps; both forget at the same message
PLAIN = (type(None), bool, int, float, str)
Key = tuple[Any, ...]  # what both ends know of a micro-batch without being told
Values = dict[str, Any]


class Due(NamedTuple):
    """A message to this rank: for which stage of ours, and as which of the peer's actions it is sent."""

    kind: Literal["F", "B"]
    stage: int
    micro: int
    sent: int


class Meta(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = True

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Format:
    """How a message is laid out. `tree`: the values, with a place in `metas` for every tensor."""

    text: str
    tree: Any
    metas: tuple[Meta, ...]

    @classmethod
    def read(cls, text: str) -> Format:
        tree, rows = json.loads(text)
        return cls(
            text,
            tree,
            tuple(
                Meta(tuple(shape), getattr(torch, dtype), bool(grad)) for shape, dtype, grad in rows
            ),
        )

    @classmethod
    def of(cls, tree: Any, tensors: Sequence[Tensor]) -> Format:
        metas = tuple(Meta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        rows = [(m.shape, str(m.dtype).removeprefix("torch."), m.grad) for m in metas]
        return cls(json.dumps([tree, rows]), tree, metas)


@dataclass
class Received:
    """`values` as they were sent; `leaves`: their tensors, with whether a gradient is to go back for each."""

    tree: Any
    leaves: list[Tensor]
    wanted: list[bool]
    axis: TensorAxis | None

    def values(self, leaves: Sequence[Tensor]) -> Values:
        return cast(Values, _whole(self.tree, leaves, self.axis))


@dataclass
class _Lane:
    """What one peer sends in this step, in order, and what was sent to it and may be under way."""

    due: deque[Due]
    ahead: tuple[Tensor, Work] | None = None  # the receive of due[0], once it is under way
    sent: deque[tuple[int, Work]] = field(
        default_factory=deque
    )  # with the peer's action that reads it


class StageTransfers:
    """`open` a step, give and take, `close` it. Where both ends are on one rank, values change hands as they are."""

    def __init__(self, group: Group, device: torch.device, axis: TensorAxis | None = None):
        self._group, self._device, self._axis = group, device, axis
        self._told: dict[
            tuple[int, Key], Format
        ] = {}  # (stage it goes to, ...) -> as the other end knows it
        self._heard: dict[tuple[int, Key], Format] = {}
        self._lanes: dict[int, _Lane] = {}
        self._keys: Sequence[Key] = ()
        self._arrived: dict[tuple[str, int, int], Any] = {}  # (kind, stage, micro), not taken yet
        self._awaited: dict[
            tuple[int, int], list[Meta]
        ] = {}  # (stage, micro) -> gradients that will come back to it
        self.nbytes = 0  # given and taken so far

    def open(self, due: Mapping[int, Sequence[Due]], keys: Sequence[Key]) -> None:
        """`due`: by peer, all that it sends to us in this step; `keys`: of every micro-batch."""
        self._lanes, self._keys = (
            {peer: _Lane(deque(messages)) for peer, messages in due.items()},
            keys,
        )
        self._arrived.clear()
        self._awaited.clear()
        for peer in self._lanes:
            self._listen(peer)

    def close(self) -> None:
        for peer, lane in self._lanes.items():
            while lane.due:  # what nobody took: gradients that turned out to be none
                self._accept(peer)
            while lane.sent:
                lane.sent.popleft()[1].wait()
        self._lanes = {}

    # -- forward --

    def give_values(
        self, peer: int, stage: int, micro: int, values: Values, read: int
    ) -> list[Tensor]:
        """Send what `stage` of `peer` takes, which reads it in its action `read`. Returns the tensors that get a gradient."""
        tensors: list[Tensor] = []
        tree = _plain(values, tensors, stage)
        wanted = [t for t in tensors if t.requires_grad]
        self._awaited[stage - 1, micro] = [Meta(tuple(t.shape), t.dtype) for t in wanted]
        if peer == self._group.rank:
            grads = [t.requires_grad for t in tensors]
            self._arrived["F", stage, micro] = Received(
                tree, [t.detach() for t in tensors], grads, self._axis
            )
            return wanted
        now, spot = Format.of(tree, tensors), (stage, self._keys[micro])
        known = self._told.get(spot)
        if known is None or known.text != now.text:
            words = torch.frombuffer(bytearray(now.text.encode()), dtype=torch.uint8).to(
                self._device
            )
            notice = torch.empty(
                HEADER if known is None else length(known.metas),
                dtype=torch.uint8,
                device=self._device,
            )
            notice[:8].view(torch.int64).fill_(len(words))
            self._send(peer, notice, read)
            self._send(peer, words, read)
            _remember(self._told, spot, now)
        message = torch.empty(length(now.metas), dtype=torch.uint8, device=self._device)
        message[:8].zero_()
        for place, tensor in zip(places(message, now.metas), tensors, strict=True):
            place.copy_(tensor.detach())
        self._send(peer, message, read)
        self._listen(peer)  # now it is known how long the answer will be
        return wanted

    def take_values(self, peer: int, stage: int, micro: int) -> Received:
        return cast(Received, self._take(peer, "F", stage, micro))

    # -- backward --

    def give_grads(
        self,
        peer: int,
        stage: int,
        micro: int,
        grads: Sequence[Tensor | None],
        metas: Sequence[Meta],
        read: int,
    ) -> None:
        """Send `stage` of `peer` the gradients of what it gave and wanted gradients for: None where it has none."""
        if not grads:
            return
        if peer == self._group.rank:
            self._arrived["B", stage, micro] = list(grads)
            return
        message = torch.empty(length(metas, len(grads)), dtype=torch.uint8, device=self._device)
        message[: len(grads)] = torch.tensor([g is not None for g in grads], dtype=torch.uint8)
        for place, grad in zip(places(message, metas, len(grads)), grads, strict=True):
            if grad is not None:
                place.copy_(grad)
        self._send(peer, message, read)

    def take_grads(self, peer: int, stage: int, micro: int) -> list[Tensor | None]:
        """By output of `stage` that `give_values` returned."""
        if not self._awaited[stage, micro]:
            return []
        got = self._take(peer, "B", stage, micro)
        del self._awaited[stage, micro]
        return cast(list[Tensor | None], got)

    # -- messages --

    def _send(self, peer: int, message: Tensor, read: int) -> None:
        self.nbytes += message.nbytes
        self._lanes[peer].sent.append((read, self._group.transfer({peer: message}, {})))

    def _take(self, peer: int, kind: str, stage: int, micro: int) -> Any:
        while (
            kind,
            stage,
            micro,
        ) not in self._arrived:  # what comes before it in the lane has been sent before it
            self._accept(peer)
        return self._arrived.pop((kind, stage, micro))

    def _listen(self, peer: int) -> None:
        """Have the next receive from `peer` under way, if its length is known."""
        lane = self._lanes[peer]
        if lane.ahead is None and lane.due and (nbytes := self._length(lane.due[0])):
            lane.ahead = self._receive(peer, nbytes)

    def _length(self, due: Due) -> int:
        """Of the message; 0: it is not known yet, or there will be none."""
        if due.kind == "F":
            known = self._heard.get((due.stage, self._keys[due.micro]))
            return HEADER if known is None else length(known.metas)
        metas = self._awaited.get((due.stage, due.micro))
        return length(metas, len(metas)) if metas else 0

    def _accept(self, peer: int) -> None:
        """Wait for the next message of `peer`."""
        self._listen(peer)
        lane = self._lanes[peer]
        due = lane.due.popleft()
        if lane.ahead is None:  # no gradient is wanted, so none is sent
            assert due.kind == "B" and not self._awaited[due.stage, due.micro]
            return self._listen(peer)
        (message, work), lane.ahead = lane.ahead, None
        work.wait()
        if due.kind == "F":
            self._arrived["F", due.stage, due.micro] = self._unpack(peer, due, message)
        else:
            metas = self._awaited[due.stage, due.micro]
            there = message[: len(metas)].tolist()
            grads = places(message, metas, len(metas))
            self._arrived["B", due.stage, due.micro] = [
                g if is_there else None for g, is_there in zip(grads, there, strict=True)
            ]
        while lane.sent and lane.sent[0][0] <= due.sent:  # the peer had read it by then
            lane.sent.popleft()[1].wait()
        self._listen(peer)

    def _unpack(self, peer: int, due: Due, message: Tensor) -> Received:
        spot = (due.stage, self._keys[due.micro])
        if described := int(message[:8].view(torch.int64)):
            words, work = self._receive(peer, described)
            work.wait()
            _remember(self._heard, spot, Format.read(bytes(words.tolist()).decode()))
            message, work = self._receive(peer, length(self._heard[spot].metas))
            work.wait()
        known = self._heard[spot]
        return Received(
            known.tree,
            list(places(message, known.metas)),
            [m.grad for m in known.metas],
            self._axis,
        )

    def _receive(self, peer: int, nbytes: int) -> tuple[Tensor, Work]:
        self.nbytes += nbytes
        message = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return message, self._group.transfer({}, {peer: message})


# -- layout --


def length(metas: Sequence[Meta], header: int = 1) -> int:
    return _up(header) + sum(_up(m.nbytes) for m in metas)


def places(message: Tensor, metas: Sequence[Meta], header: int = 1) -> Iterator[Tensor]:
    """The tensors of a message, in its memory."""
    start = _up(header)
    for m in metas:
        yield message[start : start + m.nbytes].view(m.dtype).view(m.shape)
        start += _up(m.nbytes)


def _up(nbytes: int) -> int:
    return -(-nbytes // HEADER) * HEADER


def _remember(formats: dict[tuple[int, Key], Format], spot: tuple[int, Key], now: Format) -> None:
    if spot not in formats and len(formats) >= MOST_FORMATS:
        formats.clear()
    formats[spot] = now


# -- values of any kind, as plain JSON --


def _plain(value: Any, tensors: list[Tensor], stage: int) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TaskError(
                f"a {value.layout} tensor goes to stage {stage}; only dense ones travel: cut the model elsewhere (cut=)"
            )
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) in PLAIN:
        return value
    if isinstance(
        value, ShardedValue
    ):  # the share goes to the rank of the next stage that holds the same one
        how = (value.local, value.along, value.length, value.groups, value.lead)
        return {"pieced": [_plain(v, tensors, stage) for v in how]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {"slice": [_plain(v, tensors, stage) for v in (value.start, value.stop, value.step)]}
    if type(value) in (list, tuple, torch.Size):
        return {type(value).__name__: [_plain(v, tensors, stage) for v in value]}
    if type(value) is dict:
        return {
            "dict": [
                [_plain(k, tensors, stage), _plain(v, tensors, stage)] for k, v in value.items()
            ]
        }
    raise TaskError(
        f"a {type(value).__name__} goes to stage {stage}; tensors, numbers, strings, lists, tuples and dicts of them travel: "
        "cut the model elsewhere (cut=)"
    )


def _whole(tree: Any, leaves: Sequence[Tensor], axis: TensorAxis | None) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return leaves[inner]
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "dict":
        return {_whole(k, leaves, axis): _whole(v, leaves, axis) for k, v in inner}
    items = [_whole(v, leaves, axis) for v in inner]
    if kind == "pieced":
        assert axis is not None, "who cuts tensors gives the axis"
        local, along, length, groups, lead = items
        pieced = ShardedValue(local, along, length, axis, groups)
        pieced.lead = lead
        return pieced
    return (
        items
        if kind == "list"
        else slice(*items)
        if kind == "slice"
        else tuple(items)
        if kind == "tuple"
        else torch.Size(items)
    )
