"""Public models over real processes: each pair of model and layout is equal, or refused with a
reason; see docs/zoo.md."""

from __future__ import annotations

import pytest
from torch import nn

from manyhands.errors import LaunchError, PlanError
from support.zoo import markdown
from support.zoo.matrix import EQUAL, LAYOUTS, RAW, REFUSED, Outcome, judged, outcome
from support.zoo.public_models import MODELS, installed


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_public_model_equals_one_process_or_is_refused_with_a_reason(
    model: str, layout: str
) -> None:
    if not installed(model):
        pytest.skip(f"{MODELS[model][0]} is not installed")
    found = outcome(model, layout)
    assert found.good, f"{found.kind} {found.deviation}: {found.text}"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PlanError("0.weight has 3 rows, which tensor=2 cannot split; set tensor=3"), REFUSED),
        (LaunchError("rank 1 failed:\nTaskError: Linear is too small; use another"), REFUSED),
        (PlanError("0.weight has 3 rows"), RAW),
        (PlanError("3 rows cannot be split; set tensor=3"), RAW),
        (LaunchError("rank 1 failed:\nPeerLost: Linear lost rank 0; set timeout_s=60"), RAW),
        (LaunchError('rank 1 failed:\nTraceback:\n  File "a.py"\nRuntimeError: Linear'), RAW),
        (RuntimeError("Linear: set it"), RAW),
    ],
)
def test_a_refusal_names_a_part_of_the_model_and_a_remedy(error: Exception, kind: str) -> None:
    assert judged(nn.Sequential(nn.Linear(3, 3)), error)[0] == kind


def test_the_page_has_a_cell_for_every_pair_and_the_reasons_once() -> None:
    model = next(iter(MODELS))
    found = [Outcome(model, w, REFUSED, text="a | b;\nset c") for w in LAYOUTS[1:]]
    found.append(Outcome(model, LAYOUTS[0], EQUAL, 1e-15, 1e-12))
    page = markdown.page(found, {"torch": "2.13.0"})
    assert f"| {model} | 1e-15 |{' *refused* |' * (len(LAYOUTS) - 1)}" in page
    assert page.count("a \\| b; set c") == 1
    assert f"{len(LAYOUTS)} pairs: 1 EQUAL, {len(LAYOUTS) - 1} refused" in page
    assert "torch 2.13.0." in page
