"""Keeper in etcd: a key with a lease is the claim, and every save asks etcd whether it stands.

    /manyhands/<run>/claim    who holds it; etcd deletes it when its lease is not renewed for TTL
    /manyhands/<run>/state    the state, with the term and the number of its save

    claim   if claim does not exist:                   put claim, with a lease of TTL
    save    if claim was created at revision `term`
            and state is as this holder left it:       put state
            else:                                      Fenced

etcd carries these out one after the other, so a save that comes after another's claim changes
nothing, however long it was under way. The term is the revision at which the claim was created,
and etcd's revisions only grow. The holder counts the lease by its own monotonic clock from before
it sent the renewal, and considers itself lost at four fifths of it: before etcd, which counts from
when the renewal arrived, lets another in. The time of day is never used.
"""

from __future__ import annotations

import base64
import os
import struct
import threading
import time
from typing import Any
from urllib.parse import quote

from manyhands.errors import Fenced, MembershipError
from manyhands.membership.etcd_gateway import (
    EtcdRefused,
    EtcdUnreachable,
    Gateway,
    parse,
    text,
)
from manyhands.membership.keeper import Keeper

DEFAULT_TTL_S = 5
SHORTEST_TTL_S = 2  # etcd raises shorter ones to this
PROBE_S = 3.0
HELD = 0.8  # of TTL: after this without a renewal the holder considers itself lost
RENEWALS = 5  # within TTL
ATTEMPTS = 4  # the share of TTL that one member has to answer

_HEADER = struct.Struct("<8sQQ")  # magic, term, number of the save
_MAGIC = b"mhstate1"
_TOO_LARGE = "request is too large"


