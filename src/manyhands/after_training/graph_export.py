"""Graph export: a trained model as one file that runs without its Python code.

    .pt2     torch.export: torch.export.load(FILE).module()(*inputs)
    .onnx    ONNX, with its weights in the file

The inputs of one small batch of the task show how the model is called. The first dimension of what
has one row for each sample stays free. The graph is run on that batch, and on one of another size,
and its outputs are compared with the model's before the file takes its name.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from manyhands.assembly.evaluation.evaluator import Evaluation
from manyhands.embedding.tables import embeddings
from manyhands.errors import PlanError, TaskError
from manyhands.metrics.evaluation_pass import EvaluatedModel

SUFFIXES = (".onnx", ".pt2")
ONNX_PACKAGES = ("onnx", "onnxscript")
TOLERANCE = 1e-4  # of outputs, relative to the largest: runtimes order sums otherwise

Run = Callable[["Call"], Any]


@dataclass(frozen=True)
class Call:
    """How a task calls its model for one batch of `samples`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int

    @property
    def tensors(self) -> list[Tensor]:
        return [v for v in tree_flatten((self.args, self.kwargs))[0] if isinstance(v, Tensor)]

    def has_rows(self, value: Any) -> bool:
        """Whether it has one row for each sample."""
        return isinstance(value, Tensor) and value.ndim > 0 and len(value) == self.samples

    def first(self, n: int) -> Call:
        def cut(value: Any) -> Any:
            return value[:n].clone() if self.has_rows(value) else value

        args, kwargs = tree_map(cut, (self.args, self.kwargs))
        return Call(args, kwargs, n)

    def free(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Dimensions that the graph leaves open, in the form of arguments."""

        def open_rows(value: Any) -> Any:
            rows = self.samples > 1 and self.has_rows(value)
            return {0: torch.export.Dim.AUTO} if rows else None

        args, kwargs = tree_map(open_rows, (self.args, self.kwargs))
        return args, kwargs


@dataclass(frozen=True)
class ExportedGraph:
    """What was written."""

    file: Path
    samples: int | None  # that a batch must have; None: any number
    compared: bool  # whether the file itself was run


def check_out(out: Path, overwrite: bool = False) -> None:
    """Refuse a file that could not be written, before anything is loaded."""
    if out.suffix not in SUFFIXES:
        raise PlanError(
            f"{out}: the name's end says what is written; {' or '.join(SUFFIXES)} is needed, or "
            ".safetensors for the weights alone"
        )
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if out.suffix == ".onnx" and missing:
        raise PlanError(
            f"{out} needs the package {' and '.join(missing)}, which is not installed: "
            "pip install manyhands[onnx], or write a .pt2 file, which torch reads by itself"
        )
    if out.exists() and not overwrite:
        raise PlanError(f"{out} exists; give another name, or --overwrite (overwrite=True)")
    if not out.absolute().parent.is_dir():
        raise PlanError(f"{out}: there is no directory {out.absolute().parent}; make it first")


def export_graph(
    out: Path, evaluation: Evaluation, overwrite: bool, part: str | None
) -> ExportedGraph:
    check_out(out, overwrite)
    if evaluation.context.process.size > 1:
        raise PlanError("export is the work of one process; run it without data= and torchrun")
    if embeddings(_part(evaluation.module, part)):
        raise TaskError(
            "the rows of mh.Embedding are in tables beside the model, which no graph can hold; "
            "export a .safetensors file, or the part of the model that has none: --part NAME "
            "(part=NAME)"
        )
    model = evaluation.model()
    with model.evaluating(evaluation.context.device):
        module = _part(model.module, part)
        call = _call(evaluation, model, module, part)
        beside = out.with_name(f".{out.name}.writing-{os.getpid()}{out.suffix}")
        try:
            graph = _captured(module, call)
            run = _written(graph, call, beside)
            size = _checked(out, module, call, run or _runner(graph))
            beside.replace(out)
        finally:
            beside.unlink(missing_ok=True)
    return ExportedGraph(out, size, run is not None)


def _part(module: nn.Module, part: str | None) -> nn.Module:
    names = ", ".join(name for name, _ in module.named_children())
    if part is None:
        if isinstance(module, nn.ModuleDict):
            raise TaskError(
                f"the task has several models ({names}), and a file holds one; say which: "
                f"--part {names.partition(',')[0]}"
            )
        return module
    try:
        return module.get_submodule(part)
    except AttributeError:
        raise TaskError(f"the model has no part {part!r}; it has {names}") from None


def _call(
    evaluation: Evaluation, model: EvaluatedModel, module: nn.Module, part: str | None
) -> Call:
    """How the task calls `module` for its first batch."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    values, samples = next(evaluation.batches())
    task = evaluation.task
    assert task is not None
    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        if task.loss is not None or task.predict is not None:
            model.outputs(model.module, values)
        else:
            model.objective(model.module, values, samples)
    finally:
        hook.remove()
    if not calls:
        what = "the model" if part is None else f"its part {part!r}"
        raise TaskError(
            f"the task did not call {what} itself, so that nothing shows its inputs; give "
            "Task(predict=lambda model, batch: (model(...), target))"
        )
    args, kwargs = tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, calls[0])
    call = Call(args, kwargs, samples)
    return call.first(min(samples, 5))


