"""Which launcher starts a job from here: on this machine, or on the hosts of the lab that this process stands in."""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.core import Launcher
from manyhands.launch import environment, lab
from manyhands.launch.hosts import HostsLauncher
from manyhands.launch.local import LocalLauncher


def launcher(env: Mapping[str, str] | None = None) -> Launcher:
    described = environment.lab(env)
    if not described:
        return LocalLauncher()
    hosts, address = lab.read(described)
    return HostsLauncher(hosts, address)
