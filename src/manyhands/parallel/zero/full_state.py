"""Full state: whole tensors of a sharded replica, by name, and back.

All ranks of the shard axis call each function together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from manyhands.core import Tensors
from manyhands.errors import CheckpointError
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.spans import Span
from manyhands.replica import state


def whole(
    flat: ShardedParameters, own: Callable[[Span], Tensor], spans: list[Span] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The whole of what each rank has a slice of, `own(span)`, parameter by parameter. Memory holds
    one span at a time."""
    rank, size = flat.group.rank, flat.group.size
    for s in flat.spans if spans is None else spans:
        mine = own(s).contiguous()
        full = torch.empty(s.length, dtype=mine.dtype, device=mine.device)
        full[s.own].copy_(mine)
        others = [r for r in range(size) if r != rank]
        into = {r: full[s.length * r // size : s.length * (r + 1) // size] for r in others}
        flat.group.transfer(dict.fromkeys(others, mine), into).wait()
        for entry in s.entries:
            yield entry.name, s.view(full, entry).clone()


def gradient_state(flat: ShardedParameters) -> Tensors:
    """The summed gradient of all parameters."""
    return dict(whole(flat, lambda s: s.grad))


def parameter_state(flat: ShardedParameters) -> Tensors:
    """All parameters that train."""
    return dict(whole(flat, lambda s: s.value))


def model_state(flat: ShardedParameters) -> Tensors:
    """The state_dict of the whole module, on the CPU."""
    found = {
        **dict(whole(flat, lambda s: s.value)),
        **dict(whole(flat, lambda s: s.value, flat.frozen)),
    }
    first = {id(p): n for n, p in flat.module.named_parameters()}
    got = {
        k: found.get(first.get(id(v), ""), v)
        for k, v in flat.module.state_dict(keep_vars=True).items()
        if isinstance(v, Tensor)
    }
    return {k: v.detach().to("cpu", copy=True) for k, v in got.items()}


def load_model(flat: ShardedParameters, saved: Tensors) -> None:
    """Load whole tensors: each rank copies its slices, and buffers as they are."""
    if not flat.gathers:
        if flat.common_bytes:
            flat.refresh(always=True)  # another rank may still read
        state.load_model(flat.module, saved)
        flat.refresh(always=True)
        return
    ours = flat.module.state_dict(keep_vars=True)
    odd = [
        k
        for k in {*ours, *saved}
        if k not in ours or k not in saved or ours[k].shape != saved[k].shape
    ]
    if odd:
        raise CheckpointError(
            f"the checkpoint is of another model: {', '.join(sorted(odd))}; "
            "resume with the model it is of"
        )
    entries = {id(e.parameter): (s, e) for s in (*flat.spans, *flat.frozen) for e in s.entries}
    with torch.no_grad():
        for k, v in saved.items():
            if (found := entries.get(id(ours[k]))) is None:
                ours[k].copy_(v)
                continue
            s, entry = found
            s.value[s.own_slice(entry)].copy_(v.reshape(-1)[slice(*s.owned(entry))])
