"""Embeddings over a store equal nn.Embedding and nn.EmbeddingBag, for ids without a range."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.embedding import default_rows, tables
from manyhands.embedding.distinct import distinct
from manyhands.embedding.gather import bags_of
from manyhands.embedding.modules import Embedding, EmbeddingBag
from manyhands.embedding.saved_rows import load_rows
from manyhands.embedding.tables import EmbeddingTables
from manyhands.errors import CheckpointError, StoreError, TaskError
from manyhands.server.local_store import LocalStore

DIM = 5


@pytest.fixture(autouse=True)
def rows_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that nobody attaches find their rows in a store that no other test has seen."""
    monkeypatch.setattr(default_rows, "_open", lambda: tables.script_tables(LocalStore(0, 1)))
    monkeypatch.setattr(default_rows, "_default", None)


def attached(model: nn.Module, **options: Any) -> EmbeddingTables:
    made = EmbeddingTables(model, LocalStore(0, 1), **options)
    made.attach()
    return made


def both(
    ids: Tensor,
    make: Callable[..., Any] = Embedding,
    peer: type[nn.Module] = nn.Embedding,
    **options: Any,
) -> Any:
    """One of ours and one of torch's with equal rows under the ids 0, 1, ..."""
    theirs = peer(int(ids.max()) + 1, DIM, **options)
    ours = make("rows", DIM, optimizer="sgd", lr=0.1, **options)
    held = attached(ours)
    weight = theirs.weight.detach().clone()  # type: ignore[union-attr]
    held.restore({"rows/ids": torch.arange(len(weight)), "rows/values": weight})  # type: ignore
    return ours, theirs, held


def rows_of(held: EmbeddingTables, name: str = "rows") -> dict[int, Tensor]:
    content = held.store.dump(name)
    return dict(zip(content["ids"].tolist(), content["values"], strict=True))


# -- the same as torch's --


