"""Starting weights: parameters and buffers that a model begins with, from a file or a state dict.

    .safetensors                     tensors by name
    .pt .pth .bin .ckpt              what torch.save wrote; read without running code of the file
    a folder of Hugging Face's       model.safetensors or pytorch_model.bin, also in several files
    a run directory, a checkpoint    of manyhands: its merged model

Names may begin with what wrappers put in front of them ("module.", "_orig_mod.", "model."). What is
missing, unexpected or of another shape is refused in one message.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from manyhands.errors import CheckpointError, TaskError
from manyhands.recover.checkpoint import MANIFEST, NOTHING, TENSORS, find, read_manifest
from manyhands.recover.table_files import TABLES

# DataParallel and DDP, torch.compile, a LightningModule or a wrapper of one's own
PREFIXES = ("module.", "_orig_mod.", "model.")
# under which training scripts keep a model's tensors beside other things
WITHIN = ("state_dict", "model_state_dict", "model", "module", "net", "params", "ema")
SHOWN = 8  # names of each kind that a message lists
OURS = "model/"  # prefix of a model's tensors in a checkpoint


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a file, which is read when it is copied."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Weights:
    """Weights to start from: `Task(init=Weights("model.safetensors", skip="head.*"))`.

    `skip`: patterns of the model's names that keep the values the model was made with, such as a
    new head; the file may have them or not. `best`: of a run, the best checkpoint by a metric
    ("accuracy", "-loss") instead of the newest.
    """

    source: str | os.PathLike[str] | Mapping[str, Any]
    skip: str | Sequence[str] = ()
    best: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, nn.Module):
            raise TaskError(
                f"the weights are a {type(self.source).__name__}, but its state dict is needed: "
                "model.state_dict()"
            )
        if not isinstance(self.source, str | os.PathLike | Mapping):
            raise TaskError(
                f"the weights are a {type(self.source).__name__}, but a file, a directory or a "
                "state dict is needed"
            )

    def load_into(
        self,
        model: nn.Module,
        load: Callable[[Tensor, Callable[[], Tensor]], None] | None = None,
    ) -> None:
        """Copy the tensors into the model's own; or `load(own, read)` each."""
        saved = self._tensors()
        ours = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
        found = {name: tensor for name, tensor in saved.items() if name in ours}
        for name, tensor in saved.items():
            found.setdefault(_own_name(name, ours), tensor)
        skipped = self._skipped({**ours, **{_plain(name): None for name in found}}) & ours.keys()
        known = {k: v for k, v in found.items() if k in ours and k not in skipped}
        extra = [k for k in found if k not in ours and not self._matches(_plain(k))]
        shared = {ours[k].data_ptr() for k in known}  # tied weights are saved once
        missing = [
            k
            for k, v in ours.items()
            if k not in found and k not in skipped and not (v.numel() and v.data_ptr() in shared)
        ]
        other = [
            f"{k} (model {tuple(ours[k].shape)}, given {v.shape})"
            for k, v in known.items()
            if tuple(ours[k].shape) != v.shape
        ]
        if missing or extra or other:
            raise TaskError(self._refusal(model, missing, extra, other))
        with torch.no_grad():
            for name, tensor in known.items():
                if load is None:
                    ours[name].copy_(tensor.read())
                else:
                    load(ours[name], tensor.read)

    @property
    def named(self) -> str:
        return "a state dict" if isinstance(self.source, Mapping) else os.fspath(self.source)

    @property
    def has_tables(self) -> bool:
        """Whether it is a run of ours with rows of embeddings, which no file of tensors has."""
        if isinstance(self.source, Mapping) or not Path(self.source).is_dir():
            return False
        checkpoint = Path(self.source)
        if _is_run(checkpoint):
            checkpoint, _ = find(checkpoint, self.best, NOTHING)
        return (checkpoint / MANIFEST).is_file() and TABLES in read_manifest(checkpoint)

    def _tensors(self) -> dict[str, SavedTensor]:
        if self.best is not None and (isinstance(self.source, Mapping) or not _is_run(self.source)):
            raise TaskError(f"best={self.best!r} has no effect: {self.named} is no run directory")
        if isinstance(self.source, Mapping):
            return dict(_of_mapping(self.source, self.named))
        path = Path(self.source)
        if not path.exists():
            raise TaskError(f"the weights {path} do not exist; give a file or a directory")
        found = dict(_of_directory(path, self.best) if path.is_dir() else _of_file(path))
        if not found:
            raise TaskError(f"{path} holds no tensors of a model")
        return found

    def _matches(self, name: str) -> bool:
        given = [self.skip] if isinstance(self.skip, str) else self.skip
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in given)

    def _skipped(self, names: Mapping[str, Any]) -> set[str]:
        """Names that are left out; every pattern must say one."""
        given = [self.skip] if isinstance(self.skip, str) else self.skip
        for pattern in given:
            if not fnmatch.filter(names, pattern):
                raise TaskError(
                    f"skip={pattern!r} has no effect: neither the model nor the weights have such "
                    f"a name; they have {_listed(list(names))}"
                )
        return {name for name in names if self._matches(name)}

    def _refusal(
        self, model: nn.Module, missing: list[str], extra: list[str], other: list[str]
    ) -> str:
        lines = [f"{self.named} does not fit {type(model).__name__}:"]
        for what, names in (
            ("only in the model", missing),
            ("only in the weights", extra),
            ("of another shape", other),
        ):
            if names:
                lines.append(f"  {what}: {_listed(names)}")
        tops = sorted({name.partition(".")[0] for name in (*missing, *other)})
        do = f'mh.Weights(..., skip="{tops[0]}*") leaves such parts as the model makes them'
        return "\n".join([*lines, do if tops else "give a model that has them"])


