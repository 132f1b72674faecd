"""All-reduce algorithms: right sums, the same bits on all ranks, no deadlock.

Bytes and messages are those of the formulas.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import log2
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core import (
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.errors import PlanError
from manyhands.exchange.algorithms import (
    ALGORITHMS,
    NAMES,
    AlgorithmGroup,
    check,
    choose,
    cost,
    measure,
    wrap,
)
from manyhands.exchange.algorithms.binary_blocks import blocks_of
from manyhands.exchange.algorithms.cost import CANDIDATES
from manyhands.exchange.algorithms.double_tree import _family
from manyhands.exchange.algorithms.hierarchical import group_of
from manyhands.exchange.algorithms.steps import EXAMPLE, steps
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.exchange.wrapper import GroupWrapper
from support.group_checks import CHECKS, TIMEOUT_S, Case
from support.paths import REPOSITORY
from support.processes import start

SIZES = range(1, 18)
PAGE = REPOSITORY / "docs" / "all-reduce.md"


def lengths(p: int) -> list[int]:
    return sorted({0, 1, p - 1, p, p + 1, 1000})


def given(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(31 * rank + n)
    if dtype.is_floating_point:
        return torch.randn(n, generator=dice, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, (n,), generator=dice, dtype=dtype)


class Counted(GroupWrapper):
    """A link that counts the messages and elements that its rank sends."""

    def __init__(self, group: Group):
        super().__init__(group)
        self.messages = self.elements = 0

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        raise AssertionError("the algorithms are made of transfers")

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        raise AssertionError("the algorithms are made of transfers")

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        self.messages += len(give)
        self.elements += sum(v.numel() for v in give.values())
        assert all(v.numel() for v in (*give.values(), *into.values())), (
            "an empty message is no message"
        )
        return self.group.transfer(give, into)


Sent = tuple[int, int]  # elements, messages


@functools.cache
def reduced(
    name: str, p: int
) -> list[tuple[dict[tuple[int, torch.dtype], Tensor], dict[int, Sent]]]:
    """For every rank: what it ended with, and what it sent to get there."""

    def main(link: InprocGroup) -> tuple[dict[tuple[int, torch.dtype], Tensor], dict[int, Sent]]:
        results, sent = {}, {}
        for n, dtype in itertools.product(lengths(p), (torch.int64, torch.float32)):
            counted = Counted(link)
            x = given(link.rank, n, dtype)
            wrap(counted, name).all_reduce({"x": x}).wait()
            results[n, dtype], sent[n] = x, (counted.elements, counted.messages)
        return results, sent

    return World(p).run(main)


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_ranks_get_the_sum_and_the_same_bits(name: str, p: int) -> None:
    everyone = [results for results, _ in reduced(name, p)]
    for (n, dtype), first in everyone[0].items():
        exact = sum(
            given(r, n, dtype).to(torch.float64 if dtype.is_floating_point else dtype)
            for r in range(p)
        )
        assert isinstance(exact, Tensor)
        if dtype == torch.int64:
            assert torch.equal(first, exact)
        else:
            torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5)
        for other in everyone[1:]:
            assert torch.equal(first.view(torch.uint8), other[n, dtype].view(torch.uint8)), (
                f"{n} {dtype}"
            )


# -- bytes and messages, against the formulas --


def cut(n: int, parts: int) -> list[int]:
    return [n // parts + (i < n % parts) for i in range(parts)]


def some(*messages: int) -> Sent:
    return sum(messages), sum(1 for m in messages if m)


def plus(*sent: Sent) -> Sent:
    return sum(s[0] for s in sent), sum(s[1] for s in sent)


def halving_sends(chunks: list[int], i: int) -> Sent:
    """Every block but the own one on the way down, every block that holds the own chunk on the way
    up.
    """
    q = len(chunks)
    block = {
        d: chunks[i // d * d : i // d * d + d] for d in (1 << k for k in range(q.bit_length() - 1))
    }
    other = {d: chunks[(i ^ d) // d * d : (i ^ d) // d * d + d] for d in block}
    return some(*(sum(c) for c in other.values()), *(sum(c) for c in block.values()))


def folded(n: int, p: int, r: int, active: list[Sent]) -> Sent:
    extra = p - len(active)
    if r < 2 * extra:
        return some(n) if r % 2 == 0 else plus(some(n), active[r // 2])
    return active[r - extra]


def ring_sends(n: int, p: int, r: int) -> Sent:
    chunks = cut(n, p)
    return some(
        *(c for i, c in enumerate(chunks) if i != (r + 1) % p),
        *(c for i, c in enumerate(chunks) if i != (r + 2) % p),
    )


def expected(name: str, n: int, p: int, r: int) -> Sent:
    """(elements, messages) that rank r of p sends for n elements."""
    if p == 1:
        return 0, 0
    q = 1 << (p.bit_length() - 1)
    if name == "star":
        return some(n) if r else some(*[n] * (p - 1))
    if name == "tree":
        reach = (r & -r) if r else 2 * q
        children = [
            r + (1 << i) for i in range(p.bit_length()) if 1 << i < reach and r + (1 << i) < p
        ]
        return some(*[n] * (len(children) + (r > 0)))
    if name == "double_tree":
        up_and_down = [
            half * ((parent is not None) + len(children))
            for half, (parent, children) in families(n, p, r)
        ]
        messages = [
            ((parent is not None) + len(children)) * (half > 0)
            for half, (parent, children) in families(n, p, r)
        ]
        return sum(up_and_down), sum(messages)
    if name == "butterfly":
        return folded(n, p, r, [some(*[n] * int(log2(q)))] * q)
    if name == "halving_doubling":
        return folded(n, p, r, [halving_sends(cut(n, q), i) for i in range(q)])
    if name == "ring":
        return ring_sends(n, p, r)
    if name == "binary_blocks":
        blocks, pieces = blocks_of(p), cut(n, q)
        mine = next(i for i, block in enumerate(blocks) if r in block)
        step, i = q // len(blocks[mine]), r - blocks[mine].start
        chunks = [sum(pieces[j : j + step]) for j in range(0, q, step)]
        over = (
            len(blocks[mine - 1]) // len(blocks[mine]) if mine else 0
        )  # ranks of the larger block that share our chunk
        finer = q // len(blocks[mine - 1]) if mine else 0
        up = [sum(pieces[i * step + k * finer : i * step + (k + 1) * finer]) for k in range(over)]
        back = [chunks[i]] if mine + 1 < len(blocks) else []
        return plus(halving_sends(chunks, i), some(*up, *back))
    length = group_of(p, None)
    own = cut(n, length)[(r % length + 1) % length]
    m = p // length
    power = 1 << (m.bit_length() - 1)
    across = (
        folded(own, m, r // length, [halving_sends(cut(own, power), i) for i in range(power)])
        if m > 1
        else (0, 0)
    )
    return plus(ring_sends(n, length, r % length) if length > 1 else (0, 0), across)


def families(n: int, p: int, r: int) -> list[tuple[int, tuple[int | None, list[int]]]]:
    return [(half, _family((r + shift) % p, p, shift)) for shift, half in enumerate(cut(n, 2))]


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rank_sends_what_the_formula_says(name: str, p: int) -> None:
    for r, (_, sent) in enumerate(reduced(name, p)):
        for n, counted in sent.items():
            assert counted == expected(name, n, p, r), (
                f"rank {r}, {n} elements: (elements, messages)"
            )


@pytest.mark.parametrize("p", SIZES[1:])
def test_the_totals_are_those_of_the_table(p: int) -> None:
    n, q = 1000, 1 << (p.bit_length() - 1)

    def sent(name: str) -> list[int]:
        return [counts[n][0] for _, counts in reduced(name, p)]

    for name in ("star", "tree", "double_tree", "ring"):
        assert sum(sent(name)) == 2 * (p - 1) * n, name
    assert sent("star") == [(p - 1) * n] + [n] * (p - 1)
    assert max(sent("tree")) <= (p - 1).bit_length() * n
    assert max(sent("double_tree")) <= 2 * n
    chunks = cut(n, p)
    assert sent("ring") == [2 * n - chunks[(r + 1) % p] - chunks[(r + 2) % p] for r in range(p)]
    assert sum(sent("butterfly")) == q * int(log2(q)) * n + 2 * (p - q) * n
    assert sum(sent("halving_doubling")) == 2 * (q - 1) * n + 2 * (p - q) * n
    assert sum(sent("binary_blocks")) == 2 * (p - 1) * n, (
        "each block b sends 2 (b-1) N inside, and 2 N to and from its neighbour"
    )


@pytest.mark.parametrize("p", [*SIZES, 100])
def test_no_rank_has_children_in_both_trees_and_both_reach_all(p: int) -> None:
    for shift in range(2):
        family = [_family((r + shift) % p, p, shift) for r in range(p)]
        (root,) = (r for r in range(p) if family[r][0] is None)
        reached, level, depth = {root}, [root], 0
        while level := [child for r in level for child in family[r][1]]:
            assert all(family[child][0] in reached for child in level) and not reached & set(level)
            reached |= set(level)
            depth += 1
        assert reached == set(range(p)) and depth <= p.bit_length()
    interior = [
        {r for r in range(p) if _family((r + shift) % p, p, shift)[1]} for shift in range(2)
    ]
    assert not interior[0] & interior[1]


def test_a_double_tree_works_on_all_its_levels_at_once() -> None:
    """In segments of the right length it takes what the model says; in one segment, where all wait
    for all of it, twice that.
    """
    alpha, beta = 0.002, 2.0**-20
    seconds = {}
    for latency_bytes in (alpha / beta, 1e12):
        world = World(15, lambda what, nbytes, peers: alpha + nbytes * beta)

        def main(link: InprocGroup, latency_bytes: float = latency_bytes) -> None:
            x = torch.ones(1 << 19)
            wrap(link, "double_tree", latency_bytes=latency_bytes).all_reduce({"x": x}).wait()
            assert (x == 15).all()

        world.run(main)
        seconds[latency_bytes] = max(world.now)
    assert seconds[alpha / beta] == pytest.approx(
        cost("double_tree", 15, 4 << 19, alpha, beta, 0.0), rel=0.05
    )
    assert seconds[1e12] > 2 * seconds[alpha / beta]


# -- time: the world's clock against the model --

ALPHA, BETA = 3.0, 0.25


def seconds_of(name: str, p: int, n: int) -> float:
    world = World(p, lambda what, nbytes, peers: ALPHA + nbytes * BETA)
    world.run(
        lambda link: wrap(link, name).all_reduce({"x": torch.ones(n, dtype=torch.float64)}).wait()
    )
    return max(world.now)


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 12])
def test_the_clock_of_the_world_agrees_with_the_cost_model(p: int) -> None:
    n, power = 24 * 16, p & (p - 1) == 0

    def predicted(name: str) -> float:
        return cost(name, p, 8 * n, ALPHA, BETA, 0.0)

    for name in ("ring", "butterfly", "halving_doubling", *(["tree"] if power else [])):
        assert seconds_of(name, p, n) == pytest.approx(predicted(name)), name
    for name in (
        "tree",
        "binary_blocks",
        "hierarchical",
        "star",
    ):  # the model's ports receive one message at a time, the world's all
        assert seconds_of(name, p, n) <= predicted(name) * (1 + 1e-9), name


def test_short_messages_take_the_butterfly_and_long_ones_few_bytes() -> None:
    link = (20e-6, 1e-9, 0.1e-9)
    assert choose(8, 64, *link) == "butterfly"
    assert choose(8, 25e6, *link) == "halving_doubling"
    assert choose(3, 25e6, *link) == "ring" and choose(7, 25e6, *link) == "ring", (
        "nobody stands aside"
    )
    assert choose(2, 25e6, *link) == "halving_doubling", "two ranks: each sums its half"
    for p, n in itertools.product((2, 3, 5, 16, 17), (8, 1e4, 1e7)):
        best = choose(p, n, *link)
        assert all(cost(best, p, n, *link) <= cost(name, p, n, *link) for name in CANDIDATES)


def test_butterfly_and_halving_cross_where_the_formula_says() -> None:
    alpha, beta = 20e-6, 1e-9
    crossing = 4 * alpha / beta  # of four ranks: N* = alpha log p / (beta (log p - 2 (p-1)/p))
    assert choose(4, crossing * 0.99, alpha, beta, 0.0) == "butterfly"
    assert choose(4, crossing * 1.01, alpha, beta, 0.0) == "halving_doubling"


def test_who_is_alone_pays_nothing() -> None:
    assert [cost(name, 1, 1e6, 1.0, 1.0, 1.0) for name in ALGORITHMS] == [0.0] * len(ALGORITHMS)
    with pytest.raises(ValueError, match="no cost for algorithm 'best'"):
        cost("best", 4, 1.0, 1.0, 1.0, 1.0)


# -- measuring, and choosing by it --


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize(
    "over",
    [lambda link: link, lambda link: ObservedGroup(link, lambda event: None)],
    ids=["bare", "observed"],
)
def test_what_a_link_costs_is_measured_by_its_own_clock(p: int, over: object) -> None:
    world = World(p, lambda what, nbytes, peers: 0.5 + nbytes / 4 if what == "transfer" else 1.0)
    for alpha, beta, gamma in world.run(lambda link: measure(over(link))):  # type: ignore[operator]
        assert alpha == 0.5 + 8 / 4 and gamma == 0.0
        assert beta == pytest.approx(0.25, rel=1e-4)


def test_auto_takes_another_algorithm_for_another_length_and_all_ranks_the_same() -> None:
    def main(link: InprocGroup) -> tuple[list[str], list[Tensor]]:
        auto, mine = wrap(link, "auto"), [given(link.rank, n, torch.int64) for n in (1, 3000)]
        for x in mine:
            auto.all_reduce({"x": x}).wait()
        return [auto._chosen[8 * n].func.__name__ for n in (1, 3000)], mine

    everyone = World(8, lambda what, nbytes, peers: 1.0 + nbytes / 1000).run(main)
    for names, got in everyone:
        assert names == ["butterfly", "halving_doubling"]
        for x in got:
            assert torch.equal(
                x, torch.stack([given(r, x.numel(), torch.int64) for r in range(8)]).sum(0)
            )


# -- no deadlock, whatever comes late --


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_nobody_waits_for_ever_when_messages_and_ranks_are_late_at_random(
    name: str, seed: int
) -> None:
    dice = random.Random(seed)
    world = World(dice.choice([5, 6, 7, 11]), lambda what, nbytes, peers: dice.expovariate(1.0))

    def main(link: InprocGroup) -> list[Tensor]:
        mine = [given(link.rank, n, torch.int64) for n in (3, 100, 1)]
        over = wrap(link, name)
        for x in mine:
            world.spend(link.rank, dice.expovariate(0.3))
            over.all_reduce({"x": x}).wait()
        return mine

    everyone = world.run(main)
    for i, n in enumerate((3, 100, 1)):
        total = torch.stack([given(r, n, torch.int64) for r in range(world.size)]).sum(0)
        assert all(torch.equal(mine[i], total) for mine in everyone)


def test_the_same_run_takes_the_same_time() -> None:
    assert seconds_of("double_tree", 9, 1000) == seconds_of("double_tree", 9, 1000)


# -- as a link --


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_contract_of_a_group(name: str) -> None:
    checks = {
        k: f
        for k, f in CHECKS.items()
        if "staging_buffer" not in k and "mailbox" not in k and "refused" not in k
    }

    def main(link: InprocGroup) -> list[str]:
        over = wrap(link, name)
        assert isinstance(over, Group)
        digests = []
        for check_it in checks.values():
            digest = hashlib.sha256()
            for x in check_it(over):
                digest.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            digests.append(digest.hexdigest())
        return digests

    for size in (1, 3):
        everyone = World(size).run(main)
        assert all(digests == everyone[0] for digests in everyone)


def test_truth_values_and_short_integers_are_reduced_as_by_other_groups() -> None:
    def main(link: InprocGroup) -> list[list[object]]:
        found = []
        for op in ("sum", "mean", "max"):
            values = {
                "b": torch.tensor([link.rank == 0, True, False]),
                "i": torch.tensor([100, link.rank], dtype=torch.int16),
            }
            wrap(link, "ring").all_reduce(values, op).wait()  # type: ignore[arg-type]
            found.append([values["b"].tolist(), values["i"].tolist()])
        return found

    for found in World(3).run(main):
        assert found == [
            [[True, True, False], [300, 3]],
            [[False, True, False], [100, 1]],
            [[True, True, False], [100, 2]],
        ]


def test_meta_tensors_cost_what_others_cost() -> None:
    def seconds(device: str) -> list[float]:
        world = World(4, lambda what, nbytes, peers: nbytes)
        world.run(
            lambda link: (
                wrap(link, "ring").all_reduce({"x": torch.ones(1000, device=device)}, "mean").wait()
            )
        )
        return world.now

    assert seconds("meta") == seconds("cpu")


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("rign", {}, "algorithm=rign is not known; known: star, tree, .*, auto"),
        ("ring", {"group_size": 2}, "algorithm=ring has no option group_size; it has none"),
        (
            "hierarchical",
            {"group_size": 4},
            "groups of 4 among 6 ranks; groups must be equal: use one of 1, 2, 3, 6",
        ),
        ("hierarchical", {"group_size": 0}, "groups of 0 among 6 ranks"),
        ("double_tree", {"latency_bytes": 0}, "latency_bytes=0; give alpha/beta"),
    ],
)
def test_words_that_do_not_fit_are_refused(name: str, options: dict[str, int], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check(name, 6, **options)


@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_groups_of_any_fitting_size_agree(group: int) -> None:
    def main(link: InprocGroup) -> list[int]:
        x = given(link.rank, 50, torch.int64)
        wrap(link, "hierarchical", group_size=group).all_reduce({"x": x}).wait()
        return x.tolist()

    assert (
        World(6).run(main)
        == [torch.stack([given(r, 50, torch.int64) for r in range(6)]).sum(0).tolist()] * 6
    )


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(ValueError, match="op='min'; needed: one of sum, mean, max"):
        wrap(SoloGroup(), "ring").all_reduce({}, "min")  # type: ignore[arg-type]


# -- the worked example --


def test_the_worked_example_of_the_ring() -> None:
    """Step by step as on paper: [2,4,6], [1,2,3], [4,8,12] -> [7,14,21]."""
    seen: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}

    def main(link: InprocGroup) -> None:
        x = torch.tensor(EXAMPLE[link.rank])
        AlgorithmGroup(
            link, "ring", watch=lambda rank, what, values: seen[rank].append(values.tolist())
        ).all_reduce({"x": x}).wait()

    World(3).run(main)
    assert list(zip(*seen.values(), strict=True)) == [
        ([2, 4, 18], [3, 2, 3], [4, 10, 12]),
        ([2, 14, 18], [3, 2, 21], [7, 10, 12]),
        ([7, 14, 18], [3, 14, 21], [7, 10, 21]),
        ([7, 14, 21], [7, 14, 21], [7, 14, 21]),
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_page_shows_the_steps_that_are_taken(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = steps(name, EXAMPLE)
    print(text)
    last = [line for line in text.splitlines() if "[7, 14, 21]" in line][-1]
    assert last == text.splitlines()[-1]
    assert text in PAGE.read_text(), f"docs/all-reduce.md needs this:\n{text}"
    assert capsys.readouterr().out.startswith(name)


# -- real processes --


def reduce_for_real(case: Case, rank: int, port: int, parent: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    link = case.connect(rank, store)
    found = {}
    for name in NAMES:
        over = wrap(link, name)
        for n, dtype in ((3, torch.int64), (100_003, torch.float32)):
            x = given(rank, n, dtype)
            over.all_reduce({"x": x}, "sum").wait()
            found[name, n] = x.numpy()
    link.close()
    parent.send(found)


@pytest.mark.parametrize("case", [Case("shared", "aaa"), Case("gloo", "aaa")], ids=str)
def test_real_processes_agree(case: Case) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(reduce_for_real, (case, rank, store.port)) for rank in range(case.size)]
    everyone = []
    for rank, (_, pipe) in enumerate(ranks):
        assert pipe.poll(2 * TIMEOUT_S), f"rank {rank} did not report"
        everyone.append({k: torch.from_numpy(x) for k, x in pipe.recv().items()})
    for process, _ in ranks:
        process.join()
    for (name, n), x in everyone[0].items():
        total = torch.stack([given(r, n, x.dtype) for r in range(case.size)]).sum(0)
        torch.testing.assert_close(x, total, rtol=1e-5, atol=1e-5, msg=name)
        assert all(torch.equal(x, other[name, n]) for other in everyone[1:]), name
