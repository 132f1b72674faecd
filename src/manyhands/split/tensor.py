"""Tensor-parallel cuts: which parameters are cut over the tensor axis, and along which dimension.

    column       the outputs of a layer are cut: what it returns is sharded, until a ...
    row          ... layer whose inputs are cut sums over ranks
    vocabulary   the rows of an embedding, and with them the outputs of the layer that it is tied to
    heads        as column, in one block per fused matrix (q, k and v), by whole heads
    replicate    every rank holds all of it

Cuts are derived by dry runs. A dry run executes the model once on fake tensors, cuts every layer it
can, and notes which cuts failed and why. Those layers are replicated in the next dry run. When
nothing fails any more, the cuts that are left are the plan.

Papers: Shoeybi et al. 2019 (arXiv:1909.08053); sequence: Korthikanti et al. 2022
(arXiv:2205.05198).
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from manyhands.errors import PlanError, TaskError
from manyhands.split.shard_spec import ShardSpec

CUTS = ("column", "row", "vocabulary", "heads", "replicate")  # that a task may request
MAX_DRY_RUNS = 100
REQUESTED = "the task says so"


@dataclass(frozen=True)
class Cut:
    """Cut of a parameter: along `dim`, in `groups` blocks."""

    dim: int
    groups: int = 1


@dataclass(frozen=True)
class TensorCuts:
    """The derived cuts of a model."""

    cuts: dict[str, Cut]  # by parameter or buffer, tied ones under all their names
    notes: list[str]  # which layers every rank holds as a whole, and why


@dataclass
class DryRunResult:
    """Findings of one dry run, by name of a parameter in the model."""

    cuts: dict[str, tuple[int, int]] = field(default_factory=dict)  # (dimension, groups)
    columns: set[str] = field(default_factory=set)  # those that are cut on their outputs
    failed: dict[str, str] = field(default_factory=dict)  # why the cut is impossible
    blocks: dict[str, int] = field(default_factory=dict)  # number of blocks that it needs
    # number of heads, which does not divide, and the module that has them
    heads: dict[str, tuple[int, str]] = field(default_factory=dict)
    small: dict[str, str] = field(default_factory=dict)  # why no cut was tried


# (replicated parameters and why, blocks by parameter, requested cuts by module)
DryRun = Callable[[Mapping[str, str], Mapping[str, int], Mapping[str, str]], DryRunResult]


def derive(
    module: nn.Module, dry_run: DryRun, size: int, overrides: Mapping[str, str] | None = None
) -> TensorCuts:
    """The cuts of `module` over `size` ranks.

    `overrides`: cuts of modules whose names match a pattern, as {"h.*.attn": "replicate"}."""
    requested = requested_cuts(module, overrides or {})
    owners = {
        name: name.rpartition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False)
    }
    replicated = {
        n: REQUESTED for n, owner in owners.items() if requested.get(owner) == "replicate"
    }
    blocks: dict[str, int] = {}
    result = dry_run(replicated, blocks, requested)
    for _ in range(MAX_DRY_RUNS):
        if found := {n: k for n, k in result.blocks.items() if n not in blocks}:
            blocks |= found  # other failures may have come from that
        elif failures := _first_failure(result, size, requested, owners, replicated):
            replicated |= failures
        else:
            break
        result = dry_run(replicated, blocks, requested)
    # a layer may have failed only because of another that is replicated now: try it again
    # (in an order that is the same in every process)
    for layer in dict.fromkeys(_starred(n) for n, why in replicated.items() if why != REQUESTED):
        fewer = {n: why for n, why in replicated.items() if _starred(n) != layer}
        again = dry_run(fewer, blocks, requested)
        if (
            not _first_failure(again, size, requested, owners)
            and set(again.blocks) <= set(blocks)
            and set(result.cuts) <= set(again.cuts)
        ):
            replicated, result = fewer, again
    _check_requests(requested, owners, result)
    named = {n: Cut(*cut) for n, cut in result.cuts.items()}
    return TensorCuts(
        _under_all_names(module, named), _notes(module, named, result.small | replicated, size)
    )


def _check_requests(
    requested: Mapping[str, str], owners: Mapping[str, str], result: DryRunResult
) -> None:
    refused = [
        f"{m}={cut}"
        for m, cut in requested.items()
        if cut != "replicate" and not any(owners.get(n) == m for n in result.cuts)
    ]
    if refused:
        raise PlanError(
            f"Task(tensor=...) asks for {', '.join(sorted(refused))}, but a layer that multiplies "
            "with its weight is needed there (Linear, convolution, Embedding, MultiheadAttention); "
            "name one of those, or leave it out"
        )


def shard_specs(
    values: Iterable[tuple[str, Tensor]], cuts: Mapping[str, Cut], size: int, index: int
) -> dict[str, ShardSpec]:
    """Shard specs of rank `index` for the global tensors `values` (parameters and buffers)."""
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


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by all their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def requested_cuts(module: nn.Module, overrides: Mapping[str, str]) -> dict[str, str]:
    """The cuts that the task requests, by module; a later pattern overrides an earlier one."""
    names = [n for n, _ in module.named_modules() if n]
    owning = {n for n, m in module.named_modules() if m._parameters}
    found: dict[str, str] = {}
    for pattern, cut in overrides.items():
        given = f"Task(tensor={{{pattern!r}: {cut!r}}})"
        if cut not in CUTS:
            near = difflib.get_close_matches(str(cut), CUTS, 1)
            raise TaskError(
                f"{given}: {cut!r} is none of {', '.join(CUTS)}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        matched = [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, 1, 0.3)
            raise TaskError(
                f"{given}: the model has no module of that name"
                + (f"; the nearest is {near[0]!r}" if near else "")
            )
        if cut == "replicate":  # of all that is inside, too
            matched = [n for n in names if any(n == m or n.startswith(f"{m}.") for m in matched)]
        matched = [n for n in matched if n in owning]
        if not matched:
            raise TaskError(
                f"{given}: no module of that name has parameters of its own; name the layers in it"
            )
        found |= dict.fromkeys(matched, cut)
    return found


def _first_failure(
    result: DryRunResult,
    size: int,
    requested: Mapping[str, str],
    owners: Mapping[str, str],
    replicated: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The first failure, in all layers of the same kind, of parameters that are not `replicated`
    already (a bias is cut with its weight, whatever was said of it alone).

    Later failures may have come from it. A failure of a requested cut is accepted."""
    _refuse_heads(result, size)
    failures = {
        n: why
        for n, why in result.failed.items()
        if requested.get(owners.get(n, "")) is None and n not in (replicated or {})
    }
    kind = _starred(next(iter(failures), ""))
    return {n: why for n, why in failures.items() if _starred(n) == kind}


