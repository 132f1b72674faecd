"""Synchronous BatchNorm is BatchNorm over the union batch.

Outputs, gradients and running statistics.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Group
from manyhands.exchange.inproc import World
from manyhands.merge.all_reduce import AllReduce
from manyhands.parallel import sync_batchnorm
from support.compare import same_tensors
from support.replicas import replica, weights

SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (4,)),
    "1d with length": (nn.BatchNorm1d, (4, 3)),
    "2d": (nn.BatchNorm2d, (4, 3, 5)),
    "3d": (nn.BatchNorm3d, (4, 2, 3, 2)),
}
COUNTS = [(3,), (3, 3), (5, 1), (1, 1, 1), (4, 0, 2), (0, 0, 6)]


def norm(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = kind(4, **options).double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(4))
    return made


def summed(group: Group) -> sync_batchnorm.Reduce:
    return lambda values: group.all_reduce({"bn": values}).wait()


def data(n: int, shape: tuple[int, ...], seed: int = 1) -> Tensor:
    # far from zero mean: a formula that loses digits there would show
    return (
        torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * 3
        + 50
    )


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_batchnorm_on_the_union_forward_backward_and_running(
    shape: str, counts: tuple[int, ...]
) -> None:
    kind, rest = SHAPES[shape]
    x, weight = data(sum(counts), rest), data(sum(counts), rest, seed=2)
    plain = norm(kind)
    whole = x.clone().requires_grad_()
    out = plain(whole)
    (out.sin() * weight).sum().backward()

    def main(group: Group) -> tuple[Tensor, ...]:
        layer = sync_batchnorm.synchronise(norm(kind), summed(group))
        mine = x.split(list(counts))[group.rank].clone().requires_grad_()
        y = layer(mine)
        (y.sin() * weight.split(list(counts))[group.rank]).sum().backward()
        return (
            y.detach(),
            mine.grad,
            layer.weight.grad,
            layer.bias.grad,
            layer.running_mean,
            layer.running_var,
            layer.num_batches_tracked,
        )

    ys, dxs, dws, dbs, means, variances, batches = zip(*World(len(counts)).run(main), strict=True)
    # the squares of 50 +- 3 are summed before the running mean has come near: five digits of 1e-16
    # are spent on that
    close = dict(rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat(ys), out.detach(), **close)
    torch.testing.assert_close(torch.cat(dxs), whole.grad, **close)
    torch.testing.assert_close(sum(dws), plain.weight.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sum(dbs), plain.bias.grad, **close)
    for mean, var, tracked in zip(means, variances, batches, strict=True):
        torch.testing.assert_close(mean, plain.running_mean, **close)
        torch.testing.assert_close(var, plain.running_var, **close)
        assert tracked == plain.num_batches_tracked


@pytest.mark.parametrize("counts", [(4, 0, 2), (0, 0, 6)], ids=str)
def test_a_borrowed_sample_changes_neither_statistics_nor_any_gradient(
    counts: tuple[int, ...],
) -> None:
    """Two layers of it: what the second would send back for the sample reaches the weights below,
    though the loss of the sample is 0.
    """

    def net() -> nn.Sequential:
        torch.manual_seed(4)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        return nn.Sequential(
            first, nn.BatchNorm1d(4), nn.Tanh(), second, nn.BatchNorm1d(4)
        ).double()

    x, weight = data(sum(counts), (4,)), data(sum(counts), (4,), seed=2)
    plain = net()
    (plain(x).sin() * weight).sum().backward()

    def main(group: Group) -> tuple[Tensor, nn.Module]:
        count = counts[group.rank]
        model = sync_batchnorm.synchronise(net(), summed(group), lambda: count > 0)
        mine, factor = x.split(list(counts))[group.rank], weight.split(list(counts))[group.rank]
        if not count:
            mine, factor = data(1, (4,), seed=9), torch.zeros(1, 4, dtype=torch.float64)
        mine = mine.clone().requires_grad_()
        (model(mine).sin() * factor).sum().backward()
        assert mine.grad is not None
        return mine.grad, model

    results = World(len(counts)).run(main)
    for count, (back, model) in zip(counts, results, strict=True):
        assert bool(back.any()) == (count > 0)
        for name, value in plain.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), value, rtol=1e-10, atol=1e-10)
    for name, value in plain.named_parameters():
        total = sum(model.get_parameter(name).grad for _, model in results)
        torch.testing.assert_close(total, value.grad, rtol=1e-8, atol=1e-8)


def test_in_float32_the_variance_of_data_far_from_zero_is_not_lost() -> None:
    x = (data(64, (4,)) * 0.3 + 3000).float()

    def main(group: Group) -> Tensor:
        return sync_batchnorm.synchronise(nn.BatchNorm1d(4), summed(group))(
            x.split([40, 24])[group.rank]
        ).detach()

    torch.testing.assert_close(
        torch.cat(World(2).run(main)), nn.BatchNorm1d(4)(x).detach(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": 0.5, "eps": 0.1},
    ],
    ids=str,
)
def test_every_setting_of_batchnorm_means_the_same(options: dict[str, Any]) -> None:
    plain, batches = norm(nn.BatchNorm1d, **options), [data(6, (4,), seed=s) for s in range(3)]
    outs = [plain(b) for b in batches]

    def main(group: Group) -> tuple[list[Tensor], dict[str, Tensor]]:
        layer = sync_batchnorm.synchronise(norm(nn.BatchNorm1d, **options), summed(group))
        return [layer(b.split([2, 4])[group.rank]).detach() for b in batches], layer.state_dict()

    results = World(2).run(main)
    for k, out in enumerate(outs):
        torch.testing.assert_close(
            torch.cat([r[0][k] for r in results]), out.detach(), rtol=1e-10, atol=1e-10
        )
    for _, buffers in results:
        assert buffers.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(buffers[name], value, rtol=1e-10, atol=1e-10)


def test_in_evaluation_nothing_is_exchanged_and_running_statistics_are_used() -> None:
    plain = norm(nn.BatchNorm1d)
    plain(data(6, (4,)))

    def never(values: Tensor) -> None:
        raise AssertionError("no exchange in evaluation")

    layer = sync_batchnorm.synchronise(norm(nn.BatchNorm1d), never)
    layer.load_state_dict(plain.state_dict())
    x = data(3, (4,), seed=5)
    assert torch.equal(layer.eval()(x), plain.eval()(x))


def test_replacing_keeps_names_parameters_and_buffers() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), nn.BatchNorm1d(4)
    )
    before, identities = weights(model), [id(p) for p in model.parameters()]
    assert sync_batchnorm.has_batchnorm(model) and not sync_batchnorm.has_batchnorm(model[0])
    made = sync_batchnorm.synchronise(model, lambda values: None)
    assert (
        made is model
        and [id(p) for p in model.parameters()] == identities
        and same_tensors(before, weights(model))
    )
    assert len(sync_batchnorm.running_buffers(model)) == 4
    assert isinstance(model[2], sync_batchnorm.SyncBatchNorm) and isinstance(
        model[1][0], nn.modules.batchnorm._BatchNorm
    )


def test_a_shape_that_batchnorm_refuses_is_refused() -> None:
    layer = sync_batchnorm.synchronise(nn.BatchNorm2d(4), lambda values: None)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.zeros(2, 4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).squeeze(-1)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1).sin()).square().mean()


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_training_with_it_equals_one_process_while_buckets_travel(bucket_bytes: int) -> None:
    batches = [
        torch.randn(9, 5, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
        for s in range(4)
    ]
    alone = Net()
    mine = replica(alone, [[b] for b in batches], nominal=9, loss=loss)
    for _ in batches:
        mine.backward()
        mine.step()
    made = [Net() for _ in range(3)]

    def main(group: Group) -> None:
        model = sync_batchnorm.synchronise(made[group.rank], summed(group))
        ours = replica(
            model,
            [[b.split([4, 3, 2])[group.rank]] for b in batches],
            nominal=9,
            loss=loss,
            bucket_bytes=bucket_bytes,
        )
        for _ in batches:
            AllReduce().round(ours, group, {})

    World(3).run(main)
    assert same_tensors(weights(made[0]), weights(made[1])) and same_tensors(
        weights(made[0]), weights(made[2])
    )
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(made[0])[name], value, rtol=1e-10, atol=1e-10)
