"""Sharding rules: every operator gives on a sharded value what it gives on the whole tensor.

Forward and backward.
"""

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
from manyhands.errors import TaskError
from manyhands.exchange.inproc import World
from manyhands.parallel.tensor.shard_module import expose
from manyhands.parallel.tensor.sharding_rules import SHARDING_RULES, ShardedValue, TensorAxis
from manyhands.parallel.tensor.tensor_axis import scatter
from manyhands.parallel.tensor.undispatched_calls import gather_in_undispatched_calls

B, T, C = 4, 6, 12
HERE = torch.float64
ROW = torch.linspace(-1, 1, C, dtype=HERE)
PLANE = torch.linspace(-2, 2, T * C, dtype=HERE).view(T, C)
TARGET = (torch.arange(B * C) * 7 % T).view(B, C)

# x is (B, T, C) = (4, 6, 12); `free` are the dimensions along which it may be cut without that
# anybody has to see all of it
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "relu": (torch.relu, "012"),
    "gelu of functional": (lambda x: F.gelu(x, approximate="tanh"), "012"),
    "dtype": (lambda x: x.float().double(), "012"),
    "a number on the left": (lambda x: 1 - 2 / (3 + x * x) + 2**x, "012"),
    "a number on the right": (lambda x: (x / 2 - 1) ** 2 + (-x).abs(), "012"),
    "a row": (lambda x: x * ROW + ROW, "012"),
    "a plane": (lambda x: PLANE - x * PLANE, "012"),
    "itself": (lambda x: x * x.detach() + x.sigmoid(), "012"),
    "where": (lambda x: torch.where(x > 0, x, PLANE), "012"),
    "masked_fill": (lambda x: x.masked_fill(PLANE > 0.5, -1.0), "012"),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), "012"),
    "in place": (lambda x: (x * 1).mul_(2).add_(ROW), "012"),
    "augmented": (lambda x: _augmented(x * 1), "012"),
    "a field is filled": (lambda x: _filled(x * 1), "02"),
    "transpose": (lambda x: x.transpose(1, 2).sin(), "012"),
    "permute": (lambda x: x.permute(2, 0, 1) * PLANE[0, 0], "012"),
    "movedim": (lambda x: x.movedim(0, -1).cos(), "012"),
    "mT": (lambda x: x.mT, "012"),
    "heads": (lambda x: x.view(B, T, 6, 2).transpose(1, 2), "012"),
    "merged": (lambda x: x.reshape(B * T, C), "012"),
    "flatten": (lambda x: x.flatten(), "012"),
    "flatten and back": (lambda x: x.flatten(1).unflatten(1, (T, C)), "012"),
    "a view that goes across": (lambda x: x.view(B, C, T).exp(), "0"),
    "unsqueeze and squeeze": (lambda x: x[:, None].unsqueeze(-1).squeeze(1).squeeze(-1), "012"),
    "expand": (lambda x: x.unsqueeze(0).expand(2, -1, -1, -1) * 2, "012"),
    "repeat": (lambda x: x.repeat(1, 1, 2), "01"),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), "012"),
    "split": (lambda x: torch.cat([a.sin() for a in x.split(4, dim=2)], 2), "01"),
    "chunk": (lambda x: x.chunk(2, dim=1)[1].sin(), "02"),
    "unbind": (lambda x: x.unbind(1)[2] * 2, "02"),
    "stack": (lambda x: torch.stack([x, x * 2], 1), "012"),
    "cat with plain": (lambda x: torch.cat([x, x.new_ones(B, 2, C)], 1), "02"),
    "an index": (lambda x: x[:, 2], "02"),
    "a range": (lambda x: x[..., 3:7], "01"),
    "a list": (lambda x: x[:, [1, 1, 3]], ""),
    "sum": (lambda x: x.sum(-1), "012"),
    "sum of all": (lambda x: x.square().sum(), "012"),
    "mean": (lambda x: x.mean((0, 2), keepdim=True), "012"),
    "mean of all": (lambda x: (x * ROW).mean(), "012"),
    "amax": (lambda x: x.amax(1), "02"),
    "max": (lambda x: x.max(1).values, "02"),
    "var": (lambda x: x.var(2), "01"),
    "softmax": (lambda x: x.softmax(-1) * ROW, "012"),
    "log_softmax": (lambda x: F.log_softmax(x, 1) * ROW, "012"),
    "cumsum": (lambda x: x.cumsum(1), "02"),
    "layer_norm": (lambda x: F.layer_norm(x, (C,), ROW, ROW), "01"),
    "rms_norm": (lambda x: F.rms_norm(x, (C,), ROW), "01"),
    "matmul": (lambda x: x @ x.transpose(1, 2), "0"),
    "matmul with plain": (lambda x: x @ PLANE.t(), "01"),
    "plain matmul": (lambda x: PLANE.t() @ x, "02"),
    "einsum": (lambda x: torch.einsum("btc,tc->b", x, PLANE), "012"),
    "einsum of itself": (lambda x: torch.einsum("bic,bjc->bij", x, x.sin()), "02"),
    "einsum with dots": (lambda x: torch.einsum("...c,tc->...t", x, PLANE), "012"),
    "einsum without an arrow": (lambda x: torch.einsum("btc,ct", x, PLANE.t()), "012"),
    "einsum of one": (lambda x: torch.einsum("btc->ct", x), "012"),
    "einsum of a diagonal": (lambda x: torch.einsum("bii->bi", x[:, :, :T]), "0"),
    "einsum that broadcasts": (lambda x: torch.einsum("btc,btc->tb", x, ROW.view(1, 1, C)), "012"),
    "reflected operators": (lambda x: _reflected(x, x.detach() + 5), "012"),
    "an operator on the right": (lambda x: PLANE.t() @ (PLANE / (x * x + 1)), "02"),
    "gather": (lambda x: x.gather(1, TARGET.unsqueeze(1)), ""),
    "a custom function": (lambda x: _Twice.apply(x, 2.0), ""),
    "a scripted function": (lambda x: _scripted(x, 2.0), ""),
    "gradients": (lambda x: torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0], "012"),
    "a hook": (lambda x: _hooked(x * 1), "012"),
    "linear of plain": (lambda x: F.linear(x, PLANE, PLANE[:, 0]), "01"),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(1).transpose(1, 2)] * 3),
        "01",
    ),
    "cross_entropy": (lambda x: F.cross_entropy(x, TARGET), "012"),
    "cross_entropy of some": (
        lambda x: F.cross_entropy(x, TARGET, ignore_index=3, reduction="sum"),
        "012",
    ),
    "cross_entropy smoothed": (lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1), "012"),
    "cross_entropy weighed": (lambda x: F.cross_entropy(x, TARGET, weight=ROW[:T] + 2), "012"),
    "cross_entropy of each": (lambda x: F.cross_entropy(x, TARGET, reduction="none") * ROW, "012"),
    "cross_entropy of shares": (lambda x: F.cross_entropy(x, x.detach().softmax(1)), ""),
    "nll_loss": (
        lambda x: F.nll_loss(x[:, :, 0].log_softmax(1), TARGET[:, 0], ignore_index=2),
        "1",
    ),
    "argmax": (lambda x: x.argmax(1), "012"),
    "argmax of ties": (lambda x: x.round().argmax(-1, keepdim=True), "012"),
    "argmax of all": (lambda x: x.argmax(), ""),
    "sort": (lambda x: x.sort(1).values, "02"),
    "no rule": (lambda x: torch.fft.fft(x, dim=0).real, ""),
    "pooling": (lambda x: F.avg_pool1d(x, 2), "01"),
    "pooling without a batch": (lambda x: F.max_pool2d(x, 2), "0"),
    "by name": (lambda x: F.gelu(input=x), "012"),
    "indices": (lambda x: torch.where(x > 0)[1].double(), ""),
    "std in the old way": (lambda x: x.std(1, False, True), ""),
}


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


