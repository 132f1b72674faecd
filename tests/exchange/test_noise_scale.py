"""Gradient noise scale: unbiased on gradients whose noise is known.

It is zero without noise, and does not depend on how gradients are cut into buckets.
"""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.core import Group
from manyhands.exchange.inproc import World
from manyhands.exchange.noise_scale import NoiseGauge

DIM, SIGMA = 400, 3.0
MEAN = torch.linspace(-1, 1, DIM, dtype=torch.float64)


def measure(shares: list[int], rounds: int, sigma: float = SIGMA, every: int = 1) -> list[float]:
    """Gradients of `shares` samples a rank, each sample MEAN plus noise of `sigma`, sent in two
    buckets with their count.
    """

    def main(group: Group) -> list[float]:
        now = [0]
        gauge = NoiseGauge(group, ["a", "b"], lambda: now[0], torch.device("cpu"), every)
        generator = torch.Generator().manual_seed(group.rank)
        n, read = shares[group.rank], []
        for now[0] in range(1, rounds + 1):
            noise = (
                torch.randn(DIM, generator=generator, dtype=torch.float64) * sigma * math.sqrt(n)
            )
            total = (n * MEAN + noise) / 7  # a sum over samples, by a factor that nobody knows
            total = total if n else torch.zeros(DIM, dtype=torch.float64)
            works = [
                gauge.all_reduce({"a": total[:100].clone()}),
                gauge.all_reduce({"b": total[100:].clone()}),
            ]
            works.append(gauge.all_reduce({"count": torch.tensor([float(n), 1.0])}))
            for work in works:
                work.wait()
            sums = gauge.take()
            group.all_reduce({"sums": sums}).wait()
            read.append(gauge.read(sums.tolist()))
        return read

    found = World(len(shares)).run(main)
    assert len({repr(f) for f in found}) == 1, "all ranks read the same"
    return found[0]


TRUE = SIGMA**2 * DIM / float(MEAN.square().sum())


@pytest.mark.parametrize("shares", [[8, 8], [16, 16, 16, 16], [20, 5, 1], [12, 0, 12]])
def test_it_is_trace_over_square_however_the_batch_is_shared_out(shares: list[int]) -> None:
    assert measure(shares, 400)[-1] == pytest.approx(TRUE, rel=0.15)


def test_equal_gradients_have_no_noise() -> None:
    assert measure([4, 4, 4], 3, sigma=0.0)[-1] == pytest.approx(0.0, abs=1e-9)


def test_one_rank_with_samples_says_nothing() -> None:
    assert math.isnan(measure([8, 0], 5)[-1])


def test_it_looks_only_at_rounds_that_are_due() -> None:
    read = measure([8, 8], 7, every=4)
    assert all(math.isnan(r) for r in read[:3]) and read[3] == read[6], "one of four"
