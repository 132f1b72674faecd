"""EC-DNN: the ensemble's probabilities, distillation from them, and the compressed model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from manyhands.core import Group, Position, Tensors
from manyhands.data import sources
from manyhands.data.batches import Batch, IndexedBatches
from manyhands.data.sources import TensorSource
from manyhands.errors import PlanError, TaskError
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.merge.ensemble import Ensemble
from manyhands.replica import distillation
from manyhands.replica.distillation import DistillationLoss, StudentReplica
from manyhands.replica.flat import FlatParameters
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import ModuleReplica
from manyhands.replica.objective import Objective
from manyhands.replica.update import WholeUpdate
from manyhands.split.data import SPLITS, DataSplit
from support.compare import assert_close

CPU = torch.device("cpu")
BATCH = 20


def blobs(n: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three overlapping heaps of points in the plane."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]], dtype=torch.float64)
    return centres[y] + torch.randn(n, 2, generator=g, dtype=torch.float64), y


def net(seed: int = 0, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.BatchNorm1d(8), nn.Dropout(0.3)] if norm else []
    return nn.Sequential(nn.Linear(2, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).double()


@dataclass
class Worker:
    model: nn.Module
    flat: FlatParameters
    task: TaskLoss
    replica: StudentReplica
    walk: IndexedBatches

    @property
    def taught(self) -> DistillationLoss:
        return DistillationLoss(self.flat, self.task)


def worker(
    rank: int = 0,
    size: int = 1,
    make: Callable[[], nn.Module] = net,
    lr: float = 0.1,
    epochs: float = 1e9,
) -> Worker:
    model = make()
    source = sources.source(blobs(), CPU, "train")
    assert isinstance(source, TensorSource)
    samples = source.samples
    flat = FlatParameters(model, lambda n, dtype: torch.zeros(n, dtype=dtype), 2**20)
    walk = IndexedBatches(
        source,
        lambda epoch: SPLITS["shuffled"](samples, 0, epoch),
        DataSplit(samples, BATCH * size, BATCH, rank, size),
        Position(),
    )
    task = TaskLoss(model, walk, Objective(cross_entropy), "fp32", CPU)
    update = WholeUpdate(flat, model, torch.optim.SGD(model.parameters(), lr=lr))
    plain = ModuleReplica(
        flat, update, task, nominal=BATCH * size, ended=lambda: walk.position.epoch >= epochs
    )
    return Worker(model, flat, task, distillation.student(plain, task), walk)


def others(n: int, make: Callable[[int], nn.Module] = net) -> list[Tensors]:
    """Flat parameters of nets that started elsewhere."""
    return [
        FlatParameters(make(seed), lambda k, dtype: torch.zeros(k, dtype=dtype), 2**20).values
        for seed in range(1, n + 1)
    ]


def grads(w: Worker) -> Tensor:
    return torch.cat([g.clone() for g in w.replica.grads.values()])


def next_batch(w: Worker) -> tuple[Tensor, Tensor]:
    """What the worker will draw next, seen through another that stands where it stands."""
    x, y = worker().walk.next().values
    return x, y


# -- the opinion --


def test_the_opinion_is_the_mean_of_the_teachers_class_probabilities() -> None:
    w, teachers = worker(), others(3)
    x, _ = blobs(50, seed=5)
    expected = torch.stack([net(seed)(x).softmax(1) for seed in (1, 2, 3)]).mean(0)
    assert_close(w.taught.mean_probabilities(teachers, [x]), expected.detach())


def test_the_loss_of_the_mean_opinion_is_at_most_the_mean_of_the_losses() -> None:
    w, teachers = worker(), others(4)
    x, y = blobs(200, seed=5)
    together = float(nn.functional.nll_loss(w.taught.mean_probabilities(teachers, [x]).log(), y))
    alone = [
        float(nn.functional.nll_loss(w.taught.mean_probabilities([t], [x]).log(), y))
        for t in teachers
    ]
    assert together < sum(alone) / 4
    logits = torch.stack([w.taught.mean_probabilities([t], [x]).log() for t in teachers]).mean(0)
    assert float(cross_entropy(logits, y)) < sum(alone) / 4


def test_listening_leaves_parameters_modes_and_running_statistics_as_they_were() -> None:
    w, teachers = worker(make=lambda: net(norm=True)), others(2, lambda seed: net(seed, norm=True))
    w.model[-1].eval()  # by hand, in a model that trains
    kept = {k: v.clone() for k, v in w.model.state_dict().items()}
    rng = torch.get_rng_state()
    w.taught.mean_probabilities(teachers, [blobs(30)[0]])
    assert all(torch.equal(v, kept[k]) for k, v in w.model.state_dict().items())
    assert [m.training for m in w.model] == [True, True, True, True, False]
    assert torch.equal(rng, torch.get_rng_state()), "teachers drop nothing out"


def test_a_teacher_that_fails_leaves_the_students_parameters_where_they_were() -> None:
    w = worker()
    before = {k: v.clone() for k, v in w.flat.values.items()}
    with pytest.raises(RuntimeError):
        w.taught.mean_probabilities(others(2), [torch.zeros(3, 7, dtype=torch.float64)])
    assert all(torch.equal(v, before[k]) for k, v in w.flat.values.items())


# -- learning from it --


@pytest.mark.parametrize(("weight", "share"), [(0.5, 0.7), (0.2, 1.0), (0.0, 0.5), (1.0, 0.7)])
def test_the_loss_is_that_of_the_labels_and_for_a_share_also_the_distance_from_the_opinion(
    weight: float, share: float
) -> None:
    w, teachers = worker(), others(3)
    x, y = next_batch(w)
    loss = w.replica.distil(teachers, weight, share)

    twin = net()
    taught, log_f = round(share * BATCH), twin(x).log_softmax(1)
    o = w.taught.mean_probabilities(teachers, [x])
    hard = nn.functional.nll_loss(log_f, y, reduction="none")
    soft = (o * (o.log() - log_f)).sum(1)
    each = torch.cat([weight * hard[:taught] + (1 - weight) * soft[:taught], hard[taught:]])
    each.mean().backward()
    assert_close(loss, each.mean().detach())
    for piece, p in zip(w.flat.views, twin.parameters(), strict=True):
        assert p.grad is not None and piece.parameter.grad is not None
        assert_close(piece.parameter.grad, p.grad)


def test_with_labels_alone_distilling_is_an_ordinary_step() -> None:
    taught, plain = worker(), worker()
    assert_close(taught.replica.distil(others(2), 1.0, 0.7), plain.replica.backward())
    assert_close(grads(taught), grads(plain))
    assert torch.equal(taught.walk.next().values[0], plain.walk.next().values[0]), (
        "and took the same batch"
    )


def test_who_is_its_own_only_teacher_has_nothing_to_learn() -> None:
    w = worker()
    own = {k: v.clone() for k, v in w.flat.values.items()}
    assert float(w.replica.distil([own], 0.0, 1.0)) == pytest.approx(0, abs=1e-14)
    assert float(grads(w).abs().max()) < 1e-14


def test_distilling_brings_a_model_nearer_to_what_the_ensemble_says() -> None:
    w, teachers = worker(lr=0.5), others(3)
    x, _ = blobs(200, seed=5)

    def apart() -> float:
        o = w.taught.mean_probabilities(teachers, [x])
        with torch.no_grad():
            return float(nn.functional.kl_div(w.model(x).log_softmax(1), o, reduction="batchmean"))

    before = apart()
    for _ in range(60):
        w.replica.distil(teachers, 0.0, 1.0)
        w.replica.step()
    assert apart() < before / 10


# -- the rule --


def train(
    rule: Ensemble, size: int, rounds: int, **options: Any
) -> list[tuple[Worker, Tensors, Tensors, ObservedGroup]]:
    rule.check(size)

    def main(group: Group) -> tuple[Worker, Tensors, Tensors, ObservedGroup]:
        link = ObservedGroup(group, lambda event: None)
        w = worker(group.rank, size, **options)
        state = rule.init(w.replica)  # type: ignore[arg-type]
        for _ in range(rounds):
            rule.round(w.replica, link, state)  # type: ignore[arg-type]
        sent = link.nbytes
        model = rule.consensus(w.replica, link, state)  # type: ignore[arg-type]
        assert model is not None
        link.totals.nbytes = sent
        return w, model, state, link

    return World(size).run(main)


def accuracy(w: Worker, values: Tensors | None = None) -> float:
    x, y = blobs(2000, seed=9)
    with w.flat.holding(values), torch.no_grad():
        return float((w.model(x).argmax(1) == y).double().mean())


def test_alone_it_is_plain_sgd_to_the_bit() -> None:
    ((w, *_),) = train(Ensemble(period=5, distil=3), 1, 4)
    plain = worker()
    for _ in range(32):
        plain.replica.backward()
        plain.replica.step()
    assert all(torch.equal(v, plain.flat.values[k]) for k, v in w.flat.values.items())


def test_models_stay_different_and_grow_good_and_one_of_them_stands_for_all() -> None:
    found = train(Ensemble(period=10, distil=10), 3, 15)
    first = found[0][1]
    assert all(torch.equal(v, model[k]) for _, model, _, _ in found for k, v in first.items())
    own = [torch.cat(list(w.flat.values.values())) for w, *_ in found]
    assert all((own[i] - own[j]).norm() > 1e-3 for i in range(3) for j in range(i))
    assert min(accuracy(w) for w, *_ in found) > 0.85
    assert accuracy(found[0][0], first) > 0.85
    assert {k: v.shape for k, v in first.items()} == {
        k: v.shape for k, v in found[0][0].flat.values.items()
    }, "of the old size"


def test_learning_from_each_other_brings_models_nearer_in_what_they_say() -> None:
    x, _ = blobs(500, seed=5)

    def disagreement(weight: float) -> float:
        found = train(Ensemble(period=10, distil=20, weight=weight, relabel=1.0), 3, 8)
        with torch.no_grad():
            said = torch.stack([w.model(x).softmax(1) for w, *_ in found])
        return float(said.var(0).sum(1).mean())

    assert disagreement(0.2) < disagreement(1.0) / 2


def test_a_round_gives_the_model_once_to_every_other_rank() -> None:
    for w, _, _, link in train(Ensemble(period=4, distil=2), 3, 5):
        assert link.nbytes == 5 * 2 * sum(v.nbytes for v in w.flat.values.values())


def test_a_run_may_end_before_or_while_it_distils() -> None:
    for epochs, steps in ((1, 10), (2, 20)):  # an epoch of 3 ranks is 10 steps
        found = train(Ensemble(period=12, distil=12), 3, 1, epochs=epochs)
        assert {w.walk.position.steps for w, *_ in found} == {steps}


def test_a_rank_that_has_no_samples_left_learns_nothing_and_stands_for_nobody() -> None:
    def main(group: Group) -> tuple[Tensor, Tensor]:
        w = worker(group.rank, 2)
        if group.rank == 1:
            w.walk.next = lambda: Batch(None, 0, True)  # type: ignore[method-assign]
        before = torch.cat(list(w.flat.values.values())).clone()
        rule = Ensemble(period=4, distil=2)
        state = rule.init(w.replica)  # type: ignore[arg-type]
        for _ in range(3):
            rule.round(w.replica, group, state)  # type: ignore[arg-type]
        model = rule.consensus(w.replica, group, state)  # type: ignore[arg-type]
        assert model is not None
        return torch.cat(list(w.flat.values.values())) - before, torch.cat(
            list(model.values())
        ) - before

    (moved, stands), (idle, theirs) = World(2).run(main)
    assert moved.norm() > 0.1 and idle.norm() == 0
    assert torch.equal(stands, theirs) and stands.norm() > 0.1


# -- refusals --


def test_a_task_of_steps_and_a_loop_of_ones_own_are_refused_before_training() -> None:
    w = worker()
    of_steps = Objective(step=lambda model, batch: model(batch[0]).sum())
    stepping = TaskLoss(w.model, w.walk, of_steps, "fp32", CPU)
    with pytest.raises(
        TaskError, match=r"the task has step=.*give Task\(loss=.*or choose another merge="
    ):
        distillation.student(w.replica.inner, stepping)
    with pytest.raises(TaskError, match="a loop of its own"):
        distillation.student(w.replica.inner, lambda: None)


def test_a_model_that_gives_no_classes_is_told_so() -> None:
    w = worker(make=lambda: nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)).double())
    with pytest.raises(
        TaskError, match=r"the model gives \(30,\); needed: logits \(samples, classes\)"
    ):
        w.taught.mean_probabilities([dict(w.flat.values)], [blobs(30)[0]])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"period": 0}, r"merge\.period=0: at least 1 step"),
        ({"distil": 0}, r"merge\.distil=0"),
        ({"weight": 1.5}, r"merge\.weight=1\.5: a share between 0 and 1"),
        ({"relabel": -0.1}, r"merge\.relabel=-0\.1"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Ensemble(**options)
