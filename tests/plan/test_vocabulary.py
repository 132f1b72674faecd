"""The vocabulary of plans is that of the real strategies, codecs, algorithms and splits; words of
other trainers lead to ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from manyhands.errors import PlanError
from manyhands.exchange import algorithms, compression
from manyhands.merge import STRATEGIES
from manyhands.observe.loggers.registry import LOGGERS
from manyhands.plan import foreign_words, reading, vocabulary, words
from manyhands.split.data import SPLITS


def options(table: Mapping[str, Any]) -> dict[str, str]:
    return {k: " ".join(f.name for f in dataclasses.fields(v)) for k, v in table.items()}


def test_the_table_of_words_is_that_of_the_real_ones() -> None:
    assert options(STRATEGIES) == vocabulary.STRATEGIES
    assert options(compression.CODECS) == vocabulary.CODECS
    assert {
        "split": ("auto", *SPLITS),
        "algorithm": ("native", *algorithms.NAMES),
    } == vocabulary.NAMES
    assert tuple(LOGGERS) == vocabulary.LOGGERS
    real = {key: (options(table), default) for key, (table, default) in words.TABLES.items()}
    assert real == vocabulary.TABLES


@pytest.mark.parametrize(
    "line",
    [
        "data=4 merge=local_sgd merge.period=8 then=all_reduce at=epoch:3",
        "data=2 staleness=4 servers=1",
        "data=2 quorum=1 servers=1",
        "log=csv+wandb",
        "data=2 compress=topk compress.density=0.1",
        "data=2 compress=none split=ordered algorithm=ring",
        "data=2 tensor=2 until=accuracy:0.9 best=-loss compile=true",
    ],
)
def test_words_that_a_plan_takes_pass_the_first_look(line: str) -> None:
    reading.check(line)
    words.parse(line)


@pytest.mark.parametrize(
    "line",
    [
        "dta=2",
        "data=0",
        "data=two",
        "merge=nothing",
        "merge.perid=8",
        "merge=local_sgd merge.perid=8",
        "merge=none merge.period=8",
        "compress.density=0.1",
        "staleness=4 merge.steleness=2",
        "split=orderd",
        "algorithm=rign",
        "at=epoch",
        "log=wnadb",
        "log=csv+csv",
        "gpus=2",
        "device=cuda:0",
        "wire=int8",
    ],
)
def test_both_looks_at_a_plan_refuse_it_in_the_same_words(line: str) -> None:
    said = []
    for look in (reading.check, words.parse):
        with pytest.raises(PlanError) as refused:
            look(line)
        said.append(str(refused.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("gpus=2", "did you mean data=2?"),
        ("workers=2", "did you mean data=2?"),
        ("nproc_per_node=8", "did you mean data=8?"),
        ("max_epochs=3", "did you mean epochs=3?"),
        ("batch_size=64", "did you mean batch=64?"),
        ("accumulate_grad_batches=4", "did you mean accumulate=4?"),
        ("gradient_clip_val=1.0", "did you mean clip=1.0?"),
        ("mixed_precision=bf16", "did you mean precision=bf16?"),
        ("precision=16-mixed", "did you mean fp16?"),
        ("num_workers=4", "did you mean loaders=4?"),
        ("strategy=ddp", "did you mean merge=all_reduce?"),
        ("merge=fsdp", "set shard=NUMBER"),
        ("zero_stage=3", "did you mean zero=3?"),
        ("accelerator=gpu", "did you mean device=cuda?"),
        ("device=cuda:1", "CUDA_VISIBLE_DEVICES"),
        ("nodes=2", "torchrun --nnodes 2"),
        ("lr=0.1", "the learning rate is the task's.*manyhands run FILE -- --lr 0.1"),
        ("momentum=0.9", "the optimizer is the task's"),
        ("optimizer=adam", "the optimizer is the task's"),
        ("schedule=cosine", "a schedule of the learning rate is the task's"),
        ("callbacks=Stop", r"mh\.Task\(callbacks="),
        ("output_dir=runs/a", "--dir runs/mine"),
    ],
)
def test_a_word_of_another_trainer_is_answered_by_ours(word: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        words.parse(word)


def test_a_word_of_ours_is_no_foreign_word_and_foreign_words_lead_to_real_ones() -> None:
    known = set(vocabulary.known_words())
    assert not known & (foreign_words.OURS.keys() | foreign_words.PLACE.keys())
    assert set(foreign_words.SAME) | set(foreign_words.VALUES) <= known
    assert not foreign_words.OURS.keys() & foreign_words.PLACE.keys()
    for ours, values in foreign_words.VALUES.items():
        for value in values.values():
            words.parse(f"{ours}={value}")
