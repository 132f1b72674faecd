"""Core types: the interfaces that connect the rooms. Read this second, after `train.py`.

    Replica     one copy of the model: computes gradients and makes steps on its part of the data
    Group       symmetric exchange between ranks: all-reduce, swap, transfer
    Store       the parameter server: tables that any rank pulls from and pushes to
    Strategy    how replicas agree: `round(replica, group or store, state)` is one round of training

One file each. Every room imports this one; it imports no room. Strategies (`merge/`) see replicas,
groups and stores only through these protocols. The plain records that rooms exchange (plan, layout,
position, events) are in `records.py` and are importable from here.
"""

from manyhands.core.group import EXACT, Finished, Group, Op, Work
from manyhands.core.replica import (
    CommonReplica,
    GradientReplica,
    LineSearch,
    LoopReplica,
    OnReady,
    PartialStepReplica,
    Replica,
    ServedReplica,
    Student,
)
from manyhands.core.store import (
    CompleteReply,
    Late,
    PushOptions,
    Reply,
    Rows,
    Store,
    Table,
    TableSnapshot,
    TableStore,
    Tick,
)
from manyhands.core.strategy import Cargo, Strategy
from manyhands.records import (
    DataShard,
    ElasticJob,
    Emit,
    Event,
    Goal,
    Job,
    Launcher,
    Layout,
    Plan,
    Position,
    ProcessInfo,
    Result,
    Snapshot,
    Tensors,
)

__all__ = [
    "Cargo",
    "CommonReplica",
    "CompleteReply",
    "DataShard",
    "EXACT",
    "ElasticJob",
    "Emit",
    "Event",
    "Finished",
    "Goal",
    "GradientReplica",
    "Group",
    "Job",
    "Late",
    "Launcher",
    "Layout",
    "LineSearch",
    "LoopReplica",
    "OnReady",
    "Op",
    "PartialStepReplica",
    "Plan",
    "Position",
    "ProcessInfo",
    "PushOptions",
    "Replica",
    "Result",
    "Reply",
    "Rows",
    "ServedReplica",
    "Snapshot",
    "Store",
    "Strategy",
    "Student",
    "Table",
    "TableSnapshot",
    "TableStore",
    "Tensors",
    "Tick",
    "Work",
]
