"""In-process world: ranks that are threads of one process, on a virtual clock.

    the rank that can run and has the smallest (time, rank) runs next; all others are suspended

So a run is a function of its inputs: the same trace every time, asynchronous strategies included,
and no locks, because nothing happens at the same time. With `cost` left at one tick per call this
is the test double of a cluster; with a cost model and meta tensors it is the simulator. Where a
real group would hang, `run` raises `Deadlock` and says who waits for whom; where a real group would
mix up bytes, it says which two ranks came with different calls.

An all-reduce, broadcast or barrier runs while its ranks go on. It starts when the last rank has
come and the previous one is over,

    start = max(post_0, ..., post_{n-1}, finish of the previous one);    finish = start + cost

and a rank pays only for the part of it that is not over when it waits. A transfer is between two
ranks,

    start = max(sent, finish of what this rank sent before);    finish = start + cost

and is over at both ends when it has arrived and was asked for: what would hang on a group that does
not buffer messages hangs here too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from manyhands.core import Group, Op, Tensors, Work
from manyhands.errors import Deadlock
from manyhands.exchange import reduce_scatter
from manyhands.exchange.inproc_calls import InprocMessage, MatchedCall, RankCall, ranks_text
from manyhands.exchange.solo import check_source, to_oneself

Cost = Callable[[str, int, int], float]  # (what, bytes of one rank, ranks it goes to) -> seconds
Kind = Literal["compute", "exchange", "wait"]
T = TypeVar("T")


def one_tick(what: str, nbytes: int, peers: int) -> float:
    return 1.0


class World:
    """`now` is every rank's clock and `busy` what its time was spent on, both of the latest
    `run`."""

    def __init__(self, size: int, cost: Cost = one_tick):
        if size < 1:
            raise ValueError(f"a world of {size} ranks; at least 1 is needed")
        self.size, self.cost = size, cost
        self._error: BaseException | None = None
        self._reset()

    def run(self, main: Callable[[InprocGroup], T]) -> list[T]:
        """Call `main` once per rank and return what each returned; raise what the first failing
        rank raises."""
        self._reset()
        results: dict[int, T] = {}
        left: queue.SimpleQueue[int] = queue.SimpleQueue()

        def all_left() -> None:
            # ctrl-C can leave the lock of an Event taken, and Python 3.11 takes a thread for ended
            # whose join it interrupts; a simple queue is one C call
            while not all(self._finished):
                with contextlib.suppress(queue.Empty):
                    left.get(timeout=1.0)

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
            left.put(rank)

        threads = [
            threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True)
            for r in range(self.size)
        ]
        try:
            for thread in threads:
                thread.start()
            self._pass_turn()
            all_left()
        except BaseException as e:
            # ctrl-C, at any of these lines: it is not known who has the turn, so all may leave
            self._error = self._error or e
            for turn in self._turns:
                turn.release()
            if all(thread.ident for thread in threads):
                all_left()
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
        """Suspend this rank until `until` gives a time. `where` and `absent` say what this rank
        waits in, and for whom."""
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
        self._calls: dict[int, MatchedCall] = {}
        self._network_free = 0.0
        self._port_free = [0.0] * self.size
        # (from, to) -> messages of which one end has been posted
        self._half_posted: dict[tuple[int, int], deque[InprocMessage]] = {}
        self._common: list[Tensor] = []  # vectors that all ranks share

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
        # after an error one rank after the other unwinds, so `finally` blocks run one at a time
        self._turns[min(able)[1] if self._error is None else alive[0]].release()

    def _who_waits(self, stuck: list[int]) -> str:
        waits = [(r, w) for r in stuck if (w := self._waits[r]) is not None]
        parts = [f"rank {r} waits in {w.where} for {ranks_text(w.absent())}" for r, w in waits]
        if gone := [r for r in range(self.size) if self._finished[r]]:
            parts.append(f"{ranks_text(gone)} finished")
        return (
            f"{ranks_text(stuck)} will wait for ever: {'; '.join(parts)}. "
            "Every rank must make the same calls in the same order"
        )

    # -- calls --

    def _match(self, rank: int, number: int, call: RankCall) -> MatchedCall:
        """Add `call` to the `number`-th call of all ranks."""
        matched = self._calls.setdefault(number, MatchedCall(number, self.size))
        matched.add(rank, call)
        if matched.complete:
            del self._calls[number]
            if call.is_collective:
                start = max(self._network_free, matched.latest)
                seconds = self.cost(call.what, call.nbytes, self.size)
                matched.finish = self._network_free = start + seconds
        return matched

    def _post_message(self, source: int, sink: int, tensor: Tensor, gives: bool) -> InprocMessage:
        """Post one end of a message: of the oldest that has only the other end, or of a new one."""
        waiting = self._half_posted.setdefault((source, sink), deque())
        if not waiting or (waiting[0].given if gives else waiting[0].into) is not None:
            waiting.append(message := InprocMessage(source, sink))
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
    """One rank's group of a `World`; its clock is the rank's virtual time."""

    def __init__(self, world: World, rank: int):
        self.world, self.rank, self.size = world, rank, world.size
        self._calls = self._transfers = self._shared = 0

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        common: bool = False,
    ) -> Tensor:
        """A zeroed vector: one of this rank's own, or one that is `common` to all ranks."""
        if not common:
            return super().allocate(numel, dtype, device)
        shared = self.world._common
        if self._shared == len(shared):
            shared.append(torch.zeros(numel, dtype=dtype, device=device))
        found = shared[self._shared]
        if (found.numel(), found.dtype) != (numel, dtype):
            raise Deadlock(
                f"common vector #{self._shared} has {found.numel()} {found.dtype} on another rank, "
                f"rank {self.rank} came with {numel} {dtype}. "
                "Every rank must allocate the same vectors in the same order"
            )
        self._shared += 1
        return found

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        if op not in get_args(Op):
            raise ValueError(f"all_reduce with op={op!r}; needed: one of {', '.join(get_args(Op))}")
        return _Collective(self, RankCall("all_reduce", values, self.clock(), op=op))

    def own(self, tensor: Tensor) -> list[slice]:
        return [reduce_scatter.equal_part(tensor.numel(), self.rank, self.size)]

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return reduce_scatter.reduce_scatter(self, values, op)

    def all_gather(self, values: Tensors) -> Work:
        return reduce_scatter.all_gather(self, values)

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        check_source(self, source)
        return _Collective(self, RankCall("broadcast", values, self.clock(), source=source))

    def barrier(self) -> None:
        _Collective(self, RankCall("barrier", {}, self.clock())).wait()

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        if strangers := [p for p in peers if not 0 <= p < self.size]:
            raise ValueError(
                f"rank {self.rank} swaps with {ranks_text(strangers)}, "
                f"but ranks are 0 to {self.size - 1}"
            )
        call = RankCall("swap", values, self.clock(), peers=tuple(peers))
        matched, present = self._match(call), (*peers, self.rank)
        self.world.wait(
            self.rank,
            f"swap #{matched.number}",
            lambda: matched.came_at(present),
            lambda: matched.absent(present),
        )
        self.world.spend(self.rank, self.world.cost("swap", call.nbytes, len(peers)), "exchange")
        return [call.inbox[i] for i in range(len(peers))]

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        to_oneself(self, give, into)
        self._transfers += 1
        post, mine = self.world._post_message, self.rank
        sent = [post(mine, r, v.detach(), True) for r, v in give.items() if r != mine]
        got = [post(r, mine, v.detach(), False) for r, v in into.items() if r != mine]
        return _Transfer(self, self._transfers - 1, sent + got)

    def close(self) -> None: ...

    def clock(self) -> float:
        return self.world.now[self.rank]

    def _match(self, call: RankCall) -> MatchedCall:
        self._calls += 1
        return self.world._match(self.rank, self._calls - 1, call)


class _Collective:
    def __init__(self, group: InprocGroup, call: RankCall):
        self._group, self._matched = group, group._match(call)
        self._where = f"{call.what} #{self._matched.number}"
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        world, rank, matched = self._group.world, self._group.rank, self._matched
        everyone = range(world.size)
        world.wait(rank, self._where, matched.all_came_at, lambda: matched.absent(everyone))
        world.spend(rank, max(0.0, matched.finish - world.now[rank]), "exchange")
        self._done = True


class _Transfer:
    def __init__(self, group: InprocGroup, number: int, messages: list[InprocMessage]):
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
class _Wait:
    where: str
    until: Callable[[], float | None]
    absent: Callable[[], list[int]]


class _Unwind(BaseException):
    """Another rank failed: leave. No Exception, so `except Exception` in a strategy lets it
    pass."""
