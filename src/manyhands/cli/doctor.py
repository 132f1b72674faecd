"""`manyhands doctor`: looks at this machine the way training will, and says what to do where it would go wrong.

Every check runs the thing itself: a port is bound and reached, two processes really all-reduce 25 MB.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from manyhands.exchange import segments

if TYPE_CHECKING:
    from torch import Tensor

GIB = 2**30
PROBE_BYTES = 25_000_000  # gradients of a ResNet-18 in half precision, of a small ResNet in full
PEERS_S = 12.0  # two processes that import torch on a busy core need a few seconds; more is a failure
WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)  # no honest clock shows a time before this package was written


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    do: str = ""


Variables = Mapping[str, str]


def doctor(variables: Variables | None = None) -> int:
    """Make every check and print it as one row; the exit code is 1 where one of them failed."""
    if variables is None:
        from manyhands.launch import environment

        variables = environment.variables()
    return show(examine(variables))


def show(checks: Sequence[Check]) -> int:
    from rich.console import Console
    from rich.table import Table

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(f"[{colours[check.verdict]}]{check.verdict}[/]", check.name, _plain(check.found), _plain(check.do))
    console = Console(soft_wrap=False)
    console.print(table)
    count = {verdict: sum(c.verdict == verdict for c in checks) for verdict in colours}
    console.print(f"\n{count['ok']} ok, {count['warn']} to know, {count['fail']} to mend", highlight=False)
    return 1 if count["fail"] else 0


def examine(variables: Variables) -> list[Check]:
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", python),
        ("packages", packages),
        ("cores", cores),
        ("memory", memory),
        ("shared memory", shared_memory),
        ("leftovers", leftovers),
        ("disk", disk),
        ("clock", clock),
        ("devices", lambda: devices(variables)),
        ("host name", lambda: host_name(variables)),
        ("ports", lambda: ports(variables)),
        ("two processes", two_processes),
    ]
    return [_safely(name, check) for name, check in checks]


def _safely(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as e:  # a check that cannot be made is a finding, and the others are still worth having
        return Check(
            name, "fail", f"could not be checked: {type(e).__name__}: {e}", "if this machine is in order, please report it"
        )


# -- software --


def python() -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        return Check("python", "fail", found, "use Python 3.11, 3.12 or 3.13")
    return Check("python", "ok", found)


def packages() -> Check:
    import torch

    if tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) < (2, 11):
        return Check("packages", "fail", f"torch {torch.__version__}", "pip install 'torch>=2.11'")
    try:
        wanted = importlib.metadata.requires("manyhands") or []
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "packages",
            "warn",
            f"torch {torch.__version__}; manyhands runs from its sources",
            "pip install -e . to have its commands",
        )
    names = [re.split(r"[^\w.-]", line)[0] for line in wanted if "extra ==" not in line]
    versions = {name: _version(name) for name in ("manyhands", *names)}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing := [name for name, version in versions.items() if not version]:
        return Check("packages", "fail", f"missing: {', '.join(missing)}; {found}", f"pip install {' '.join(missing)}")
    return Check("packages", "ok", found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- this machine --


def cores(root: Path = Path("/")) -> Check:
    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quota = cpu_quota(root)
    usable = min(allowed, quota or allowed)
    found = f"{present} present, {allowed} allowed by affinity, " + (f"{quota:g} by the cgroup" if quota else "no cgroup limit")
    if usable < 1:
        return Check("cores", "warn", found, "less than one core: every timing will be uneven; raise the container's CPU limit")
    if quota and quota < allowed:
        return Check("cores", "warn", found, f"start at most {int(quota)} processes x threads here (data={int(quota)} threads=1)")
    return Check("cores", "ok", found)


def memory(root: Path = Path("/")) -> Check:
    free, limit = _available_bytes(), memory_left(root)
    usable = min(free, limit if limit is not None else free)
    found = f"{free / GIB:.1f} GiB free" + (
        f", {limit / GIB:.1f} GiB left in the cgroup" if limit is not None and limit < free else ""
    )
    if usable < GIB:
        return Check("memory", "warn", found, "below 1 GiB: fewer processes (data=), a smaller batch, or close other programs")
    return Check("memory", "ok", found)


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many cores the tightest cgroup above this process grants; None: as many as there are."""
    quotas = []
    for folder in _cgroups(root, ""):
        if words := _words(folder / "cpu.max"):  # version 2: "200000 100000" or "max 100000"
            quotas += [int(words[0]) / int(words[1])] if words[0] != "max" else []
    for folder in _cgroups(root, "cpu"):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        quotas += [int(quota[0]) / int(period[0])] if quota and period and int(quota[0]) > 0 else []
    return min(quotas, default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes this process may still take before its tightest cgroup kills it; None: no limit."""
    left = []
    names = [("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")]
    for controller, limit_name, usage_name in names:
        for folder in _cgroups(root, controller):
            limit, usage = _words(folder / limit_name), _words(folder / usage_name)
            if limit and usage and limit[0] != "max" and int(limit[0]) < 2**60:  # version 1 writes "no limit" as a huge number
                left.append(int(limit[0]) - int(usage[0]))
    return min(left, default=None)


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The folders of the cgroup of this process and of all above it; controller "": version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    top = root / "sys/fs/cgroup" / controller
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            folder = top / path.lstrip("/")
            # inside a container the path is often the host's and absent here: what there is of it is at the top
            return [f for f in (folder, *folder.parents) if f == top or top in f.parents]
    return []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def shared_memory() -> Check:
    folder = segments.directory()
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}"
    if usage.free < GIB // 4:
        return Check(
            "shared memory",
            "warn",
            found,
            "parameters and gradients live there: enlarge it (docker: --shm-size=2g) or set link=gloo",
        )
    return Check("shared memory", "ok", found)


def leftovers() -> Check:
    gone = segments.sweep()
    if gone:
        return Check(
            "leftovers",
            "ok",
            f"removed {len(gone)} segments of dead processes: {', '.join(gone[:3])}{', ...' if gone[3:] else ''}",
        )
    return Check("leftovers", "ok", f"none in {segments.directory()}")


def disk() -> Check:
    here = Path.cwd()
    usage = shutil.disk_usage(here)
    found = f"{usage.free / GIB:.1f} GiB free in {here}"
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"checkpoint")
    except OSError as e:
        return Check("disk", "fail", f"{found}, but a file cannot be written: {e.strerror}", "run from a folder you may write to")
    if usage.free < GIB:
        return Check("disk", "warn", found, "runs and checkpoints go here: make room, or run from another disk")
    return Check("disk", "ok", found)


def clock() -> Check:
    now = datetime.now(UTC)
    if now < WRITTEN:
        return Check(
            "clock",
            "fail",
            f"it shows {now:%Y-%m-%d %H:%M} UTC, before this package existed",
            "set the clock (timedatectl set-ntp true)",
        )
    resolution_us = time.get_clock_info("perf_counter").resolution * 1e6
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        skew_s = abs(os.stat(file.name).st_mtime - time.time())
    found = f"{now:%Y-%m-%d %H:%M:%S} UTC, resolution {resolution_us:g} us, files here are stamped {skew_s:.2f} s apart"
    if skew_s > 2:
        return Check("clock", "warn", found, "events of several machines will not line up: let NTP set both clocks")
    return Check("clock", "ok", found)


def devices(variables: Variables) -> Check:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Check(
            "devices",
            "fail",
            "this torch was built without torch.distributed",
            "install a build with it; one process still works",
        )
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    found = f"links {', '.join(['shared', *backends])}; "
    seen = variables.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found += ", ".join(f"{g.name} ({g.total_memory / GIB:.0f} GiB)" for g in gpus)
    else:
        found += (
            "no CUDA device" + (f" (CUDA_VISIBLE_DEVICES={seen!r})" if seen is not None else "") + ": training runs on the CPU"
        )
    if "gloo" not in backends:
        return Check(
            "devices",
            "fail",
            found,
            "gloo is missing from this torch: only one machine and GPUs will work; install another build",
        )
    if torch.cuda.is_available() and "nccl" not in backends:
        return Check("devices", "warn", found, "GPUs without nccl exchange through the CPU: install a CUDA build of torch")
    return Check("devices", "ok", found)


# -- network --


def host_name(variables: Variables) -> Check:
    """The address that other machines would be told, and the variable that changes it."""
    name, cards = socket.gethostname(), addresses()
    chosen = variables.get("GLOO_SOCKET_IFNAME", "")
    if chosen and not set(chosen.split(",")) <= cards.keys():
        known = ", ".join(f"{card} ({address})" for card, address in cards.items())
        found = f"GLOO_SOCKET_IFNAME={chosen}, but the network cards here are {known}"
        return Check("host name", "fail", found, "set GLOO_SOCKET_IFNAME to one of these, or unset it")
    address = host_address(variables)
    outside = default_card() or next((card for card, a in cards.items() if not a.startswith("127.")), None)
    advice = (
        f"export GLOO_SOCKET_IFNAME={outside} NCCL_SOCKET_IFNAME={outside}"
        if outside
        else "this machine has no other network card"
    )
    if address is None:
        return Check("host name", "warn", f"{name} does not resolve", f"add it to /etc/hosts, or {advice}")
    card = next((card for card, a in cards.items() if a == address), "no card of this machine")
    found = f"{name}: ranks here are reached at {address} ({card})"
    if address.startswith("127."):
        return Check("host name", "ok", f"{found}, from this machine only", f"for several machines: {advice}")
    if address not in cards.values():
        return Check("host name", "warn", found, f"/etc/hosts or DNS names another machine; mend it, or {advice}")
    return Check("host name", "ok", found)


def host_address(variables: Variables) -> str | None:
    """Where gloo would listen: on the card it is told, else where the host's name points."""
    chosen = variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if chosen:
        return addresses().get(chosen)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def addresses() -> dict[str, str]:
    """IPv4 address of every network card that has one; empty where the system cannot be asked."""
    try:
        from fcntl import ioctl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, card in socket.if_nameindex():
            try:
                answer = ioctl(s.fileno(), 0x8915, struct.pack("256s", card.encode()))  # SIOCGIFADDR of Linux
            except OSError:
                continue
            found[card] = socket.inet_ntoa(answer[20:24])
    return found


def default_card() -> str | None:
    """The card that leads out of this machine, as the kernel's routing table says."""
    try:
        rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def ports(variables: Variables) -> Check:
    """A free port can be had and reached: on the loopback for one machine, on the host's address for several."""
    wanted = list(dict.fromkeys(["127.0.0.1", host_address(variables) or "127.0.0.1"]))
    reached = []
    for address in wanted:
        try:
            reached.append(f"{address}:{_reach(address)}")
        except OSError as e:
            loopback = address.startswith("127.")
            return Check(
                "ports",
                "fail" if loopback else "warn",
                f"{address} cannot be bound and reached: {e}",
                "a firewall or sandbox blocks the loopback: allow it"
                if loopback
                else "mend /etc/hosts or set GLOO_SOCKET_IFNAME",
            )
    return Check("ports", "ok", f"bound and reached {', '.join(reached)}")


def _reach(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        server.settimeout(2)
        port: int = server.getsockname()[1]
        with socket.create_connection((address, port), timeout=2) as client:
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"?")
                accepted.settimeout(2)
                if accepted.recv(1) != b"?":
                    raise OSError("the connection opened, but what was sent did not arrive")
    return port


# -- the exchange itself --


def two_processes() -> Check:
    """All-reduce of 25 MB between two processes, through shared memory and through gloo, here and now."""
    name = "two processes"
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys; from manyhands.cli.doctor import peer; peer(int(sys.argv[1]), sys.argv[2])"
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(r), folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for r in range(2)
        ]
        try:
            deadline = time.monotonic() + PEERS_S
            outputs = [p.communicate(timeout=max(0.1, deadline - time.monotonic())) for p in processes]
        except subprocess.TimeoutExpired:
            return Check(
                name,
                "fail",
                f"not done in {PEERS_S:.0f} s",
                "the machine is overloaded, or processes cannot reach each other; try again alone",
            )
        finally:
            for p in processes:
                p.kill()
                p.communicate()
    if any(p.returncode for p in processes):
        error = next((err for (_, err), p in zip(outputs, processes, strict=True) if p.returncode), "").strip()
        return Check(
            name,
            "fail",
            f"ended with {error.splitlines()[-1] if error else 'no word'}",
            "training on several processes will fail the same way",
        )
    return judge_link(json.loads(outputs[0][0].splitlines()[-1]))


