"""Units of a network, found on its autograd graph, and replicas that leave some of them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.data.sources import StreamSource, TensorSource
from manyhands.errors import TaskError
from manyhands.replica.flat import FlatParameters
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.objective import Objective
from manyhands.replica.thinned import ThinnedReplica, thinned
from manyhands.replica.units import FoundUnits, find
from manyhands.replica.update import WholeUpdate
from manyhands.split.skeleton import Units
from support.paths import zoo_task


def flat_of(model: nn.Module) -> FlatParameters:
    return FlatParameters(model, lambda n, dtype: torch.zeros(n, dtype=dtype), 2**20)


def look(
    model: nn.Module,
    *inputs: Tensor,
    loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean(),
) -> FoundUnits:
    return find(model, flat_of(model), lambda: loss(model(*inputs)))


def zoo(name: str) -> FoundUnits:
    task = zoo_task(name)
    *inputs, target = (v[:2] for v in task.train)
    return look(task.model, *inputs, loss=lambda y: task.loss(y, target))


def sides(found: FoundUnits) -> dict[str, tuple[tuple[int, int, int], ...]]:
    return {p.name: p.sides for p in found.parameters}


# -- what is a unit --


def test_hidden_layers_have_units_and_inputs_and_outputs_have_none() -> None:
    found = zoo("mlp")
    assert found.names == ("0", "2", "4") and found.sizes == (32, 24, 32)
    assert sides(found)["0.weight"] == ((0, 0, 1),), "its columns are inputs"
    assert sides(found)["2.weight"] == ((0, 1, 1), (1, 0, 1))
    assert sides(found)["6.weight"] == ((1, 2, 1),) and "6.bias" not in sides(found), (
        "its rows are outputs"
    )


def test_channels_go_through_pooling_and_flatten() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 12),
        nn.Dropout(0.5),
        nn.SiLU(),
        nn.Linear(12, 10),
    )
    found = look(net, torch.randn(2, 1, 28, 28))
    assert found.names == ("0", "3", "7") and found.sizes == (6, 16, 12)
    assert sides(found)["7.weight"] == ((0, 2, 1), (1, 1, 25)), (
        "25 numbers in a row come from one channel"
    )


def test_batchnorm_on_the_way_belongs_to_the_unit_and_a_residual_stream_has_none() -> None:
    found = zoo("cnn")
    assert set(found.names) == {f"blocks.{i}.conv1" for i in range(3)}, (
        "the others are added to each other"
    )
    assert sides(found)["blocks.0.bn1.weight"] == ((0, 0, 1),) and sides(found)[
        "blocks.0.bn1.bias"
    ] == ((0, 0, 1),)
    assert not any(".bn2." in name or "short" in name for name in sides(found))


def test_of_a_transformer_with_tied_embeddings_the_hidden_layers_of_its_mlps_have_units() -> None:
    found = zoo("gpt")
    assert found.names == tuple(f"h.{i}.mlp.0" for i in range(4)) and set(found.sizes) == {64}
    assert zoo("seq2seq").names == (
        "encoders.0.up",
        "encoders.1.up",
        "decoders.0.up",
        "decoders.1.up",
    )


class Odd(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.a, self.b, self.c = how, nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "read twice":
            return self.c(torch.relu(self.b(h) + h))
        if self.how == "called twice":
            return self.c(torch.relu(self.b(torch.relu(self.b(h)))))
        if self.how == "mixed":
            return self.c(torch.relu(self.b(h.softmax(1))))
        if self.how == "penalised":
            return self.c(torch.relu(self.b(h))) + h.square().mean()
        if self.how == "borrowed":
            return (
                self.c(torch.relu(self.b(torch.relu(h))))
                + nn.functional.linear(h.detach(), self.b.weight).mean()
            )
        return self.c(torch.relu(self.b(h[:, torch.randperm(6)])))


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("read twice", ()),
        ("called twice", ()),
        ("mixed", ("b",)),
        ("penalised", ("b",)),
        ("borrowed", ()),
        ("permuted", ("b",)),
    ],
)
def test_where_somebody_else_reads_an_output_it_is_no_unit(
    how: str, names: tuple[str, ...]
) -> None:
    found = look(Odd(how), torch.randn(3, 4))
    assert found.names == names


def test_looking_changes_nothing() -> None:
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2)
    )
    net[1].eval()
    before, rng = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    assert look(net, torch.randn(3, 4, generator=torch.Generator().manual_seed(0))).sizes == (6,)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()) and torch.equal(
        rng, torch.get_rng_state()
    )
    assert [m.training for m in net] == [True, False, True, True, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net)


# -- leaving units out --

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
KEPT = torch.tensor([1.0, 0.0, 2.0, 0.0])


def replica(
    make: Any = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
) -> tuple[nn.Module, ThinnedReplica]:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)).double()
    flat = flat_of(net)
    plain = ModuleReplica(
        flat,
        WholeUpdate(flat, net, make(net.parameters())),
        lambda: MicroLoss(net(X).square().mean(), 8, True),
        nominal=8,
    )
    found = find(net, flat, lambda: net(X).square().mean())
    return net, ThinnedReplica(plain, Units(found.sizes, found.parameters), found)


def test_a_unit_that_is_left_out_says_nothing_and_learns_nothing_and_a_kept_one_is_scaled() -> None:
    net, thin = replica()
    thin.thin(KEPT, None)
    loss = thin.backward()
    hidden = net[0](X).sigmoid().detach() * KEPT
    torch.testing.assert_close(loss, net[2](hidden).square().mean().detach())
    grads = {p.name: p.grad for p in thin.inner.flat.views}
    assert (
        not grads["0.weight"][[1, 3]].any()
        and not grads["0.bias"][[1, 3]].any()
        and not grads["2.weight"][:, [1, 3]].any()
    )
    assert all(grads["0.weight"][i].any() for i in (0, 2)) and grads["2.bias"].all()


def test_gradients_of_scaled_units_are_as_large_as_if_they_were_not() -> None:
    net, thin = replica()
    thin.thin(KEPT, None)
    thin.backward()
    hidden = net[0](X).sigmoid() * KEPT
    net[2](hidden).square().mean().backward()
    for p in thin.inner.flat.views:
        scaled = p.parameter.grad
        assert scaled is not None
        shrink = {
            "0.weight": KEPT[:, None],
            "0.bias": KEPT,
            "2.weight": KEPT[None],
            "2.bias": torch.ones(3),
        }[p.name]
        torch.testing.assert_close(p.grad * shrink, scaled)


def test_in_between_and_in_evaluation_the_network_is_whole() -> None:
    net, thin = replica()
    whole = net(X)
    thin.thin(KEPT, None)
    assert torch.equal(net(X), whole), "only `backward` leaves anything out"
    thin.thin(None, None)
    torch.testing.assert_close(thin.backward(), whole.square().mean().detach(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_step_changes_chosen_elements_only_and_what_is_remembered_of_them(kind: str) -> None:
    make = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    }[kind]
    (_, thin), (_, plain) = replica(make), replica(make)
    flat = thin.inner.flat
    chosen = {k: torch.arange(v.numel()) % 2 == 0 for k, v in flat.values.items()}
    for turn in (0, 1):  # before the optimizer has anything to remember, and after
        elements = {k: c if turn == 0 else ~c for k, c in chosen.items()}
        before, kept = (
            {k: v.clone() for k, v in flat.values.items()},
            [m.clone() for m in thin.moments.values()] if turn else [],
        )
        thin.thin(None, elements)
        for r in (thin, plain):
            r.backward()
            r.step()
        for k, v in flat.values.items():
            assert torch.equal(v[~elements[k]], before[k][~elements[k]])
            assert turn or torch.equal(v[elements[k]], plain.inner.flat.values[k][elements[k]])
        for i, (p, (name, m)) in enumerate(
            (p, item)
            for p in flat.views
            for item in thin.moments.items()
            if item[0].startswith(p.name + "/")
        ):
            mask = torch.as_strided(elements[p.vector], p.value.shape, p.value.stride(), p.start)
            assert torch.equal(m[~mask], kept[i][~mask] if turn else torch.zeros_like(m[~mask])), (
                name
            )


def test_a_network_without_such_layers_and_a_loop_of_ones_own_are_told_so() -> None:
    net = nn.Linear(5, 3).double()
    flat = flat_of(net)
    plain = ModuleReplica(
        flat,
        WholeUpdate(flat, net, torch.optim.SGD(net.parameters(), lr=0.1)),
        lambda: MicroLoss(None, 0, True),
        nominal=1,
    )
    batches: Any = None
    tensors = TensorSource((X, torch.zeros(8, 3, dtype=torch.float64)), torch.device("cpu"))
    task = TaskLoss(net, batches, Objective(nn.functional.mse_loss), "fp32", torch.device("cpu"))
    with pytest.raises(
        TaskError, match=r"no layer whose units could be left out.*choose another merge="
    ):
        thinned(plain, net, task, tensors)
    with pytest.raises(TaskError, match=r"the training data is a stream; give a Dataset"):
        thinned(plain, net, task, StreamSource([1], torch.device("cpu")))
    with pytest.raises(TaskError, match=r"a loop of its own; give a Task"):
        thinned(plain, net, lambda: None, tensors)
