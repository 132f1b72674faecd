"""Check of installed packages: torch is new enough, and no dependency is missing."""

from __future__ import annotations

import importlib.metadata
import re

from manyhands.cli.doctor.finding import Finding


def check() -> Finding:
    import torch

    if tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) < (2, 11):
        return Finding("fail", f"torch {torch.__version__}", "pip install 'torch>=2.11'")
    try:
        needed = importlib.metadata.requires("manyhands") or []
    except importlib.metadata.PackageNotFoundError:
        found = f"torch {torch.__version__}; manyhands is not installed, it runs from its sources"
        return Finding("warn", found, "pip install -e . to have the manyhands command")
    names = [re.split(r"[^\w.-]", line)[0] for line in needed if "extra ==" not in line]
    versions = {name: _version(name) for name in ("manyhands", *names)}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing := [name for name, version in versions.items() if not version]:
        found = f"missing: {', '.join(missing)}; {found}"
        return Finding("fail", found, f"pip install {' '.join(missing)}")
    return Finding("ok", found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
