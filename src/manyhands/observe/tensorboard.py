"""TensorBoard sink: losses, rates, metrics and logged values as scalars over global steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.core import Event
from manyhands.errors import ManyhandsError
from manyhands.observe.text import measures

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TRAIN = ("loss", "lr", "samples_per_s", "exchange_share")


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
        self._step = 0
        self._round = 0

    def write(self, events: list[Event]) -> None:
        for event in events:
            match event.name, event.value:
                case "progress", dict() as value:
                    self._step, self._round = int(value.get("step", event.round)), event.round
                    self._scalars(
                        event, {f"train/{name}": value[name] for name in TRAIN if name in value}
                    )
                case "evaluate", dict() as value:
                    self._scalars(
                        event, {f"evaluate/{name}": x for name, x in measures(value).items()}
                    )
                case "server", dict() as value:
                    self._scalars(
                        event, {f"server/{name}": x for name, x in measures(value).items()}
                    )
                case "log", dict() as value:
                    self._scalars(event, measures(value))
                case "start", str() as plan:
                    self._plan = plan

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _scalars(self, event: Event, scalars: dict[str, float]) -> None:
        value = event.value if isinstance(event.value, dict) else {}
        # Between two progress events the rounds count on, so points keep their order and do not
        # coincide.
        step = int(value.get("step", self._step + max(0, event.round - self._round)))
        for tag, x in scalars.items():
            self._open(step).add_scalar(tag, x, step, walltime=event.time_s)

    def _open(self, step: int) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: a resumed run repeats steps; TensorBoard then hides the values that the
            # crashed run wrote for them.
            self._writer = SummaryWriter(str(self._directory), purge_step=step, flush_secs=10)
            if self._plan:
                self._writer.add_text("plan", f"`{self._plan}`", step)
        return self._writer
