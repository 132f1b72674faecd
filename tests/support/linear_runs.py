"""Linear problems in this process: on one rank, or on the ranks of a World."""

import numpy as np
import scipy.sparse as sparse

from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.linear.fit_data import FitData
from manyhands.linear.losses import LOGISTIC, SQUARED
from manyhands.linear.minimise import Stopping, minimise, start_at
from manyhands.linear.passes.rows import Rows, Threads
from manyhands.linear.solvers.newton import Newton
from manyhands.linear.spec import FitSpec


def rows_and_labels(n=120, d=20, loss=LOGISTIC, density=0.4, seed=0):
    """Sparse rows, with labels -1 and +1, or real numbers for squared loss."""
    random = np.random.default_rng(seed)
    x = sparse.random(n, d, density, "csr", random_state=seed, data_rvs=random.standard_normal)
    z = x @ random.normal(size=d) + 0.3 * random.normal(size=n) + 0.2
    y = z if loss == SQUARED else np.where(z > 0, 1.0, -1.0)
    return x, y


def spec_of(loss=LOGISTIC, l1=0.0, l2=1.0, intercept=True, **more):
    return FitSpec(loss, l1, l2, intercept, None, Stopping(), **more)


def problem_of(spec, x, y, c=None, group=None, by_column=False, threads=1):
    """What one rank sees of the problem; alone without a group."""
    data = FitData(Rows.from_csr(x.tocsr()), y, np.ones(len(y)) if c is None else c)
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    return spec.problem(*data.part(rank, size, by_column), Threads(threads), group, by_column)


def solve(spec, x, y, solver, stopping, by_column=False, **more):
    problem = problem_of(spec, x, y, by_column=by_column, **more)
    return minimise(problem, solver, start_at(problem, None), stopping)


def solve_on_ranks(ranks, spec, x, y, solver, stopping, by_column=False):
    """The solutions of all ranks of a World."""

    def rank(group):
        observed = ObservedGroup(group, lambda event: None)
        problem = problem_of(spec, x, y, group=observed, by_column=by_column)
        return minimise(problem, solver, start_at(problem, None), stopping)

    return World(ranks).run(rank)


def lowest(spec, x, y):
    """P* of a smooth problem, to rounding."""
    return solve(spec, x, y, Newton(), Stopping(1e-15, 200)).certificate.objective