@pytest.mark.parametrize("shape", [(7,), (4, 3), (2, 3, 2), (), (0,)])
def test_one_process_learns_the_bits_of_a_dense_embedding(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    every = torch.arange(12)
    ours, theirs, held = both(every)
    head = nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(4):
        ids = torch.randint(0, 12, shape)  # with repeats
        out, expected = ours(ids), theirs(ids)
        assert torch.equal(out, expected) and out.shape == (*shape, DIM)
        optimizer.zero_grad()
        head(expected).square().sum().backward()
        head(out).square().sum().backward()
        optimizer.step()
        held.push()
    assert torch.equal(torch.stack([rows_of(held)[i] for i in range(12)]), theirs.weight)


def test_gradients_of_an_id_that_repeats_are_summed_before_the_optimizer() -> None:
    model = Embedding("rows", 2, optimizer="adagrad", lr=1.0, init="zeros")
    held = attached(model)
    out = model(torch.tensor([3, 8, 3, 3]))
    out.backward(torch.tensor([[1.0, 2.0], [5.0, 5.0], [1.0, 0.0], [2.0, -2.0]]))
    held.push()
    assert rows_of(held)[3].tolist() == pytest.approx(
        [-1.0, 0.0]
    )  # 4 / sqrt(16): one step of 4, not one of 1, 1 and 2
    assert rows_of(held)[8].tolist() == pytest.approx([-1.0, -1.0])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("layout", ["offsets", "rows", "padded"])
def test_bags_are_those_of_torch_and_so_is_what_they_learn(mode: str, layout: str) -> None:
    torch.manual_seed(1)
    padding = {"padding_idx": 0} if layout == "padded" else {}
    make = lambda name, dim, padding_idx=None, **more: EmbeddingBag(
        name, dim, padding_id=padding_idx, **more
    )
    ours, theirs, held = both(torch.arange(9), make, nn.EmbeddingBag, mode=mode, **padding)
    ids = torch.tensor([[1, 2, 2], [0, 0, 0], [4, 0, 8], [8, 8, 1]])
    given = (
        (ids,) if layout != "offsets" else (ids.reshape(-1), torch.tensor([0, 5, 5, 11]))
    )  # the second bag is empty
    out, expected = ours(*given), theirs(*given)
    assert torch.equal(out, expected)
    if layout != "rows":
        assert out[1].abs().sum() == 0
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    held.push()
    moved = theirs.weight.detach() - 0.1 * theirs.weight.grad  # type: ignore[operator]
    kept = rows_of(held)
    assert torch.allclose(torch.stack([kept[i] for i in range(9)]), moved, atol=1e-7)


@pytest.mark.parametrize("padding", [None, 2])
def test_weights_multiply_the_rows_of_a_sum_and_get_gradients(padding: int | None) -> None:
    make = lambda name, dim, padding_idx=None, **more: EmbeddingBag(
        name, dim, padding_id=padding_idx, **more
    )
    ours, theirs, _ = both(
        torch.arange(6),
        make,
        nn.EmbeddingBag,
        mode="sum",
        **({"padding_idx": padding} if padding else {}),
    )
    ids = torch.tensor([[1, 2, 2], [4, 0, 5]])
    w, v = (torch.linspace(-1, 1, 6).view(2, 3).clone().requires_grad_() for _ in range(2))
    out, expected = ours(ids, weights=w), theirs(ids, per_sample_weights=v)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(w.grad, v.grad)  # type: ignore[arg-type]


def test_the_weights_of_a_bag_have_torchs_name_too() -> None:
    model = EmbeddingBag("rows", DIM)
    ids, weights = torch.tensor([[1, 2, 2]]), torch.tensor([[0.5, 2.0, -1.0]])
    assert torch.equal(model(ids, per_sample_weights=weights), model(ids, weights=weights))


def test_padding_is_not_fetched() -> None:
    model = EmbeddingBag("rows", DIM, "mean", padding_id=-1)
    held = attached(model)
    out = model(torch.tensor([[-1, -1], [-1, 7]]))
    assert out[0].tolist() == [0.0] * DIM and out[1].abs().sum() > 0
    assert model(torch.tensor([[-1, -1]])).tolist() == [
        [0.0] * DIM
    ]  # and where a batch is nothing else
    out.sum().backward()
    held.push()
    assert list(rows_of(held)) == [7]


# -- ids and tables --


def test_ids_have_no_range() -> None:
    ids = torch.tensor([2**62, -5, 0, 2**63 - 1, -(2**63) + 1])
    first = Embedding("rows", DIM)
    held = attached(first)
    a = first(ids)
    assert len(set(map(tuple, a.tolist()))) == 5 and 0 < a.abs().max() <= 0.01
    a.sum().backward()
    held.push()
    assert sorted(rows_of(held)) == sorted(ids.tolist())


def test_rows_start_by_table_seed_and_id_alone() -> None:
    ids = torch.tensor([4, -7, 4])
    make = lambda name="rows", **more: Embedding(name, DIM, **more)
    starts = []
    for model in (
        make(),
        make(),
        make(seed=1),
        make("others"),
        make(init="normal", scale=2.0),
        make(init="zeros"),
    ):
        attached(model)
        starts.append(model(ids).detach())
    assert torch.equal(starts[0], starts[1]) and torch.equal(starts[0][0], starts[0][2])
    assert all(not torch.equal(starts[0], other) for other in starts[2:])
    assert starts[4].abs().max() > 0.1 and starts[5].abs().sum() == 0


def test_two_modules_of_one_name_share_a_table() -> None:
    model = nn.ModuleList(
        [
            Embedding("rows", 2, optimizer="sgd", lr=1.0),
            EmbeddingBag("rows", 2, optimizer="sgd", lr=1.0),
        ]
    )
    held = attached(model)
    before = model[0](torch.tensor([1])).detach()
    (model[0](torch.tensor([1])).sum() + model[1](torch.tensor([[1, 1]])).sum()).backward()
    held.push()
    assert len(held.specs) == 1
    assert torch.allclose(model[0](torch.tensor([1])), before - 3.0)
    with pytest.raises(
        TaskError, match="two embeddings named 'rows' differ: dim=2 and 3; give both the same"
    ):
        EmbeddingTables(
            nn.ModuleList([*model, Embedding("rows", 3, optimizer="sgd", lr=1.0)]), LocalStore(0, 1)
        )


def test_micro_batches_are_pushed_once_and_learning_rates_follow_a_schedule() -> None:
    model = nn.ModuleList(
        [
            Embedding("a", 1, optimizer="adagrad", lr=1.0, init="zeros"),
            Embedding("b", 1, optimizer="sgd", lr=0.5, init="zeros"),
        ]
    )
    held = attached(model)
    for _ in range(2):
        (model[0](torch.tensor([1])) * 3 + model[1](torch.tensor([1])) * 3).sum().backward()
    held.push(scale=0.5, rate=0.1)
    assert rows_of(held, "a")[1].item() == pytest.approx(-0.1)  # one step of 3, not two
    assert rows_of(held, "b")[1].item() == pytest.approx(-0.05 * 3)
    assert held.stats()["rows_pushed"] == 4 and held.stats()["rows_pushed"] == 0


def test_a_step_that_did_not_happen_leaves_no_trace() -> None:
    model = Embedding("rows", 1, optimizer="sgd", lr=1.0, init="zeros")
    held = attached(model)
    model(torch.tensor([1])).sum().backward()
    held.drop()
    held.push()
    assert model(torch.tensor([1])).item() == 0


def test_a_gradient_that_is_no_number_is_refused_by_table_and_id() -> None:
    model = Embedding("rows", 1, optimizer="sgd", lr=1.0, init="zeros")
    held = attached(model)
    (model(torch.tensor([1, 77])) * torch.tensor([[1.0], [float("nan")]])).sum().backward()
    with pytest.raises(StoreError, match=r"rows.*77"):
        held.push()
        held.flush()
    assert model(torch.tensor([1, 77])).tolist() == [[0.0], [0.0]]


# -- reading only --


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_an_evaluation_reads_and_pushes_nothing(how: str) -> None:
    model = Embedding("rows", 1, optimizer="sgd", lr=1.0, init="zeros")
    held = attached(model)
    model(torch.tensor([1])).sum().backward()
    held.push()
    with torch.set_grad_enabled(how != "no_grad"):
        out = (model.eval() if how == "eval" else model)(torch.tensor([1, 2]))
    assert out.tolist() == [[-1.0], [0.0]] and not out.requires_grad
    held.push()
    assert model(torch.tensor([1])).item() == -1.0


@pytest.mark.parametrize("how", ["eval", "no_grad", "frozen"])
def test_reading_makes_no_rows(how: str) -> None:
    model = Embedding("rows", DIM, lr=1.0)
    held = attached(model)
    model(torch.tensor([1])).sum().backward()
    held.push()
    trained = model(torch.tensor([1, 2])).detach()
    model.train(how != "eval").requires_grad_(how != "frozen")
    with torch.set_grad_enabled(how != "no_grad"):
        assert torch.equal(model(torch.tensor([1, 2])), trained)
    assert list(rows_of(held)) == [1]


def test_a_frozen_embedding_is_read_and_not_trained_until_it_is_unfrozen() -> None:
    model = nn.ModuleList(
        [
            Embedding("a", 1, optimizer="sgd", lr=1.0, init="zeros").requires_grad_(False),
            EmbeddingBag("b", 1, optimizer="sgd", lr=1.0, init="zeros"),
        ]
    )
    held = attached(model, ids=lambda ids: {"a": ids, "b": ids})
    ids = torch.tensor([[3]])
    for _ in range(2):
        held.begin(ids)
        one, bag = model[0](ids), model[1](ids)
        assert not one.requires_grad and bag.requires_grad
        (one.sum() + bag.sum()).backward()
        held.push()
    assert held.stats()["lookups_ahead"] == 4  # its rows are prefetched as others are
    assert model[0](ids).item() == 0 and model[1](ids).item() == -2
    assert "frozen" in repr(model[0]) and "frozen" not in repr(model[1])
    model[0].requires_grad_()
    model[0](ids).sum().backward()
    held.push()
    assert model[0](ids).item() == -1


def test_a_frozen_embedding_stays_frozen_in_copies_and_in_a_plain_loop() -> None:
    model = Embedding("rows", 1, optimizer="sgd", lr=1.0, init="zeros").requires_grad_(False)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)).train()):
        scale = torch.ones(1, requires_grad=True)
        (one(torch.tensor([1])) * scale + scale).sum().backward()
        assert one.frozen and one(torch.tensor([1])).item() == 0


