"""Comparison of results: the same bits, or the same numbers up to the order of summation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from support.quadratic import Outcome

# -- the same bits --


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        *(x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    )


def same_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def same_typed_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """The same names, values, dtypes and shapes."""
    return same_tensors(a, b) and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a
    )


def assert_same_steps(
    one: Sequence[Mapping[str, Tensor]], other: Sequence[Mapping[str, Tensor]]
) -> None:
    """Two runs of as many steps have the same tensors after every one of them."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), key


def identical_on_ranks(results: list[list[Tensor]]) -> list[Tensor]:
    """What every rank has; fails where two ranks differ in a bit."""
    for theirs in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], theirs, strict=True))
    return results[0]


def same_outcome(a: Outcome, b: Outcome) -> bool:
    """Parameters, consensus, the state of strategy and optimizer, and what servers hold."""
    tensors = [
        (a.state, b.state),
        (a.saved["params"], b.saved["params"]),
        (a.saved["optimizer"][0], b.saved["optimizer"][0]),
    ]
    tensors += [(a.tables[k], b.tables[k]) for k in a.tables]
    alike = all(same_tensors(x, y) for x, y in tensors)
    return alike and torch.equal(a.x, b.x) and torch.equal(a.consensus, b.consensus)


def same_outcomes(a: list[Outcome], b: list[Outcome]) -> bool:
    """Parameters and consensus of every rank."""
    return all(
        torch.equal(x.consensus, y.consensus) and torch.equal(x.x, y.x)
        for x, y in zip(a, b, strict=True)
    )


def all_ranks_agree(outcomes: list[Outcome]) -> bool:
    return all(torch.equal(o.x, outcomes[0].x) for o in outcomes)


# -- the same numbers up to the order of summation --


def assert_close(a: Tensor, b: Tensor, rtol: float = 1e-12, atol: float | None = None) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol if atol is None else atol)


def assert_tensors_close(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    rtol: float = 1e-12,
    atol: float | None = None,
) -> None:
    """The same names, and each tensor close; without `atol`: to its largest element."""
    assert a.keys() == b.keys()
    for k in a:
        slack = rtol * float(b[k].abs().max()) if atol is None else atol
        torch.testing.assert_close(
            a[k], b[k], rtol=rtol, atol=slack, msg=lambda m, k=k: f"{k}: {m}"
        )


def assert_gradients_close(
    ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], rtol: float = 1e-12
) -> None:
    """Close in the norm of each gradient; where one side has none, neither has the other."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        got = ours[name]
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            wrong = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
            assert wrong <= rtol or float(expected.norm()) < 1e-15, f"{name} is {wrong:.1e} off"


def assert_outcomes_close(a: list[Outcome], b: list[Outcome]) -> None:
    """The consensus of every rank."""
    for mine, theirs in zip(a, b, strict=True):
        assert_close(mine.consensus, theirs.consensus)
