"""A short soak; `python tests/support/soak.py --minutes 10` is the long one."""

from __future__ import annotations

import pytest

from support.soak import possible, soak

pytestmark = pytest.mark.slow  # processes by the dozen: run by hand, -m slow


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_servers_survive_clients_that_are_killed_all_the_time_and_count_every_push_once() -> None:
    outcome = soak(minutes=0.5)
    assert outcome.wrong == [] and outcome.kills > 5 and outcome.pushes > 100


def test_what_was_under_way_may_have_arrived_or_not_but_not_twice() -> None:
    assert possible(0.0, []) and possible(5.0, [1.0, 2.0, 4.0])
    assert (
        not possible(8.0, [1.0, 2.0, 4.0])
        and not possible(2.0, [1.0, 4.0])
        and not possible(-1.0, [1.0])
    )
