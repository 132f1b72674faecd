"""Block gather: a block's parameters are gathered before each of its passes, and released after.

    forward     gather(k); start gather(k + 1); run k; release k
    backward    gather(k); start gather(k - 1); run k; release k; its gradient is sent to the owners

A parameter is the same object all the time. Only its memory comes and goes, and views of it that
autograd keeps come back with it; without memory it reads as NaN, in its shape. The order of the
last forward pass says which gather starts next, and the gradients of the block's inputs say when
its own gradients are complete: the same on all ranks, whatever parameters each has used. Code that
reads a parameter outside its block (a functional use, a call that goes around the model's own
forward) gets the block gathered at that moment, until the pass is over. The root's parameters stay
from its forward pass to the end of the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands.core import Group, Work
from manyhands.parallel.zero.blocks import Block
from manyhands.parallel.zero.span_memory import keep_slice
from manyhands.parallel.zero.spans import Span
from manyhands.replica.deferred.unmade import place


class BlockGather:
    """Gathers and releases `blocks`, the root first. `send` gets a span whose gradients are
    complete; `at_peak` is called when memory was allocated. `prefetch`: start the gather of the
    next block while one runs."""

    def __init__(
        self,
        module: nn.Module,
        blocks: list[Block],
        group: Group,
        send: Callable[[Span], None],
        at_peak: Callable[[], None],
        prefetch: bool = True,
    ):
        self.module, self.blocks, self.group = module, blocks, group
        self._send, self._at_peak, self._prefetch = send, at_peak, prefetch
        self.on_read = False  # reading a parameter may gather its block: all ranks run the model
        self._pending: dict[Block, list[Work]] = {}
        self._order: list[Block] = []  # blocks in the order of this forward pass
        self._next: dict[Block, Block] = {}  # of the last forward pass
        self._previous: dict[Block, Block] = {}
        self._last: Block | None = None
        self._backward = False  # a backward pass is running
        self._views: dict[int, Tensor] = {}  # parameter -> its view of the gathered span
        self._released: dict[int, Tensor] = {}  # parameter -> its value without memory
        self._hooks: list[Any] = []
        self._plain: list[tuple[nn.Module, dict[str, Any]]] = []
        for block in blocks:
            self._shard(block)
            self._hooks += [
                block.module.register_forward_pre_hook(
                    self._before_forward(block), with_kwargs=True
                ),
                block.module.register_forward_hook(
                    self._after_forward(block), with_kwargs=True, always_call=False
                ),
            ]
        of = {id(e.parameter): block for block in blocks for s in block.spans for e in s.entries}
        for part in module.modules():
            mine = {
                n: of[id(p)] for n, p in part._parameters.items() if p is not None and id(p) in of
            }
            if mine:
                self._plain.append((part, part._parameters))
                part.__dict__["_parameters"] = _ParametersOnRead(part._parameters, mine, self)

    def close(self) -> None:
        """Leave the module as a plain one, with all parameters released."""
        self.release_all()
        for hook in self._hooks:
            hook.remove()
        for part, plain in self._plain:
            part.__dict__["_parameters"] = plain

    def _shard(self, block: Block) -> None:
        """From whole parameters to this rank's slices, one by one: memory holds one of them twice,
        and of those that are unmade one as a whole."""
        for span in block.spans:
            device = span.value.device
            for entry in span.entries:
                keep_slice(span, entry)
            span.full = torch.empty(span.length, dtype=span.gather_dtype, device=device)
            for entry in span.entries:
                nothing = float("nan") if span.gather_dtype.is_floating_point else 0
                self._released[id(entry.parameter)] = torch.full(
                    (), nothing, dtype=span.gather_dtype, device=span.full.device
                ).expand(entry.shape)
                self._views[id(entry.parameter)] = span.view(span.full, entry)
                place(entry.parameter, self._released[id(entry.parameter)])
            span.full.untyped_storage().resize_(0)

    # -- gather and release --

    def start_gather(self, block: Block) -> None:
        if block.gathered or block in self._pending:
            return
        works = []
        for span in block.spans:
            span.full.untyped_storage().resize_(span.full.nbytes)
            span.full[span.own].copy_(span.value)
            works.append(self.group.all_gather({span.key: span.full}))
        self._pending[block] = works
        self._at_peak()

    def gather(self, block: Block) -> None:
        if block.gathered:
            return
        self.start_gather(block)
        for work in self._pending.pop(block):
            work.wait()
        for span in block.spans:
            for entry in span.entries:
                entry.parameter.data = self._views[id(entry.parameter)]
        block.gathered = True
        if not self._backward and (not self._order or self._order[-1] is not block):
            self._order.append(block)

    def release(self, block: Block) -> None:
        for work in self._pending.pop(block, ()):
            work.wait()
        for span in block.spans:
            for entry in span.entries:
                entry.parameter.data = self._released[id(entry.parameter)]
            span.full.untyped_storage().resize_(0)
        block.gathered = False

    def release_all(self) -> None:
        for block in self.blocks:
            if block.gathered or block in self._pending:
                self.release(block)

    def start(self) -> None:
        """Begin a step: release what the one before has left, also where its backward pass never
        came."""
        self.release_all()
        self._backward = False
        for block in self.blocks:
            block.uses, block.in_backward = 0, False
        self._order = []

    def finish(self) -> None:
        """End a backward pass: send the spans that are not sent yet, the last block first."""
        for block in reversed(self.blocks):
            for span in block.spans:
                if span.trains and (
                    not span.sent or any(e.parameter.grad is not None for e in span.entries)
                ):
                    self._send(span)
        self.start()

    # -- hooks --

    def _before_forward(self, block: Block) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if block is self.blocks[0] and not self._backward:
                self._order = []
            self.gather(block)
            if self._prefetch and not self._backward and block in self._next:
                self.start_gather(self._next[block])
            if self._backward or not torch.is_grad_enabled() or block is self.blocks[0]:
                return None
            return self._with_hooks(block, args, kwargs)

        return hook

    def _with_hooks(self, block: Block, args: Any, kwargs: Any) -> Any:
        """The same inputs, with a hook in the graph: when backward reaches it, the block's
        gradients are complete."""
        flat, shape = pytree.tree_flatten((args, kwargs))
        waiting = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
        if not waiting:
            return None
        block.uses += 1
        left = set(waiting)

        def reached(i: int) -> None:
            left.discard(i)
            if not left:
                self._leave_backward(block)

        for i in waiting:
            flat[i] = flat[i].view_as(flat[i])
            flat[i].grad_fn.register_hook(lambda *_, i=i: reached(i))
        return pytree.tree_unflatten(flat, shape)

    def _after_forward(self, block: Block) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            trains = torch.is_grad_enabled()
            if block is self.blocks[0]:
                if not self._backward:
                    self._note_order()
                    if not trains:
                        self.release_all()
                return
            # also where it is recomputed: a reentrant checkpoint runs backward through that
            if trains:
                for x in pytree.tree_leaves(outputs):
                    if isinstance(x, Tensor) and x.requires_grad:
                        x.register_hook(lambda grad: self._enter_backward(block))
                if block is self._last and not self._backward:
                    return  # backward begins with it
            if not block.in_backward:  # else it was only recomputed
                self.release(block)

        return hook

    def _note_order(self) -> None:
        order = [b for b in self._order if b is not self.blocks[0]]
        pairs = [(a, b) for a, b in itertools.pairwise(order) if a is not b]
        self._next, self._previous = dict(pairs), {b: a for a, b in pairs}
        if order:
            self._next[self.blocks[0]] = order[0]
            self._last = order[-1]

    def _enter_backward(self, block: Block) -> None:
        self._backward = True
        if block.in_backward and block.gathered:
            return
        block.in_backward = True
        self.gather(block)
        if self._prefetch and block in self._previous:
            self.start_gather(self._previous[block])

    def _leave_backward(self, block: Block) -> None:
        block.uses -= 1
        block.in_backward = False
        self.release(block)
        if block.uses == 0:
            for span in block.spans:
                if span.trains:
                    self._send(span)


class _ParametersOnRead(dict[str, Any]):
    """A module's parameters; reading one gathers its block."""

    def __init__(self, plain: dict[str, Any], blocks: dict[str, Block], gather: BlockGather):
        super().__init__(plain)
        self._blocks, self._gather = blocks, gather

    def __getitem__(self, name: str) -> Any:
        block = self._blocks.get(name)
        if block is not None and not block.gathered and self._gather.on_read:
            self._gather.gather(block)
        return super().__getitem__(name)
