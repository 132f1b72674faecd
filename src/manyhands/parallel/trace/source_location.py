"""Source locations: which line of the user's code the forward pass is at, for errors and guards."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

# with the separator: torchvision lies beside torch and is the user's choice, as is all but torch
LIBRARIES = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
Frames = Sequence[tuple[Any, int]]  # (frame, line number), innermost first


class Untraceable(Exception):
    """The tracer cannot write down what the forward pass does at some line.

    `inside` is the path of the module whose code it is; `by_value`: the code depends on a value."""

    def __init__(self, message: str, inside: str = "", by_value: bool = False):
        super().__init__(message)
        self.inside, self.by_value = inside, by_value


def untraceable(
    reason: str, frames: Frames, paths: Mapping[int, str], by_value: bool = False
) -> Untraceable:
    """The error for `reason` at these frames; `paths` has the paths of modules by id."""
    return Untraceable(f"{location(frames)}: {reason}", module_path(frames, paths), by_value)


def is_library(file: str) -> bool:
    """Whether a file is torch's, sympy's or ours, and not the user's."""
    return file.startswith(LIBRARIES) or "/sympy/" in file or file.endswith("contextlib.py")


def frames_of(frame: Any) -> Iterator[tuple[Any, int]]:
    """A frame and its callers."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def traceback_frames(failed: Exception) -> Frames:
    """The frames of an exception's traceback."""
    frames = []
    trace = failed.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    frames.reverse()
    return frames


def location(frames: Frames) -> str:
    """file:line of the innermost code that is the user's, with its text."""
    for frame, number in frames:
        file = frame.f_code.co_filename
        if not is_library(file):
            text = linecache.getline(file, number).strip()
            return f"{file}:{number}" + (f" (`{text}`)" if text else "")
    return "in the forward pass"


def module_path(frames: Frames, paths: Mapping[int, str]) -> str:
    """The path of the innermost module whose forward pass is running."""
    for frame, _ in frames:
        owner = frame.f_locals.get("self")
        if (
            isinstance(owner, nn.Module)
            and id(owner) in paths
            and not is_library(frame.f_code.co_filename)
        ):
            return paths[id(owner)]
    return ""


def caller_line() -> str:
    """file:line of the innermost code that is the user's; empty: there is none."""
    for frame, number in frames_of(sys._getframe(1)):
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{number}"
    return ""
