"""Numbers as text: the same on the terminal, in captions and in traces."""

from __future__ import annotations

import math
from numbers import Real

# keys of a value that say when a measurement was taken, not what was measured
POSITION = ("epoch", "step")


def number(x: float) -> str:
    """0.4132, 1,284.5, 3.1e-05: about four significant digits."""
    if not math.isfinite(x):
        return str(x)
    if x == 0 or 1e-3 <= abs(x) < 10:
        return f"{x:.4f}"
    if 10 <= abs(x) < 1e6:
        return f"{x:.2f}" if abs(x) < 100 else f"{x:,.1f}"
    return f"{x:.1e}"


def duration(seconds: float) -> str:
    """0:41, 1:02:03, 2d 4h."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def took(seconds: float) -> str:
    """8 ms, 0.4 s, 2:05: how long something lasted, where fractions of a second matter."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def size(nbytes: int) -> str:
    """640 B, 12.3 MB."""
    x = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if x < 999.5:
            return f"{x:.0f} {unit}" if unit == "B" else f"{x:.1f} {unit}"
        x /= 1000
    return f"{x:.1f} TB"


def rate(x: float) -> str:
    """640, 12.3k, 1.2M: how many a second."""
    for unit in ("", "k", "M", "G"):
        if x < 999.5:
            return f"{x:.0f}{unit}" if not unit or x >= 99.5 else f"{x:.1f}{unit}"
        x /= 1000
    return f"{x:.1f}T"


def measures(value: dict[str, float]) -> dict[str, float]:
    """A value without its position, and without logged entries that are no numbers."""
    return {k: v for k, v in value.items() if k not in POSITION and isinstance(v, Real)}
