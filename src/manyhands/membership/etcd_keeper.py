"""Keeper in etcd."""

from __future__ import annotations

from manyhands.membership.keeper import Keeper

DEFAULT_TTL_S = 5


class EtcdKeeper(Keeper):
    def __init__(self, endpoints: str, run: str, *, ttl_s: int):
        super().__init__(run)
        raise NotImplementedError
