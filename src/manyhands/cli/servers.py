"""`manyhands servers RUN status|add|drain|rebalance`: the servers of a run that is training.

    status      which server holds which shards, and what has happened so far
    add         start another server for the run; shards move to it while training goes on
    drain N     move everything away from server N, then end it
    rebalance   move shards from the servers with the most load to those with the least

The run directory tells where its coordinator is (`servers.json`, which only its owner can read).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from manyhands.assembly.tables import SERVERS_FILE
from manyhands.errors import LaunchError
from manyhands.launch import environment
from manyhands.launch.server_child import MODULE
from manyhands.server.client.operator import Operator

LOG = "servers.log"
START_S = 60.0  # for an added server to be there
PATIENCE_S = 60.0  # of an added server, for a coordinator that died
LOOK_S = 0.1
VERBS = ("status", "add", "drain", "rebalance")


def servers(run: Path, verb: str, server: int | None = None, wait: bool = True) -> int:
    """The exit code. `wait`: return when everything has moved."""
    if verb not in VERBS:
        raise LaunchError(f"{verb}: one of {', '.join(VERBS)} is needed")
    if (verb == "drain") != (server is not None):
        raise LaunchError(
            "drain needs the number of a server: manyhands servers RUN drain 1"
            if verb == "drain"
            else f"{verb} takes no server; only drain does"
        )
    where = read(run)
    with Operator(where["coordinator"], where["token"]) as operator:
        if verb == "add":
            add(run, where, operator)
        elif verb == "drain":
            assert server is not None
            operator.drain(server)
        if verb in ("add", "rebalance") and not operator.rebalance():
            print("no shard moves: the load is as even as whole shards allow (see shards=)")
        if verb != "status" and wait:
            follow(operator)
        for line in describe(operator.status()):
            print(line)
    return 0


def read(run: Path) -> dict[str, str]:
    """Where the coordinator of a run is, and its token."""
    try:
        found: dict[str, str] = json.loads((run / SERVERS_FILE).read_text())
    except FileNotFoundError:
        raise LaunchError(
            f"{run} has no {SERVERS_FILE}: it is no run directory, the run has ended, or it has no "
            "servers of its own; give the directory of a run with servers= that is training"
        ) from None
    except (OSError, ValueError) as e:
        raise LaunchError(f"{run / SERVERS_FILE} cannot be read: {e}") from e
    return found


def add(run: Path, where: dict[str, Any], operator: Operator) -> None:
    """Start a server that ends with the run, not with this command."""
    known = {each["server"] for each in operator.status()["servers"]}
    config = {
        "host": where["coordinator"].rpartition(":")[0].strip("[]"),
        "token": where["token"],
        "coordinator": where["coordinator"],
        "modules": where.get("modules") or [],
        "memory_bytes": where.get("memory_bytes"),
        "patience_s": PATIENCE_S,
        "detached": True,
        "extra": True,
    }
    with (run / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**environment.variables(), "CUDA_VISIBLE_DEVICES": ""},
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(config).encode() + b"\n")
    process.stdin.close()
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        there = {each["server"] for each in operator.status()["servers"]}
        if new := there - known:
            print(f"server {min(new)} (pid {process.pid}) has joined")
            return
        if process.poll() is not None:
            raise LaunchError(
                f"the new server ended with exit code {process.returncode}; see {run / LOG}"
            )
        time.sleep(LOOK_S)
    process.kill()
    raise LaunchError(f"the new server did not join within {START_S:g} s; see {run / LOG}")


def follow(operator: Operator) -> None:
    """Until no shard is on its way."""
    live, said = sys.stdout.isatty(), ""
    while True:
        status = operator.status()
        moving = [f"{k} -> server {s['server']}" for s in status["servers"] for k in s["learns"]]
        giving = any(s["gives"] for s in status["servers"])
        if not moving and not giving:
            break
        now = "moving shards " + ", ".join(moving)
        if now != said and not live:
            print(now, flush=True)
        if live:
            print(f"\r\x1b[2K{now}", end="", flush=True)
        said = now
        time.sleep(LOOK_S)
    if live and said:
        print("\r\x1b[2K", end="", flush=True)


def describe(status: dict[str, Any]) -> list[str]:
    """
    server  address           pid    serves   copies   state
    0       127.0.0.1:41234   1201   0 1      2        draining
    """
    rows = [("server", "address", "pid", "serves", "copies", "rows/s", "state")]
    loads = status["loads"]
    for each in status["servers"]:
        copies = [k for k in each["holds"] if k not in each["leads"]]
        state = "draining" if each["draining"] else "" if each["connected"] else "not connected"
        if each["learns"]:
            state = f"{state} gets {' '.join(map(str, each['learns']))}".strip()
        rate = sum(loads[k] for k in each["leads"])
        rows.append(
            (
                str(each["server"]),
                each["address"],
                str(each["pid"]),
                " ".join(map(str, each["leads"])) or "-",
                " ".join(map(str, copies)) or "-",
                f"{rate:,.0f}",
                state,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += [f"server {number} was lost: {why}" for number, why in status["losses"]]
    lines += [f"shard {k} is lost: no server holds it" for k in status["lost_shards"]]
    lines += [
        f"shard {k} copied to server {server}: {nbytes / 1e6:,.1f} MB in {seconds:.2f} s"
        for k, server, seconds, nbytes in status["copies"]
    ]
    return lines
