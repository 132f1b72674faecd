"""Models to trace and cut, in float64 and without dropout, each with a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.parallel.pipeline.stage_modules import Stage
from support.paths import zoo_task


def zoo(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    task = zoo_task(name)
    return task.model, task.train[:-1]


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    made = pytest.importorskip("transformers")
    config = made.GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return made.GPT2LMHeadModel(config), (torch.randint(31, (8, 12)),)


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    made = pytest.importorskip("transformers")
    config = made.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return made.LlamaForCausalLM(config), (torch.randint(31, (8, 12)),)


class Skips(nn.Module):
    """What the first layer gives is needed by the last one, and by one between; a parameter of its
    own, a buffer, a size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.arange(6.0))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        first = self.a(x)
        y = self.b(first).relu_()
        y = self.c(y) * self.scale + first
        n, d = y.shape
        y = y.reshape(n * d // 6, 6) + self.shift
        if self.training:
            self.steps += 1
        return {"y": self.d(y) * first, "mean": y.mean() * weight.sum() / n}


def skips() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Skips(), (torch.randn(8, 6), torch.rand(8))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    **{name: lambda name=name: zoo(name) for name in ("mlp", "cnn", "gpt", "seq2seq")},
    "skips": skips,
    "gpt2": gpt2,
    "llama": llama,
}
# transformers takes seconds to load: one model of it is enough where nothing is changed that
# concerns them
QUICK_AND_SLOW = [
    pytest.param(name, marks=pytest.mark.slow) if name == "gpt2" else name for name in MODELS
]


def model(name: str, batch: int = 6) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """In float64, without dropout, so that two runs can be compared to the last digit."""
    torch.manual_seed(0)
    made, data = MODELS[name]()
    made.double()
    for part in made.modules():
        for word in ("dropout", "attention_dropout"):
            if isinstance(getattr(part, word, None), float):
                setattr(part, word, 0.0)
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return made, tuple(x[:batch].double() if x.is_floating_point() else x[:batch] for x in data)


def through(stages: Sequence[Stage], inputs: tuple[Any, ...]) -> Any:
    """One after the other, each given only what it says it takes and reads."""
    values: dict[str, Any] = {}
    for stage in stages:
        values = stage.forward(
            tuple(x if i in stage.inputs else None for i, x in enumerate(inputs)), values
        )
    return values["output"]


def loss(output: Any) -> Tensor:
    flat = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
    assert flat
    return sum(
        (t.sin() * torch.linspace(0.5, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in flat
    )  # type: ignore[return-value]


def same_as_whole(
    stages: Sequence[Stage], cut: nn.Module, inputs: tuple[Any, ...], training: bool
) -> None:
    """Outputs, gradients and buffers of `cut`, run stage by stage, are those of the whole model, to
    the last digit.
    """
    whole = copy.deepcopy(cut).train(training)
    for stage in stages:
        stage.module.train(training)
    cut.zero_grad()
    options = {"use_cache": False} if hasattr(whole, "generate") else {}
    wanted, got = whole(*inputs, **options), through(stages, inputs)
    assert type(got) is type(wanted)
    leaves = torch.utils._pytree.tree_leaves
    torch.testing.assert_close(leaves(got), leaves(wanted), rtol=0, atol=0)
    loss(wanted).backward()
    loss(got).backward()
    for name, parameter in whole.named_parameters():
        mine = cut.get_parameter(name)
        assert (mine.grad is None) == (parameter.grad is None), name
        if mine.grad is not None:
            # a value that several stages use collects its gradient in another order: the last digit
            # may differ
            torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-12, atol=1e-12, msg=name)
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffer, cut.get_buffer(name)), name
