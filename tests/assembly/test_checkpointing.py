"""Checkpoints between layouts: a run saved in any layout resumes in any other.

Every rank writes its shards into one file and reads only its own shards back.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.assembly import own_state
from manyhands.assembly.checkpointing import Checkpointing
from manyhands.assembly.rank_context import Options, RankContext
from manyhands.assembly.resume import find_snapshot
from manyhands.cli.export import export
from manyhands.core import (
    Finished,
    Group,
    Layout,
    Op,
    Plan,
    Position,
    ProcessInfo,
    Strategy,
    Tensors,
    Work,
)
from manyhands.errors import CheckpointError
from manyhands.exchange import reduce_scatter
from manyhands.exchange.compression.compressed_group import CompressedGroup
from manyhands.exchange.compression.int8 import Int8
from manyhands.exchange.compression.topk import TopK
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.merge.all_reduce import AllReduce
from manyhands.merge.easgd import EASGD
from manyhands.observe.events import Recorder
from manyhands.parallel.reshard.rank_state import WholeTensorState
from manyhands.parallel.reshard.resharding import Resharding
from manyhands.recover.checkpoint import (
    Checkpoints,
    RankSnapshot,
    load,
    pick,
)
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import WholeUpdate, prime
from manyhands.split.shard_slice import AnyShardSpec, ShardSlice, numel
from manyhands.split.shard_spec import ShardSpec, bounds
from manyhands.trainer_parts import ActiveStrategy

CUTS = {
    "wte.weight": (0, 1),
    "up.weight": (0, 1),
    "up.bias": (0, 1),
    "down.weight": (1, 1),
    "qkv.weight": (0, 3),
}
STAGES = [("wte.", "up.", "qkv."), ("down.", "norm.", "head.")]
ALIASES = {"head.weight": "wte.weight"}


class Whole(nn.Module):
    """Tied weights, a fused matrix, running statistics; hardly anything divides by 2."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.wte, self.up, self.down = (
            nn.Embedding(13, 5),
            nn.Linear(5, hidden),
            nn.Linear(hidden, 5),
        )
        self.qkv, self.norm = nn.Linear(5, 15, bias=False), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.wte.weight


def parts_of(layout: Layout, rank: int, whole: nn.Module) -> dict[str, AnyShardSpec]:
    at, parameters = layout.coordinates(rank), dict(whole.named_parameters(remove_duplicate=False))
    parts: dict[str, AnyShardSpec] = {}
    for name, value in whole.state_dict().items():
        if layout.pipe > 1 and not name.startswith(STAGES[at["pipe"]]):
            continue
        first, shape = ALIASES.get(name, name), tuple(value.shape)
        dim, groups = CUTS.get(first, (None, 1)) if layout.tensor > 1 else (None, 1)
        part = (
            ShardSpec(first, shape)
            if dim is None
            else ShardSpec(first, shape, dim, layout.tensor, at["tensor"], groups)
        )
        ends = bounds(numel(part), layout.shard)
        sharded = layout.shard > 1 and name in parameters
        parts[name] = (
            ShardSlice(part, ends[at["shard"]], ends[at["shard"] + 1]) if sharded else part
        )
    return parts


def local_module(parts: Mapping[str, AnyShardSpec], whole: nn.Module) -> nn.Module:
    """Zeros of the shapes that this rank holds, under the names of the whole model."""
    root, made = nn.Module(), {}
    buffers = dict(whole.named_buffers())
    for name, region in parts.items():
        folder, _, leaf = name.rpartition(".")
        if not hasattr(root, folder):
            root.add_module(folder, nn.Module())
        if name in buffers:
            root.get_submodule(folder).register_buffer(
                leaf, torch.zeros(region.local_shape, dtype=buffers[name].dtype)
            )
        else:
            made.setdefault(region.name, nn.Parameter(torch.zeros(region.local_shape)))
            root.get_submodule(folder).register_parameter(leaf, made[region.name])
    return root