@torch.jit.script
def _scripted(x: Tensor, factor: float) -> Tensor:
    return torch.sin(x) * factor


def _reflected(x: Any, at: Any) -> Any:
    return 3 // at + 2 % at - (1 - x) / 2 + PLANE.__rsub__(x)


def _hooked(x: Any) -> Any:
    x.register_hook(lambda grad: grad * ROW)
    return x.sin()


def _augmented(x: Any) -> Any:
    x += ROW
    x *= 2
    return x


def _filled(x: Any) -> Any:
    x[:, 1:3] = 0.0
    return x


def data() -> Tensor:
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(0), dtype=HERE)


def sharded(x: Tensor, dim: int, axis: TensorAxis, groups: int = 1) -> ShardedValue:
    return ShardedValue(scatter(x, axis, dim, groups), dim, x.shape[dim], axis, groups)


def whole(value: Any) -> Tensor:
    return value.gathered() if isinstance(value, ShardedValue) else value


def on_shares(
    func: Callable[[Any], Any], dim: int, size: int, groups: int = 1
) -> list[tuple[Tensor, Tensor | None, TensorAxis]]:
    def main(group: Group) -> tuple[Tensor, Tensor | None, TensorAxis]:
        axis = TensorAxis(group, group.rank, size)
        x = data().requires_grad_()
        out = whole(func(sharded(x, dim, axis, groups)))
        if out.requires_grad:
            (
                out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
            ).sum().backward()
        return out.detach(), x.grad, axis

    gather_in_undispatched_calls()  # as a process that cuts a model does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return World(size).run(main)


