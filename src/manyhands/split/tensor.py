"""Which parameters of a model are cut over the ranks of the tensor axis, and along which dimension.

    column       the outputs of a layer are cut: what it gives is cut, until a ...
    row          ... layer whose inputs are cut sums it up over ranks
    vocabulary   the rows of an embedding are cut, and with them the outputs of the layer that it is tied to
    heads        as column, in as many blocks as there are fused matrices (q, k and v), by whole heads
    replicate    every rank holds all of it

Deriving is trying. An attempt runs the model once on meta tensors, cuts whatever comes in its way greedily, and writes down where a
cut could not go on; those layers then stay whole, and the next attempt begins. What is left when nothing fails is the plan.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from manyhands.errors import PlanError, TaskError
from manyhands.split.shard_spec import ShardSpec

WISHES = ("column", "row", "vocabulary", "heads", "replicate")
MOST_ATTEMPTS = 100
ASKED = "the task says so"


@dataclass(frozen=True)
class Cut:
    dim: int
    groups: int = 1


@dataclass(frozen=True)
class Derived:
    cuts: dict[str, Cut]  # by name of a parameter or buffer, tied ones under all their names
    sentences: list[str]  # what stays whole, and why


class DryRunFindings(Protocol):
    """What one attempt found, by name of a parameter."""

    cuts: dict[str, tuple[int, int]]  # dimension and groups
    columns: set[str]  # those that are cut on what they give
    failed: dict[str, str]  # why a cut could not go on
    blocks: dict[str, int]  # in how many blocks it should have been cut
    heads: dict[str, tuple[int, str]]  # how many heads, which do not divide, and of which module
    small: dict[str, str]  # why nobody tried


Attempt = Callable[
    [Mapping[str, str], Mapping[str, int], Mapping[str, str]], DryRunFindings
]  # (whole and why, blocks, wishes)


def derive(
    module: nn.Module, attempt: Attempt, size: int, overrides: Mapping[str, str] | None = None
) -> Derived:
    """`overrides`: what to do with modules whose names match a pattern, such as {"h.*.attn": "replicate"}."""
    wishes = wished(module, overrides or {})
    owners = {
        name: name.rpartition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False)
    }
    whole = {n: ASKED for n, owner in owners.items() if wishes.get(owner) == "replicate"}
    blocks: dict[str, int] = {}
    tried = attempt(whole, blocks, wishes)
    for _ in range(MOST_ATTEMPTS):
        if found := {n: k for n, k in tried.blocks.items() if n not in blocks}:
            blocks |= found  # what else failed may have done so because of that
        elif fails := _first_failure(tried, size, wishes, owners):
            whole |= fails
        else:
            break
        tried = attempt(whole, blocks, wishes)
    for layer in {
        _starred(n) for n, why in whole.items() if why != ASKED
    }:  # it may have failed because of one that is whole now
        fewer = {n: why for n, why in whole.items() if _starred(n) != layer}
        again = attempt(fewer, blocks, wishes)
        if (
            not _first_failure(again, size, wishes, owners)
            and set(again.blocks) <= set(blocks)
            and set(tried.cuts) <= set(again.cuts)
        ):
            whole, tried = fewer, again
    refused = [
        f"{m}={w}"
        for m, w in wishes.items()
        if w != "replicate" and not any(owners.get(n) == m for n in tried.cuts)
    ]
    if refused:
        raise PlanError(
            f"Task(tensor=...) asks for {', '.join(sorted(refused))}, but a layer that multiplies with its weight is needed there (Linear, "
            "convolution, Embedding, MultiheadAttention); name one of those, or leave it out"
        )
    named = {n: Cut(*cut) for n, cut in tried.cuts.items()}
    return Derived(
        _under_all_names(module, named), _sentences(module, named, tried.small | whole, size)
    )


def parts(
    values: Iterable[tuple[str, Tensor]], cuts: Mapping[str, Cut], size: int, index: int
) -> dict[str, ShardSpec]:
    """What rank `index` holds of each of the whole `values` (parameters and buffers, by name)."""
    found = {}
    for name, value in values:
        cut = cuts.get(name)
        shape = tuple(value.shape)
        found[name] = (
            ShardSpec(name, shape)
            if cut is None
            else ShardSpec(name, shape, cut.dim, size, index, cut.groups)
        )
    return found


def everything(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by all their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def wished(module: nn.Module, overrides: Mapping[str, str]) -> dict[str, str]:
    """What the task asks for, by module; a later pattern beats an earlier one."""
    names = [n for n, _ in module.named_modules() if n]
    owning = {n for n, m in module.named_modules() if m._parameters}
    found: dict[str, str] = {}
    for pattern, wish in overrides.items():
        if wish not in WISHES:
            near = difflib.get_close_matches(str(wish), WISHES, 1)
            raise TaskError(
                f"Task(tensor={{{pattern!r}: {wish!r}}}): {wish!r} is none of {', '.join(WISHES)}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        matched = [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, 1, 0.3)
            raise TaskError(
                f"Task(tensor={{{pattern!r}: {wish!r}}}): the model has no module of that name"
                + (f"; the nearest is {near[0]!r}" if near else "")
            )
        if wish == "replicate":  # of all that is inside, too
            matched = [n for n in names if any(n == m or n.startswith(f"{m}.") for m in matched)]
        matched = [n for n in matched if n in owning]
        if not matched:
            raise TaskError(
                f"Task(tensor={{{pattern!r}: {wish!r}}}): no module of that name has parameters of its own; name the layers in it"
            )
        found |= dict.fromkeys(matched, wish)
    return found


def _first_failure(
    tried: DryRunFindings, size: int, wishes: Mapping[str, str], owners: Mapping[str, str]
) -> dict[str, str]:
    """What failed first, in all layers of the same kind: what came after it may have failed only because of it."""
    _refuse_heads(tried, size)
    asked = {n for n in tried.failed if wishes.get(owners.get(n, "")) is not None}  # and so be it
    fails = {n: why for n, why in tried.failed.items() if n not in asked}
    kind = _starred(next(iter(fails), ""))
    return {n: why for n, why in fails.items() if _starred(n) == kind}


def _refuse_heads(tried: DryRunFindings, size: int) -> None:
    """Heads that do not divide: k and v of fewer heads than q stay whole, anything else is refused."""
    for name, (heads, where) in tried.heads.items():
        beside = {n for n in tried.columns if n.startswith(f"{where}.") and n not in tried.heads}
        if not beside:
            fit = [str(d) for d in range(1, heads + 1) if heads % d == 0][-6:]
            use = f"{', '.join(fit[:-1])} or {fit[-1]}" if len(fit) > 1 else fit[0]
            raise PlanError(f"tensor={size} does not divide {heads} heads of {where}; use {use}")
        tried.failed[name] = f"its {heads} heads do not divide over {size} ranks"


def _starred(name: str) -> str:
    return re.sub(r"(?<![^. ])\d+(?![^., ])", "*", name)


def _under_all_names(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    by_tensor = {id(v): cuts[n] for n, v in everything(module) if n in cuts}
    return {n: by_tensor[id(v)] for n, v in everything(module) if id(v) in by_tensor}


def _sentences(
    module: nn.Module, cuts: Mapping[str, Cut], reasons: Mapping[str, str], size: int
) -> list[str]:
    """One for all layers that stay whole for one reason, with numbers in their names left out."""
    said: dict[tuple[str, str], list[str]] = {}
    rest = 0
    for name, p in module.named_parameters():
        if name in cuts:
            continue
        if p.ndim < 2:
            rest += name not in reasons
            continue
        layer = name.rpartition(".")[0] or name
        reason = re.sub(
            r"(?<=\.)\d+(?=\.)", "*", reasons.get(name, "no layer that can be cut uses it")
        )
        said.setdefault((_starred(layer), reason), []).append(layer)
    lines = [
        f"{kind if len(set(all_)) > 1 else all_[0]} stays whole on each of {size} ranks: {why}"
        for (kind, why), all_ in said.items()
    ]
    if rest:
        lines.append(
            f"{rest} vectors (norms, and biases that are added after a sum over ranks) stay whole"
        )
    return lines
