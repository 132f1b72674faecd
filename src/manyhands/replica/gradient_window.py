"""Gradient window: collects the gradients of one step's micro-batches in flat vectors.

    start -> backward passes -> end -> merge -> place -> optimizer step

While the last backward pass runs, a hook on every parameter copies its gradient into the flat
vector. As soon as all gradients of a bucket are there, the bucket goes to the strategy, in the same
order on every rank, so that its exchange overlaps the rest of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from manyhands.core import OnReady
from manyhands.errors import TaskError
from manyhands.replica.parameters import ReplicaParameters
from manyhands.replica.update import Update


class GradientWindow:
    """The micro-batches of one step.

    `on_first` is called once, after the first window, with the names of parameters that had no
    gradient in it. `frozen`: parameters that must not want a gradient.
    """

    def __init__(
        self,
        flat: ReplicaParameters,
        overlap: bool,
        frozen: Sequence[nn.Parameter],
        on_first: Callable[[list[str]], None],
    ):
        self.flat, self.overlap, self._frozen = flat, overlap, frozen
        self._on_first: Callable[[list[str]], None] | None = on_first
        self.on_ready: OnReady | None = None  # set while the last backward pass runs
        self.used = [False] * len(flat.views)  # by this rank, in this window
        # the gradient has been moved from the parameter to the flat vector
        self.in_flat = [False] * len(flat.views)
        self.is_mean = False  # the flat vector holds the mean gradient of this window, clipped
        self._bucket_of = {i: b for b, bucket in enumerate(flat.buckets) for i in bucket.views}
        self._missing: list[int] = []  # for each bucket: gradients that have not arrived yet
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
        self._missing = [len(b.views) for b in self.flat.buckets]
        self._launched = 0
        self.is_mean = False
        self._left = []

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
                and self._launched < len(self._missing)
                and self._missing[self._launched] == 0
            ):  # in order on every rank
                ready = self.flat.buckets[self._launched]
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
        if self._on_first is not None and count:
            used_views = zip(self.flat.views, self.used, strict=True)
            self._on_first([view.name for view, is_used in used_views if not is_used])
            self._on_first = None

    def launch_rest(self, on_ready: OnReady) -> None:
        """Hand over the buckets that were not complete before backward ended."""
        self.gather()
        for bucket in self.flat.buckets[self._launched :]:
            on_ready({bucket.name: bucket.grad})

    def gather(self) -> None:
        """Move all gradients that are still with their parameters into the flat vectors."""
        for i, view in enumerate(self.flat.views):
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
        everything_used = all(self.used) or not self.in_flat[0]
        return update.place(
            self.used if everything_used else [u > 0 for u in self.flat.used.tolist()],
            self.in_flat[0],
        )
