"""Names of version 0.1, met by one sentence each: plan words, options, import paths."""

from __future__ import annotations

import importlib

import pytest

import manyhands as mh
from manyhands.plan import words


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("data=2 wire=int8", "wire=int8: the word is now compress; write compress=int8"),
        (
            "data=2 wire.ratio=0.1 wire=topk",
            "the word is now compress.ratio; write compress.ratio=0.1",
        ),
    ],
)
def test_an_old_plan_word_is_refused_with_the_new_one(line: str, says: str) -> None:
    with pytest.raises(mh.PlanError, match=says.replace(".", r"\.")):
        words.parse(line)


@pytest.mark.parametrize("kind", [mh.Embedding, mh.EmbeddingBag])
def test_an_old_option_of_an_embedding_is_refused_with_the_new_one(kind: type) -> None:
    with pytest.raises((TypeError, mh.TaskError), match="optimizer='adagrad'"):
        kind("users", dim=4, rule="adagrad")


@pytest.mark.parametrize(
    "name", ["compute.sparse", "exchange.server.client", "exchange.wires", "build", "run"]
)
def test_an_old_module_says_what_to_import_instead(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"is now manyhands\..* from manyhands itself"):
        importlib.import_module(f"manyhands.{name}")


def test_a_module_that_never_was_is_simply_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'manyhands\.nonsense'"):
        importlib.import_module("manyhands.nonsense")
