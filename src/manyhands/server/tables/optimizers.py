"""Server optimizers: what a table does with a pushed gradient, by name.

    SERVER_OPTIMIZERS      name -> ServerOptimizer
    resolve("adagrad")     resolve("my_module:Mine", modules=["my_module"])

Each is an equation of `update_kernels` with its options, defaults and state. Names of state,
options and defaults are torch's, where torch has the optimizer. A custom optimizer is a class in an
importable module, vectorised over the rows of a push:

    class Mine:
        state = {"velocity": "full", "seen": "row"}  # as long as the row, or one number; start: 0
        def __init__(self, mu=0.9): ...              # the table's options, except lr
        def update(self, w, g, state, lr): ...       # changes [rows, dim] arrays in place; state
                                                     # of "row" is [rows, 1]

Papers: Duchi et al. 2011 (adagrad), Mudigere et al. 2022 (rowwise_adagrad, arXiv:2104.05158),
Kingma and Ba 2015 (adam, arXiv:1412.6980), Loshchilov and Hutter 2019 (adamw, arXiv:1711.05101),
McMahan et al. 2013 (ftrl, KDD).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from manyhands.errors import StoreError
from manyhands.server.tables.update_kernels import (
    ADAGRAD,
    ADAM,
    FTRL,
    LAZY_ADAM,
    MOMENTUM,
    ROWWISE_ADAGRAD,
    SGD,
    SUM,
)

Extent = Literal["full", "row"]  # of state: as long as the row, or one number per row
Options = Mapping[str, float]


@dataclass(frozen=True)
class ServerOptimizer:
    """One optimizer: its equation, options, defaults and state.

    `state_of` names its state in the order a, b, c of the equation. With `counts_pushes` it also
    keeps how many pushes the table has had ("step").
    """

    name: str
    equation: int  # of `update_kernels`
    defaults: Options
    numbers: Callable[[Options, float, int], Sequence[float]]  # options, lr, step -> p
    state_of: Callable[[Options], dict[str, Extent]]
    # the first value of state that does not start as 0
    starts: Callable[[Options], dict[str, float]] = lambda options: {}
    counts_pushes: bool = False
    custom: Any = None  # the class of a custom optimizer

    def options(self, given: Options, table: str = "?") -> dict[str, float]:
        """All options with their values, after a check of those given."""
        if unknown := [name for name in given if name not in self.defaults]:
            known = ", ".join(self.defaults) or "none"
            raise StoreError(
                f"table {table!r}: optimizer {self.name!r} has no option {unknown[0]!r}; "
                f"known: {known}; leave it out or choose another optimizer"
            )
        for name, value in given.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise StoreError(
                    f"table {table!r}: {name}={value!r} of optimizer {self.name!r}; "
                    "a finite number is needed"
                )
        found = {**self.defaults, **given}
        for name, (low, high) in _RANGES.items():
            if name in found and not low <= found[name] < high:
                raise StoreError(
                    f"table {table!r}: {name}={found[name]:g} of optimizer {self.name!r} "
                    f"must be in [{low:g}, {high:g})"
                )
        return found


_NOT_NEGATIVE = "lr decay eps lr_decay initial_accumulator_value beta l1 l2 momentum".split()
_RANGES = {
    **{name: (0.0, math.inf) for name in _NOT_NEGATIVE},
    **{name: (0.0, 1.0) for name in ("beta1", "beta2")},
    "nesterov": (0.0, 2.0),
}


def _keeps(**state: Extent) -> Callable[[Options], dict[str, Extent]]:
    return lambda options: dict(state)


# -- the numbers p of each equation --


def _momentum_numbers(o: Options, lr: float, step: int) -> tuple[float, ...]:
    return lr, o["decay"], o["momentum"], 1 - o["dampening"], o["nesterov"], 1.0


def _momentum_state(o: Options) -> dict[str, Extent]:
    return {"momentum_buffer": "full", **({"begun": "row"} if o["dampening"] else {})}


def _adagrad_numbers(o: Options, lr: float, step: int) -> tuple[float, ...]:
    return lr / (1 + (step - 1) * o["lr_decay"]), o["decay"], o["eps"]


def _adagrad_starts(o: Options) -> dict[str, float]:
    return {"sum": o["initial_accumulator_value"]}


def _adam_numbers(o: Options, lr: float, step: int, decoupled: bool = False) -> tuple[float, ...]:
    beta1, beta2 = o["beta1"], o["beta2"]
    decay, keep = (0.0, 1 - lr * o["decay"]) if decoupled else (o["decay"], 1.0)
    rate, root = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    return rate, decay, keep, beta1, 1 - beta1, beta2, 1 - beta2, root, o["eps"]


def _adamw_numbers(o: Options, lr: float, step: int) -> tuple[float, ...]:
    return _adam_numbers(o, lr, step, decoupled=True)


def _lazy_adam_numbers(o: Options, lr: float, step: int) -> tuple[float, ...]:
    beta1, beta2 = o["beta1"], o["beta2"]
    return lr, o["decay"], beta1, 1 - beta1, beta2, 1 - beta2, o["eps"]


def _ftrl_numbers(o: Options, lr: float, step: int) -> tuple[float, ...]:
    return lr, o["decay"], o["beta"], o["l1"], o["l2"]


# -- the registry --

_MOMENTUM = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "nesterov": 0.0, "decay": 0.0}
_ADAGRAD = {
    "lr": 1e-2,
    "lr_decay": 0.0,
    "initial_accumulator_value": 0.0,
    "eps": 1e-10,
    "decay": 0.0,
}
_ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.0}
_FTRL = {"lr": 0.05, "beta": 1.0, "l1": 0.0, "l2": 0.0, "decay": 0.0}

_LIST = [
    ServerOptimizer("sum", SUM, {}, lambda o, lr, step: (), _keeps()),
    ServerOptimizer(
        "sgd", SGD, {"lr": 1e-3, "decay": 0.0}, lambda o, lr, step: (lr, o["decay"]), _keeps()
    ),
    ServerOptimizer("momentum", MOMENTUM, _MOMENTUM, _momentum_numbers, _momentum_state),
    ServerOptimizer(
        "adagrad",
        ADAGRAD,
        _ADAGRAD,
        _adagrad_numbers,
        _keeps(sum="full"),
        _adagrad_starts,
        counts_pushes=True,
    ),
    ServerOptimizer(
        "rowwise_adagrad",
        ROWWISE_ADAGRAD,
        _ADAGRAD,
        _adagrad_numbers,
        _keeps(sum="row"),
        _adagrad_starts,
        counts_pushes=True,
    ),
    ServerOptimizer(
        "adam",
        ADAM,
        _ADAM,
        _adam_numbers,
        _keeps(exp_avg="full", exp_avg_sq="full"),
        counts_pushes=True,
    ),
    ServerOptimizer(
        "adamw",
        ADAM,
        {**_ADAM, "decay": 1e-2},
        _adamw_numbers,
        _keeps(exp_avg="full", exp_avg_sq="full"),
        counts_pushes=True,
    ),
    ServerOptimizer(
        "lazy_adam",
        LAZY_ADAM,
        _ADAM,
        _lazy_adam_numbers,
        _keeps(exp_avg="full", exp_avg_sq="full", step="row"),
    ),
    ServerOptimizer("ftrl", FTRL, _FTRL, _ftrl_numbers, _keeps(z="full", n="full")),
]
SERVER_OPTIMIZERS: dict[str, ServerOptimizer] = {each.name: each for each in _LIST}


def resolve(name: str, modules: Sequence[str] = ()) -> ServerOptimizer:
    """The optimizer of a name. "module:Class" is imported only if `modules` lists the module: a
    client must not make a server import what it likes.
    """
    if name in SERVER_OPTIMIZERS:
        return SERVER_OPTIMIZERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise StoreError(
            f"optimizer {name!r} is unknown; known: {', '.join(SERVER_OPTIMIZERS)}, "
            "or a custom one as module:Class"
        )
    if module not in modules:
        allowed = ", ".join(modules) or "none"
        raise StoreError(
            f"optimizer {name!r}: this server may not import the module {module!r} "
            f"(allowed: {allowed}); allow it when the server starts"
        )
    try:
        custom = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise StoreError(
            f"optimizer {name!r} cannot be imported: {e}; "
            f"a class {attribute!r} in a module {module!r} is needed"
        ) from e
    state = getattr(custom, "state", None)
    if (
        not callable(getattr(custom, "update", None))
        or not isinstance(state, Mapping)
        or set(state.values()) - {"full", "row"}
    ):
        raise StoreError(
            f"optimizer {name!r} is not a server optimizer: it needs "
            "update(self, w, g, state, lr) and state, a dict of names to 'full' or 'row'"
        )
    return ServerOptimizer(
        name, -1, {"lr": 1e-2}, lambda o, lr, step: (), _keeps(**state), custom=custom
    )
