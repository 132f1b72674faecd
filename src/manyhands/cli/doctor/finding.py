"""Finding: the result of one check of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GIB = 2**30  # findings give memory and disk space in this unit

Verdict = Literal["ok", "warn", "fail"]
Variables = Mapping[str, str]  # environment variables


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    found: str
    do: str = ""
