"""Copy of a rank: two ranks train on, go back into new trainers, and train the same rounds again.

All cases run in one job of two processes, one after the other. Parameters, optimizer, the
strategy's state, the codec's, buffers and random numbers are the same to the bit; each kind that a
copy leaves out makes them differ.
"""

from __future__ import annotations

import copy
import functools
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands import entry
from manyhands.assembly.rank_context import Options, RankContext, open_rank_context
from manyhands.assembly.regroup.rank_copy import RankCopy
from manyhands.assembly.trainer import task_trainer
from manyhands.core import Group
from manyhands.exchange.interruption import Interruption
from manyhands.launch import environment
from manyhands.launch.signals import Stop
from manyhands.membership.rank_epochs import RankEpoch
from manyhands.merge import STRATEGIES
from manyhands.own_loop import Run
from manyhands.plan import words as plan_words
from manyhands.recover.kept_rounds import KeptRounds, KeptState
from manyhands.task import resolve
from manyhands.train import Trainer
from support.pooled import start

SIZE, BEFORE, AFTER = 2, 5, 5  # ranks, rounds before the copy and after it
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(46, 30, generator=G), torch.randint(3, (46,), generator=G)
OPTIONS = {"period": 4, "fragments": 2, "tau": 1, "f": 0}


def words_of(name: str) -> str:
    fields = STRATEGIES[name].__dataclass_fields__
    return " ".join([f"merge={name}", *(f"merge.{k}={OPTIONS[k]}" for k in OPTIONS if k in fields)])


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=0.01)