class Along(Group):
    """The ranks of a world that differ along one axis, as a group: all ranks make its calls at the
    same time.
    """

    def __init__(self, world: InprocGroup, ranks: Sequence[int]):
        self.world, self.ranks = world, list(ranks)
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        others = iter(self.world.swap(values, [r for r in self.ranks if r != self.world.rank]))
        everyone = [values if r == self.world.rank else next(others) for r in self.ranks]
        for name, value in values.items():
            stacked = torch.stack([one[name] for one in everyone])
            value.copy_(
                stacked.amax(0)
                if op == "max"
                else stacked.sum(0)
                if op == "sum"
                else stacked.mean(0)
            )
        return Finished()

    def own(self, tensor: Tensor) -> list[slice]:
        return [reduce_scatter.equal_part(tensor.numel(), self.rank, self.size)]

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return reduce_scatter.reduce_scatter(self, values, op)

    def all_gather(self, values: Tensors) -> Work:
        return reduce_scatter.all_gather(self, values)

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        others = [r for r in self.ranks if r != self.world.rank]
        theirs = dict(zip(others, self.world.swap(values, others), strict=True))
        for name, value in theirs.get(self.ranks[source], {}).items():
            values[name].copy_(value)
        return Finished()

    def barrier(self) -> None:
        self.world.barrier()

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        return self.world.swap(values, [self.ranks[p] for p in peers])

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        return self.world.transfer(
            {self.ranks[r]: v for r, v in give.items()}, {self.ranks[r]: v for r, v in into.items()}
        )

    def close(self) -> None: ...


@dataclasses.dataclass
class Rank:
    """One rank of a run: what `build` would put together."""

    context: RankContext
    module: nn.Module
    optimizer: torch.optim.Optimizer
    snapshots: Checkpointing
    rule: ActiveStrategy
    parts: dict[str, AnyShardSpec]
    notices: list[str]

    def save(self, round: int) -> None:
        self.snapshots.save(
            taken := self.snapshots.take(round, self.rule, {"loss": 0.5}), {"loss": 0.5}
        )
        assert isinstance(taken, RankSnapshot) == self.context.splits_model
        self.context.checkpoints.wait()
        self.context.group.all_reduce({"saved": torch.zeros(1)}).wait()

    def resume(self) -> Tensors:
        """Returns the state of the codec."""
        saved = find_snapshot(self.context, self.snapshots.order)
        assert saved is not None
        self.snapshots.restore(saved, self.rule.name, agree=False)
        return self.snapshots.restore_strategy(saved, self.rule)


Strategies = Callable[[], Strategy[Any, Any]]


def rank(
    folder: Path, layout: Layout, group: InprocGroup, strategy: Strategies, whole: nn.Module
) -> Rank:
    notices: list[str] = []

    def report(name: str, seconds: float, nbytes: int, text: str) -> None:
        assert name != "checkpoint_failed", text
        notices.append(text)

    link = ObservedGroup(group, lambda event: None)
    axes = {}
    for axis in Layout.AXES:
        peers = layout.peers(group.rank, axis)
        alone = SoloGroup() if len(peers) == 1 else Along(group, peers)
        axes[axis] = (
            link
            if len(peers) == layout.size
            else ObservedGroup(alone, lambda event: None, beside=link)
        )
    plan = Plan(layout, strategy())
    recorder = Recorder(folder, group.rank)
    context = RankContext(
        ProcessInfo(group.rank, layout.size),
        plan,
        Options(),
        cast(Any, None),
        torch.device("cpu"),
        link,
        axes,
        folder,
        recorder,
        Checkpoints(folder / "checkpoints", report=report),
        None,
        "none",
    )
    emit = recorder.emit
    recorder.emit = lambda event: (notices.append(str(event.value)), emit(event))[1]  # type: ignore
    parts = parts_of(layout, group.rank, whole)
    module = local_module(parts, whole) if context.splits_model else Whole()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    flat = FlatParameters(module, context.allocate, 2**20)
    update = WholeUpdate(flat, module, optimizer)
    replica = ModuleReplica(flat, update, lambda: MicroLoss(None, 0, True), nominal=1)
    prime(optimizer)
    rule = ActiveStrategy(
        "merge",
        type(plan.strategy).__name__.lower(),
        plan.strategy,
        context.data_group,
        plan.strategy.init(replica),
    )
    batches = SimpleNamespace(position=Position(1, 5, 7))
    # of the whole model, as far as matrices are split: which of them are its own, a rank of a
    # pipeline knows by its module
    at, no_stages = layout.coordinates(group.rank), dataclasses.replace(layout, data=1, pipe=1)
    everything = parts_of(no_stages, at["shard"] * layout.tensor + at["tensor"], whole)
    everything = {k: v for k, v in everything.items() if k not in ALIASES}
    assembled = Resharding(everything, link, ALIASES) if context.splits_model else None
    local = (
        WholeTensorState(
            module, update, lambda values: context.data_group.all_reduce(values).wait()
        )
        if context.splits_model
        else None
    )
    snapshots = Checkpointing(
        context,
        plan,
        module,
        replica,
        cast(Any, batches),
        8,
        {"seed": 1},
        resharding=assembled,
        local=local,
    )
    return Rank(context, module, optimizer, snapshots, rule, parts, notices)


