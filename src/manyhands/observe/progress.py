"""Progress display: one live line on a terminal, plain lines everywhere else.

    plan        data=4 merge=local_sgd merge.period=8
    evaluate    accuracy 0.9712  in 0.8 s
    epoch 2/10  ━━━━━━━━━╸━━━━━━━━━━━━━━  37%  loss 0.4132  12,843 samples/s  exchange 4%  eta 0:41

It is drawn only from `write`, which the training loop calls twice a second: no refresh thread
competes with training for a core.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Protocol, TextIO

from manyhands.core import Event
from manyhands.observe import server_events
from manyhands.observe.text import (
    duration,
    measures,
    number,
    size,
    took,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

PLAIN_EVERY_S = 5.0
LABEL = 12  # columns; "checkpoint" and "epoch 2/10" with two spaces after them
BAR = 24
STYLES = {
    "plan": "bold",
    "notice": "yellow",
    "evaluate": "cyan",
    "checkpoint": "dim",
    "failed": "bold red",
    "done": "bold green",
}

# Fields that a narrow terminal loses, in this order. The bar is dropped between `rate` and `eta`:
# it has the room that is left.
EXPENDABLE = ("named", "lr", "noise", "server", "exchange", "rate", "eta", "percent")

# even with --quiet
ALWAYS_SHOWN = ("warning", "checkpoint_failed", "stalled", "stall over", "straggler")

OF_NAMED = "loss/"

LEGEND = {
    "exchange_share": "exchange: share of the time that rank 0 waits for other ranks' data",
    "staleness": "stale: updates of other workers between a worker's pull and its push, on average",
    "noise": "noise scale: the global batch beyond which larger batches hardly save steps",
}

Value = dict[str, float]


class Progress:
    """Progress sink of rank 0: shows events on a terminal or as lines of a log."""

    def __init__(self, stream: TextIO):
        self._screen = open_screen(stream)
        self._start_s: float | None = None
        self._served: Value = {}  # the latest figures of the servers
        self._explained: set[str] = set()

    def write(self, events: list[Event]) -> None:
        for event in events:
            self._show(event)
        self._screen.refresh()

    def close(self) -> None:
        self._screen.end()

    def _show(self, event: Event) -> None:
        value, line = event.value, self._screen.line
        match event.name, value:
            case "start", _:
                self._start_s = event.time_s
                if isinstance(value, str):
                    line("plan", value, STYLES["plan"])
            case "model" | "run", str():
                line(event.name, value, STYLES["plan"])
            case "progress", dict():
                self._explain({**self._served, **value})
                self._screen.progress(event.time_s, {**self._served, **value})
            case server_events.NAME, dict():
                self._served = {
                    k: x
                    for k, x in value.items()
                    if k in ("rows_per_s", "bytes_per_s", "staleness")
                }
            case "evaluate", dict():
                line(
                    "evaluate",
                    _join(_metrics(value), f"in {took(event.seconds)}" if event.seconds else ""),
                    STYLES["evaluate"],
                )
            case "checkpoint", str():
                cost = [size(event.nbytes)] * (event.nbytes > 0) + [took(event.seconds)] * (
                    event.seconds > 0
                )
                line("checkpoint", _join(value, " in ".join(cost)), STYLES["checkpoint"])
            case "checkpoint_failed", _:
                line("checkpoint", f"failed: {value}", STYLES["failed"])
            case "warning", _:
                line("warning", str(value), STYLES["failed"])
            case "stalled" | "straggler", _:
                line(event.name, str(value).replace("\n", f"\n{'':{LABEL}}"), STYLES["failed"])
            case "stall over", _:
                line("goes on", str(value), STYLES["notice"])
            case "notice" | "worker lost" | "worker joined", _:
                line(event.name.split()[0], str(value), STYLES["notice"])
            case "finish", _:
                self._screen.end()
                elapsed = (
                    "" if self._start_s is None else f"in {duration(event.time_s - self._start_s)}"
                )
                found = value.items() if isinstance(value, dict) else ()
                # a loop of less than a block of local steps has no loss, which is no loss of NaN
                told = {k: v for k, v in found if k != "train_loss" or math.isfinite(v)}
                line("done", _join(_metrics(told), elapsed), STYLES["done"])

    def _explain(self, value: Value) -> None:
        """Say once what the figures of the progress line mean that are not self-evident."""
        for name, text in LEGEND.items():
            if value.get(name, 0.0) >= 0.005 and name not in self._explained:
                self._explained.add(name)
                self._screen.line("legend", text, "dim")


class Warnings:
    """Sink of rank 0 where --quiet hides progress: only what went wrong, as lines."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, events: list[Event]) -> None:
        for event in events:
            if event.name in ALWAYS_SHOWN:
                self._stream.write(f"manyhands: {event.value}\n")
        self._stream.flush()

    def close(self) -> None: ...


