"""What a table does with the gradients that are pushed to it: the optimizer, run where the rows are.

A rule is an equation over one row `w`, its gradient `g` and what the rule keeps of the row: `a` and `b`, as long as the row, and
`c`, one number. The same equation runs over rows scattered through a table and over the one long row of a dense table; each is one
compiled kernel. The names of what is kept, options and defaults are torch's, where torch has the optimizer.

    RULES       name -> Rule                        resolve("adagrad")    resolve("my_rules:Mine", modules=["my_rules"])

A rule of one's own is a class in an importable module, vectorised over the rows of a push:

    class Mine:
        state = {"velocity": "full", "seen": "row"}              # as long as the row, or one number of it; all start as 0
        def __init__(self, mu=0.9): ...                          # the table's options, lr apart
        def update(self, w, g, state, lr): ...                   # [rows, dim] arrays (state of "row": [rows, 1]), changed in place
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from manyhands.errors import StoreError
from manyhands.kernels.compile import compiled, inlined
from manyhands.kernels.instructions import fma, prefetch
from manyhands.server.tables.kernels import AHEAD_PUSH, U64, lines_of

# -- the equations: p are the numbers of this push in the table's dtype, q the same in float64 --


@inlined
def _sum(w, g, p):
    """w += g"""
    for j in range(w.size):
        w[j] += g[j]


@inlined
def _sgd(w, g, p):
    """g += decay w;   w -= lr g"""
    lr, decay = p[0], p[1]
    for j in range(w.size):
        w[j] = fma(-lr, fma(decay, w[j], g[j]), w[j])


@inlined
def _momentum(w, g, a, c, p):
    """a = mu a + (1 - dampening) g (the first time: g);   w -= lr a, or with nesterov lr (g + mu a)"""
    lr, decay, mu, rest, nesterov = p[0], p[1], p[2], p[3], p[4]
    if c.size > 0:  # only kept where there is dampening: otherwise a = 0 gives the first time's
        if c[0] == 0:
            rest = p[5]
        c[0] = 1
    if nesterov != 0:
        for j in range(w.size):
            x = fma(decay, w[j], g[j])
            v = fma(rest, x, a[j] * mu)
            a[j] = v
            w[j] = fma(-lr, fma(mu, v, x), w[j])
    else:
        for j in range(w.size):
            v = fma(rest, fma(decay, w[j], g[j]), a[j] * mu)
            a[j] = v
            w[j] = fma(-lr, v, w[j])


@inlined
def _adagrad(w, g, a, p):
    """a += g g;   w -= lr g / (sqrt a + eps)"""
    lr, decay, eps = p[0], p[1], p[2]
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        n = fma(x, x, a[j])
        a[j] = n
        w[j] -= lr * x / (np.sqrt(n) + eps)


@inlined
def _rowwise_adagrad(w, g, c, p):
    """c += mean(g g);   w -= lr g / (sqrt c + eps)"""
    lr, decay, eps = p[0], p[1], p[2]
    square = decay * 0
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        square += x * x
    c[0] += square / w.dtype.type(w.size)
    rate = lr / (np.sqrt(c[0]) + eps)
    for j in range(w.size):
        w[j] -= rate * fma(decay, w[j], g[j])


@inlined
def _adam(w, g, a, b, p):
    """a = beta1 a + (1 - beta1) g;   b = beta2 b + (1 - beta2) g g;   w -= lr / (1 - beta1^t) a / (sqrt(b / (1 - beta2^t)) + eps)
    where t counts the pushes of the table. `keep` is 1, or with decoupled decay (adamw) 1 - lr decay."""
    rate, decay, keep, beta1, rest1, beta2, rest2, root, eps = (
        p[0],
        p[1],
        p[2],
        p[3],
        p[4],
        p[5],
        p[6],
        p[7],
        p[8],
    )
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        m = fma(rest1, x, beta1 * a[j])
        v = fma(rest2, x * x, beta2 * b[j])
        a[j] = m
        b[j] = v
        w[j] = keep * w[j] - rate * m / (np.sqrt(v) * root + eps)


@inlined
def _lazy_adam(w, g, a, b, c, p, q):
    """As adam, where t counts the pushes of this row."""
    c[0] += 1
    decay, beta1, rest1, beta2, rest2, eps = p[1], p[2], p[3], p[4], p[5], p[6]
    rate = w.dtype.type(q[0] / (1.0 - q[2] ** np.float64(c[0])))
    root = w.dtype.type(1.0 / np.sqrt(1.0 - q[4] ** np.float64(c[0])))
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        m = fma(rest1, x, beta1 * a[j])
        v = fma(rest2, x * x, beta2 * b[j])
        a[j] = m
        b[j] = v
        w[j] -= rate * m / (np.sqrt(v) * root + eps)


@inlined
def _ftrl(w, g, a, b, p):
    """s = (sqrt(b + g g) - sqrt b) / lr;   a += g - s w;   b += g g
    w = 0 where |a| <= l1, else -(a - sgn(a) l1) / ((beta + sqrt b) / lr + l2)"""
    lr, decay, beta, l1, l2 = p[0], p[1], p[2], p[3], p[4]
    zero = lr * 0
    for j in range(w.size):
        x = fma(decay, w[j], g[j])
        z, old = a[j], np.sqrt(b[j])
        if (
            b[j] == zero
        ):  # before its first gradient w is where it started, whatever lr has become: the z that gives it
            z = -(w[j] * (beta / lr + l2) + (l1 if w[j] > zero else -l1 if w[j] < zero else zero))
        n = fma(x, x, b[j])
        new = np.sqrt(n)
        z += x - (new - old) / lr * w[j]
        a[j] = z
        b[j] = n
        shrunk = z - l1 if z > l1 else z + l1 if z < -l1 else zero
        w[j] = -shrunk / ((beta + new) / lr + l2) if n > zero else w[j]


BLOCK = 64  # rows of one number that are worked on together

SUM, SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM, LAZY_ADAM, FTRL = range(8)


@inlined
def _step(kind, w, g, a, b, c, p, q):
    if kind == SUM:
        _sum(w, g, p)
    elif kind == SGD:
        _sgd(w, g, p)
    elif kind == MOMENTUM:
        _momentum(w, g, a, c, p)
    elif kind == ADAGRAD:
        _adagrad(w, g, a, p)
    elif kind == ROWWISE_ADAGRAD:
        _rowwise_adagrad(w, g, c, p)
    elif kind == ADAM:
        _adam(w, g, a, b, p)
    elif kind == LAZY_ADAM:
        _lazy_adam(w, g, a, b, c, p, q)
    else:
        _ftrl(w, g, a, b, p)


def _kernels(kind: int) -> tuple[Any, Any]:
    # `kind` is a constant of the closures, so of _step one branch is left in each; numba's cache tells them apart by it

    keeps_a, keeps_b = kind in (ADAGRAD, ADAM, FTRL), kind in (ADAM, FTRL)
    by_blocks = keeps_a or kind == SGD

    @compiled
    def scatter_numbers(slab, rows, grads, first, stride, p, q):
        """The same for rows of one number, some at a time side by side: one instruction does several of them."""
        w, g, a, b = np.empty((4, BLOCK), slab.dtype)
        n, none, one, two = rows.size, slab[:0], U64(1), U64(2)
        for start in range(0, n, BLOCK):
            m, at_start = U64(min(BLOCK, n - start)), U64(start)
            for i in range(U64(min(BLOCK, max(0, n - start - BLOCK)))):
                prefetch(slab, U64(rows[at_start + U64(BLOCK) + i]) * stride, 0)
            for i in range(m):
                at = U64(rows[at_start + i]) * stride
                w[i], g[i] = slab[at], grads[U64(first[at_start + i])]
                if keeps_a:
                    a[i] = slab[at + one]
                if keeps_b:
                    b[i] = slab[at + two]
            _step(kind, w[:m], g[:m], a[:m], b[:m], none, p, q)
            for i in range(m):
                at = U64(rows[at_start + i]) * stride
                slab[at] = w[i]
                if keeps_a:
                    slab[at + one] = a[i]
                if keeps_b:
                    slab[at + two] = b[i]

    @compiled
    def scatter(slab, rows, grads, first, dim, stride, wide, narrow, p, q):
        """Apply the equation to rows of a table. `wide`: how long a and b are together; `narrow`: c."""
        n, lines = rows.size, lines_of(slab, stride, stride)
        dim, stride = U64(dim), U64(stride)
        la, lb = min(U64(wide), dim), U64(wide) - min(U64(wide), dim)
        if by_blocks and dim == U64(1):
            scatter_numbers(slab, rows, grads, first, stride, p, q)
            return
        for i in range(n):
            if i + AHEAD_PUSH < n:
                later = U64(rows[i + AHEAD_PUSH]) * stride
                for j in range(lines):
                    prefetch(slab, later, j)
            at, grad = U64(rows[i]) * stride, U64(first[i]) * dim
            ia = at + dim
            ib, ic = ia + la, ia + la + lb
            w, g = slab[at : at + dim], grads[grad : grad + dim]
            _step(
                kind,
                w,
                g,
                slab[ia : ia + la],
                slab[ib : ib + lb],
                slab[ic : ic + U64(narrow)],
                p,
                q,
            )

    @compiled
    def spread(w, g, a, b, c, dim, p, q):
        """Apply the equation to one long row; where a number is kept of each row, to rows of `dim`."""
        if c.size == 0:
            _step(kind, w, g, a, b, c, p, q)
            return
        dim = U64(dim)
        for i in range(U64(c.size)):
            one, no = slice(i * dim, i * dim + dim), U64(0)
            _step(
                kind,
                w[one],
                g[one],
                a[one] if a.size > no else a,
                b[one] if b.size > no else b,
                c[i : i + U64(1)],
                p,
                q,
            )

    return scatter, spread


# -- the table of rules --

Plane = Literal["full", "row", "table"]  # as long as the row, one number a row, one number a table
Options = Mapping[str, float]


@dataclass(frozen=True)
class ServerOptimizer:
    """`planes` are what it keeps, in the order a, b, c; with `counts`, also how many pushes the table has had ("step")."""

    name: str
    kind: int
    defaults: Options
    numbers: Callable[[Options, float, int], Sequence[float]]  # options, lr, step -> p
    planes: Callable[[Options], dict[str, Plane]]
    starts: Callable[[Options], dict[str, float]] = (
        lambda options: {}
    )  # where a plane does not start as 0
    counts: bool = False
    user: Any = None

    def options(self, given: Options, table: str = "?") -> dict[str, float]:
        """All options, after a check of those given."""
        if unknown := [name for name in given if name not in self.defaults]:
            raise StoreError(
                f"table {table!r}: rule {self.name!r} has no option {unknown[0]!r}; known: {', '.join(self.defaults) or 'none'}; "
                "leave it out or choose another rule"
            )
        for name, value in given.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise StoreError(
                    f"table {table!r}: {name}={value!r} of rule {self.name!r}; a finite number is needed"
                )
        found = {**self.defaults, **given}
        for name, (low, high) in _RANGES.items():
            if name in found and not low <= found[name] < high:
                raise StoreError(
                    f"table {table!r}: {name}={found[name]:g} of rule {self.name!r} must lie in [{low:g}, {high:g})"
                )
        return found


_RANGES = {
    **{
        name: (0.0, math.inf)
        for name in (
            "lr",
            "decay",
            "eps",
            "lr_decay",
            "initial_accumulator_value",
            "beta",
            "l1",
            "l2",
        )
    },
    **{name: (0.0, 1.0) for name in ("beta1", "beta2")},
    "momentum": (0.0, math.inf),
    "nesterov": (0.0, 2.0),
}


def _keeps(**planes: Plane) -> Callable[[Options], dict[str, Plane]]:
    return lambda options: dict(planes)


def _adam_numbers(o: Options, lr: float, step: int, decoupled: bool) -> tuple[float, ...]:
    beta1, beta2 = o["beta1"], o["beta2"]
    decay, keep = (0.0, 1 - lr * o["decay"]) if decoupled else (o["decay"], 1.0)
    rate, root = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    return rate, decay, keep, beta1, 1 - beta1, beta2, 1 - beta2, root, o["eps"]


_ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_MOMENTUM = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "nesterov": 0.0, "decay": 0.0}
_ADAGRAD = {
    "lr": 1e-2,
    "lr_decay": 0.0,
    "initial_accumulator_value": 0.0,
    "eps": 1e-10,
    "decay": 0.0,
}


def _adagrad_numbers(o: Options, lr: float, step: int) -> tuple[float, ...]:
    return lr / (1 + (step - 1) * o["lr_decay"]), o["decay"], o["eps"]


def _momentum_numbers(o: Options, lr: float, step: int) -> tuple[float, ...]:
    return lr, o["decay"], o["momentum"], 1 - o["dampening"], o["nesterov"], 1.0


def _momentum_planes(o: Options) -> dict[str, Plane]:
    return {"momentum_buffer": "full", **({"begun": "row"} if o["dampening"] else {})}


_LIST = [
    ServerOptimizer("sum", SUM, {}, lambda o, lr, step: (), _keeps()),
    ServerOptimizer(
        "sgd", SGD, {"lr": 1e-3, "decay": 0.0}, lambda o, lr, step: (lr, o["decay"]), _keeps()
    ),
    ServerOptimizer("momentum", MOMENTUM, _MOMENTUM, _momentum_numbers, _momentum_planes),
    ServerOptimizer(
        "adagrad",
        ADAGRAD,
        _ADAGRAD,
        _adagrad_numbers,
        _keeps(sum="full"),
        lambda o: {"sum": o["initial_accumulator_value"]},
        True,
    ),
    ServerOptimizer(
        "rowwise_adagrad",
        ROWWISE_ADAGRAD,
        _ADAGRAD,
        _adagrad_numbers,
        _keeps(sum="row"),
        lambda o: {"sum": o["initial_accumulator_value"]},
        True,
    ),
    ServerOptimizer(
        "adam",
        ADAM,
        {**_ADAM, "decay": 0.0},
        lambda o, lr, step: _adam_numbers(o, lr, step, False),
        _keeps(exp_avg="full", exp_avg_sq="full"),
        counts=True,
    ),
    ServerOptimizer(
        "adamw",
        ADAM,
        {**_ADAM, "decay": 1e-2},
        lambda o, lr, step: _adam_numbers(o, lr, step, True),
        _keeps(exp_avg="full", exp_avg_sq="full"),
        counts=True,
    ),
    ServerOptimizer(
        "lazy_adam",
        LAZY_ADAM,
        {**_ADAM, "decay": 0.0},
        lambda o, lr, step: (
            lr,
            o["decay"],
            o["beta1"],
            1 - o["beta1"],
            o["beta2"],
            1 - o["beta2"],
            o["eps"],
        ),
        _keeps(exp_avg="full", exp_avg_sq="full", step="row"),
    ),
    ServerOptimizer(
        "ftrl",
        FTRL,
        {"lr": 0.05, "beta": 1.0, "l1": 0.0, "l2": 0.0, "decay": 0.0},
        lambda o, lr, step: (lr, o["decay"], o["beta"], o["l1"], o["l2"]),
        _keeps(z="full", n="full"),
    ),
]
RULES: dict[str, ServerOptimizer] = {rule.name: rule for rule in _LIST}
KERNELS = [_kernels(kind) for kind in range(8)]  # compiled where first called


def resolve(name: str, modules: Sequence[str] = ()) -> ServerOptimizer:
    """The rule of a name; "module:Class" only of `modules`, since a server imports what it is told by others."""
    if name in RULES:
        return RULES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise StoreError(
            f"rule {name!r} is unknown; known: {', '.join(RULES)}, or one of your own as module:Class"
        )
    if module not in modules:
        allowed = ", ".join(modules) or "none"
        raise StoreError(
            f"rule {name!r}: the module {module!r} is not among those that may be imported here ({allowed}); allow it first"
        )
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise StoreError(
            f"rule {name!r} cannot be imported: {e}; needed: a class {attribute!r} in a module {module!r}"
        ) from e
    state = getattr(kind, "state", None)
    if (
        not callable(getattr(kind, "update", None))
        or not isinstance(state, Mapping)
        or set(state.values()) - {"full", "row"}
    ):
        raise StoreError(
            f"rule {name!r} is not a rule: needed are update(self, w, g, state, lr) and state, a dict of names to 'full' or 'row'"
        )
    return ServerOptimizer(
        name, -1, {"lr": 1e-2}, lambda o, lr, step: (), _keeps(**state), user=kind
    )