def run(
    folder: Path,
    layout: Layout,
    body: Callable[[Rank], Any],
    strategy: Strategies = AllReduce,
    hidden: int = 7,
) -> list[Any]:
    """`body` on every rank of a new run in `folder`."""

    def main(group: InprocGroup) -> Any:
        here = rank(folder, layout, group, strategy, Whole(hidden))
        try:
            return body(here)
        finally:
            here.context.recorder.close()

    return World(layout.size).run(main)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The truth: a model and an optimizer that have made steps."""
    torch.manual_seed(3)
    model = Whole()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked.fill_(41)
    return model, optimizer


def start(folder: Path) -> tuple[Tensors, Tensors]:
    """A run of one process, saved at round 1; its model and the optimizer's state by name."""
    model, optimizer = trained()

    def body(here: Rank) -> None:
        here.module.load_state_dict(model.state_dict())
        here.optimizer.load_state_dict(optimizer.state_dict())
        here.save(1)

    run(folder, Layout(), body)
    saved = load(folder / "checkpoints" / "step-00000001")
    return saved.params, saved.optimizer


def assert_holds_its_parts(here: Rank, params: Tensors, moments: Tensors) -> None:
    names = {id(p): n for n, p in here.module.named_parameters()}
    for name, value in here.module.state_dict().items():
        expected = (
            here.parts[name].extract(params[name]) if here.context.splits_model else params[name]
        )
        assert torch.equal(value, expected), name
    for p, entries in here.optimizer.state.items():
        region = here.parts[names[id(p)]]
        for key in ("exp_avg", "exp_avg_sq"):
            expected = moments[f"{region.name}/{key}"]
            assert torch.equal(
                entries[key], region.extract(expected) if here.context.splits_model else expected
            ), (region, key)
        assert float(entries["step"]) == 3
    assert len(here.optimizer.state) == len(list(here.module.parameters()))


LAYOUTS = {
    "tensor=2": Layout(tensor=2),
    "data=4": Layout(data=4),
    "pipe=2": Layout(pipe=2),
    "shard=3": Layout(shard=3),
    "data=2 tensor=2 pipe=2": Layout(data=2, tensor=2, pipe=2),
    "shard=2 tensor=2": Layout(shard=2, tensor=2),
    "alone": Layout(),
}


def test_a_run_goes_through_every_layout_and_loses_no_bit(tmp_path: Path) -> None:
    params, moments = start(tmp_path)
    for round, (_, layout) in enumerate(LAYOUTS.items(), 2):

        def body(here: Rank, round: int = round) -> None:
            here.resume()
            assert_holds_its_parts(here, params, moments)
            here.save(round)

        run(tmp_path, layout, body)
        saved = pick(tmp_path)  # as one process reads it
        assert (saved.round, saved.position) == (round, Position(1, 5, 7))
        assert saved.params.keys() == params.keys() and all(
            torch.equal(saved.params[k], v) for k, v in params.items()
        )
        assert saved.optimizer.keys() == moments.keys() and all(
            torch.equal(saved.optimizer[k], v) for k, v in moments.items()
        )
        assert saved.meta["layout"] == dataclasses.asdict(layout) and saved.meta["metrics"] == {
            "loss": 0.5
        }
        whole = mh.load(tmp_path, Whole())
        assert all(torch.equal(v, params[k]) for k, v in whole.state_dict().items())
        out = load_file(export(tmp_path, tmp_path / "out.safetensors"))
        assert out.keys() == params.keys() and all(
            torch.equal(out[k], v) for k, v in params.items()
        )


