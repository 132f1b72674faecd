"""Server optimizer of a torch optimizer: its name, options and state, in both directions.

    torch.optim.SGD(p, lr, momentum)  <->  "momentum", options {lr, momentum, ...},
                                           state {"momentum_buffer": one number for each weight}

So a task names its torch optimizer as always, a checkpoint of a run with servers can be resumed
without them, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Tensors
from manyhands.errors import TaskError
from manyhands.replica.flat import FlatParameters

POSSIBLE = "SGD (with momentum, nesterov), Adagrad, Adam and AdamW"
# state of a server optimizer, by torch's names: one number for each weight; those in COUNTS also
# keep the number of steps
STATE = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
COUNTS = ("adagrad", "adam", "adamw")
STEP = "step"
# prefix of further state, one number for each weight, where a strategy compensates for delay
COMPENSATION = "compensate/"
SERVED = "served/"  # prefix of that state in a snapshot


def server_optimizer_of(optimizer: Optimizer) -> tuple[str, dict[str, float]]:
    """The name of the server optimizer that does the same, and its options."""
    groups = optimizer.param_groups
    options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
    if any(o != options[0] for o in options[1:]):
        raise TaskError(
            f"the optimizer has {len(groups)} groups with different options, but a server treats "
            "all parameters alike; give one group, or use merge=all_reduce"
        )
    g = options[0]
    for odd in ("maximize", "amsgrad", "differentiable", "decoupled_weight_decay"):
        if g.get(odd) and not (
            odd == "decoupled_weight_decay" and isinstance(optimizer, torch.optim.AdamW)
        ):
            raise TaskError(
                f"{type(optimizer).__name__}({odd}=True) has no server optimizer; "
                "leave it out, or use merge=all_reduce"
            )
    common = {"lr": float(g["lr"]), "decay": float(g.get("weight_decay", 0.0))}
    kind = type(optimizer)
    if kind is torch.optim.SGD and not g["momentum"]:
        return "sgd", common
    if kind is torch.optim.SGD:
        nesterov = {"nesterov": 1.0} if g["nesterov"] else {}
        dampening = {"dampening": float(g["dampening"])} if g["dampening"] else {}
        return "momentum", {**common, "momentum": float(g["momentum"]), **dampening, **nesterov}
    if kind is torch.optim.Adagrad:
        own = {
            "lr_decay": float(g["lr_decay"]),
            "initial_accumulator_value": float(g["initial_accumulator_value"]),
        }
        return "adagrad", {**common, "eps": float(g["eps"]), **{k: v for k, v in own.items() if v}}
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        beta1, beta2 = g["betas"]
        named = "adam" if kind is torch.optim.Adam else "adamw"
        return named, {
            **common,
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(g["eps"]),
        }
    raise TaskError(
        f"{kind.__name__} has no server optimizer: servers have {POSSIBLE}; "
        "use one of them, or merge=all_reduce"
    )


def flat_state(flat: FlatParameters, vector: str, optimizer: Optimizer) -> Tensors:
    """The optimizer's state of the parameters in one flat vector; {}: it has none yet."""
    name, _ = server_optimizer_of(optimizer)
    views = [p for p in flat.views if p.vector == vector]
    if not any(optimizer.state.get(p.parameter) for p in views):
        return {}
    found: Tensors = {}
    for key in STATE[name]:
        whole = torch.zeros_like(flat.values[vector], device="cpu")
        for view in views:
            kept = optimizer.state.get(view.parameter, {}).get(key)
            if isinstance(kept, Tensor):  # else it has had no gradient yet
                _view(whole, view.value, view.start).copy_(kept)
        found[key] = whole
    if name in COUNTS:
        steps = [float(optimizer.state.get(p.parameter, {}).get("step", 0)) for p in views]
        found[STEP] = torch.tensor([max(steps, default=0.0)], dtype=torch.float64)
    return found


def named_state(
    flat: FlatParameters, optimizer: Optimizer, moments: Mapping[str, Tensors]
) -> Tensors:
    """The servers' state of every flat vector under torch's names: "<parameter>/<key>"."""
    name, _ = server_optimizer_of(optimizer)
    found: Tensors = {}
    for view in flat.views:
        kept = moments[view.vector]
        for key in STATE[name]:
            whole = kept[key].view(-1).to(view.value.dtype)
            found[f"{view.name}/{key}"] = _view(whole, view.value, view.start).contiguous().clone()
        if name in COUNTS:
            found[f"{view.name}/step"] = kept[STEP].view(-1)[0].float().clone()
    return found


def named_compensation(flat: FlatParameters, moments: Mapping[str, Tensors]) -> Tensors:
    """State of every flat vector that only servers keep: "served/<key>/<parameter>"."""
    return {
        f"{SERVED}{key}/{view.name}": _view(kept.view(-1), view.value, view.start)
        .contiguous()
        .clone()
        for view in flat.views
        for key, kept in moments[view.vector].items()
        if key.startswith(COMPENSATION)
    }


def flat_compensation(flat: FlatParameters, vector: str, saved: Tensors) -> Tensors:
    """The inverse, for one flat vector, from the state of a snapshot."""
    found: Tensors = {}
    for view in (p for p in flat.views if p.vector == vector):
        end = f"/{view.name}"
        for name in (
            n for n in saved if n.startswith(f"{SERVED}{COMPENSATION}") and n.endswith(end)
        ):
            key = name.removeprefix(SERVED).removesuffix(end)
            whole = found.setdefault(key, torch.zeros_like(flat.values[vector], device="cpu"))
            _view(whole, view.value, view.start).copy_(saved[name])
    return found


def _view(whole: Tensor, like: Tensor | nn.Parameter, start: int) -> Tensor:
    return torch.as_strided(whole, like.shape, like.stride(), start)
