"""Real labs: hosts with their own addresses, and networks that hold their rate.

Nothing is left behind, however the command ends.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.errors import LaunchError
from manyhands.launch import environment, lab, namespaces
from manyhands.recover.checkpoint import Checkpoints
from support.commands import (
    CLI,
    ENDLESS,
    STOPPED_S,
    Command,
    command,
    descendants,
    environ,
    gone,
    wait_until_gone,
)

ORDER = dict(rtol=1e-5, atol=1e-6)  # sums of the same numbers in another order
RATE_BITS = 200e6
PAYLOAD_BYTES = 8 * 2**20


PATH = ":".join([os.environ["PATH"], *namespaces.BESIDES])


def refusal() -> str:
    try:
        namespaces.rights({**environ(), "PATH": PATH})
    except LaunchError as e:
        return str(e)
    return ""


pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal() or "labs are possible here")

TRAIN = """
import torch, manyhands as mh
from torch import nn

def task():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    model = lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    return mh.Task(model=model, loss=nn.functional.cross_entropy,
                   train=(x, (x.sum(1) > 0).long()), epochs=2,
                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
"""

# runs beside the bridge; each job goes to the hosts
BESIDE = """
import functools, json, sys
import cloudpickle
import manyhands as mh
from train import task
from manyhands.core import Job
from manyhands.launch.lab import launcher

def meet(payload_bytes):
    import os, socket, time
    import torch, torch.distributed as dist
    from manyhands.launch import environment
    here = environment.process_info()
    dist.init_process_group("gloo")  # as a script with torch's own DDP does
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((os.environ["MASTER_ADDR"], 9))
        address = towards.getsockname()[0]
    everybody = [None] * here.size
    mine = [here.host, here.local_rank, here.local_size, address, torch.get_num_threads()]
    dist.all_gather_object(everybody, mine)
    values = torch.ones(payload_bytes // 4)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(values)
    seconds = time.perf_counter() - start
    assert values[0] == here.size
    dist.destroy_process_group()
    return {"everybody": everybody, "seconds": seconds}

body = cloudpickle.dumps(functools.partial(meet, int(sys.argv[1])))
found = launcher().launch(Job(2, body, threads=1))
for n in (2, 4):
    mh.train(task, f"data={n} batch={16 // n}", directory=f"lab{n}")
print("found", json.dumps(found))
"""


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("beside")
    (folder / "train.py").write_text(TRAIN)
    (folder / "beside.py").write_text(BESIDE)
    with lab.up(lab.Lab(2, RATE_BITS)) as (switch, env):
        line = [*switch.enter(), sys.executable, "beside.py", str(PAYLOAD_BYTES)]
        done = subprocess.run(
            line, cwd=folder, env={**env, **environ()}, capture_output=True, text=True, timeout=100
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def found(text: str) -> dict[str, Any]:
    (line,) = (line for line in text.splitlines() if line.startswith("found "))
    return dict(json.loads(line.removeprefix("found ")))


def test_ranks_are_on_hosts_of_their_own(beside: tuple[Path, str]) -> None:
    assert found(beside[1])["everybody"] == [
        ["host1", 0, 1, "10.77.0.2", 1],
        ["host2", 0, 1, "10.77.0.3", 1],
    ]


def test_a_link_is_never_faster_than_its_rate(beside: tuple[Path, str]) -> None:
    # two ranks: each sends all of it, half as its share of the sum and half as the result
    at_once = 4 * max(
        lab.SMALLEST_BURST_BYTES, RATE_BITS / 8 * lab.BURST_S
    )  # what the buckets at both ends let pass
    assert found(beside[1])["seconds"] > (PAYLOAD_BYTES - at_once) * 8 / RATE_BITS


def test_training_in_a_lab_gives_what_one_process_gives_and_hosts_share_no_memory(
    beside: tuple[Path, str],
) -> None:
    folder, text = beside
    assert "2 x cpu over gloo" in text and "4 x cpu over hierarchical" in text
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        alone = mh.train(
            runpy.run_path(str(folder / "train.py"))["task"],
            "batch=16",
            directory=folder / "alone",
            quiet=True,
        )
    expected = Checkpoints(folder / "alone" / "checkpoints").latest()
    assert expected is not None and alone.rounds == 8
    for name in "lab2", "lab4":
        found = Checkpoints(folder / name / "checkpoints").latest()
        assert (
            found is not None and found.round == 8 and found.params.keys() == expected.params.keys()
        )
        for key, value in found.params.items():
            torch.testing.assert_close(value, expected.params[key], **ORDER)


# -- how it ends --

# and a rank starts something that outlives it
STRAY = (
    ENDLESS.replace("import os, threading", "import os, subprocess, threading")
    + """
if os.environ.get("RANK") == "1" and not Path("stray.pid").exists():
    stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path("stray.pid").write_text(str(stray.pid))
"""
)


@contextmanager
def endless(folder: Path, *words: str) -> Iterator[Command]:
    (folder / "job.py").write_text(STRAY)
    job = ["run", "job.py", "data=2", "save=1000000000", "--dir", "run", "--quiet", *words]
    with command(folder, [*CLI, "lab", "--hosts", "2", "--rate", "1gbit", "--", *job]) as running:
        yield running


def spaces(pids: list[int]) -> set[str]:
    """The network namespaces of processes."""
    found = set()
    for pid in pids:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            pass
    return found


def inhabited(names: set[str]) -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if spaces([int(p.name)]) & names]


def outside() -> list[str]:
    """Cards and named namespaces of the machine itself, which a lab must neither make nor leave."""
    named = Path("/run/netns")
    return sorted([*os.listdir("/sys/class/net"), *(os.listdir(named) if named.is_dir() else [])])


def test_ctrl_c_saves_and_takes_everything_down_also_what_a_rank_left_running(
    tmp_path: Path,
) -> None:
    before = outside()
    with endless(tmp_path) as job:
        pids = [*job.pids(2), int((tmp_path / "stray.pid").read_text())]
        started = descendants(job.process.pid)
        made = spaces(started)
        assert len(made) == 3 and not made & spaces([os.getpid()]), "two hosts and the bridge"
        assert len(spaces(pids[:2])) == 2
        assert outside() == before
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
        assert "stopped by SIGINT" in job.err.splitlines()[-1] and "Traceback" not in job.err
        saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
        assert saved is not None and saved.round >= 1
        wait_until_gone([*pids, *started], STOPPED_S)
    assert not inhabited(made) and outside() == before


def test_kill_9_leaves_nothing_but_strays_and_the_next_start_sweeps_those(tmp_path: Path) -> None:
    before = outside()
    with endless(tmp_path) as job:
        pids = job.pids(2)
        stray = int((tmp_path / "stray.pid").read_text())
        started = descendants(job.process.pid)
        made = spaces(started)
        job.process.kill()
        job.end()
        wait_until_gone([p for p in [*pids, *started] if p != stray], STOPPED_S)
        assert not gone([stray]) and inhabited(made) == [stray]
        with lab.up(lab.Lab(1)) as (_, env):
            assert environment.LAB in env
            wait_until_gone([stray], STOPPED_S)
        assert not inhabited(made) and outside() == before


@pytest.mark.slow
def test_a_killed_rank_is_named_and_two_labs_do_not_disturb_each_other(tmp_path: Path) -> None:
    for name in "one", "two":
        (tmp_path / name).mkdir()
    with endless(tmp_path / "one") as one, endless(tmp_path / "two") as two:
        victims, others = one.pids(2), two.pids(2)
        os.kill(victims[1], signal.SIGKILL)
        assert one.end() == 128 + signal.SIGKILL
        assert (
            f"rank 1 (pid {victims[1]}) was killed by SIGKILL" in one.err
            and "Traceback" not in one.err
        )
        assert gone(victims) and not gone(others)
        two.process.send_signal(signal.SIGTERM)
        assert two.end() == 128 + signal.SIGTERM
        assert gone(others)


# -- what is refused --


def test_a_kernel_without_netem_refuses_delay_before_anything_is_made() -> None:
    attempt = [
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "tc",
        "qdisc",
        "add",
        "dev",
        "lo",
        "root",
        "netem",
        "delay",
        "1ms",
    ]
    has = (
        subprocess.run(attempt, capture_output=True, env={**environ(), "PATH": PATH}).returncode
        == 0
    )
    slow = lab.Lab(2, delay_s=0.005, loss=0.01)
    if has:
        with lab.up(slow):
            pass
        return
    with pytest.raises(LaunchError) as refused, lab.up(slow):
        pass
    assert str(refused.value).startswith("this kernel has no delay and loss (sch_netem; tc says: ")
    assert str(refused.value).endswith("or leave out --delay and --loss")