def on_whole(func: Callable[[Any], Any]) -> tuple[Tensor, Tensor | None]:
    x = data().requires_grad_()
    out = func(x)
    if out.requires_grad:
        (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_shards_is_that_of_the_whole_and_gathers_only_where_it_must(
    name: str, size: int
) -> None:
    func, free = FUNCTIONS[name]
    out, grad = on_whole(func)
    for dim in range(3):
        if name == "a field is filled" and dim == 1:
            with pytest.raises(TaskError, match="changes in place"):
                on_shares(func, dim, size)
            continue
        for got, got_grad, axis in on_shares(func, dim, size):
            torch.testing.assert_close(
                got,
                out,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda m, where=f"dim {dim}, {size} ranks": f"{where}: {m}",
            )
            torch.testing.assert_close(
                got_grad,
                grad,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda m, where=f"dim {dim}, {size} ranks": f"{where}: {m}",
            )
            if str(dim) in free and size == 2:  # 6 do not divide over 4
                assert not axis.gathers, f"dim {dim}: {axis.gathers}"


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_fused_dimension_cut_in_blocks_gives_the_same(name: str, groups: int) -> None:
    func, _ = FUNCTIONS[name]
    out, grad = on_whole(func)
    for got, got_grad, _ in on_shares(func, 2, 2, groups):
        torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_grad, grad, rtol=1e-12, atol=1e-12)


def test_blocks_of_a_fused_dimension_come_apart_without_an_exchange() -> None:
    def parts(x: Any) -> Any:
        q, k, v = x.split(4, dim=2)
        a, b, c = x.view(B, T, 3, 4).unbind(2)
        return q * a + k * b + v * c + x[..., 4:8]

    out, grad = on_whole(parts)
    for got, got_grad, axis in on_shares(parts, 2, 2, 3):
        torch.testing.assert_close(got, out)
        torch.testing.assert_close(got_grad, grad)
        assert not axis.gathers


def test_sizes_that_do_not_divide_are_shared_out_unevenly() -> None:
    for name in (
        "relu",
        "a plane",
        "sum",
        "softmax",
        "cross_entropy",
        "linear of plain",
        "transpose",
        "mean of all",
    ):
        func, _ = FUNCTIONS[name]
        out, grad = on_whole(func)
        for dim in range(3):
            for got, got_grad, _ in on_shares(func, dim, 5 if dim else 3):
                torch.testing.assert_close(got, out)
                torch.testing.assert_close(got_grad, grad)


