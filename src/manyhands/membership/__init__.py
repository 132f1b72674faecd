"""Membership: one coordinator for each run, and its state, kept over `kill -9` of the coordinator.

    keeper = membership.open(where, run)   a directory, or "etcd://host:port[,host:port]"
    keeper.claim("server 0")               RunBusy names the coordinator that is there already
    state = keeper.load()                  what the coordinator before saved last; None: nothing
    keeper.save(state)                     returns when it is kept; Fenced when the claim is lost
    keeper.close()                         the next one may claim at once

`keeper` is what both back ends offer. `file_keeper` locks a file on one machine and writes to a
`state_file`; `etcd_keeper` holds a lease of an etcd cluster, reached through `etcd_gateway`.
`epochs` compares what coordinators send, and refuses that of an older one; `leases` says which
members have not been heard of for too long. No decision uses the time of day, so clocks of
different machines may differ.
"""

from __future__ import annotations

import os

from manyhands.errors import MembershipError
from manyhands.membership.epochs import EpochFence, MapEpoch
from manyhands.membership.etcd_keeper import DEFAULT_TTL_S, EtcdKeeper
from manyhands.membership.file_keeper import FileKeeper
from manyhands.membership.keeper import Keeper
from manyhands.membership.leases import Leases
from manyhands.membership.rank_epochs import RankEpoch

__all__ = ["EpochFence", "Keeper", "Leases", "MapEpoch", "RankEpoch", "open"]


def open(
    where: str | os.PathLike[str], run: str, *, fsync: bool = False, ttl_s: int | None = None
) -> Keeper:
    """The keeper of a run's state: in a directory, or in etcd where `where` is "etcd://host:port".

    `fsync`: a save survives loss of power too, and takes milliseconds; for directories, as etcd
    does it always. `ttl_s`: after how many seconds of silence etcd ends a claim (5); not for
    directories, where a claim ends with its process.
    """
    if not run or "\0" in run:
        raise MembershipError(
            f"the name of the run is {run!r}; a name of one character or more is needed"
        )
    place = os.fspath(where)
    scheme, found, rest = place.partition("://")
    if not found:
        if ttl_s is not None:
            raise MembershipError(
                f"ttl_s={ttl_s} for the directory {place}; a claim there ends with its process: "
                "leave ttl_s out, or give etcd://host:port"
            )
        return FileKeeper(place, run, fsync=fsync)
    if scheme != "etcd":
        raise MembershipError(
            f"{place} begins with {scheme}://; give a directory, or etcd://host:port[,host:port]"
        )
    return EtcdKeeper(rest, run, ttl_s=DEFAULT_TTL_S if ttl_s is None else ttl_s)
