"""Comparison of a plan with one process: run the task under both, record both, measure."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyhands.assembly.rank_context import Options, micro_batches
from manyhands.cli.verify.deviation import Deviation, measure
from manyhands.cli.verify.random_rounding import RandomRounding
from manyhands.core import Layout, Plan, Tensors
from manyhands.embedding.tables import embeddings
from manyhands.entry import MakeTask, load_task, start, work
from manyhands.errors import Diverged, LaunchError
from manyhands.merge.all_reduce import AllReduce
from manyhands.parallel.zero.full_state import gradient_state, parameter_state
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.plan import words as plan_words
from manyhands.task import Callback, Task
from manyhands.task_forms.named_parts import made_model

RTOL = {torch.float64: 1e-12, torch.float32: 1e-5}  # same numbers up to the order of summation
EMBEDDED = "embedded"  # this file exists if the model has embeddings
ROUNDED_RUNS = 3  # their largest deviation counts


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


def compare(make: MakeTask, plan: Plan, steps: int, float32: bool) -> Deviation:
    """Run a few steps under the plan and on one process. Only where the two are further apart than
    orders of summation are, the one process runs again, under random rounding."""
    common = _comparable(plan, steps)
    with tempfile.TemporaryDirectory(prefix="manyhands-verify-") as name:
        folder = Path(name)
        options = Options(name="verify", float64=not float32)
        gradients = plan.strategy.replicas_agree
        ours = recorded(make, common, options, gradients, folder / "plan")
        # as it was run: BatchNorm may have wanted fewer micro-batches
        micro = plan_words.parse([str(folder / "plan" / "run" / "plan.toml")]).micro
        plan = dataclasses.replace(plan, micro=micro)
        alone = _one_process(common, plan, (folder / "plan" / EMBEDDED).exists())
        # the batch of the one process is the global batch of all ranks
        feeds = plan.layout.data * plan.layout.shard
        options = dataclasses.replace(options, stands_for=feeds)
        theirs = recorded(make, alone, options, gradients, folder / "alone")
        rtol = RTOL[torch.float32 if float32 else torch.float64]
        deviation = measure(ours, theirs, rtol)
        rounded: list[list[Tensors]] = []
        for seed in range(ROUNDED_RUNS):
            if deviation.equal or (rounded and deviation.unexplained):
                break
            rounding = RandomRounding(seed)
            around = dataclasses.replace(options, around_round=rounding)
            run = _rounded_run(make, alone, around, gradients, folder / f"rounded-{seed}")
            if run is None:
                break
            rounded.append(run)
            deviation = measure(ours, theirs, rtol, rounded)
            deviation.computes_in = rounding.coarsest
        return deviation


def _comparable(plan: Plan, steps: int) -> Plan:
    """The plan for a few steps, without what changes rounding or comes later."""
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
    later: dict[str, Any] = {"then": None, "next_strategy": None, "at": None, "until": None}
    later["log"] = None
    return dataclasses.replace(
        plan, precision="fp32", epochs=None, steps=steps, save="off", compile=False, **later
    )


def _one_process(common: Plan, plan: Plan, embedded: bool) -> Plan:
    """The plan of the reference run."""
    plain: dict[str, Any] = {
        "merge": "all_reduce",
        "strategy": AllReduce(),
        "compress": "none",
        "codec": None,
        "algorithm": "native",
    }
    # with embeddings the rows stay on servers; else one process has all parameters itself
    if not embedded:
        plain |= {
            f.name: f.default for f in dataclasses.fields(Plan) if f.name in plan_words.SERVER_WORDS
        }
    plain |= {k: Plan.__dataclass_fields__[k].default for k in plan_words.AXIS_WORDS}
    return dataclasses.replace(
        common,
        layout=Layout(),
        link="auto",
        # one process has all columns
        split="shuffled" if plan.split == "by_feature" else plan.split,
        # the same micro-batches, because BatchNorm sees them one by one
        micro=micro_batches(plan),
        **plain,
    )


def _rounded_run(
    make: MakeTask, plan: Plan, options: Options, gradients: bool, folder: Path
) -> list[Tensors] | None:
    """The reference under random rounding; None, with the reason printed, where it fails."""
    try:
        run = recorded(make, plan, options, gradients, folder)
        if not all(v.isfinite().all() for kept in run for v in kept.values()):
            raise Diverged("a result became NaN or infinite")
    except LaunchError:  # stopped by a signal
        raise
    except Exception as e:  # whatever the model does with numbers that are not quite what it made
        print(
            "how far rounding moves this model could not be measured "
            f"({type(e).__name__}: {e}); the bound stays as it is",
            file=sys.stderr,
        )
        return None
    return run


def recorded(
    make: MakeTask, plan: Plan, options: Options, gradients: bool, folder: Path
) -> list[Tensors]:
    folder.mkdir()
    options = dataclasses.replace(
        options,
        directory=str(folder / "run"),
        quiet=True,
        callbacks=(Record(str(folder), gradients),),
    )
    body = functools.partial(work, functools.partial(without_dropout, make, folder))
    start(body, plan, options)
    return [load_file(folder / f"rank-{r}.safetensors") for r in range(plan.layout.size)]


def script_task(script: str) -> Task:
    """The task of a script, which may import its neighbours, as under `manyhands run`."""
    if (folder := str(Path(script).resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    made = load_task(script)
    return made if isinstance(made, Task) else made()


def without_dropout(make: MakeTask, folder: Path | None = None) -> Task:
    """The task without dropout, which draws other random numbers on every rank.

    A file in `folder` says whether the model has embeddings: the task is made once for each run,
    and making it once more only to look at its model could draw from its random numbers.
    """
    task = make if isinstance(make, Task) else make()
    if isinstance(task.model, nn.Module | Mapping):
        model = made_model(task.model)
        if isinstance(make, Task):
            model = copy.deepcopy(model)  # this run trains it; the next one starts from the same
        return dataclasses.replace(task, model=_without_dropout(model, folder))
    given = task.model  # a function, which ranks may call in their own way
    return dataclasses.replace(task, model=lambda: _without_dropout(made_model(given), folder))


def _without_dropout(model: nn.Module, folder: Path | None) -> nn.Module:
    if not isinstance(model, nn.Module):
        return model  # refused where it is built
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            # nn.MultiheadAttention and others keep a number
            setattr(module, "dropout", 0.0)  # noqa: B010
    if folder is not None and embeddings(model):
        (folder / EMBEDDED).touch()
    return model
