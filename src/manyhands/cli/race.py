"""`manyhands race script.py PLAN PLAN ... --target accuracy=0.88`: every plan runs until it is there; who was first, and at what cost.

A race directory holds `race.json` (what is raced), a folder a plan and in it a run directory a seed, then the picture, the page and
the numbers. An interrupted race goes on where it was: runs that are over stay, the one that was under way begins anew, because a
time that was stopped and started again is no time to accuracy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import cloudpickle
import torch

from manyhands.assembly.rank_context import Options
from manyhands.cli import ddp
from manyhands.core import Goal, Job, Plan
from manyhands.entry import defines_task, load_task, work_script
from manyhands.errors import (
    CheckpointError,
    LaunchError,
    ManyhandsError,
    PlanError,
    RunBusy,
    TaskError,
)
from manyhands.launch import environment, lab
from manyhands.observe import curves
from manyhands.observe.race import live, page, picture, table
from manyhands.observe.race.results import (
    Entry,
    Race,
    RunResult,
    follow,
    parse_target,
)
from manyhands.plan import words as plan_words
from manyhands.recover import directory
from manyhands.task import Task

RACE, OUTCOME, RESULTS, PICTURE, PAGE = (
    "race.json",
    "outcome.json",
    "results.json",
    "race.png",
    "race.html",
)
REACHED_ALL, FAILED, NOT_REACHED = 0, 1, 3  # exit codes


@dataclasses.dataclass(frozen=True)
class Runner:
    """One plan of the race, ready to run."""

    given: str
    words: dict[str, Any]
    plan: Plan
    label: str
    folder: str
    is_ddp: bool


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the task itself says."""

    metrics: tuple[str, ...]
    samples: int | None  # of one epoch; None: a stream
    seed: int
    name: str


def race(
    script: Path,
    plans: Sequence[str],
    target: str | None,
    *,
    seeds: int | None = None,
    common: Sequence[str] = (),
    folder: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    base: Path = Path("runs"),
) -> tuple[Race, Path]:
    """Run all plans, write picture, page and numbers into the race's directory, and return what was measured and where."""
    if environment.process_info().started_by != "alone":
        raise LaunchError(
            "race starts the processes of every plan itself; call it alone, not under torchrun, srun or mpirun"
        )
    if not defines_task(script):
        raise PlanError(
            f"{script} defines no task(), which race needs to run it under every plan; wrap model, data and optimizer"
        )
    path = choose(base, script.stem, folder, resume)
    asked = settle(path if resume else None, script, plans, target, seeds, common)
    goal = parse_target(asked["target"])
    runners = line_up(asked["plans"], asked["with"], goal)
    facts = look_at(script, goal)
    owner = directory.claim(path)
    try:
        (path / RACE).write_text(
            json.dumps(asked | {"facts": dataclasses.asdict(facts)}, indent=1) + "\n"
        )
        return _run_all(path, script, asked, goal, runners, facts, quiet)
    finally:
        owner.close()


def _run_all(
    path: Path,
    script: Path,
    asked: dict[str, Any],
    goal: Goal,
    runners: list[Runner],
    facts: Facts,
    quiet: bool,
) -> tuple[Race, Path]:
    stream = None if quiet else sys.stdout
    live.line(
        stream,
        "race",
        f"{path}: {len(runners)} plans to {asked['target']}, seeds: {asked['seeds']}",
    )
    for k in range(
        asked["seeds"]
    ):  # seed by seed: a busy minute of the machine meets all plans, and all of them have one soon
        for i, runner in enumerate(runners, 1):
            run = _folder(path, runner, k)
            done = _outcome(run)
            what = f"plan {i} of {len(runners)}, seed {k + 1} of {asked['seeds']}: {runner.label}"
            if done.get("state") == "done":
                live.line(stream, "race", f"{what} (done before)")
                continue
            live.line(stream, "race", what)
            try:
                _run_one(
                    script,
                    runner,
                    (facts.seed if runner.plan.seed is None else runner.plan.seed) + k,
                    run,
                    goal,
                    stream,
                )
            except KeyboardInterrupt:
                words = shlex.join(
                    ["manyhands", "race", str(script), "--resume", "--dir", str(path)]
                )
                raise LaunchError(
                    f"stopped in plan {i} of {len(runners)}, seed {k + 1}; go on with: {words}", 130
                ) from None
            live.line(stream, *_told(_course(run, k, facts, goal), goal))
    found = gather(path, runners, asked["seeds"], facts, goal)
    report(found, path, script, asked, facts, quiet)
    return found, path


