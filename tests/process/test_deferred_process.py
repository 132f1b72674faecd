"""Ranks that make only what they keep start from the weights of one process."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.cli.verify.comparison import compare
from manyhands.entry import start, work
from manyhands.plan import words as plan_words

SAID = "every rank makes the whole model"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.table.weight
        self.places = nn.Parameter(torch.randn(6, 16) * 0.02)
        nn.init.orthogonal_(self.body.layers[1].linear1.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.table(x) + self.places))
        return out


class WritesAnArray(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.places.detach().numpy()[0] = 1.0


def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())


def task(model: type[nn.Module]) -> mh.Task:
    x = torch.randint(0, 24, (32, 6), generator=torch.Generator().manual_seed(1))
    return mh.Task(
        model=model,
        loss=loss,
        train=(x, x.flip(0)),
        batch=8,
        steps=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )


@pytest.mark.parametrize(
    "words",
    [
        "shard=2 zero=3 link=gloo",
        pytest.param("shard=2 zero=3", marks=pytest.mark.slow),
        pytest.param("shard=2 zero=2", marks=pytest.mark.slow),
        pytest.param("shard=2 zero=1", marks=pytest.mark.slow),
        pytest.param("tensor=2", marks=pytest.mark.slow),
        pytest.param("pipe=2", marks=pytest.mark.slow),
        pytest.param("pipe=2 cut=graph", marks=pytest.mark.slow),
        pytest.param("data=2 shard=2 zero=3", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_made_in_slices_trains_as_on_one_process(words: str) -> None:
    plan = plan_words.parse(words)
    deviation = compare(functools.partial(task, Tied), plan, 2, False)
    assert deviation.equal, deviation


@pytest.mark.slow
@pytest.mark.parametrize(("model", "whole"), [(Tied, False), (WritesAnArray, True)])
def test_a_notice_says_where_every_rank_makes_the_whole_model(
    model: type[nn.Module], whole: bool, tmp_path: Path
) -> None:
    options = Options(directory=str(tmp_path / "run"), quiet=True)
    body = functools.partial(work, functools.partial(task, model))
    start(body, "shard=2 zero=3 save=off", options)
    events = (tmp_path / "run" / "events" / "rank-0.jsonl").read_text().splitlines()
    notices = [str(e.get("value")) for e in map(json.loads, events) if e["name"] == "notice"]
    assert any(SAID in n for n in notices) == whole, notices
