"""Plan words: one line of `key=value`, the same in Python, in TOML and on the command line.

    parse("data=4 merge=local_sgd merge.period=8")
    parse({"data": 4, "merge.period": 8})
    parse("plan.toml data=2")

Later words win. An unknown key is refused with the nearest known one. Values are checked here,
before anything starts.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_type_hints

from manyhands.core import Goal, Layout, Plan
from manyhands.errors import PlanError
from manyhands.exchange import algorithms, compression
from manyhands.merge import STRATEGIES
from manyhands.plan import checks, reading
from manyhands.plan.checks import AXIS_WORDS, REPLICA_WORDS, SERVER_WORDS
from manyhands.plan.model_parallel_checks import check_model_parallel
from manyhands.plan.vocabulary import AXES, OBJECTS, PLAIN, SHORT
from manyhands.split.data import SPLITS

Words = str | Sequence[str] | Mapping[str, Any] | Plan

# words that name an entry of a table, with options of its own: `merge=local_sgd merge.period=8`;
# and the default, None: may be left out
TABLES: dict[str, tuple[Mapping[str, Any], str | None]] = {
    "merge": (STRATEGIES, "all_reduce"),
    "then": (STRATEGIES, None),
    "compress": (compression.CODECS, "none"),
}


def parse(words: Words = "", *, size: int | None = None) -> Plan:
    """The plan of some words. `size`: ranks that were started, where somebody else started them."""
    if isinstance(words, Plan):
        return checks.fit(words, size, given=True)
    given = _spelt_out(reading.collect(words))
    reading.refuse_renamed(given)
    axes = reading.read_axes(given)
    if given.get("elastic") is not None:
        axes = {"data": checks.elastic_bounds(str(given["elastic"]))[1]} | axes
    chosen: dict[str, Any] = {}
    known = [*AXES, *TABLES, *SHORT, "split", "algorithm", *PLAIN]
    for key in TABLES:
        chosen |= _chosen(key, given)
        known += (
            [f"{key}.{f.name}" for f in dataclasses.fields(chosen[OBJECTS[key]])]
            if chosen[OBJECTS[key]] is not None
            else []
        )
    for key, table, default in (
        ("split", ("auto", *SPLITS), "auto"),
        ("algorithm", ("native", *algorithms.NAMES), "native"),
    ):
        chosen[key] = str(given.pop(key, default))
        reading.refuse_unknown(key, chosen[key], table)
    for key, value in given.items():
        if key not in PLAIN:
            reading.refuse_word(key, value, known)
    fields = {k: reading.convert(k, v, PLAIN[k]) for k, v in given.items()}
    plan = Plan(Layout(**axes), **chosen, **fields)
    checks.check(plan)
    plan = checks.fit(plan, size, given="data" in axes)
    check_model_parallel(plan)
    for key in ("merge", "then"):
        if (strategy := getattr(plan, OBJECTS[key])) is not None:
            _in_words_of(key, partial(strategy.check, plan.layout.data))
    if plan.algorithm != "native":
        algorithms.check(plan.algorithm, plan.layout.data)
    return plan


def describe(plan: Plan) -> str:
    """A resolved plan as one line that `parse` understands."""
    return line(to_dict(plan))


def brief(plan: Plan) -> str:
    """A resolved plan as one line without defaults, and without what the machine decided."""
    default = {
        **to_dict(Plan(Layout(), STRATEGIES["all_reduce"]())),
        "split": "shuffled",
        "seed": 0,
    }
    for key, attribute in OBJECTS.items():  # options of a strategy or codec, where it has such
        if (made := getattr(plan, attribute)) is not None:
            plain = {f.name: f.default for f in dataclasses.fields(made)}
            default |= {f"{key}.{name}": value for name, value in plain.items()}
    shown = {k: v for k, v in to_dict(plan).items() if k == "data" or v != default.get(k)}
    hidden = {"threads", *(["split"] if plan.split == "auto" else [])}
    return line({k: v for k, v in shown.items() if k not in hidden})


def layout_line(layout: Layout) -> str:
    """A layout as words: data=2 tensor=2."""
    shown = [k for k in AXES if k == "data" or getattr(layout, k) != 1]
    return " ".join(f"{k}={getattr(layout, k)}" for k in shown)


def line(words: Words) -> str:
    """Words as one line: those that were given, and no defaults."""
    return " ".join(shlex.quote(f"{k}={_text(v)}") for k, v in overlay(words).items())


def overlay(*given: Words) -> dict[str, Any]:
    """Words of several plans as one dictionary; later ones win."""
    flat: dict[str, Any] = {}
    for words in given:
        flat |= to_dict(words) if isinstance(words, Plan) else reading.collect(words)
    return flat


def continued(saved: Words, given: Words, size: int | None) -> dict[str, Any]:
    """Words of a run that resumes: its `saved` ones, where `given` says nothing in their place.

    A given layout, strategy or limit takes the place of the whole saved one. `size`: ranks that
    somebody else has started, which then decides about data=.
    """
    kept, new = overlay(saved), overlay(given)
    groups = [
        (*AXES, *AXIS_WORDS),
        ("epochs", "steps"),
        *((key, *(SHORT if key == "merge" else ())) for key in TABLES),
    ]
    for group in groups:
        if any(new.get(key, kept.get(key)) != kept.get(key) for key in group):
            kept = {k: v for k, v in kept.items() if k.partition(".")[0] not in group}
    if size is not None:
        kept.pop("data", None)
    return {**kept, **new}


def to_dict(plan: Plan) -> dict[str, Any]:
    axes = {k: getattr(plan.layout, k) for k in AXES if k == "data" or getattr(plan.layout, k) != 1}
    chosen: dict[str, Any] = {}
    for key, attribute in OBJECTS.items():
        if (made := getattr(plan, attribute)) is not None:
            options = {f"{key}.{f.name}": getattr(made, f.name) for f in dataclasses.fields(made)}
            chosen |= {
                key: getattr(plan, key),
                **{k: v for k, v in options.items() if v is not None},
            }
    chosen |= {"algorithm": plan.algorithm} if plan.algorithm != "native" else {}
    told = lambda k: (
        (plan.servers or k not in SERVER_WORDS)
        and (
            k not in ("shards", "on_loss", "hot_rows", "hot_age", *REPLICA_WORDS)
            or getattr(plan, k) != checks.default(k)
        )
        and (k not in AXIS_WORDS or getattr(plan.layout, AXIS_WORDS[k]) > 1)
    )
    plain = {k: getattr(plan, k) for k in PLAIN if getattr(plan, k) is not None and told(k)}
    return {
        **axes,
        **chosen,
        "split": plan.split,
        **{k: str(v) if isinstance(v, Goal) else v for k, v in plain.items()},
    }


def to_toml(plan: Plan) -> str:
    return "".join(f"{_key(k)} = {_toml(v)}\n" for k, v in to_dict(plan).items())


# -- strategies and codecs --


def _spelt_out(given: dict[str, Any]) -> dict[str, Any]:
    """`staleness=4` is short for merge=stale_sync merge.staleness=4, `quorum=3` for merge=backup
    merge.quorum=3."""
    for word, strategy in SHORT.items():
        if word not in given:
            continue
        value, merge = given.pop(word), given.setdefault("merge", strategy)
        if merge in STRATEGIES and word not in {
            f.name for f in dataclasses.fields(TABLES["merge"][0][merge])
        }:
            raise PlanError(
                f"{word}={value} has no effect: merge={merge} has no {word}; "
                f"leave out one of them ({word}= is merge={strategy})"
            )
        given[f"merge.{word}"] = value
    return given


def _chosen(key: str, given: dict[str, Any]) -> dict[str, Any]:
    """The word `key` and its options, as the plan's name and object."""
    table, default = TABLES[key]
    name = given.pop(key, default)
    name = None if name is None else str(name)
    options = reading.take_options(key, given)
    if name is None or name == "none":
        reading.refuse_lone_option(key, options, table)
        return {key: name, OBJECTS[key]: None}
    reading.refuse_unknown(key, name, table)
    kind = table[name]
    types = {
        k: v
        for k, v in get_type_hints(kind).items()
        if k in {f.name for f in dataclasses.fields(kind)}
    }
    reading.refuse_option(key, name, options, list(types))
    converted = {k: reading.convert(f"{key}.{k}", v, types[k]) for k, v in options.items()}
    return {key: name, OBJECTS[key]: _in_words_of(key, lambda: kind(**converted))}


def _in_words_of(key: str, make: Callable[[], Any]) -> Any:
    """Errors of a strategy name it `merge`; where it is the one that comes later, `then`."""
    try:
        return make()
    except PlanError as e:
        raise PlanError(
            str(e).replace("merge.", f"{key}.").replace("merge=", f"{key}=")
            if key == "then"
            else str(e)
        ) from None


# -- writing --


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return (
        repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
    )  # repr: to the last bit


def _key(key: str) -> str:
    return f'"{key}"' if "." in key else key


def _toml(value: Any) -> str:
    return _text(value) if isinstance(value, bool | int | float) else json.dumps(value)
