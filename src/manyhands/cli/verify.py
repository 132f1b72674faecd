"""`manyhands verify script.py data=3`: compare a few steps under the plan with one process.

Both start from the same seed and use the same samples; the global batch of the plan is the batch of
the one process. In float64 another summation order changes results by about 1e-15, an error in the
method by about 1e-3, so the two are never confused.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyhands.assembly.rank_context import Options, micro_batches
from manyhands.core import (
    Layout,
    Plan,
    Store,
    Tensors,
)
from manyhands.embedding.tables import embeddings
from manyhands.entry import (
    MakeTask,
    defines_task,
    load_task,
    start,
    work,
)
from manyhands.errors import PlanError
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.stale_sync import StaleSync
from manyhands.parallel.zero.full_state import gradient_state, parameter_state
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.plan import words as plan_words
from manyhands.task import Callback, Task

RTOL = {torch.float64: 1e-12, torch.float32: 1e-5}  # same numbers up to the order of summation
EMBEDDED = "embedded"  # this file exists if the model has embeddings


@dataclasses.dataclass
class Deviation:
    """Deviation from one process: the largest relative difference of each kind."""

    loss: float
    gradient: float
    parameter: float
    by_module: dict[str, float]
    rtol: float
    noise: list[str] = dataclasses.field(default_factory=list)  # parameters that were left out

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.parameter)

    @property
    def equal(self) -> bool:
        return self.largest <= self.rtol


class Record(Callback):
    """Recording callback: saves loss and merged gradient of every step, and the last parameters.

    `gradients`: whether ranks merge gradients, so that these can be compared.
    """

    def __init__(self, folder: str, gradients: bool):
        self.folder, self.gradients = folder, gradients
        self.kept: Tensors = {}

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        if self.gradients:
            self._keep_gradients(run, round, loss)

    def on_end(self, run: Any) -> None:
        with run.trainer.merged():
            replica = run.trainer.replica
            values = (
                parameter_state(replica.flat)
                if isinstance(replica.flat, ShardedParameters)
                else {p.name: p.value for p in replica.flat.views}
            )
            self._keep(run, "parameter", values)
        save_file(self.kept, f"{self.folder}/rank-{run.rank}.safetensors")

    def _keep_gradients(self, run: Any, round: int, loss: Tensor) -> None:
        replica = run.trainer.replica
        self.kept[f"loss/{round}"] = torch.tensor(
            [float(loss) * replica.own_count, replica.own_count], dtype=torch.float64
        )
        if replica.updates_slice:
            run.trainer.context.data_group.all_gather(replica.flat.grads).wait()
        if isinstance(replica.flat, ShardedParameters):
            self._keep(run, f"gradient/{round}", gradient_state(replica.flat))
            return
        grads: Tensors = {}
        for view, used in zip(replica.flat.views, replica.flat.used.tolist(), strict=True):
            if (
                used
                and (grad := view.grad if replica.updates_slice else view.parameter.grad)
                is not None
            ):
                grads[view.name] = grad
        self._keep(run, f"gradient/{round}", grads)

    def _keep(self, run: Any, kind: str, values: Tensors) -> None:
        group = run.trainer.replica.replica_group
        values = {k: v.detach().contiguous() for k, v in values.items()}
        if group is not None:  # the slices of all ranks of a split model
            values = group.gather(values)
        if run.rank == 0:
            self.kept |= {f"{kind}/{k}": v.clone() for k, v in values.items()}


def verify(script: Path, words: list[str], steps: int = 5, float32: bool = False) -> bool:
    """Print the comparison and return whether the plan equals one process."""
    if not defines_task(script):
        raise PlanError(
            f"{script} defines no task(), which verify needs to run it twice; "
            "wrap model, data and optimizer into task()"
        )
    plan = plan_words.parse(words)
    deviation = compare(functools.partial(_task, str(script)), plan, steps, float32)
    print(f"{plan_words.describe(plan)}")
    print(
        f"{steps} steps on {plan.layout.size} ranks against one process, "
        f"in {'float32' if float32 else 'float64'}: largest relative deviation of"
    )
    if plan.strategy.replicas_agree:
        print(f"  loss        {deviation.loss:.2e}")
        print(f"  gradients   {deviation.gradient:.2e}")
    else:
        print(
            f"  (loss and gradients differ between ranks under merge={plan.merge}; "
            "only the merged model is compared)"
        )
    print(f"  parameters  {deviation.parameter:.2e}")
    if deviation.noise:
        print(f"not compared, gradient zero except for rounding: {', '.join(deviation.noise)}")
    if deviation.equal:
        print(f"EQUAL up to the order of summation (bound {deviation.rtol:g})")
        return True
    print(f"DIFFERENT: more than {deviation.rtol:g}. By module, largest first:")
    for name, value in sorted(deviation.by_module.items(), key=lambda kv: -kv[1]):
        print(f"  {value:.2e}  {name or '(top)'}")
    if plan.merge != "all_reduce" or plan.codec is not None:
        print(
            "this merge strategy or this compression changes the method on purpose; it equals one "
            "process only in special cases (merge.period=1 with plain SGD, say): see "
            "docs/strategies"
        )
    if plan.strategy.link is Store and plan.strategy != StaleSync(staleness=0):
        print(
            f"merge={plan.merge} over servers lets ranks compute on models of different age; "
            "staleness=0 waits for all and equals one process"
        )
    if plan.batchnorm == "local":
        print(
            "batchnorm=local uses statistics of each rank's own batch, which is another "
            "computation; batchnorm=sync equals one process"
        )
    return False


def compare(make: Callable[[], Task] | Task, plan: Plan, steps: int, float32: bool) -> Deviation:
    later: dict[str, Any] = {"then": None, "next_strategy": None, "at": None, "until": None}
    common = dataclasses.replace(
        plan, precision="fp32", epochs=None, steps=steps, save="off", compile=False, **later
    )
    if plan.then is not None:
        print(
            f"a few steps do not reach then={plan.then}: only merge={plan.merge} is compared",
            file=sys.stderr,
        )
    if plan.precision != "fp32" or plan.compile:
        print(
            "precision and compile change rounding, not the method: the comparison leaves them out",
            file=sys.stderr,
        )
    plain: dict[str, Any] = {
        "merge": "all_reduce",
        "strategy": AllReduce(),
        "compress": "none",
        "codec": None,
        "algorithm": "native",
    }
    with tempfile.TemporaryDirectory(prefix="manyhands-verify-") as folder:
        options = Options(name="verify", float64=not float32)
        gradients = plan.strategy.replicas_agree
        ours = _run(make, common, options, gradients, Path(folder) / "plan")
        # with embeddings the rows stay on servers; else one process has all parameters itself
        if not (Path(folder) / "plan" / EMBEDDED).exists():
            plain |= {
                f.name: f.default
                for f in dataclasses.fields(Plan)
                if f.name in plan_words.SERVER_WORDS
            }
        whole: dict[str, Any] = {
            k: Plan.__dataclass_fields__[k].default for k in plan_words.AXIS_WORDS
        }
        # one process has all columns
        order = "shuffled" if plan.split == "by_feature" else plan.split
        # micro: the same micro-batches, because BatchNorm sees them one by one
        alone = dataclasses.replace(
            common,
            layout=Layout(),
            link="auto",
            split=order,
            micro=micro_batches(plan),
            **whole,
            **plain,
        )
        # the batch of the one process is the global batch of all ranks
        feeds = plan.layout.data * plan.layout.shard
        theirs = _run(
            make,
            alone,
            dataclasses.replace(options, stands_for=feeds),
            gradients,
            Path(folder) / "alone",
        )
        return _deviation(ours, theirs, RTOL[torch.float32 if float32 else torch.float64])


def _run(
    make: MakeTask, plan: Plan, options: Options, gradients: bool, folder: Path
) -> list[Tensors]:
    folder.mkdir()
    options = dataclasses.replace(
        options,
        directory=str(folder / "run"),
        quiet=True,
        callbacks=(Record(str(folder), gradients),),
    )
    body = functools.partial(work, functools.partial(_without_dropout, make, folder))
    start(body, plan, options)
    return [load_file(folder / f"rank-{r}.safetensors") for r in range(plan.layout.size)]


def _task(script: str) -> Task:
    made = load_task(script)
    return made if isinstance(made, Task) else made()


def _without_dropout(make: MakeTask, folder: Path | None = None) -> Task:
    """The task without dropout, which draws other random numbers on every rank.

    A file in `folder` says whether the model has embeddings: the task is made once for each run,
    and making it once more only to look at its model could draw from its random numbers.
    """
    task = make if isinstance(make, Task) else make()
    model = task.model if isinstance(task.model, nn.Module) else task.model()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            # nn.MultiheadAttention and others keep a number
            setattr(module, "dropout", 0.0)  # noqa: B010
    if folder is not None and embeddings(model):
        (folder / EMBEDDED).touch()
    return dataclasses.replace(task, model=model)


def _deviation(ours: list[Tensors], alone: list[Tensors], rtol: float) -> Deviation:
    rounds = sorted(k for k in alone[0] if k.startswith("loss/"))
    loss = max(
        (_relative(_mean([o[k] for o in ours]), _mean([a[k] for a in alone])) for k in rounds),
        default=0.0,
    )
    noise = _noise(alone[0])
    worst = {"gradient": 0.0, "parameter": 0.0}
    by_module: dict[str, float] = {}
    for key in sorted(set(alone[0]) | set(ours[0])):
        kind, name = key.partition("/")[0], _name(key)
        if kind == "loss" or name in noise:
            continue
        value = float("inf")
        if key in ours[0] and key in alone[0]:
            mine, theirs = ours[0][key], alone[0][key]
            if kind == "parameter" and (quiet := _quiet(name, alone[0], ours[0])) is not None:
                mine = torch.where(quiet, theirs, mine)
            value = _relative(mine, theirs)
        worst[kind] = max(worst[kind], value)
        module = name.rpartition(".")[0]
        by_module[module] = max(by_module.get(module, 0.0), value)
    return Deviation(loss, worst["gradient"], worst["parameter"], by_module, rtol, sorted(noise))


def _noise(kept: Tensors) -> set[str]:
    """Parameters whose gradient is zero except for rounding (a bias before BatchNorm).

    They are not compared: optimizers that divide by the gradient's size amplify the rounding.
    """
    largest = _largest(kept)
    bound = max(largest.values(), default=0.0) * 1e3 * _eps(kept)
    return {name for name, value in largest.items() if 0 < value < bound}


def _quiet(name: str, *runs: Tensors) -> Tensor | None:
    """The elements of a parameter whose gradient is zero except for rounding.

    An example is the third of a fused bias that belongs to the keys: softmax does not depend on it.
    """
    rounds = [
        kept[k].abs()
        for kept in runs
        for k in kept
        if k.startswith("gradient/") and _name(k) == name
    ]
    if not rounds:
        return None
    largest = torch.stack(rounds).amax(0)
    return (largest > 0) & (largest < max(_largest(runs[0]).values()) * 1e3 * _eps(runs[0]))


def _largest(kept: Tensors) -> dict[str, float]:
    """By parameter: the largest entry of its gradients."""
    largest: dict[str, float] = {}
    for key, value in kept.items():
        if key.startswith("gradient/") and value.numel():
            largest[_name(key)] = max(largest.get(_name(key), 0.0), float(value.abs().max()))
    return largest


def _eps(kept: Tensors) -> float:
    return max(
        (torch.finfo(v.dtype).eps for k, v in kept.items() if k.startswith("gradient/")),
        default=0.0,
    )


def _name(key: str) -> str:
    """The parameter of "gradient/<round>/<parameter>" and "parameter/<parameter>"."""
    return key.split("/", 2)[2] if key.startswith("gradient/") else key.partition("/")[2]


def _mean(pairs: list[Tensor]) -> Tensor:
    total = torch.stack(pairs).sum(0)
    return total[0] / total[1]


def _relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the tensor's largest entry: single tiny entries do not matter."""
    if a.numel() == 0:
        return 0.0
    scale = float(b.abs().max())
    difference = float((a - b).abs().max())
    if difference != difference:
        return float("inf")
    return difference / scale if scale else difference
