"""Replica state by parameter name, for checkpoints: free of flat vectors, devices and ranks."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Tensors
from manyhands.errors import CheckpointError, TaskError


def model_state(module: nn.Module) -> Tensors:
    return {
        k: v.detach().to("cpu", copy=True)
        for k, v in module.state_dict().items()
        if isinstance(v, Tensor)
    }


def load_model(module: nn.Module, saved: Tensors) -> None:
    """Copy into the existing tensors, which stay views of the flat vector."""
    ours = module.state_dict(keep_vars=True)
    missing = [f"{k} {tuple(v.shape)}" for k, v in ours.items() if k not in saved]
    extra = [f"{k} {tuple(v.shape)}" for k, v in saved.items() if k not in ours]
    shapes = [
        f"{k}: model {tuple(ours[k].shape)}, checkpoint {tuple(v.shape)}"
        for k, v in saved.items()
        if k in ours and ours[k].shape != v.shape
    ]
    if missing or extra or shapes:
        lines = (
            [f"  only in the model:      {m}" for m in missing]
            + [f"  only in the checkpoint: {e}" for e in extra]
            + [f"  other shape: {s}" for s in shapes]
        )
        raise CheckpointError(
            "the checkpoint is of another model:\n"
            + "\n".join(lines)
            + "\nresume with the model it was saved from, or start anew without resume"
        )
    with torch.no_grad():
        for k, v in saved.items():
            ours[k].copy_(v)


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    names = {id(p): n for n, p in module.named_parameters()}
    tensors: Tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups = plain_groups(module, optimizer, [g["params"] for g in optimizer.param_groups])
    for p, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{names[id(p)]}/{key}"] = value.detach().to("cpu", copy=True)
            elif isinstance(value, int | float | bool):
                numbers.setdefault(names[id(p)], {})[key] = value
    return tensors, {"groups": groups, "numbers": numbers}


def plain_groups(
    module: nn.Module, optimizer: Optimizer, parameters: list[list[nn.Parameter]]
) -> list[dict[str, Any]]:
    """Hyper-parameters of every group as plain values, with the names of its `parameters`."""
    names = {id(p): n for n, p in module.named_parameters()}
    if gone := sum(id(p) not in names for whole in parameters for p in whole):
        raise TaskError(
            f"{gone} parameters that are trained are no longer the model's: a layer was replaced "
            "after training began; build the model whole before, or start another run with it"
        )
    return [
        {
            **{k: _plain(v) for k, v in g.items() if k != "params" and _is_plain(v)},
            "params": [names[id(p)] for p in whole],
        }
        for g, whole in zip(optimizer.param_groups, parameters, strict=True)
    ]


def load_optimizer(
    module: nn.Module, optimizer: Optimizer, tensors: Tensors, meta: dict[str, Any]
) -> None:
    load_named(optimizer, {id(p): n for n, p in module.named_parameters()}, tensors, meta)


def load_named(
    optimizer: Optimizer, names: dict[int, str], tensors: Tensors, meta: dict[str, Any]
) -> None:
    """Load "name/key" `tensors`; `names` maps the id of each parameter held to its name."""
    held = [p for g in optimizer.param_groups for p in g["params"]]
    number = {names[id(p)]: i for i, p in enumerate(held)}
    state: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("/")
        if (i := number.get(parameter)) is not None:
            # in the parameter's memory format (channels_last): fused kernels ignore strides
            alike = value.shape == held[i].shape and value.ndim > 0
            state.setdefault(i, {})[key] = (
                torch.empty_like(held[i], dtype=value.dtype).copy_(value) if alike else value
            )
    for parameter, entries in meta["numbers"].items():
        if parameter in number:
            state.setdefault(number[parameter], {}).update(entries)
    current = optimizer.state_dict()["param_groups"]
    if len(current) != len(meta["groups"]):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(meta['groups'])} parameter groups, this one "
            f"{len(current)}; use the same optimizer"
        )
    groups = []
    for now, then in zip(current, meta["groups"], strict=True):
        # chosen for this machine, not by the checkpoint
        how = {k: now[k] for k in ("params", "fused", "foreach", "capturable") if k in now}
        groups.append({**now, **{k: v for k, v in then.items() if k in now}, **how})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def rng_state(device: torch.device) -> Tensors:
    """Every random generator that user code may use, as bytes."""
    version, words, gauss = random.getstate()
    _, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    python = torch.tensor([version, *words], dtype=torch.int64)
    numpy = torch.cat(
        [torch.from_numpy(np.asarray(keys, dtype=np.int64)), torch.tensor([pos, has_gauss])]
    )
    floats = torch.tensor([float("nan") if gauss is None else gauss, cached], dtype=torch.float64)
    state = {
        "torch": torch.get_rng_state(),
        "python": python.view(torch.uint8),
        "numpy": numpy.view(torch.uint8),
        "gauss": floats.view(torch.uint8),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_rng(saved: Tensors, device: torch.device) -> None:
    gauss, cached = _aligned(saved["gauss"]).view(torch.float64).tolist()
    version, *words = _aligned(saved["python"]).view(torch.int64).tolist()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    *keys, pos, has_gauss = _aligned(saved["numpy"]).view(torch.int64).tolist()
    np.random.set_state(("MT19937", np.asarray(keys, dtype=np.uint32), pos, has_gauss, cached))
    torch.set_rng_state(_aligned(saved["torch"]))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(_aligned(saved["cuda"]), device)


def seed_everything(seed: int, rank: int) -> None:
    """Different random numbers on each rank (dropout, augmentation).

    Called after the model is built, which is the same everywhere.
    """
    mixed = (seed * 1_000_003 + rank * 97 + 1) % (2**31)
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _aligned(saved: Tensor) -> Tensor:
    return saved.clone()  # a slice of a file may start at any byte


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, int | float | bool | str | tuple | list)
        or (isinstance(value, Tensor) and value.numel() == 1)
    )


def _plain(value: Any) -> Any:
    return (
        float(value)
        if isinstance(value, Tensor)
        else list(value)
        if isinstance(value, tuple)
        else value
    )


def to_plain(value: Any) -> Any:
    """A scheduler's state as JSON, without functions, which the user's factory makes again."""
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {
                k: to_plain(v) for k, v in value.items() if not callable(v) and k != "optimizer"
            }
        return {"__pairs__": [[k, to_plain(v)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return (
        value
        if value is None or isinstance(value, str | int | float | bool)
        else float(value)
        if isinstance(value, Tensor)
        else None
    )


def from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if "__pairs__" in value:
            return Counter({k: from_plain(v) for k, v in value["__pairs__"]})
        return {k: from_plain(v) for k, v in value.items()}
    return [from_plain(v) for v in value] if isinstance(value, list) else value
