"""Sharding rule of einsum: the letter of the sharded dimension says what becomes of it.

bhid,bhjd->bhij   h sharded    h is in the output: each rank computes its h, nothing is sent
bthd,hde->bte     h sharded    h is summed over: partial sums are reduced over ranks
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.parallel.tensor.elementwise import first_sharded
from manyhands.parallel.tensor.sharded_value import ShardedValue, sharding_rule
from manyhands.parallel.tensor.tensor_axis import enter, reduce


def letters(equation: str, ndims: list[int]) -> tuple[list[list[str]], list[str]]:
    """The letters of each operand's dimensions, and of the output's; dimensions of an ellipsis are
    '...1', '...2' and so on, counted from the right."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    longest = 0
    found = []
    for term, ndim in zip(inputs.split(","), ndims, strict=True):
        before, dots, after = term.partition("...")
        count = ndim - len(before) - len(after) if dots else 0
        longest = max(longest, count)
        found.append([*before, *_ellipsis(count), *after])
    if arrow:
        before, dots, after = output.partition("...")
        return found, [*before, *(_ellipsis(longest) if dots else ()), *after]
    named = [x for term in found for x in term if not x.startswith("...")]
    return found, [*_ellipsis(longest), *sorted(x for x in named if named.count(x) == 1)]


def _ellipsis(count: int) -> list[str]:
    return [f"...{k}" for k in range(count, 0, -1)]


@sharding_rule("einsum")
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    p = first_sharded(tuple(operands))
    if not isinstance(equation, str) or kwargs or p is None:
        return NotImplemented
    terms, output = letters(equation, [v.ndim for v in operands])
    letter = next(t[p.shard_dim] for t, v in zip(terms, operands, strict=True) if v is p)
    if any(t.count(letter) > 1 for t in terms):
        return NotImplemented  # a diagonal
    local = [_operand(v, t, letter, p) for v, t in zip(operands, terms, strict=True)]
    out = torch.einsum(equation, *local)
    if letter in output:
        return p.like(out, output.index(letter))
    # of one operand it may be a view, which must not change in place
    return reduce(out.clone() if len(local) == 1 else out, p.axis)


def _operand(value: Any, term: list[str], letter: str, p: ShardedValue) -> Any:
    dim = term.index(letter) if letter in term else None
    if isinstance(value, ShardedValue):
        if (value.shard_dim, value.length, value.groups) == (dim, p.length, p.groups):
            return value.local
        value = value.gather_for("einsum")
    if dim is None or value.shape[dim] != p.length:  # not there, or broadcast
        return enter(value, p.axis)
    return p.shard_of(value, dim, "einsum")