def test_the_optimizers_plain_values_name_the_parameters_of_all_stages(tmp_path: Path) -> None:
    start(tmp_path)
    run(tmp_path, Layout(pipe=2), lambda here: (here.resume(), here.save(2)))
    (group,) = pick(tmp_path).meta["optimizer"]["groups"]
    assert sorted(group["params"]) == sorted(n for n, _ in Whole().named_parameters())
    assert group["lr"] == 0.1


def test_a_checkpoint_of_another_model_is_refused_on_every_rank_with_what_differs(
    tmp_path: Path,
) -> None:
    start(tmp_path)

    def body(here: Rank) -> str:
        with pytest.raises(CheckpointError) as caught:
            here.resume()
        return str(caught.value)

    said = run(tmp_path, Layout(pipe=2), body, hidden=9)
    assert len(set(said)) == 1
    assert (
        "the checkpoint is of another model: up.weight is (9, 5), in the checkpoint (7, 5)"
        in said[0]
    )


def test_a_damaged_checkpoint_is_found_by_one_rank_and_passed_over_by_all(tmp_path: Path) -> None:
    params, moments = start(tmp_path)
    run(tmp_path, Layout(tensor=2), lambda here: (here.resume(), here.save(2)))
    file = tmp_path / "checkpoints" / "step-00000002" / "tensors.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)

    def body(here: Rank) -> None:
        here.resume()
        assert here.context.checkpoints.last_good == tmp_path / "checkpoints" / "step-00000001"
        assert_holds_its_parts(here, params, moments)

    run(tmp_path, Layout(tensor=2, pipe=2), body)


def test_ranks_without_a_common_disk_hear_of_it_before_they_train(tmp_path: Path) -> None:
    def main(group: InprocGroup) -> str:
        with pytest.raises(CheckpointError) as caught:
            rank(tmp_path / str(group.rank), Layout(tensor=2), group, AllReduce, Whole())
        return str(caught.value)

    said = World(2).run(main)
    assert (
        len(set(said)) == 1
        and said[0].startswith("rank 1: does not see")
        and "shared disk" in said[0]
    )


# -- what a rank has for itself --


def elastic() -> EASGD:
    return EASGD()


def scatter(here: Rank) -> Tensors:
    """Make every replica's model another one, and the centre yet another."""
    replica = here.snapshots.replica
    at = here.context.plan.layout.coordinates(here.context.rank)["data"]
    for values in replica.params.values():
        values.add_(1 + at)
    for i, value in enumerate(here.rule.state.values()):
        value.copy_(torch.arange(value.numel()).view(value.shape) + i + here.context.rank % 2)
    return {
        k: v.clone()
        for k, v in {
            **replica.params,
            **{f"state/{k}": v for k, v in here.rule.state.items()},
        }.items()
    }


def test_in_the_same_layout_each_rank_takes_its_own_back(tmp_path: Path) -> None:
    start(tmp_path)
    layout = Layout(data=2, tensor=2)
    before = run(
        tmp_path, layout, lambda here: (here.resume(), scatter(here), here.save(2))[1], elastic
    )

    def body(here: Rank) -> None:
        here.resume()
        now = {
            **here.snapshots.replica.params,
            **{f"state/{k}": v for k, v in here.rule.state.items()},
        }
        assert now.keys() == before[here.context.rank].keys()
        for name, value in now.items():
            assert torch.equal(value, before[here.context.rank][name]), name
        assert not [n for n in here.notices if "anew" in n]

    run(tmp_path, layout, body, elastic)
    saved = pick(tmp_path)
    owners = {name.split("/")[0] for name in saved.ranks if "/param/" in name}
    assert owners == {"0", "1", "2", "3"}
    assert {name.split("/")[0] for name in saved.ranks if "/state/" in name} == {
        "*0",
        "*1",
    }  # the centre once for both replicas


