"""Network namespaces without names, so that none can be left behind.

A namespace lives as long as a process is in it. Each of ours is held by a `cat` that reads from a
pipe of ours: when this process ends, in any way, the pipe ends, `cat` ends, and the kernel removes
namespace, cards and links. A process that was started inside and did not end carries our mark in
its environment; `sweep` finds it by that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manyhands.errors import LaunchError
from manyhands.launch import environment

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
BESIDES = ("/usr/sbin", "/sbin")  # not on every PATH, but ip and tc are there


@dataclass(frozen=True)
class Rights:
    """How this user may make a network namespace: by `unshare` with these options; `own_users`:
    inside a user namespace of its own."""

    unshare: tuple[str, ...]
    own_users: bool


@dataclass(frozen=True)
class Namespace:
    holder: subprocess.Popen[bytes]
    own_users: bool

    def enter(self, from_outside: bool = True) -> tuple[str, ...]:
        """The command prefix that runs a command in this namespace. From inside its user namespace
        only the network has to change."""
        net = ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net")
        users = (f"--user=/proc/{self.holder.pid}/ns/user", "--preserve-credentials")
        return (*net, *(users if self.own_users and from_outside else ()), "--")

    def close(self) -> None:
        assert self.holder.stdin is not None and self.holder.stdout is not None
        self.holder.stdin.close()
        self.holder.wait()
        self.holder.stdout.close()


def rights(env: Mapping[str, str]) -> Rights:
    """How this user may make network namespaces here; raises with the reason and what to do."""
    if not sys.platform.startswith("linux"):
        raise LaunchError(
            f"a lab is made of Linux network namespaces, but this is {sys.platform}; "
            "use a Linux machine or container"
        )
    missing = [tool for tool in TOOLS if shutil.which(tool, path=env["PATH"]) is None]
    if missing:
        packages = " and ".join(dict.fromkeys(TOOLS[tool] for tool in missing))
        raise LaunchError(
            f"a lab needs the commands {', '.join(missing)}, which are not here; install {packages}"
        )
    answers = []
    for way in (Rights(("--net",), False), Rights(("--user", "--map-root-user", "--net"), True)):
        tried = subprocess.run(
            ["unshare", *way.unshare, "true"], capture_output=True, text=True, env=env
        )
        if tried.returncode == 0:
            return way
        reason = tried.stderr.strip().splitlines()[-1].removeprefix("unshare: ")
        answers.append(f"unshare {' '.join(way.unshare)}: {reason}")
    raise LaunchError(
        f"this user may not make network namespaces here ({'; '.join(answers)}); run as root, or "
        "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 and "
        "kernel.apparmor_restrict_unprivileged_userns=0, where they exist), or in docker add "
        "--cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined"
    )


def hold(prefix: tuple[str, ...], how: Rights, env: Mapping[str, str]) -> Namespace:
    """A new namespace, made by a command with this `prefix`."""
    # a session of its own: Ctrl-C must not end the namespace while workers still save
    holder = subprocess.Popen(
        [*prefix, "unshare", *how.unshare, "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        holder.stdin.write(b"\n")
        holder.stdin.flush()
    made = holder.stdout.read(1) == b"\n"  # cat answers: unshare has done its work
    words = "" if made else holder.stderr.read().decode(errors="replace").strip()
    holder.stderr.close()
    if not made:
        holder.wait()
        raise LaunchError(f"a network namespace could not be made: {words}")
    return Namespace(holder, how.own_users)


# -- which processes belong to which lab --


def mark() -> str:
    """An id of this process: its pid, and its start time because pids are reused."""
    return f"{os.getpid()}/{_started(os.getpid())}"


def sweep(maker: str | None = None) -> list[int]:
    """Kill processes of labs whose maker is dead, or of the lab of `maker`; returns their pids. No
    other process is touched."""
    ended = []
    for pid, belongs_to in _marked():
        if pid != os.getpid() and (belongs_to == maker if maker else not _alive(belongs_to)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
    return ended


def _marked() -> list[tuple[int, str]]:
    """Living processes that carry a lab's mark, with the mark."""
    found, name = [], f"{environment.LAB_MAKER}=".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for entry in (path / "environ").read_bytes().split(b"\0"):
                if entry.startswith(name):
                    found.append(
                        (int(path.name), entry.removeprefix(name).decode(errors="replace"))
                    )
    return found


def _alive(maker: str) -> bool:
    pid, _, started = maker.partition("/")
    return pid.isdigit() and _started(int(pid)) == started


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; "" if there is none, or only a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]
