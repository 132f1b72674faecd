"""Notes of a run: what a process must know to go on in a dead one's place.

    position, round, metrics      as all ranks had them after the last sync point
    callbacks                     their state: plain values
    buffers                       BatchNorm's running statistics, of the rank that sent the note

The model is no part of it: it is on the servers. Nor are an optimizer's moments that each rank has
for itself (under async_easgd): they begin anew.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from manyhands.assembly.callbacks.callback_state import CallbackState
from manyhands.assembly.elastic.leases import StepLeases
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Position
from manyhands.data.step_claims import StepClaims
from manyhands.launch import environment
from manyhands.launch.elastic.worker_replacements import tell
from manyhands.replica.module import ModuleReplica
from manyhands.train import Trainer
from manyhands.trainer_parts import Milestones

STATE = "state"
MOST_BYTES = 1 << 19  # of buffers that travel with a note: a message to the coordinator is short


def make_note(trainer: Trainer, buffers: Sequence[Tensor], kept: CallbackState) -> bytes:
    at = trainer.position
    state = {
        "position": [at.epoch, at.offset, at.steps],
        "round": trainer.round,
        "done": dataclasses.asdict(trainer.done),
        "metrics": trainer.metrics,
        "callbacks": kept.plain("an elastic run over servers"),
    }
    tensors = {STATE: torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)}
    if sum(b.nbytes for b in buffers) <= MOST_BYTES:
        tensors |= {str(i): b.detach().cpu().contiguous() for i, b in enumerate(buffers)}
    return bytes(save(tensors))


def enter(trainer: Trainer, note: bytes, buffers: Sequence[Tensor], kept: CallbackState) -> None:
    """Go on from a note, and from the model on the servers."""
    tensors = load(note)
    state = json.loads(tensors.pop(STATE).numpy().tobytes())
    claims = trainer.limits.claims
    assert isinstance(claims, StepClaims)
    claims.enter(Position(*state["position"]))
    trainer.round, trainer.metrics = state["round"], state["metrics"]
    trainer.__post_init__()
    trainer.done = Milestones(**state["done"])
    kept.write(state["callbacks"], {})
    with torch.no_grad():
        for i, buffer in enumerate(buffers):
            if str(i) in tensors:
                buffer.copy_(tensors[str(i)])
    model = trainer.active.consensus(trainer.replica, trainer.group)
    if model is not None:
        trainer.replica.load(model)


def join_run(
    context: RankContext,
    trainer: Trainer,
    replica: ModuleReplica,
    leases: StepLeases,
    buffers: Sequence[Tensor],
    kept: CallbackState,
) -> None:
    """This process goes on where the others are, in place of one that died."""
    enter(trainer, leases.client.note(), buffers, kept)
    context.follow(leases.client.running)
    replica.stepped()  # the schedule catches up
    tell(context.store, f"joined/{context.rank}/{environment.starts()}")
