"""`manyhands chaos FILE PLAN... --kill server@5s`: one run undisturbed, one disturbed, the verdict.

Exit codes: 0, nothing was lost; 1, something was lost or counted twice, the run did not finish, or
a fault was not injected; 2, the plan or a fault is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from manyhands.assembly.data import shares_steps
from manyhands.cli.chaos.faults import (
    Fault,
    TimedFault,
    check_faults,
    draw_times,
    parse_fault,
    parse_seconds,
    parse_share,
    risks,
)
from manyhands.cli.chaos.injector import LOOK_S, Injector, first_event, first_round
from manyhands.cli.chaos.ledger import Ledger, RunKind, make_ledger, read_ledgers
from manyhands.cli.chaos.rank_faults import lab_hosts, outlived
from manyhands.cli.chaos.rank_history import read_history
from manyhands.cli.chaos.rank_verdict import make_rank_ledger
from manyhands.cli.chaos.report import lines
from manyhands.cli.chaos.run_processes import descendants
from manyhands.core import Plan
from manyhands.errors import LaunchError, ManyhandsError, PlanError, RunBusy
from manyhands.launch import environment
from manyhands.launch.environment import Chaos
from manyhands.launch.signals import Stop
from manyhands.observe.events import read
from manyhands.plan import words as plan_words

CALM, CHAOS, REPORT = "calm", "chaos", "chaos.json"
GRACE_S = 10.0  # for a run that is told to stop


@dataclass(frozen=True)
class ChaosOptions:
    """Options of the command line, as given."""

    kill: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    full_disk: tuple[str, ...] = ()
    delay: str | None = None
    duplicate: float | None = None
    seed: int = 0

    def faults(self) -> list[Fault]:
        return [
            *(parse_fault("kill", text) for text in self.kill),
            *(parse_fault("pause", text) for text in self.pause),
            *(parse_fault("slow", text) for text in self.slow),
            *(parse_fault("cut", text) for text in self.cut),
            *(parse_fault("full-disk", text) for text in self.full_disk),
        ]

    def frames(self, disk: bool) -> Chaos:
        """`disk`: it will be full, which shared memory would feel too."""
        delay_s = 0.0 if self.delay is None else parse_seconds(self.delay, "--delay")
        share = parse_share(self.duplicate)
        return Chaos(delay_s, share, bool(delay_s or share or disk), self.seed)


def chaos(
    script: Path,
    words: list[str],
    given: ChaosOptions,
    directory: Path | None,
    arguments: list[str],
) -> int:
    """The exit code."""
    faults = given.faults()
    frames = given.frames(disk=any(fault.kind == "full-disk" for fault in faults))
    plan = plan_words.parse(words)
    check_faults(faults, bool(frames.delay_s or frames.duplicate), plan, len(lab_hosts()))
    _check_here()
    folder = _choose(script, directory)
    for text in risks(faults, plan):
        _say(f"{text}: expect a loss")
    command = [*RUN, str(script), *words, "--dir", "", *(["--", *arguments] if arguments else [])]
    with Stop() as stop:
        _say(f"an undisturbed run first, in {folder / CALM}")
        code, _, _ = _run(command, folder / CALM, Chaos(), stop, [], given.seed)
        if code:
            raise LaunchError(
                f"the undisturbed run failed with exit code {code}; nothing was broken yet: look "
                "at its last lines above",
                code,
            )
        calm_s = _duration(folder / CALM)
        timed = draw_times(faults, calm_s, given.seed)
        for late in [t for t in timed if t.at_s > calm_s]:
            _say(f"{late.fault} is due after the {calm_s:.1f} s that the run took undisturbed")
        _say(f"it took {calm_s:.1f} s; now the disturbed run, in {folder / CHAOS}")
        begun = time.time()
        code, injector, left = _run(command, folder / CHAOS, frames, stop, timed, given.seed)
    seconds = calm_s, time.time() - begun
    ledger = _ledger(folder, plan, code, injector, seconds, left)
    (folder / REPORT).write_text(ledger.to_json())
    print("\n" + "\n".join(lines(ledger)), flush=True)
    return 1 if ledger.problems else 0


RUN = (sys.executable, "-m", "manyhands", "run")


def _check_here() -> None:
    if not sys.platform.startswith("linux"):
        raise PlanError(f"chaos finds processes as Linux lists them, and this is {sys.platform}")
    if where := environment.served().coordinator:
        raise PlanError(
            f"the servers at {where} were started by hand (DMLC_PS_ROOT_URI), and chaos breaks "
            "only what the run has started itself; unset that variable"
        )


def _choose(script: Path, directory: Path | None) -> Path:
    if directory is None:
        directory = Path("runs") / f"{script.stem}-chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RunBusy(f"{directory} exists already; give a new or an empty directory with --dir")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _run(
    command: list[str],
    run: Path,
    frames: Chaos,
    stop: Stop,
    faults: list[TimedFault],
    seed: int,
) -> tuple[int, Injector, list[str]]:
    """Exit code of one run, with its faults, and what a launcher that was killed has left. It is
    resumed then. No process stays behind."""
    line = [str(run) if word == "" else word for word in command]
    injector, left = Injector(run, faults, seed, _say), list[str]()
    try:
        while True:
            code = _run_once(line, frames, stop, injector)
            if not injector.orphans:
                return code, injector, left
            left += outlived(injector.orphans)
            at = line.index("--dir")
            if "--resume" not in line:
                line = [*line[:at], "--resume", *line[at:]]
            _say("the launcher is gone; the run is resumed")
    finally:
        injector.close()


def _run_once(line: list[str], frames: Chaos, stop: Stop, injector: Injector) -> int:
    env = {
        **environment.variables(),
        environment.CHAOS: json.dumps(asdict(frames)),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,  # Ctrl-C is for us; we stop the run
    )
    assert process.stdout is not None
    pump = threading.Thread(target=_indent, args=(process.stdout,), name="chaos run", daemon=True)
    pump.start()
    injector.follow(process.pid)
    try:
        while process.poll() is None and not stop.requested:
            injector.step()
            time.sleep(LOOK_S)
    finally:
        injector.release()
        _end(process, 0.0 if sys.exc_info()[0] is not None else GRACE_S)
        pump.join(2.0)
        process.stdout.close()
    if stop.requested:
        name = signal.Signals(stop.requested).name
        raise LaunchError(f"stopped by {name}; no process is left", 128 + stop.requested)
    return process.returncode


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a run that still goes on, and what it has started."""
    if process.poll() is not None:
        return
    started = [process.pid, *descendants(process.pid)]
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(grace_s)
    if process.poll() is None:
        for pid in {*started, *descendants(process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _indent(pipe: IO[bytes]) -> None:
    with contextlib.suppress(ValueError):  # closed: the run is over
        for raw in pipe:
            print(f"  | {raw.decode(errors='replace').rstrip()}", flush=True)


def _duration(run: Path) -> float:
    """Seconds of training, from its first round to its end."""
    begun, ended = first_round(run), first_event(run, "finish")
    if begun is None or ended is None:
        raise LaunchError(f"{run} has no rounds in its events; give a plan that trains")
    return ended - begun


def _ledger(
    folder: Path,
    plan: Plan,
    code: int,
    injector: Injector,
    seconds: tuple[float, float],
    left: list[str],
) -> Ledger:
    disturbed = seconds[1]
    if (begun := injector.began_s) is not None:
        ended = first_event(folder / CHAOS, "finish")
        disturbed = (ended if ended is not None else time.time()) - begun
    elastic, run = plan.elastic is not None, folder / CHAOS
    if plan.servers == 0:
        return make_rank_ledger(
            read_history(folder / CALM),
            read_history(run),
            injector.faults,
            began_s=begun or 0.0,
            exit_code=code,
            seconds=(seconds[0], disturbed),
            left=left,
        )
    return make_ledger(
        read_ledgers(folder / CALM, elastic),
        read_ledgers(run, elastic),
        injector.faults,
        injector.report,
        began_s=begun or 0.0,
        exit_code=code,
        seconds=(seconds[0], disturbed),
        kind=RunKind(
            shares_steps(plan),
            elastic,
            leaves_out=plan.merge == "backup",
            counted=not elastic or plan.strategy.on_server == "optimizer",
        ),
        workers=_news(run),
    )


def _news(run: Path) -> list[str]:
    """Of workers that were lost, and that joined."""
    with contextlib.suppress(ManyhandsError):  # it has no events
        return [str(e.value) for e in read(run) if e.name in ("worker lost", "worker joined")]
    return []


def _say(text: str) -> None:
    print(f"{'chaos':<12}{text}", flush=True)
