"""`manyhands export RUN model.safetensors`: the weights alone, in the format everybody reads."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from manyhands.recover.checkpoint import pick


def export(run: Path, out: Path, best: str | None = None) -> Path:
    snapshot = pick(run, best)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(snapshot.params, out, metadata={"format": "pt", "round": str(snapshot.round)})
    return out