def judge_link(measured: Mapping[str, float | str]) -> Check:
    """`measured`: seconds a link took for the probe, or the words of its error."""
    name = "two processes"
    works = {link: s for link, s in measured.items() if isinstance(s, float)}
    broken = {link: s for link, s in measured.items() if isinstance(s, str)}
    size = f"{PROBE_BYTES / 1e6:.0f} MB"
    found = ", ".join(f"{link} {s * 1e3:.1f} ms ({PROBE_BYTES / s / 1e9:.1f} GB/s)" for link, s in works.items())
    found = "; ".join(
        [f"all-reduce of {size}: {found}" if found else "", *(f"{link} failed: {e}" for link, e in broken.items())]
    ).strip("; ")
    if not works:
        return Check(name, "fail", found, "mend what the rows above name; until then data=1")
    if "gloo" in broken:
        return Check(name, "warn", found, "several machines will not work: set GLOO_SOCKET_IFNAME, see the row 'host name'")
    if "shared" in broken:
        return Check(name, "warn", found, "set link=gloo, or see the row 'shared memory'")
    if works["shared"] > works["gloo"]:
        return Check(name, "warn", found, "shared memory is the slower one here: set link=gloo")
    return Check(name, "ok", found)


def peer(rank: int, folder: str) -> None:
    """One of the two processes of `two_processes`; rank 0 prints seconds a link as JSON."""
    import torch
    import torch.distributed as dist

    from manyhands.exchange.shared import SharedGroup

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    measured: dict[str, float | str] = {}

    def shared() -> float:
        group = SharedGroup(rank, 2, dist.PrefixStore("shared", store), timeout_s=PEERS_S / 2)
        values = group.allocate(PROBE_BYTES // 4, torch.float32)
        seconds = _median_s(values, lambda: group.all_reduce({"values": values}).wait())
        group.close()
        return seconds

    def gloo() -> float:
        timeout = timedelta(seconds=PEERS_S / 2)
        dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=2, timeout=timeout)
        values = torch.zeros(PROBE_BYTES // 4)
        seconds = _median_s(values, lambda: dist.all_reduce(values))
        dist.destroy_process_group()
        return seconds

    for name, probe in {"shared": shared, "gloo": gloo}.items():
        try:
            measured[name] = probe()
        except Exception as e:  # its words are the finding
            measured[name] = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    if rank == 0:
        print(json.dumps(measured), flush=True)


def _median_s(values: Tensor, exchange: Callable[[], object], times: int = 7) -> float:
    values.fill_(1)
    exchange()  # connections are made and pages touched on the first call
    if not bool((values == 2).all()):
        raise RuntimeError("1 + 1 of two processes came out wrong")
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        exchange()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _plain(text: str) -> str:
    """Square brackets as they are: rich reads `[sklearn]` as a colour."""
    return text.replace("[", r"\[")
