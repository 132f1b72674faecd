"""Plans refused while they are read: impossible merge strategies, codecs and algorithms.

A refusal says what was given, what is needed, and what to do.
"""

from __future__ import annotations

import pytest

from manyhands.core import Store
from manyhands.errors import PlanError
from manyhands.exchange.compression import CODECS, refusal
from manyhands.merge import STRATEGIES
from manyhands.plan.words import describe, parse, to_dict


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *(
            (f"data=4 merge={rule} merge.period=0", "merge.period=0")
            for rule in ("model_average", "local_sgd", "bmuf", "diloco", "easgd", "admm")
        ),
        ("data=4 merge=easgd merge.alpha=0.5", "0.4"),  # the bound 2/(M+1), said with the value
        ("data=4 merge=easgd merge.alpha=-0.1", "merge.alpha=-0.1"),
        ("data=4 merge=bmuf merge.eta=1", "merge.eta=1"),
        ("data=4 merge=d_psgd merge.graph=0-1,2-3", "connected"),
        ("data=3 merge=d_psgd merge.graph=0-1,1-7", "7"),
        ("data=4 merge=d_psgd merge.graph=square", "square"),
        ("data=4 merge=robust merge.how=krum merge.f=1", "5"),
        ("data=5 merge=robust merge.how=krum merge.f=2", "7"),
        ("data=4 merge=robust merge.how=mean", "median, trimmed_mean"),
        ("data=2 compress=topk compress.density=0", "compress.density=0"),
        ("data=2 compress=topk compress.density=1.5", "compress.density=1.5"),
        ("data=2 compress=randomk compress.density=-1", "compress.density=-1"),
        ("data=2 compress=powersgd compress.rank=0", "compress.rank=0"),
        ("data=2 compress=int8 compress.block=0", "compress.block=0"),
        ("data=2 compress=zip", "unknown compress="),
        ("data=2 compress.density=0.1", "compress.density has no effect without compress="),
        (
            "data=2 compress=bf16 compress.density=0.1",
            "compress.density has no effect: compress=bf16 has no options",
        ),
        ("data=2 compress=topk merge=d_psgd", "which sends parameters"),
        (
            "data=3 compress=powersgd merge=robust merge.f=1",
            "only all ranks together can decode powersgd",
        ),
        ("data=2 algorithm=rings", "did you mean ring?"),
        ("data=2 algorithm=ring link=nccl", "nccl has its own algorithms"),
        ("data=2 merge=downpour", "parameter server"),
        ("data=2 merge=stale_sync", "servers=1"),
        ("data=2 staleness=4", "add servers=1"),
        ("data=2 servers=1 stalenes=4", "did you mean staleness?"),
        ("data=2 servers=-1", "0 or more"),
        ("data=2 cache=100", "add servers=1"),
        ("data=2 hot_rows=0.01", "add servers=1"),
        ("data=2 servers=1 hot_rows=0.01", "set servers=2 or more"),
        ("data=2 servers=2 hot_rows=1.5", "less than 1"),
        ("data=2 servers=2 hot_rows=0.1 hot_age=0", "more than 0"),
        ("data=2 servers=2 hot_age=1", "add hot_rows=0.01"),
        ("data=2 servers=2 hot_rows=0.1 embeddings=sync", "embeddings=sync lets it read"),
        ("data=2 servers=2 hot_rows=0.1 staleness=0", "staleness=0 lets it read"),
        ("data=2 servers=2 hot_rows=0.1 quorum=1", "merge=backup lets it read"),
        ("data=2 lookahead=3", "add servers=1"),
        ("data=2 ranks_per_gpu=2 device=cpu", "no effect with device=cpu"),
        ("data=2 ranks_per_gpu=2 link=nccl", "nccl refuses two ranks on one card"),
        ("data=2 ranks_per_gpu=0", "ranks_per_gpu=0"),
        ("data=2 servers=1 staleness=4 merge=local_sgd", "no effect"),
        ("data=2 servers=1 staleness=4 quorum=2", "no effect"),
        ("data=2 servers=1 staleness=4 algorithm=ring", "no effect"),
        ("data=2 servers=1 staleness=4 batchnorm=sync", "batchnorm=local"),
        ("data=2 servers=1 staleness=4 precision=fp16", "precision=bf16"),
        ("data=2 servers=1 staleness=4 compress=topk", "set compress=fp16"),
        ("data=2 servers=1 staleness=4 then=local_sgd at=epoch:1", "leave then= out"),
        ("data=2 servers=1 staleness=-1", "staleness"),
        ("data=2 servers=1 quorum=3", "quorum"),
    ],
)
def test_it_is_refused_before_anything_starts(words: str, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(words)
    assert says in str(refused.value)


def five_ranks(rule: str) -> str:
    return f"data=5 merge={rule}" + (" servers=2" if STRATEGIES[rule].link is Store else "")


def test_a_word_of_a_strategy_over_servers_names_the_strategy_too() -> None:
    assert parse("data=4 servers=2 staleness=4") == parse(
        "data=4 servers=2 merge=stale_sync merge.staleness=4"
    )
    assert parse("data=4 servers=1 quorum=3") == parse(
        "data=4 servers=1 merge=backup merge.quorum=3"
    )
    assert parse("data=4 servers=1 staleness=inf merge=stale_sync").strategy.staleness == float(
        "inf"
    )


@pytest.mark.parametrize("rule", STRATEGIES)
@pytest.mark.parametrize("wire", CODECS)
def test_a_codec_either_carries_a_strategy_or_says_which_one_would(rule: str, wire: str) -> None:
    plan = f"{five_ranks(rule)} compress="
    if (reason := refusal(CODECS[wire], STRATEGIES[rule])) is None:
        assert parse(f"{plan}{wire}").compress == wire
        return
    with pytest.raises(PlanError, match="set compress="):
        parse(f"{plan}{wire}")
    instead = reason.rpartition("set compress=")[2].split(" or ")
    assert instead and all(parse(f"{plan}{name}").compress == name for name in instead)


@pytest.mark.parametrize("rule", STRATEGIES)
def test_every_strategy_survives_being_written_down(rule: str) -> None:
    kind = STRATEGIES[rule]
    later = "" if kind.link is Store else f"then={rule} at=-loss:0.25"
    # ranks that share parameters send nothing, so that no algorithm has an effect
    later += "" if kind.link is Store or kind.shares_parameters else " algorithm=ring"
    plan = parse(f"{five_ranks(rule)} {later} until=accuracy:0.9")
    assert parse(describe(plan)) == plan == parse(to_dict(plan))


@pytest.mark.parametrize("wire", CODECS)
def test_every_codec_survives_being_written_down(wire: str) -> None:
    plan = parse(f"data=2 compress={wire}")
    assert parse(describe(plan)) == plan and plan.codec == CODECS[wire]()


# -- elastic workers --


@pytest.mark.parametrize("bounds", ["3", "0:3", "3:2", "1:1", "a:b", ":3", "1:"])
def test_elastic_needs_a_least_and_a_largest_number_of_workers(bounds: str) -> None:
    with pytest.raises(PlanError, match=f"elastic={bounds}: LEAST:MOST workers is needed"):
        parse(f"merge=downpour servers=1 elastic={bounds}")


def test_elastic_is_refused_by_name_where_a_strategy_does_not_know_it() -> None:
    with pytest.raises(PlanError, match=r"merge=async_admm: .* comes with downpour, stale_sync"):
        parse("merge=async_admm servers=1 elastic=1:3")
    with pytest.raises(PlanError, match="merge=ensemble: its members are one model each"):
        parse("merge=ensemble elastic=1:3")
    with pytest.raises(PlanError, match="rows on servers are not"):
        parse("merge=all_reduce servers=1 elastic=1:3")


def test_elastic_refuses_sizes_on_which_a_strategy_does_not_hold() -> None:
    with pytest.raises(PlanError, match=r"go on with 2 replicas: .*2f\+1 = 3 ranks.*the least"):
        parse("merge=robust merge.f=1 elastic=1:4")
    assert parse("merge=robust merge.f=1 elastic=3:4").layout.data == 4


def test_elastic_replicas_start_within_their_bounds() -> None:
    assert parse("elastic=1:4").layout.data == 4
    assert parse("elastic=1:4 data=2").layout.data == 2
    with pytest.raises(PlanError, match="a run starts with 2 to 4 replicas"):
        parse("elastic=2:4 data=6")


def test_elastic_says_how_many_workers_there_are() -> None:
    assert parse("merge=downpour servers=1 elastic=1:3").layout.data == 3
    with pytest.raises(PlanError, match="set data=3 or leave it out"):
        parse("data=2 merge=downpour servers=1 elastic=1:3")
    with pytest.raises(PlanError, match="respawn=false has no effect"):
        parse("merge=downpour servers=1 respawn=false")


# -- ranks that hang or are slow --


def test_a_rank_is_excluded_only_where_ranks_may_come_and_go() -> None:
    for word in ("hang", "straggler"):
        with pytest.raises(PlanError, match=f"{word}=exclude goes on without .* add elastic=1:3"):
            parse(f"data=3 {word}=exclude")
        assert getattr(parse(f"data=3 elastic=1:3 {word}=exclude"), word) == "exclude"


def test_batches_are_rebalanced_only_where_the_gradient_stays_exact() -> None:
    assert parse("data=2 straggler=rebalance").straggler == "rebalance"
    with pytest.raises(PlanError, match="merge=local_sgd: its replicas weigh the same"):
        parse("data=2 merge=local_sgd straggler=rebalance")
    with pytest.raises(PlanError, match="then=local_sgd: its replicas weigh the same"):
        parse("data=2 then=local_sgd at=epoch:1 straggler=rebalance")
    with pytest.raises(PlanError, match="agreed between ranks that stay"):
        parse("data=2 elastic=1:2 straggler=rebalance")
    with pytest.raises(PlanError, match="batchnorm=local: each rank normalises"):
        parse("data=2 batchnorm=local straggler=rebalance")
