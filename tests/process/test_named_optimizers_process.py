"""Several named optimizers on three real ranks against one process, and under local steps.

All of them run in one job, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.entry import work
from manyhands.recover.checkpoint import Checkpoints
from support import two_players
from support.pooled import start

SIZE, BATCH = 3, 4


def normed(**given: Any) -> mh.Task:
    # Adam divides by the root of a sum of squares, and would amplify the order of summation
    sgd = {name: lambda p: torch.optim.SGD(p, 0.05, momentum=0.5) for name in "gd"}
    return two_players.gan(model=two_players.gan_models(norm=True), optimizer=sgd, **given)


def scheduled(**given: Any) -> mh.Task:
    rate = torch.optim.lr_scheduler.StepLR
    return two_players.gan(schedule={"d": lambda o: rate(o, 2, 0.5)}, **given)


def sparing(models: Any, batch: tuple[Tensor, Tensor]) -> Any:
    """The generator steps at every second batch only, and the noise counts as many as it likes."""
    steps = list(two_players.gan_step(models, batch))
    sparing.seen += 1  # type: ignore[attr-defined]
    yield steps[0]
    if sparing.seen % 2:  # type: ignore[attr-defined]
        yield next(g for g in two_players.gan_step(models, batch) if g[0] == "g")


def now_and_then(**given: Any) -> mh.Task:
    sparing.seen = 0  # type: ignore[attr-defined]
    return two_players.gan(step=sparing, **given)


CASES: dict[str, tuple[str, Any]] = {
    "gan": ("", two_players.gan),
    "gan over gloo": ("link=gloo bucket_mb=0.0001", two_players.gan),
    "gan with clip": ("clip=0.05", two_players.gan),
    "gan with accumulate": ("accumulate=2", two_players.gan),
    "gan with BatchNorm": ("", normed),
    "gan with a schedule": ("", scheduled),
    "now and then": ("", now_and_then),
    "agent": ("", two_players.agent),
    "agent over gloo": ("link=gloo", two_players.agent),
    "layers": ("", two_players.layers),
    "layers over gloo": ("link=gloo compress=none", two_players.layers),
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
    "topk": "link=gloo compress=topk",
    "int8": "link=gloo compress=int8",
    "then": "merge=local_sgd merge.period=2 then=all_reduce at=epoch:1",
}


class Keep(mh.Callback):
    """Every rank's own model at the end."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_end(self, run: Any) -> None:
        with run.trainer.merged():
            state = run.trainer.replica.update.module.state_dict()
            kept = {k: v.clone().contiguous() for k, v in state.items()}
        save_file(kept, f"{self.folder}/{run.rank}.safetensors")


def one(
    make: Any, given: str, folder: Path, words: dict[str, Any], batch: int, options: Options
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    more = dict(word.split("=") for word in given.split())
    kept = dataclasses.replace(options, directory=str(folder / "run"), callbacks=(Keep(folder),))
    work(functools.partial(make, batch=batch), {**words, **more}, kept)


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    for case, (given, make) in CASES.items():
        one(make, given, Path(folder) / case, words, BATCH, options)
    for case, given in LOCAL.items():
        one(two_players.gan, given, Path(folder) / case, words, BATCH, options)
    for epochs, resume in ((1, False), (2, True)):
        resumed = dataclasses.replace(options, resume=resume)
        make = functools.partial(two_players.gan, epochs=epochs)
        one(make, "", Path(folder) / "resumed", words, BATCH, resumed)
    return {}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("named")
    start(functools.partial(every, str(folder)), f"data={SIZE} timeout_s=20", Options(quiet=True))
    return folder


def read(folder: Path, rank: int = 0) -> dict[str, Tensor]:
    return load_file(folder / f"{rank}.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_three_ranks_end_with_the_numbers_of_one(ran: Path, case: str, tmp_path: Path) -> None:
    given, make = CASES[case]
    one(make, given, tmp_path, {}, BATCH * SIZE, Options(quiet=True))
    ours, alone = read(ran / case), read(tmp_path)
    assert ours.keys() == alone.keys()
    for key in alone:
        torch.testing.assert_close(ours[key], alone[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", [*CASES, *LOCAL])
def test_all_ranks_end_with_the_same_model(ran: Path, case: str) -> None:
    first = read(ran / case)
    for rank in range(1, SIZE):
        other = read(ran / case, rank)
        assert all(torch.equal(first[k], other[k]) for k in first if "num_batches" not in k)


@pytest.mark.parametrize("case", LOCAL)
def test_both_models_move_under_every_strategy(ran: Path, case: str) -> None:
    before = two_players.gan().model.state_dict()  # type: ignore[union-attr]
    after = read(ran / case)
    for name, value in before.items():
        assert after[name].isfinite().all() and not torch.equal(after[name], value)


def test_a_block_of_local_steps_counts_batches(ran: Path) -> None:
    saved = Checkpoints(ran / "local_sgd" / "run" / "checkpoints").latest()
    assert saved is not None
    # three batches an epoch, two optimizer steps each: blocks of 2 and 2 and 2 batches
    assert (saved.position.steps, saved.round) == (6, 3)


def test_a_resumed_run_ends_with_the_same_bits(ran: Path) -> None:
    ours, whole = read(ran / "resumed"), read(ran / "gan")
    assert all(torch.equal(ours[k], whole[k]) for k in whole)
