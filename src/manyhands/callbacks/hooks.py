"""Hooks: calls the callbacks of a run, and says of an exception which callback it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands.errors import ManyhandsError
from manyhands.task import Callback
from manyhands.trainer_parts import EpochChange

NAMES = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Hooks:
    """The callbacks of one run, in order; `run` is what they are given."""

    def __init__(self, callbacks: Sequence[Callback], run: Any):
        self.run = run
        self._of = {name: [c for c in callbacks if overrides(c, name)] for name in NAMES}

    def call(self, name: str, round: int, *given: Any) -> None:
        """Call one hook of every callback that has it. An exception keeps its type, and is noted to
        come from that callback, so that a launcher prints both."""
        for callback in self._of[name]:
            try:
                getattr(callback, name)(self.run, *given)
            except (ManyhandsError, EpochChange):
                raise
            except Exception as e:
                e.add_note(
                    f"the callback {type(callback).__name__}.{name} raised it, at round {round}"
                )
                raise

    def failed(self, error: BaseException) -> None:
        """Call `on_failure`; what it raises itself does not take the place of `error`."""
        for callback in self._of["on_failure"]:
            try:
                callback.on_failure(self.run, error)
            except Exception as e:
                name = f"{type(callback).__name__}.on_failure"
                error.add_note(f"the callback {name} raised {type(e).__name__}: {e}")


def overrides(callback: Callback, name: str) -> bool:
    """Whether a callback has a hook of its own, of its class or of the object."""
    return getattr(getattr(callback, name), "__func__", None) is not vars(Callback)[name]