def verb(
    script: Path, plans: list[str], target: str | None, seeds: int | None, common: list[str], folder: Path | None, resume: bool, quiet: bool
) -> int:  # fmt: skip
    found, _ = race(
        script, plans, target, seeds=seeds, common=common, folder=folder, resume=resume, quiet=quiet
    )
    if table.failures(found):
        return FAILED
    return REACHED_ALL if all(e.num_reached == len(e.runs) for e in found.entries) else NOT_REACHED


# -- what is raced --


def choose(base: Path, name: str, folder: Path | None, resume: bool) -> Path:
    """The directory: a new one, the given one, or, to resume, the newest race of this script."""
    if folder is not None:
        if not resume and (folder / RACE).exists():
            raise RunBusy(
                f"{folder} holds an earlier race; go on with it (--resume), or give another directory"
            )
        if resume and not (folder / RACE).exists():
            raise CheckpointError(f"there is no race to resume in {folder}: it has no {RACE}")
        return folder
    if not resume:
        return directory.choose(base, f"{name}-race", None, resume=False)
    stamped = re.compile(re.escape(name) + r"-race-(\d{8}-\d{6})(?:-(\d+))?")
    found = [
        (m[1], int(m[2] or 1), p)
        for p in base.glob("*/")
        if (m := stamped.fullmatch(p.name)) and (p / RACE).exists()
    ]
    if not found:
        raise CheckpointError(
            f"there is no race of {name!r} to resume in {base}/; give its directory with --dir, or start one"
        )
    return max(found)[-1]


def settle(
    earlier: Path | None,
    script: Path,
    plans: Sequence[str],
    target: str | None,
    seeds: int | None,
    common: Sequence[str],
) -> dict[str, Any]:
    """What is asked for, as `race.json` has it. To go on with a race, nothing need be said again, and nothing may be said otherwise
    but the number of seeds: every seed is a run of its own."""
    digest = hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    asked = {
        "script": str(script),
        "sha256": digest,
        "plans": list(plans),
        "with": " ".join(common),
        "target": target,
        "seeds": seeds,
    }
    if earlier is not None:
        before = json.loads((earlier / RACE).read_text())
        if before["sha256"] != digest:
            raise PlanError(
                f"{script} has changed since the race in {earlier} began, so its times would not compare; start a new one"
            )
        for key, word in {"plans": "plans", "target": "--target", "with": "--with"}.items():
            if asked[key] and asked[key] != before[key]:
                raise PlanError(
                    f"{earlier} is a race of other {word}: {_list(before[key])}, not {_list(asked[key])}; "
                    "leave them out to go on with it, or give another directory"
                )
        return {**before, "seeds": seeds or before["seeds"]}
    if not plans:
        raise PlanError(
            'no plan is given; one or more are needed, each one word of the shell, such as: ddp "data=2 merge=local_sgd"'
        )
    if target is None:
        raise PlanError(
            "no --target is given; METRIC=NUMBER is needed, such as --target accuracy=0.88"
        )
    parse_target(target)
    return {
        **asked,
        "seeds": seeds or 1,
        "command": shlex.join(["manyhands", *sys.argv[1:]]),
        "machine": machine(),
    }


def line_up(plans: Sequence[str], common: str, goal: Goal) -> list[Runner]:
    """All plans, parsed: a mistake in the last one is said before the first one starts."""
    shared = plan_words.overlay(common)
    parsed = []
    for i, given in enumerate(plans, 1):
        try:
            parsed.append(_parse(given, shared, goal))
        except ManyhandsError as e:
            raise PlanError(f"plan {i} ({given!r}): {e}") from None
    labels = _labels([(own, is_ddp, plan) for own, _, plan, is_ddp in parsed])
    return [
        Runner(given, words, plan, label, f"{i:02}-{_slug(label)}", is_ddp)
        for i, (given, label, (_, words, plan, is_ddp)) in enumerate(
            zip(plans, labels, parsed, strict=True), 1
        )
    ]


