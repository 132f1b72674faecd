"""Embedding tables: one pull a batch, one push a step, rows prefetched.

There are fewer requests, and the same numbers but for what was pushed meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Position, Rows, Tensors
from manyhands.data.batches import IndexedBatches
from manyhands.data.prefetch import PrefetchedBatches
from manyhands.data.sources import TensorSource
from manyhands.embedding.modules import Embedding, EmbeddingBag
from manyhands.embedding.tables import EmbeddingTables
from manyhands.errors import TaskError
from manyhands.server.clock import Clock
from manyhands.server.local_store import LocalStore
from manyhands.server.shard import Shard
from manyhands.split.data import DataSplit


class Counted(LocalStore):
    """Counts requests."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.pulls: list[dict[str, int]] = []
        self.pushes = 0

    def pull(self, rows: Rows, into: Tensors | None = None, *, remember: bool = False) -> Tensors:
        self.pulls.append({k: len(v) for k, v in rows.items() if v is not None})
        return super().pull(rows, into, remember=remember)

    def push(self, *args: Any, **how: Any) -> Any:
        self.pushes += 1
        return super().push(*args, **how)


class InBackground(Counted):
    """Rows are read when they are asked for and handed out later."""

    background = True


class Model(nn.Module):
    """Ids come as a column, several columns, a tensor, and under a name two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.user = Embedding("user", 2, optimizer="sgd", lr=0.1)
        self.item = Embedding("item", 3, optimizer="adagrad", lr=0.1)
        self.again = Embedding("item", 3, optimizer="adagrad", lr=0.1)
        self.bag = EmbeddingBag("tags", 1, optimizer="sgd", lr=0.1, padding_id=0)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        seen = [
            self.user(ids[:, 0]),
            self.item(ids[:, 1]),
            self.again(ids[:, 2:]).sum(1),
            self.bag(tags),
        ]
        return torch.cat(seen, 1).tanh().sum(1) + self.bias


def columns(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    return (
        torch.randint(-5, 5, (n, 4), generator=dice),
        torch.randint(0, 4, (n, 3), generator=dice),
        torch.randn(n, generator=dice),
    )


def batch_iterator(batch: int = 8, n: int = 40) -> IndexedBatches:
    data = columns(n)
    return IndexedBatches(
        TensorSource(data, torch.device("cpu")),
        lambda epoch: torch.arange(n),
        DataSplit(n, batch, batch, 0, 1),
        Position(),
    )


def trained(
    store: LocalStore, lookahead: int | None, steps: int = 7, accumulate: int = 1, **options: Any
) -> tuple[EmbeddingTables, list[float], PrefetchedBatches | IndexedBatches]:
    """None: the modules are on their own."""
    model = Model()
    tables = EmbeddingTables(model, store, **options)
    tables.attach()
    batches = (
        batch_iterator()
        if lookahead is None
        else PrefetchedBatches(batch_iterator(), tables, lookahead)
    )
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):
            *inputs, target = batches.next().values
            loss = (model(*inputs) - target).square().mean()
            loss.backward()
            losses.append(loss.item())
        tables.push()
    tables.flush()
    return tables, losses, batches


def equal(a: EmbeddingTables, b: EmbeddingTables) -> bool:
    left, right = a.dump(), b.dump()

    def rows(content: Tensors, name: str) -> dict[int, list[float]]:
        return dict(
            zip(content[f"{name}/ids"].tolist(), content[f"{name}/values"].tolist(), strict=True)
        )

    return all(rows(left, t.name) == rows(right, t.name) for t in a.specs)


# -- requests --


def test_a_batch_is_one_pull_and_a_step_is_one_push_for_all_tables() -> None:
    store = Counted()
    tables, _, _ = trained(store, 0, steps=5)
    assert (
        len(store.pulls) == 4 + 4 and store.pushes == 5
    )  # the first batch is where it is learned what to ask for
    assert all(set(pull) == {"user", "item", "tags"} for pull in store.pulls[4:])
    counts = tables.stats()
    assert counts["lookups"] == 20 and counts["lookups_ahead"] == 16
    assert counts["rows_pulled"] == sum(sum(pull.values()) for pull in store.pulls)


def test_a_task_may_say_which_ids_a_batch_has() -> None:
    store = Counted()
    say = lambda batch: {
        "user": batch[0][:, 0],
        "item": [batch[0][:, 1], batch[0][:, 2:]],
        "tags": batch[1],
    }
    told, losses, _ = trained(store, 0, steps=3, ids=say)
    assert len(store.pulls) == 3 and told.stats()["lookups_ahead"] == 12
    plain, expected, _ = trained(Counted(), None, steps=3)
    assert losses == expected and equal(told, plain)
    with pytest.raises(
        TaskError,
        match=r"Task\.ids gives ids of users, but the model's tables are user, item, tags",
    ):
        trained(store, 0, ids=lambda batch: {"users": batch[0]})


def test_ids_that_a_task_got_wrong_are_looked_up_when_they_come() -> None:
    tables, losses, _ = trained(
        Counted(), 0, steps=3, ids=lambda batch: {"user": batch[0][:, 0] + 1}
    )
    _, expected, _ = trained(Counted(), None, steps=3)
    assert losses == expected and tables.stats()["lookups_ahead"] == 0


@pytest.mark.parametrize("make", [Counted, InBackground])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_lookahead_the_numbers_are_those_of_modules_on_their_own(
    make: type[Counted], accumulate: int
) -> None:
    together, losses, _ = trained(make(), 0, accumulate=accumulate)
    apart, expected, _ = trained(Counted(), None, accumulate=accumulate)
    assert losses == expected and equal(together, apart)


@pytest.mark.parametrize("make", [Counted, InBackground])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_rows_fetched_ahead_miss_what_was_pushed_since_and_nothing_else(
    make: type[Counted], lookahead: int
) -> None:
    model, store = Embedding("rows", 1, optimizer="sgd", lr=0.5, init="zeros"), make()
    tables = EmbeddingTables(model, store, ids=lambda batch: {"rows": batch[0]})
    tables.attach()
    ids, target = (
        torch.randint(0, 6, (40,), generator=torch.Generator().manual_seed(0)),
        torch.linspace(-1, 1, 40),
    )
    source = TensorSource((ids, target), torch.device("cpu"))
    batches = PrefetchedBatches(
        IndexedBatches(
            source, lambda epoch: torch.arange(40), DataSplit(40, 4, 4, 0, 1), Position()
        ),
        tables,
        lookahead,
    )
    versions = [torch.zeros(6)]  # of a dense vector, after so many steps
    for step in range(10):
        ids, target = batches.next().values
        (model(ids).squeeze(1) - target).square().sum().backward()
        tables.push()
        seen = versions[max(0, step - lookahead)].clone().requires_grad_()
        (seen[ids] - target).square().sum().backward()
        versions.append(versions[-1] - 0.5 * seen.grad)  # type: ignore[operator]
    with torch.no_grad():
        assert torch.allclose(model(torch.arange(6)).squeeze(1), versions[-1], atol=1e-6)


def test_ids_that_the_model_computes_are_not_guessed_and_this_is_said_once() -> None:
    class Computes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known, self.made = Embedding("known", 2), Embedding("made", 2)

        def forward(self, ids: Tensor) -> Tensor:
            return (self.known(ids) + self.made(ids * 31)).sum()

    said: list[str] = []
    store = Counted()
    model = Computes()
    tables = EmbeddingTables(model, store, notice=said.append)
    tables.attach()
    for i in range(4):
        batch = (torch.arange(6) + i,)
        tables.begin(batch)
        model(*batch).backward()
        tables.push()
    assert [sorted(p) for p in store.pulls[2:4]] == [["known"], ["made"]]
    assert said == [
        "the model computes the ids of made, so their rows are not prefetched; name them in "
        "Task.ids"
    ]


def test_batches_of_other_lengths_and_shapes_are_still_understood() -> None:
    model = nn.ModuleDict({"a": Embedding("a", 1), "b": Embedding("b", 1)})
    store = Counted()
    tables = EmbeddingTables(model, store)
    tables.attach()
    for rows, length in ((4, 3), (4, 3), (2, 5), (1, 1)):
        batch = {
            "x": torch.arange(rows * length).view(rows, length),
            "y": [torch.arange(rows * 2).view(rows, 2)],
        }
        tables.begin(batch)
        out = model["a"](batch["x"].view(-1)).sum() + model["b"](batch["y"][0][:, 1]).sum()
        out.backward()
        tables.push()
    assert len(store.pulls) == 2 + 3 and store.pulls[-1] == {"a": 1, "b": 1}
    assert tables.stats()["lookups_ahead"] == 6


def test_an_evaluation_sees_what_was_pushed_and_never_what_was_fetched_for_training() -> None:
    tables, _, batches = trained(InBackground(), 1, steps=3)
    model = nn.ModuleList(tables.modules)
    *inputs, _ = batches.next().values
    with torch.no_grad():
        seen = model[0](inputs[0][:, 0])
    content = tables.dump()
    rows = dict(zip(content["user/ids"].tolist(), content["user/values"], strict=True))
    assert torch.equal(seen, torch.stack([rows[i] for i in inputs[0][:, 0].tolist()]))


def test_a_push_that_waits_for_the_next_request_is_not_forgotten() -> None:
    model = nn.Sequential(Embedding("rows", 1, optimizer="sgd", lr=1.0, init="zeros"))
    for after in ("flush", "dump", "close", "restore", "evaluate", "push"):
        store = InBackground()
        tables = EmbeddingTables(model, store)
        tables.attach()
        model(torch.tensor([1])).sum().backward()
        tables.push()
        assert store.pushes == 0
        if after == "evaluate":
            with torch.no_grad():
                model(torch.tensor([1]))
        elif after == "push":
            model(torch.tensor([2])).sum().backward()
            tables.push()
        else:
            getattr(tables, after)(*([{}] if after == "restore" else []))
        assert store.pushes == 1 and store.pull({"rows": torch.tensor([1])})["rows"].item() == -1.0


def test_tables_whose_names_begin_alike_each_get_their_own_rows_back() -> None:
    names = ("a", "a/b", "a/state", "a/state/sum")
    model = nn.ModuleList([Embedding(name, 1, optimizer="adagrad", lr=0.5) for name in names])
    tables, other = EmbeddingTables(model, Counted()), EmbeddingTables(model, Counted())
    tables.attach()
    for i, module in enumerate(model):
        module(torch.tensor([i, 7])).sum().backward()
    tables.push()
    saved = tables.dump()
    other.attach()
    other.restore(saved)
    restored = other.dump()
    assert restored.keys() == saved.keys() and all(
        torch.equal(restored[k], saved[k]) for k in saved
    )
    without = EmbeddingTables(model[:1], Counted())  # type: ignore[arg-type]
    without.attach()
    without.restore(saved)
    assert without.dump()["a/ids"].tolist() == [0, 7], (
        "nor does it take those of a table that is no more"
    )


# -- position --


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_batches_drawn_ahead_do_not_move_the_position_of_the_run(lookahead: int) -> None:
    plain = batch_iterator()
    tables = EmbeddingTables(Model(), Counted())
    tables.attach()
    ahead = PrefetchedBatches(batch_iterator(), tables, lookahead)
    assert ahead.position == plain.position == Position()
    for _ in range(12):
        a, b = ahead.next(), plain.next()
        assert ahead.position == plain.position and (a.count, a.last) == (b.count, b.last)
        assert all(torch.equal(x, y) for x, y in zip(a.values, b.values, strict=True))
    assert ahead.samples == 40 and ahead.batches_per_epoch == 5


# -- several ranks --


def test_gradients_pending_together_equal_one_process() -> None:
    """Two ranks, each with half of every batch and a loss scaled by its share, and a rule that is
    not linear.
    """
    shards, clock = [Shard()], Clock(2)
    data = columns(24)
    models = [Model() for _ in range(2)]
    made = [
        EmbeddingTables(m, LocalStore(r, 2, shards, clock), synchronous=True)
        for r, m in enumerate(models)
    ]
    for tables in made:
        tables.attach()

    def work(rank: int) -> None:
        for step in range(3):
            ids, tags, target = (column[step * 8 + rank * 4 :][:4] for column in data)
            ((models[rank](ids, tags) - target).square().mean() / 2).backward()
            made[rank].push()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    one = Model()
    alone = EmbeddingTables(one, Counted())
    alone.attach()
    for step in range(3):
        ids, tags, target = (column[step * 8 :][:8] for column in data)
        (one(ids, tags) - target).square().mean().backward()
        alone.push()
    ids = torch.arange(-5, 5)
    with torch.no_grad():
        for name in ("user", "item"):
            assert torch.allclose(getattr(models[0], name)(ids), getattr(one, name)(ids), atol=1e-6)
