"""Check of all-reduce: two processes exchange 25 MB through shared memory and through gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from manyhands.cli.doctor.finding import Finding

PROBE_BYTES = 25_000_000  # gradients of a ResNet-18 in half precision, of a small ResNet in full
PROBE_S = 12.0  # importing torch twice on a busy core takes a few seconds; more is a failure
# -P: a file in the current folder (say, torch.py) must not hide a package
PROBE = [sys.executable, "-P", "-m", "manyhands.cli.doctor.all_reduce_probe"]


def check() -> Finding:
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen([*PROBE, str(rank), folder], stdout=pipe, stderr=pipe, text=True)
            for rank in range(2)
        ]
        try:
            deadline = time.monotonic() + PROBE_S
            outputs = [
                p.communicate(timeout=max(0.1, deadline - time.monotonic())) for p in processes
            ]
        except subprocess.TimeoutExpired:
            return Finding(
                "fail",
                f"not done in {PROBE_S:.0f} s",
                "the machine is overloaded, or processes cannot reach each other; "
                "try again while nothing else runs",
            )
        finally:
            for p in processes:
                p.kill()
                p.communicate()
    for (_, errors), p in zip(outputs, processes, strict=True):
        if p.returncode:
            last = errors.strip().splitlines()[-1:] or [f"exit code {p.returncode} and no message"]
            do = "training on several processes will fail the same way"
            return Finding("fail", f"ended with {last[0]}", do)
    return judge(json.loads(outputs[0][0].splitlines()[-1]))


def judge(measured: Mapping[str, float | str]) -> Finding:
    """`measured`: by link, the seconds of one all-reduce or the message of its error."""
    works = {link: s for link, s in measured.items() if isinstance(s, float)}
    broken = {link: e for link, e in measured.items() if isinstance(e, str)}
    speeds = ", ".join(
        f"{link} {s * 1e3:.1f} ms ({PROBE_BYTES / s / 1e9:.1f} GB/s)" for link, s in works.items()
    )
    parts = [f"all-reduce of {PROBE_BYTES / 1e6:.0f} MB: {speeds}"] if works else []
    found = "; ".join([*parts, *(f"{link} failed: {e}" for link, e in broken.items())])
    if not works:
        do = "fix what the rows above report; until then train in one process (data=1)"
        return Finding("fail", found, do)
    if "gloo" in broken:
        do = "several machines will not work: set GLOO_SOCKET_IFNAME, see the row 'host name'"
        return Finding("warn", found, do)
    if "shared" in broken:
        return Finding("warn", found, "set link=gloo, or see the row 'shared memory'")
    if works["shared"] > works["gloo"]:
        return Finding("warn", found, "shared memory is slower than gloo here: set link=gloo")
    return Finding("ok", found)
