"""One file out of the parts of many ranks: the same bytes as one process would have written."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyhands.core import Position, Tensors
from manyhands.errors import CheckpointError
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.recover import sharded_file
from manyhands.recover.checkpoint import Checkpoints, RankSnapshot, load
from manyhands.recover.sharded_file import (
    KINDS,
    Reader,
    agree,
    file_layout,
    write,
)
from manyhands.split.shard_slice import AnyShardSpec, ShardSlice, numel
from manyhands.split.shard_spec import ShardSpec, bounds
from support.compare import same_bits


@dataclass
class Piece:
    spec: AnyShardSpec
    tensor: Tensor


def of_every_kind() -> Tensors:
    """Every dtype the format knows, scalars, empty ones, names that JSON must quote."""
    found = {f"kind/{kind}": torch.arange(10).to(dtype).view(2, 5) for dtype, kind in KINDS.items()}
    found |= {
        "scalar": torch.tensor(7),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 4),
        "no columns": torch.zeros(3, 0),
    }
    return found | {
        'a "quoted" name': torch.randn(3),
        "größe": torch.randn(6, 4),
        "half": torch.randn(9, 6, 5).half(),
    }


def cut(whole: Tensors, rank: int, size: int, way: str) -> list[Piece]:
    """`size` ranks' shares: of rows, of columns, of columns in three groups, or slices of columns;
    what cannot be cut is rank 0's.
    """
    pieces = []
    for name, value in whole.items():
        shape = tuple(value.shape)
        dim = {"rows": 0}.get(way, 1)
        groups = 3 if way == "groups" and len(shape) > dim and shape[dim] % 3 == 0 else 1
        region = ShardSpec(name, shape)
        if len(shape) > dim:
            region = ShardSpec(name, shape, dim, size, rank, groups)
        elif rank:
            continue
        if way == "slices":
            slices = [
                ShardSlice(region, a, b) for a, b in itertools.pairwise(bounds(numel(region), 3))
            ]
            pieces += [Piece(s, s.extract(value)) for s in slices]
            continue
        pieces.append(Piece(region, region.extract(value)))
    return pieces


def shapes(whole: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {k: (v.dtype, tuple(v.shape)) for k, v in whole.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("way", ["rows", "columns", "groups", "slices"])
def test_the_file_has_the_bytes_that_one_process_would_have_written(
    tmp_path: Path, way: str, size: int
) -> None:
    whole = of_every_kind()
    save_file(whole, tmp_path / "one", metadata={"format": "pt"})

    def main(group: InprocGroup) -> int:
        return write(
            tmp_path / "many",
            shapes(whole),
            cut(whole, group.rank, size, way),
            group,
            {"format": "pt"},
        )

    nbytes = World(size).run(main)
    assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()
    assert nbytes == [(tmp_path / "one").stat().st_size] * size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["many", "one"]
    found = load_file(tmp_path / "many")
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert found[name].dtype == value.dtype and same_bits(found[name], value), name


@pytest.mark.parametrize("way", ["rows", "columns", "groups", "slices"])
def test_a_rank_reads_back_the_shards_that_it_wants(tmp_path: Path, way: str) -> None:
    whole = of_every_kind()
    save_file(whole, tmp_path / "one")
    with Reader(tmp_path / "one") as reader:
        assert set(reader.names) == set(whole)
        for rank in range(3):
            for piece in cut(whole, rank, 3, way):
                name = piece.spec.name
                found = reader.read(name, piece.spec)
                assert (reader.dtype(name), reader.shape(name)) == (
                    whole[name].dtype,
                    tuple(whole[name].shape),
                )
                assert found.shape == piece.tensor.shape and found.dtype == piece.tensor.dtype
                assert same_bits(found, piece.tensor)
        with pytest.raises(
            CheckpointError, match=r"half has shape \(9, 6, 5\) in .*, not \(9, 6\)"
        ):
            reader.read("half", ShardSpec("half", (9, 6)))
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="other cannot be read"):
        Reader(tmp_path / "other")


def test_a_file_that_was_there_is_replaced_and_one_without_tensors_is_one_too(
    tmp_path: Path,
) -> None:
    path = tmp_path / "deep" / "down"
    World(2).run(lambda group: write(path, {}, [], group))
    assert load_file(path) == {}
    World(2).run(
        lambda group: write(
            path,
            {"x": (torch.int64, ())},
            [Piece(ShardSpec("x", ()), torch.tensor(3))][group.rank :],
            group,
        )
    )
    assert load_file(path)["x"].item() == 3


# -- what goes wrong on one is an error on all --


def test_ranks_that_do_not_see_the_disk_of_rank_0_say_so_on_every_rank(tmp_path: Path) -> None:
    whole = {"x": torch.zeros(4)}
    said: dict[int, str] = {}

    def main(group: InprocGroup) -> None:
        folder = tmp_path / ("common" if group.rank != 2 else "of its own")
        folder.mkdir(exist_ok=True)
        try:
            write(folder / "file", shapes(whole), cut(whole, group.rank, 3, "rows"), group)
        except CheckpointError as e:
            said[group.rank] = str(e)

    World(3).run(main)
    assert len(said) == 3 and len(set(said.values())) == 1
    assert said[0].startswith("rank 2: does not see ") and said[0].endswith(
        "put it on a shared disk"
    )
    assert not any(p.is_file() for p in tmp_path.rglob("*"))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """The limit on a file's size stands in for the disk: writing fails at the same call with the
    same kind of error.
    """
    path, small, large = tmp_path / "file", {"x": torch.ones(4)}, {"x": torch.ones(100_000)}
    World(2).run(lambda group: write(path, shapes(small), cut(small, group.rank, 2, "rows"), group))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(CheckpointError, match=r"rank 0: .*File too large"):
            World(2).run(
                lambda group: write(path, shapes(large), cut(large, group.rank, 2, "rows"), group)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and torch.equal(
        load_file(path)["x"], small["x"]
    )


def test_what_one_rank_says_is_wrong_every_rank_raises() -> None:
    def main(group: InprocGroup) -> str:
        agree(group, "")
        try:
            agree(group, ["", "größer als erlaubt", "also this"][group.rank])
        except CheckpointError as e:
            return str(e)
        return ""

    assert World(3).run(main) == ["rank 1 (and 1 more ranks): größer als erlaubt"] * 3


def test_what_the_format_cannot_hold_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"x is torch.complex128, which a safetensors file cannot hold"
    ):
        file_layout({"x": (torch.complex128, (2,))})
    with pytest.raises(CheckpointError, match=r"x: a tensor of shape \(3,\) for a slice of \(2,\)"):
        World(1).run(
            lambda group: write(
                tmp_path / "f",
                {"x": (torch.float32, (2,))},
                [Piece(ShardSpec("x", (2,)), torch.ones(3))],
                group,
            )
        )


# -- in processes of their own --

PROCESS = """
import resource, sys
from pathlib import Path
import torch
import torch.distributed as dist
from dataclasses import dataclass
from manyhands.exchange import collective
from manyhands.recover.sharded_file import Reader, write
from manyhands.split.shard_spec import ShardSpec

