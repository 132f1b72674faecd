"""FTRL-proximal: a stream of batches, each of which updates only the columns that it holds.

    g = sum over a batch of c phi'(z_i) x_i;   sigma_j = (sqrt(n_j + g_j^2) - sqrt(n_j)) / alpha
    z_j <- z_j + g_j - sigma_j w_j;   n_j <- n_j + g_j^2
    w_j = 0 where |z_j| <= l1, else -(z_j - sgn(z_j) l1) / ((beta + sqrt(n_j)) / alpha + l2)

z and n are of a column, so a rare column keeps a large step. The intercept is a column without
penalties. Over ranks w, z and n are rows of a table on parameter servers, whose optimizer is this
update: a rank pulls the columns of a batch, pushes their gradients, and waits for no other. At the
end of a pass all ranks pull the same w.

A fit of E passes is a stream of E times the data, so the penalties count E times: the whole stream
minimises the objective of the estimator. Early passes weigh the penalties more than late ones.

Paper: McMahan et al. 2013 (KDD), algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from manyhands.core import Rows as TableRows
from manyhands.core import Table, TableStore
from manyhands.kernels.compile import compiled, inlined
from manyhands.linear.losses import slope
from manyhands.linear.passes.rows import Array, Rows
from manyhands.linear.problem import Problem

State = dict[str, Array]
SERVED_BATCH = 256  # rows between two requests, where tables are on servers
PULLED = 1 << 18  # columns in one request, when all are pulled
W, B = "linear/w", "linear/b"  # the tables
INTERCEPT = torch.zeros(1, dtype=torch.int64)  # the only row of B


@inlined
def _update(w, z, n, j, g, alpha, beta, l1, l2):
    """The update of one column: the server optimizer ftrl."""
    if n[j] == 0.0:  # the z that gives the first w, whatever that is
        z[j] = -(w[j] * (beta / alpha + l2) + (l1 if w[j] > 0.0 else -l1 if w[j] < 0.0 else 0.0))
    old = math.sqrt(n[j])
    n[j] += g * g
    new = math.sqrt(n[j])
    z[j] += g - (new - old) / alpha * w[j]
    shrunk = z[j] - l1 if z[j] > l1 else z[j] + l1 if z[j] < -l1 else 0.0
    if n[j] > 0.0:
        w[j] = -shrunk / ((beta + new) / alpha + l2)


@compiled
def _stream(
    indptr, indices, values, order, batch, y, c, loss, eps, w, z, n, bias, place, touched, sums,
    numbers,
):  # fmt: skip
    """The updates of all batches of rows `order`. bias is w, z and n of the intercept."""
    alpha, beta, l1, l2, l2_b, has_bias = numbers
    for start in range(0, len(order), batch):
        count, sum_b = 0, 0.0
        for p in range(start, min(start + batch, len(order))):
            i = order[p]
            if c[i] == 0.0:
                continue
            at = bias[0]
            for k in range(indptr[i], indptr[i + 1]):
                at += values[k] * w[indices[k]]
            r = c[i] * slope(loss, at, y[i], eps)
            sum_b += r
            for k in range(indptr[i], indptr[i + 1]):
                j = indices[k]
                if place[j] < 0:
                    place[j] = count
                    touched[count] = j
                    sums[count] = 0.0
                    count += 1
                sums[place[j]] += r * values[k]
        for t in range(count):
            _update(w, z, n, touched[t], sums[t], alpha, beta, l1, l2)
            place[touched[t]] = -1
        if has_bias != 0.0:
            _update(bias[0:1], bias[1:2], bias[2:3], 0, sum_b, alpha, beta, 0.0, l2_b)


@compiled
def _distinct(indptr, indices, order, lo, hi, c, place, ids):
    """The columns of rows order[lo:hi], each once; `place` says where in `ids` a column is."""
    count = 0
    for p in range(lo, hi):
        i = order[p]
        if c[i] == 0.0:
            continue
        for k in range(indptr[i], indptr[i + 1]):
            j = indices[k]
            if place[j] < 0:
                place[j] = count
                ids[count] = j
                count += 1
    return count


@compiled
def _gradient(indptr, indices, values, order, lo, hi, y, c, loss, eps, place, w, b, out):
    """out += sum of c phi'(z) x over a batch, in the order of `ids`; returns the sum of c phi'."""
    total = 0.0
    for p in range(lo, hi):
        i = order[p]
        if c[i] == 0.0:
            continue
        at = b
        for k in range(indptr[i], indptr[i + 1]):
            at += values[k] * w[place[indices[k]]]
        r = c[i] * slope(loss, at, y[i], eps)
        total += r
        for k in range(indptr[i], indptr[i + 1]):
            out[place[indices[k]]] += r * values[k]
    return total


@dataclass(frozen=True)
class FTRL:
    """`alpha`, `beta`: of the learning rate of a column, alpha / (beta + sqrt(n)). `batch`: rows
    behind one update; None: 1 in one process, 256 with servers. `passes`: of the stream; None: as
    many as the estimator's max_iter."""

    alpha: float = 0.1
    beta: float = 1.0
    batch: int | None = None
    passes: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < math.inf or not 0.0 <= self.beta < math.inf:
            raise ValueError(
                f"alpha={self.alpha}, beta={self.beta}: alpha above 0 and beta of 0 or more are "
                "needed"
            )
        for name in ("batch", "passes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: 1 or more is needed")

    def prepared(self, max_iter: int) -> FTRL:
        """With the number of passes, by which the penalties are scaled."""
        return self if self.passes is not None else replace(self, passes=max_iter)

    def init(self, problem: Problem, theta: Array) -> State:
        if problem.threads.count > 1:
            raise ValueError(
                f"{problem.threads.count} threads have no effect on solver ftrl, which goes "
                "through its rows in turn; use ranks: plan='data=2 servers=1'"
            )
        state: State = {"round": np.zeros(1)}
        if store_of(problem) is not None:
            self.open_tables(problem, theta, state)
            return state
        d = problem.columns
        state |= {"z": np.zeros(d), "n": np.zeros(d), "bias": np.zeros(3)}
        if problem.intercept:
            state["bias"][0] = theta[d]
        return state

    def round(self, problem: Problem, theta: Array, state: State) -> float:
        """One pass over the rows. How far from the minimum it ends, only a certificate tells."""
        state["round"] += 1
        store, d = store_of(problem), problem.columns
        place = np.full(d, -1, dtype=np.int32)
        for rows, at in problem.blocks():
            if store is None:
                self._pass_here(problem, rows, at, theta, state, place)
            else:
                self._pass_over(store, problem, rows, at, state, place)
        if store is not None:
            self._pull_all(store, problem, theta)
        elif problem.intercept:
            theta[d] = state["bias"][0]
        # where n overflows, w is zero
        if not (np.isfinite(theta).all() and np.isfinite(state.get("n", theta)).all()):
            raise ValueError(
                "Floating-point under-/overflow occurred in solver ftrl: scale the columns, or "
                f"give a smaller alpha (it is {self.alpha:g})"
            )
        return math.inf

    def _order(self, problem: Problem, rows: Rows, state: State) -> Array:
        if not self.shuffle:
            return np.arange(rows.count, dtype=np.int32)
        seed = (problem.seed, int(state["round"][0]), rows.start, problem.group.rank)
        return np.random.default_rng(seed).permutation(rows.count).astype(np.int32)

    def _penalties(self, problem: Problem) -> tuple[float, float, float]:
        """l1, l2 and l2 of the intercept, of the whole stream."""
        passes = float(self.passes or 1)
        return passes * problem.l1, passes * problem.l2, passes * problem.l2_intercept

    def _pass_here(
        self, problem: Problem, rows: Rows, at: slice, theta: Array, state: State, place: Array
    ) -> None:
        l1, l2, l2_b = self._penalties(problem)
        most = min(problem.columns, max(rows.nonzeros, 1))
        numbers = (self.alpha, self.beta, l1, l2, l2_b, float(problem.intercept))
        _stream(
            *rows.csr, self._order(problem, rows, state), self.batch or 1, problem.y[at],
            problem.c[at], problem.loss, problem.eps, theta[: problem.columns], state["z"],
            state["n"], state["bias"], place, np.empty(most, np.int32), np.empty(most), numbers,
        )  # fmt: skip

    # -- tables --

    def open_tables(self, problem: Problem, theta: Array, state: State) -> None:
        """Make the tables; rank 0 gives them the coefficients, or what `captured` had."""
        store = store_of(problem)
        assert store is not None
        l1, l2, l2_b = self._penalties(problem)
        rates = {"lr": self.alpha, "beta": self.beta}
        common: dict[str, Any] = {"dtype": "float64", "optimizer": "ftrl", "init": "zeros"}
        store.create(Table(W, options={**rates, "l1": l1, "l2": l2}, **common))
        store.create(Table(B, options={**rates, "l1": 0.0, "l2": l2_b}, **common))
        if problem.group.rank == 0:
            self._fill(store, problem, theta, state)
        store.flush()
        problem.group.barrier()

    def _fill(self, store: TableStore, problem: Problem, theta: Array, state: State) -> None:
        for name in (W, B):
            saved = {
                key.removeprefix(f"{name}:"): torch.from_numpy(value)
                for key, value in state.items()
                if key.startswith(f"{name}:")
            }
            if saved:
                store.restore(name, saved)
                for key in saved:
                    del state[f"{name}:{key}"]
        if theta.any() and state["round"][0] == 0:
            used = np.flatnonzero(theta[: problem.columns])
            _restore_values(store, W, used, theta[used])
            if problem.intercept:
                _restore_values(store, B, np.zeros(1, np.int64), theta[-1:])

    def captured(self, problem: Problem, state: State) -> State:
        """The state with what the tables hold, for a checkpoint."""
        store = store_of(problem)
        if store is None or problem.group.rank:
            return state
        tables = {
            f"{name}:{key}": value.numpy()
            for name in (W, B)
            for key, value in store.dump(name).items()
        }
        return {**state, **tables}

    def _pass_over(
        self, store: TableStore, problem: Problem, rows: Rows, at: slice, state: State, place: Array
    ) -> None:
        """Pull, compute, push, batch by batch; a push and the next pull are one request."""
        order, batch = self._order(problem, rows, state), self.batch or SERVED_BATCH
        y, c, bias = problem.y[at], problem.c[at], problem.intercept
        model = (problem.loss, problem.eps, place)
        ids = _columns_of(rows, order, 0, batch, c, place)
        reply = store.pull_async(_wanted(ids, bias))
        for lo in range(0, rows.count, batch):
            hi = min(lo + batch, rows.count)
            found = reply.result()
            w, b = found[W].numpy().reshape(-1), float(found[B][0, 0]) if bias else 0.0
            g = np.zeros(len(ids))
            sum_b = _gradient(*rows.csr, order, lo, hi, y, c, *model, w, b, g)
            place[ids] = -1
            pushed, updates = _wanted(ids, bias), {W: torch.from_numpy(g)[:, None]}
            if bias:
                updates[B] = torch.full((1, 1), sum_b, dtype=torch.float64)
            if hi == rows.count:
                store.push(pushed, updates).wait()
                return
            ids = _columns_of(rows, order, hi, hi + batch, c, place)
            reply = store.exchange(pushed, updates, wants=_wanted(ids, bias))

    def _pull_all(self, store: TableStore, problem: Problem, theta: Array) -> None:
        """w of all columns as all ranks have left it."""
        store.flush()
        problem.group.barrier()
        d = problem.columns
        for lo in range(0, d, PULLED):
            ids = torch.arange(lo, min(lo + PULLED, d))
            theta[lo : lo + len(ids)] = store.pull({W: ids})[W].numpy().reshape(-1)
        if problem.intercept:
            theta[d] = float(store.pull({B: INTERCEPT})[B][0, 0])
        problem.group.barrier()  # nobody pushes before all have pulled


def store_of(problem: Problem) -> TableStore | None:
    """The tables of a fit over servers; None: w, z and n are arrays of this process."""
    return getattr(problem, "store", None)


def _columns_of(rows: Rows, order: Array, lo: int, hi: int, c: Array, place: Array) -> Array:
    """The columns of rows order[lo:hi] that count, each once."""
    hi = min(hi, rows.count)
    held = rows.indptr[order[lo:hi] + 1] - rows.indptr[order[lo:hi]]
    ids = np.empty(min(int(held.sum()), len(place)), np.int64)
    return ids[: _distinct(rows.indptr, rows.indices, order, lo, hi, c, place, ids)]


def _wanted(ids: Array, intercept: bool) -> TableRows:
    rows: TableRows = {W: torch.from_numpy(ids)}
    return {**rows, B: INTERCEPT} if intercept else rows


def _restore_values(store: TableStore, name: str, ids: Array, values: Array) -> None:
    zeros = torch.zeros(len(ids), 1, dtype=torch.float64)
    content = {"ids": torch.from_numpy(ids.astype(np.int64)), "state/z": zeros}
    content |= {"values": torch.from_numpy(values)[:, None], "state/n": zeros.clone()}
    store.restore(name, content)