class EtcdKeeper(Keeper):
    """`endpoints`: host:port[,host:port], members of one cluster; the first that answers is used.

    `ttl_s`: when the holder dies, another may claim after this many seconds.
    """

    def __init__(self, endpoints: str, run: str, *, ttl_s: int = DEFAULT_TTL_S):
        super().__init__(run)
        if not isinstance(ttl_s, int) or not SHORTEST_TTL_S <= ttl_s <= 3600:
            raise MembershipError(
                f"ttl_s={ttl_s}; whole seconds from {SHORTEST_TTL_S} to 3600 are needed"
            )
        self.ttl_s = ttl_s
        self._gateway = Gateway(parse(endpoints), ttl_s / ATTEMPTS)
        self._gateway.probe(PROBE_S)
        folder = f"/manyhands/{quote(run, safe='')}"
        self._claim_key = text(f"{folder}/claim".encode())
        self._state_key = text(f"{folder}/state".encode())
        self._lease = ""
        self._until = 0.0  # of time.monotonic: when the claim may end
        self._revision, self._saves = 0, 0  # of the state key; of this holder
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def place(self) -> str:
        return str(self._gateway)

    def load(self) -> bytes | None:
        with self._lock:
            kv = self._state_now()
            return _decode(kv, self)[2] if kv is not None else None

    def close(self) -> None:
        """Gives the claim up at once where etcd can be reached; else it ends with its lease."""
        self._stop.set()
        mine = self._pid in (0, os.getpid())
        if self._thread is not None and mine:
            self._thread.join()
        with self._lock:
            if self._lease and mine and not self._closed and not self.lost.is_set():
                self._revoke()
            self._closed = True
            self._gateway.close()

    # -- the claim --

    def _claim(self, who: str) -> None:
        holder = self._range(self._claim_key)
        if holder is None:
            holder = self._take(who)
        if holder is not None:
            raise self._busy(
                base64.b64decode(holder.get("value", "")).decode(errors="replace"),
                f"The claim of a dead process ends with its lease ({DEFAULT_TTL_S} s unless it "
                "chose another): try again then.",
            )
        kv = self._state_now()  # no other holder can change it from here on
        self._revision = int(kv["mod_revision"]) if kv is not None else 0
        self._thread = threading.Thread(target=self._renew, name="etcd lease", daemon=True)
        self._thread.start()

    def _take(self, who: str) -> dict[str, Any] | None:
        """Create the claim; the claim that is there, where another was faster."""
        granted = self._ask("/v3/lease/grant", {"TTL": str(self.ttl_s)})
        self._lease = granted["ID"]
        self.ttl_s = max(self.ttl_s, int(granted["TTL"]))
        self._until = self._gateway.sent + self.ttl_s * HELD
        put = {"key": self._claim_key, "value": text(who.encode()), "lease": self._lease}
        see = {"request_range": {"key": self._claim_key}}
        answer = self._ask(
            "/v3/kv/txn",
            {
                "compare": [_same(self._claim_key, "CREATE", "create_revision", 0)],
                "success": [{"request_put": put}, see],
                "failure": [see],
            },
        )
        kv = _first(answer["responses"][-1]["response_range"])
        # by its lease, as the answer to an earlier try of this very call may have been lost
        if kv is not None and kv.get("lease") == self._lease:
            self.term = int(kv["create_revision"])
            return None
        self._revoke()
        return kv or {}

    def _revoke(self) -> None:
        limit = time.monotonic() + self._gateway.attempt_s
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": self._lease}, lambda: limit)
        except MembershipError:
            pass  # it ends by itself
        self._lease = ""

    def _ended(self) -> str:
        if time.monotonic() < self._until:
            return ""
        return (
            f"its lease was not renewed for {HELD * self.ttl_s:g} s of {self.ttl_s} (it was "
            f"paused, or {self.place} did not answer)"
        )

    def _renew(self) -> None:
        gateway = self._gateway.twin()

        def until() -> float:
            return 0.0 if self._stop.is_set() else self._until

        try:
            while not self._stop.wait(self.ttl_s / RENEWALS) and not self.lost.is_set():
                answer = gateway.call("/v3/lease/keepalive", {"ID": self._lease}, until)
                sent, left = gateway.sent, int(answer["result"].get("TTL", 0))
                found = gateway.call("/v3/kv/range", {"key": self._claim_key}, until)
                if left <= 0:
                    self._lose("etcd ended its lease")
                elif why := self._taken(_first(found)) or self._ended():
                    self._lose(why)
                else:
                    self._until = sent + min(left, self.ttl_s) * HELD
        except MembershipError as e:
            if not self._stop.is_set():
                self._lose(self._ended() or str(e))
        finally:
            gateway.close()

    def _taken(self, claim: dict[str, Any] | None) -> str:
        """Why this claim, as etcd has it, is not ours; "" where it is."""
        if claim is None:
            return f"{self.place} deleted its claim, whose lease ended"
        if int(claim["create_revision"]) != self.term:
            who = base64.b64decode(claim.get("value", "")).decode(errors="replace")
            return f"{self.place} gave the claim to {who}"
        return ""

    # -- the state --

    def _save(self, state: bytes) -> None:
        self._saves += 1
        value = text(_HEADER.pack(_MAGIC, self.term, self._saves) + state)
        limit = time.monotonic() + self.ttl_s
        while True:
            try:
                answer = self._gateway.call(
                    "/v3/kv/txn", self._put_state(value), lambda: min(limit, self._until)
                )
            except EtcdUnreachable as e:
                self.check()  # Fenced where the lease ended meanwhile
                raise MembershipError(f"the state may not have been saved: {e}") from e
            except EtcdRefused as e:
                if _TOO_LARGE in str(e):
                    raise MembershipError(
                        f"a state of {len(state)} bytes is too large for {self.place}; keep less, "
                        "or start etcd with a larger --max-request-bytes"
                    ) from e
                raise
            claim, kept = (_first(each["response_range"]) for each in answer["responses"][-2:])
            if why := self._taken(claim):
                self._lose(why)
                raise Fenced(self._why_lost)
            wrote = _decode(kept, self)[:2] if kept is not None else (0, 0)
            if kept is None or wrote[0] != self.term:
                raise MembershipError(
                    f"another program changed the state of run {self.run!r} in {self.place}; only "
                    "the coordinator may write there"
                )
            self._revision = int(kept["mod_revision"])
            if wrote[1] == self._saves:
                return  # now, or by an earlier try whose answer was lost
            # an earlier save, given up for lack of an answer, was carried out after all: once more

    def _put_state(self, value: str) -> dict[str, Any]:
        """A transaction that answers with claim and state as they are after it.

        It compares the state's revision too: a try that was given up and is still under way must
        not put an older state over a newer one.
        """
        see = [{"request_range": {"key": key}} for key in (self._claim_key, self._state_key)]
        return {
            "compare": [
                _same(self._claim_key, "CREATE", "create_revision", self.term),
                _same(self._state_key, "MOD", "mod_revision", self._revision),
            ],
            "success": [{"request_put": {"key": self._state_key, "value": value}}, *see],
            "failure": see,
        }

    def _state_now(self) -> dict[str, Any] | None:
        return self._range(self._state_key)

    def _range(self, key: str) -> dict[str, Any] | None:
        return _first(self._ask("/v3/kv/range", {"key": key}))

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        limit = time.monotonic() + self.ttl_s
        return self._gateway.call(path, body, lambda: limit)


def _same(key: str, target: str, field: str, value: int) -> dict[str, str]:
    return {"key": key, "target": target, "result": "EQUAL", field: str(value)}


def _first(answer: dict[str, Any]) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = answer.get("kvs", [])
    return found[0] if found else None


def _decode(kv: dict[str, Any], keeper: EtcdKeeper) -> tuple[int, int, bytes]:
    """Term, number and state of what is kept."""
    raw = base64.b64decode(kv.get("value", ""))
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise MembershipError(
            f"what {keeper.place} keeps for run {keeper.run!r} is no state of a coordinator; "
            "delete the key, or give this run another name"
        )
    _, term, number = _HEADER.unpack_from(raw)
    return term, number, raw[_HEADER.size :]
