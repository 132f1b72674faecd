"""Hosts launcher: a worker's exit code is that of the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from manyhands.core import Job
from manyhands.errors import LaunchError
from manyhands.exchange.shared import SharedGroup
from manyhands.launch import environment
from manyhands.launch.hosts import HostsLauncher


@pytest.mark.parametrize("leave", [sys.exit, os._exit])
@pytest.mark.parametrize("leaver", [0, 1])
def test_an_exit_code_of_one_rank_outweighs_that_its_peer_lost_it(
    leave: Callable[[int], None], leaver: int
) -> None:
    def work() -> dict[str, Any]:
        here = environment.process_info()
        store = environment.store(here, timeout_s=60.0)
        group = SharedGroup(here.rank, here.size, store, timeout_s=60.0)
        if here.rank == leaver:
            leave(3)
        try:
            group.barrier()  # raises PeerLost, which is reported
        finally:
            group.close()
        return {}

    with pytest.raises(LaunchError, match=f"^rank {leaver} ended with exit code 3") as failed:
        HostsLauncher().launch(Job(2, cloudpickle.dumps(work)))
    assert failed.value.exit_code == 3


def test_a_job_whose_ranks_all_leave_with_0_has_not_failed() -> None:
    def work() -> dict[str, Any]:
        sys.exit(0)

    assert HostsLauncher().launch(Job(1, cloudpickle.dumps(work))) == {}
