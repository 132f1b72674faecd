"""`manyhands bench NAME`: run one file of `benchmarks/` and print its claims.

A claim is a ratio against another library that is measured in the same run.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from manyhands.errors import PlanError


def bench(name: str, out: Path | None, quick: bool = False, only: list[str] | None = None) -> None:
    folder = _folder()
    known = sorted(p.stem.replace("_", "-") for p in folder.glob("*.py") if p.stem != "common")
    names = known if name == "all" else [name]
    if unknown := [n for n in names if n not in known]:
        raise PlanError(f"unknown benchmark {unknown[0]!r}; known: {', '.join(known)}, all")
    sys.path.insert(0, str(folder))
    common = _load(folder / "common.py")
    reports = []
    for each in names:
        module = _load(folder / f"{each.replace('-', '_')}.py")
        reports.append(common.report(each, module.measure(quick, only or []), folder.parent))
        common.show(reports[-1])
        if hasattr(module, "draw"):  # beside the JSON file, or in the current folder
            module.draw(
                reports[-1], out.with_suffix(".png") if out is not None else Path(f"{each}.png")
            )
    if out is not None:
        out.write_text(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1) + "\n")


def _folder() -> Path:
    here = [Path(__file__).resolve().parents[3] / "benchmarks", Path.cwd() / "benchmarks"]
    found = next((p for p in here if (p / "common.py").exists()), None)
    if found is None:
        raise PlanError(
            "the benchmarks are not part of the installed package; "
            "run this in a checkout of manyhands"
        )
    return found


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
