"""Environment variables: rank, world size, rendezvous and servers of this process. Read only here.

Understood: manyhands' own variables (named as torchrun's), torchrun, Slurm's srun and Open MPI's
mpirun, and for parameter servers that were started by hand those of PS-Lite, MXNet and BytePS
(DMLC_*).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, cast, get_args

import torch.distributed as dist

from manyhands.core import ProcessInfo
from manyhands.errors import LaunchError

STARTED_BY_US = "MANYHANDS_WORKER"
WORDS = "MANYHANDS_PLAN"
OPTIONS = "MANYHANDS_OPTIONS"
HOST = "MANYHANDS_HOST"
LAB = "MANYHANDS_LAB"  # hosts of the lab that this process may use, as JSON of `launch.lab`
LAB_MAKER = "MANYHANDS_LAB_MAKER"  # in every process of a lab: the process that made it
TOKEN, TOKEN_FILE = "MANYHANDS_TOKEN", "MANYHANDS_TOKEN_FILE"  # shared by workers and servers
RUN_TOKEN = "MANYHANDS_RUN_TOKEN"  # of the launcher: what its ranks sign with
NAMESPACE = "MANYHANDS_NAMESPACE"  # of this run, on servers that serve several
CHAOS = "MANYHANDS_CHAOS"  # of a run that `manyhands chaos` watches, as JSON of `Chaos`
TLS_CA = "MANYHANDS_TLS_CA"  # certificate authority of the servers' certificate
MEMBER = "MANYHANDS_MEMBER"  # number of this process among those of an elastic run
LAUNCHER = "MANYHANDS_LAUNCHER"  # process of our launcher
PRELOAD = "MANYHANDS_PRELOAD"  # modules to load before a process knows which rank it is
STARTS = "MANYHANDS_STARTS"  # of a launcher that replaces ranks: how many were this one before
TRACEBACK = "MANYHANDS_TRACEBACK"  # full: errors keep the frames of manyhands itself
PREFIX = "manyhands/0"  # of our keys in the store; the number counts torchrun's restarts


def variables() -> Mapping[str, str]:
    return dict(os.environ)


def process_info(env: Mapping[str, str] | None = None) -> ProcessInfo:
    env = os.environ if env is None else env
    host, machine = env.get(HOST) or socket.gethostname(), _machine()
    if "RANK" in env and "WORLD_SIZE" in env:
        ours = env.get(STARTED_BY_US) == "1"
        rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise LaunchError(
                f"RANK={rank} and WORLD_SIZE={size} contradict each other: "
                "0 <= RANK < WORLD_SIZE is needed"
            )
        return ProcessInfo(
            rank,
            size,
            _int(env, "LOCAL_RANK", rank),
            _int(env, "LOCAL_WORLD_SIZE", size),
            host,
            "manyhands" if ours else "torchrun",
            machine,
        )
    if (
        "SLURM_PROCID" in env
        and "SLURM_STEP_NUM_TASKS" in env
        and int(env["SLURM_STEP_NUM_TASKS"]) > 1
    ):
        return ProcessInfo(
            _int(env, "SLURM_PROCID"),
            _int(env, "SLURM_STEP_NUM_TASKS"),
            _int(env, "SLURM_LOCALID"),
            _int(env, "SLURM_NTASKS_PER_NODE", 1),
            host,
            "slurm",
            machine,
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        rank, size, local_rank, local_size = (
            _int(env, f"OMPI_COMM_WORLD_{n}") for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        )
        return ProcessInfo(rank, size, local_rank, local_size, host, "mpi", machine)
    return ProcessInfo(host=host, machine=machine)


def _machine() -> str:
    """A boot of a kernel and its shared memory: what two containers, or two machines of one name,
    do not have in common."""
    found = []
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        shm = os.stat("/dev/shm")
        found.append(f"{shm.st_dev:x}.{shm.st_ino:x}")
    return "/".join(found)


def store(here: ProcessInfo, timeout_s: float, env: Mapping[str, str] | None = None) -> dist.Store:
    """The rendezvous: a key-value store of all ranks. Under torchrun and our own launcher, the
    launcher hosts it."""
    env = os.environ if env is None else env
    if here.size == 1 and here.started_by != "manyhands":
        return dist.HashStore()
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        raise LaunchError(
            f"rank {here.rank} of {here.size} was started by {here.started_by} without MASTER_ADDR "
            "and MASTER_PORT; set them to a host name of rank 0 and a free port there"
        )
    hosted_here = here.rank == 0 and rank_0_hosts_store(env)
    address, port = env["MASTER_ADDR"], _int(env, "MASTER_PORT")
    try:
        base = _connect(address, port, hosted_here, timedelta(seconds=timeout_s))
    except RuntimeError as e:
        if hosted_here and ("EADDRINUSE" in str(e) or "in use" in str(e)):
            raise LaunchError(
                f"port {port} is taken on {address}; set MASTER_PORT to a free one"
            ) from e
        raise LaunchError(
            f"rank {here.rank} cannot reach the rendezvous at {address}:{port}: {e}"
        ) from e
    restart = "0" if here.started_by == "manyhands" else env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(PREFIX if restart == "0" else f"manyhands/{restart}", base)


def rank_0_hosts_store(env: Mapping[str, str] | None = None) -> bool:
    """Whether the store answers only while rank 0 does: nobody else hosts it."""
    return (os.environ if env is None else env).get("TORCHELASTIC_USE_AGENT_STORE") != "True"


# one for all runs of a process: rank 0 can host only one on a port
_stores: dict[tuple[str, int], dist.TCPStore] = {}


def _connect(address: str, port: int, hosted_here: bool, timeout: timedelta) -> dist.TCPStore:
    if (address, port) not in _stores:
        _stores[address, port] = dist.TCPStore(
            address, port, is_master=hosted_here, wait_for_workers=False, timeout=timeout
        )
    _stores[address, port].set_timeout(timeout)
    return _stores[address, port]


def own_store(here: ProcessInfo, env: Mapping[str, str] | None = None) -> dist.Store:
    """A second connection to the launcher's rendezvous, for a thread of its own."""
    env = os.environ if env is None else env
    address, port = env["MASTER_ADDR"], _int(env, "MASTER_PORT")
    base = dist.TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    return dist.PrefixStore(f"{PREFIX}/run/0", base)


