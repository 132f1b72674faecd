"""Leases end by the holder's clock alone, in the order in which they end; epochs never go back."""

from __future__ import annotations

import pytest

from manyhands.errors import Fenced
from manyhands.membership import EpochFence, Leases, MapEpoch

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis comes with the extra `dev`")
given, st = hypothesis.given, hypothesis.strategies

MEMBERS = st.integers(0, 4)
SECONDS = st.floats(1e-3, 1e3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("renew"), MEMBERS, SECONDS),
        st.tuples(st.just("drop"), MEMBERS, st.just(0.0)),
        st.tuples(st.just("pass"), st.just(0), st.floats(0, 1e3)),
    )
)


@given(STEPS)
def test_a_lease_ends_exactly_when_it_was_not_renewed_for_its_seconds(
    steps: list[tuple[str, int, float]],
) -> None:
    now = 0.0
    leases: Leases[int] = Leases(clock=lambda: now)
    heard: dict[int, tuple[float, float]] = {}  # when, and for how long
    for verb, member, seconds in steps:
        if verb == "renew":
            leases.renew(member, seconds)
            heard[member] = (now, seconds)
        elif verb == "drop":
            leases.drop(member)
            heard.pop(member, None)
        else:
            now += seconds
        ends = {m: when + lasts for m, (when, lasts) in heard.items()}
        expired = leases.expired()
        assert set(expired) == {m for m, end in ends.items() if end <= now}
        assert [ends[m] for m in expired] == sorted(ends[m] for m in expired)
        assert len(leases) == len(heard) and all(m in leases for m in heard)
        left = leases.next_s()
        assert left == (max(0.0, min(ends.values()) - now) if ends else None)
        assert (left == 0.0) == bool(expired)


@given(st.sampled_from([0.0, -1.0, float("nan")]))
def test_a_lease_of_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="more than 0 s is needed"):
        Leases[str]().renew("worker", seconds)


def test_leases_do_not_look_at_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    leases: Leases[str] = Leases()
    leases.renew("worker", 60)
    for off in (-1e9, 0.0, 1e12):
        monkeypatch.setattr("time.time", lambda off=off: off)
        assert leases.expired() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_an_epoch_once_seen_shuts_out_all_older_ones(sent: list[tuple[int, int]]) -> None:
    fence, newest = EpochFence(), (0, 0)
    for term, number in sent:
        epoch = MapEpoch(term, number)
        if (term, number) < newest:
            with pytest.raises(Fenced, match=rf"epoch {number} of term {term} came after"):
                fence.admit(epoch)
        else:
            assert fence.admit(epoch) == ((term, number) > newest)
            newest = (term, number)
        assert fence.newest == newest


def test_the_next_epoch_is_later_also_under_another_coordinator() -> None:
    first = MapEpoch(3, 9)
    assert first < first.next(3) < first.next(3).next(7) == MapEpoch(7, 11)
    with pytest.raises(Fenced, match="term 2 would follow epoch 9 of term 3"):
        first.next(2)
