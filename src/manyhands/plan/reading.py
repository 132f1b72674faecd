"""Reading of plan words: from a line, a list, a table or a file to checked keys and values.

`words.parse` builds a plan of them. `check` is for a command line: it refuses what no plan has,
without the strategies and codecs themselves, so that a mistake is answered before torch is loaded.
"""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from manyhands.errors import PlanError
from manyhands.plan import foreign_words
from manyhands.plan.vocabulary import (
    AXES,
    LOGGERS,
    NAMES,
    PLAIN,
    RENAMED,
    SHORT,
    TABLES,
    choices,
)
from manyhands.records import Goal


def check(words: str | Sequence[str]) -> None:
    """Refuse words that no plan has, and values that no word takes. What words mean together is for
    `words.parse`."""
    given = collect(words)
    refuse_renamed(given)
    read_axes(given)
    known = [*AXES, *TABLES, *SHORT, *NAMES, *PLAIN]
    for key in TABLES:
        known += [f"{key}.{option}" for option in _check_table(key, given)]
    for key, names in NAMES.items():
        if key in given:
            refuse_unknown(key, str(given.pop(key)), names)
    for key in given:
        if key not in PLAIN and key not in SHORT:
            refuse_word(key, given[key], known)
    for key, value in given.items():
        if key in PLAIN:
            convert(key, value, PLAIN[key])
    check_loggers(given.get("log"))


def check_loggers(log: str | None) -> None:
    """Refuse loggers that are not known, or that are named twice."""
    names = [] if log is None or log.lower() in ("none", "") else log.split("+")
    for name in names:
        refuse_unknown("log", name, LOGGERS)
        if names.count(name) > 1:
            raise PlanError(f"log={log} names {name} twice; leave one out")


def _check_table(key: str, given: dict[str, Any]) -> Sequence[str]:
    """The options of what the word `key` names; they are taken out of `given`."""
    names, default = TABLES[key]
    short = next((SHORT[word] for word in SHORT if word in given), default)
    name = given.pop(key, short if key == "merge" else default)
    options = take_options(key, given)
    if name is None or str(name) == "none":
        refuse_lone_option(key, options, names)
        return ()
    refuse_unknown(key, str(name), names)
    has = names[str(name)].split()
    refuse_option(key, str(name), options, has)
    return has


def collect(words: str | Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Words as one dictionary; later ones win."""
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


def read_axes(given: dict[str, Any]) -> dict[str, int]:
    """Ranks on each axis, taken out of `given`."""
    axes = {k: convert(k, given.pop(k), int) for k in AXES if k in given}
    for axis, n in axes.items():
        if n < 1:
            raise PlanError(
                f"{axis}={n}, but at least 1 rank is needed on every axis; set {axis}=1 or more"
            )
    return axes


def several_ranks(words: str | Sequence[str]) -> bool:
    """Whether words that `check` has passed spread a run over several ranks, or start its only one
    again; those of a run that is resumed are not looked for."""
    given = collect(words)
    again = given.get("restarts") not in (None, "0", 0) or "elastic" in given
    return any(n > 1 for n in read_axes(given).values()) or again


def take_options(key: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options `key.option=value`, taken out of `given`."""
    return {k.removeprefix(f"{key}."): given.pop(k) for k in list(given) if k.startswith(f"{key}.")}


def convert(key: str, value: Any, kind: Any) -> Any:
    """A value as the type of its word."""
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
        needed = str(e).split(", got")[0].removeprefix("Expected ").replace("`", "")
        if found := choices(kind):
            needed = f"one of {', '.join(map(str, found))}"
        do = foreign_words.of_value(key, str(value))
        raise PlanError(
            f"{key}={value}: {needed.removesuffix(' | null')} is needed{do and f'; {do}'}"
        ) from None


# -- refusals --


def refuse_renamed(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        word, dot, option = key.partition(".")
        if word in RENAMED:
            new = f"{RENAMED[word]}{dot}{option}"
            raise PlanError(f"{key}={value}: the word is now {new}; write {new}={value}")


def refuse_lone_option(key: str, options: Iterable[str], names: Iterable[str]) -> None:
    for option in options:
        raise PlanError(
            f"{key}.{option} has no effect without {key}=; add {key}={next(iter(names))}, say"
        )


def refuse_option(key: str, name: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Refuse options that what `key` names does not have."""
    for option in options:
        if option not in known:
            has = f"has {', '.join(f'{key}.{k}' for k in known)}" if known else "has no options"
            raise PlanError(f"{key}.{option} has no effect: {key}={name} {has}")


def refuse_unknown(key: str, value: str, names: Iterable[str]) -> None:
    known = list(names)
    if value not in known:
        do = foreign_words.of_value(key, value)
        raise PlanError(f"unknown {key}={value!r}; {do or _nearest(value, known)}")


def refuse_word(key: str, value: Any, known: Sequence[str]) -> None:
    do = foreign_words.of_word(key, str(value))
    raise PlanError(f"unknown plan word {key!r}; {do or _nearest(key, known)}")


def _nearest(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, 1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(set(known)))}"
