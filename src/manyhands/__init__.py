"""Train a plain PyTorch task on many processors, with the result of one. Many hands, light work.

Public names are imported when they are first used: a command that only reads its arguments does not
wait for torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from manyhands.embedding.default_rows import keep_rows_in
from manyhands.errors import (
    CheckpointError,
    Deadlock,
    Diverged,
    Fenced,
    LaunchError,
    ManyhandsError,
    MembershipError,
    NotFinite,
    PeerLost,
    PlanError,
    RunBusy,
    ServerLost,
    StoreError,
    TaskError,
)
from manyhands.old_names import refuse_old_names

if TYPE_CHECKING:
    from manyhands.after_training.saved_runs import evaluate, export, predict
    from manyhands.api import changed_rows, join, load, saved_table, train
    from manyhands.callbacks import EMA, SWA, BestModel, EarlyStopping
    from manyhands.core import Result
    from manyhands.embedding.modules import Embedding, EmbeddingBag
    from manyhands.own_loop import Run
    from manyhands.recover.starting_weights import Weights
    from manyhands.replica.lbfgs.lbfgs import LBFGS
    from manyhands.store.standalone import StandaloneStore as Store
    from manyhands.task import Callback, Task, accuracy

__version__ = "0.1.0"

__all__ = [
    "BestModel",
    "Callback",
    "CheckpointError",
    "Deadlock",
    "Diverged",
    "EMA",
    "EarlyStopping",
    "Embedding",
    "EmbeddingBag",
    "Fenced",
    "LBFGS",
    "LaunchError",
    "ManyhandsError",
    "MembershipError",
    "NotFinite",
    "PeerLost",
    "PlanError",
    "Result",
    "Run",
    "RunBusy",
    "SWA",
    "ServerLost",
    "Store",
    "StoreError",
    "Task",
    "TaskError",
    "Weights",
    "accuracy",
    "changed_rows",
    "evaluate",
    "export",
    "join",
    "load",
    "predict",
    "saved_table",
    "train",
]
# the same imports as above, by module: names, or "name as public name"
_PLACES = {
    "manyhands.after_training.saved_runs": "evaluate, export, predict",
    "manyhands.api": "changed_rows, join, load, saved_table, train",
    "manyhands.callbacks": "BestModel, EMA, EarlyStopping, SWA",
    "manyhands.core": "Result",
    "manyhands.embedding.modules": "Embedding, EmbeddingBag",
    "manyhands.own_loop": "Run",
    "manyhands.recover.starting_weights": "Weights",
    "manyhands.replica.lbfgs.lbfgs": "LBFGS",
    "manyhands.store.standalone": "StandaloneStore as Store",
    "manyhands.task": "Callback, Task, accuracy",
}
_LATER = {
    text.split(" as ")[-1]: (module, text.split(" as ")[0])
    for module, texts in _PLACES.items()
    for text in texts.split(", ")
}


class _Package(ModuleType):
    """The package: `manyhands.train` is the function, also after the module of its name is
    loaded."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LATER and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """By name: a task of a script refers to `mh`, and is sent to other processes."""
        return importlib.import_module, (self.__name__,)


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            module, own = _LATER[name]
            value = getattr(importlib.import_module(module), own)
            globals()[name] = value
            return value
        if not name.startswith("_"):  # a room: manyhands.datasets after `import manyhands`
            try:
                return importlib.import_module(f"manyhands.{name}")
            except ModuleNotFoundError as e:
                if e.name != f"manyhands.{name}":
                    raise
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _rows_of_this_process() -> Any:
    return importlib.import_module("manyhands.assembly.tables").rows_of_this_process()


sys.modules[__name__].__class__ = _Package
refuse_old_names()
keep_rows_in(_rows_of_this_process)  # of embeddings in a plain script, which no run has attached
