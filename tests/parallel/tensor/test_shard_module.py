"""Tensor parallelism: a model with sharded parameters trains as the whole one does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyhands.core import Group
from manyhands.errors import PlanError
from manyhands.exchange.inproc import World
from manyhands.parallel import sync_batchnorm
from manyhands.parallel.tensor import shard_module
from manyhands.parallel.tensor.dry_run import prepare_dry_run
from manyhands.parallel.tensor.sharding_rules import ShardedValue, TensorAxis
from manyhands.split.shard_spec import ShardSpec
from manyhands.split.tensor import (
    Cut,
    derive,
    named_tensors,
    shard_specs,
)
from manyhands.task import accuracy
from support.paths import ZOO, zoo_file, zoo_task

Loss = Callable[[Any, Tensor], Tensor]
Made = tuple[nn.Module, Loss, list[Tensor], Tensor]  # model, loss, inputs, target


def zoo(name: str) -> Made:
    task = zoo_task(name)
    *inputs, target = (t[:8] for t in task.train)
    model = task.model.double()
    for m in model.modules():  # dropout has tests of its own
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        if isinstance(getattr(m, "dropout", None), float):
            m.dropout = 0.0
    return model, task.loss, [t.double() if t.is_floating_point() else t for t in inputs], target


class Logits(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids, use_cache=False)


def hugging_face(name: str) -> Made:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=31,
            n_positions=12,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4 if name == "llama" else 2,
            max_position_embeddings=16,
        )
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(1))

    def loss(out: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.logits.flatten(0, 1), target.flatten())

    return Logits(model.double()), loss, [ids[:, :-1].contiguous()], ids[:, 1:].contiguous()


def made(name: str) -> Made:
    return zoo(name) if (ZOO / f"{name}.py").exists() else hugging_face(name)


def cuts_of(
    model: nn.Module,
    loss: Loss,
    inputs: list[Tensor],
    target: Tensor,
    size: int,
    sequence: bool = False,
) -> dict[str, Cut]:
    return derive(model, prepare_dry_run(model, inputs, size, loss, target, sequence), size).cuts


def cut(
    model: nn.Module, cuts: dict[str, Cut], group: Group, sequence: bool = False
) -> tuple[nn.Module, dict[str, ShardSpec], TensorAxis]:
    mine = copy.deepcopy(model)
    held = shard_specs(named_tensors(mine), cuts, group.size, group.rank)
    return mine, held, shard_module.apply(mine, held, group, sequence)


class Counted:
    """Counts what passes, and lets every rank keep random numbers of its own, as processes do."""

    def __init__(self, group: Group):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.reduced = self.moved = 0

    def all_reduce(self, values: Any, op: Any = "sum") -> Any:
        self.reduced += 1
        return self._apart(lambda: self.group.all_reduce(values, op))

    def transfer(self, give: Any, into: Any, name: str = "") -> Any:
        self.moved += 1
        return self._apart(lambda: self.group.transfer(give, into, name))

    def _apart(self, call: Callable[[], Any]) -> Any:
        state = torch.get_rng_state()
        work = call()
        work.wait()
        torch.set_rng_state(state)
        return work


class Among:
    """Some of the ranks of a group, as a group: what an axis of a layout is."""

    def __init__(self, group: Group, ranks: list[int]):
        self.group, self.ranks = group, ranks
        self.rank, self.size = ranks.index(group.rank), len(ranks)

    def all_reduce(self, values: dict[str, Tensor], op: str = "sum") -> Any:
        for v in values.values():
            mine = v.detach().clone()
            came = {r: torch.empty_like(mine) for r in self.ranks if r != self.group.rank}
            work = self.group.transfer(dict.fromkeys(came, mine), came)
            work.wait()
            all_of_them = torch.stack(
                [mine if r == self.group.rank else came[r] for r in self.ranks]
            )
            v.detach().copy_(all_of_them.amax(0) if op == "max" else all_of_them.sum(0))
        return work

    def transfer(self, give: dict[int, Tensor], into: dict[int, Tensor], name: str = "") -> Any:
        return self.group.transfer(
            {self.ranks[r]: v for r, v in give.items()},
            {self.ranks[r]: v for r, v in into.items()},
            name,
        )


MODELS = ("mlp", "cnn", "gpt", "seq2seq", "gpt2", "llama", "llama with fewer heads of k and v")


def whole_cases() -> list[Any]:
    """All models of the zoo over two ranks, one over four; slow is the rest, and what has to load
    transformers but for one model.
    """
    found = []
    for name, size, sequence in itertools.product(MODELS, [2, 4], [False, True]):
        own = (ZOO / f"{name}.py").exists()
        quick = (own and (size == 2 or name == "gpt")) or (name, size, sequence) == (
            MODELS[-1],
            2,
            True,
        )
        words = "-".join([name, str(size), *(["sequence"] if sequence else [])])
        found.append(
            pytest.param(name, size, sequence, id=words, marks=() if quick else (pytest.mark.slow,))
        )
    return found


@pytest.mark.parametrize(("name", "size", "sequence"), whole_cases())
def test_loss_gradients_and_buffers_are_those_of_the_whole_model(
    name: str, size: int, sequence: bool
) -> None:
    model, loss, inputs, target = made(name)
    cuts = cuts_of(model, loss, inputs, target, size, sequence)
    assert cuts == cuts_of(model, loss, inputs, target, size)
    whole = copy.deepcopy(model)
    expected = loss(whole(*inputs), target)
    expected.backward()
    grads, buffers = {n: p.grad for n, p in whole.named_parameters()}, dict(whole.named_buffers())
    assert (
        sum(p.numel() for n, p in whole.named_parameters() if n in cuts)
        > sum(p.numel() for p in whole.parameters()) / 2
    )

    def main(group: Group) -> dict[str, Tensor]:
        mine, held, axis = cut(model, cuts, group, sequence)
        got = loss(mine(*inputs), target)
        got.backward()
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-12, atol=0)
        for n, p in mine.named_parameters():
            scale = grads[n].abs().max().item()
            torch.testing.assert_close(
                p.grad,
                held[n].extract(grads[n]),
                rtol=1e-12,
                atol=1e-12 * scale,
                msg=lambda m, n=n: f"{n}: {m}",
            )
        for n, b in mine.named_buffers():
            torch.testing.assert_close(b, held[n].extract(buffers[n]))
        assert not axis.gathers
        return {n: p.grad for n, p in mine.named_parameters() if n not in cuts}

    first, *others = World(size).run(main)
    for other in others:
        assert all(
            torch.equal(g, other[n]) for n, g in first.items()
        )  # to the bit, without an exchange


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_three_steps_and_then_the_shards_put_together_are_the_trained_model(name: str) -> None:
    model, loss, inputs, target = made(name)
    cuts = cuts_of(model, loss, inputs, target, 2)

    def train(m: nn.Module) -> nn.Module:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss(m(*inputs), target).backward()
            optimizer.step()
        return m

    def main(group: Group) -> tuple[dict[str, Tensor], dict[str, ShardSpec]]:
        mine, held, _ = cut(model, cuts, group)
        assert list(mine.state_dict()) == list(model.state_dict())
        return train(mine).state_dict(), held

    together = {
        n: torch.full_like(v, torch.nan) if v.is_floating_point() else v.clone()
        for n, v in model.state_dict().items()
    }
    for values, held in World(2).run(main):
        for n, v in values.items():
            held[n].insert(v, together[n])
    for n, v in train(copy.deepcopy(model)).state_dict().items():
        torch.testing.assert_close(together[n], v, rtol=1e-10, atol=1e-12)


def layers_exchange(name: str, layers: int, sequence: bool = False) -> tuple[int, int, int, int]:
    """All-reduces and transfers of the forward, and of the backward."""
    if name == "gpt":
        module = zoo_file("gpt")
        model, loss = module["GPT"](layers=layers, dropout=0.0).double(), module["loss"]
        _, _, inputs, target = zoo("gpt")
    else:
        model, loss, inputs, target = hugging_face("llama")
        del model.inner.model.layers[layers:]
    cuts = cuts_of(model, loss, inputs, target, 2)

    def main(group: Group) -> tuple[int, int, int, int]:
        counted = Counted(group)
        mine, _, _ = cut(model, cuts, counted, sequence)  # type: ignore[arg-type]
        got = loss(mine(*inputs), target)
        forward = counted.reduced, counted.moved
        got.backward()
        return *forward, counted.reduced - forward[0], counted.moved - forward[1]

    return World(2).run(main)[0]


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(name: str) -> None:
    one, two = (layers_exchange(name, layers) for layers in (1, 2))
    assert [b - a for a, b in zip(one, two, strict=True)] == [2, 0, 2, 0]


def test_in_sequence_parallel_a_layer_gathers_and_reduce_scatters_twice_each_way() -> None:
    one, two = (layers_exchange("llama", layers, sequence=True) for layers in (1, 2))
    assert [b - a for a, b in zip(one, two, strict=True)] == [
        0,
        4,
        2,
        4,
    ]  # and the gradients of two norms are summed


def test_between_layers_sequence_parallel_holds_a_shard_of_the_rows() -> None:
    model, loss, inputs, target = made("gpt")
    cuts = cuts_of(model, loss, inputs, target, 2)

    def main(group: Group) -> Any:
        mine, _, _ = cut(model, cuts, group, sequence=True)
        seen: list[Any] = []
        mine.h[1].register_forward_hook(lambda m, i, o: seen.append(o))
        mine(*inputs)
        return seen[0]

    for between in World(2).run(main):
        assert (
            isinstance(between, ShardedValue)
            and between.shard_dim == 1
            and between.local.shape[1] == inputs[0].shape[1] // 2
        )


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_a_recomputed_block_gives_the_same_gradients_dropout_included(
    reentrant: bool, sequence: bool
) -> None:
    module = zoo_file("gpt")
    torch.manual_seed(0)
    model, loss = module["GPT"](dropout=0.3).double(), module["loss"]
    _, _, inputs, target = zoo("gpt")
    cuts = cuts_of(model, loss, inputs, target, 2)
    if reentrant and sequence:  # autograd cannot see the slices that a block returns
        recomputed = copy.deepcopy(model)
        recomputed.h = nn.ModuleList(Recomputed(block) for block in recomputed.h)
        with pytest.raises(PlanError, match=r"CheckpointFunction.apply.*use_reentrant=False"):
            cuts_of(recomputed, loss, inputs, target, 2, sequence=True)
        return

    def main(group: Group) -> list[dict[str, Tensor]]:
        found = []
        for recompute in (False, True):
            mine, _, _ = cut(model, cuts, Counted(group), sequence)  # type: ignore[arg-type]
            for block in mine.h if recompute else ():
                inner = block.forward
                block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
            torch.manual_seed(5)
            loss(mine(*inputs), target).backward()
            found.append({n: p.grad for n, p in mine.named_parameters()})
        return found

    for kept, recomputed in World(2).run(main):
        for n, g in kept.items():
            torch.testing.assert_close(recomputed[n], g, msg=lambda m, n=n: f"{n}: {m}")


def test_dropout_is_the_same_on_whole_tensors_and_another_on_shards() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.inside, self.after = (
                nn.Linear(4, 64),
                nn.Linear(64, 64),
                nn.Dropout(0.5),
                nn.Dropout(0.5),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.down(self.inside(torch.ones_like(self.up(x)))))

    model, x = Two(), torch.randn(2, 4)
    cuts = {"up.weight": Cut(0), "up.bias": Cut(0), "down.weight": Cut(1)}

    def main(group: Group) -> tuple[Tensor, Tensor]:
        mine, _, _ = cut(model, cuts, Counted(group))  # type: ignore[arg-type]
        seen: list[Any] = []
        mine.inside.register_forward_hook(lambda m, i, o: seen.append(o.local))
        torch.manual_seed(7)
        return mine(x).detach(), seen[0]

    (out, inside), (same, other) = World(2).run(main)
    assert (
        torch.equal(out, same)
        and 0 < (out == 0).float().mean() < 1
        and not torch.equal(inside, other)
    )


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_evaluation_without_gradients_and_its_metrics_see_the_whole_output(name: str) -> None:
    model, loss, inputs, target = made(name)
    cuts = cuts_of(model, loss, inputs, target, 2)
    model.eval()
    with torch.no_grad():
        out = model(*inputs)
        expected = loss(out, target), accuracy(out, target), out.argmax(-1)

    def main(group: Group) -> None:
        mine, _, axis = cut(model, cuts, group)
        with torch.inference_mode():
            got = mine(*inputs)
            for value, due in zip(
                (loss(got, target), accuracy(got, target), got.argmax(-1)), expected, strict=True
            ):
                torch.testing.assert_close(value, due)
        assert not axis.gathers

    World(2).run(main)


@pytest.mark.parametrize("cut_first", [False, True], ids=["synchronised first", "cut first"])
def test_batchnorm_over_replicas_works_on_shards_of_the_channels(cut_first: bool) -> None:
    """Two replicas of two ranks each, with half of the batch a replica: all as on one rank with the
    batch.
    """
    model, loss, (x,), target = made("cnn")
    cuts = cuts_of(model, loss, [x], target, 2)
    whole = copy.deepcopy(model)
    loss(whole(x), target).backward()
    whole_eval = copy.deepcopy(whole).eval()(x).detach()
    grads, buffers = {n: p.grad for n, p in whole.named_parameters()}, dict(whole.named_buffers())

    def main(group: Group) -> None:
        replica, index = divmod(group.rank, 2)
        along_data, along_tensor = (
            Among(group, [index, 2 + index]),
            Among(group, [2 * replica, 2 * replica + 1]),
        )

        def reduce(values: Tensor) -> None:
            along_data.all_reduce({"batchnorm": values})

        mine = copy.deepcopy(model)
        if not cut_first:
            mine = sync_batchnorm.synchronise(mine, reduce)
        held = shard_specs(named_tensors(mine), cuts, 2, index)
        shard_module.apply(mine, held, along_tensor)  # type: ignore[arg-type]
        if cut_first:
            mine = sync_batchnorm.synchronise(mine, reduce)
        half = slice(4 * replica, 4 * replica + 4)
        (loss(mine(x[half]), target[half]) / 2).backward()
        for n, p in mine.named_parameters():
            along_data.all_reduce({"grad": p.grad})
            torch.testing.assert_close(
                p.grad,
                held[n].extract(grads[n]),
                rtol=1e-8,
                atol=1e-10,
                msg=lambda m, n=n: f"{n}: {m}",
            )
        for n, b in mine.named_buffers():
            torch.testing.assert_close(b, held[n].extract(buffers[n]), rtol=1e-8, atol=1e-10)
        got = mine.eval()(x)
        torch.testing.assert_close(
            got.gathered() if isinstance(got, ShardedValue) else got,
            whole_eval,
            rtol=1e-7,
            atol=1e-9,
        )

    World(4).run(main)


def test_a_part_of_the_model_is_cut_by_the_names_of_the_whole() -> None:
    model, loss, inputs, target = made("gpt")
    cuts = cuts_of(model, loss, inputs, target, 2)

    class Last(nn.Module):
        """A last stage that holds the tied matrix under its second name only."""

        def __init__(self) -> None:
            super().__init__()
            self.h, self.ln_f, self.lm_head = (
                nn.ModuleDict({"3": model.h[3]}),
                model.ln_f,
                model.lm_head,
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(self.ln_f(self.h["3"](x)))

    stage, x = Last(), torch.randn(2, 5, 16, dtype=torch.float64)
    expected = stage(x).detach()

    def main(group: Group) -> None:
        mine, held, _ = cut(stage, cuts, group)
        got = mine(x)
        assert isinstance(got, ShardedValue) and held["lm_head.weight"].dim == 0
        torch.testing.assert_close(got.gathered().detach(), expected)

    World(2).run(main)


def test_under_autocast_the_shards_are_computed_in_bfloat16() -> None:
    model, loss, inputs, target = made("gpt")
    model = model.float()
    cuts = cuts_of(model, loss, inputs, target, 2)
    expected = loss(model(*inputs), target).item()

    def main(group: Group) -> float:
        mine, _, _ = cut(model, cuts, group)
        with torch.autocast("cpu", torch.bfloat16):
            got = loss(mine(*inputs), target)
        got.backward()
        assert got.dtype == torch.float32 and all(
            p.grad.dtype == torch.float32 for p in mine.parameters()
        )
        return got.item()

    assert World(2).run(main) == pytest.approx([expected] * 2, rel=2e-2)