def test_a_plain_loop_trains_without_anybody() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Embedding("words", 8, lr=0.5), nn.Flatten(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(-(2**62), 2**62, (64, 2))
    target = torch.randn(64, 1)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(ids), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    other = Embedding("words", 8, lr=0.5)
    assert torch.equal(other(ids), model[0](ids))  # by name
    with pytest.raises(TaskError, match="two embeddings named 'words' differ: dim=8 and 4"):
        Embedding("words", 4, lr=0.5)(ids)


def test_a_model_is_saved_without_rows_and_copies_of_it_share_them() -> None:
    model = nn.Sequential(Embedding("rows", 2, lr=1.0))
    held = attached(model)
    assert not model.state_dict() and not list(model.parameters())
    ids = torch.tensor([5])
    model(ids).sum().backward()
    held.push()
    trained = model(ids).detach()
    assert torch.equal(copy.deepcopy(model)(ids), trained)
    alone = pickle.loads(pickle.dumps(model))
    assert alone[0]._tables is None and alone[0].table == model[0].table
    held.close()
    assert not torch.equal(model(ids), trained)  # its own again


def test_a_model_that_keeps_its_rows_after_a_run_shares_them_with_no_other_of_that_name() -> None:
    model, ids = Embedding("rows", 1, optimizer="sgd", lr=1.0, init="zeros"), torch.tensor([5])
    held = attached(model)
    model(ids).sum().backward()
    held.push()
    held.leave_rows(held.store)
    assert model(ids).item() == -1 and Embedding("rows", 1, init="zeros")(ids).item() == 0
    model(ids).sum().backward()  # a plain loop now
    assert model(ids).item() == -2
    load_rows(model, {"rows/ids": ids, "rows/values": torch.tensor([[7.0]])})
    assert model(ids).item() == 7 and Embedding("rows", 1, init="zeros")(ids).item() == 0


def test_all_rows_go_out_and_come_back() -> None:
    make = lambda: nn.ModuleList([Embedding("a", 2), Embedding("b", 3, optimizer="adam", lr=0.1)])
    ids = torch.tensor([1, -1, 2**40])

    def train(model: nn.Module, held: EmbeddingTables) -> None:
        for _ in range(3):
            sum(m(ids).square().sum() + m(ids).sum() for m in model).backward()  # type: ignore
            held.push()

    first, second = make(), make()
    a, b = attached(first), attached(second)
    train(first, a)
    content = a.dump()
    assert {"a/ids", "a/values", "b/ids", "b/values"} <= content.keys()
    b.restore(content)
    for held, model in ((a, first), (b, second)):
        train(model, held)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one(ids), other(ids))


