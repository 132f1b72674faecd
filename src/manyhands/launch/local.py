"""All processes on this machine: the case of one host, reached by no road at all."""

from __future__ import annotations

from typing import Any

from manyhands.core import Job
from manyhands.launch.hosts import HostsLauncher


class LocalLauncher:
    def launch(self, job: Job) -> dict[str, Any]:
        return HostsLauncher().launch(job)
