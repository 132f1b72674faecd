"""News of members: a process that was replaced is told as lost once, whatever came first."""

from __future__ import annotations

from manyhands.server.clock import Clock


def clock() -> Clock:
    made = Clock(2)
    made.elastic.used = True
    for worker in range(2):
        made.join(worker, 0)
    return made


def lost(made: Clock) -> list[tuple[str, str]]:
    return [(who, text) for kind, who, text in made.elastic.news if kind == "lost"]


def test_a_worker_whose_place_is_taken_before_its_end_was_noticed_is_lost() -> None:
    made = clock()
    made.join(1, 1)
    made.join(1, 1)  # a repeated one is harmless
    assert lost(made) == [("1/0", "rank 1 is lost: another process has taken its place")]


def test_a_worker_whose_end_was_noticed_is_not_lost_again_when_another_takes_its_place() -> None:
    made = clock()
    made.evict(1, "its connection broke")
    made.join(1, 1)
    assert lost(made) == [("1/0", "rank 1 is lost: its connection broke")]
