"""Train a plain PyTorch task on many processors, with the result of one. Many hands, light work."""

from manyhands.api import changed_rows, join, load, saved_table, train
from manyhands.assembly.tables import rows_of_this_process
from manyhands.core import Result
from manyhands.embedding.modules import Embedding, EmbeddingBag, keep_rows_in
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
from manyhands.own_loop import Run
from manyhands.replica.lbfgs.lbfgs import LBFGS
from manyhands.store.standalone import StandaloneStore as Store
from manyhands.task import Callback, Task, accuracy

__version__ = "0.1.0"
refuse_old_names()
keep_rows_in(rows_of_this_process)  # of embeddings in a plain script, which no run has attached

__all__ = [
    "Callback",
    "CheckpointError",
    "Deadlock",
    "Diverged",
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
    "ServerLost",
    "Store",
    "StoreError",
    "Task",
    "TaskError",
    "accuracy",
    "changed_rows",
    "join",
    "load",
    "saved_table",
    "train",
]
