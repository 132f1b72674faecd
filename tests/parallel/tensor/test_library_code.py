"""Libraries and habits under tensor parallelism: each runs on sharded values as on the whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.core import Group
from manyhands.errors import ManyhandsError, PlanError, TaskError
from manyhands.exchange.inproc import World
from manyhands.parallel.tensor import shard_module
from manyhands.parallel.tensor.dry_run import prepare_dry_run
from manyhands.parallel.tensor.sharding_rules import TensorAxis
from manyhands.split.tensor import Cut, TensorCuts, derive, named_tensors, shard_specs

try:
    import einops
    import einops.layers.torch as einops_layers
except ImportError:
    einops = None

B, T, C, H = 2, 8, 16, 4


def linear(inputs: int = C, outputs: int = C) -> nn.Linear:
    return nn.Linear(inputs, outputs)


class Block(nn.Module):
    """A residual block around `inner`, and a classifier: both sides of `inner` are cut layers."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.first, self.inner = nn.Sequential(linear(C, 32), nn.GELU(), linear(32, C)), inner
        self.norm, self.head = nn.LayerNorm(C), linear(C, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = self.norm(x + self.inner(x))
        return self.head(x)


class Attention(nn.Module):
    """Attention whose parts a subclass writes as a library would."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(C, 3 * C), linear()


class Rearranged(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = einops.rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=H)
        a = einops.einsum(q, k, "b h i d, b h j d -> b h i j").softmax(-1)
        y = einops.einsum(a, v, "b h i j, b h j d -> b h i d")
        return self.out(einops.rearrange(y, "b h t d -> b t (h d)"))


class Layers(nn.Module):
    """Layers of einops, with repeat and reduce in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)
        self.split = einops_layers.Rearrange("b t (h d) -> b h t d", h=H)
        self.join = einops_layers.Rearrange("b h t d -> b t (h d)")
        self.pool = einops_layers.Reduce("b h t d -> b h 1 d", "mean")

    def forward(self, x: Tensor) -> Tensor:
        y = self.split(self.up(x))
        pooled = einops.repeat(self.pool(y), "b h 1 d -> b h t d", t=T)
        return self.down(self.join(torch.tanh(y + pooled))) + einops.reduce(
            x, "b t c -> b 1 c", "max"
        )