def _captured(module: nn.Module, call: Call) -> Any:
    args, kwargs = call.free()
    try:
        named = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        return torch.export.export(
            copy.deepcopy(module), call.args, call.kwargs, dynamic_shapes=dict(named)
        )
    except Exception as e:
        why = str(e).strip().splitlines()
        raise TaskError(
            f"torch.export cannot capture {type(module).__name__} as a graph: "
            f"{type(e).__name__}: {why[0] if why else ''}; a branch or a loop that depends on "
            "values of tensors must be written with torch.where or torch.cond; the weights alone "
            "go into a .safetensors file"
        ) from e


def _runner(graph: Any) -> Run:
    module = graph.module()
    return lambda call: module(*call.args, **call.kwargs)


def _written(graph: Any, call: Call, file: Path) -> Run | None:
    """Write the graph; what runs the file, where this machine can."""
    if file.suffix == ".pt2":
        torch.export.save(graph, file)
        return _runner(torch.export.load(file))
    torch.onnx.export(graph, (), file, dynamo=True, external_data=False, verbose=False)
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    session = _onnx_session(file)
    asked = {each.name for each in session.get_inputs()}
    names = graph.graph_signature.user_inputs

    def run(call: Call) -> Any:
        values = zip(names, tree_flatten((call.args, call.kwargs))[0], strict=True)
        given = {name: value.numpy() for name, value in values if name in asked}
        return [torch.from_numpy(value) for value in session.run(None, given)]

    return run


def _checked(out: Path, module: nn.Module, call: Call, run: Run) -> int | None:
    """The number of samples that the graph is fixed to; None: it takes any."""
    _compare(out, module, call, run)
    if call.samples == 1:
        return 1
    other = call.first(call.samples - 1)
    expected = _tensors(module(*other.args, **other.kwargs))
    try:
        found = _tensors(run(other))
    except Exception:  # each runtime has errors of its own for a shape that it does not take
        return call.samples
    _refuse_apart(out, expected, found)
    return None


def _compare(out: Path, module: nn.Module, call: Call, run: Run) -> None:
    _refuse_apart(out, _tensors(module(*call.args, **call.kwargs)), _tensors(run(call)))


def _refuse_apart(out: Path, expected: list[Tensor], found: list[Tensor]) -> None:
    alike = len(expected) == len(found)
    for a, b in zip(expected, found, strict=False):
        largest = float(a.abs().max()) if a.is_floating_point() and a.numel() else 0.0
        near = TOLERANCE * max(1.0, largest)
        alike = alike and a.shape == b.shape and torch.allclose(a, b.to(a.dtype), TOLERANCE, near)
    if not alike:
        raise TaskError(
            f"{out} was not written: the graph gives other outputs than the model for the same "
            "inputs; a forward pass that draws random numbers or keeps values between calls has "
            "no graph"
        )


def _tensors(outputs: Any) -> list[Tensor]:
    return [v.detach().cpu() for v in tree_flatten(outputs)[0] if isinstance(v, Tensor)]


def _onnx_session(file: Path) -> Any:
    runtime = importlib.import_module("onnxruntime")
    return runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
