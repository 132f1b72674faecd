"""Plan words mean the same in Python, in TOML and on the command line.

What has no meaning is refused with what to do.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from manyhands import merge
from manyhands.core import Layout, Plan
from manyhands.errors import ManyhandsError, PlanError
from manyhands.merge.all_reduce import AllReduce
from manyhands.plan.reading import several_ranks
from manyhands.plan.words import (
    describe,
    parse,
    to_dict,
    to_toml,
)

LINE = (
    "data=3 merge=all_reduce split=sampled batch=16 accumulate=2 steps=7 clip=0.5 "
    "precision=bf16 compile=true save=10 best=-loss"
)
WORDS = {
    "data": 3,
    "merge": "all_reduce",
    "split": "sampled",
    "batch": 16,
    "accumulate": 2,
    "steps": 7,
    "clip": 0.5,
    "precision": "bf16",
    "compile": True,
    "save": 10,
    "best": "-loss",
}


@dataclasses.dataclass(frozen=True)
class WithOptions(AllReduce):
    period: int = 8
    alpha: float = 0.1
    outer: str = "sgd"


@pytest.fixture
def with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(merge.STRATEGIES, "with_options", WithOptions)


def test_a_string_a_list_a_dict_and_a_toml_file_give_the_same_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        "".join(
            f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}\n"
            for k, v in WORDS.items()
        )
    )
    plans = [
        parse(LINE),
        parse(LINE.split()),
        parse(WORDS),
        parse({k: str(v) for k, v in WORDS.items()}),
        parse(str(file)),
        parse([str(file)]),
    ]
    assert all(p == plans[0] for p in plans[1:])
    assert plans[0] == Plan(
        Layout(data=3),
        AllReduce(),
        split="sampled",
        batch=16,
        accumulate=2,
        steps=7,
        clip=0.5,
        precision="bf16",
        compile=True,
        save="10",
        best="-loss",
    )
    assert parse(plans[0]) is plans[0]


def test_later_words_win_also_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("data = 4\nbatch = 8\n")
    plan = parse(f"{tmp_path}/plan.toml data=2 seed=1 seed=5")
    assert (plan.layout.data, plan.batch, plan.seed) == (2, 8, 5)


def test_nothing_said_is_one_rank_with_all_defaults() -> None:
    assert parse() == parse([]) == parse({}) == Plan(Layout(), AllReduce())


def test_options_of_a_strategy_are_words_and_a_toml_table(
    with_options: None, tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text('[merge]\nname = "with_options"\nperiod = 4\nalpha = 1\n')
    expected = WithOptions(4, 1.0)
    for words in (
        "merge=with_options merge.period=4 merge.alpha=1",
        f"{tmp_path}/plan.toml",
        {"merge": {"name": "with_options", "period": 4, "alpha": 1}},
    ):
        assert parse(words).strategy == expected


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("dta=2", "data"),
        ("bath=8", "batch"),
        ("epoch=3", "epochs"),
        ("acumulate=2", "accumulate"),
        ("precison=bf16", "precision"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_known_one(word: str, nearest: str) -> None:
    with pytest.raises(
        PlanError, match=rf"unknown plan word '{word.split('=')[0]}'; did you mean {nearest}\?"
    ):
        parse(word)
    key, value = word.split("=")
    with pytest.raises(PlanError, match=f"did you mean {nearest}"):
        parse({key: value})


def test_a_word_like_no_other_gets_the_list() -> None:
    with pytest.raises(PlanError, match=r"unknown plan word 'xyzzy'; known: .*batch.*data.*merge"):
        parse("xyzzy=1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("data=0", "data=0, but at least 1 rank is needed on every axis; set data=1 or more"),
        ("data=-2", "data=-2, but at least 1"),
        ("data=two", "data=two: int is needed"),
        ("data=1.5", "data=1.5: int"),
        ("tensor=0", "tensor=0, but at least 1 rank is needed on every axis"),
        ("schedule=gpipe", "schedule=gpipe has no effect without pipe=; add pipe=2"),
        ("pipe=2 sequence=true", "sequence=true has no effect without tensor=; add tensor=2"),
        ("tensor=2 zero=1", "zero=1 has no effect without shard=; add shard=2"),
        ("shard=2 zero=4", "zero=4: one of 1, 2, 3 is needed"),
        (
            "pipe=2 schedule=2f2b",
            "schedule=2f2b: one of gpipe, 1f1b, interleaved, zero_bubble is needed",
        ),
        ("micro=0", "micro=0, but more than 0"),
        (
            "tensor=2 precision=fp16",
            "precision=fp16 needs one loss scale for all parts of the model, which tensor=2 does "
            "not have",
        ),
        (
            "shard=2 merge=downpour servers=1",
            "servers hold whole models, and shard=2 splits the model over ranks",
        ),
        (
            "pipe=2 compile=true",
            "compile=true compiles a whole model, and pipe=2 cuts it into stages",
        ),
        ("merge=allreduce", r"unknown merge='allreduce'; did you mean all_reduce\?"),
        ("split=shufled", r"unknown split='shufled'; did you mean shuffled\?"),
        ("precision=fp8", "precision=fp8: one of fp32, bf16, fp16 is needed"),
        ("batchnorm=none", "batchnorm=none: one of auto, sync, local is needed"),
        ("batch=0", "batch=0, but more than 0 and"),
        ("batch=-4", "batch=-4, but more than 0"),
        ("accumulate=0", "accumulate=0"),
        ("epochs=0", "epochs=0"),
        ("epochs=nan", "epochs=nan"),
        ("epochs=-1", "epochs=-1"),
        ("steps=0", "steps=0"),
        ("steps=1.5", "steps=1.5: int"),
        ("clip=0", "clip=0"),
        ("clip=-1", "clip=-1"),
        ("timeout_s=0", "timeout_s=0"),
        ("timeout_s=inf", "timeout_s=inf"),
        ("keep=0", "keep=0"),
        ("threads=0", "threads=0"),
        ("loaders=-1", "loaders=-1, but 0 or more"),
        ("save=0", "save=0: epoch, off or a number of rounds is needed"),
        ("save=never", "save=never: epoch, off or a number"),
        ("compile=perhaps", "compile=perhaps: bool is needed"),
        ("epochs=2 steps=10", "epochs=2.0 and steps=10 both say when to stop; give one of them"),
        ("link=nccl device=cpu", "link=nccl moves bytes between GPUs, but device=cpu"),
        ("link=shared device=cuda", "link=shared is for CPU processes"),
        ("merge.period=8", "merge.period has no effect: merge=all_reduce has no options"),
        ("data", "'data' is no plan word: key=value is needed, such as data=..."),
        ("=4", "'=4' is no plan word"),
        ("missing.toml", "plan file missing.toml does not exist"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_is_needed(words: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as refused:
        parse(words)
    assert isinstance(refused.value, ManyhandsError) and isinstance(refused.value, ValueError)


def test_an_option_that_the_strategy_does_not_have_names_those_it_has(with_options: None) -> None:
    with pytest.raises(
        PlanError,
        match=r"merge\.perod has no effect: merge=with_options has merge\.period, merge\.alpha, "
        r"merge\.outer",
    ):
        parse("merge=with_options merge.perod=2")
    with pytest.raises(PlanError, match=r"merge\.period=often: int is needed"):
        parse("merge=with_options merge.period=often")


def test_a_damaged_toml_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("data = = 2")
    with pytest.raises(PlanError, match=r"plan\.toml is not TOML"):
        parse(str(tmp_path / "plan.toml"))


def test_a_plan_takes_the_size_of_the_job_it_is_in_unless_it_says_another() -> None:
    assert parse("", size=4).layout.data == 4
    assert parse("data=4", size=4).layout.data == 4
    says = r"the plan data=2 needs 2 ranks, but 4 were started; set data=4 or start 2"
    for words in ("data=2", ["data=2"], {"data": 2}, parse("data=2")):
        with pytest.raises(PlanError, match=says):
            parse(words, size=4)


@pytest.mark.parametrize(
    "words",
    [
        "",
        LINE,
        "epochs=0.333333333333 clip=1e-7 timeout_s=12345678.5 bucket_mb=0.1",
        "data=2 steps=10 save=off",
        """best='my "v1.0"' seed=0 loaders=0""",
    ],
)
def test_describe_and_toml_are_understood_again_to_the_last_bit(words: str, tmp_path: Path) -> None:
    plan = parse(words)
    assert parse(describe(plan)) == plan
    assert parse(to_dict(plan)) == plan
    (tmp_path / "again.toml").write_text(to_toml(plan))
    assert parse(str(tmp_path / "again.toml")) == plan


def test_a_strategy_with_options_is_described_with_them(with_options: None, tmp_path: Path) -> None:
    plan = parse("merge=with_options merge.period=3 merge.alpha=0.1234567891 merge.outer=adam")
    assert "merge.period=3" in describe(plan) and parse(describe(plan)) == plan
    (tmp_path / "again.toml").write_text(to_toml(plan))
    assert parse(str(tmp_path / "again.toml")) == plan


def test_none_takes_an_optional_value_back() -> None:
    assert parse("clip=1 batch=8 clip=none batch=").clip is None


@pytest.mark.parametrize(
    ("words", "several"),
    [
        ("", False),
        ("data=1 batch=8", False),
        ("data=2", True),
        ("data=1 tensor=2", True),
        ("pipe=2", True),
        ("shard=4 zero=3", True),
        ("restarts=2", True),
        ("data=1 elastic=1:2", True),
        ("restarts=0", False),
    ],
)
def test_a_command_knows_before_it_parses_a_plan_whether_it_starts_ranks(
    words: str, several: bool
) -> None:
    assert several_ranks(words) is several
