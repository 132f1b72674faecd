"""Activation checkpointing: blocks drop their activations and recompute them in backward.

Paper: Chen et al. 2016 (arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def recompute(module: nn.Module) -> list[str]:
    """Checkpoint the activations of a model's blocks, the members of its lists; their names.

    A model without lists is one block.
    """
    blocks = {
        name: m for name, m in module.named_modules() if name and _is_block(module, name, m)
    } or {"": module}
    for block in blocks.values():
        _wrap(block)
    return list(blocks)


def _is_block(root: nn.Module, name: str, module: nn.Module) -> bool:
    parent = root.get_submodule(name.rpartition(".")[0])
    return (
        isinstance(parent, CONTAINERS)
        and not isinstance(module, CONTAINERS)
        and next(module.children(), None) is not None
    )


def _wrap(block: nn.Module) -> None:
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return plain(*args, **kwargs)
        contexts = lambda: (nullcontext(), buffers_stay(block))
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = forward


@contextmanager
def buffers_stay(module: nn.Module) -> Iterator[None]:
    """Recomputation must not update running statistics a second time."""
    before = [(b, b.detach().clone()) for b in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # data: autograd must not see a change of the buffer