class Einsum(nn.Module):
    """torch.einsum: with heads, with an ellipsis, and with a parameter of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear() for _ in range(4))
        self.mix = nn.Parameter(torch.randn(H, C // H, C // H) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(B, T, H, -1) for f in (self.q, self.k, self.v))
        a = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        y = torch.einsum("b h i j, b j h d -> b i h d", a, v)
        y = torch.einsum("...hd,hde->...he", y, self.mix)
        return self.out(y.reshape(B, T, -1))


class Fused(Attention):
    """F.scaled_dot_product_attention, with each kind of mask."""

    def __init__(self, mask: str):
        super().__init__()
        self.mask = mask
        self.bias = nn.Parameter(torch.randn(H, T, T))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(B, T, H, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        padding = (torch.arange(T) < T - 2).expand(B, 1, 1, T)
        masks: dict[str, Any] = {
            "none": None,
            "bool": causal,
            "float": torch.zeros(T, T, dtype=x.dtype).masked_fill(~causal, -torch.inf),
            "by sample": padding,
            "by head": causal.expand(B, H, T, T),
            "learned": self.bias,
            "learned by sample": self.bias + torch.zeros(B, 1, 1, 1, dtype=x.dtype),
        }
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=masks.get(self.mask), is_causal=self.mask == "is_causal"
        )
        return self.out(y.transpose(1, 2).flatten(2))


class GroupedQueries(nn.Module):
    """enable_gqa: `heads` of k and v for four of q."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.out = linear(), linear()
        self.k, self.v = linear(C, heads * 4), linear(C, heads * 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(B, T, H, -1).transpose(1, 2)
        k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MultiHead(nn.Module):
    """nn.MultiheadAttention in all of its ways."""

    def __init__(self, cross: bool, batch_first: bool, mask: str):
        super().__init__()
        self.inner = nn.MultiheadAttention(C, H, batch_first=batch_first)
        self.memory = linear() if cross else nn.Identity()
        self.cross, self.batch_first, self.mask = cross, batch_first, mask

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        kv = self.memory(x).tanh() if self.cross else x
        causal = torch.ones(T, T, dtype=torch.bool).triu(1)
        masks: dict[str, Any] = {
            "none": {},
            "padding": {"key_padding_mask": (torch.arange(T) >= T - 2).expand(B, T)},
            "attn": {"attn_mask": causal, "is_causal": True},
            "3d": {"attn_mask": causal.expand(B * H, T, T)},
        }
        y, _ = self.inner(x, kv, kv, need_weights=self.mask == "padding", **masks[self.mask])
        return y if self.batch_first else y.transpose(0, 1)


class Square(torch.autograd.Function):
    """A custom autograd function, as xformers and flash-attn have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        assert type(x) is Tensor or isinstance(x, nn.Parameter)
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * ctx.scale * x * grad, None


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Square.apply(self.up(x), 0.5)) + Square.apply(x, 0.1)


@torch.jit.script
def scripted_gelu(x: Tensor, bias: Tensor) -> Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.erf(y / 1.41421))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(scripted_gelu(self.up(x), self.bias)) + scripted_gelu(x, x)


class Checks(nn.Module):
    """What user code asks of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        b, t, c = y.shape
        assert isinstance(y, torch.Tensor) and torch.is_tensor(y) and c == 32 and len(y) == b
        assert y.size(1) == t and y.dim() == y.ndim == 3 and y.dtype == x.dtype and y.requires_grad
        assert y.numel() == b * t * 32 and y.nbytes == y.numel() * y.itemsize and not y.is_sparse
        assert [tuple(row.shape) for row in y] == [(t, c)] * b
        assert y.new_zeros(3).shape == (3,) and torch.is_floating_point(y) and y.grad_fn is not None
        y = y.view(b, t, H, -1).relu().flatten(2)
        return self.down(1.0 / (2.0 + y) + (y > 0.5) * y)


class Indexed(nn.Module):
    """x.gather and x.scatter have no sharding rule: the layer before them stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        first = torch.zeros_like(y).long()
        return self.down(y.gather(1, first) - y.scatter(1, first, 0.5))


class Functional(nn.Module):
    """torch.func.functional_call with the parameters as they are, and with changed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(linear(C, 32), nn.GELU(), linear(32, C))

    def forward(self, x: Tensor) -> Tensor:
        params = dict(self.mlp.named_parameters())
        halved = {k: v * 0.5 for k, v in params.items()}
        return torch.func.functional_call(self.mlp, params, (x,)) + torch.func.functional_call(
            self.mlp, halved, (x,)
        )


class Mapped(nn.Module):
    """torch.func.vmap over a module's own layers, and of an activation that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(linear(C, 32), nn.GELU(), linear(32, C))
        self.up, self.down = linear(C, 32), linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.func.vmap(self.mlp)(x)
        z = torch.func.vmap(lambda row: row.sin() * row.sum())(self.up(x))
        return y + self.down(z)


class Gradient(nn.Module):
    """torch.func.grad inside of a forward pass, as energy models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(linear(C, 32), nn.Tanh(), linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: self.energy(y).sum())(x)


class AutogradGradient(nn.Module):
    """torch.autograd.grad of cut layers: backward runs twice through their exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(linear(C, 32), nn.Tanh(), linear(32, C))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return slope


class Compiled(nn.Module):
    """A compiled submodule, and a compiled function of what cut layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.compile(
            nn.Sequential(linear(C, 32), nn.GELU(), linear(32, C)), backend="eager"
        )
        self.up, self.down = linear(C, 32), linear(32, C)
        self.act = torch.compile(lambda x: x.sigmoid() * x, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.down(self.act(self.up(x)))


class Hooked(nn.Module):
    """Hooks on the gradient of an activation: one looks, one changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * torch.linspace(0, 1, 32, dtype=grad.dtype))
        return self.down(y.tanh())


class Numpy(nn.Module):
    """The memory of an activation: no rank has all of it, so the layer before stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if not y.is_meta:
            assert y.data_ptr() and np.asarray(y.detach()).shape == (B, T, 32)
            y = y + torch.from_numpy(y.detach().numpy().copy())
        return self.down(y)


# and the number of its matrices that stay whole
INNER: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "einops.rearrange and einsum": (Rearranged, 0),
    "einops.layers": (Layers, 0),
    "torch.einsum": (Einsum, 0),
    **{
        f"attention, mask {m}": ((lambda m=m: Fused(m)), 0)
        for m in ("none", "is_causal", "bool", "float", "by sample", "by head", "learned")
    },
    "attention, mask learned by sample": (lambda: Fused("learned by sample"), 0),
    **{
        f"attention, {n} heads of k and v": ((lambda n=n: GroupedQueries(n)), 4 - 2 * n)
        for n in (2, 1)
    },
    **{
        f"{'cross' if c else 'self'} MultiheadAttention, batch_first={f}, mask {m}": (
            (lambda c=c, f=f, m=m: MultiHead(c, f, m)),
            int(c),
        )
        for c in (False, True)
        for f in (True, False)
        for m in ("none", "padding", "attn", "3d")
    },
    "autograd.Function": (CustomFunction, 2),
    "jit.script": (Scripted, 2),
    "isinstance and shape": (Checks, 0),
    "x.gather": (Indexed, 2),
    "functional_call": (Functional, 0),
    "vmap": (Mapped, 4),
    "func.grad": (Gradient, 2),
    "autograd.grad": (AutogradGradient, 0),
    "compile": (Compiled, 0),
    "hooks": (Hooked, 0),
    "numpy": (Numpy, 2),
}


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def made(inner: Callable[[], nn.Module]) -> tuple[nn.Module, list[Tensor], Tensor]:
    torch.manual_seed(0)
    model = Block(inner()).double()
    return model, [torch.randn(B, T, C).double()], torch.randint(6, (B, T))


def derived(
    model: nn.Module, inputs: list[Tensor], target: Tensor, sequence: bool, requested: Any = None
) -> TensorCuts:
    dry_run = prepare_dry_run(model, inputs, 2, loss, target, sequence)
    return derive(model, dry_run, 2, requested)


def compared(
    model: nn.Module,
    whole: nn.Module,
    expected: Tensor,
    inputs: list[Tensor],
    target: Tensor,
    cuts: dict[str, Cut],
    sequence: bool = False,
) -> list[TensorAxis]:
    """Run it on two ranks and compare with `whole`, whose backward pass has run."""

    def main(group: Group) -> TensorAxis:
        mine = copy.deepcopy(model)
        held = shard_specs(named_tensors(mine), cuts, 2, group.rank)
        axis = shard_module.apply(mine, held, group, sequence)
        got = loss(mine(*inputs), target)
        got.backward()
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-12, atol=0)
        for (n, p), q in zip(mine.named_parameters(), whole.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), n
            if q.grad is not None:
                due = held[n].extract(q.grad)
                torch.testing.assert_close(
                    p.grad, due, rtol=1e-12, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}"
                )
        return axis

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return World(2).run(main)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("name", INNER)
def test_loss_and_gradients_are_those_of_one_process(name: str, sequence: bool) -> None:
    if "einops" in name and einops is None:
        pytest.skip("einops is not installed")
    inner, kept = INNER[name]
    model, inputs, target = made(inner)
    whole = copy.deepcopy(model)
    expected = loss(whole(*inputs), target)
    expected.backward()
    try:
        cuts = derived(model, inputs, target, sequence).cuts
    except ManyhandsError as e:
        assert (
            sequence and name in ("numpy", "vmap", "func.grad") and "use sequence=false" in str(e)
        )
        assert "in module 'inner" in str(e)
        return
    left = [
        n
        for n, p in model.named_parameters()
        if n.endswith("weight") and p.ndim > 1 and n not in cuts
    ]
    if not sequence:
        assert len(left) == kept, left

    axes = compared(model, whole, expected, inputs, target, cuts, sequence)
    if not sequence:
        assert not axes[0].gathers, axes[0].gathers


