"""TensorBoard files of small recorded runs, read back by TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from manyhands.core import Event
from manyhands.errors import ManyhandsError
from manyhands.observe.loggers.tensorboard import TensorBoard
from support.recorded_runs import PLAN, ZERO_S, progress

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found = event_accumulator.EventAccumulator(str(directory)).Reload()
    return {
        tag: [(x.step, pytest.approx(x.value)) for x in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_scalars_read_back(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.write(
        [
            Event(ZERO_S, 0, 0, "start", value=PLAN),
            progress(1, 0.5, loss=2.0),
            Event(ZERO_S, 0, 3, "round", 0.1),
        ]
    )
    sink.write(
        [
            progress(2, 1.0, loss=1.0),
            Event(ZERO_S + 3, 0, 100, "evaluate", 0.1, value={"accuracy": 0.9, "epoch": 1.0}),
        ]
    )
    sink.write(
        [
            Event(ZERO_S + 4, 0, 102, "log", value={"lr": 0.1}),
            Event(ZERO_S + 4, 0, 103, "log", value={"lr": 0.2, "step": 816}),
        ]
    )
    sink.close()
    assert scalars(tmp_path) == {
        "train/loss": [(400, 2.0), (800, 1.0)],
        "train/samples_per_s": [(400, 12843.4), (800, 12843.4)],
        "train/exchange_share": [(400, 0.04), (800, 0.04)],
        "evaluate/accuracy": [(800, 0.9)],
        "lr": [(802, 0.1), (816, 0.2)],
    }


def test_a_resumed_run_hides_what_it_replays(tmp_path: Path) -> None:
    for losses in ([(0.5, 9.0), (1.0, 9.0), (1.5, 9.0)], [(1.0, 1.0), (2.0, 2.0)]):
        sink = TensorBoard(tmp_path)
        sink.write(
            [
                Event(ZERO_S, 0, 0, "start", value=PLAN),
                *(progress(epoch, epoch, loss=loss) for epoch, loss in losses),
            ]
        )
        sink.close()
        # Files of one directory are read by name, which is the second they were made in, then the
        # host and the process.
        for path in tmp_path.glob("events.out.tfevents.[0-9]*"):
            path.rename(
                path.with_name(f"events.out.tfevents.{'a' if losses[0][1] == 9.0 else 'b'}")
            )
    assert scalars(tmp_path)["train/loss"] == [(400, 9.0), (800, 1.0), (1600, 2.0)]


def test_nothing_to_write_makes_no_file(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path / "tb")
    sink.write([Event(ZERO_S, 0, 3, "round", 0.1)])
    sink.close()
    assert not (tmp_path / "tb").exists()


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", None
    )  # how Python itself marks what cannot be imported
    with pytest.raises(
        ManyhandsError, match=r"tensorboard is not installed: pip install manyhands\[tensorboard\]"
    ):
        TensorBoard(tmp_path)