class Screen(Protocol):
    """Screen: where progress appears, a terminal or a stream of lines."""

    def line(self, label: str, text: str, style: str) -> None: ...
    def progress(self, time_s: float, value: Value) -> None: ...
    def refresh(self) -> None: ...
    def end(self) -> None: ...


def open_screen(stream: TextIO) -> Screen:
    if not stream.isatty():
        return Plain(stream)  # without rich: it costs memory and a tenth of a second
    from rich.console import Console

    # Rich honours NO_COLOR and TERM. `force_terminal`: checked above, whatever FORCE_COLOR says.
    console = Console(file=stream, force_terminal=True, highlight=False)
    return Plain(stream) if console.is_dumb_terminal else Terminal(stream, console)


class Plain:
    """Plain lines for files, pipes and logs.

    Progress is printed every 5 s and at the end of each epoch, other events at once.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last: Value | None = None
        self._shown: Value | None = None
        self._shown_s = -math.inf

    def line(self, label: str, text: str, style: str) -> None:
        self._stream.write(f"{label:<{LABEL}}{text}\n")

    def progress(self, time_s: float, value: Value) -> None:
        self._last = value
        ended = self._shown is not None and math.floor(value.get("epoch", 0)) > math.floor(
            self._shown.get("epoch", 0)
        )
        # By the events' own clock: the output depends on what happened, not on the time of a flush.
        if ended or time_s - self._shown_s >= PLAIN_EVERY_S:
            self._print(value)
            self._shown_s = time_s

    def refresh(self) -> None:
        self._stream.flush()

    def end(self) -> None:
        if self._last is not None and self._last is not self._shown:
            self._print(self._last)
        self._last = None
        self._stream.flush()

    def _print(self, value: Value) -> None:
        fields = describe(value)
        self._stream.write(
            f"{fields.pop('epoch'):<{LABEL - 2}}  {'  '.join(fields.values())}".rstrip() + "\n"
        )
        self._shown = value


class Terminal:
    """Live line at the bottom of a terminal; all other output scrolls above it."""

    def __init__(self, stream: TextIO, console: Console):
        self._stream = stream
        self._console = console
        self._live: Live | None = None
        self._value: Value = {}

    def line(self, label: str, text: str, style: str) -> None:
        from rich.text import Text

        # Text, not markup: a path or a notice may contain square brackets.
        words = Text.assemble(
            (f"{label:<{LABEL}}", style), (text, style if style in ("dim", "bold red") else "")
        )
        self._console.print(words, soft_wrap=True)

    def progress(self, time_s: float, value: Value) -> None:
        self._value = value
        if self._live is None:
            self._live = self._start()
        self._live.update(self._line())  # not drawn yet: once a write is enough

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._line(), refresh=True)  # anew: the window may have been resized

    def end(self) -> None:
        if self._live is not None:
            import atexit

            self._live.stop()
            self._live = None
            atexit.unregister(self.end)

    def _start(self) -> Live:
        import atexit
        import sys

        from rich.live import Live

        # Output of the user is printed above the line only where it goes to a terminal:
        # `run > log` keeps its log.
        live = Live(
            self._line(),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start()
        atexit.register(self.end)  # shows the cursor again after an exception that nobody caught
        return live

    def _line(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        # rich measures the standard streams; ours may be another
        self._console.width = _columns(self._stream)
        fields = describe(self._value)
        room = fit(fields, self._console.width)
        styles = {"epoch": "bold", "loss": "bold", "exchange": "dim", "server": "dim", "eta": "dim"}
        if not math.isfinite(self._value.get("loss", 0.0)):
            styles["loss"] = "bold red"
        cells: list[RenderableType] = [
            Text(text, style=styles.get(name, ""), no_wrap=True) for name, text in fields.items()
        ]
        if room:
            _, _, done = _epoch(self._value)
            cells.insert(
                1,
                ProgressBar(
                    total=1.0,
                    completed=done,
                    width=room,
                    complete_style="cyan",
                    finished_style="green",
                ),
            )
        grid = Table.grid(padding=(0, 2), pad_edge=False)
        for _ in cells:
            grid.add_column(no_wrap=True, overflow="crop")
        grid.add_row(*cells)
        return grid


def describe(value: Value) -> dict[str, str]:
    """The known fields of the line, in order."""
    index, epochs, done = _epoch(value)
    fields, counted = (
        {"epoch": f"epoch {index}/{epochs:g}" if epochs else f"epoch {index}"},
        "samples",
    )
    if "epoch" in value or "step" not in value:
        fields["percent"] = f"{math.floor(done * 100 + 1e-6):3d}%"
    else:  # of batches that a script draws itself
        fields["epoch"], counted = f"step {value['step']:,.0f}", "batches"
    if "loss" in value:
        fields["loss"] = f"loss {number(value['loss'])}"
    named = {k.removeprefix(OF_NAMED): v for k, v in value.items() if k.startswith(OF_NAMED)}
    if named:  # optimizers with losses of their own
        fields["named"] = "  ".join(f"{k} {number(v)}" for k, v in named.items())
    if "lr" in value:
        fields["lr"] = f"lr {value['lr']:.3g}"
    if math.isfinite(rate := value.get("samples_per_s", math.nan)):
        fields["rate"] = f"{rate:,.0f} {counted}/s"
    if (share := value.get("exchange_share", 0.0)) >= 0.005:  # one rank alone exchanges nothing
        fields["exchange"] = f"exchange {share:.0%}"
    if served := server_events.words(value):
        fields["server"] = served
    if math.isfinite(noise := value.get("noise", math.nan)):
        fields["noise"] = f"noise scale {noise:,.0f}"
    if math.isfinite(eta := value.get("eta_s", math.nan)):
        fields["eta"] = f"eta {duration(eta)}"
    return fields


def fit(fields: dict[str, str], width: int) -> int:
    """Drop fields until the line fits; returns how many columns are left for the bar, 0: none."""

    def used() -> int:
        return sum(map(len, fields.values())) + 2 * (len(fields) - 1)

    for name in EXPENDABLE:
        if used() <= width:
            break
        fields.pop(name, None)
    room = min(BAR, width - used() - 2)
    return room if room >= 8 else 0


def _epoch(value: Value) -> tuple[int, float, float]:
    """(epoch, counted from one; number of epochs; share of this epoch that is done).

    2.0 is the end of the second epoch.
    """
    at = value.get("epoch", 0.0)
    index = max(1, math.ceil(at - 1e-9))
    return index, value.get("epochs", 0.0), at - (index - 1)


def _metrics(value: Value) -> str:
    return _join(*(f"{name} {number(x)}" for name, x in measures(value).items()))


def _join(*parts: str) -> str:
    return "  ".join(filter(None, parts))


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
