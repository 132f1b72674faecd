"""Exchange between ranks that are threads of one process, on a virtual clock.

    the turn goes to the rank that can run and has the smallest (time, rank); all others stand still

So a run is a function of its inputs: the same trace every time, asynchronous strategies included, and no locks, because
nothing happens at the same time. With `cost` left at one tick a call this is the test double of a cluster; with a cost
model and meta tensors it is the simulator. Where a real link would hang, `run` raises `Deadlock` and says who waits
for whom; where a real link would mix up bytes, it says which two ranks came with different calls.

An all-reduce travels while its ranks go on: it starts when the last rank has come and the one before it is through,

    start = max(post_0, ..., post_{n-1}, finish of the previous one);    finish = start + cost

and a rank pays only for the part of it that is not over when it waits. A transfer is between two ranks and travels alike,

    start = max(sent, finish of what this rank sent before);    finish = start + cost

and is over at both ends when it has arrived and was asked for: what would hang on a link that does not buffer, does so here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from manyhands.core import Group, Op, Tensors, Work
from manyhands.errors import Deadlock
from manyhands.exchange import reduce_scatter
from manyhands.exchange.solo import check_source, to_oneself

Cost = Callable[[str, int, int], float]  # (what, bytes of one rank, ranks it goes to) -> seconds
Kind = Literal["compute", "exchange", "wait"]
T = TypeVar("T")


def one_tick(what: str, nbytes: int, peers: int) -> float:
    return 1.0


class World:
    """`now` is every rank's clock and `busy` where its time went; both are those of the latest `run`."""

    def __init__(self, size: int, cost: Cost = one_tick):
        if size < 1:
            raise ValueError(f"a world of {size} ranks; at least 1 is needed")
        self.size, self.cost = size, cost
        self._error: BaseException | None = None
        self._reset()

    def run(self, main: Callable[[InprocGroup], T]) -> list[T]:
        """Call `main` once a rank and return what each returned; what the first failing rank raises is raised here."""
        self._reset()
        results: dict[int, T] = {}
        all_left = threading.Event()

        def body(rank: int) -> None:
            try:
                self._take_turn(rank)
                results[rank] = main(InprocGroup(self, rank))
            except _Unwind:
                pass
            except BaseException as e:
                if self._error is None:
                    e.add_note(
                        f"raised on rank {rank} of {self.size} at virtual time {self.now[rank]:g}"
                    )
                    self._error = e
            self._finished[rank] = True
            self._pass_turn()
            if all(self._finished):
                all_left.set()

        threads = [
            threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True)
            for r in range(self.size)
        ]
        try:
            for thread in threads:
                thread.start()
            self._pass_turn()
            all_left.wait()  # not join: Python 3.11 takes a thread for ended when ctrl-C interrupts its join
        except BaseException as e:  # ctrl-C, at any of these lines, so that nobody knows who has the turn: all may leave
            self._error = self._error or e
            for turn in self._turns:
                turn.release()
            if all(thread.ident for thread in threads):
                all_left.wait()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if (error := self._error) is not None:
            self._error = None  # a traceback kept here would keep every rank's tensors
            raise error
        return [results[r] for r in range(self.size)]

    def spend(self, rank: int, seconds: float, kind: Kind = "compute") -> None:
        """Let `seconds` pass on this rank; ranks that are behind it run meanwhile."""
        if not seconds >= 0:
            raise ValueError(
                f"rank {rank} is to spend {seconds} s on {kind}; time does not run backwards"
            )
        self.now[rank] += seconds
        self.busy[rank][kind] += seconds
        self._yield_turn(rank)

    def wait(
        self,
        rank: int,
        where: str,
        until: Callable[[], float | None],
        absent: Callable[[], list[int]],
    ) -> None:
        """Stand still until `until` gives a time. `where` and `absent` say what this rank waits in, and for whom."""
        self._waits[rank] = _Wait(where, until, absent)
        self._yield_turn(rank)
        self._waits[rank] = None
        then = until()
        assert then is not None, "a rank gets its turn only when it can run"
        if then > self.now[rank]:
            self.busy[rank]["wait"] += then - self.now[rank]
            self.now[rank] = then

    def _reset(self) -> None:
        self.now = [0.0] * self.size
        self.busy: list[dict[Kind, float]] = [
            dict.fromkeys(get_args(Kind), 0.0) for _ in range(self.size)
        ]
        self._waits: list[_Wait | None] = [None] * self.size
        self._finished = [False] * self.size
        self._error = None
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        self._meetings: dict[int, _Meeting] = {}
        self._link_free = 0.0
        self._port_free = [0.0] * self.size
        self._on_the_way: dict[
            tuple[int, int], deque[_Message]
        ] = {}  # (from, to) -> sent or asked for, but not both

    # -- turns: only the rank that has the turn calls these --

    def _yield_turn(self, rank: int) -> None:
        if self._error is not None:  # called by a `finally` on the way out
            raise _Unwind
        self._pass_turn()
        self._take_turn(rank)

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._error is not None:
            raise _Unwind

    def _pass_turn(self) -> None:
        alive = [r for r in range(self.size) if not self._finished[r]]
        if not alive:
            return
        able: list[tuple[float, int]] = []
        for r in alive:
            wait = self._waits[r]
            then = self.now[r] if wait is None else wait.until()
            if then is not None:
                able.append((max(self.now[r], then), r))
        if not able and self._error is None:
            self._error = Deadlock(self._who_waits(alive))
        # after an error one rank after the other unwinds, so that `finally` blocks too run one at a time
        self._turns[min(able)[1] if self._error is None else alive[0]].release()

    def _who_waits(self, stuck: list[int]) -> str:
        waits = [(r, w) for r in stuck if (w := self._waits[r]) is not None]
        parts = [f"rank {r} waits in {w.where} for {_ranks(w.absent())}" for r, w in waits]
        if gone := [r for r in range(self.size) if self._finished[r]]:
            parts.append(f"{_ranks(gone)} finished")
        return f"{_ranks(stuck)} will wait for ever: {'; '.join(parts)}. Every rank must make the same calls in the same order"

    # -- meetings --

    def _meet(self, rank: int, number: int, post: _Post) -> _Meeting:
        """Bring `post` to the `number`-th call of all ranks; what does not fit what others brought raises."""
        meeting = self._meetings.setdefault(number, _Meeting(number, self.size))
        # a collective call must equal the first one, which equals all that came since; a swap may differ from stranger to stranger
        compared = list(meeting.posts.items())[: 1 if post.is_collective else None]
        for other, theirs in compared:
            if reason := post.clash(rank, theirs, other):
                raise Deadlock(
                    f"call #{number} does not match: rank {other} came with {theirs}, rank {rank} with {post}: {reason}. "
                    "Every rank must make the same calls in the same order"
                )
        meeting.add(rank, post)
        if meeting.complete:
            del self._meetings[number]
            if post.is_collective:
                start = max(self._link_free, meeting.latest)
                meeting.finish = self._link_free = start + self.cost(
                    post.what, post.nbytes, self.size
                )
        return meeting

    def _hand_over(self, source: int, sink: int, tensor: Tensor, gives: bool) -> _Message:
        """One end of a message from `source` to `sink`: the oldest that has only the other end, or a new one."""
        waiting = self._on_the_way.setdefault((source, sink), deque())
        if not waiting or (waiting[0].given if gives else waiting[0].into) is not None:
            waiting.append(message := _Message(source, sink))
        else:
            message = waiting.popleft()
        rank = source if gives else sink
        message.latest = max(message.latest, self.now[rank])
        if gives:
            message.given = tensor
            start = max(self.now[rank], self._port_free[rank])
            message.finish = self._port_free[rank] = start + self.cost("transfer", tensor.nbytes, 1)
        else:
            message.into = tensor
        message.move()
        return message


