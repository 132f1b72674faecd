"""A rank that resumes hashes what it reads; all ranks together, what any of them reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manyhands.core import Position, Snapshot
from manyhands.errors import CheckpointError
from manyhands.recover import checked_files, checkpoint
from manyhands.recover.checked_files import CHUNKS, chunks_of
from manyhands.recover.checkpoint import MANIFEST, TENSORS, Checkpoints, load, read_manifest
from manyhands.recover.read_share import ReadShare, load_share

CHUNK, SIZE = 4096, 4  # a tensor has eight chunks


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a model and of what each of four ranks has for itself."""
    monkeypatch.setattr(checked_files, "CHUNK_BYTES", CHUNK)
    own = {f"{r}/param/w": torch.full((CHUNK,), float(r), dtype=torch.float64) for r in range(SIZE)}
    snapshot = Snapshot(
        7,
        {"w": torch.arange(CHUNK, dtype=torch.float64)},
        {},
        {},
        Position(1, 2, 3),
        meta={"size": SIZE},
        ranks=own,
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot, {})
    checkpoints.wait()
    return checkpoints.path(7)


def share(rank: int, split: bool = False) -> ReadShare:
    own = f"ranks/{rank}/"
    if split:
        return ReadShare(rank, SIZE, lambda n: n.startswith(own), lambda n: n.startswith("model/"))
    return ReadShare(rank, SIZE, lambda n: n.startswith((own, "model/")))


def hashed(path: Path, share: ReadShare) -> int:
    return share.check_tensors(path, TENSORS, read_manifest(path))


def flip(path: Path, value: float) -> None:
    """Damage the tensor that is full of this value."""
    raw = bytearray((path / TENSORS).read_bytes())
    at = raw.index(torch.full((8,), value, dtype=torch.float64).numpy().tobytes())
    raw[at + CHUNK + 100] ^= 1
    (path / TENSORS).write_bytes(raw)


def test_a_rank_hashes_the_model_and_its_own_and_nothing_of_the_others(path: Path) -> None:
    tensor = CHUNK * 8
    for rank in range(SIZE):
        # and the chunks of the header, and of where its tensors begin and end
        assert 2 * tensor <= hashed(path, share(rank)) <= 2 * tensor + 4 * CHUNK
    assert (path / TENSORS).stat().st_size > 5 * tensor


def test_of_a_split_model_ranks_hash_a_share_each_and_all_of_it_together(path: Path) -> None:
    tensor = CHUNK * 8
    for rank in range(SIZE):
        assert hashed(path, share(rank, split=True)) <= tensor + tensor // SIZE + 5 * CHUNK
    whole = load(path)
    raw = bytearray((path / TENSORS).read_bytes())
    first = raw.index(whole.params["w"].numpy().tobytes())
    for at in range(first, first + tensor, CHUNK // 2):
        damaged = raw.copy()
        damaged[at] ^= 1
        (path / TENSORS).write_bytes(damaged)
        found = 0
        for rank in range(SIZE):
            try:
                hashed(path, share(rank, split=True))
            except CheckpointError:
                found += 1
        assert found >= 1, f"nobody saw byte {at}"


def test_damage_is_found_by_who_reads_it_and_says_where(path: Path) -> None:
    flip(path, 2.0)
    for rank in (0, 3):
        hashed(path, share(rank))
    with pytest.raises(
        CheckpointError, match=r"is damaged: tensors.safetensors has checksum .* at byte \d+, the"
    ):
        load_share(path, share(2))


@pytest.mark.parametrize("at", [3, 9, 40])
def test_a_damaged_header_is_found_by_all(path: Path, at: int) -> None:
    raw = bytearray((path / TENSORS).read_bytes())
    raw[at] ^= 64
    (path / TENSORS).write_bytes(raw)
    for rank in range(SIZE):
        with pytest.raises(CheckpointError, match=r"tensors.safetensors has checksum"):
            hashed(path, share(rank))


def test_what_is_read_is_what_was_saved_and_of_the_others_the_names(path: Path) -> None:
    got = load_share(path, share(1))
    assert torch.equal(got.params["w"], torch.arange(CHUNK, dtype=torch.float64))
    assert (got.ranks["1/param/w"] == 1).all()
    others = [got.ranks[f"{r}/param/w"] for r in (0, 2, 3)]
    assert all(o.is_meta and o.shape == (CHUNK,) for o in others)


def test_a_checkpoint_of_an_earlier_version_is_hashed_as_a_whole_by_rank_0(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest[CHUNKS], manifest["manifest_sha256"]
    manifest["manifest_sha256"] = checkpoint._manifest_digest(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    nbytes = (path / TENSORS).stat().st_size
    assert [hashed(path, share(rank)) for rank in range(SIZE)] == [nbytes, 0, 0, 0]
    flip(path, 2.0)
    with pytest.raises(CheckpointError, match=r"has checksum .*\.\.\., the manifest says"):
        load_share(path, share(0))


def test_each_table_file_is_hashed_by_one_rank(tmp_path: Path) -> None:
    files = {}
    for i in range(6):
        (tmp_path / f"{i}").write_bytes(bytes([i] * 100))
        files[f"{i}"] = {"bytes": 100, "sha256": checked_files.digest_of(tmp_path / f"{i}")}
    (tmp_path / "4").write_bytes(bytes(100))
    found = []
    for rank in range(SIZE):
        try:
            share(rank).check_files(tmp_path, files)
        except CheckpointError as e:
            found.append((rank, str(e)))
    ((rank, said),) = found
    assert rank == 0 and "4 has checksum" in said


def test_the_chunks_of_extents() -> None:
    assert chunks_of([(0, 1), (9, 21), (40, 40)], 10) == {0, 1, 2}
