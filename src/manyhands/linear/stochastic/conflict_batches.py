"""Conflict-free batches: the rows of a batch, dealt to cores so that no two cores share a column.

    rows conflict where they share a column; a component is a set of rows joined by conflicts
    components, largest first, go to the core with the fewest non-zeros so far
    batch = (1 - eps) n / Delta,   Delta = sum_j n_j (n_j - 1) / n: conflicts of a row, on average

In so small a batch components have O(log n / eps^2) rows with high probability (Pan et al. 2016,
arXiv:1605.09721). They are found by union-find over the rows: `last` says which row of the batch
had a column last. A column is looked up by its low bits; columns that share them count as one,
which can only join components.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyhands.kernels.atomics import atomic_add, wait_for
from manyhands.kernels.compile import U32, U64, compiled
from manyhands.kernels.instructions import prefetch
from manyhands.linear.passes.rows import Array, Rows, Threads
from manyhands.linear.problem import Problem
from manyhands.linear.stochastic.sgd_steps import AHEAD, shuffle, thread_seed, uncounted

EPS = 0.1
MOST_ROWS = 1024  # of a batch: more would not make barriers cheaper
LEAST_ROWS = 8  # of a batch: below, a barrier costs more than cores save
LEAST_BATCHES = 16  # of an epoch
SLOTS = 1 << 18  # of `last`, at most: it stays in the second-level cache


@dataclass(frozen=True)
class ConflictFree:
    """A plan: batch b holds order[b * batch : (b + 1) * batch].

    Core k visits those at positions[cuts[b, k] : cuts[b, k + 1]] of `order`, which ascend: the
    order within a component is that of the sample.
    """

    order: Array
    positions: Array
    cuts: Array
    batch: int

    @property
    def cores(self) -> int:
        return self.cuts.shape[1] - 1

    @property
    def batches(self) -> int:
        return len(self.cuts)

    def sizes(self, sequence: Array) -> Array:
        """Rows of the batches in that order."""
        return np.minimum(self.batch, len(self.order) - sequence.astype(np.int64) * self.batch)

    def rows_of(self, core: int, sequence: Array) -> tuple[Array, Array, Array]:
        """The rows of a core in the order in which it visits them, their places in their batches,
        and how many it has visited at the end of each batch."""
        count = int((self.cuts[:, core + 1] - self.cuts[:, core]).sum())
        rows, slots = np.empty(count, np.int32), np.empty(count, np.int32)
        ends = np.empty(self.batches, np.int64)
        _own_rows(
            core, self.order, self.positions, self.cuts, self.batch, sequence, rows, slots, ends
        )
        return rows, slots, ends


def batch_size(counts: Array, rows: float) -> int:
    """The rows of a batch, from the numbers of rows with each column."""
    conflicts = float((counts * np.maximum(counts - 1.0, 0.0)).sum()) / max(rows, 1.0)
    most = min(MOST_ROWS, max(int(rows) // LEAST_BATCHES, 1))
    return int(min((1.0 - EPS) * rows / max(conflicts, 1e-300), most)) or 1


def conflict_free(
    threads: Threads, indptr: Array, indices: Array, columns: int, order: Array, batch: int
) -> ConflictFree:
    """Plan all batches of `order`; small batches, which would not split, go to one core."""
    rows, cores = len(order), threads.count if batch >= LEAST_ROWS else 1
    batches = -(-rows // batch)
    edges = np.minimum(np.arange(batches + 1) * batch, rows)
    if cores == 1:
        positions = np.arange(rows, dtype=np.int32)
        return ConflictFree(order, positions, np.stack([edges[:-1], edges[1:]], axis=1), batch)
    positions, cuts = np.empty(rows, np.int32), np.empty((batches, cores + 1), np.int64)
    slots = min(1 << int(columns - 1).bit_length(), SLOTS)

    def part(thread: int) -> None:
        first, end = batches * thread // cores, batches * (thread + 1) // cores
        last = np.zeros(slots, np.uint32)
        _plan(indptr, indices, order, first, end, batch, last, U64(slots - 1), positions, cuts)

    threads.run(part)
    return ConflictFree(order, positions, cuts, batch)


def planned(
    problem: Problem, rows: Rows, state: dict[str, Array], keep: int, shuffled: bool
) -> tuple[ConflictFree, Array]:
    """The plan of a block of rows and the order of its batches in this epoch.

    state["round"] counts epochs from 1. Which rows form a batch is drawn anew every `keep` epochs;
    in between the plan in `state` is used again, and only the batches change their order.
    """
    epoch, batch, start = int(state["round"][0]), int(state["batch"][0]), rows.start
    draw = (epoch - 1) // keep
    plan = _kept(state, start, draw, batch, problem.threads.count)
    if plan is None:
        order = np.arange(rows.count, dtype=np.int32)
        if shuffled:
            shuffle(order, 0, rows.count, thread_seed(problem, draw, start, 0))
        csr, columns = (rows.indptr, rows.indices), rows.columns
        plan = conflict_free(problem.threads, *csr, columns, order, batch)
        kept = {"draw": np.array([draw]), "order": order}
        kept |= {"positions": plan.positions, "cuts": plan.cuts}
        state.update({f"{name}/{start}": array for name, array in kept.items()})
    sequence = np.arange(plan.batches, dtype=np.int32)
    if shuffled:
        shuffle(sequence, 0, plan.batches, thread_seed(problem, epoch, start, 1))
    return plan, sequence


def _kept(
    state: dict[str, Array], start: int, draw: int, batch: int, threads: int
) -> ConflictFree | None:
    """The plan of the last epoch, if it is still good. After a resume the state may have floats,
    and the run fewer threads: the plan is then made again."""
    if f"draw/{start}" not in state or state[f"draw/{start}"][0] != draw:
        return None
    order, positions, cuts = (state[f"{name}/{start}"] for name in ("order", "positions", "cuts"))
    if order.dtype != np.int32 or cuts.shape[1] - 1 > threads:
        return None
    return ConflictFree(order, positions, cuts, batch)


@compiled
def _own_rows(core, order, positions, cuts, batch, sequence, rows, slots, ends):
    count = 0
    for e in range(len(sequence)):
        if e + 2 * AHEAD < len(sequence):
            b = np.int64(sequence[e + 2 * AHEAD])
            prefetch(cuts, b * cuts.shape[1], 0)
            for line in range(0, min(batch, 64), 16):
                prefetch(positions, b * batch + line, 0)
                prefetch(order, b * batch + line, 0)
        b = np.int64(sequence[e])
        for q in range(cuts[b, core], cuts[b, core + 1]):
            rows[count] = order[positions[q]]
            slots[count] = positions[q] - b * batch
            count += 1
        ends[e] = count


@uncounted
def barrier(arrived, cores, batches):
    """Wait until all cores have done so many batches; arrived[0] counts what all have done."""
    if cores > 1:
        atomic_add(arrived, 0, 1)
        wait_for(arrived, 0, cores * batches)


@uncounted
def _root(parent, i):
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@uncounted
def _join(indptr, indices, i, me, now, last, mask, parent):
    """Row `me` of the batch joins the components of the rows that it shares a column with."""
    parent[me] = me
    root = me
    for k in range(U64(indptr[i]), U64(indptr[i + 1])):
        j = U64(indices[k]) & mask
        age = now - last[j]
        last[j] = now
        if age <= U32(me):  # the last row with this column is in this batch
            other = _root(parent, me - np.int64(age))
            if other < root:
                parent[root] = other
                root = other
            elif root < other:
                parent[other] = root


@uncounted
def _deal(rows, parent, weight, cuts, size, first, sorted_, core, load):
    """The core of each component, by its root; `weight` and `size` are those of components."""
    for s in range(rows + 1):
        first[s] = 0
    components = 0
    for p in range(rows):
        if parent[p] == p:
            first[size[p]] += 1
            components += 1
    before = 0
    for s in range(rows, 0, -1):
        before, first[s] = before + first[s], before
    for p in range(rows):
        if parent[p] == p:
            sorted_[first[size[p]]] = p
            first[size[p]] += 1
    for k in range(len(load)):
        load[k] = 0
        cuts[k + 1] = 0
    for q in range(components):
        p, best = sorted_[q], 0
        for k in range(1, len(load)):
            if load[k] < load[best]:
                best = k
        core[p] = best
        load[best] += weight[p]
        cuts[best + 1] += size[p]


@compiled
def _plan(indptr, indices, order, first_batch, end_batch, batch, last, mask, positions, cuts):
    """Plan batches first_batch ... end_batch - 1."""
    cores = cuts.shape[1] - 1
    parent, core = np.empty(batch, np.int32), np.empty(batch, np.int32)
    sorted_ = np.empty(batch, np.int32)
    size, first = np.empty(batch, np.int64), np.empty(batch + 1, np.int64)
    weight, load = np.empty(batch, np.int64), np.empty(cores, np.int64)
    at = np.empty(cores, np.int64)
    now = U32(0)
    end = min(end_batch * batch, len(order))
    for b in range(first_batch, end_batch):
        base = b * batch
        rows = min(batch, end - base)
        for me in range(rows):
            if base + me + 2 * AHEAD < end:
                prefetch(indptr, np.int64(order[base + me + 2 * AHEAD]), 0)
            if base + me + AHEAD < end:
                start = indptr[order[base + me + AHEAD]]
                for line in range(0, 128, 16):
                    prefetch(indices, start + line, 0)
            now += U32(1)
            _join(indptr, indices, order[base + me], me, now, last, mask, parent)
        for p in range(rows):
            size[p], weight[p] = 0, 0
        for p in range(rows):
            parent[p] = _root(parent, p)
            i = order[base + p]
            size[parent[p]] += 1
            weight[parent[p]] += indptr[i + 1] - indptr[i] + 1
        _deal(rows, parent, weight, cuts[b], size, first, sorted_, core, load)
        cuts[b, 0] = base
        for k in range(cores):
            at[k] = cuts[b, k]
            cuts[b, k + 1] += cuts[b, k]
        for p in range(rows):
            k = core[parent[p]]
            positions[at[k]] = base + p
            at[k] += 1