def test_it_speaks_of_the_whole() -> None:
    def main(group: Group) -> None:
        p = sharded(data(), 2, TensorAxis(group, group.rank, 3))
        assert (
            p.shape == (B, T, C)
            and p.size() == (B, T, C)
            and p.size(-1) == C
            and p.dim() == p.ndim == 3
        )
        assert (
            p.numel() == B * T * C
            and len(p) == B
            and p.dtype == HERE
            and p.device.type == "cpu"
            and p.is_floating_point()
        )
        assert "dim 2 cut over 3 ranks" in repr(p) and p.local.shape == (B, T, 4)
        assert float(p.sum()) == pytest.approx(float(data().sum()))
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = p.nonsense

    World(3).run(main)


def test_what_has_no_sharding_rule_is_said_once_and_counted() -> None:
    def main(group: Group) -> TensorAxis:
        axis = TensorAxis(group, group.rank, 2)
        for _ in range(3):
            torch.histc(sharded(data(), 2, axis))
        return axis

    assert torch.histc not in SHARDING_RULES
    with pytest.warns(UserWarning, match="tensor=2: histc has no sharding rule") as said:
        axes = World(2).run(main)
    assert len(said) == 2 and all(axis.gathers == {"histc": 3} for axis in axes)  # once a rank


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in ("a hook", "attention")])
def test_second_derivatives_are_those_of_the_whole(name: str) -> None:
    """A penalty on the gradient: backward passes exchange too, and are differentiated again."""
    func, _ = FUNCTIONS[name]

    def penalty(shard: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor] | None:
        x = data().requires_grad_()
        out = whole(func(shard(x * 1.5)))
        if not out.requires_grad:
            return None
        (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        if not slope.requires_grad:
            return None
        return slope.detach(), torch.autograd.grad(slope.square().sum(), x)[0]

    expected = penalty(lambda x: x)

    def main(group: Group, dim: int) -> Any:
        axis = TensorAxis(group, group.rank, 2)
        return penalty(lambda x: sharded(x, dim, axis))

    for dim in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == "a field is filled" and dim == 1:
                continue
            if name.startswith("cross_entropy") and dim == 1 and name != "cross_entropy of shares":
                with pytest.raises(TaskError, match="keep the layer of the logits whole"):
                    World(2).run(lambda group: main(group, 1))
                continue
            results = World(2).run(lambda group, dim=dim: main(group, dim))
        for got in results:
            torch.testing.assert_close(
                got, expected, rtol=1e-11, atol=1e-11, msg=lambda m, d=dim: f"dim {d}: {m}"
            )


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda p: p.numpy(), "numpy needs the memory of ShardedValue"),
        (lambda p: np.asarray(p), "__array__ needs the memory"),
        (lambda p: p.data_ptr(), "data_ptr needs the memory"),
        (lambda p: torch.from_dlpack(p), "__dlpack__ needs the memory"),
        (lambda p: setattr(p, "data", torch.zeros(B, T, C)), "__set__ changes in place"),
        (lambda p: p.index_fill_(0, torch.tensor([0]), 1.0), "index_fill_ changes in place"),
        (lambda p: torch.add(p, p, out=p), "add changes in place"),
        (lambda p: torch.func.vmap(torch.sin)(p), "does not go through torch's Python functions"),
        (lambda p: torch.func.grad(lambda y: y.sum())(p), "does not go through torch's Python"),
    ],
    ids="numpy asarray data_ptr dlpack data index_fill_ out vmap grad".split(),
)
def test_what_would_lose_a_write_or_a_gradient_is_refused(use: Any, said: str) -> None:
    def main(group: Group) -> None:
        use(sharded(data(), 2, TensorAxis(group, group.rank, 2)))

    with pytest.raises(TaskError, match=said) as refused:
        World(2).run(main)
    assert "Task(tensor={'its.name': 'replicate'})" in str(refused.value)