@pytest.mark.parametrize("inner", [CustomFunction, Scripted, Indexed])
def test_a_requested_cut_is_gathered_for_code_that_needs_all_of_it(inner: Any) -> None:
    model, inputs, target = made(inner)
    whole = copy.deepcopy(model)
    expected = loss(whole(*inputs), target)
    expected.backward()
    cuts = derived(model, inputs, target, False, {"inner.up": "column"}).cuts
    assert "inner.up.weight" in cuts
    axes = compared(model, whole, expected, inputs, target, cuts)
    assert axes[0].gathers


def test_a_requested_cut_whose_memory_is_needed_is_refused_with_its_module() -> None:
    model, inputs, target = made(Numpy)
    cuts = derived(model, inputs, target, False, {"inner.up": "column"}).cuts

    def main(group: Group) -> None:
        mine = copy.deepcopy(model)
        shard_module.apply(mine, shard_specs(named_tensors(mine), cuts, 2, group.rank), group)
        mine(*inputs)

    with pytest.raises(TaskError, match=r"data_ptr needs the memory .* in module 'inner'"):
        World(2).run(main)


class Refusing(nn.Module):
    """Code of a library that knows torch's own tensor only."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if type(y) is not Tensor:
            raise TypeError(f"Tensor type unknown: {type(y)}")
        return self.down(y)


class Keeping(nn.Module):
    """A running mean of an activation, kept in a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 32), linear(32, C)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        return self.down(y - self.mean)


@pytest.mark.parametrize(
    ("inner", "why"),
    [(Refusing, "TypeError: Tensor type unknown"), (Keeping, "kept in the buffer inner.mean")],
)
def test_what_no_rule_can_see_leaves_the_layer_before_it_whole(inner: Any, why: str) -> None:
    model, inputs, target = made(inner)
    whole = copy.deepcopy(model)
    expected = loss(whole(*inputs), target)
    expected.backward()
    found = derived(model, inputs, target, False)
    assert "inner.up.weight" not in found.cuts and any(why in note for note in found.notes)
    compared(model, whole, expected, inputs, target, found.cuts)
    if inner is Refusing:
        with pytest.raises(PlanError, match=r"asks to cut inner.up.*in module 'inner'"):
            derived(model, inputs, target, False, {"inner.up": "column"})
        with pytest.raises(PlanError, match="use sequence=false"):
            derived(model, inputs, target, True)


def test_an_error_of_the_model_itself_names_its_module() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of luck")

    model, inputs, target = made(Broken)
    with pytest.raises(TaskError, match=r"does not run .* in module 'inner'.*out of luck"):
        derived(model, inputs, target, False)
