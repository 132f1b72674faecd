"""cgroup limits, versions 1 and 2: the CPU quota and the memory left to this process.

A process is bound by its own cgroup and by all cgroups above it, so the tightest limit counts.
`root` is the root of the file system; tests give a folder with files of their own.
"""

from __future__ import annotations

from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores that the tightest cgroup grants this process; None: no limit."""
    quotas = []
    for folder in _cgroups(root, ""):
        if words := _words(folder / "cpu.max"):  # version 2: "200000 100000" or "max 100000"
            quotas += [int(words[0]) / int(words[1])] if words[0] != "max" else []
    for folder in _cgroups(root, "cpu"):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            quotas.append(int(quota[0]) / int(period[0]))
    return min(quotas, default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes this process may still take before its tightest cgroup kills it; None: no limit."""
    left = []
    names = [
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ]
    for controller, limit_name, usage_name in names:
        for folder in _cgroups(root, controller):
            limit, usage = _words(folder / limit_name), _words(folder / usage_name)
            # version 1 writes "no limit" as a huge number
            if limit and usage and limit[0] != "max" and int(limit[0]) < 2**60:
                left.append(int(limit[0]) - int(usage[0]))
    return min(left, default=None)


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of the cgroup of this process and of all above it; controller "": version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    top = root / "sys/fs/cgroup" / controller
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            folder = top / path.lstrip("/")
            # in a container the path is often the host's and absent here; its limits are at the top
            return [f for f in (folder, *folder.parents) if f == top or top in f.parents]
    return []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
