"""Given values: hyper-parameters as the task gave them, which a resumed run is compared with.

As in torch, a checkpoint's values win over those of the task that resumes it. Its optimizer and
schedule keep present values, which the schedule or the user may have changed since; so a checkpoint
holds beside them what was given when the task was built. A difference is then one of the task.
"""

from __future__ import annotations

import json
from typing import Any

from manyhands.core import Snapshot
from manyhands.errors import CheckpointError

Values = dict[str, Any]

# of a parameter group: names and lr that stand elsewhere; what is chosen for this machine
NOT_GIVEN = {"params", "param_names", "initial_lr", "fused", "foreach", "capturable"}
# of a schedule: how far it is, and what follows from the optimizer's lr
PROGRESS = {"base_lrs", "last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}
PROGRESS |= {"_last_lr", "_step_count", "_is_initial", "_get_lr_called_within_step"}


def given_values(
    optimizer: str, groups: list[Values], schedule: str | None, options: Values | None
) -> Values:
    """What the task gives: names of the classes, and plain values of both as they are before a
    checkpoint is loaded and before the first step."""
    found = {
        "optimizer": optimizer,
        "groups": [_given(g) for g in groups],
        "schedule": schedule,
        "options": _options(options or {}),
    }
    # as it will come out of a file: lists for tuples
    plain: Values = json.loads(json.dumps(found, default=repr))
    return plain


def saved_values(saved: Snapshot) -> Values:
    """What the task of the checkpoint gave; of an older checkpoint, as far as it can be known."""
    if (given := saved.meta.get("given")) is not None:
        return dict(given)
    schedule, groups = saved.meta["schedule"], saved.meta["optimizer"]["groups"]
    found = given_values("", groups, None if schedule is None else "", schedule)
    for before, group in zip(groups, found["groups"], strict=True):
        if schedule is not None and "initial_lr" not in before:  # it has lowered lr, maybe
            group.pop("lr", None)
    return found


def check_optimizer(then: Values, now: Values) -> None:
    """Raises CheckpointError: state of one optimizer means nothing to another."""
    if then["optimizer"] not in ("", now["optimizer"]):
        raise CheckpointError(
            f"the checkpoint's optimizer is {then['optimizer']}, the task's is {now['optimizer']}, "
            "which cannot go on with its state and learning rate; resume with "
            f"{then['optimizer']}, or start anew without resume"
        )


def in_force(then: Values, now: Values) -> Values:
    """What holds in the resumed run: the checkpoint's values, where it has them."""
    groups = [
        {k: before.get(k, v) for k, v in group.items()}
        for group, before in zip(now["groups"], then["groups"], strict=False)
    ]
    options = now["options"]
    if _same_schedule(then, now):
        options = {k: then["options"].get(k, v) for k, v in options.items()}
    return {**now, "groups": groups, "options": options}


def differences(then: Values, now: Values, groups: list[Values]) -> list[str]:
    """What of the task does not hold in the resumed run, in clauses.

    `groups` are the checkpoint's: with present values, not given ones."""
    pairs = _changed_groups(then["groups"], now["groups"])
    if _same_schedule(then, now):
        options = _changed(then["options"], now["options"])
        pairs += [(f"{now['schedule']} {k}", a, b) for k, a, b in options]
    said = []
    if pairs:
        theirs = ", ".join(f"{k} {_short(a)}" for k, a, _ in pairs)
        ours = ", ".join(f"{k} {_short(b)}" for k, _, b in pairs)
        said.append(
            f"resumed with the checkpoint's {theirs}, not the task's {ours}; "
            "start anew to change them"
        )
    a, b = then["schedule"], now["schedule"]
    lr = ", ".join(dict.fromkeys(_short(g["lr"]) for g in groups if "lr" in g))
    if a is None and b is not None:
        said.append(f"the checkpoint has no schedule: the task's {b} begins here, at lr {lr}")
    elif a is not None and b is None:
        said.append(f"the task has no schedule any more ({a or 'one'} before): lr stays at {lr}")
    elif a is not None and not _same_schedule(then, now):
        said.append(f"the schedule is {b}, {a} before: it goes on from the step where that was")
    return said


def other_data(then: Values, now: Values) -> list[str]:
    """That the number of samples is another one than when the checkpoint was saved."""
    before, samples = then.get("samples"), now.get("samples")
    if before == samples or "samples" not in then:
        return []
    return [f"the training data has {_count(samples)}, {_count(before)} before"]


def _given(group: Values) -> Values:
    # the present lr is the schedule's; and so are momentum or the first of betas in a cycle
    found = {**group, "lr": group["initial_lr"]} if "initial_lr" in group else dict(group)
    if "max_momentum" in group:
        found.pop("momentum", None)
        if betas := found.pop("betas", None):
            found["betas[1]"] = betas[1]
    return {k: v for k, v in found.items() if k not in NOT_GIVEN}


def _options(schedule: Any, prefix: str = "") -> Values:
    """A schedule's state without its progress, flat: "schedulers.0.gamma"."""
    found: Values = {}
    items = schedule.items() if isinstance(schedule, dict) else enumerate(schedule)
    for key, value in items:
        name = f"{prefix}{str(key).lstrip('_')}"
        if key in PROGRESS:
            continue
        if isinstance(value, dict) and "__pairs__" in value:
            value = [k for k, times in value["__pairs__"] for _ in range(times)]
        if isinstance(value, dict) or (isinstance(value, list) and _nested(value)):
            found |= _options(value, f"{name}.")
        else:
            found[name] = value
    return found


def _nested(values: list[Any]) -> bool:
    return any(isinstance(v, dict) for v in values)


def _same_schedule(then: Values, now: Values) -> bool:
    a, b = then["schedule"], now["schedule"]
    return a is not None and b is not None and a in ("", b)


def _changed_groups(then: list[Values], now: list[Values]) -> list[tuple[str, Any, Any]]:
    """Values that differ; once where they do so alike in all parameter groups."""
    groups = [_changed(a, b) for a, b in zip(then, now, strict=False)]
    if all(changed == groups[0] for changed in groups):
        return groups[0] if groups else []
    return [(f"{k} of group {i}", a, b) for i, one in enumerate(groups) for k, a, b in one]


def _changed(then: Values, now: Values) -> list[tuple[str, Any, Any]]:
    both = [(k, then[k], v) for k, v in now.items() if k in then]
    return [(k, a, b) for k, a, b in both if a != b and (a == a or b == b)]


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _count(samples: int | None) -> str:
    return "a number of samples that is not known" if samples is None else f"{samples} samples"
