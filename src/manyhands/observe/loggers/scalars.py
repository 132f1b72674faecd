"""Scalars: events of a run as named numbers at global steps."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.core import Event
from manyhands.observe.text import measures

PREFIX = {"progress": "train/", "evaluate": "evaluate/", "server": "server/", "log": ""}
LEFT_OUT = ("epochs", "eta_s")  # of a progress event: how long it will take is no result


@dataclass(frozen=True)
class LoggedPoint:
    """Named numbers at one step."""

    time_s: float
    step: int
    epoch: float | None
    values: dict[str, float]


class Scalars:
    """Turns events into points. Between two progress events the rounds count on, so points keep
    their order and do not coincide."""

    def __init__(self) -> None:
        self._step = self._round = 0
        self._epoch: float | None = None

    def of(self, event: Event) -> LoggedPoint | None:
        """The numbers of an event; None: it has none for a logger."""
        value = event.value
        if event.name not in PREFIX or not isinstance(value, dict):
            return None
        if event.name == "progress":
            self._step, self._round = int(value.get("step", event.round)), event.round
        self._epoch = value.get("epoch", self._epoch)
        step = int(value.get("step", self._step + max(0, event.round - self._round)))
        prefix = PREFIX[event.name]
        found = {f"{prefix}{k}": x for k, x in measures(value).items() if k not in LEFT_OUT}
        return LoggedPoint(event.time_s, step, self._epoch, found)