def test_it_is_a_tensor_to_einops() -> None:
    einops = pytest.importorskip("einops")

    def main(group: Group) -> None:
        p = sharded(data(), 1, TensorAxis(group, group.rank, 2))
        assert einops.rearrange(p, "b t c -> t (b c)").shape == (T, B * C)
        assert torch.equal(einops.reduce(p, "b t c -> b", "max"), data().amax((1, 2)))
        assert einops.parse_shape(p, "b t c") == {"b": B, "t": T, "c": C}

    World(2).run(main)


def test_one_input_of_several_layers_enters_once() -> None:
    class Counted:
        def __init__(self, group: Group):
            self.group, self.rank, self.size, self.calls = group, group.rank, group.size, 0

        def all_reduce(self, values: Any, op: Any = "sum") -> Any:
            self.calls += 1
            return self.group.all_reduce(values, op)

    def main(group: Group) -> int:
        counted = Counted(group)
        axis = TensorAxis(counted, group.rank, 2)  # type: ignore[arg-type]
        x = data().requires_grad_()
        w = [sharded(torch.randn(8, C, dtype=HERE), 0, axis) for _ in range(3)]
        sum(F.linear(x, v).sin() for v in w).sum().backward()
        return counted.calls

    assert World(2).run(main) == [2, 2]  # the sum forward, and the gradient of x once for all three


def test_random_numbers_differ_on_shards_and_a_recomputation_meets_them_again() -> None:
    def main(group: Group) -> tuple[Tensor, Tensor]:
        axis = TensorAxis(group, group.rank, 2)
        drawn = []
        for _ in range(2):
            torch.manual_seed(3)
            drawn.append(F.dropout(sharded(torch.ones(4, 64), 1, axis), 0.5).local)
        assert (
            F.dropout(sharded(torch.ones(4, 64), 1, axis), 0.5, training=False).local.sum() == 128
        )
        return drawn[0], drawn[1]

    (a, again), (b, _) = World(2).run(main)
    assert torch.equal(a, again) and not torch.equal(a, b) and 0 < (a == 0).float().mean() < 1


def test_padding_of_an_embedding_gets_no_gradient_and_uneven_tables_work() -> None:
    ids = torch.tensor([[0, 3, 9], [10, 3, 1]])
    table = torch.randn(11, 4, dtype=HERE)

    def run(w: Any) -> Tensor:
        return F.embedding(ids, w, padding_idx=3)

    plain = table.clone().requires_grad_()
    run(plain).sin().sum().backward()

    def main(group: Group) -> tuple[Tensor, Tensor]:
        axis = TensorAxis(group, group.rank, 3)
        w = table.clone().requires_grad_()
        out = run(sharded(w, 0, axis))
        out.sin().sum().backward()
        return out.detach(), w.grad

    for out, grad in World(3).run(main):
        torch.testing.assert_close(out, run(table))
        torch.testing.assert_close(grad, plain.grad)


def test_what_belongs_to_no_rank_is_an_error_as_on_the_whole() -> None:
    def ids(group: Group) -> None:
        F.embedding(
            torch.tensor([11]), sharded(torch.zeros(11, 4), 0, TensorAxis(group, group.rank, 2))
        )

    def target(group: Group) -> None:
        F.cross_entropy(
            sharded(torch.zeros(2, 6), 1, TensorAxis(group, group.rank, 2)), torch.tensor([1, 6])
        )

    with pytest.raises(IndexError, match="outside of the table of 11 rows"):
        World(2).run(ids)
    with pytest.raises(IndexError, match="outside of the 6 classes"):
        World(2).run(target)


def test_whole_running_statistics_are_kept_by_gathering_and_cut_ones_by_scattering() -> None:
    x = torch.randn(5, 4, 3, dtype=HERE)
    plain = nn.BatchNorm1d(4, dtype=HERE)
    out = plain(x)

    def main(group: Group) -> None:
        axis = TensorAxis(group, group.rank, 2)
        for x_dim, stats_cut in ((1, False), (0, True), (None, True), (1, True)):
            stats = [torch.zeros(4, dtype=HERE), torch.ones(4, dtype=HERE)]
            given = [sharded(s, 0, axis) if stats_cut else s for s in stats]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = F.batch_norm(
                    x if x_dim is None else sharded(x, x_dim, axis), *given, training=True
                )
            torch.testing.assert_close(whole(got), out.detach())
            for g, due in zip(given, (plain.running_mean, plain.running_var), strict=True):
                torch.testing.assert_close(whole(g), due)

    World(2).run(main)