class InprocGroup(Group):
    def __init__(self, world: World, rank: int):
        self.world, self.rank, self.size = world, rank, world.size
        self._calls = self._transfers = 0

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        if op not in get_args(Op):
            raise ValueError(f"all_reduce with op={op!r}; needed: one of {', '.join(get_args(Op))}")
        return _Reduction(
            self, self._post(_Post("all_reduce", values, self.world.now[self.rank], op=op))
        )

    def own(self, tensor: Tensor) -> list[slice]:
        return [reduce_scatter.equal_part(tensor.numel(), self.rank, self.size)]

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return reduce_scatter.reduce_scatter(self, values, op)

    def all_gather(self, values: Tensors) -> Work:
        return reduce_scatter.all_gather(self, values)

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        check_source(self, source)
        post = _Post("broadcast", values, self.world.now[self.rank], source=source)
        return _Reduction(self, self._post(post))

    def barrier(self) -> None:
        _Reduction(self, self._post(_Post("barrier", {}, self.world.now[self.rank]))).wait()

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        if strangers := [p for p in peers if not 0 <= p < self.size]:
            raise ValueError(
                f"rank {self.rank} swaps with {_ranks(strangers)}, but ranks are 0 to {self.size - 1}"
            )
        post = _Post("swap", values, self.world.now[self.rank], peers=tuple(peers))
        meeting, present = self._post(post), (*peers, self.rank)
        where = f"swap #{meeting.number}"
        self.world.wait(
            self.rank, where, lambda: meeting.came_at(present), lambda: meeting.absent(present)
        )
        self.world.spend(self.rank, self.world.cost("swap", post.nbytes, len(peers)), "exchange")
        return [post.inbox[i] for i in range(len(peers))]

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        to_oneself(self, give, into)
        self._transfers += 1
        hand_over = self.world._hand_over
        sent = [
            hand_over(self.rank, r, v.detach(), True) for r, v in give.items() if r != self.rank
        ]
        got = [
            hand_over(r, self.rank, v.detach(), False) for r, v in into.items() if r != self.rank
        ]
        return _Transfer(self, self._transfers - 1, sent + got)

    def close(self) -> None: ...

    def clock(self) -> float:
        return self.world.now[self.rank]

    def _post(self, post: _Post) -> _Meeting:
        self._calls += 1
        return self.world._meet(self.rank, self._calls - 1, post)


