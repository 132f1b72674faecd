"""Loggers by name: the names of the plan word `log=`, what each needs installed, and its sink."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from manyhands.errors import ManyhandsError
from manyhands.observe.events import Sink
from manyhands.observe.loggers.background import BackgroundSink
from manyhands.observe.loggers.csv_table import CsvTable
from manyhands.observe.loggers.mlflow_run import MlflowRun
from manyhands.observe.loggers.scalar_sink import ScalarSink
from manyhands.observe.loggers.tensorboard import TensorBoard
from manyhands.observe.loggers.wandb_run import WandbRun

Make = Callable[[Path, str, Mapping[str, str]], Sink]  # run directory, name, environment

LOGGERS: dict[str, Make] = {
    "csv": lambda path, name, env: ScalarSink(path, CsvTable(path)),
    "mlflow": lambda path, name, env: BackgroundSink(
        "mlflow", ScalarSink(path, MlflowRun(path, name, env))
    ),
    "tensorboard": lambda path, name, env: TensorBoard(path),
    "wandb": lambda path, name, env: BackgroundSink(
        "wandb", ScalarSink(path, WandbRun(path, name, env))
    ),
}
PACKAGES = {"mlflow", "tensorboard", "wandb"}  # each is an extra of manyhands too


def require(names: Sequence[str]) -> None:
    """Refuse loggers whose package is not installed, before anything starts."""
    for name in names:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise ManyhandsError(
                f"log={name}: {name} is not installed: pip install manyhands[{name}]"
            )


def open_loggers(
    names: Sequence[str], directory: Path, name: str, env: Mapping[str, str]
) -> list[Sink]:
    """Sinks of these loggers for a run of this name."""
    require(names)
    return [LOGGERS[logger](directory, name, env) for logger in names]
