"""Script that runs: what its text tells before it gets there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

SAVES_OPTIMIZER = re.compile(
    r"opt\w*(\[[^\]]*\])?\.state_dict\("  # optimizer., d_optim., optimizers["d"].
    r"|\.state_dict\(\) for\b.*\bin \w*opt"  # {k: o.state_dict() for k, o in optimizers.items()}
)


def script_text() -> str:
    """The text of the script that runs; "": there is none, as in a notebook."""
    try:
        return Path(sys.argv[0]).read_text(errors="replace")
    except (OSError, IndexError, ValueError):
        return ""


def saves_optimizer() -> bool:
    """Whether it calls optimizer.state_dict(): then every rank keeps the state of all parameters,
    where it would else keep that of the slices that it updates."""
    return SAVES_OPTIMIZER.search(script_text()) is not None
