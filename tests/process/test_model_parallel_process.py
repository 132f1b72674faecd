"""Model parallelism over real processes equals one process: `verify` by layout and model.

A few by default; all of them, and Hugging Face's models, are slow.
"""

from __future__ import annotations

import functools
import importlib.util

import pytest

from manyhands.cli.verify import compare
from manyhands.plan import words
from support.paths import zoo_task

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LAYOUTS = [
    "tensor=2",
    "tensor=4",
    *(f"pipe={p} schedule={s}" for p in (2, 4) for s in SCHEDULES),
    *(f"shard=2 zero={z}" for z in (1, 2, 3)),
    "data=2 tensor=2",
    "data=2 tensor=2 pipe=2",
]
MODELS = ("deep_mlp", "cnn", "gpt", "seq2seq")
QUICK = [
    ("gpt", "tensor=2 pipe=2"),  # with data=2 it is slow: eight processes
    ("cnn", "data=2 pipe=2 schedule=gpipe"),
    ("seq2seq", "pipe=2 schedule=zero_bubble"),
    ("mlp", "shard=2 zero=3"),
]


def made(name: str):
    return zoo_task(name)


def check(model: str, layout: str) -> None:
    plan = words.parse(f"{layout} device=cpu")
    deviation = compare(functools.partial(made, model), plan, steps=3, float32=False)
    assert deviation.equal, deviation


@pytest.mark.parametrize(("model", "layout"), QUICK)
def test_a_split_model_equals_one_process(model: str, layout: str) -> None:
    check(model, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_of_every_model_equals_one_process(model: str, layout: str) -> None:
    check(model, layout)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize(
    "layout",
    ["tensor=2", "pipe=2", "pipe=2 schedule=zero_bubble", "shard=2", "data=2 tensor=2 pipe=2"],
)
@pytest.mark.parametrize("model", ["hf_gpt2", "hf_llama"])
def test_hugging_face_models_are_split_as_they_are(model: str, layout: str) -> None:
    check(model, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "whole"),
    [
        (
            "data=2 tensor=2 merge=local_sgd merge.period=2 batch=8",
            "data=2 merge=local_sgd merge.period=2 batch=8",
        ),
        ("data=2 shard=2 merge=easgd batch=8", "data=2 merge=easgd batch=16"),
        ("data=2 pipe=2 micro=4 merge=diloco batch=8", "data=2 micro=4 merge=diloco batch=8"),
    ],
)
def test_replicas_that_are_split_do_under_any_strategy_what_whole_ones_do(
    split: str, whole: str
) -> None:
    assert compare_runs(split) == pytest.approx(compare_runs(whole), rel=1e-6)


def compare_runs(line: str) -> float:
    import tempfile

    import manyhands as mh

    with tempfile.TemporaryDirectory() as folder:
        found = mh.train(
            functools.partial(made, "mlp"),
            f"{line} steps=6 save=off device=cpu",
            directory=f"{folder}/run",
            quiet=True,
        )
    return found.metrics["loss"]