def _parse(
    given: str, shared: dict[str, Any], goal: Goal
) -> tuple[dict[str, Any], dict[str, Any], Plan, bool]:
    """The plan's own words, all of its words, what they say, and whether it is DDP's."""
    first, *rest = shlex.split(given) or [""]
    is_ddp = first == "ddp"
    own = plan_words.overlay(rest if is_ddp else shlex.split(given))
    if is_ddp:
        ddp.check(own)
        shared = {
            k: v for k, v in shared.items() if k in ddp.KNOWN
        }  # what is said for all need not mean something to it
    for word in ("until", "best"):
        if word in own:
            raise PlanError(f"{word}= has no place in a race: --target says when a plan is there")
    # checkpoints would be written inside the time that is measured, and nobody resumes from them
    ours = {} if is_ddp else {"save": "off"}
    words = plan_words.overlay(ours, shared, own, {"until": str(goal)})
    return own, words, plan_words.parse(words), is_ddp


def _labels(parsed: list[tuple[dict[str, Any], bool, Plan]]) -> list[str]:
    """What a plan differs in from the others, in few words, no two the same."""
    plain = [own for own, *_ in parsed]
    alike = {
        k
        for k, v in plain[0].items()
        if len(plain) > 1 and all(str(o.get(k)) == str(v) for o in plain)
    }
    labels: list[str] = []
    for own, is_ddp, plan in parsed:
        name = "ddp" if is_ddp else plan.merge
        rest = [
            f"{k.removeprefix('merge.')}={v}"
            for k, v in own.items()
            if k not in alike and k != "merge"
        ]
        label = " ".join([name, *rest])
        times = sum(re.sub(r" #\d+$", "", earlier) == label for earlier in labels)
        labels.append(f"{label} #{times + 1}" if times else label)
    return labels


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:48] or "plan"


def look_at(script: Path, goal: Goal) -> Facts:
    """Load the task once, here: a metric that it does not have is said before anything starts."""
    sys.path.insert(0, str(script.resolve().parent))
    try:
        made = load_task(str(script))
        task = made if isinstance(made, Task) else made()
    finally:
        sys.path.pop(0)
    if not isinstance(task, Task):
        raise TaskError(f"task() returned a {type(task).__name__}, but a manyhands.Task is needed")
    metrics = () if task.test is None else ("loss", *task.metrics)
    if goal.name not in metrics:
        known = (
            f"it has {', '.join(metrics)}"
            if metrics
            else "it has no test data (test=), so nothing is ever evaluated"
        )
        raise PlanError(f"--target {goal.name}: the task of {script} has no such metric; {known}")
    return Facts(metrics, _samples(task.train), task.seed, task.name)


def _samples(train: Any) -> int | None:
    from manyhands.data.sources import source

    return source(train, torch.device("cpu"), "Task.train").samples


# -- one run --


def _folder(path: Path, runner: Runner, k: int) -> Path:
    return path / runner.folder / f"seed-{k}"


def _run_one(
    script: Path, runner: Runner, seed: int, run: Path, goal: Goal, stream: TextIO | None
) -> None:
    """One plan with one seed, in processes of its own also where it is one: nothing of an earlier run is in them."""
    shutil.rmtree(run, ignore_errors=True)  # what an interruption or a failure left
    run.mkdir(parents=True)
    plan, words = runner.plan, plan_words.overlay(runner.words, {"seed": seed})
    options = Options(script.stem, str(run), quiet=True)
    body = (
        functools.partial(ddp.work, functools.partial(load_beside, str(script)), words, options)
        if runner.is_ddp
        else functools.partial(
            work_script, str(script), [], words, plan_words.parse(words), options
        )
    )
    launched_s = time.time()
    outcome: dict[str, Any] = {"state": "done", "launched_s": launched_s, "seed": seed}
    try:
        with live.RaceWatch(run, goal, stream):
            result = lab.launcher().launch(
                Job(plan.layout.size, bytes(cloudpickle.dumps(body)), plan.threads)
            )
    except ManyhandsError as e:
        if isinstance(e, LaunchError) and str(e).startswith("stopped by "):
            raise KeyboardInterrupt from None
        outcome |= {"state": "failed", "error": first_words(str(e)), "text": str(e)}
    else:
        if result.get("stopped"):
            raise KeyboardInterrupt
        with contextlib.suppress(
            Exception
        ):  # a picture of one run more or less must not end a race
            curves.draw(run)
    (run / OUTCOME).write_text(json.dumps(outcome, indent=1) + "\n")


