"""Plan words: one line of `key=value`, the same in Python, in TOML and on the command line.

    parse("data=4 merge=local_sgd merge.period=8")
    parse({"data": 4, "merge.period": 8})
    parse("plan.toml data=2")

Later words win. An unknown key is refused with the nearest known one. Values are checked here,
before anything starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from manyhands.core import Goal, Layout, Plan
from manyhands.errors import PlanError
from manyhands.exchange import algorithms, compression
from manyhands.merge import STRATEGIES
from manyhands.plan import checks
from manyhands.plan.checks import AXES, AXIS_WORDS, REPLICA_WORDS, SERVER_WORDS
from manyhands.plan.model_parallel_checks import check_model_parallel
from manyhands.split.data import SPLITS

Words = str | Sequence[str] | Mapping[str, Any] | Plan

# words that name an entry of a table, with options of its own: `merge=local_sgd merge.period=8`;
# and the default, None: may be left out
TABLES: dict[str, tuple[Mapping[str, Any], str | None]] = {
    "merge": (STRATEGIES, "all_reduce"),
    "then": (STRATEGIES, None),
    "compress": (compression.CODECS, "none"),
}
OBJECTS = {"merge": "strategy", "then": "next_strategy", "compress": "codec"}
APART = ("layout", "forecast", "reasons", "split", "algorithm", *TABLES, *OBJECTS.values())
PLAIN = {k: v for k, v in get_type_hints(Plan).items() if k not in APART}
# a word of one strategy over servers stands for that strategy too
SHORT = {"staleness": "stale_sync", "quorum": "backup"}
RENAMED = {"wire": "compress"}  # words of version 0.1


def parse(words: Words = "", *, size: int | None = None) -> Plan:
    """The plan of some words. `size`: ranks that were started, where somebody else started them."""
    if isinstance(words, Plan):
        return checks.fit(words, size, given=True)
    given = _spelt_out(_collect(words))
    _refuse_renamed(given)
    axes = {k: _convert(k, given.pop(k), int) for k in AXES if k in given}
    if given.get("elastic") is not None:
        axes = {"data": checks.elastic_bounds(str(given["elastic"]))[1]} | axes
    for axis, n in axes.items():
        if n < 1:
            raise PlanError(
                f"{axis}={n}, but at least 1 rank is needed on every axis; set {axis}=1 or more"
            )
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
        ("split", {"auto": None, **SPLITS}, "auto"),
        ("algorithm", dict.fromkeys(("native", *algorithms.NAMES)), "native"),
    ):
        chosen[key] = str(given.pop(key, default))
        _known(key, chosen[key], table)
    for key in given:
        if key not in PLAIN:
            _refuse("plan word", key, known)
    fields = {k: _convert(k, v, PLAIN[k]) for k, v in given.items()}
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


def known_words() -> list[str]:
    """Every word that a plan may hold, without the options of strategies and codecs."""
    return [*AXES, *TABLES, *SHORT, *RENAMED, "split", "algorithm", *PLAIN]


def known_word(key: str) -> bool:
    """Whether `key` is a plan word, or an option of one: `merge.period`."""
    word, dot, _ = key.partition(".")
    return word in TABLES or word in RENAMED if dot else key in known_words()


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
        flat |= to_dict(words) if isinstance(words, Plan) else _collect(words)
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


# -- reading --


def _collect(words: str | Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(words, Mapping):
        return _flatten(words)
    given: dict[str, Any] = {}
    for word in shlex.split(words) if isinstance(words, str) else words:
        key, equals, value = word.partition("=")
        if not equals and word.endswith(".toml"):
            given.update(_flatten(_load(Path(word))))
        elif not equals or not key:
            near = difflib.get_close_matches(word, [*AXES, "merge", "split", *PLAIN], 1)
            raise PlanError(
                f"{word!r} is no plan word: key=value is needed, such as "
                f"{near[0] if near else 'data'}=..., or a .toml file"
            )
        else:
            given[key] = value
    return given


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise PlanError(f"plan file {path} does not exist") from None
    except tomllib.TOMLDecodeError as e:
        raise PlanError(f"plan file {path} is not TOML: {e}") from e


def _flatten(given: Mapping[str, Any]) -> dict[str, Any]:
    """A table `[merge]` with `name` is the words merge=name merge.key=value."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            flat.update({key if k == "name" else f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key] = value
    return flat


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


def _refuse_renamed(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        word, dot, option = key.partition(".")
        if word in RENAMED:
            new = f"{RENAMED[word]}{dot}{option}"
            raise PlanError(f"{key}={value}: the word is now {new}; write {new}={value}")


def _chosen(key: str, given: dict[str, Any]) -> dict[str, Any]:
    """The word `key` and its options, as the plan's name and object."""
    table, default = TABLES[key]
    name = given.pop(key, default)
    name = None if name is None else str(name)
    options = {
        k.removeprefix(f"{key}."): given.pop(k) for k in list(given) if k.startswith(f"{key}.")
    }
    if name is None or name == "none":
        if options:
            raise PlanError(
                f"{key}.{next(iter(options))} has no effect without {key}=; "
                f"add {key}={next(iter(table))}, say"
            )
        return {key: name, OBJECTS[key]: None}
    _known(key, name, table)
    kind = table[name]
    types = {
        k: v
        for k, v in get_type_hints(kind).items()
        if k in {f.name for f in dataclasses.fields(kind)}
    }
    for option in options:
        if option not in types:
            has = f"has {', '.join(f'{key}.{t}' for t in types)}" if types else "has no options"
            raise PlanError(f"{key}.{option} has no effect: {key}={name} {has}")
    converted = {k: _convert(f"{key}.{k}", v, types[k]) for k, v in options.items()}
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


def _convert(key: str, value: Any, kind: Any) -> Any:
    if (
        isinstance(value, str)
        and value.lower() in ("none", "")
        and type(None) in getattr(kind, "__args__", ())
    ):
        return None
    if Goal in getattr(kind, "__args__", ()) or kind is Goal:
        try:
            return value if isinstance(value, Goal) else Goal.parse(str(value))
        except ValueError as e:
            reason = str(e) if "needed" in str(e) else "a number is needed after the colon"
            raise PlanError(f"{key}={value}: {reason}") from None
    if kind is str and isinstance(value, int):  # save = 10 in TOML is save=10 in words
        value = str(value)
    try:
        return msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as e:
        choices = _choices(kind)
        needed = (
            f"one of {', '.join(map(str, choices))}"
            if choices
            else str(e).split(", got")[0].removeprefix("Expected ").replace("`", "")
        )
        raise PlanError(f"{key}={value}: {needed} is needed") from None


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _known(key: str, value: str, table: Mapping[str, Any]) -> None:
    if value not in table:
        _refuse(f"{key}=", value, list(table))


def _refuse(what: str, given: str, known: Sequence[str]) -> None:
    near = difflib.get_close_matches(given, known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(set(known)))}"
    raise PlanError(f"unknown {what}{'' if what.endswith('=') else ' '}{given!r}; {hint}")


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
