"""Samples that BatchNorm needs: 2 values a channel or more in every micro-batch of training.

fitting_micro      before the start: chooses `micro` of a pipeline so that no BatchNorm gets a
                   single value; refuses numbers under which one would
refuse_single      in training: raises in place of torch, with the module and what to change
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from manyhands.core import Position
from manyhands.data.sources import TensorSource
from manyhands.errors import PlanError, TaskError
from manyhands.parallel.sync_batchnorm import SyncBatchNorm
from manyhands.replica.forward import called, inputs_of, names_of
from manyhands.split.data import DataSplit

NEEDS = "1 value a channel, but a mean and a variance need 2 or more"
REMEDY = (
    "choose batch= so that no batch or micro-batch has a single sample (of the last batch of an "
    "epoch too: a DataLoader with drop_last=True leaves it out), or fewer parts (micro=)"
)


# -- before the start --


@dataclasses.dataclass(frozen=True)
class BatchCut:
    """How a run cuts its samples into micro-batches, as far as BatchNorm depends on it."""

    samples: int
    batch: int  # of a rank
    accumulate: int
    ranks: int  # with batches of their own
    synced: bool  # BatchNorm takes its statistics over the union of all ranks' batches
    stands_for: int = 1  # this one rank takes the union of so many ranks' batches as one
    last: bool = True  # whether the run reaches the last batch of an epoch

    @property
    def total(self) -> int:
        return self.batch * self.accumulate * self.ranks

    def smallest(self, micros: int) -> tuple[int, str]:
        """Samples of the smallest micro-batch that a BatchNorm normalises, and in which batch."""
        micro = self.stands_for * -(-(self.batch // self.stands_for) // micros)
        begins = {0: "every batch"}
        if self.last and self.samples > self.total and (rest := self.samples % self.total):
            begins[self.samples - rest] = f"the last batch of an epoch ({rest} samples)"
        found = []
        for offset, where in begins.items():
            splits = [
                DataSplit(self.samples, self.total, micro, rank, self.ranks)
                for rank in range(self.ranks)
            ]
            micros_of = [
                [len(m) for m in s.step_samples(Position(0, offset)).micros] for s in splits
            ]
            counts = (
                [sum(several) for several in zip(*micros_of, strict=True)]
                if self.synced
                else [n for some in micros_of for n in some if n]
            )
            found.append((min(counts), where))
        return min(found)


def fitting_micro(
    cut: BatchCut, most: int, rounds_of: int, chosen: bool, needs_two: Callable[[], str]
) -> tuple[int, str]:
    """The number of micro-batches, `most` or fewer, under which no BatchNorm gets a single value,
    and the BatchNorm that would otherwise; "": `most` fits.

    `rounds_of`: a multiple of it; `chosen`: by the user, so it stays; `needs_two`: the name of a
    BatchNorm with one value a channel in a sample. Raises PlanError where nothing fits."""
    smallest, where = cut.smallest(most)
    if smallest != 1 or not (name := needs_two()):
        return most, ""
    own = cut.batch // cut.stands_for
    for micro in () if chosen else range(most - rounds_of, 0, -rounds_of):
        if rounds_of == 1 and micro != -(-own // -(-own // micro)):
            continue  # a batch of 8 in 5 parts is in 4 of 2 samples
        if cut.smallest(micro)[0] > 1:
            return micro, name
    raise PlanError(
        f"BatchNorm {name} would get a micro-batch of 1 sample in {where}: {NEEDS}. "
        f"{cut.samples} samples, batch={cut.batch}, micro={most}, "
        f"{cut.ranks} ranks with batches of their own; {REMEDY}"
        + (
            "; batchnorm=sync normalises over all ranks' samples"
            if cut.ranks > 1 and not cut.synced
            else ""
        )
    )


def needs_two(model: nn.Module, train: Any, step: Callable[..., Any] | None) -> str:
    """The first BatchNorm that has one value a channel in a sample; "": none, or not known.

    Over an image of more than one pixel, one sample is enough."""
    names: dict[nn.Module, str] = {
        m: name for name, m in model.named_modules() if isinstance(m, _BatchNorm)
    }
    found: list[str] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        if x.shape[0] and x.numel() // x.shape[0] == x.shape[1]:
            found.append(names[module])

    handles = [m.register_forward_pre_hook(look) for m in names]
    modes = {m: m.training for m in model.modules()}
    try:
        if names:
            with torch.no_grad(), torch.random.fork_rng():
                device = next(model.parameters()).device
                where = train.device if isinstance(train, TensorSource) else "cpu"
                indices = torch.arange(min(2, train.samples), device=where)
                values = tree_map_only(Tensor, lambda t: t.to(device), train.fetch(indices))
                model.eval()  # statistics stay as they are
                inputs = inputs_of(values, step)
                called(model, inputs, names_of(values, step))
    except Exception:
        return ""  # training will say what is wrong with the model
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return found[0] if found else ""


# -- in training --


def refuse_single(model: nn.Module, names: nn.Module) -> Callable[[], None]:
    """Raise where a BatchNorm of `model` gets one value a channel. Returns what ends that.

    `names`: the module in which they have their names."""
    called = {id(m): name for name, m in names.named_modules()}
    handles = [
        m.register_forward_pre_hook(_Refusal(called.get(id(m), "")))
        for m in _local_batchnorms(model)
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _local_batchnorms(model: nn.Module) -> Iterator[_BatchNorm]:
    for m in model.modules():
        if isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm):
            yield m


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Hook of a BatchNorm. A class, because a model with a closure cannot be pickled."""

    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = getattr(args[0], "local", args[0]) if args else None
        if not module.training or not isinstance(x, Tensor) or x.ndim < 2:
            return
        if x.shape[0] and x.numel() == x.shape[1]:
            raise TaskError(
                f"BatchNorm {self.name} got {x.shape[0]} sample of shape {tuple(x.shape[1:])} in "
                f"training: {NEEDS}; {REMEDY}"
            )