def test_logits_that_are_minus_infinity_have_no_part_in_the_loss() -> None:
    logits = torch.randn(5, 8, dtype=HERE)
    logits[:, 5:] = -torch.inf  # a vocabulary padded to a round number
    target = torch.tensor([0, 4, 2, 1, 3])

    def main(group: Group) -> Tensor:
        axis = TensorAxis(group, group.rank, 4)
        x = logits.clone().requires_grad_()
        loss = F.cross_entropy(sharded(x, 1, axis), target)
        loss.backward()
        return torch.cat([loss.detach().view(1), x.grad.flatten()])

    x = logits.clone().requires_grad_()
    loss = F.cross_entropy(x, target)
    loss.backward()
    for got in World(4).run(main):
        torch.testing.assert_close(got, torch.cat([loss.detach().view(1), x.grad.flatten()]))


def test_in_bfloat16_the_loss_is_summed_in_float32() -> None:
    logits = (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    target = torch.arange(64) % 32
    exact = F.cross_entropy(logits.double(), target)

    def main(group: Group) -> Tensor:
        axis = TensorAxis(group, group.rank, 2)
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(sharded(logits, 1, axis), target)

    for got in World(2).run(main):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"need_weights": True},
        {"is_causal": True, "attn_mask": True},
        {"key_padding_mask": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "kind",
    [{}, {"kdim": 6, "vdim": 10}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}],
    ids=str,
)
def test_multihead_attention_of_torch_runs_on_shards_of_its_heads(
    kind: dict[str, Any], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 4, batch_first=True, dtype=HERE, **kind)
    q, k, v = (torch.randn(3, 5, kind.get(n, 8), dtype=HERE) for n in ("", "kdim", "vdim"))
    mask = (
        torch.triu(torch.full((5, 5), -torch.inf, dtype=HERE), 1)
        if options.get("attn_mask")
        else None
    )
    padding = torch.arange(5).expand(3, 5) > 3 if options.get("key_padding_mask") else None
    rest = {
        "need_weights": bool(options.get("need_weights")),
        "attn_mask": mask,
        "key_padding_mask": padding,
    }
    rest["is_causal"] = bool(options.get("is_causal"))
    cuts = {
        "in_proj_weight": (0, 3),
        "in_proj_bias": (0, 3),
        "bias_k": (2, 1),
        "bias_v": (2, 1),
    } | {f"{n}_proj_weight": (0, 1) for n in "qkv"}
    out, weights = layer(q, k, v, **rest)
    out.sin().sum().backward()

    def main(group: Group) -> None:
        axis = TensorAxis(group, group.rank, 2)
        mine = copy.deepcopy(layer)
        mine.zero_grad()
        for owner, names in ((mine, cuts), (mine.out_proj, {"weight": (1, 1)})):
            held = {}
            for name, (dim, groups) in names.items():
                if (p := owner._parameters.get(name)) is not None:
                    held[name] = (dim, p.shape[dim], groups)
                    p.data = axis.shard(p.data, dim, groups).clone()
                    p.grad = None
            expose(owner, held, axis)
        got, got_weights = mine(q, k, v, **rest)
        torch.testing.assert_close(got, out)
        if weights is not None:
            torch.testing.assert_close(whole(got_weights), weights)
        got.sin().sum().backward()
        for (name, p), r in zip(mine.named_parameters(), layer.parameters(), strict=True):
            dim, groups = cuts.get(name, (1, 1) if name == "out_proj.weight" else (None, 1))
            torch.testing.assert_close(
                p.grad, r.grad if dim is None else axis.shard(r.grad, dim, groups)
            )

    World(2).run(main)