class _Reduction:
    def __init__(self, group: InprocGroup, meeting: _Meeting):
        self._group, self._meeting = group, meeting
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        world, rank, meeting = self._group.world, self._group.rank, self._meeting
        world.wait(
            rank,
            f"{meeting.posts[rank].what} #{meeting.number}",
            meeting.all_came_at,
            lambda: meeting.absent(range(world.size)),
        )
        world.spend(rank, max(0.0, meeting.finish - world.now[rank]), "exchange")
        self._done = True


class _Transfer:
    def __init__(self, group: InprocGroup, number: int, messages: list[_Message]):
        self._group, self._number, self._messages = group, number, messages

    def wait(self) -> None:
        if not self._messages:
            return
        world, rank, messages = self._group.world, self._group.rank, self._messages

        def came_at() -> float | None:
            return max(m.latest for m in messages) if all(m.moved for m in messages) else None

        def absent() -> list[int]:
            return sorted(
                {m.sink if m.source == rank else m.source for m in messages if not m.moved}
            )

        world.wait(rank, f"transfer #{self._number}", came_at, absent)
        world.spend(rank, max(0.0, max(m.finish for m in messages) - world.now[rank]), "exchange")
        self._messages = []


@dataclass
class _Message:
    """On its way from one rank to another. It moves when both ends are there: until then neither is touched."""

    source: int
    sink: int
    given: Tensor | None = None
    into: Tensor | None = None
    latest: float = 0.0  # when the second of the two ends came
    finish: float = 0.0
    moved: bool = False

    def move(self) -> None:
        if self.given is None or self.into is None:
            return
        if (self.given.numel(), self.given.dtype) != (self.into.numel(), self.into.dtype):
            raise Deadlock(
                f"a transfer does not match: rank {self.source} gives {_length(self.given)}, rank {self.sink} waits for "
                f"{_length(self.into)}. Both ends of every message must know its length and dtype"
            )
        self.into.view(-1).copy_(self.given.view(-1))
        self.given = self.into = None  # a message kept by one end would keep the other end's memory
        self.moved = True


@dataclass
class _Wait:
    where: str
    until: Callable[[], float | None]
    absent: Callable[[], list[int]]


