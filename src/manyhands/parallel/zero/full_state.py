"""Whole tensors out of a spread replica, by name, and back: all ranks of the shard axis call each of these together."""

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
    """Of what each rank has a slice of, `own(span)`: all of it, parameter by parameter, holding one span at a time."""
    rank, size = flat.group.rank, flat.group.size
    for s in flat.spans if spans is None else spans:
        mine = own(s).contiguous()
        full = torch.empty(s.length, dtype=mine.dtype, device=mine.device)
        full[s.own].copy_(mine)
        others = [r for r in range(size) if r != rank]
        into = {r: full[s.length * r // size : s.length * (r + 1) // size] for r in others}
        flat.group.transfer(dict.fromkeys(others, mine), into).wait()
        for place in s.places:
            yield place.name, s.view(full, place).clone()


def gradient_state(flat: ShardedParameters) -> Tensors:
    """The summed gradient, whole."""
    return dict(whole(flat, lambda s: s.grad))


def parameter_state(flat: ShardedParameters) -> Tensors:
    """All that trains, whole."""
    return dict(whole(flat, lambda s: s.value))


def model_state(flat: ShardedParameters) -> Tensors:
    """As the module's own state_dict would be, on the CPU, if all of it were here."""
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
    """Each rank takes its slices out of the whole; buffers as they are."""
    if not flat.gathers:
        if flat.common_bytes:
            flat.refresh(always=True)  # somebody may still read
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
            f"the checkpoint is of another model: {', '.join(sorted(odd))}; resume with the model it is of"
        )
    places = {id(p.parameter): (s, p) for s in (*flat.spans, *flat.frozen) for p in s.places}
    with torch.no_grad():
        for k, v in saved.items():
            if (found := places.get(id(ours[k]))) is None:
                ours[k].copy_(v)
                continue
            s, place = found
            start, stop = s.run(place)
            if start < stop:
                lo = place.start + start - s.own.start
                s.value[lo : lo + stop - start].copy_(v.reshape(-1)[start:stop])
