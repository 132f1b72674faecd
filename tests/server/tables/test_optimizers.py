"""Server optimizers compute what torch's optimizers compute, and what theory says of limits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.core import Table
from manyhands.errors import StoreError
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.optimizers import SERVER_OPTIMIZERS, resolve
from manyhands.server.tables.sparse import SparseTable

STEPS = 5
ORDER = {"float32": 1e-5, "float64": 1e-12}
DTYPES = ["float32", "float64"]
TRAINED = [name for name in SERVER_OPTIMIZERS if name != "sum"]


def dice(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gradients(n: int, dtype: str, steps: int = STEPS) -> list[np.ndarray]:
    return [dice(100 + t).standard_normal(n).astype(dtype) for t in range(steps)]


def dense_run(
    optimizer: str, w: np.ndarray, grads: list[np.ndarray], dim: int = 1, **options: float
) -> DenseTable:
    lr = options.pop("lr", 0.05)
    spec = Table(
        "t", length=w.size, dim=dim, dtype=w.dtype.name, optimizer=optimizer, options=options
    )
    table = DenseTable(spec, 0, w.size, w)
    for t, g in enumerate(grads):
        table.push(g.copy(), lr / (t + 1))  # a schedule: the push brings its own rate
    return table


def sparse_run(
    optimizer: str, w: np.ndarray, grads: list[np.ndarray], **options: float
) -> np.ndarray:
    """The same numbers as rows under scattered ids."""
    lr = options.pop("lr", 0.05)
    table = SparseTable(
        Table("t", dim=w.shape[1], dtype=w.dtype.name, optimizer=optimizer, options=options)
    )  # type: ignore[arg-type]
    ids = dice(7).integers(-(2**63), 2**63 - 1, w.shape[0], dtype=np.int64)
    table.pull(ids, out := np.empty_like(w))
    _, _, state, _ = table.items()  # what rows start with is the same in all of them
    table.load(ids, w, state)
    for t, g in enumerate(grads):
        table.push(ids, g.copy().reshape(w.shape), lr / (t + 1))
    table.pull(ids, out)
    return out


def torch_run(
    make: Callable[[Any], torch.optim.Optimizer],
    w: np.ndarray,
    grads: list[np.ndarray],
    lr: float = 0.05,
) -> np.ndarray:
    p = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = make([p])
    for t, g in enumerate(grads):
        optimizer.param_groups[0]["lr"] = lr / (t + 1)
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
    return p.detach().numpy()


SGDS = [
    ("sgd", {}),
    ("sgd", {"decay": 0.1}),
    ("momentum", {"momentum": 0.9}),
    ("momentum", {"momentum": 0.9, "decay": 0.01}),
    ("momentum", {"momentum": 0.8, "nesterov": 1, "decay": 0.01}),
    ("momentum", {"momentum": 0.8, "dampening": 0.3}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("optimizer", "options"), SGDS)
@pytest.mark.parametrize("n", [1, 7, 64, 1000, 4099])
def test_sgd_and_momentum_give_the_bits_of_torch(
    optimizer: str, options: dict[str, float], dtype: str, n: int
) -> None:
    w, grads = dice().standard_normal(n).astype(dtype), gradients(n, dtype)
    o = dict(options)
    words = {"weight_decay": o.pop("decay", 0.0), "nesterov": bool(o.pop("nesterov", 0)), **o}
    theirs = torch_run(lambda p: torch.optim.SGD(p, lr=0.05, **words), w, grads)
    np.testing.assert_array_equal(dense_run(optimizer, w, grads, **options).values, theirs)
    rows = sparse_run(optimizer, w.reshape(-1, 1), grads, **options)
    np.testing.assert_array_equal(rows.reshape(-1), theirs)
    if n % 8 == 0:
        np.testing.assert_array_equal(
            sparse_run(optimizer, w.reshape(-1, 8), grads, **options).reshape(-1), theirs
        )


OTHERS: list[tuple[str, dict[str, float], Callable[[Any], torch.optim.Optimizer]]] = [
    ("adagrad", {}, lambda p: torch.optim.Adagrad(p)),
    (
        "adagrad",
        {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3, "decay": 0.1},
        lambda p: torch.optim.Adagrad(
            p, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3, weight_decay=0.1
        ),
    ),
    ("adam", {}, lambda p: torch.optim.Adam(p)),
    (
        "adam",
        {"beta1": 0.8, "beta2": 0.99, "eps": 1e-4, "decay": 0.1},
        lambda p: torch.optim.Adam(p, betas=(0.8, 0.99), eps=1e-4, weight_decay=0.1),
    ),
    ("adamw", {}, lambda p: torch.optim.AdamW(p)),
    ("lazy_adam", {"decay": 0.1}, lambda p: torch.optim.Adam(p, weight_decay=0.1)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("optimizer", "options", "theirs"), OTHERS)
def test_adaptive_optimizers_equal_torch_where_every_row_is_touched(
    optimizer: str, options: dict[str, float], theirs: Any, dtype: str
) -> None:
    w, grads = dice().standard_normal(96).astype(dtype), gradients(96, dtype)
    expected = torch_run(theirs, w, grads)
    np.testing.assert_allclose(
        dense_run(optimizer, w, grads, **options).values,
        expected,
        rtol=ORDER[dtype],
        atol=ORDER[dtype],
    )
    rows = sparse_run(optimizer, w.reshape(-1, 6), grads, **options)
    np.testing.assert_allclose(rows.reshape(-1), expected, rtol=ORDER[dtype], atol=ORDER[dtype])


def test_lazy_adam_counts_the_pushes_of_a_row_and_adam_those_of_the_table() -> None:
    g = np.ones((1, 1), np.float64)
    for optimizer, t in (("lazy_adam", 1), ("adam", 3)):
        table = SparseTable(
            Table(
                "t",
                optimizer=optimizer,
                dtype="float64",
                init="zeros",
                options={"beta1": 0.9, "beta2": 0.999},
            )
        )
        for i in (5, 5, 6):
            table.push(np.array([i]), g.copy(), 0.1)
        out = np.empty((1, 1))
        table.pull(np.array([6]), out)
        mean, square = 0.1 / (1 - 0.9**t), 0.001 / (1 - 0.999**t)
        np.testing.assert_allclose(out[0, 0], -0.1 * mean / (math.sqrt(square) + 1e-8), rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_wise_adagrad_of_rows_of_one_number_is_adagrad(dtype: str) -> None:
    w, grads = dice().standard_normal(50).astype(dtype), gradients(50, dtype)
    one, other = (
        sparse_run(optimizer, w.reshape(-1, 1), grads, decay=0.1)
        for optimizer in ("rowwise_adagrad", "adagrad")
    )
    np.testing.assert_allclose(one, other, rtol=ORDER[dtype])


def test_row_wise_adagrad_keeps_the_mean_square_of_a_row() -> None:
    w, grads = dice().standard_normal((10, 6)), gradients(60, "float64")
    n, expected = np.zeros((10, 1)), w.copy()
    for t, flat in enumerate(grads):
        g = flat.reshape(10, 6)
        n += (g * g).mean(1, keepdims=True)
        expected -= 0.05 / (t + 1) * g / (np.sqrt(n) + 1e-10)
    np.testing.assert_allclose(sparse_run("rowwise_adagrad", w, grads), expected, rtol=1e-12)
    np.testing.assert_allclose(
        dense_run("rowwise_adagrad", w.reshape(-1), grads, dim=6).values,
        expected.reshape(-1),
        rtol=1e-12,
    )


def test_ftrl_without_penalties_is_scaled_gradient_descent() -> None:
    """w -= alpha g / (beta + sqrt(sum g g)), from wherever it starts, at a constant rate."""
    w, grads = dice().standard_normal(40), gradients(40, "float64")
    expected, n = w.copy(), np.zeros(40)
    table = DenseTable(
        Table("t", length=40, dtype="float64", optimizer="ftrl", options={"lr": 0.1, "beta": 1.0}),
        0,
        40,
        w,
    )
    for g in grads:
        table.push(g.copy())
        n += g * g
        expected -= 0.1 * g / (1.0 + np.sqrt(n))
    np.testing.assert_allclose(table.values, expected, rtol=1e-12)


def test_ftrl_sets_small_weights_to_zero_and_leaves_what_has_no_gradient() -> None:
    """z = sum g - sum s w;   w = 0 where |z| <= l1, else -(z - sgn(z) l1) / ((beta + sqrt n) /
    alpha + l2)
    """
    options = {"lr": 0.1, "beta": 1.0, "l1": 1.0, "l2": 0.5}
    table = DenseTable(
        Table("t", length=3, dtype="float64", optimizer="ftrl", options=options),
        0,
        3,
        np.array([0.0, 0.0, 0.7]),
    )
    z, n, w = np.zeros(2), np.zeros(2), np.zeros(2)
    for g in (np.array([0.3, 2.0]), np.array([0.4, 1.0])):
        table.push(np.append(g, 0.0))
        z += g - (np.sqrt(n + g * g) - np.sqrt(n)) / 0.1 * w
        n += g * g
        w = np.where(np.abs(z) <= 1.0, 0.0, -(z - np.sign(z)) / ((1.0 + np.sqrt(n)) / 0.1 + 0.5))
    assert table.values[0] == 0.0
    np.testing.assert_allclose(table.values, [*w, 0.7], rtol=1e-12)


def test_sum_adds() -> None:
    w, grads = dice().standard_normal(33), gradients(33, "float64", 1)
    np.testing.assert_array_equal(dense_run("sum", w, grads).values, w + grads[0])


@pytest.mark.parametrize("optimizer", TRAINED)
def test_every_optimizer_decays_weights(optimizer: str) -> None:
    w, zero = dice().standard_normal(16) + 3, [np.zeros(16)] * 3
    plain, decayed = (dense_run(optimizer, w, zero, lr=0.1, decay=d).values for d in (0.0, 0.1))
    np.testing.assert_array_equal(plain, w)
    assert (np.abs(decayed) < np.abs(w)).all()


@pytest.mark.parametrize("optimizer", list(SERVER_OPTIMIZERS))
def test_the_rate_of_the_table_serves_where_a_push_brings_none(optimizer: str) -> None:
    w, g = dice().standard_normal(8), gradients(8, "float64", 1)[0]
    options = {"lr": 0.3} if "lr" in SERVER_OPTIMIZERS[optimizer].defaults else {}
    tables = [
        DenseTable(
            Table("t", length=8, dtype="float64", optimizer=optimizer, options=o), 0, 8, w.copy()
        )
        for o in (options, {})
    ]
    tables[0].push(g.copy())
    tables[1].push(g.copy(), 0.3)
    np.testing.assert_array_equal(tables[0].values, tables[1].values)
    assert (tables[0].values != w).all()


@pytest.mark.parametrize("optimizer", list(SERVER_OPTIMIZERS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_cutting_a_vector_into_ranges_changes_no_bit(optimizer: str, dtype: str) -> None:
    w, grads = dice().standard_normal(300).astype(dtype), gradients(300, dtype)
    whole = dense_run(optimizer, w, grads, dim=3).values
    parts = [
        dense_run(optimizer, w[cut], [g[cut] for g in grads], dim=3).values
        for cut in (slice(0, 111), slice(111, 300))
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


# -- custom optimizers --


class Sign:
    """w -= lr c sgn(g), and the number of its pushes"""

    state = {"velocity": "full", "pushes": "row"}  # noqa: RUF012

    def __init__(self, c: float = 1.0):
        self.c = c

    def update(self, w: np.ndarray, g: np.ndarray, state: dict[str, np.ndarray], lr: float) -> None:
        state["velocity"] += g
        state["pushes"] += 1
        w -= lr * self.c * np.sign(g)


class Broken(Sign):
    def update(self, w: np.ndarray, g: np.ndarray, state: dict[str, np.ndarray], lr: float) -> None:
        w += 100
        raise ZeroDivisionError("on purpose")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    module = ModuleType("my_optimizers")
    module.Sign, module.Broken, module.odd = Sign, Broken, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_optimizers", module)
    return ["my_optimizers"]


def test_an_optimizer_of_ones_own_runs_over_the_rows_of_a_push(own: list[str]) -> None:
    table = SparseTable(
        Table("t", dim=3, optimizer="my_optimizers:Sign", init="zeros", options={"c": 2.0}),
        modules=own,
    )
    ids = np.array([4, 9, 4])
    assert table.push(ids, np.array([[1, 1, 1], [-1, -1, -1], [-3, 1, 0]], np.float32), 0.5) == 2
    found, values, state, _ = table.items()
    at = np.argsort(found)
    np.testing.assert_array_equal(values[at], [[1, -1, -1], [1, 1, 1]])
    np.testing.assert_array_equal(state["velocity"][at], [[-2, 2, 1], [-1, -1, -1]])
    np.testing.assert_array_equal(state["pushes"][at], [[1], [1]])
    dense = DenseTable(
        Table("d", length=4, optimizer="my_optimizers:Sign"),
        0,
        4,
        np.zeros(4, np.float32),
        modules=own,
    )
    dense.push(np.array([1, -1, 2, 0], np.float32), 0.5)
    np.testing.assert_array_equal(dense.values, [-0.5, 0.5, -0.5, 0])


def test_an_optimizer_that_fails_leaves_the_rows_as_they_were(own: list[str]) -> None:
    table = SparseTable(Table("t", dim=2, optimizer="my_optimizers:Broken"), modules=own)
    ids, before, after = (
        np.array([1, 2]),
        np.empty((2, 2), np.float32),
        np.empty((2, 2), np.float32),
    )
    table.pull(ids, before)
    with pytest.raises(
        StoreError,
        match="table 't': optimizer 'my_optimizers:Broken' failed: ZeroDivisionError: on purpose",
    ):
        table.push(ids, np.ones((2, 2), np.float32))
    table.pull(ids, after)
    np.testing.assert_array_equal(before, after)
    dense = DenseTable(
        Table("d", length=4, optimizer="my_optimizers:Broken"),
        0,
        4,
        np.zeros(4, np.float32),
        modules=own,
    )
    with pytest.raises(StoreError, match="unchanged"):
        dense.push(np.ones(4, np.float32))
    np.testing.assert_array_equal(dense.values, np.zeros(4))


def test_what_is_not_an_optimizer_is_refused(own: list[str]) -> None:
    with pytest.raises(StoreError, match=r"optimizer 'sdg' is unknown; known: .*sgd.*module:Class"):
        resolve("sdg")
    with pytest.raises(StoreError, match="may not import the module 'os'"):
        resolve("os:system", own)
    with pytest.raises(StoreError, match="cannot be imported"):
        resolve("my_optimizers:Missing", own)
    with pytest.raises(StoreError, match="is not a server optimizer: it needs"):
        resolve("my_optimizers:odd", own)
    with pytest.raises(StoreError, match="does not take these options"):
        SparseTable(Table("t", optimizer="my_optimizers:Sign", options={"d": 1.0}), modules=own)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("sgd", {"momentum": 0.9}, "optimizer 'sgd' has no option 'momentum'; known: lr, decay"),
        ("sum", {"lr": 0.9}, "known: none"),
        ("adam", {"beta1": 1.0}, r"beta1=1 of optimizer 'adam' must be in \[0, 1\)"),
        ("adagrad", {"lr": -1.0}, "lr=-1"),
        ("adagrad", {"eps": math.nan}, "a finite number is needed"),
    ],
)
def test_options_that_cannot_be_are_refused(
    optimizer: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        SparseTable(Table("t", optimizer=optimizer, options=options))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "ftrl"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_one_number_are_worked_on_together_to_the_bits_of_one_long_row(
    optimizer: str, dtype: str
) -> None:
    w, grads = (
        dice(3).standard_normal(203).astype(dtype),
        gradients(203, dtype),
    )  # more than a block, and no multiple of it
    np.testing.assert_array_equal(
        sparse_run(optimizer, w[:, None], grads)[:, 0], dense_run(optimizer, w, grads).values
    )
