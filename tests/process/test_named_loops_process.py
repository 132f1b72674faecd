"""Own loops with several optimizers on three real ranks against one process, and by local steps.

All of them run in one job, one after the other. Of the last batch rank 2 has no samples, so that it
is shown one that counts nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.launch import environment
from manyhands.recover.checkpoint import Checkpoints
from support import named_loops as loops
from support import two_players
from support.pooled import start

SIZE, BATCH = 3, 4

CASES: dict[str, tuple[str, type[loops.Players]]] = {
    "gan": ("", loops.Players),
    "gan over gloo": ("link=gloo bucket_mb=0.0001", loops.Players),
    "gan with clip": ("clip=0.05", loops.Players),
    "gan with BatchNorm": ("", loops.Normed),
    "gan with a schedule": ("", loops.Scheduled),
    "clamped": ("", loops.Clamped),
    "gradients": ("", loops.Gradients),
    "gradients over gloo": ("link=gloo clip=0.05", loops.Gradients),
    "closures": ("", loops.Closures),
    "five to one": ("", loops.FiveToOne),
    "now and then": ("", loops.NowAndThen),
    "drawn": ("", loops.Drawn),
    "one rank ends early": ("", loops.OneRankEndsEarly),
    "critic": ("", loops.Critic),
    "critic over gloo": ("link=gloo", loops.Critic),
    "layers": ("", loops.Layers),
    "layers with accumulate": ("accumulate=2", loops.Layers),
}
LOCAL = {
    "local_sgd": "merge=local_sgd merge.period=2",
    "diloco": "merge=diloco merge.period=2",
    "easgd": "merge=easgd merge.period=2",
    "bmuf": "merge=bmuf merge.period=2",
    "d_psgd": "merge=d_psgd",
    "streaming_diloco": "merge=streaming_diloco merge.period=4 merge.fragments=2 merge.tau=1",
    "admm": "merge=admm merge.period=2",
    "robust": "merge=robust merge.how=median merge.momentum=0.5",
    "int8": "link=gloo compress=int8",
    "then": "merge=local_sgd merge.period=2 then=all_reduce at=epoch:1",
    "drawn by local steps": "merge=local_sgd merge.period=5",
}


class OtherFirst(loops.Players):
    def batch(self, real: Tensor, noise: Tensor) -> None:
        for name in "gd" if self.run.rank == 1 else "dg":
            fake = self.g(noise)
            loss = self.loss_d(real, fake) if name == "d" else self.loss_g(fake)
            self.run.step(loss, optimizer=name)


class LeavesOneOut(loops.Players):
    def batch(self, real: Tensor, noise: Tensor) -> None:
        self.run.step(self.loss_d(real, self.g(noise)), optimizer="d")
        if self.run.rank != 1:
            self.run.step(self.loss_g(self.g(noise)), optimizer="g")


class OneMore(loops.Players):
    def batch(self, real: Tensor, noise: Tensor) -> None:
        super().batch(real, noise)
        if self.run.rank == 2:
            self.run.step(self.loss_d(real, self.g(noise)))


UNLIKE = {
    OtherFirst: "rank 1 steps the optimizer 'g', but rank 0 steps the optimizer 'd'",
    LeavesOneOut: "rank 1 has no further optimizer step in its batch, but rank 0 steps the opt",
    OneMore: "rank 2 steps all optimizers, but rank 0 has no further optimizer step in its batch",
}


def one(make: Callable[..., Any], words: str, folder: Path, batch: int, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    loops.one(make, f"device=cpu {words}", folder, batch, **more)


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    given = " ".join(f"{k}={v}" for k, v in words.items())
    for case, (more, make) in CASES.items():
        one(make, f"{given} {more}", Path(folder) / case, BATCH)
    for case, more in LOCAL.items():
        make = loops.Drawn if case == "drawn by local steps" else loops.Players
        one(make, f"{given} {more}", Path(folder) / case, BATCH)
    for epochs, resume in ((1, False), (2, True)):
        one(loops.Scheduled, given, Path(folder) / "resumed", BATCH, epochs=epochs, resume=resume)
    said = {}
    for make in UNLIKE:
        try:
            one(make, given, Path(folder) / make.__name__, BATCH)
        except mh.TaskError as e:
            said[make.__name__] = str(e)
    rank = environment.process_info().rank
    Path(folder, f"said-{rank}.json").write_text(json.dumps(said))
    return {}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    start(functools.partial(every, str(folder)), f"data={SIZE} timeout_s=20", Options(quiet=True))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_three_ranks_end_with_the_numbers_of_one(ran: Path, case: str, tmp_path: Path) -> None:
    words, make = CASES[case]
    one(make, words, tmp_path, BATCH * SIZE)
    ours, alone = loops.read(ran / case), loops.read(tmp_path)
    assert ours.keys() == alone.keys()
    for key in alone:
        torch.testing.assert_close(ours[key], alone[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", [*CASES, *LOCAL])
def test_all_ranks_end_with_the_same_model(ran: Path, case: str) -> None:
    first = loops.read(ran / case)
    for rank in range(1, SIZE):
        other = loops.read(ran / case, rank)
        assert all(torch.equal(first[k], other[k]) for k in first if "num_batches" not in k)


@pytest.mark.parametrize("case", LOCAL)
def test_both_models_move_under_every_strategy(ran: Path, case: str) -> None:
    before = two_players.gan().model.state_dict()  # type: ignore[union-attr]
    after = loops.read(ran / case)
    for name, value in before.items():
        assert after[name].isfinite().all() and not torch.equal(after[name], value)


def test_a_block_of_local_steps_counts_batches_of_the_data_and_steps_without_data(
    ran: Path,
) -> None:
    saved = Checkpoints(ran / "local_sgd" / "run" / "checkpoints").latest()
    assert saved is not None
    # three batches an epoch, two optimizer steps each: blocks of 2 and 2 and 2 batches
    assert (saved.position.steps, saved.round) == (6, 3)
    drawn = Checkpoints(ran / "drawn by local steps" / "run" / "checkpoints").latest()
    assert drawn is not None
    assert (drawn.position.steps, drawn.round) == (12, 3)  # blocks of 5, 5 and 2 steps


def test_a_resumed_loop_ends_with_the_same_bits(ran: Path) -> None:
    ours, whole = loops.read(ran / "resumed"), loops.read(ran / "gan with a schedule")
    assert all(torch.equal(ours[k], whole[k]) for k in whole)


@pytest.mark.parametrize("make", UNLIKE)
def test_ranks_that_step_other_optimizers_are_told_on_every_rank(ran: Path, make: type) -> None:
    said = [json.loads(path.read_text()) for path in ran.glob("said-*.json")]
    assert len(said) == SIZE and all(UNLIKE[make] in s[make.__name__] for s in said), said
