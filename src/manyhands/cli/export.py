"""`manyhands export RUN model.safetensors`: the weights alone, and the rows of embeddings, in the format everybody reads."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from manyhands.compute.sparse import saved_tables
from manyhands.recover.checkpoint import pick
from manyhands.serving import PREFIX


def export(run: Path, out: Path, best: str | None = None) -> Path:
    snapshot = pick(run, best)
    out.parent.mkdir(parents=True, exist_ok=True)
    tables = saved_tables({k.removeprefix(PREFIX): v for k, v in snapshot.state.items() if k.startswith(PREFIX)})
    rows = {f"{PREFIX}{name}/{part}": content[part] for name, content in tables.items() for part in ("ids", "values")}
    save_file({**snapshot.params, **rows}, out, metadata={"format": "pt", "round": str(snapshot.round)})
    if tables:
        said = ", ".join(f"{name} ({len(content['ids'])} rows)" for name, content in tables.items())
        print(f"with embeddings, as {PREFIX}NAME/ids and {PREFIX}NAME/values: {said}", file=sys.stderr)
    return out
