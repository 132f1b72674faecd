"""Many hands make light work: train a plain PyTorch task on many processors, and prove that it equals one."""

from manyhands.errors import (
    CheckpointError,
    Deadlock,
    Diverged,
    LaunchError,
    ManyhandsError,
    PeerLost,
    PlanError,
    RunBusy,
    TaskError,
)
from manyhands.run import Run, join, load, train
from manyhands.task import Callback, Task, accuracy
from manyhands.train import Result

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CheckpointError",
    "Deadlock",
    "Diverged",
    "LaunchError",
    "ManyhandsError",
    "PeerLost",
    "PlanError",
    "Result",
    "Run",
    "RunBusy",
    "Task",
    "TaskError",
    "accuracy",
    "join",
    "load",
    "train",
]