@dataclass
class Piece:
    spec: ShardSpec
    tensor: torch.Tensor

rank, size, folder, rows, columns = int(sys.argv[1]), 2, Path(sys.argv[2]), 4096, 8192
store = dist.FileStore(str(folder / "store"), size)
group = collective.connect(rank, size, store, "gloo", 60.0, torch.device("cpu"))
part = ShardSpec("w", (rows, columns), 1, size, rank)
held = torch.arange(rows, dtype=torch.float32).view(-1, 1).expand(part.local_shape) * 2 + rank
held = held.contiguous()
group.all_reduce({"warm": torch.ones(1000)}).wait()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
write(folder / "file", {"w": (torch.float32, (rows, columns))}, [Piece(part, held)], group)
print("peak", peak() - before)
held.zero_()
before = peak()
with Reader(folder / "file") as reader:
    found = reader.read("w", ShardSpec("w", (rows, columns), 0, 8, rank))
print("peak", peak() - before)
group.close()
"""


def test_no_process_needs_memory_for_more_than_its_own_shard(tmp_path: Path) -> None:
    """128 MiB in all, of which each of two processes holds half; it writes that without a copy of
    it.
    """
    here = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(r), str(tmp_path)],
            env=here,
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    for process in started:
        said, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        writing, reading = (
            int(line.split()[1]) for line in said.splitlines() if line.startswith("peak")
        )
        assert writing < 16 * 2**20, f"{writing / 2**20:.0f} MiB more while writing 64 MiB"
        assert reading < 48 * 2**20, f"{reading / 2**20:.0f} MiB more while reading 16 MiB of 128"
    rows = torch.arange(4096, dtype=torch.float32).view(-1, 1) * 2
    found = load_file(tmp_path / "file")["w"]
    assert torch.equal(found[:, :4096], rows.expand(-1, 4096)) and torch.equal(
        found[:, 4096:], rows.expand(-1, 4096) + 1
    )
    assert (
        sharded_file.file_layout({"w": (torch.float32, (4096, 8192))}).nbytes
        == (tmp_path / "file").stat().st_size
    )


# -- checkpoints that ranks write together --


def share(round: int, rank: int, whole: Tensors) -> RankSnapshot:
    held = cut({f"model/{k}": v for k, v in whole.items()}, rank, 2, "rows")
    return RankSnapshot(
        round,
        {},
        {},
        {},
        Position(steps=round),
        tensors={f"model/{k}": s for k, s in shapes(whole).items()},
        mine=held,
    )  # type: ignore[arg-type]


def test_a_checkpoint_that_ranks_write_together_is_one_that_anybody_reads(tmp_path: Path) -> None:
    whole = {"w": torch.randn(7, 3), "b": torch.randn(5), "n": torch.tensor(3)}

    def main(group: InprocGroup) -> None:
        checkpoints = Checkpoints(tmp_path, keep=1, best="-loss")
        for round in (1, 2, 3):
            checkpoints.save_together(
                share(round, group.rank, whole), {"loss": round / 10}, group, torch.device("cpu")
            )
        checkpoints.wait()

    World(2).run(main)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000003",
    ]  # the best and the last
    found = load(tmp_path / "step-00000003")
    assert found.position.steps == 3 and found.params.keys() == whole.keys()
    assert all(torch.equal(found.params[k], v) for k, v in whole.items())
    some = load(tmp_path / "step-00000003", only=lambda name: name == "model/b")
    assert list(some.params) == ["b"]


def test_a_save_that_fails_on_one_rank_is_said_once_and_the_last_good_one_stays(
    tmp_path: Path,
) -> None:
    said: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    small, large = {"w": torch.ones(4, 2)}, {"w": torch.ones(20_000, 2)}

    def main(group: InprocGroup) -> None:
        def report(name: str, seconds: float, nbytes: int, text: str) -> None:
            said[group.rank].append((name, text))

        checkpoints = Checkpoints(tmp_path, report=report)
        checkpoints.save_together(share(1, group.rank, small), {}, group, torch.device("cpu"))
        checkpoints.wait()
        mine = share(2, group.rank, large)
        if group.rank == 1:
            mine.mine = [
                Piece(ShardSpec("model/w", (20_000, 2), 0, 2, 1), torch.ones(3))
            ]  # of a shape that does not fit
        checkpoints.save_together(mine, {}, group, torch.device("cpu"))
        checkpoints.wait()

    World(2).run(main)
    (first, _), (failed, text) = said[0]
    assert (first, failed) == ("checkpoint", "checkpoint_failed")
    assert text.startswith("checkpoint at round 2 failed: rank 1: model/w: a tensor of shape")
    assert text.endswith(f"training goes on, the last good one is {tmp_path}/step-00000001")
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert torch.equal(load(tmp_path / "step-00000001").params["w"], small["w"])