def _own_name(name: str, ours: Mapping[str, Any]) -> str:
    """A saved name as the model has it: without prefixes of wrappers."""
    stripped = name
    while stripped not in ours:
        prefix = next((p for p in PREFIXES if stripped.startswith(p)), None)
        if prefix is None:
            return name
        stripped = stripped.removeprefix(prefix)
    return stripped


def _plain(name: str) -> str:
    """A saved name without any prefix of wrappers."""
    while (prefix := next((p for p in PREFIXES if name.startswith(p)), None)) is not None:
        name = name.removeprefix(prefix)
    return name


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _is_run(source: Any) -> bool:
    return (Path(source) / "checkpoints").is_dir()


# -- files --


def _of_directory(path: Path, best: str | None) -> Iterator[tuple[str, SavedTensor]]:
    if _is_run(path):
        checkpoint, _ = find(path, best, NOTHING)
        yield from _of_checkpoint(checkpoint)
    elif (path / MANIFEST).is_file() and (path / TENSORS).is_file():
        yield from _of_checkpoint(path)
    else:
        files = _hugging_face(path)
        if not files:
            raise TaskError(
                f"{path} is a directory without weights: a run directory, a checkpoint, or a "
                "folder with model.safetensors or pytorch_model.bin is needed"
            )
        for file in files:
            yield from _of_file(file)


def _of_checkpoint(path: Path) -> Iterator[tuple[str, SavedTensor]]:
    for name, tensor in _of_safetensors(path / TENSORS):
        if name.startswith(OURS):
            yield name.removeprefix(OURS), tensor


def _hugging_face(path: Path) -> list[Path]:
    """The files of a folder that transformers has saved."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (index := path / f"{name}.index.json").is_file():
            try:
                files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError) as e:
                raise TaskError(f"{index} is no index of weights ({e})") from e
            if gone := [file for file in files if not (path / file).is_file()]:
                raise TaskError(f"{index} names {gone[0]}, which is not there")
            return [path / file for file in files]
        if (path / name).is_file():
            return [path / name]
    return []


def _of_file(path: Path) -> Iterator[tuple[str, SavedTensor]]:
    if path.suffix == ".safetensors":
        yield from _of_safetensors(path)
    elif path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        yield from _of_mapping(_unpickled(path), str(path))
    else:
        raise TaskError(
            f"{path} has no ending of weights; .safetensors, .pt, .pth, .bin or .ckpt is needed"
        )


def _of_safetensors(path: Path) -> Iterator[tuple[str, SavedTensor]]:
    try:
        file = safetensors.safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 (not a dict)
            shape = tuple(file.get_slice(name).get_shape())
            yield name, SavedTensor(shape, functools.partial(file.get_tensor, name))
    except (OSError, safetensors.SafetensorError) as e:
        raise CheckpointError(f"{path} cannot be read ({e})") from e


def _unpickled(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # of torch before 1.6, which cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as e:
        said = str(e).split("\n")[0]
        raise TaskError(
            f"{path} cannot be read as tensors alone ({said:.160}); save model.state_dict(), not "
            "the model"
        ) from e


def _of_mapping(given: Any, named: str) -> Iterator[tuple[str, SavedTensor]]:
    """The tensors of a state dict, which may be an entry of what a training script saved."""
    if isinstance(given, Mapping):
        if not any(isinstance(v, Tensor) for v in given.values()):
            inner = next((given[k] for k in WITHIN if isinstance(given.get(k), Mapping)), given)
            if inner is not given:
                yield from _of_mapping(inner, named)
                return
        found = [(k, v) for k, v in given.items() if isinstance(v, Tensor)]
        for name, tensor in found:
            yield name, SavedTensor(tuple(tensor.shape), tensor.detach)
        if found:
            return
    raise TaskError(f"{named} holds no tensors by name; give a model's state_dict()")