@dataclass
class _Post:
    """What one rank brings to a call."""

    what: Literal["all_reduce", "broadcast", "barrier", "swap"]
    values: Tensors
    time: float
    op: Op = "sum"
    source: int = 0
    peers: tuple[int, ...] = ()
    inbox: dict[int, Tensors] = field(
        default_factory=dict
    )  # place in `peers` -> what that peer gave

    @property
    def is_collective(self) -> bool:
        """Whether all ranks take part, with the same values."""
        return self.what != "swap"

    @property
    def nbytes(self) -> int:
        return sum(v.nbytes for v in self.values.values())

    def take(self, rank: int, theirs: _Post) -> None:
        """Receive what `rank` gives, once for every time that it is named as a peer."""
        for i, peer in enumerate(self.peers):
            if peer == rank:
                self.inbox[i] = {k: v.detach().clone() for k, v in theirs.values.items()}

    def clash(self, rank: int, theirs: _Post, other: int) -> str:
        """Why `rank` with this and `other` with `theirs` cannot meet; empty: they can."""
        if self.what != theirs.what:
            return "different calls"
        if self.op != theirs.op:
            return "different ops"
        if self.source != theirs.source:
            return "different sources"
        if self.peers.count(other) != theirs.peers.count(rank):
            return "one names the other as its peer more often than it is named itself"
        if (self.is_collective or other in self.peers) and _shapes(self.values) != _shapes(
            theirs.values
        ):
            return "different names, shapes or dtypes"
        return ""

    def __str__(self) -> str:
        if self.what == "barrier":
            return self.what
        shown = [
            f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}"
            for name, shape, dtype in _shapes(self.values)
        ]
        rest = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
        how = {
            "all_reduce": f"({self.op})",
            "broadcast": f" from rank {self.source}",
            "swap": f" with {_ranks(self.peers)}",
        }[self.what]
        return f"{self.what}{how} of {', '.join(shown[:6]) or 'nothing'}{rest}"


class _Meeting:
    """The n-th call of every rank. Values move when the last one they depend on is there: until then their owners
    stand still in `swap`, or have promised not to touch them before `wait`, so that nothing needs a copy to be safe."""

    def __init__(self, number: int, size: int):
        self.number, self.size = number, size
        self.posts: dict[int, _Post] = {}
        self.latest = self.finish = 0.0

    @property
    def complete(self) -> bool:
        return len(self.posts) == self.size

    def add(self, rank: int, post: _Post) -> None:
        self.posts[rank] = post
        self.latest = max(self.latest, post.time)
        if post.is_collective:
            if self.complete:
                self._exchange(post)
            return
        for other, theirs in self.posts.items():
            post.take(other, theirs)
            if other != rank:
                theirs.take(rank, post)

    def _exchange(self, post: _Post) -> None:
        everyone = [self.posts[r].values for r in range(self.size)]
        if post.what == "all_reduce":
            _reduce(everyone, post.op)
        elif post.what == "broadcast":
            _copy_from(everyone.pop(post.source), everyone)

    def all_came_at(self) -> float | None:
        return self.latest if self.complete else None

    def came_at(self, ranks: Sequence[int]) -> float | None:
        """When the last of `ranks` came; None: somebody has not come yet."""
        return (
            max(self.posts[r].time for r in ranks) if all(r in self.posts for r in ranks) else None
        )

    def absent(self, ranks: Sequence[int]) -> list[int]:
        return sorted({r for r in ranks if r not in self.posts})


class _Unwind(BaseException):
    """Another rank failed: leave. Not an Exception, so that `except Exception` in a strategy does not swallow it."""


def _reduce(everyone: list[Tensors], op: Op) -> None:
    """Reduce in rank order and give every rank the same bits."""
    for name in everyone[0]:
        total, *others = (values[name].detach() for values in everyone)
        total = total.clone()
        for other in others:
            if op == "max":
                torch.maximum(total, other, out=total)
            else:
                total.add_(other)
        if op == "mean":
            total.div_(len(everyone)) if total.is_floating_point() else total.floor_divide_(
                len(everyone)
            )
        for values in everyone:
            values[name].detach().copy_(total)


def _copy_from(source: Tensors, others: list[Tensors]) -> None:
    for name, value in source.items():
        for values in others:
            values[name].detach().copy_(value.detach())


def _length(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _shapes(values: Tensors) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(k, v.shape, v.dtype) for k, v in values.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
