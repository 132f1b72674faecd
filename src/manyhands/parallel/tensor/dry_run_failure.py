"""Failures of a dry run that no sharding rule has noticed, and the cuts that they come from.

Code of a model or of a library may raise an exception on a sharded value, or keep one in a buffer.
The cut parameters that the value comes from are noted as failed, so the next dry run leaves them
whole. An exception to which no cut has contributed is the model's own.
"""

from __future__ import annotations

from types import FrameType

from manyhands.errors import PlanError, TaskError
from manyhands.parallel.tensor.dry_run_mode import DryRunMode, flat_values
from manyhands.parallel.tensor.running_module import frames_of, innermost
from manyhands.parallel.tensor.sharded_value import ShardedValue

LENGTH = 200  # characters of an exception that a note quotes


def note_exception(error: Exception, mode: DryRunMode) -> None:
    """Note which cuts have failed by `error`; raises where there are none."""
    if any(not mode.is_requested(name) for name in mode.result.failed):
        return  # a failure that was noted before it may have led to it
    frames = frames_of(error.__traceback__)
    module = innermost(mode.axis.names, frames)
    said = " ".join(str(error).split())
    if not isinstance(error, TaskError):
        said = f"{type(error).__name__}: {said if len(said) <= LENGTH else said[:LENGTH] + '...'}"
    where = "" if module is None else f" in module {module!r}"
    values = [v for f in frames for v in _sharded(f)]
    sources: set[str] = set()
    for frame in frames:
        if sources := {name for v in _sharded(frame) for name in mode.sources_of(v)}:
            break
    if values and not sources and mode.axis.sequence:
        raise PlanError(
            f"sequence=true splits an activation{where} along the sequence, and the code there "
            f"cannot take a slice of it ({said}); use sequence=false"
        ) from error
    if values and not sources:  # cut parameters themselves
        inside = "" if module is None else f"{module}."
        sources = {n for n in mode.result.cuts if n.startswith(inside)}
    reason = f"its output goes into code{where} that cannot take a slice of it ({said})"
    if free := [n for n in sorted(sources) if not mode.is_requested(n)]:
        mode.result.failed |= dict.fromkeys(free, reason)
        return
    if sources:
        raise PlanError(
            f"Task(tensor=...) asks to cut {', '.join(sorted(sources))}, but {reason}; leave that "
            "out of Task(tensor=...)"
        ) from error
    raise TaskError(
        f"the model does not run on an example of its data{where}, so tensor={mode.size} cannot be "
        f"derived: {said}"
    ) from error


def note_kept_values(mode: DryRunMode) -> None:
    """Sharded values that the forward pass has put into buffers: a checkpoint needs them whole."""
    for name, value in mode.module.named_buffers():
        if isinstance(value, ShardedValue):
            if mode.axis.sequence and not mode.sources_of(value):
                raise PlanError(
                    f"sequence=true splits along the sequence what the model keeps in its buffer "
                    f"{name}; use sequence=false"
                )
            mode.fail(value, f"its output is kept in the buffer {name}, which stays whole")


def _sharded(frame: FrameType) -> list[ShardedValue]:
    values = flat_values(list(frame.f_locals.values()))
    return [v for v in values if isinstance(v, ShardedValue)]
