"""Callback state: what callbacks keep in a checkpoint, plain values and tensors, by their names.

    callback/<name>/<path>   a tensor of a callback's state
    raw/<name>               the weights that train, where the checkpoint's model is another one

A callback's name is that of its class; of a second one of a class, with #2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.callbacks.model_copy import ModelCopy
from manyhands.callbacks.shown_model import BestKeeper, ShownModel, WeightAverage
from manyhands.core import Tensors
from manyhands.errors import CheckpointError, TaskError
from manyhands.replica import state
from manyhands.replica.parameters import ReplicaParameters
from manyhands.task import Callback

TENSOR, PARAMS = "__tensor__", "params"
CALLBACK, RAW = "callback/", "raw/"


class CallbackState:
    """Of one rank; all ranks go on with that of the rank that wrote the checkpoint."""

    def __init__(self, callbacks: Sequence[Callback]):
        self.shown = ShownModel(callbacks)
        self._by_name: dict[str, Callback] = {}
        for callback in callbacks:
            if isinstance(callback, WeightAverage | BestKeeper):
                callback.begin_anew()
            kind = type(callback).__name__
            same = sum(type(c).__name__ == kind for c in self._by_name.values())
            self._by_name[f"{kind}#{same + 1}" if same else kind] = callback
        self.read()  # at the start: what cannot be saved must not end training later

    def read(self) -> tuple[dict[str, Any], Tensors]:
        """Plain values by callback, and the tensors themselves."""
        plain, tensors = {}, Tensors()
        for name, callback in self._by_name.items():
            if found := callback.state_dict():
                plain[name] = _apart(found, f"{name}/", tensors)
        return plain, {f"{CALLBACK}{k}": v for k, v in tensors.items()}

    def write(self, plain: dict[str, Any], tensors: Tensors) -> list[str]:
        """Restore; returns the names of callbacks that are no longer there."""
        mine = {k.removeprefix(CALLBACK): v for k, v in tensors.items()}
        for name, found in plain.items():
            if name in self._by_name:
                self._by_name[name].load_state_dict(_together(found, mine))
        return [name for name in plain if name not in self._by_name]

    # -- in a checkpoint, whose model is the shown one --

    def saved(
        self, params: Tensors, module: nn.Module, flat: ReplicaParameters
    ) -> tuple[Tensors, dict[str, Any], Tensors]:
        """The model to save instead of `params`, plain values, and tensors beside the model."""
        plain, tensors = self.read()
        copy = self.shown.copy
        if copy is None:
            return params, plain, _copied(tensors)
        if self.shown.is_average:  # it is the model
            prefix = f"{CALLBACK}{self._name_of(self.shown.average)}/{PARAMS}/"
            tensors = {k: v for k, v in tensors.items() if not k.startswith(prefix)}
        tensors |= {f"{RAW}{k}": v for k, v in params.items()}
        return named_state(module, flat, copy), plain, _copied(tensors)

    def restore(
        self, plain: dict[str, Any], mine: Tensors, module: nn.Module, flat: ReplicaParameters
    ) -> list[str]:
        """With the saved model loaded: restore callbacks, and the weights that train."""
        tensors = {k: v for k, v in mine.items() if k.startswith(CALLBACK)}
        if self.shown.average is not None:
            prefix = f"{CALLBACK}{self._name_of(self.shown.average)}/{PARAMS}/"
            if not any(k.startswith(prefix) for k in tensors):
                tensors |= {f"{prefix}{k}": v.detach().clone() for k, v in flat.values.items()}
        raw = {k.removeprefix(RAW): v for k, v in mine.items() if k.startswith(RAW)}
        if raw:
            state.load_model(module, raw)
        return self.write(plain, tensors)

    def plain(self, where: str) -> dict[str, Any]:
        """Plain values alone, where there is no room for tensors."""
        plain, tensors = self.read()
        if tensors:
            name = next(iter(tensors)).split("/")[1]
            raise TaskError(
                f"the callback {name} has tensors in its state, which {where} cannot keep; keep "
                "plain values, or leave it out"
            )
        return plain

    def _name_of(self, callback: Callback | None) -> str:
        return next(name for name, c in self._by_name.items() if c is callback)


def named_state(module: nn.Module, flat: ReplicaParameters, copy: ModelCopy) -> Tensors:
    """What `replica.state.model_state` would give if the module held the copy."""
    views = {id(view.parameter): view for view in flat.views}
    found: Tensors = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        here = copy.buffers.get(name, value)
        if (view := views.get(id(value))) is not None:
            here = torch.as_strided(
                copy.params[view.vector], view.value.shape, view.value.stride(), view.start
            )
        found[name] = here.detach().to("cpu", value.dtype, copy=True)
    return found


def refuse_split(raw: bool) -> None:
    if raw:
        raise CheckpointError(
            "the checkpoint's model is an average, or the best one, and the weights that trained "
            "are beside it, which cannot be resharded; resume it with data= alone"
        )


def _copied(tensors: Tensors) -> Tensors:
    return {f"*/{k}": v.detach().to("cpu", copy=True) for k, v in tensors.items()}


def _apart(value: Any, path: str, tensors: Tensors) -> Any:
    """Plain values, with the path of each tensor in its place."""
    if isinstance(value, Tensor):
        tensors[path.rstrip("/")] = value
        return {TENSOR: path.rstrip("/")}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _apart(v, f"{path}{k}/", tensors) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_apart(v, f"{path}{i}/", tensors) for i, v in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TaskError(
        f"the state_dict of the callback {path.split('/')[0]} has a {type(value).__name__} at "
        f"{path.rstrip('/')}, which cannot be saved; give tensors, numbers, texts, and lists and "
        "dicts (with text keys) of them"
    )


def _together(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors[value[TENSOR]]
        return {k: _together(v, tensors) for k, v in value.items()}
    return [_together(v, tensors) for v in value] if isinstance(value, list) else value