# -- parameter servers started by others --

Role = Literal["worker", "server", "scheduler"]


@dataclass(frozen=True)
class ServedBy:
    """Servers named by the environment; None, "" or 0: not named."""

    role: Role | None = None
    uri: str = ""  # of the coordinator, which PS-Lite calls scheduler or root
    port: int = 0
    num_workers: int | None = None
    num_servers: int | None = None
    interface: str = ""  # name of the network card to listen on
    node_host: str = ""  # address at which others reach this node
    token: str = ""
    token_file: str = ""  # where it is, where the variable does not hold it itself
    tls_ca: str = ""  # file; "": connections are not encrypted
    namespace: str = ""  # of this run, on servers that serve several

    @property
    def coordinator(self) -> str:
        """Where to join them, as host:port; "": none were started for us."""
        return at(self.uri, self.port) if self.uri and self.port else ""

    def secret(self) -> str:
        """The token that workers and servers share; "": none was given."""
        return self.token or (
            read_token(Path(self.token_file), TOKEN_FILE) if self.token_file else ""
        )


def served(env: Mapping[str, str] | None = None) -> ServedBy:
    """PS-Lite's variables, and our own for what it does not have: the token and TLS."""
    env = os.environ if env is None else env
    role = env.get("DMLC_ROLE") or None
    if role == "coordinator":  # our own word for it
        role = "scheduler"
    if role is not None and role not in get_args(Role):
        raise LaunchError(f"DMLC_ROLE={role}; needed: worker, server or scheduler")
    uri = env.get("DMLC_PS_ROOT_URI", "")
    port = _int(env, "DMLC_PS_ROOT_PORT") if env.get("DMLC_PS_ROOT_PORT") else 0
    if not 0 <= port < 65536:
        raise LaunchError(f"DMLC_PS_ROOT_PORT={port}; needed: 1 to 65535")
    if uri and not port:
        raise LaunchError(
            f"DMLC_PS_ROOT_URI={uri} without DMLC_PS_ROOT_PORT; "
            "set it to the port of the coordinator there"
        )
    counts = {
        name: _int(env, name) if env.get(name) else None
        for name in ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise LaunchError(f"{name}={count}; needed: 1 or more")
    return ServedBy(
        cast("Role | None", role),
        uri,
        port,
        counts["DMLC_NUM_WORKER"],
        counts["DMLC_NUM_SERVER"],
        env.get("DMLC_INTERFACE", ""),
        env.get("DMLC_NODE_HOST", ""),
        env.get(TOKEN, "").strip(),
        env.get(TOKEN_FILE, ""),
        env.get(TLS_CA, ""),
        env.get(NAMESPACE, "").strip(),
    )


def read_token(path: Path, named_by: str) -> str:
    try:
        found = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise LaunchError(
            f"{named_by}={path} cannot be read ({e}); "
            "needed: a file with the token that the servers use"
        ) from e
    if not found:
        raise LaunchError(
            f"{named_by}={path} is empty; needed: a file with the token that the servers use"
        )
    return found


def at(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs there."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def own_address(env: Mapping[str, str] | None = None) -> str:
    """The address at which other hosts reach this one, as far as this process can know."""
    env = os.environ if env is None else env
    return env.get("DMLC_NODE_HOST") or address_towards(
        env.get("MASTER_ADDR") or env.get("DMLC_PS_ROOT_URI") or "127.0.0.1"
    )


def address_towards(host: str) -> str:
    """The own address on the route to `host`. Nothing is sent: connecting a datagram socket only
    looks up the route."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as e:
        raise LaunchError(
            f"there is no way from here to {host} ({e}); give an address that all hosts reach"
        ) from e


def words(env: Mapping[str, str] | None = None) -> str:
    """The plan that the launcher hands to a script with its own loop."""
    return (os.environ if env is None else env).get(WORDS, "")


def options(env: Mapping[str, str] | None = None) -> str:
    return (os.environ if env is None else env).get(OPTIONS, "{}")


def lab(env: Mapping[str, str] | None = None) -> str:
    """The description of the lab that this process runs in; "": in none."""
    return (os.environ if env is None else env).get(LAB, "")


@dataclass(frozen=True)
class Chaos:
    """What a rank does in a run that `manyhands chaos` watches: it keeps a ledger, and mistreats
    its frames to servers."""

    delay_s: float = 0.0
    duplicate: float = 0.0  # share of frames that are sent twice
    sockets: bool = False  # servers are reached through sockets, not through shared memory
    seed: int = 0


def chaos(env: Mapping[str, str] | None = None) -> Chaos | None:
    """None: nobody watches this run."""
    found = (os.environ if env is None else env).get(CHAOS, "")
    return Chaos(**json.loads(found)) if found else None


def starts(env: Mapping[str, str] | None = None) -> int | None:
    """How many processes were started as this rank before; None: a rank that dies is not
    replaced."""
    env = os.environ if env is None else env
    return _int(env, STARTS) if STARTS in env else None


def member(env: Mapping[str, str] | None = None) -> int | None:
    """The number of this process in an elastic run between ranks; None: in no such run."""
    env = os.environ if env is None else env
    return _int(env, MEMBER) if MEMBER in env else None


def launcher_pid(env: Mapping[str, str] | None = None) -> int | None:
    """The process of our launcher, also for a rank that it has not started itself."""
    env = os.environ if env is None else env
    return _int(env, LAUNCHER) if LAUNCHER in env else None


def preload(env: Mapping[str, str] | None = None) -> list[str]:
    return (os.environ if env is None else env).get(PRELOAD, "").split()


def take_part(address: str, port: int, token: str, number: int, launcher: int) -> None:
    """This process becomes a member of a run under way, which its launcher has let in."""
    os.environ.update(
        {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            STARTED_BY_US: "1",
            RUN_TOKEN: token,
            MEMBER: str(number),
            LAUNCHER: str(launcher),
        }
    )


def update(changed: Mapping[str, str]) -> None:
    """Variables that the launcher has told this process after its start."""
    os.environ.update(changed)


def replace(env: Mapping[str, str]) -> None:
    """These are the variables of this process, and no others."""
    os.environ.clear()
    os.environ.update(env)


def become(rank: int, size: int) -> None:
    """This process is another rank from here on, also for what user code reads."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)


def hand_over(plan_words: str, plan_options: str) -> None:
    """Leave the plan for `mh.join()` in this process."""
    os.environ[WORDS], os.environ[OPTIONS] = plan_words, plan_options


def full_traceback(env: Mapping[str, str] | None = None) -> bool:
    """Whether errors keep the frames of manyhands itself: MANYHANDS_TRACEBACK=full."""
    return (os.environ if env is None else env).get(TRACEBACK) == "full"


def cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise LaunchError(
            f"{name}={value!r}, but a whole number is needed; "
            "the program that started this process must set it"
        ) from None
