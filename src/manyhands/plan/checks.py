"""Checks of a plan: words that contradict each other or have no effect are refused."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from manyhands.core import Plan, Store, Strategy
from manyhands.errors import PlanError
from manyhands.exchange import compression
from manyhands.plan.common_parameter_checks import check_common_parameters
from manyhands.plan.culprit_checks import check_culprits
from manyhands.plan.reading import check_loggers
from manyhands.plan.vocabulary import AXES

LEAST_MEMORY_BYTES = 1 << 20
# words that need more than 1 rank on an axis
AXIS_WORDS = {"schedule": "pipe", "cut": "pipe", "sequence": "tensor", "zero": "shard"}
SERVER_WORDS = (
    "servers",
    "lookahead",
    "cache",
    "cache_age",
    "hot_rows",
    "hot_age",
    "embeddings",
    "lease_s",
    "shards",
    "server_memory",
    "replicas",
    "ack",
    "on_loss",
    "membership",
)
REPLICA_WORDS = ("replicas", "ack", "membership")
POSITIVE = (
    "ranks_per_gpu",
    "batch",
    "micro",
    "accumulate",
    "epochs",
    "steps",
    "clip",
    "threads",
    "bucket_mb",
    "keep",
    "timeout_s",
    "lease_s",
    "restart_window_s",
    "wait_s",
    "grace_s",
    "stall_s",
)


# words that need elastic=
ELASTIC_WORDS = ("respawn", "spares", "wait_s")
# merge strategies over servers whose workers may come and go
ELASTIC = ("downpour", "stale_sync", "dc_asgd", "backup", "async_easgd")


def default(word: str) -> Any:
    return Plan.__dataclass_fields__[word].default


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def check(plan: Plan) -> None:
    """Everything that does not depend on the number of ranks."""
    _check_numbers(plan)
    _check_limits(plan)
    for word, strategy in (("merge", plan.strategy), ("then", plan.next_strategy)):
        if strategy is not None:
            _check_strategy(plan, word, strategy)
    _check_devices(plan)
    check_common_parameters(plan)
    check_loggers(plan.log)
    _check_elastic(plan)
    check_culprits(plan)


def elastic_bounds(elastic: str) -> tuple[int, int]:
    """The least and the largest number of workers."""
    least, colon, most = elastic.partition(":")
    if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most) > 1):
        raise PlanError(
            f"elastic={elastic}: LEAST:MOST workers is needed, such as 1:4; least at least 1, most "
            "at least 2"
        )
    return int(least), int(most)


def _check_elastic(plan: Plan) -> None:
    if plan.elastic is None:
        for word in ELASTIC_WORDS:
            if (given := getattr(plan, word)) != default(word):
                raise PlanError(
                    f"{word}={_text(given)} has no effect: without elastic= a rank that dies ends "
                    f"the run; add elastic=1:{max(2, plan.layout.data)}"
                )
        return
    least, most = elastic_bounds(plan.elastic)
    if plan.strategy.link is Store:
        _check_elastic_workers(plan, most)
        return
    if not least <= plan.layout.data <= most:
        raise PlanError(
            f"elastic={plan.elastic} with data={plan.layout.data}: a run starts with {least} to "
            f"{most} replicas; set data={most}, say"
        )
    if plan.servers:
        raise PlanError(
            f"elastic={plan.elastic} with merge={plan.merge} and servers={plan.servers}: rounds "
            "are rolled back where a rank dies, and rows on servers are not; leave servers= out, "
            f"or use merge={ELASTIC[0]}"
        )
    for word, strategy in (("merge", plan.strategy), ("then", plan.next_strategy)):
        if strategy is not None:
            _check_sizes(plan.elastic, word, strategy, range(least, most + 1))
        if strategy is not None and strategy.distils:
            raise PlanError(
                f"elastic={plan.elastic} with {word}={getattr(plan, word)}: its members are one "
                "model each, and one that dies takes its model with it; leave elastic= out"
            )


def _check_sizes(elastic: str, word: str, strategy: Strategy[Any, Any], sizes: range) -> None:
    """The strategy's options hold on every number of replicas that may be left."""
    for size in sizes:
        try:
            strategy.check(size)
        except PlanError as e:
            raise PlanError(
                f"elastic={elastic} lets the run go on with {size} replicas: "
                f"{str(e).replace('merge.', f'{word}.')}; raise the least"
            ) from None


def _check_elastic_workers(plan: Plan, most: int) -> None:
    if plan.layout.data != most:
        raise PlanError(
            f"elastic={plan.elastic} with data={plan.layout.data}: a run over servers starts with "
            f"all of its {most} workers, more cannot join it; set data={most} or leave it out"
        )
    if plan.merge not in ELASTIC:
        raise PlanError(
            f"elastic={plan.elastic} with merge={plan.merge}: a rank that dies takes its "
            f"multiplier with it; over servers, elastic= comes with {', '.join(ELASTIC)}"
        )
    if plan.spares:
        raise PlanError(
            f"spares={plan.spares} has no effect with merge={plan.merge}, whose new workers join "
            "while the others train; leave it out"
        )


