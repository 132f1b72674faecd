"""Whole tensors out of any layout and into any other: same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyhands.core import Layout, Tensors
from manyhands.errors import CheckpointError
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.exchange.observed import ObservedGroup
from manyhands.parallel.reshard.resharding import Resharding
from manyhands.split.shard_slice import (
    AnyShardSpec,
    ShardSlice,
    numel,
    renamed,
    runs,
)
from manyhands.split.shard_spec import ShardSpec, bounds
from support.compare import same_typed_tensors

CUTS = {  # what a tensor layout cuts: name -> (dim, groups); the rest is whole
    "wte.weight": (0, 1),
    "h.0.qkv.weight": (0, 3),
    "h.0.qkv.bias": (0, 3),
    "h.0.out.weight": (1, 1),
    "h.1.up.weight": (0, 1),
    "h.1.conv.weight": (1, 1),
}
STAGES = [["wte.weight", "h.0."], ["h.1.", "norm.", "lm_head.weight"]]
ALIASES = {"lm_head.weight": "wte.weight"}


def whole_model(dtype: torch.dtype = torch.float32) -> Tensors:
    """13 tokens and 7 hidden units: nothing divides by 2."""
    shapes = {
        "wte.weight": (13, 5),
        "h.0.qkv.weight": (21, 5),
        "h.0.qkv.bias": (21,),
        "h.0.out.weight": (5, 7),
        "h.0.out.bias": (5,),
        "h.1.up.weight": (7, 5),
        "h.1.conv.weight": (2, 7, 3, 3),
        "norm.scale": (),
        "norm.none": (0, 3),
    }
    generator = torch.Generator().manual_seed(1)
    model = {
        k: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
        for k, s in shapes.items()
    }
    model["norm.seen"] = torch.tensor(7)
    model["lm_head.weight"] = model["wte.weight"].clone()
    return model


def whole_optimizer(model: Tensors) -> Tensors:
    state: Tensors = {}
    for name, value in model.items():
        if value.is_floating_point() and name != "lm_head.weight":
            state |= {
                f"{name}/exp_avg": value.double() * 3,
                f"{name}/exp_avg_sq": value.double() ** 2,
                f"{name}/step": torch.tensor(4.0),
            }
    return state


def specs_of(layout: Layout, rank: int, model: Tensors) -> dict[str, AnyShardSpec]:
    """What the layout leaves on a rank, by the names that its own module has for it."""
    at = layout.coordinates(rank)
    specs: dict[str, AnyShardSpec] = {}
    for name, value in model.items():
        shape, first = tuple(value.shape), ALIASES.get(name, name)
        if layout.pipe > 1 and not name.startswith(tuple(STAGES[at["pipe"]])):
            continue
        if layout.pipe == 1 and name in ALIASES:
            continue  # one module has one parameter for both
        dim, groups = CUTS.get(first, (None, 1)) if layout.tensor > 1 else (None, 1)
        part = (
            ShardSpec(first, shape, dim, layout.tensor, at["tensor"], groups)
            if dim is not None
            else ShardSpec(first, shape)
        )
        cut = bounds(numel(part), layout.shard)
        sharded = layout.shard > 1 and value.is_floating_point()
        specs[name] = ShardSlice(part, cut[at["shard"]], cut[at["shard"] + 1]) if sharded else part
    return specs


def in_all(
    layout: Layout, model: Tensors, work: Callable[[Resharding, InprocGroup], Tensors]
) -> list[Tensors]:
    def main(group: InprocGroup) -> Tensors:
        return work(Resharding(specs_of(layout, group.rank, model), group, ALIASES), group)

    return World(layout.size).run(main)


LAYOUTS = {
    "alone": Layout(),
    "tensor=2": Layout(tensor=2),
    "tensor=4": Layout(tensor=4),
    "data=4": Layout(data=4),
    "pipe=2": Layout(pipe=2),
    "shard=3": Layout(shard=3),
    "data=2 tensor=2 pipe=2": Layout(data=2, tensor=2, pipe=2),
    "shard=2 tensor=2": Layout(shard=2, tensor=2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", LAYOUTS)
def test_every_layout_takes_its_slices_and_gives_back_the_same_bits(
    words: str, dtype: torch.dtype
) -> None:
    model = whole_model(dtype)
    whole = model | whole_optimizer(model)
    local = in_all(LAYOUTS[words], model, lambda a, group: a.extract(whole))
    for rank, taken in enumerate(local):
        for name, spec in specs_of(LAYOUTS[words], rank, model).items():
            assert tuple(taken[name].shape) == spec.local_shape
    gathered = in_all(LAYOUTS[words], model, lambda a, group: a.gather(local[group.rank]))
    assert same_typed_tensors(gathered[0], whole)
    assert not any(gathered[1:])


def test_a_chain_of_layouts_ends_where_it_began() -> None:
    model = whole_model()
    whole = start = model | whole_optimizer(model)
    for words in [
        "tensor=2",
        "data=4",
        "pipe=2",
        "shard=3",
        "data=2 tensor=2 pipe=2",
        "shard=2 tensor=2",
        "alone",
    ]:
        whole = in_all(
            LAYOUTS[words], model, lambda a, group, before=whole: a.gather(a.extract(before))
        )[0]
    assert same_typed_tensors(whole, start)


def test_replicas_and_tied_weights_are_sent_once() -> None:
    """Only what rank 0 does not hold already travels, and of that every byte once, whatever the
    number of replicas.
    """
    model, layout = whole_model(), Layout(data=3, tensor=2)

    def main(group: InprocGroup) -> tuple[int, int]:
        link = ObservedGroup(group, lambda event: None)
        resharding = Resharding(specs_of(layout, group.rank, model), link, ALIASES)
        local = resharding.extract(model)
        sends = sum(
            h.tensor.nbytes for h in resharding.survey(resharding.local_tensors(local)).mine
        )
        asking = link.nbytes
        resharding.gather(local)
        return sends, link.nbytes - 2 * asking

    speak, sent = zip(*World(layout.size).run(main), strict=True)
    other_half = {
        k: r.extract(model[k]).nbytes for k, r in specs_of(layout, 1, model).items() if k in CUTS
    }
    assert sum(speak) == sum(v.nbytes for v in model.values())
    assert sent == (
        0,
        sum(other_half.values()) + other_half["wte.weight"],
        0,
        0,
        0,
        0,
    )  # the tied one under both names


def test_a_tied_weight_may_be_complete_on_one_stage_and_cut_on_another() -> None:
    weight = torch.arange(12.0).view(6, 2)
    specs: list[dict[str, AnyShardSpec]] = [
        {"out.weight": ShardSpec("w", (6, 2), 0, 2, i)} for i in range(2)
    ] + [{"w": ShardSpec("w", (6, 2))}]

    def main(group: InprocGroup) -> Tensors:
        resharding = Resharding(specs[group.rank], group, {"out.weight": "w"})
        return resharding.gather(resharding.extract({"w": weight}))

    assert same_typed_tensors(World(3).run(main)[0], {"w": weight, "out.weight": weight})


def test_a_rank_that_holds_an_alias_takes_the_state_of_the_first_name() -> None:
    resharding = Resharding(
        {"lm_head.weight": ShardSpec("lm_head.weight", (4, 2), 0, 2, 1)},
        World(1).run(lambda g: g)[0],
        ALIASES,
    )
    state = torch.arange(8.0).view(4, 2)
    taken = resharding.extract(
        {"wte.weight": state, "wte.weight/exp_avg": state + 1, "wte.weight/step": torch.tensor(3.0)}
    )
    assert same_typed_tensors(
        taken,
        {
            "lm_head.weight": state[2:],
            "lm_head.weight/exp_avg": state[2:] + 1,
            "lm_head.weight/step": torch.tensor(3.0),
        },
    )
    assert resharding.global_name("lm_head.weight") == "wte.weight"


# -- what does not make a whole --


def gathered(*ranks: tuple[dict[str, AnyShardSpec], Tensors]) -> None:
    World(len(ranks)).run(
        lambda group: Resharding(ranks[group.rank][0], group).gather(ranks[group.rank][1])
    )


def test_a_slice_that_no_rank_holds_is_an_error_that_names_it() -> None:
    one = ({"w": ShardSpec("w", (4, 2), 0, 2, 0)}, {"w": torch.zeros(2, 2)})
    with pytest.raises(
        CheckpointError, match="do not make global tensors: of the 8 elements of w the ranks hold 4"
    ):
        gathered(one, one)


def test_ranks_that_contradict_each_other_are_named() -> None:
    first, second = {"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(
        CheckpointError, match=r"w is int64 \[2\] on rank 1, but float32 \[2\] on a rank before it"
    ):
        gathered(({}, first), ({}, second))


def test_a_tensor_of_another_shape_than_its_shard_spec_is_refused() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"w has shape \(3,\) on this rank, but its shard spec has shape \(2,\)",
    ):
        gathered(({"w": ShardSpec("w", (4,), 0, 2, 0)}, {"w": torch.zeros(3)}))


def test_state_of_a_cut_parameter_without_a_shard_spec_is_named_and_refused() -> None:
    """Adafactor keeps a row and a column of a matrix: what each rank has is of its own cut."""
    specs: dict[str, AnyShardSpec] = {
        "w": ShardSpec("w", (4, 6), 0, 2, 0),
        "v": ShardSpec("v", (4, 6)),
    }
    local = {
        "w/row": torch.zeros(2),
        "w/step": torch.zeros(1),
        "v/row": torch.zeros(4),
        "w": torch.zeros(2, 6),
    }
    resharding = Resharding(specs, World(1).run(lambda g: g)[0])
    assert resharding.without_spec(local) == ["w/row"]
    with pytest.raises(
        CheckpointError,
        match=r"optimizer state w/row has shape \(2,\), its parameter \(2, 6\) of \(4, 6\)",
    ):
        resharding.local_tensors(local)


# -- specs --


def test_the_runs_of_a_shard_spec_are_its_elements_in_the_global_tensor() -> None:
    for shape in [(6,), (5, 7), (3, 9, 4), (4, 6, 1, 5), (0, 4), ()]:
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        specs: list[AnyShardSpec] = [ShardSpec("w", shape)]
        for dim, size in itertools.product(range(len(shape)), (1, 2, 5)):
            for groups in (1, 3) if shape[dim] % 3 == 0 else (1,):
                specs += [ShardSpec("w", shape, dim, size, i, groups) for i in range(size)]
        for part in list(specs):
            assert isinstance(part, ShardSpec)
            specs += [ShardSlice(part, a, b) for a, b in itertools.pairwise(bounds(numel(part), 3))]
        for spec in specs:
            found = [i for start, length in runs(spec) for i in range(start, start + length)]
            assert found == spec.extract(whole).view(-1).tolist(), spec
            assert spec.extract(whole).shape == spec.local_shape
            back: Tensor = torch.full(shape, -1)
            spec.insert(spec.extract(whole), back)
            assert back.view(-1)[found].tolist() == found and int((back >= 0).sum()) == len(found)
            assert renamed(spec, "v").name == "v" and renamed(spec, "w") == spec
