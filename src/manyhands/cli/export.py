"""`manyhands export RUN model.safetensors`: the weights alone, in the format everybody reads."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from manyhands.errors import CheckpointError
from manyhands.recover.checkpoint import Checkpoints, load


def export(run: Path, out: Path, best: str | None = None) -> Path:
    folder = Checkpoints(run / "checkpoints", best=best)
    if not folder.all():
        raise CheckpointError(f"{run} holds no checkpoint; a run directory that has saved at least once is needed")
    if best is None:
        snapshot = folder.latest()
    else:
        path = folder.best_path()
        if path is None:
            raise CheckpointError(f"no checkpoint of {run} knows the metric {best!r}; leave --best out to take the newest")
        snapshot = load(path)
    assert snapshot is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(snapshot.params, out, metadata={"format": "pt", "round": str(snapshot.round)})
    return out