def _refuse_heads(result: DryRunResult, size: int) -> None:
    """Heads that do not divide: k and v of fewer heads than q are replicated, others refused."""
    for name, (heads, where) in result.heads.items():
        beside = {n for n in result.columns if n.startswith(f"{where}.") and n not in result.heads}
        if not beside:
            fit = [str(d) for d in range(1, heads + 1) if heads % d == 0][-6:]
            use = f"{', '.join(fit[:-1])} or {fit[-1]}" if len(fit) > 1 else fit[0]
            raise PlanError(f"tensor={size} does not divide {heads} heads of {where}; use {use}")
        result.failed[name] = f"its {heads} heads do not divide over {size} ranks"


def _starred(name: str) -> str:
    """The name with * for numbers: the same for layers of one kind."""
    return re.sub(r"(?<![^. ])\d+(?![^., ])", "*", name)


def _under_all_names(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    by_tensor = {id(v): cuts[n] for n, v in named_tensors(module) if n in cuts}
    return {n: by_tensor[id(v)] for n, v in named_tensors(module) if id(v) in by_tensor}


def _notes(
    module: nn.Module, cuts: Mapping[str, Cut], reasons: Mapping[str, str], size: int
) -> list[str]:
    """One line for all layers that are replicated for one reason, with * for numbers in names."""
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
