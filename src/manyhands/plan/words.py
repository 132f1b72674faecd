"""A plan is one line of `key=value` words, the same in Python, in TOML and on the command line.

    parse("data=4 merge=local_sgd merge.period=8")    parse({"data": 4, "merge.period": 8})    parse("plan.toml data=2")

Later words win. An unknown key is refused with the nearest known one; a value is checked here, before anything starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from manyhands.core import (
    Goal,
    Layout,
    Plan,
    Store,
    Strategy,
)
from manyhands.errors import PlanError
from manyhands.exchange import algorithms, compression
from manyhands.merge import STRATEGIES
from manyhands.split.data import SPLITS

Words = str | Sequence[str] | Mapping[str, Any] | Plan

AXES = {f.name: int for f in dataclasses.fields(Layout)}
# one of a table each, with options of its own: `merge=local_sgd merge.period=8`; None: may be left out
TABLES: dict[str, tuple[Mapping[str, Any], str | None]] = {
    "merge": (STRATEGIES, "all_reduce"),
    "then": (STRATEGIES, None),
    "compress": (compression.CODECS, "none"),
}
OBJECTS = {"merge": "strategy", "then": "next_strategy", "compress": "codec"}
APART = ("layout", "forecast", "reasons", "split", "algorithm", *TABLES, *OBJECTS.values())
PLAIN = {k: v for k, v in get_type_hints(Plan).items() if k not in APART}
SHORT = {
    "staleness": "stale_sync",
    "quorum": "backup",
}  # a word of one rule over servers names that rule too
OF_AXES = {
    "schedule": "pipe",
    "cut": "pipe",
    "sequence": "tensor",
    "zero": "shard",
}  # words that need more than 1 on an axis
SERVER_CODECS = ("servers", "lookahead", "cache", "cache_age", "embeddings")
POSITIVE = (
    "batch",
    "micro",
    "accumulate",
    "epochs",
    "steps",
    "clip",
    "threads",
    "bucket_mb",
    "keep",
    "timeout_s",
)


def parse(words: Words = "", *, size: int | None = None) -> Plan:
    """`size` is the number of ranks that were started, where somebody else started them."""
    if isinstance(words, Plan):
        return _fit(words, size, given=True)
    given = _spelt_out(_collect(words))
    axes = {k: _convert(k, given.pop(k), int) for k in AXES if k in given}
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
        ("split", SPLITS, "shuffled"),
        ("algorithm", dict.fromkeys(("native", *algorithms.NAMES)), "native"),
    ):
        chosen[key] = str(given.pop(key, default))
        _known(key, chosen[key], table)
    for key in given:
        if key not in PLAIN:
            _refuse("plan word", key, known)
    fields = {k: _convert(k, v, PLAIN[k]) for k, v in given.items()}
    plan = Plan(Layout(**axes), **chosen, **fields)
    _check(plan)
    plan = _fit(plan, size, given="data" in axes)
    _check_divided(plan)
    for key in ("merge", "then"):
        if (rule := getattr(plan, OBJECTS[key])) is not None:
            _in_words_of(key, partial(rule.check, plan.layout.data))
    if plan.algorithm != "native":
        algorithms.check(plan.algorithm, plan.layout.data)
    return plan


def describe(plan: Plan) -> str:
    """The resolved plan as a line that `parse` understands."""
    return line(to_dict(plan))


def line(words: Words) -> str:
    """Words as one line, no more than was given."""
    return " ".join(shlex.quote(f"{k}={_text(v)}") for k, v in overlay(words).items())


def overlay(*given: Words) -> dict[str, Any]:
    """Plans laid over each other: what a later one says wins."""
    flat: dict[str, Any] = {}
    for words in given:
        flat |= to_dict(words) if isinstance(words, Plan) else _collect(words)
    return flat


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
        (plan.servers or k not in SERVER_CODECS)
        and (k not in OF_AXES or getattr(plan.layout, OF_AXES[k]) > 1)
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
                f"{word!r} is no plan word: key=value is needed, such as {near[0] if near else 'data'}=..., or a .toml file"
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
    """`staleness=4` is short for merge=stale_sync merge.staleness=4, `quorum=3` for merge=backup merge.quorum=3."""
    for word, rule in SHORT.items():
        if word not in given:
            continue
        value, merge = given.pop(word), given.setdefault("merge", rule)
        if merge in STRATEGIES and word not in {
            f.name for f in dataclasses.fields(TABLES["merge"][0][merge])
        }:
            raise PlanError(
                f"{word}={value} has no effect: merge={merge} has no {word}; leave out one of them ({word}= is merge={rule})"
            )
        given[f"merge.{word}"] = value
    return given


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
                f"{key}.{next(iter(options))} has no effect without {key}=; add {key}={next(iter(table))}, say"
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
    """A rule speaks of itself as `merge`; here it may be the one that comes later."""
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


# -- checking --


def _check(plan: Plan) -> None:
    for key in POSITIVE:
        value = getattr(plan, key)
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"{key}={value}, but more than 0 and less than infinity is needed")
    for key in SERVER_CODECS:
        if key != "embeddings" and getattr(plan, key) < 0:
            raise PlanError(f"{key}={getattr(plan, key)}, but 0 or more is needed")
        if not plan.servers and getattr(plan, key) != Plan.__dataclass_fields__[key].default:
            raise PlanError(
                f"{key}={getattr(plan, key)} is about tables on servers, but the plan has none; add servers=1"
            )
    if plan.cache_age != Plan.__dataclass_fields__["cache_age"].default and not plan.cache:
        raise PlanError(
            f"cache_age={plan.cache_age} has no effect without a cache; add cache=100000, say"
        )
    if plan.loaders is not None and plan.loaders < 0:
        raise PlanError(f"loaders={plan.loaders}, but 0 or more processes are needed")
    if plan.epochs is not None and plan.steps is not None:
        raise PlanError(
            f"epochs={plan.epochs} and steps={plan.steps} both say when to stop; give one of them"
        )
    if plan.until is not None and plan.until.name in ("epoch", "step"):
        raise PlanError(
            f"until={plan.until}: {plan.until.name}s= says when to stop; until= is for what an evaluation measures"
        )
    if plan.evaluate != "epoch" and not (plan.evaluate.isdigit() and int(plan.evaluate) > 0):
        raise PlanError(f"evaluate={plan.evaluate}: epoch or a number of steps is needed")
    if (plan.then is None) != (plan.at is None):
        given, needed = ("then", "at=epoch:5") if plan.at is None else ("at", "then=local_sgd")
        raise PlanError(f"{given}= alone has no effect: add the other half, such as {needed}")
    if (
        plan.at is not None
        and plan.at.name == "noise"
        and (
            plan.strategy.sends != "gradients" or plan.strategy.swaps or plan.strategy.link is Store
        )
    ):
        raise PlanError(
            f"at={plan.at}: the noise scale is measured where gradients are all-reduced, not under merge={plan.merge}; use all_reduce"
        )
    for key in ("merge", "then"):
        if (rule := getattr(plan, OBJECTS[key])) is None:
            continue
        if rule.link is Store:
            _check_served(plan, key, rule)
        elif (
            plan.precision == "fp16"
            and rule.sends == "gradients"
            and plan.compress not in ("none", "fp16", "bf16")
        ):
            raise PlanError(
                f"compress={plan.compress} with precision=fp16: what it holds back was scaled with a loss scale that changes; set precision=bf16 or compress=bf16"
            )
        if plan.codec is not None and (reason := compression.refusal(plan.codec, type(rule))):
            raise PlanError(reason)
    if plan.save not in ("epoch", "off") and not (plan.save.isdigit() and int(plan.save) > 0):
        raise PlanError(f"save={plan.save}: epoch, off or a number of rounds is needed")
    if plan.link == "nccl" and plan.device == "cpu":
        raise PlanError("link=nccl moves bytes between GPUs, but device=cpu; set link=auto")
    if plan.algorithm != "native" and (plan.link == "nccl" or plan.device == "cuda"):
        raise PlanError(
            f"algorithm={plan.algorithm} is for CPU processes, nccl has its own algorithms; leave it out"
        )
    if plan.link in ("shared", "hierarchical") and plan.device == "cuda":
        raise PlanError(
            f"link={plan.link} is for CPU processes of one host, but device=cuda; set link=auto"
        )


def _check_divided(plan: Plan) -> None:
    """What a model that is split over ranks can be combined with."""
    layout = plan.layout
    for word, axis in OF_AXES.items():
        if (
            getattr(layout, axis) == 1
            and getattr(plan, word) != Plan.__dataclass_fields__[word].default
        ):
            raise PlanError(
                f"{word}={_text(getattr(plan, word))} has no effect without {axis}=; add {axis}=2, say, or leave it out"
            )
    if plan.split == "by_feature" and (layout.tensor == 1 or layout.pipe * layout.shard > 1):
        raise PlanError(
            "split=by_feature deals columns out over tensor=, and nothing else may split the model; set tensor=2, say, alone or with data="
        )
    split = " x ".join(
        f"{a}={getattr(layout, a)}" for a in AXES if a != "data" and getattr(layout, a) > 1
    )
    if not split:
        return
    if plan.strategy.link is Store or plan.servers:
        raise PlanError(
            f"servers hold whole models, and {split} splits the model over ranks; leave out {split.split(' x ')[0]} or servers="
        )
    if plan.precision == "fp16":
        raise PlanError(
            f"precision=fp16 needs one loss scale for all parts of the model, which {split} does not have; set precision=bf16"
        )
    if any(rule is not None and rule.distils for rule in (plan.strategy, plan.next_strategy)):
        raise PlanError(
            f"merge={plan.merge} runs other ranks' models, which {split} splits; use another rule"
        )
    if plan.cut == "graph" and plan.schedule != Plan.__dataclass_fields__["schedule"].default:
        raise PlanError(
            f"schedule={plan.schedule} has no effect: with cut=graph the order follows from the graph; leave it out"
        )
    if layout.shard > 1 and plan.schedule == "interleaved":
        raise PlanError(
            f"schedule=interleaved gives a rank several stages, which shard={layout.shard} does not know; use schedule=1f1b"
        )
    if layout.shard > 1 and plan.zero == 3 and (plan.schedule == "zero_bubble" or plan.compile):
        word = "compile=true" if plan.compile else "schedule=zero_bubble"
        raise PlanError(
            f"{word} would not see when zero=3 gathers and releases parameters; set zero=2, or leave {word} out"
        )
    for word in ("at", "until"):
        if (goal := getattr(plan, word)) is not None and goal.name == "noise":
            raise PlanError(
                f"{word}={goal}: the noise scale is measured on whole gradients, which {split} splits; use another goal"
            )
    if layout.pipe > 1 and plan.compile:
        raise PlanError(
            f"compile=true compiles a whole model, and pipe={layout.pipe} cuts it into stages; leave compile out"
        )


def _check_served(plan: Plan, key: str, rule: Strategy[Any, Any]) -> None:
    """Ranks under a rule over servers keep no step with each other."""
    word = f"{key}={getattr(plan, key)}"
    if plan.then is not None:
        raise PlanError(
            f"{word} works over servers, and a run cannot change between such a rule and another; leave then= out"
        )
    if not plan.servers:
        raise PlanError(
            f"{word} pulls from and pushes to a parameter server, but the plan has none; add servers=1"
        )
    if plan.lookahead != 1:
        raise PlanError(
            f"lookahead={plan.lookahead} has no effect: under {word} batches are drawn when they are wanted; leave it out"
        )
    if plan.embeddings == "sync":
        raise PlanError(
            f"embeddings=sync makes all ranks wait at every step, and {word} has a pace of its own; leave it out"
        )
    if plan.algorithm != "native":
        raise PlanError(
            f"algorithm={plan.algorithm} has no effect: {word} moves the model through servers; leave it out"
        )
    if plan.batchnorm == "sync":
        raise PlanError(
            f"batchnorm=sync makes ranks wait for each other in every layer, which {word} avoids; set batchnorm=local"
        )
    if plan.precision == "fp16" and rule.on_server == "optimizer":
        raise PlanError(
            f"precision=fp16 scales the loss by what its own steps find, but under {word} the server steps; set precision=bf16"
        )


def _fit(plan: Plan, size: int | None, given: bool) -> Plan:
    if size is None or plan.layout.size == size:
        return plan
    inside = plan.layout.size // plan.layout.data  # ranks of one replica
    if not given and size % inside == 0:
        return dataclasses.replace(
            plan, layout=dataclasses.replace(plan.layout, data=size // inside)
        )
    axes = " x ".join(
        f"{a}={getattr(plan.layout, a)}" for a in AXES if a == "data" or getattr(plan.layout, a) > 1
    )
    fits = (
        f"set data={size // inside}"
        if size % inside == 0
        else "change the axes so that their product is that"
    )
    raise PlanError(
        f"the plan {axes} needs {plan.layout.size} ranks, but {size} were started; {fits} or start {plan.layout.size}"
    )


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