def _check_numbers(plan: Plan) -> None:
    for key in POSITIVE:
        value = getattr(plan, key)
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"{key}={value}, but more than 0 and less than infinity is needed")
    for key in SERVER_WORDS:
        if isinstance(getattr(plan, key), int) and getattr(plan, key) < 0:
            raise PlanError(f"{key}={getattr(plan, key)}, but 0 or more is needed")
        if not plan.servers and getattr(plan, key) != default(key):
            raise PlanError(
                f"{key}={getattr(plan, key)} is about tables on servers, but the plan has none; "
                "add servers=1"
            )
    _check_replicas(plan)
    _check_hot(plan)
    if plan.cache_age != default("cache_age") and not plan.cache:
        raise PlanError(
            f"cache_age={plan.cache_age} has no effect without a cache; add cache=100000, say"
        )
    for key in ("restarts", "spares"):
        if (getattr(plan, key) or 0) < 0:
            raise PlanError(f"{key}={getattr(plan, key)}, but 0 or more is needed")
    if plan.loaders is not None and plan.loaders < 0:
        raise PlanError(f"loaders={plan.loaders}, but 0 or more processes are needed")


def _check_replicas(plan: Plan) -> None:
    for key in ("shards", "replicas"):
        if getattr(plan, key) < 1:
            raise PlanError(f"{key}={getattr(plan, key)}, but at least 1 is needed")
    if plan.servers and plan.replicas > plan.servers:
        raise PlanError(
            f"replicas={plan.replicas} with servers={plan.servers}: each copy needs a server of "
            f"its own; set servers={plan.replicas} or fewer replicas"
        )
    for key in REPLICA_WORDS:
        if plan.replicas == 1 and getattr(plan, key) != default(key):
            raise PlanError(
                f"{key}={getattr(plan, key)} has no effect without copies of what servers hold; "
                "add replicas=2 (and servers=2 or more)"
            )
    if plan.server_memory is not None:
        parse_bytes(plan.server_memory)


def _check_hot(plan: Plan) -> None:
    """Copies of hot rows are for runs whose reads may be a moment old."""
    word = f"hot_rows={plan.hot_rows:g}"
    if not 0 <= plan.hot_rows < 1:
        raise PlanError(f"{word}, but a share of accesses is needed: 0 or more, less than 1")
    if not 0 < plan.hot_age < math.inf:
        raise PlanError(f"hot_age={plan.hot_age:g}, but seconds are needed, more than 0")
    if not plan.hot_rows:
        if plan.hot_age != default("hot_age"):
            raise PlanError(
                f"hot_age={plan.hot_age:g} has no effect without copies of hot rows; add "
                "hot_rows=0.01, say"
            )
        return
    if plan.servers < 2:
        raise PlanError(
            f"{word} copies rows to other servers, and there is {plan.servers}; set servers=2 or "
            "more, or leave it out"
        )
    exact = "embeddings=sync" if plan.embeddings == "sync" else ""
    if getattr(plan.strategy, "staleness", None) == 0:
        exact = "staleness=0"
    elif plan.merge in ("backup", "async_admm"):  # their rounds are committed together
        exact = f"merge={plan.merge}"
    if exact:
        raise PlanError(
            f"{word} lets a rank read rows that are {plan.hot_age:g} s old, and {exact} lets it "
            "read the newest only; leave one of them out"
        )