def momentum(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    words: str
    optimizer: Any = adam
    schedule: Any = None
    without: str = ""  # the kind that the copy has of the start instead
    steady: bool = False  # a model without random numbers


def by_step(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


ELASTIC = [
    n
    for n, rule in STRATEGIES.items()
    if rule.link is Group and not rule.distils and not rule.shares_parameters
]
TOPK = "compress=topk compress.density=0.1"
CASES = {
    **{name: Case(words_of(name)) for name in ELASTIC},
    **{f"{name}, momentum": Case(words_of(name), momentum) for name in ("all_reduce", "sgp")},
    "schedule": Case("merge=all_reduce", momentum, by_step),
    "schedule of local steps": Case(words_of("local_sgd"), adam, decay),
    "topk": Case(TOPK, momentum),
    "topk of updates": Case(f"{TOPK} {words_of('local_sgd')}"),
    "momentum codec": Case(f"{TOPK} compress.momentum=0.9", lambda p: torch.optim.SGD(p, lr=0.05)),
    "int8": Case("compress=int8"),
    "changed strategy": Case("then=easgd then.period=3 at=step:3"),
    "strategy to be changed": Case("then=easgd then.period=3 at=step:8"),
    "accumulated": Case("accumulate=2", momentum),
}
MUTANTS = {
    "model": Case("merge=all_reduce", without="model", steady=True),
    "optimizer": Case("merge=all_reduce", momentum, without="optimizer", steady=True),
    "state": Case(words_of("diloco"), without="state", steady=True),
    "codec": Case(TOPK, momentum, without="codec", steady=True),
    "rng": Case("merge=all_reduce", without="rng"),
    "schedule": Case("merge=all_reduce", momentum, by_step, without="schedule", steady=True),
}


def task_of(case: Case) -> mh.Task:
    middle = [nn.BatchNorm1d(64), nn.Dropout(0.0 if case.steady else 0.2), nn.ReLU()]
    model = nn.Sequential(nn.Linear(30, 64), *middle, nn.Linear(64, 3))
    loss = nn.functional.cross_entropy
    more = {} if case.schedule is None else {"schedule": case.schedule}
    return mh.Task(model=model, loss=loss, train=(X, Y), optimizer=case.optimizer, batch=4, **more)


# -- on every rank --


def opened(case: Case, words: dict[str, Any], options: Options) -> tuple[RankContext, Any]:
    here = environment.process_info()
    given = dict(word.split("=") for word in case.words.split())
    plan = plan_words.parse(
        {**words, **given, "elastic": f"1:{SIZE}", "save": "off"}, size=here.size
    )
    store = entry.run_store(here, plan.timeout_s)
    context = open_rank_context(plan, here, store, options, Interruption())
    return context, resolve(functools.partial(task_of, case), 7)


def trained(trainer: Trainer, rounds: int) -> KeptState:
    """This rank's state after so many rounds more."""
    for _ in range(rounds):
        trainer.step()
    kept = KeptRounds()
    kept.keep((1, trainer.round), *RankCopy(trainer, trainer.checkpoints).read())  # type: ignore
    (state,) = kept.states.values()
    # what goes to a peer goes as text
    return KeptState(state.round, state.tensors, json.loads(json.dumps(state.meta)))


def mutated(state: KeptState, first: KeptState, kind: str) -> KeptState:
    """The state with one kind as it was at the start."""
    meta = {**state.meta, **({"schedule": first.meta["schedule"]} if kind == "schedule" else {})}
    kept = {k: v for k, v in state.tensors.items() if not k.startswith(f"{kind}/")}
    old = {k: v for k, v in first.tensors.items() if k.startswith(f"{kind}/")}
    return KeptState(state.round, kept | old, meta)


def go_back(case: Case, words: dict[str, Any], options: Options) -> tuple[KeptState, KeptState]:
    """The state after all rounds, and after those behind the copy were computed twice."""
    states: list[KeptState] = []
    begin: KeptState | None = None
    for _ in range(2):
        context, (task, seed) = opened(case, words, options)
        model = copy.deepcopy(task.model)
        try:
            context.regrouping = regrouping(begin)
            trainer = task_trainer(context, task, model, seed, Stop(), Run(context))
            if begin is None:
                first, kept = trained(trainer, 0), trained(trainer, BEFORE)
                begin = mutated(kept, first, case.without) if case.without else kept
            assert trainer.round == BEFORE
            states.append(trained(trainer, AFTER))
        finally:
            context.close()
    return states[0], states[1]


def regrouping(begin: KeptState | None) -> Any:
    """What a rank knows at the start of an epoch after which no other comes."""
    if begin is None:
        return None
    return SimpleNamespace(
        epoch=RankEpoch(2, tuple(range(SIZE)), SIZE),
        begin=begin,
        own=True,
        kept=KeptRounds(),
        follower=SimpleNamespace(newer=lambda epoch: False),
        rolled_back=AFTER,
        since=time.time(),
    )


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    rank = environment.process_info().rank
    for kind, cases in (("same", CASES), ("mutant", MUTANTS)):
        for number, (name, case) in enumerate(cases.items()):
            own = replace(options, directory=f"{folder}/run/{kind}/{number}")
            found = go_back(case, words, own)
            torch.save([(s.tensors, s.meta) for s in found], f"{folder}/{kind}-{name}-{rank}")
    return {}


# -- what they found --


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    start(functools.partial(every, str(folder)), f"data={SIZE} timeout_s=60", Options(quiet=True))
    return folder


Found = list[tuple[dict[str, Tensor], dict[str, Any]]]


def found_by(ran: Path, kind: str, name: str) -> list[Found]:
    return [torch.load(ran / f"{kind}-{name}-{rank}") for rank in range(SIZE)]


def different(found: Found) -> list[str]:
    (once, _), (again, _) = found
    assert once.keys() == again.keys()
    return [k for k, value in once.items() if not torch.equal(value, again[k])]


def test_every_strategy_that_elastic_accepts_is_here() -> None:
    assert len(ELASTIC) >= 12
    for name in STRATEGIES:
        if STRATEGIES[name].link is Group and name not in ELASTIC:
            with pytest.raises(
                mh.PlanError, match=r"a rank that dies|one that dies takes its model"
            ):
                plan_words.parse(f"data=2 elastic=1:2 merge={name}")


@pytest.mark.parametrize("name", CASES)
def test_rounds_behind_a_copy_are_the_same_to_the_bit_in_a_new_trainer(
    ran: Path, name: str
) -> None:
    for found in found_by(ran, "same", name):
        assert different(found) == []
        once, again = (meta for _, meta in found)
        for key in ("position", "schedule", "word", "global_batch", "optimizer", "data"):
            assert once[key] == again[key], key


def test_copies_hold_what_differs_from_rank_to_rank(ran: Path) -> None:
    """Else the test would pass with one rank's copy for all."""
    for name, kind in (("easgd", "model/"), ("local_sgd", "optimizer/"), ("topk", "codec/")):
        zero, one = (found[0][0] for found in found_by(ran, "same", name))
        assert any(k.startswith(kind) and not torch.equal(zero[k], one[k]) for k in zero), name


@pytest.mark.parametrize("kind", MUTANTS)
def test_each_kind_that_a_copy_leaves_out_changes_the_numbers(ran: Path, kind: str) -> None:
    for found in found_by(ran, "mutant", kind):
        assert any(k.startswith("model/") for k in different(found))
