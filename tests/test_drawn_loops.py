"""Own loops that draw their own batches, bring their own gradients or hand closures over: alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.errors import PlanError, TaskError
from manyhands.own_loop import Run
from manyhands.recover.checkpoint import Checkpoints
from manyhands.replica.checks import step_guard

G = torch.Generator().manual_seed(0)
X = torch.randn(64, 4, generator=G, dtype=torch.float64)
Y = X @ torch.randn(4, 1, generator=G, dtype=torch.float64)
BATCHES = [torch.randperm(64, generator=G)[:10] for _ in range(6)]
Join = Callable[..., Run]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss(net: nn.Module, at: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(X[at]), Y[at])


def plain(make: Callable[[Any], Optimizer] = lambda p: Adam(p, lr=0.01)) -> nn.Module:
    """What a loop without a run trains."""
    net = model()
    optimizer = make(net.parameters())
    for at in BATCHES:
        optimizer.zero_grad()
        loss(net, at).backward()
        optimizer.step()
    return net


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    opened: list[Run] = []

    def joined(words: str = "", **options: Any) -> Run:
        run = mh.join(
            f"device=cpu {words}", directory=tmp_path / "run", quiet=True, argv=False, **options
        )
        opened.append(run)
        return run

    yield joined
    for run in opened:
        run._abandon()
        run.close()
    assert not step_guard._installed


def by_loss(run: Run, net: nn.Module, optimizer: Optimizer, at: Tensor) -> None:
    run.step(loss(net, at))


def by_gradients(run: Run, net: nn.Module, optimizer: Optimizer, at: Tensor) -> None:
    optimizer.zero_grad()
    loss(net, at).backward()
    run.step()


def by_several_backward_passes(run: Run, net: nn.Module, optimizer: Optimizer, at: Tensor) -> None:
    for half in (at[:5], at[5:]):
        (loss(net, half) / 2).backward()
    run.step(loss(net, at).detach(), count=7)


def by_gradients_of_a_sum(run: Run, net: nn.Module, optimizer: Optimizer, at: Tensor) -> None:
    loss(net, at).backward()
    run.step(count=10, reduction="sum")


def by_closure(run: Run, net: nn.Module, optimizer: Optimizer, at: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        found = loss(net, at)
        found.backward()
        return found

    run.step(closure)


@pytest.mark.parametrize(
    "step",
    [by_loss, by_gradients, by_several_backward_passes, by_gradients_of_a_sum, by_closure],
)
def test_every_way_to_bring_a_gradient_trains_as_a_plain_loop_does(
    join: Join, step: Callable[..., None]
) -> None:
    run, net = join(), model()
    net, optimizer = run.prepare(net, Adam(net.parameters(), lr=0.01))
    for at in BATCHES:
        step(run, net, optimizer, at)
    assert (run.steps, run.round) == (6, 6)
    assert distance(net, plain()) < 1e-12


def test_gradients_that_zero_grad_drops_are_dropped(join: Join) -> None:
    run, net = join(), model()
    net, optimizer = run.prepare(net, Adam(net.parameters(), lr=0.01))
    for at in BATCHES:
        (1000 * loss(net, at)).backward()  # a batch that the loop throws away
        optimizer.zero_grad()
        by_gradients(run, net, optimizer, at)
    assert distance(net, plain()) < 1e-12


def test_a_step_of_nothing_moves_nothing(join: Join) -> None:
    run, net = join(), model()
    run.prepare(net, Adam(net.parameters(), lr=0.01))
    run.step(None, count=0)
    loss(net, BATCHES[0]).backward()
    run.step(count=0)
    assert distance(net, model()) == 0 and run.steps == 2


@pytest.mark.parametrize("with_data", [False, True])
def test_closures_give_lbfgs_as_many_evaluations_as_it_wants(join: Join, with_data: bool) -> None:
    run, net = join(), model()
    given: dict[str, Any] = {"dataset": (X, Y), "batch": 64} if with_data else {}
    made: Any = run.prepare(net, mh.LBFGS(net.parameters()), **given)
    everything, calls = torch.arange(64), 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        return loss(net, everything)  # without backward: the run does that

    def through_backward() -> Tensor:
        made[1].zero_grad()
        found = closure()
        found.backward()
        return found

    for epoch in range(20):
        for _ in made[2] if with_data else range(1):
            run.step(closure if epoch % 2 else through_backward)
    assert calls > 20
    alone = model()
    optimizer = mh.LBFGS(alone.parameters())

    def plain_closure() -> Tensor:
        optimizer.zero_grad()
        found = loss(alone, everything)
        found.backward()
        return found

    run.keep_local(optimizer)
    for _ in range(20):
        optimizer.step(plain_closure)
    assert distance(net, alone) < 1e-9


def test_lbfgs_is_refused_without_closures_and_torch_s_own_names_ours(join: Join) -> None:
    run, net = join(), model()
    with pytest.raises(TaskError, match=r"use mh.LBFGS, .* own: run.step\(closure\)"):
        run.prepare(net, torch.optim.LBFGS(net.parameters()))
    run.prepare(net, mh.LBFGS(net.parameters()))
    with pytest.raises(TaskError, match=r"give run.step a function that computes the loss"):
        run.step(loss(net, BATCHES[0]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("accumulate=2", r"accumulate=2 makes one step of several run.step\(loss\)"),
        ("precision=fp16", r"precision=fp16 scales a loss before its backward pass"),
    ],
)
def test_gradients_that_are_there_are_refused_where_they_are_not_a_whole_step(
    join: Join, words: str, says: str
) -> None:
    run, net = join(words), model().float()
    run.prepare(net, SGD(net.parameters(), lr=0.1))
    net(X.float()).mean().backward()
    with pytest.raises(TaskError, match=says):
        run.step()


def test_a_step_without_a_loss_and_without_gradients_says_what_is_missing(join: Join) -> None:
    run, net = join(), model()
    run.prepare(net, SGD(net.parameters(), lr=0.1))
    with pytest.raises(TaskError, match=r"but no parameter of the run has one; call loss.backward"):
        run.step()
    with pytest.raises(TaskError, match=r"a function that returned None, but the loss is needed"):
        run.step(lambda: None)


@pytest.mark.parametrize(
    "word", ["batch=4", "micro=2", "loaders=1", "split=shuffled", "straggler=rebalance"]
)
def test_words_about_data_are_refused_where_the_script_draws_it(join: Join, word: str) -> None:
    run, net = join(word), model()
    with pytest.raises(PlanError, match=rf"{word} has no effect: run.prepare was given no data"):
        run.prepare(net, SGD(net.parameters(), lr=0.1))


def test_accumulation_makes_one_step_of_several_losses(join: Join) -> None:
    run, net = join("accumulate=2"), model()
    run.prepare(net, Adam(net.parameters(), lr=0.01))
    for at in BATCHES:
        for half in (at[:5], at[5:]):
            run.step(loss(net, half))
    assert run.steps == 6 and distance(net, plain()) < 1e-12


def test_a_run_goes_on_from_its_last_step_with_the_same_numbers(join: Join, tmp_path: Path) -> None:
    def train(run: Run, steps: int) -> nn.Module:
        net = model()
        run.prepare(net, Adam(net.parameters(), lr=0.01))
        while run.steps < steps:
            run.step(loss(net, torch.randint(64, (10,))))
        return net

    whole = mh.join("device=cpu", directory=tmp_path / "whole", quiet=True, argv=False)
    wanted = train(whole, 9)
    whole.close()
    first = join("save=2")
    train(first, 5)
    saved = Checkpoints(tmp_path / "run" / "checkpoints")
    first.close()
    assert [path.name for path in saved.all()] == [f"step-{n:08d}" for n in (2, 4, 5)]
    again = join(resume=True)
    assert distance(train(again, 9), wanted) == 0 and again.round == 9


def test_lines_of_ddp_are_refused_with_what_to_leave_out(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, net = join(), model()
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(TaskError, match=r"leave out the lines of DDP: init_process_group, Dist"):
        run.prepare(wrapped, SGD(net.parameters(), lr=0.1))
    run.prepare(net, SGD(net.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(TaskError, match=r"leave the GradScaler out .* say precision=fp16"):
        scaler.scale(loss(net, BATCHES[0]))
    torch.amp.GradScaler("cpu", enabled=False).scale(loss(net, BATCHES[0])).backward()
    clip_grad_norm_(net.parameters(), 1.0)  # of one rank: what clip=1.0 would do
    monkeypatch.setattr(run._guard, "ranks", 2)
    with pytest.raises(TaskError, match=r"merges it with those of the other 1 ranks"):
        clip_grad_norm_(net.parameters(), 1.0)


def test_data_has_what_scripts_ask_a_loader_for(join: Join) -> None:
    run, net = join(), model()
    loader = DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True)
    *_, data = run.prepare(net, SGD(net.parameters(), lr=0.1), loader)
    assert data.dataset is loader.dataset and data.batch_size == 10 and len(data) == 7
    data.sampler.set_epoch(3)
    for i, (a, b) in enumerate(data):
        assert run.steps == i
        run.step(nn.functional.mse_loss(net(a), b))
    assert run.steps == 7


def test_tensors_as_data_have_a_dataset_of_as_many_samples(join: Join) -> None:
    run, net = join(), model()
    *_, data = run.prepare(net, SGD(net.parameters(), lr=0.1), (X, Y), batch=10)
    assert len(data.dataset) == 64


def test_parts_of_all_ranks_are_the_whole(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    run = join()
    monkeypatch.setattr(run, "size", 3)
    found: list[Tensor] = []
    for rank in range(3):
        monkeypatch.setattr(run, "rank", rank)
        found.append(run.part(X, dim=1))
    assert torch.equal(torch.cat(found, 1), X) and [f.shape[1] for f in found] == [2, 1, 1]
    assert run.part(list(range(8))) == [6, 7]
