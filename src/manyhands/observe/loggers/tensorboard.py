"""TensorBoard sink: losses, rates, metrics and logged values as scalars over global steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.core import Event
from manyhands.errors import ManyhandsError
from manyhands.observe.loggers.scalars import Scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """TensorBoard sink: writes `directory` for `tensorboard --logdir`."""

    def __init__(self, directory: Path):
        try:
            # at the start: a missing package must not end training later
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ManyhandsError(
                "tensorboard is not installed: pip install manyhands[tensorboard]"
            ) from error
        self._directory = Path(directory)
        self._writer: SummaryWriter | None = None
        self._plan = ""
        self._scalars = Scalars()

    def write(self, events: list[Event]) -> None:
        for event in events:
            if event.name == "start" and isinstance(event.value, str):
                self._plan = event.value
            elif (point := self._scalars.of(event)) is not None:
                for tag, x in point.values.items():
                    self._open(point.step).add_scalar(tag, x, point.step, walltime=point.time_s)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: a resumed run repeats steps; TensorBoard then hides the values that the
            # crashed run wrote for them.
            self._writer = SummaryWriter(str(self._directory), purge_step=step, flush_secs=10)
            if self._plan:
                self._writer.add_text("plan", f"`{self._plan}`", step)
        return self._writer
