"""Batch errors: what in a batch the model or the loss could not compute with, in one line.

torch names tensors by its own parameters ("mat1 and mat2 must have the same dtype"); people know
them as images, ids and targets. Looked at only when a batch has failed, so it costs nothing before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import TaskError

ABOUT_TYPES = re.compile(
    r"dtype|datatype|scalar type|Input type|result type|not implemented for '|bool tensors"
)
BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")
# what torch calls dtypes in its errors
NAMES = {
    torch.uint8: r"Byte|unsigned char|uint8",
    torch.int8: r"Char|signed char|int8",
    torch.int16: r"Short|short int|int16",
    torch.int32: r"Int|(?<!long )(?<!short )int|int32",
    torch.int64: r"Long|long int|int64",
    torch.bool: r"Bool|bool|CPUBoolType",
    torch.float32: r"Float|float",
    torch.float64: r"Double|double|float64",
    torch.float16: r"Half|c10::Half|float16",
}
IMAGES = "scale images, x.float() / 255"


def of_model(error: Exception, model: Any, inputs: Sequence[Any]) -> TaskError | None:
    """Why the model could not compute with its inputs; None: torch's own words say it as well."""
    said = str(error)
    if isinstance(error, IndexError) and "out of range" in said:
        return _of_ids(model, inputs)
    if (x := _odd_one(error, said, model, inputs)) is None:
        return None
    floats = _name(_dtype_of(model))
    if "indices" in said:
        given, do = f"ids of {_name(x.dtype)}", "ids are whole numbers, x.long()"
    elif x.dtype == torch.uint8:
        given, do = "inputs of uint8", f"the model computes in {floats}: {IMAGES}"
    else:
        given, do = f"inputs of {_name(x.dtype)}", f"the model computes in {floats}: x.to(torch."
        do += f"{floats})"
    return TaskError(f"the batch has {given}, which the model cannot compute with; {do}")


def of_loss(error: Exception, outputs: Any, target: Any) -> TaskError | None:
    """Why the loss could not compute with outputs and target; None: torch says it as well."""
    said = str(error)
    if (found := BOUNDS.search(said)) is not None:
        return TaskError(f"target {found[1]}{_of_classes(outputs)}")
    if "device-side assert" in said:
        return TaskError(
            "the loss failed on the GPU, as it does for targets out of range"
            f"{_of_classes(outputs)}; device=cpu shows which"
        )
    if not isinstance(target, Tensor):
        return None
    if "multi-target" in said and target.ndim > 1 and target.shape[-1] == 1:
        return TaskError(
            f"targets have shape {tuple(target.shape)}, but the loss needs one class a sample, "
            f"{tuple(target.shape[:-1])}; give y.squeeze(-1)"
        )
    if not _about_types(error, said):
        return None
    given = f"targets are {_name(target.dtype)} of shape {tuple(target.shape)}"
    if "target dtype to be Long" in said:
        return TaskError(
            f"{given}, but the loss needs class indices of int64 (or uint8); give y.long()"
        )
    if target.is_floating_point() and target.dtype == torch.get_default_dtype():
        return None
    return TaskError(f"{given}, but the loss needs floats; give y.float()")


def of_step(error: Exception, model: Any, values: Any) -> TaskError | None:
    """Why a step of the user's could not compute with a batch; None: torch says it as well."""
    said = str(error)
    if (found := BOUNDS.search(said)) is not None:
        return TaskError(
            f"target {found[1]} is no class of the model's outputs; give the last layer as many "
            "outputs as there are classes, and number classes from 0"
        )
    if isinstance(error, IndexError) and "out of range" in said:
        return _of_ids(model, values)
    if (x := _odd_one(error, said, model, values)) is None:
        return None
    do = "class indices and ids are int64, y.long(); other numbers floats, x.float()"
    if x.dtype == torch.uint8:
        do = f"{IMAGES}; class indices and ids are int64, y.long()"
    return TaskError(f"the batch has {_name(x.dtype)}, which step= cannot compute with; {do}")


def _about_types(error: Exception, said: str) -> bool:
    types = ABOUT_TYPES.search(said) or "floating point type" in said
    return isinstance(error, RuntimeError | ValueError) and bool(types)


def _odd_one(error: Exception, said: str, model: Any, values: Any) -> Tensor | None:
    """The tensor whose dtype an error is about, if it is the batch's."""
    if not _about_types(error, said):
        return None
    right = None if "indices" in said else _dtype_of(model)
    found = [x for x in _tensors(values) if x.dtype in NAMES and x.dtype != right]
    named = [x for x in found if re.search(rf"\b({NAMES[x.dtype]})(Tensor)?\b", said)]
    return next(iter(named or (found if "mixed dtype" in said else [])), None)


def _of_classes(outputs: Any) -> str:
    """The classes that the outputs have, as the end of a sentence."""
    if not isinstance(outputs, Tensor) or outputs.ndim == 0:
        return ""
    n = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
    return (
        f", but the model's outputs have {n} classes (0 to {n - 1}); give the last layer as many "
        "outputs as there are classes, and number classes from 0"
    )


def _of_ids(model: Any, inputs: Any) -> TaskError | None:
    if not isinstance(model, nn.Module):
        return None
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    rows = min(tables, default=0)
    ids = [x for x in _tensors(inputs) if x.dtype in (torch.int32, torch.int64) and x.numel()]
    ends = [int(end) for x in ids for end in (x.min(), x.max())]
    wrong = [end for end in ends if not 0 <= end < rows]
    if not rows or not wrong:
        return None
    return TaskError(
        f"the batch has an id of {wrong[-1]}, but nn.Embedding has {rows} rows (0 to {rows - 1}); "
        "give it as many rows as there are ids"
    )


def _dtype_of(model: Any) -> torch.dtype:
    """The dtype that the model computes in."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.get_default_dtype())


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
