"""Kinds of frames: the number that stands for each message."""

from __future__ import annotations

from manyhands.server.protocol import elastic_messages as e
from manyhands.server.protocol import hot_messages as h
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol import table_messages as t

_MESSAGES: list[type[m.Message]] = [
    *(m.Hello, m.Proof, m.Welcome, m.Refused),
    *(m.Done, m.Failed, m.Resend, m.Resume, m.RowsReply),
    *(m.Exchange, m.CreateTable, m.DumpTable, m.TableContent, m.RestoreTable),
    *(m.GetStats, m.Stats, m.Attach),
    *(m.Register, m.Ready, m.AssignSlots, m.Join, m.TickClock, m.ClockTicked),
    *(m.ClaimStep, m.StepClaimed, m.RequestSync, m.TableCreated, m.AwaitTable),
    *(m.Ping, m.Leave, m.GetSlotMap),
    *(m.BeginSnapshot, m.GetSnapshot, m.SnapshotState),
    *(m.FetchSnapshot, m.SnapshotPart, m.EndSnapshot),
    *(r.Follow, r.Forward, r.ForwardTable, r.CopyState, r.Copied, r.Part, r.EraseRows, r.Loads),
    *(r.GetStatus, r.ServerStatusReply, r.Drain, r.Rebalance),
    *(t.ListTables, t.TableList, t.DeleteRows, t.DropTable, t.StartTable),
    *(e.LeaseStep, e.StepLeased, e.Gather, e.GatherAnswer, e.GetNote, e.Note, e.RequestLeaseSync),
    *(h.FetchHot, h.HotContent, h.ListHot, h.HotList),
]
# The kind of a frame is the number of its message here: append, do not reorder.
KINDS: dict[int, type[m.Message]] = dict(enumerate(_MESSAGES, start=1))
KIND_OF: dict[type[m.Message], int] = {kind: number for number, kind in KINDS.items()}
