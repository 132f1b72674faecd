"""Small runs as the training loop would record them, with a clock of their own."""

from __future__ import annotations

import math
from pathlib import Path

from manyhands.core import Event
from manyhands.observe.events import Recorder

ZERO_S = 1_700_000_000.0
PLAN = "data=2 merge=all_reduce batch=64"


def progress(time_s: float, epoch: float, loss: float = 0.4132, **more: float) -> Event:
    value = {
        "epoch": epoch,
        "epochs": 10.0,
        "loss": loss,
        "samples_per_s": 12843.4,
        "exchange_share": 0.04,
        "eta_s": 41.0,
    }
    return Event(
        ZERO_S + time_s,
        0,
        int(epoch * 100),
        "progress",
        value={**value, "step": float(int(epoch * 800)), **more},
    )


def record(run: Path, events: list[Event], rank: int = 0) -> Path:
    recorder = Recorder(run, rank)
    for event in events:
        recorder.emit(event)
    recorder.close()
    return run


def whole_run(run: Path, ranks: int = 2, epochs: int = 3, reports: int = 20) -> Path:
    """A run of `ranks` ranks: rounds with compute, all_reduce and step inside, one evaluation and
    checkpoint an epoch.
    """
    for rank in range(ranks):
        events = [Event(ZERO_S, 0, 0, "start", value=PLAN)] if rank == 0 else []
        for i in range(epochs * reports):
            t, epoch = ZERO_S + 0.5 * i, (i + 1) / reports
            events += [
                Event(t + 0.01, rank, i, "compute", 0.30),
                Event(t + 0.31, rank, i, "all_reduce", 0.10, 4096),
                Event(t + 0.41, rank, i, "step", 0.05),
                Event(t + 0.01, rank, i, "round", 0.45),
            ]
            if rank == 0:
                events.append(progress(0.5 * i + 0.46, epoch, loss=2.3 * math.exp(-epoch)))
                if (i + 1) % reports == 0:
                    accuracy = 1 - math.exp(-epoch)
                    events.append(
                        Event(
                            t + 0.46,
                            0,
                            i,
                            "evaluate",
                            0.02,
                            value={"accuracy": accuracy, "epoch": epoch},
                        )
                    )
                    events.append(
                        Event(
                            t + 0.48, 0, i, "checkpoint", 0.01, 12_300_000, value=f"checkpoints/{i}"
                        )
                    )
        if rank == 0:
            events.append(Event(t + 0.5, 0, i, "finish", value={"accuracy": accuracy}))
        record(run, events, rank)
    return run