# -- types --


def test_rows_stay_float32_under_a_shorter_type_and_are_float64_in_such_a_model() -> None:
    ids = torch.tensor([1, 2])
    model = nn.Sequential(Embedding("rows", 4), nn.Linear(4, 1))
    attached(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids)
    assert out.dtype == torch.bfloat16 and model[0](ids).dtype == torch.float32
    out.float().sum().backward()
    long = nn.Sequential(Embedding("rows", 4), nn.Linear(4, 1)).double()
    held = attached(long)
    assert long(ids).dtype == torch.float64 and held.specs[0].dtype == "float64"
    short = nn.Sequential(Embedding("rows", 4), nn.Linear(4, 1)).bfloat16()
    held = attached(short)
    assert short(ids).dtype == torch.bfloat16 and held.specs[0].dtype == "float32"


# -- what is refused --


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Embedding("", 2), "a name for its table is needed"),
        (lambda: Embedding("t", 0), "dim=0, but a whole number of at least 1"),
        (lambda: Embedding("t", 2.5), "dim=2.5"),  # type: ignore[arg-type]
        (lambda: Embedding("t", 2, lr=0.0), "lr=0.0, but a positive number is needed"),
        (lambda: Embedding("t", 2, init="ones"), "init='ones', but zeros, uniform or normal"),
        (
            lambda: Embedding("t", 2, dtype=torch.float16),
            "are kept in torch.float32 or torch.float64",
        ),
        (
            lambda: EmbeddingBag("t", 2, mode="median"),
            "mode='median', but sum or mean or max is needed",
        ),  # type: ignore[arg-type]
        (lambda: Embedding("t", 2)([1, 2]), "ids are a list, but a tensor of int64 is needed"),
        (
            lambda: Embedding("t", 2)(torch.tensor([1.0])),
            "ids are torch.float32, but int64 is needed",
        ),
        (
            lambda: Embedding("t", 2)(torch.tensor([1], dtype=torch.int32)),
            "ids are torch.int32, but int64 is needed; call .long",
        ),
        (
            lambda: EmbeddingBag("t", 2)(torch.tensor([1])),
            r"ids of shape \[1\], but \[bags, length\], or one axis and offsets",
        ),
        (lambda: EmbeddingBag("t", 2)(torch.ones(1, 1, 1).long()), r"ids of shape \[1, 1, 1\]"),
        (
            lambda: EmbeddingBag("t", 2)(torch.ones(1, 1).long(), torch.tensor([0])),
            "2-D ids with offsets",
        ),
        (lambda: EmbeddingBag("t", 2)(torch.tensor([1, 2]), torch.tensor([1])), "begin at 0"),
        (lambda: EmbeddingBag("t", 2)(torch.tensor([1, 2]), torch.tensor([0, 2, 1])), "rise"),
        (lambda: EmbeddingBag("t", 2)(torch.tensor([1, 2]), torch.tensor([0, 3])), "over 2 ids"),
        (
            lambda: EmbeddingBag("t", 2)(torch.tensor([1, 2]), torch.tensor([])),
            "offsets are torch.float32",
        ),
        (
            lambda: EmbeddingBag("t", 2)(torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)),
            "2 ids and no offsets",
        ),
        (
            lambda: EmbeddingBag("t", 2, "mean")(torch.ones(1, 1).long(), weights=torch.ones(1, 1)),
            "weights with mode='mean'",
        ),
        (
            lambda: EmbeddingBag("t", 2)(torch.ones(1, 2).long(), weights=torch.ones(2)),
            r"weights of shape \[2\]",
        ),
        (
            lambda: EmbeddingBag("t", 2)(
                torch.ones(1, 1).long(),
                weights=torch.ones(1, 1),
                per_sample_weights=torch.ones(1, 1),
            ),
            "weights and per_sample_weights, but one of them is needed; leave one out",
        ),
        (
            lambda: Embedding("t", 2, max_norm=1.0),
            r"^Embedding 't': max_norm=1.0 is an option of torch.nn.Embedding, but .*; leave it",
        ),
        (lambda: Embedding("t", 2, padding_idx=0), "padding_idx=0 is an option .*; leave it out"),
        (lambda: Embedding("t", 2, sparse=True), "sparse=True is an option of torch.nn.Embedding"),
        (lambda: Embedding("t", 2, scale_grad_by_freq=True), "scale_grad_by_freq=True is an opt"),
        (
            lambda: EmbeddingBag("t", 2, include_last_offset=True),
            "include_last_offset=True is an option of torch.nn.EmbeddingBag",
        ),
        (lambda: EmbeddingBag("t", 2, padding_idx=0), "padding_idx=0 .*; name it padding_id$"),
        (
            lambda: Embedding("t", 2, rule="adagrad"),  # type: ignore[arg-type]
            r"^Embedding\(rule='adagrad'\) is now optimizer='adagrad'$",
        ),
        (
            lambda: EmbeddingBag("t", 2, rule="sgd"),
            r"^EmbeddingBag\(rule='sgd'\) is now optimizer='sgd'$",
        ),
    ],
)
def test_what_cannot_be_looked_up_is_refused_with_what_is_needed(
    make: Callable[[], Any], complaint: str
) -> None:
    with pytest.raises(TaskError, match=complaint):
        make()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"optimizer": "nesterof"}, "nesterof"),
        ({"optimizer": "sgd", "epsilon": 1.0}, "epsilon"),
        ({"mode": "sum"}, "has no option 'mode'; known: lr"),  # of a bag
    ],
)
def test_an_unknown_optimizer_or_option_is_refused_when_the_table_is_made(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(StoreError, match=named):
        attached(Embedding("t", 2, **options))


# -- distinct ids --


@pytest.mark.parametrize("n", [0, 1, 7, 5000])
def test_distinct_ids_and_where_they_stand(n: int) -> None:
    dice = torch.Generator().manual_seed(n)
    for low, high in ((0, 3), (-(2**62), 2**62), (0, n + 1)):
        ids = torch.randint(low, high, (n,), generator=dice)
        ids = torch.where(torch.arange(n) % 3 > 0, ids, ids.flip(0)) * (1 << 20 if high == 3 else 1)
        found, inverse = distinct(ids)
        assert torch.equal(found[inverse], ids) and len(found) == len(set(ids.tolist()))
        assert list(dict.fromkeys(ids.tolist())) == found.tolist()  # in order of appearance
    strided = torch.arange(20).view(10, 2)[:, 1]
    assert distinct(strided)[0].tolist() == list(range(1, 20, 2))


# -- compiled, and loaded --


class Both(nn.Module):
    def __init__(self, dim: int = 3, second: str = "bags") -> None:
        super().__init__()
        self.one = Embedding("ones", dim, optimizer="sgd", lr=0.1)
        self.bag = EmbeddingBag(second, dim, mode="mean", optimizer="adagrad", lr=0.1)
        self.last = nn.Linear(dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.one(ids).sum(1) * self.bag(ids))
        return out


def test_a_compiled_model_learns_what_it_learns_uncompiled() -> None:
    ids = torch.arange(12).view(4, 3) % 7
    torch.manual_seed(0)
    plain = Both()
    wrapped = copy.deepcopy(plain)
    compiled = torch.compile(
        wrapped, backend="eager"
    )  # traces as other backends do, and takes no time to make code
    a, b = attached(plain), attached(wrapped)
    for _ in range(3):
        losses = [m(ids).square().mean() for m in (plain, compiled)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        a.push()
        b.push()
    assert torch.equal(plain.last.weight.grad, wrapped.last.weight.grad)  # type: ignore[arg-type]
    x, y = a.dump(), b.dump()
    assert (
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) and len(x["ones/ids"]) == 7
    )


def trained() -> tuple[Both, EmbeddingTables]:
    model = Both(second="ones/more")  # a name that begins as the other does
    held = attached(model)
    for _ in range(3):
        (model(torch.arange(8).view(2, 4)) - 1).square().mean().backward()
        held.push()
    return model, held


def test_saved_rows_are_those_of_a_loaded_model_and_learn_on() -> None:
    model, held = trained()
    saved = held.dump()
    other = Both(second="ones/more").double().eval()  # rows come in the numbers of the model
    other.load_state_dict(model.state_dict())
    load_rows(other, saved)
    ids = torch.arange(8).view(2, 4)
    assert torch.allclose(other(ids).float(), model.eval()(ids), rtol=1e-6)
    other.train()(ids).sum().backward()  # what its rule keeps of rows came too
    assert torch.isfinite(other.eval()(ids)).all()


def test_rows_of_another_model_and_a_model_in_a_run_are_refused() -> None:
    model, held = trained()
    saved = held.dump()
    with pytest.raises(
        CheckpointError,
        match=r"(?s)only in the model: .*'else'.*only in the checkpoint: .*'ones/more'",
    ):
        load_rows(Both(second="else"), saved)
    with pytest.raises(CheckpointError, match="'ones': model dim=2, checkpoint dim=3"):
        load_rows(Both(dim=2, second="ones/more"), saved)
    with pytest.raises(
        TaskError, match="'ones': it is part of a run, but a model of its own is needed"
    ):
        load_rows(model, saved)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dim", [1, 3])
def test_bags_are_torchs_also_empty_ones_and_of_one_number(mode: str, dim: int) -> None:
    chance = torch.Generator().manual_seed(2)
    index, starts = torch.randint(9, (40,), generator=chance), torch.tensor([0, 5, 5, 30, 40])
    rows = [
        torch.randn(9, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(2)
    ]
    ours, theirs = (
        bags_of(rows[0], index, starts, mode, None),
        F.embedding_bag(index, rows[1], starts, mode=mode),
    )
    assert torch.equal(ours, theirs)
    for out in (ours, theirs):
        (out * torch.arange(1.0, 6.0)[:, None]).sum().backward()
    torch.testing.assert_close(rows[0].grad, rows[1].grad)
