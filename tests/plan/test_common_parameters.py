"""Plans whose ranks step one parameter vector in shared memory: what they can be combined with."""

from __future__ import annotations

import pytest

from manyhands.errors import PlanError
from manyhands.plan.words import parse

# given with merge=hogwild and with then=hogwild
REFUSED = {
    "elastic=1:2": "leaves half of it in the parameters of all",
    "servers=1": "use nn.Embedding(sparse=True) for tables",
    "device=cuda": "set device=cpu",
    "link=gloo": "leave link= out (or link=shared)",
    "link=hierarchical": "leave link= out (or link=shared)",
    "link=nccl": "leave link= out (or link=shared)",
    "batchnorm=sync": "set batchnorm=local",
    "compress=int8": "nothing to compress; set compress=none",
    "straggler=rebalance": "use merge=all_reduce or straggler=report",
    "shard=2": "one parameter vector for all ranks, and shard=2 splits the model",
    "tensor=2": "one parameter vector for all ranks, and tensor=2 splits the model",
    "pipe=2": "one parameter vector for all ranks, and pipe=2 splits the model",
    "tensor=2 split=by_feature": "leave out tensor=2",
}


@pytest.mark.parametrize("strategies", ["merge=hogwild", "then=hogwild at=epoch:1"])
@pytest.mark.parametrize("words", REFUSED)
def test_what_ranks_with_one_parameter_vector_cannot_have_is_refused_by_name(
    words: str, strategies: str
) -> None:
    with pytest.raises(PlanError) as refused:
        parse(f"data=2 {strategies} {words}")
    assert REFUSED[words] in str(refused.value)
    assert words.split()[0] in str(refused.value) or words.split()[0] in REFUSED[words]
    assert "=hogwild" in str(refused.value)


@pytest.mark.parametrize("word", ["algorithm=ring", "bucket_mb=2"])
def test_words_about_what_ranks_send_are_for_a_strategy_that_sends(word: str) -> None:
    name = word.partition("=")[0]
    with pytest.raises(PlanError, match=f"{name}=.* has no effect: merge=hogwild sends nothing"):
        parse(f"data=2 merge=hogwild {word}")
    plan = parse(f"data=2 merge=hogwild then=all_reduce at=epoch:1 {word}")
    assert str(getattr(plan, name)) in ("ring", "2.0")


def test_it_has_no_gradient_sum_whose_noise_could_be_measured() -> None:
    with pytest.raises(PlanError, match="noise scale is measured where gradients are all-reduced"):
        parse("data=2 merge=hogwild then=all_reduce at=noise:100")
    assert parse("data=2 then=hogwild at=noise:100").next_strategy is not None


def test_strategies_over_servers_cannot_come_before_or_after_it() -> None:
    with pytest.raises(PlanError, match="cannot change between such a strategy and another"):
        parse("data=2 servers=1 merge=downpour then=hogwild at=epoch:1")
    with pytest.raises(PlanError, match="cannot change between such a strategy and another"):
        parse("data=2 servers=1 merge=hogwild then=downpour at=epoch:1")


@pytest.mark.parametrize(
    "words",
    [
        "link=shared device=cpu",
        "batchnorm=local clip=1.0 accumulate=4 micro=2",
        "precision=bf16 compile=true recompute=true",
        "save=100 evaluate=50 until=accuracy:0.9 restarts=2",
        "then=local_sgd at=step:10",
        "split=sampled straggler=report",
    ],
)
def test_everything_else_goes_with_it(words: str) -> None:
    assert parse(f"data=2 merge=hogwild {words}").strategy.shares_parameters
