"""Run token: the secret that all processes of a run share, and values signed with it.

Everybody who reaches the port of the rendezvous store can read and write it. So the token never
goes through the store, and what ends a run or names an address is signed there:

    our launcher      draws a token, and hands it to its ranks in their environment
    torchrun and the  the user's MANYHANDS_TOKEN or MANYHANDS_TOKEN_FILE; or else, on one machine,
    like              a file that only this user can read, deleted when all ranks have read it
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from manyhands.core import ProcessInfo
from manyhands.errors import LaunchError
from manyhands.launch import environment

PREFIX = "manyhands-token-"
CODE_LETTERS = 2 * hashlib.sha256().digest_size


def of_environment(env: Mapping[str, str] | None = None) -> str:
    """The token that this process was started with; "": none."""
    env = environment.variables() if env is None else env
    return env.get(environment.RUN_TOKEN, "") or environment.served(env).secret()


def sign(token: str, key: str, value: str) -> str:
    """A value for the store."""
    return _code(token, key, value) + value


def verify(token: str, key: str, raw: bytes) -> str | None:
    """The value that was signed; None: by somebody who does not know the token."""
    text = raw.decode(errors="replace")
    code, value = text[:CODE_LETTERS], text[CODE_LETTERS:]
    right = _code(token, key, value).encode()
    return value if hmac.compare_digest(code.encode(), right) else None


def _code(token: str, key: str, value: str) -> str:
    return hmac.new(token.encode(), f"{key}\0{value}".encode(), hashlib.sha256).hexdigest()


Get = Callable[[str, str], bytes]  # (key, what is waited for) -> its value, when it is there


def agree(process: ProcessInfo, store: dist.Store, one_machine: bool, get: Get) -> str:
    """One token on all ranks, where the launcher gave none. Every rank calls it."""
    if process.size == 1:
        return secrets.token_hex(32)
    if not one_machine:
        raise LaunchError(
            f"servers on several hosts need a token that all {process.size} ranks know, and "
            f"{process.started_by} hands none over; set MANYHANDS_TOKEN to the same secret on "
            "every host, or MANYHANDS_TOKEN_FILE to a file that only you can read"
        )
    if process.rank == 0:
        return _publish(process, store, get)
    path = Path(get("servers/token_file", "rank 0 to write the token").decode())
    token = read_private(path)
    store.set(f"servers/token_read/{process.rank}", "")
    return token


def _publish(process: ProcessInfo, store: dist.Store, get: Get) -> str:
    token = secrets.token_hex(32)
    handle, name = tempfile.mkstemp(prefix=PREFIX)  # readable for this user alone
    try:
        with os.fdopen(handle, "w") as file:
            file.write(token)
        store.set("servers/token_file", name)
        for rank in range(1, process.size):
            get(f"servers/token_read/{rank}", f"rank {rank} of {process.size} to read the token")
    finally:
        Path(name).unlink(missing_ok=True)
    return token


def read_private(path: Path) -> str:
    """The token in a file that another rank of this user has written, and nobody else."""
    where = Path(tempfile.gettempdir())
    if path.parent == where and path.name.startswith(PREFIX):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(handle) as file:
            found = os.fstat(handle)
            private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
            if private and found.st_uid == os.geteuid():
                return file.read()
    raise LaunchError(
        f"the rendezvous names {path} as the file of this run's token, but a file of ours in "
        f"{where}, private to this user, is needed: somebody else writes to the rendezvous; start "
        "again on another port, or set MANYHANDS_TOKEN"
    )
