"""Contract of every merge strategy, on a problem whose answer is known."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from manyhands.core import Group, Store, Tensors
from manyhands.errors import PlanError
from manyhands.merge import STRATEGIES
from manyhands.merge.admm import ADMM
from manyhands.merge.easgd import EASGD
from manyhands.plan.words import parse
from support.compare import same_outcome
from support.quadratic import BATCH, Make, Outcome, Point, Problem, Rank, momentum, run, sgd


@dataclass(frozen=True)
class Case:
    """How a rule is asked: options with which it converges within few steps, and how near it must
    come then.
    """

    options: dict[str, Any] = field(default_factory=dict)
    rounds: int = 40
    tolerance: float = 1e-6
    mixed: float = (
        0.0  # curvature that differs from rank to rank, where the rule is exact all the same
    )
    spread: float = 1.0
    plain_alone: bool = True  # on one rank it is the task's own optimizer and nothing else
    idle: float = 1e-6  # tolerance where one of three ranks never has a sample
    make: Make = sgd
    some: int = 60  # steps that bring it near with any optimizer


CASES = {
    "all_reduce": Case(rounds=150, mixed=1.0),
    "model_average": Case({"period": 4}),
    "local_sgd": Case({"period": 4}),
    "bmuf": Case({"period": 4}, rounds=60, tolerance=1e-5),
    "diloco": Case({"period": 4, "momentum": 0.5}, plain_alone=False),
    "streaming_diloco": Case(
        {"period": 8, "fragments": 3, "tau": 1, "momentum": 0.3},
        rounds=30,
        tolerance=1e-5,
        plain_alone=False,
        idle=1e-5,
    ),
    "easgd": Case({"period": 4}, rounds=60, tolerance=1e-5, plain_alone=False, idle=1e-3),
    "admm": Case({"period": 8, "rho": 1.0}, rounds=60, mixed=1.0, plain_alone=False),
    "d_psgd": Case(rounds=150, idle=1e-4),
    "ad_psgd": Case(rounds=150, idle=0.05),  # who meets whom decides what the idle one repeats
    "sgp": Case(rounds=150, idle=0.05),
    # models are not averaged: each finds the common answer by itself; one that never learns stays
    # in the teachers' mean
    "ensemble": Case({"period": 3, "distil": 3}, rounds=80, spread=0.0, idle=float("inf")),
    # a vote finds the common answer, not that of the mean; one without samples votes for no change,
    # which holds it up
    "robust": Case({"f": 0}, rounds=150, spread=0.0, idle=1e-4),
    "skeleton": Case({"period": 4}),  # a point has no units; with them: test_skeleton.py
    # one rank's gradient after the other moves the model to and fro where the ranks' own answers
    # differ
    "hogwild": Case(rounds=150, spread=0.0),
    "stale_sync": Case(rounds=150, spread=0.0, idle=1e-4),  # its share of every step is missing
    "backup": Case(rounds=150, mixed=1.0),
    "downpour": Case({"adapt": True}, rounds=150, spread=0.0),
    "dc_asgd": Case(
        rounds=300,
        spread=0.0,
        tolerance=1e-3,
        idle=1e-3,
        make=lambda p: torch.optim.SGD(p, lr=0.08),
    ),
    "async_easgd": Case(
        {"period": 4}, rounds=60, tolerance=1e-5, spread=0.0, plain_alone=False, idle=1e-3, some=120
    ),
    "async_admm": Case(
        {"period": 8, "rho": 1.0}, rounds=60, mixed=1.0, plain_alone=False, some=120
    ),
}
OPTIMIZERS: dict[str, Make] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.001),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5),
}
every_rule = pytest.mark.parametrize("name", STRATEGIES)


def rule_of(name: str, **options: Any) -> Any:
    kind: Any = STRATEGIES[name]
    return kind(**{**CASES[name].options, **options})


def words_of(name: str) -> str:
    return f"data=4 {'servers=1 ' if STRATEGIES[name].link is Store else ''}merge={name}"


def problem_of(name: str, size: int, noise: float = 0.0) -> Problem:
    return Problem(size, CASES[name].spread, CASES[name].mixed, noise)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def test_every_strategy_has_its_case_here_and_its_name_in_its_file() -> None:
    assert CASES.keys() == STRATEGIES.keys()
    for name, kind in STRATEGIES.items():
        assert kind.__module__ == f"manyhands.merge.{name}"


@every_rule
@pytest.mark.parametrize("size", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
def test_it_converges_to_the_optimum_over_all_ranks_data(name: str, size: int) -> None:
    case, problem = CASES[name], problem_of(name, size)
    outcomes = run(rule_of(name), problem, case.rounds, make=case.make)
    for o in outcomes:
        assert distance(o.consensus, problem.optimum()) < case.tolerance
        assert torch.equal(o.consensus, outcomes[0].consensus), "all ranks stand for the same model"


@every_rule
def test_it_repeats_bit_for_bit(name: str) -> None:
    first, second = (
        run(rule_of(name), problem_of(name, 3, noise=0.1), 4, make=momentum) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert same_outcome(a, b) and all(map(torch.equal, a.losses, b.losses))


@every_rule
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_what_is_saved_of_it_is_all_that_it_needs_to_go_on(name: str, optimizer: str) -> None:
    """Parameters, optimizer and state of each rank into new objects: the second half has the bits
    of an unbroken run.
    """
    problem, make = problem_of(name, 3, noise=0.1), OPTIMIZERS[optimizer]
    half = run(rule_of(name), problem, 3, make=make)
    resumed, unbroken = (
        run(rule_of(name), problem, 3, make=make, resumed=half),
        run(rule_of(name), problem, 6, make=make, meet_every=3),
    )
    assert all(same_outcome(a, b) for a, b in zip(resumed, unbroken, strict=True))


@every_rule
def test_alone_it_runs_and_is_the_plain_optimizer_unless_its_merge_moves_on_its_own(
    name: str,
) -> None:
    problem = problem_of(name, 1, noise=0.1)
    (alone,) = run(rule_of(name), problem, 4)
    plain = Rank(problem, 0)
    for _ in range(alone.steps):
        plain.replica.backward()
        plain.replica.step()
    assert (distance(alone.consensus, plain.point()) < 1e-12) == CASES[name].plain_alone


@every_rule
def test_a_rank_that_never_has_a_sample_takes_part_and_does_not_count(name: str) -> None:
    case, problem = CASES[name], problem_of(name, 3)
    outcomes = run(
        rule_of(name),
        problem,
        case.rounds,
        make=case.make,
        counts=lambda rank, step: 0 if rank == 2 else BATCH,
    )
    assert distance(outcomes[0].consensus, problem.optimum([1, 1, 0])) < case.idle
    assert all(o.consensus.isfinite().all() for o in outcomes)


@every_rule
def test_it_survives_shares_that_change_from_step_to_step_down_to_nobody_having_any(
    name: str,
) -> None:
    shares = [(4, 4, 4), (4, 0, 0), (1, 4, 0), (0, 0, 0), (0, 2, 1)]
    problem = problem_of(name, 3)
    far = distance(Rank(problem, 0).point(), problem.optimum())
    outcomes = run(
        rule_of(name), problem, 30, counts=lambda rank, step: shares[step % len(shares)][rank]
    )
    assert distance(outcomes[0].consensus, problem.optimum()) < far / 2
    assert len({o.steps for o in outcomes}) == 1


@every_rule
@pytest.mark.parametrize(
    "optimizer",
    [
        "momentum",
        "adam",
        *(
            pytest.param(o, marks=pytest.mark.slow)
            for o in OPTIMIZERS
            if o not in ("momentum", "adam")
        ),
    ],
)
def test_it_works_over_any_optimizer(name: str, optimizer: str) -> None:
    problem = problem_of(name, 3)
    steps = run(rule_of(name), problem, 1)[0].steps
    outcomes = run(
        rule_of(name), problem, -(-CASES[name].some // steps), make=OPTIMIZERS[optimizer]
    )
    start = distance(Rank(problem, 0).point(), problem.optimum())
    assert distance(outcomes[0].consensus, problem.optimum()) < start / 4


@every_rule
def test_every_way_to_treat_optimizer_state_converges(name: str) -> None:
    problem, rounds = problem_of(name, 3), min(CASES[name].rounds, 60)
    for choice in get_args(get_type_hints(STRATEGIES[name]).get("moments")):
        outcome = run(rule_of(name, moments=choice), problem, rounds, make=momentum)[0]
        assert distance(outcome.consensus, problem.optimum()) < 0.2, choice
        # where no step was ever taken the optimizer has nothing to average, and must not make
        # others wait for it
        idle = run(
            rule_of(name, moments=choice),
            problem,
            2,
            make=OPTIMIZERS["adam"],
            counts=lambda r, step: 0 if r == 2 else BATCH,
        )
        assert all(o.consensus.isfinite().all() for o in idle)


@every_rule
def test_asking_what_the_replicas_stand_for_changes_nothing(name: str) -> None:
    problem, rule = problem_of(name, 3, noise=0.1), rule_of(name)

    def ask(me: Rank, link: Group, state: Tensors) -> None:
        rule.consensus(me.replica, link, state)

    asked, left_alone = (run(rule, problem, 3, make=momentum, after_round=f) for f in (ask, None))
    assert all(same_outcome(a, b) for a, b in zip(asked, left_alone, strict=True))


@every_rule
def test_a_block_ends_where_the_run_does_and_is_merged_all_the_same(name: str) -> None:
    steps = run(rule_of(name), problem_of(name, 1), 1)[0].steps
    total = 3 * steps + (steps > 1)
    outcomes = run(rule_of(name), problem_of(name, 3), 100, total=total)
    assert [o.steps for o in outcomes] == [total] * 3
    assert len(outcomes[0].losses) == -(-total // steps)
    assert all(torch.equal(o.consensus, outcomes[0].consensus) for o in outcomes)


# -- what a plan may not say --

WRONG: dict[Any, list[str]] = {
    int: ["-1", "many"],
    float: ["-1", "nan", "much"],
    bool: ["perhaps"],
    str: ["nonsense"],
}


def wrong_values(kind: Any) -> list[str]:
    """Values that no option of this type can mean."""
    if get_origin(kind) is Literal:
        return ["nonsense"]
    if kind in WRONG:
        return WRONG[kind]
    found = [wrong_values(part) for part in get_args(kind) if part is not type(None)]
    return [v for v in found[0] if all(v in other for other in found[1:])] or ["-1"]


@every_rule
def test_every_option_refuses_a_wrong_value_and_names_it(name: str) -> None:
    kind: Any = STRATEGIES[name]
    kinds = get_type_hints(kind)
    for option in dataclasses.fields(kind):
        for value in wrong_values(kinds[option.name]):
            with pytest.raises(PlanError, match=rf"merge\.{option.name}="):
                parse(f"{words_of(name)} merge.{option.name}={value}")
        assert parse(words_of(name)).strategy == kind(), "its defaults fit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("merge=local_sgd merge.period=0", r"merge\.period=0: at least 1 local step is needed"),
        ("merge=local_sgd merge.post=soon", r"merge\.post=soon"),
        (
            "merge=easgd merge.alpha=0.5",
            r"merge\.alpha=0\.5: the centre is stable for 0 < alpha < 2 / \(4 \+ 1\) = 0\.4; set "
            r"merge\.alpha=0\.225",
        ),
        ("merge=easgd merge.beta=1.7", r"merge\.beta=1\.7, so alpha = beta / 4 = 0\.425: .* 0\.4"),
        ("merge=easgd merge.alpha=0", r"merge\.alpha=0\.0: more than 0"),
        (
            "merge=easgd merge.alpha=0.1 merge.beta=0.5",
            r"merge\.beta=0\.5: has no effect beside merge\.alpha=0\.1",
        ),
        (
            "servers=1 merge=async_easgd merge.alpha=0.5",
            r"merge\.alpha=0\.5: where all ranks merge at once, the centre is stable for .* = "
            r"0\.4; set",
        ),
        (
            "servers=1 merge=async_easgd merge.beta=1.7",
            r"merge\.beta=1\.7, so alpha = beta / 4 = 0\.425: .* 0\.4",
        ),
        ("servers=1 merge=async_easgd merge.alpha=0", r"merge\.alpha=0\.0: more than 0"),
        (
            "servers=1 merge=async_easgd merge.alpha=0.1 merge.beta=0.5",
            r"merge\.beta=0\.5: has no effect beside merge\.alpha=0\.1",
        ),
        ("merge=bmuf merge.eta=1", r"merge\.eta=1\.0: block momentum of 0 or more and less than 1"),
        (
            "merge=diloco merge.momentum=1",
            r"merge\.momentum=1\.0: outer momentum of 0 or more and less than 1",
        ),
        ("merge=diloco merge.lr=0", r"merge\.lr=0\.0: an outer learning rate of more than 0"),
        (
            "merge=streaming_diloco merge.period=8 merge.fragments=9",
            r"merge\.fragments=9: 1 to 8 are needed",
        ),
        (
            "merge=streaming_diloco merge.period=9 merge.fragments=4 merge.tau=2",
            r"merge\.tau=2: .* period / fragments = 9 / 4 .* merge\.tau=1 or less",
        ),
        (
            "merge=streaming_diloco merge.alpha=1",
            r"merge\.alpha=1\.0: the weight of the local fragment",
        ),
        ("merge=admm merge.rho=0", r"merge\.rho=0\.0: a penalty of more than 0"),
        ("merge=admm merge.ratio=1", r"merge\.ratio=1\.0: more than 1 is needed"),
        ("merge=admm merge.span=0.5", r"merge\.span=0\.5: 1 \(rho stays\) or more"),
        ("merge=admm merge.tolerance=1", r"merge\.tolerance=1\.0"),
    ],
)
def test_bounds_are_said_with_the_value_given_and_what_would_do(words: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse(f"data=4 {words}")


# -- conservation laws --


def elastic(size: int, rounds: int, still: Make) -> list[list[tuple[Tensor, Tensor]]]:
    """(x_i, c) of every rank after every round, from places that differ, under an optimizer that
    does not move.
    """
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(size)]
    saved = run(EASGD(period=1), Problem(size), 1)

    def look(me: Rank, link: Group, state: Tensors) -> None:
        seen[me.rank].append(
            (me.point(), me.point({k.removeprefix("c/"): v for k, v in state.items()}))
        )

    run(EASGD(period=1), Problem(size), rounds, make=still, resumed=_still(saved), after_round=look)
    return seen


def _still(outcomes: list[Outcome]) -> list[Outcome]:
    for o in outcomes:
        for group in o.saved["optimizer"][1]["groups"]:
            group["lr"] = 0.0
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_easgd_conserves_the_sum_of_replicas_and_centre_and_closes_the_gap_by_its_factor(
    size: int,
) -> None:
    seen = elastic(size, 5, lambda p: torch.optim.SGD(p, lr=0.0))
    sums = [sum(x for x, _ in at) + at[0][1] for at in zip(*seen, strict=True)]
    gaps = [sum(x for x, _ in at) / size - at[0][1] for at in zip(*seen, strict=True)]
    factor = 1 - (size + 1) * 0.9 / size
    for before, after in itertools.pairwise(sums):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    for gap, next_gap in itertools.pairwise(gaps):
        torch.testing.assert_close(next_gap, factor * gap, rtol=1e-9, atol=1e-12)
    assert float(gaps[0].abs().max()) > 1e-3, "there was a gap to close"


@pytest.mark.parametrize("lam", [0.0, 0.7])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_admm_multipliers_sum_to_the_gradient_of_the_penalty_after_every_round(
    lam: float, noise: float
) -> None:
    size, rounds = 4, 6
    ys: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(size)]

    def look(me: Rank, link: Group, state: Tensors) -> None:
        ys[me.rank].append((me.point({k: state[f"y/{k}"] for k in me.replica.params}), me.point()))

    shares = lambda rank, step: (
        0 if rank == 1 and step >= 8 else BATCH
    )  # and with a rank whose samples run out
    run(
        ADMM(period=4, rho=0.5, lam=lam),
        Problem(size, mixed=1.0, noise=noise),
        rounds,
        counts=shares,
        after_round=look,
    )
    for at in zip(*ys, strict=True):
        z = at[0][1]
        torch.testing.assert_close(sum(y for y, _ in at), lam * z, rtol=1e-10, atol=1e-10)
        assert max(float(y.abs().max()) for y, _ in at) > 0.01


def ridge(problem: Problem, lam: float) -> Tensor:
    A = torch.stack(problem.A).sum(0) + lam * torch.eye(len(problem.b[0]), dtype=torch.float64)
    return torch.linalg.solve(A, torch.stack(problem.b).sum(0))


@pytest.mark.parametrize("rho", [0.3, 1.0, 3.0])
def test_admm_reaches_the_ridge_optimum_whatever_rho(rho: float) -> None:
    problem = Problem(3, mixed=1.0)
    outcome = run(ADMM(period=8, rho=rho, lam=0.5), problem, 80)[0]
    assert distance(outcome.consensus, ridge(problem, 0.5)) < 1e-5


def test_admm_moves_rho_until_its_residuals_are_of_one_size_and_stops_once_they_are_small() -> None:
    problem = Problem(3, mixed=1.0)
    adapted = run(ADMM(period=8, rho=0.02, span=64.0), problem, 60)[0]
    fixed = run(ADMM(period=8, rho=0.02, span=1.0), problem, 60)[0]
    assert float(adapted.state["rho"]) > 0.02 == float(fixed.state["rho"])
    assert distance(adapted.consensus, problem.optimum()) < distance(
        fixed.consensus, problem.optimum()
    )
    rule = ADMM(period=8, rho=1.0, tolerance=1e-3)
    stopped, later = run(rule, problem, 60), run(rule, problem, 70)
    assert float(stopped[0].state["primal"]) < 1e-3 * float(stopped[0].state["norm"])
    assert torch.equal(stopped[0].consensus, later[0].consensus) and later[0].steps == 70 * 8
    assert distance(stopped[0].consensus, problem.optimum()) < 0.02


def test_a_frozen_strategy_holds_nothing_of_a_run() -> None:
    """One object may serve all ranks and a second run: what it learns is in the state alone."""
    for name in STRATEGIES:
        rule = rule_of(name)
        before = dict(vars(rule))
        run(rule, problem_of(name, 3), 2)
        assert (
            vars(rule) == before
            and dataclasses.is_dataclass(rule)
            and rule.__dataclass_params__.frozen
        )


def test_the_bench_knows_its_own_answer() -> None:
    problem = Problem(3, mixed=1.0)
    x = problem.optimum([1, 2, 3])
    slope = sum(w * (A @ x - b) for w, A, b in zip([1, 2, 3], problem.A, problem.b, strict=True))
    assert float(torch.as_tensor(slope).abs().max()) < 1e-12
    assert sum(p.numel() for p in Point().parameters()) == len(x)