def parse_bytes(text: str) -> int:
    """A number of bytes with a unit: 512MiB, 8GiB, 8GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)", text.strip().lower())
    if match is None:
        raise PlanError(
            f"server_memory={text}: a number of bytes with a unit is needed, e.g. 512MiB or 8GiB"
        )
    unit = match[2].removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    size = int(float(match[1]) * base ** (" kmgt".index(unit[0]) if unit else 0))
    if size < LEAST_MEMORY_BYTES:
        raise PlanError(f"server_memory={text}: 1MiB or more is needed")
    return size


def _check_limits(plan: Plan) -> None:
    """When to stop, evaluate, save and change the strategy."""
    if plan.epochs is not None and plan.steps is not None:
        raise PlanError(
            f"epochs={plan.epochs} and steps={plan.steps} both say when to stop; give one of them"
        )
    if plan.until is not None and plan.until.name in ("epoch", "step"):
        raise PlanError(
            f"until={plan.until}: {plan.until.name}s= says when to stop; until= is for what an "
            "evaluation measures"
        )
    if plan.evaluate != "epoch" and not (plan.evaluate.isdigit() and int(plan.evaluate) > 0):
        raise PlanError(f"evaluate={plan.evaluate}: epoch or a number of steps is needed")
    if (plan.then is None) != (plan.at is None):
        given, needed = ("then", "at=epoch:5") if plan.at is None else ("at", "then=local_sgd")
        raise PlanError(f"{given}= alone has no effect: add the other half, such as {needed}")
    strategy = plan.strategy
    sums_gradients = strategy.sends == "gradients" and not strategy.swaps
    measures_noise = sums_gradients and strategy.link is not Store
    if plan.at is not None and plan.at.name == "noise" and not measures_noise:
        raise PlanError(
            f"at={plan.at}: the noise scale is measured where gradients are all-reduced, not "
            f"under merge={plan.merge}; use all_reduce"
        )
    if plan.save not in ("epoch", "off") and not (plan.save.isdigit() and int(plan.save) > 0):
        raise PlanError(f"save={plan.save}: epoch, off or a number of rounds is needed")
    if plan.save == "off" and plan.save_tables != "full":
        raise PlanError(
            f"save_tables={plan.save_tables} has no effect with save=off; leave one of them out"
        )


def _check_strategy(plan: Plan, word: str, strategy: Strategy[Any, Any]) -> None:
    if strategy.link is Store:
        _check_served(plan, word, strategy)
    keeps_feedback = strategy.sends == "gradients" and plan.compress not in ("none", "fp16", "bf16")
    if plan.precision == "fp16" and keeps_feedback and strategy.link is not Store:
        raise PlanError(
            f"compress={plan.compress} with precision=fp16: its error feedback was scaled with "
            "a loss scale that changes; set precision=bf16 or compress=bf16"
        )
    if plan.codec is not None and (reason := compression.refusal(plan.codec, type(strategy))):
        raise PlanError(reason)


def _check_served(plan: Plan, key: str, strategy: Strategy[Any, Any]) -> None:
    """Under a strategy over servers ranks are not in step with each other."""
    word = f"{key}={getattr(plan, key)}"
    if plan.then is not None:
        raise PlanError(
            f"{word} works over servers, and a run cannot change between such a strategy and "
            "another; leave then= out"
        )
    if not plan.servers:
        raise PlanError(
            f"{word} pulls from and pushes to a parameter server, but the plan has none; "
            "add servers=1"
        )
    if plan.lookahead != 1:
        raise PlanError(
            f"lookahead={plan.lookahead} has no effect: under {word} batches are claimed when they "
            "are wanted; leave it out"
        )
    if plan.embeddings == "sync":
        raise PlanError(
            f"embeddings=sync makes all ranks wait at every step, and {word} has a pace of its "
            "own; leave it out"
        )
    if plan.algorithm != "native":
        raise PlanError(
            f"algorithm={plan.algorithm} has no effect: {word} moves the model through servers; "
            "leave it out"
        )
    if plan.batchnorm == "sync":
        raise PlanError(
            f"batchnorm=sync makes ranks wait for each other in every layer, which {word} avoids; "
            "set batchnorm=local"
        )
    if plan.precision == "fp16" and strategy.on_server == "optimizer":
        raise PlanError(
            "precision=fp16 needs loss scaling where the optimizer steps, and under "
            f"{word} that is the server; set precision=bf16"
        )


def _check_devices(plan: Plan) -> None:
    if plan.link == "nccl" and plan.device == "cpu":
        raise PlanError("link=nccl moves bytes between GPUs, but device=cpu; set link=auto")
    if plan.ranks_per_gpu > 1:
        many = f"ranks_per_gpu={plan.ranks_per_gpu}"
        if plan.device == "cpu":
            raise PlanError(f"{many} has no effect with device=cpu; leave one of them out")
        if plan.link == "nccl":
            raise PlanError(
                f"{many}: nccl refuses two ranks on one card; set link=auto, which then exchanges "
                "through the host"
            )
    if plan.algorithm != "native" and (plan.link == "nccl" or plan.device == "cuda"):
        raise PlanError(
            f"algorithm={plan.algorithm} is for CPU processes, nccl has its own algorithms; "
            "leave it out"
        )
    if plan.link in ("shared", "hierarchical") and plan.device == "cuda":
        raise PlanError(
            f"link={plan.link} is for CPU processes of one host, but device=cuda; set link=auto"
        )


def fit(plan: Plan, size: int | None, given: bool) -> Plan:
    """The plan on as many ranks as were started. `given`: data= is in the plan, and stays."""
    if size is None or plan.layout.size == size:
        return plan
    inside = plan.layout.size // plan.layout.data  # ranks of one replica
    if not given and size % inside == 0:
        layout = dataclasses.replace(plan.layout, data=size // inside)
        return dataclasses.replace(plan, layout=layout)
    used = [a for a in AXES if a == "data" or getattr(plan.layout, a) > 1]
    axes = " x ".join(f"{a}={getattr(plan.layout, a)}" for a in used)
    fits = "change the axes so that their product is that"
    if size % inside == 0:
        fits = f"set data={size // inside}"
    raise PlanError(
        f"the plan {axes} needs {plan.layout.size} ranks, but {size} were started; {fits} or "
        f"start {plan.layout.size}"
    )