def test_damage_in_one_ranks_own_tensors_is_named_and_passed_over_by_all(tmp_path: Path) -> None:
    start(tmp_path)
    layout = Layout(data=3)
    run(tmp_path, layout, lambda here: (here.resume(), scatter(here), here.save(2)), elastic)
    path = tmp_path / "checkpoints/step-00000002"
    own = {k: v for k, v in load(path).ranks.items() if k.startswith("2/param/")}
    raw = bytearray((path / "tensors.safetensors").read_bytes())
    for value in own.values():
        raw[raw.index(value.numpy().tobytes()) + 5] ^= 1
    (path / "tensors.safetensors").write_bytes(raw)

    def body(here: Rank) -> list[str]:
        here.resume()
        assert here.context.checkpoints.last_good == tmp_path / "checkpoints" / "step-00000001"
        return here.notices

    for said in run(tmp_path, layout, body, elastic):
        (text,) = [t for t in said if "is damaged" in t]
        assert text.endswith("; using the one before it")
        assert "step-00000002 is damaged: tensors.safetensors has checksum" in text


@pytest.mark.parametrize("packet_bytes", [64, 1000, 2**20])
def test_rank_0_receives_other_ranks_state_in_packets_from_one_rank_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packet_bytes: int
) -> None:
    monkeypatch.setattr(own_state, "PACKET_BYTES", packet_bytes)
    received: list[tuple[int, list[int]]] = []  # bytes, and from whom
    alive: list[weakref.ref[Tensor]] = []

    def body(here: Rank) -> Tensors:
        group = here.context.group
        plain = group.transfer

        def transfer(give: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> Work:
            if into:
                assert not any(ref() is not None for ref in alive), "the packet before is gone"
                alive[:] = [weakref.ref(v) for v in into.values()]
                received.append((sum(v.nbytes for v in into.values()), list(into)))
            return plain(give, into)

        group.transfer = transfer  # type: ignore[method-assign]
        r = here.context.rank
        mine = {
            "matrix": torch.full((3, 50), float(r)),
            "half": torch.full((7,), r, dtype=torch.bfloat16),
            "number": torch.tensor(r, dtype=torch.int64),
            "uneven": torch.arange(r, dtype=torch.float64),
            "none": torch.empty(0),
        }
        return own_state.gathered(here.context, mine)

    found, *others = run(tmp_path, Layout(data=3), body)
    assert others == [{}, {}] and len(found) == 15
    for r in range(3):
        assert torch.equal(found[f"{r}/matrix"], torch.full((3, 50), float(r)))
        assert torch.equal(found[f"{r}/half"], torch.full((7,), r, dtype=torch.bfloat16))
        assert found[f"{r}/number"].shape == () and int(found[f"{r}/number"]) == r
        assert torch.equal(found[f"{r}/uneven"], torch.arange(r, dtype=torch.float64))
        assert found[f"{r}/none"].numel() == 0
    assert all(nbytes <= packet_bytes and len(ranks) == 1 for nbytes, ranks in received)
    assert [ranks[0] for _, ranks in received] == sorted(ranks[0] for _, ranks in received)


def test_on_another_number_of_replicas_all_start_from_the_one_model_and_keep_the_strategys_state(
    tmp_path: Path,
) -> None:
    start(tmp_path)
    two = Layout(data=2, tensor=2)
    before = run(
        tmp_path, two, lambda here: (here.resume(), scatter(here), here.save(2))[1], elastic
    )
    params, moments = (lambda s: (s.params, s.optimizer))(pick(tmp_path))

    def body(here: Rank) -> None:
        here.resume()
        assert_holds_its_parts(here, params, moments)
        for key, value in here.rule.state.items():
            assert torch.equal(value, before[here.context.rank % 2][f"state/{key}"])

    run(tmp_path, Layout(data=1, tensor=2), body, elastic)
    run(tmp_path, Layout(data=3, tensor=2), body, elastic)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("alike", [False, True], ids=["each its own", "the same on all ranks"])
def test_what_a_codec_held_back_arrives_once_whatever_the_number_of_ranks(
    tmp_path: Path, alike: bool, tensor: int
) -> None:
    """Whole numbers, divided by powers of 2 only: every sum is exact."""
    numel = 64

    def exchange(here: Rank, codec: TopK, x: Tensor) -> Tensor:
        link = CompressedGroup(here.context.data_group, codec, smallest=1)
        link.load_state(here.resume())
        link.all_reduce({"x": x}).wait()
        here.rule.codec_state = lambda: link.state
        return x

    def given(here: Rank, round: int) -> Tensor:
        at = here.context.plan.layout.coordinates(here.context.rank)["data"]
        seed = torch.Generator().manual_seed(100 * round + (0 if alike else at))
        return torch.randint(-9, 10, (numel,), generator=seed).float()

    start(tmp_path)
    expected, arrived = torch.zeros(numel), torch.zeros(numel)
    for round, size in enumerate((3, 2, 4), 2):

        def body(here: Rank, round: int = round) -> tuple[Tensor, Tensor]:
            x = given(here, round)
            out = exchange(here, TopK(density=0.1), x.clone())
            here.save(round)
            return x, out

        layout = Layout(data=size, tensor=tensor)
        results = run(tmp_path, layout, body)
        expected += sum(x for x, _ in results[::tensor])
        arrived += results[0][1]
    assert not torch.equal(arrived, expected), "something was held back"
    last = run(
        tmp_path,
        Layout(data=2, tensor=tensor),
        lambda here: exchange(here, TopK(density=1.0), torch.zeros(numel)),  # sends all there is
    )
    assert all(torch.equal(arrived + rest, expected) for rest in last)


def test_what_the_owner_of_a_shard_lost_is_left_out_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    start(tmp_path)

    def first(here: Rank) -> list[tuple[str, int]]:
        link = CompressedGroup(here.context.data_group, Int8(block=8), smallest=1)
        link.load_state(here.resume())
        link.all_reduce({"x": torch.arange(65.0) + here.context.rank}).wait()
        here.rule.codec_state = lambda: link.state
        here.save(2)
        return sorted((k, v.numel()) for k, v in link.state.items())

    lengths = [dict(kept)["second/x"] for kept in run(tmp_path, Layout(data=3), first)]
    assert lengths == [21, 22, 22], "of shards that no two ranks of another number have"
    for kept in run(tmp_path, Layout(data=2), lambda here: here.resume()):
        assert kept.keys() == {"error/x"}


@pytest.mark.parametrize("words", ["pipe=2", "data=4", "alone"])
def test_in_another_layout_what_the_strategy_kept_starts_anew_and_that_is_said(
    tmp_path: Path, words: str
) -> None:
    start(tmp_path)
    two = Layout(data=2, tensor=2)
    run(tmp_path, two, lambda here: (here.resume(), scatter(here), here.save(2)), elastic)
    params, moments = (lambda s: (s.params, s.optimizer))(pick(tmp_path))

    def body(here: Rank) -> list[str]:
        before = {k: v.clone() for k, v in here.rule.state.items()}
        here.resume()
        assert_holds_its_parts(here, params, moments)
        assert all(torch.equal(v, before[k]) for k, v in here.rule.state.items())
        return here.notices

    notices = run(tmp_path, LAYOUTS[words], body, elastic)[0]
    assert any(
        "in another way than before, so state of merge=easgd starts anew" in n for n in notices
    )


def test_stages_cut_elsewhere_are_another_layout_for_what_is_kept_in_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    layout = Layout(data=2, pipe=2)
    run(tmp_path, layout, lambda here: (here.resume(), scatter(here), here.save(2)), elastic)
    monkeypatch.setattr(
        sys.modules[__name__], "STAGES", [("wte.", "up."), ("qkv.", "down.", "norm.", "head.")]
    )
    params, moments = (lambda s: (s.params, s.optimizer))(pick(tmp_path))

    def body(here: Rank) -> list[str]:
        here.resume()
        assert_holds_its_parts(here, params, moments)
        return here.notices

    assert any("in another way than before" in n for n in run(tmp_path, layout, body, elastic)[0])


def test_generators_are_taken_back_only_where_ranks_play_the_same_part(tmp_path: Path) -> None:
    start(tmp_path)

    def save(here: Rank) -> None:
        torch.manual_seed(100)
        here.context.group.all_reduce({"seeded": torch.zeros(1)}).wait()
        here.save(2)

    run(tmp_path, Layout(tensor=2), lambda here: (here.resume(), save(here)))
    assert {name.split("/")[0] for name in pick(tmp_path).rng} == {"0", "1"}
    drawn = {}
    for words in ("tensor=2", "pipe=2", "alone"):
        run(tmp_path, LAYOUTS[words], lambda here: (torch.manual_seed(200), here.resume()))
        drawn[words] = float(torch.rand(1))
    torch.manual_seed(100)
    then = float(torch.rand(1))
    torch.manual_seed(200)
    anew = float(torch.rand(1))
    assert drawn == {"tensor=2": then, "pipe=2": anew, "alone": anew}