def load_beside(script: str) -> Any:
    sys.path.insert(0, str(Path(script).resolve().parent))
    return load_task(script)


def first_words(text: str) -> str:
    """What went wrong, in one line: the error's own, without who said it and without the stack that led there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and re.fullmatch(r"rank \d+ failed:", lines[0]):
        lines = lines[1:]
    if lines and lines[0].startswith("Traceback"):
        errors = [
            line
            for line in lines
            if re.match(r"[\w.]+(Error|Exception|Interrupt|Warning|Exit)\b", line)
        ]
        lines = errors[-1:] or lines[-1:]
    return lines[0] if lines else "no words"


def _outcome(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / OUTCOME).read_text()))
    except (OSError, ValueError):
        return {}


def _course(run: Path, k: int, facts: Facts, goal: Goal) -> RunResult:
    outcome = _outcome(run)
    return follow(
        run, outcome["seed"], goal, facts.samples, outcome["launched_s"], outcome.get("error", "")
    )


def _told(result: RunResult, goal: Goal) -> tuple[str, str]:
    if result.error:
        return "failed", result.error
    if result.reached is None:
        return (
            "ended",
            f"not reached: best {goal.name} {result.best:.4g} in {table.seconds(result.seconds)}",
        )
    return (
        "reached",
        f"{goal.name} {result.reached.value:.4g} after {table.seconds(result.time_s)}, epoch {result.reached.epoch:.2f}",
    )


# -- the report --


def gather(path: Path, runners: list[Runner], seeds: int, facts: Facts, goal: Goal) -> Race:
    entries = []
    for runner in runners:
        done = [k for k in range(seeds) if _outcome(_folder(path, runner, k))]
        runs = [_course(_folder(path, runner, k), k, facts, goal) for k in done]
        entries.append(Entry(runner.label, runner.given, runs, runner.is_ddp))
    return Race(goal, entries)


def report(
    found: Race, path: Path, script: Path, asked: dict[str, Any], facts: Facts, quiet: bool
) -> None:
    from rich.console import Console

    title = page.title(script.name, found)
    (path / RESULTS).write_text(json.dumps(found.plain(), indent=1) + "\n")
    about = {
        "task": facts.name or script.name,
        "samples": "a stream" if facts.samples is None else f"{facts.samples:,} an epoch",
        "for all plans": asked["with"] or "–",
        "seeds": ", ".join(str(facts.seed + k) for k in range(asked["seeds"])),
        **asked["machine"],
        "command": asked["command"],
        "directory": str(path),
    }
    page.write(found, path / PAGE, title, about)
    picture.draw(found, title, path / PICTURE)
    console = Console(highlight=False)
    console.print()
    console.print(table.table(found, console.width))
    for label, result in table.failures(found):
        console.print(f"{label}, seed {result.seed}: {result.error}", style="red", markup=False)
    console.print(table.verdict(found), style="bold", markup=False)
    if not quiet:
        for name, file in (("picture", PICTURE), ("page", PAGE), ("numbers", RESULTS)):
            console.print(f"{name:<12}{path / file}", markup=False, soft_wrap=True)


def machine() -> dict[str, str]:
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = next(
        (
            int(line.split()[1]) / 2**20
            for line in _lines("/proc/meminfo")
            if line.startswith("MemTotal")
        ),
        math.nan,
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": f"{processor or platform.machine()}, {environment.cores()} cores"
        + (f", {memory:.0f} GB" if math.isfinite(memory) else ""),
        **({"gpus": ", ".join(gpus)} if gpus else {}),
        "software": f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}",
        "begun": time.strftime("%Y-%m-%d %H:%M"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _list(given: Any) -> str:
    return given if isinstance(given, str) else " | ".join(given)
