"""Usual direction of a metric, by its name: small is better of an error, large of an accuracy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

Direction = Literal["small", "large"]

WORDS: Mapping[Direction, frozenset[str]] = {
    "small": frozenset(
        "loss error err mae mse rmse mape nll perplexity ppl wer cer bpc bpb fid brier".split()
    ),
    "large": frozenset(
        "accuracy acc auc auroc f1 precision recall bleu rouge r2 iou miou dice top1 top5".split()
    ),
}


def usual_direction(name: str) -> Direction | None:
    """None: the name does not tell."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    found = [direction for direction, known in WORDS.items() if words & known]
    return found[0] if len(found) == 1 else None


def doubt(given: str, name: str, small: bool) -> str:
    """What to say where `given` wants the unusual of a metric; "": it does not, or who knows."""
    usual = usual_direction(name)
    if usual is None or (usual == "small") == small:
        return ""
    if small:
        return f"{given} takes a smaller {name} for a better one, by its minus; leave that out"
    return f"{given} takes a larger {name} for a better one; write -{name}, with a minus"
