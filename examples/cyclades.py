"""Matrix factorisation without conflicts: threads share two tables and never the same row at once.

    python examples/cyclades.py        one thread
    python examples/cyclades.py 2      two threads: the same numbers, to the last bit

    p_u <- p_u - eta (e q_i + decay p_u),  q_i <- q_i - eta (e p_u + decay q_i),  e = <p_u, q_i> - r

A rating reads and writes the rows of its user and of its item. In a batch of ratings those that
share a user or an item, directly or through others, go to one thread, in the order of the batch;
then all threads wait for each other (Pan et al. 2016, Cyclades). The plan of an epoch comes from
`conflict_free`, which sees a rating as a row with two columns; only the step is written here.
"""

import sys
import time

import numba
import numpy as np

from manyhands.linear.passes.rows import Threads, threads_of
from manyhands.linear.stochastic.conflict_batches import barrier, batch_size, conflict_free

USERS, ITEMS, RATINGS, DIM, RANK = 50_000, 20_000, 1_000_000, 16, 4
ETA, DECAY, EPOCHS = 0.05, 0.01, 8


@numba.njit(nogil=True, error_model="numpy")
def steps(  # type: ignore[no-untyped-def]
    arrived, cores, mine, ends, users, items, ratings, p, q, eta
):
    """One thread's steps of an epoch; returns the sum of squared errors before them."""
    squares, k = 0.0, 0
    for e in range(len(ends)):
        while k < ends[e]:
            user, item = p[users[mine[k]]], q[items[mine[k]]]
            error = -ratings[mine[k]]
            for j in range(DIM):
                error += user[j] * item[j]
            squares += error * error
            for j in range(DIM):
                a, b = user[j], item[j]
                user[j] = a - eta * (error * b + DECAY * a)
                item[j] = b - eta * (error * a + DECAY * b)
            k += 1
        barrier(arrived, cores, e + 1)
    return squares


def known(size: int = RATINGS, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Who rates what, and how much: a truth of low rank plus noise."""
    dice = np.random.default_rng(seed)
    users, items = dice.integers(0, USERS, size), dice.integers(0, ITEMS, size)
    p, q = dice.normal(size=(USERS, RANK)), dice.normal(size=(ITEMS, RANK))
    return users, items, (p[users] * q[items]).sum(1) / 2 + 0.1 * dice.normal(size=size)


def factorise(
    users: np.ndarray,
    items: np.ndarray,
    ratings: np.ndarray,
    threads: Threads,
    epochs: int = EPOCHS,
) -> tuple[np.ndarray, np.ndarray, float]:
    """The tables, and the root of the mean squared error during the last epoch."""
    dice = np.random.default_rng(1)
    p, q = dice.normal(0.0, 0.3, (USERS, DIM)), dice.normal(0.0, 0.3, (ITEMS, DIM))
    # a rating is a row with two columns: its user, and its item behind all users
    indptr = np.arange(0, 2 * len(ratings) + 1, 2)
    columns = np.column_stack((users, USERS + items)).astype(np.int32).ravel()
    batch = batch_size(np.bincount(columns).astype(float), len(ratings))
    error = 0.0
    for epoch in range(epochs):
        order = dice.permutation(len(ratings)).astype(np.int32)
        plan = conflict_free(threads, indptr, columns, USERS + ITEMS, order, batch)
        arrived, sequence = np.zeros(16, np.int64), np.arange(plan.batches, dtype=np.int32)

        eta = ETA * 0.9**epoch

        def core(  # type: ignore[no-untyped-def]
            k: int, plan=plan, arrived=arrived, sequence=sequence, eta=eta
        ):
            if k >= plan.cores:
                return 0.0
            mine, _, ends = plan.rows_of(k, sequence)
            return steps(arrived, plan.cores, mine, ends, users, items, ratings, p, q, eta)

        error = float(np.sqrt(sum(threads.run(core)) / len(ratings)))
    return p, q, error


if __name__ == "__main__":
    count, data = int(sys.argv[1]) if len(sys.argv) > 1 else 1, known()
    with threads_of(count) as threads:
        factorise(*data, threads, epochs=1)  # compiles
        start = time.perf_counter()
        p, q, error = factorise(*data, threads)
    rate = len(data[0]) * EPOCHS / (time.perf_counter() - start) / 1e6
    print(f"{count} threads: error {error:.6f}, p[0, 0] {p[0, 0]:.17f}, {rate:.1f} million/s")
