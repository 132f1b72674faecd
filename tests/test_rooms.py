"""Rooms: who imports whom, who uses torch.distributed, who reads the environment."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPOSITORY

SOURCE = REPOSITORY / "src" / "manyhands"
FILES = sorted(SOURCE.rglob("*.py"))

ROOMS = (
    "split",
    "data",
    "replica",
    "parallel",
    "embedding",
    "exchange",
    "server",
    "merge",
    "metrics",
    "kernels",
    "membership",
    "plan",
    "recover",
    "observe",
    "launch",
)
READS_ENVIRONMENT = {
    "launch/environment.py": None,
    "datasets/folders.py": {"MANYHANDS_DATA", "XDG_CACHE_HOME"},
    # before torch is loaded, which launch/environment.py needs
    "launch/fork_server/choice.py": {
        "MANYHANDS_START",
        "CUDA_VISIBLE_DEVICES",
        "RANK",
        "SLURM_PROCID",
        "OMPI_COMM_WORLD_RANK",
        "MANYHANDS_LAB",
    },
}
# model parallelism inside a replica is built on these; they take a mesh and never open a connection
# themselves
INSIDE_A_REPLICA = ("tensor", "fsdp", "pipelining", "device_mesh", "_composable")
# for users of scikit-learn, which changes environment and generators when it is imported, and
# brings rich
ESTIMATORS = tuple(f"manyhands.linear.{name}" for name in ("estimators", "selection"))
HEAVY = {"matplotlib", "rich", "typer", "sklearn", "tensorboard"}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def dotted(node: ast.expr) -> str:
    """`torch.distributed.all_reduce` of an attribute expression; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def mentioned(path: Path) -> set[str]:
    """Dotted names that a file imports or spells out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node))
    return found


def test_the_import_contracts_hold() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if room(p) in ("merge", "split", "data", "replica", "parallel", "embedding")],
    ids=name,
)
def test_algorithms_splits_and_replicas_do_not_talk_to_peers_themselves(path: Path) -> None:
    used = {n for n in mentioned(path) if n.startswith("torch.distributed")}
    if room(path) == "parallel":
        used = {
            n
            for n in used
            if not n.startswith(tuple(f"torch.distributed.{inside}" for inside in INSIDE_A_REPLICA))
        }
    assert not used, (
        f"{name(path)} uses {sorted(used)}; what moves bytes between ranks belongs in exchange/ "
        "and comes in as `link`"
    )


@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    used = mentioned(path) & {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    if name(path) not in READS_ENVIRONMENT:
        assert not used, (
            f"{name(path)} uses {sorted(used)}; launch/environment.py reads the environment, "
            "others take arguments"
        )
    elif allowed := READS_ENVIRONMENT[name(path)]:
        spelled = {
            n.value
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        assert allowed <= spelled
        calls = [
            n
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Call) and dotted(n.func) == "os.environ.get"
        ]
        assert {ast.literal_eval(call.args[0]) for call in calls} == allowed
        assert path.read_text().count("os.environ") == len(calls)


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if room(p) in (*ROOMS, "core", "errors", "task", "datasets")],
    ids=name,
)
def test_rooms_do_not_import_the_package_as_a_whole(path: Path) -> None:
    """`import manyhands` would bring build and train in through the back door; import-linter does
    not see that.
    """
    tree = ast.parse(path.read_text())
    rooms = {p.name.removesuffix(".py") for p in SOURCE.iterdir()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert "manyhands" not in {alias.name for alias in node.names}, (
                f"{name(path)}:{node.lineno}"
            )
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{name(path)}:{node.lineno}: write the import out, from manyhands"
            )
            assert node.module != "manyhands" or {alias.name for alias in node.names} <= rooms, (
                f"{name(path)}:{node.lineno}"
            )


def test_importing_does_nothing_but_define(tmp_path: Path) -> None:
    """In a new process each module is imported in turn: the process stays what it was, and no heavy
    library comes along.
    """
    modules = []
    for path in FILES:
        parts = ["manyhands", *path.relative_to(SOURCE).with_suffix("").parts]
        modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    modules = [m for m in modules if not m.endswith("__main__")]
    # these last: commands may use rich and typer, estimators are scikit-learn's
    modules.sort(key=lambda m: (m.startswith("manyhands.cli"), m.startswith(ESTIMATORS)))
    code = """
import importlib, json, os, pathlib, random, signal, sys, threading
import numpy, torch, torch.distributed
heavy, modules, of_estimators = map(json.loads, sys.argv[1:])

def state():
    return {
        "environment": dict(os.environ),
        "threads": sorted(t.name for t in threading.enumerate()),
        "folder": os.getcwd(),
        "files here": sorted(os.listdir()),
        "torch generator": str(torch.random.get_rng_state().sum()),
        "other generators": str([random.getstate()[1][:9], numpy.random.get_state()[1][:9]]),
        "torch threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "signals": [str(signal.getsignal(s)) for s in SIGNALS],
        "process group": torch.distributed.is_initialized(),
    }

sys.argv = ["python"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
wrong = []
for module in modules:
    before, known = state(), set(sys.modules)
    try:
        importlib.import_module(module)
    except ImportError as e:
        wrong.append(f"{module} cannot be imported: {e}")
        continue
    after = state()
    changed = [k for k in before if before[k] != after[k]]
    estimators = module.startswith(tuple(of_estimators))
    if estimators:
        changed = [k for k in changed if k not in ("environment", "other generators")]
    allowed = {"rich", "typer"} if module.startswith("manyhands.cli") else set()
    allowed |= {"sklearn", "rich"} if estimators else set()
    wrong += [f"{module} changed {k}: {before[k]} -> {after[k]}" for k in changed]
    loaded = set(sys.modules) - known - allowed
    wrong += [f"{module} imports {h}" for h in heavy if h in loaded]
print(json.dumps(wrong))
"""
    command = [sys.executable, "-c", code, *map(json.dumps, (sorted(HEAVY), modules, ESTIMATORS))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
