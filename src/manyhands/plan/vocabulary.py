"""Vocabulary of plans: every word, its type, and the names that tables offer; known without torch.

The command line refuses a mistyped plan by it at once: importing torch, the strategies and the
codecs takes seconds. A test holds the names and options here to those of the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from manyhands.records import Layout, Plan

AXES = Layout.AXES
# name of a merge strategy -> its options: merge=local_sgd merge.period=8
STRATEGIES = {
    "all_reduce": "",
    "model_average": "period moments",
    "local_sgd": "period post moments",
    "bmuf": "period eta zeta nesterov moments",
    "diloco": "period lr momentum moments",
    "streaming_diloco": "period fragments tau alpha lr momentum moments",
    "easgd": "period beta alpha moments",
    "admm": "period rho lam ratio span tolerance moments",
    "d_psgd": "graph order period moments",
    "ad_psgd": "period moments seed",
    "sgp": "graph period",
    "ensemble": "period distil weight relabel",
    "robust": "how f momentum radius",
    "skeleton": "core explore period keep redraw draw c memory seed moments",
    "hogwild": "",
    "stale_sync": "staleness",
    "backup": "quorum",
    "downpour": "n_push n_fetch adapt",
    "dc_asgd": "strength adaptive decay",
    "async_easgd": "period beta alpha",
    "async_admm": "period rho quorum delay",
}
CODECS = {
    "fp16": "",
    "bf16": "",
    "int8": "block rounding feedback",
    "onebit": "block",
    "topk": "density momentum masking warmup",
    "randomk": "density seed feedback",
    "powersgd": "rank start_after",
}
# words that name an entry of a table, with options of its own; and the default, None: left out
TABLES: dict[str, tuple[Mapping[str, str], str | None]] = {
    "merge": (STRATEGIES, "all_reduce"),
    "then": (STRATEGIES, None),
    "compress": (CODECS, "none"),
}
# words that take one of a few names
NAMES: dict[str, tuple[str, ...]] = {
    "split": ("auto", "shuffled", "sampled", "ordered", "by_feature"),
    "algorithm": (
        "native",
        "star",
        "tree",
        "double_tree",
        "butterfly",
        "halving_doubling",
        "ring",
        "binary_blocks",
        "hierarchical",
        "auto",
    ),
}
LOGGERS = ("csv", "mlflow", "tensorboard", "wandb")  # of log=, several by +
OBJECTS = {"merge": "strategy", "then": "next_strategy", "compress": "codec"}
APART = ("layout", "forecast", "reasons", *NAMES, *TABLES, *OBJECTS.values())
PLAIN = {k: v for k, v in get_type_hints(Plan).items() if k not in APART}
# a word of one strategy over servers stands for that strategy too
SHORT = {"staleness": "stale_sync", "quorum": "backup"}
RENAMED = {"wire": "compress"}  # words of version 0.1


def known_words() -> list[str]:
    """Every word that a plan may hold, without the options of strategies and codecs."""
    return [*AXES, *TABLES, *SHORT, *RENAMED, *NAMES, *PLAIN]


def known_word(key: str) -> bool:
    """Whether `key` is a plan word, or an option of one: `merge.period`."""
    word, dot, _ = key.partition(".")
    return word in TABLES or word in RENAMED if dot else key in known_words()


def choices(kind: Any) -> tuple[Any, ...]:
    """The values that a word of this type may take; (): not a few names."""
    return get_args(kind) if get_origin(kind) is Literal else ()
