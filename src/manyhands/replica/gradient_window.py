"""Gradient window: collects the gradients of one step's micro-batches in flat vectors.

    start -> backward passes -> end -> merge -> place -> optimizer step

Where optimizers are named, a step of one of them collects, exchanges and places the gradients of
its own parameters alone.

While the last backward pass runs, a hook on every parameter copies its gradient into the flat
vector. As soon as all gradients of a bucket are there, the bucket goes to the strategy, in the same
order on every rank, so that its exchange overlaps the rest of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from manyhands.core import OnReady, Tensors
from manyhands.errors import TaskError
from manyhands.replica.parameters import ReplicaParameters
from manyhands.replica.update import Update


class GradientWindow:
    """The micro-batches of one step.

    `on_first` is called after the first window, of each optimizer where several step apart, with
    the names of parameters that had no gradient in it, and how many could have had one. `frozen`:
    parameters that must not want a gradient.
    """

    def __init__(
        self,
        flat: ReplicaParameters,
        overlap: bool,
        frozen: Sequence[nn.Parameter],
        on_first: Callable[[list[str], int], None],
    ):
        self.flat, self.overlap, self._frozen = flat, overlap, frozen
        self._on_first = on_first
        self._looked: set[str | None] = set()  # the optimizers whose first window is over
        self._optimizer: str | None = None  # which one this window is for; None: all
        every = range(len(flat.views)), range(len(flat.buckets))
        # by optimizer: its views and its buckets
        self._of: dict[str | None, tuple[Sequence[int], Sequence[int]]] = {None: every}
        for name in {view.optimizer for view in flat.views} - {None}:
            views = [i for i in every[0] if flat.views[i].optimizer == name]
            buckets = [b for b in every[1] if flat.buckets[b].views[0] in views]
            self._of[name] = views, buckets
        self.on_ready: OnReady | None = None  # set while the last backward pass runs
        self.used = [False] * len(flat.views)  # by this rank, in this window
        # the gradient has been moved from the parameter to the flat vector
        self.in_flat = [False] * len(flat.views)
        self.is_mean = False  # the flat vector holds the mean gradient of this window, clipped
        self._bucket_of = {i: b for b, bucket in enumerate(flat.buckets) for i in bucket.views}
        self._buckets: Sequence[int] = every[1]  # to be exchanged in this window, in order
        self._missing: dict[int, int] = {}  # of each of them: gradients that have not arrived yet
        self._launched = 0  # buckets handed to `on_ready`
        self._left: list[int | None] = []  # version of each gradient after a backward pass
        self._hooks = []
        if not flat.collects_gradients:
            self._hooks = [
                view.parameter.register_post_accumulate_grad_hook(self._hook(i))
                for i, view in enumerate(flat.views)
            ]

    def close(self) -> None:
        """Remove the hooks: a hook and its parameter refer to each other and keep both alive."""
        for hook in self._hooks:
            hook.remove()
        self.flat.close()

    def start(self) -> None:
        """Before the first forward pass of a step."""
        if any(p.requires_grad for p in self._frozen):
            raise TaskError(
                "a parameter that was frozen when training started wants a gradient now, which is "
                "not supported; start with requires_grad=True and a learning rate of 0 for it"
            )
        self.flat.take_back()
        for i, view in enumerate(self.flat.views):
            view.parameter.grad = None
            self.used[i] = self.in_flat[i] = False
        self.flat.start_window(self.overlap)
        self.choose(None)
        self._launched = 0
        self.is_mean = False
        self._left = []

    def choose(self, optimizer: str | None) -> None:
        """Before the first backward pass: the optimizer that steps by this window's gradients."""
        self._optimizer, self._buckets = optimizer, self._of[optimizer][1]
        self._missing = {b: len(self.flat.buckets[b].views) for b in self._buckets}

    @property
    def views(self) -> Sequence[int]:
        """The views that get a gradient in this window."""
        return self._of[self._optimizer][0]

    @property
    def merged(self) -> bool:
        """Whether the gradients are in the flat vectors, where a strategy can merge them."""
        return self.in_flat[self.views[0]]

    @property
    def grads(self) -> Tensors:
        """The flat vectors of this window's gradients."""
        if self._optimizer is None:
            return self.flat.grads
        vectors = dict.fromkeys(self.flat.views[i].vector for i in self.views)
        return {k: self.flat.grads[k] for k in vectors}

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss`, for the parameters of this window alone."""
        if self._optimizer is None:
            loss.backward()
            return
        given = [self.flat.views[i].parameter for i in self.views]
        loss.backward(inputs=[p for p in given if p.requires_grad])

    def check_untouched(self) -> None:
        """User code has run: what it does to gradients would be lost, or would lose others."""
        if self.flat.collects_gradients:
            return
        for i, view in enumerate(self.flat.views):
            grad = view.parameter.grad
            if not self._left and grad is not None:
                raise TaskError(
                    f"{view.name} has a gradient before backward of the loss that was returned: "
                    "step= has called backward itself; return the loss, with auxiliary losses "
                    "added to it"
                )
            if self._left and self._left[i] != (None if grad is None else grad._version):
                raise TaskError(
                    f"the gradient of {view.name} was cleared or changed between the micro-batches "
                    "of one step (zero_grad, p.grad = None), which loses those before; leave that "
                    "out, a step starts without gradients"
                )

    def left(self) -> None:
        """A backward pass is over that is not the step's last."""
        grads = (view.parameter.grad for view in self.flat.views)
        self._left = [None if g is None else g._version for g in grads]

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        view, bucket = self.flat.views[i], self._bucket_of[i]

        def hook(parameter: Tensor) -> None:
            if self.on_ready is None:
                return
            assert parameter.grad is not None
            if self.in_flat[i]:
                raise TaskError(
                    f"{view.name} got its gradient twice in one backward pass, after the first "
                    "part was sent; use torch.utils.checkpoint with use_reentrant=False"
                )
            view.grad.copy_(parameter.grad)
            parameter.grad = None
            self.used[i] = self.in_flat[i] = True
            self._missing[bucket] -= 1
            while (
                self.overlap
                and self._launched < len(self._buckets)
                and self._missing[self._buckets[self._launched]] == 0
            ):  # in order on every rank
                ready = self.flat.buckets[self._buckets[self._launched]]
                self._launched += 1
                self.on_ready({ready.name: ready.grad})

        return hook

    def end(self, count: int, used: list[bool] | None = None) -> None:
        """After the last backward pass: write `count` and which parameters were used.

        `used`: of the whole replica, where its ranks have already summed the gradient.
        """
        self.flat.take_back()  # a user's own loop runs since the start of the window
        if used is not None:
            self.used, self.in_flat = used, [True] * len(used)
        for i, view in enumerate(self.flat.views):
            self.used[i] = self.used[i] or view.parameter.grad is not None
        self.flat.count[0].fill_(count)
        if all(self.used):
            self.flat.used.fill_(1.0)
        else:
            self.flat.used.copy_(torch.tensor(self.used, dtype=torch.float32))
        if self._optimizer not in self._looked and count:
            self._looked.add(self._optimizer)
            unused = [self.flat.views[i].name for i in self.views if not self.used[i]]
            self._on_first(unused, len(self.views))

    def launch_rest(self, on_ready: OnReady) -> None:
        """Hand over the buckets that were not complete before backward ended."""
        self.gather()
        for b in self._buckets[self._launched :]:
            on_ready({self.flat.buckets[b].name: self.flat.buckets[b].grad})

    def gather(self) -> None:
        """Move all gradients that are still with their parameters into the flat vectors."""
        for i in self.views:
            view = self.flat.views[i]
            if not self.in_flat[i]:
                if view.parameter.grad is None:
                    view.grad.zero_()
                else:
                    view.grad.copy_(view.parameter.grad)
                    view.parameter.grad = None
                self.in_flat[i] = True

    def place(self, update: Update) -> list[Tensor]:
        """Hand merged gradients to the optimizer's parameters and return them.

        A parameter that no rank used gets none, as in plain torch.
        """
        everything_used = all(self.used) or not self.merged
        return update.place(
            self.used if everything_used else [u > 0 for u in self.flat.used.tolist()], self.merged
        )
