"""Metrics over ranks: the value over the whole test data, for any number of ranks."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss, roc_auc_score
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import Group
from manyhands.errors import TaskError
from manyhands.exchange.inproc import World
from manyhands.metrics import AUC, F1, Gathered, Perplexity
from manyhands.metrics.metric_set import MetricSet
from manyhands.metrics.state_exchange import pack, unpack

CPU = torch.device("cpu")
N = 37
SIZES = (1, 2, 3, 5, 40)  # 40: some ranks have no sample
G = torch.Generator().manual_seed(0)
OUTPUTS = torch.randn(N, 3, generator=G).mul(4).round().div(4)  # rounded: with ties
TARGET = torch.randint(3, (N,), generator=G)
ONE, TWO = OUTPUTS[:, 0], OUTPUTS[:, :2]
TRUE = (TARGET > 0).long()


def over(
    size: int,
    metric: Any,
    outputs: Any = OUTPUTS,
    target: Any = TARGET,
    *,
    batch: int = 4,
    streamed: bool = False,
) -> dict[str, float]:
    """What all ranks compute, after two evaluations in turn."""

    def main(group: Group) -> dict[str, float]:
        metrics = MetricSet({"m": metric}, CPU, size)
        n = len(target)
        mine = range(n * group.rank // size, n * (group.rank + 1) // size)
        mine = range(group.rank, n, size) if streamed else mine
        for _ in range(2):
            metrics.reset()
            for start in range(0, len(mine), batch):
                some = list(mine[start : start + batch])
                metrics.update(outputs[some], target[some], len(some))
            metrics.merge(metrics.all_gather(group, CPU), streamed)
            found = metrics.compute({})
        return found

    first, *others = World(size).run(main)
    for other in others:
        assert repr(other) == repr(first), "all ranks agree to the bit"
    return first


def macro(outputs: Tensor, target: Tensor) -> float:
    return float(f1_score(target, outputs.argmax(1), average="macro"))


def softmax_loss(outputs: Tensor, target: Tensor) -> float:
    return math.exp(nn.functional.cross_entropy(outputs.double(), target))


CASES: dict[str, tuple[Any, Tensor, Tensor, Callable[[Any, Any], Any]]] = {
    "F1 macro": (F1(), OUTPUTS, TARGET, macro),
    "F1 micro": (
        F1("micro"),
        OUTPUTS,
        TARGET,
        lambda o, t: f1_score(t, o.argmax(1), average="micro"),
    ),
    "F1 of a class that is nowhere": (F1(), TWO, TARGET * 0, macro),
    "F1 binary": (F1("binary"), ONE, TRUE, lambda o, t: f1_score(t, o > 0)),
    "F1 of probabilities": (
        F1("binary", threshold=0.5),
        ONE.sigmoid()[:, None],
        TRUE,
        lambda o, t: f1_score(t, o[:, 0] > 0.5),
    ),
    "F1 of two outputs": (F1("binary"), TWO, TRUE, lambda o, t: f1_score(t, o.argmax(1))),
    "AUC with ties": (AUC(), ONE, TRUE, lambda o, t: roc_auc_score(t, o)),
    "AUC of two outputs": (AUC(), TWO, TRUE, lambda o, t: roc_auc_score(t, o[:, 1] - o[:, 0])),
    "perplexity": (Perplexity(), OUTPUTS, TARGET, softmax_loss),
    "gathered argmax": (Gathered(f1_score, "argmax", average="macro"), OUTPUTS, TARGET, macro),
    "gathered softmax": (
        Gathered(log_loss, "softmax", labels=[0, 1, 2]),
        OUTPUTS,
        TARGET,
        lambda o, t: log_loss(t, o.softmax(1), labels=[0, 1, 2]),
    ),
    "gathered function": (
        Gathered(roc_auc_score, lambda o: o.softmax(1)[:, 1]),
        TWO,
        TRUE,
        lambda o, t: roc_auc_score(t, o.softmax(1)[:, 1]),
    ),
    "gathered sigmoid in bfloat16": (
        Gathered(roc_auc_score, "sigmoid"),
        ONE.bfloat16(),
        TRUE,
        lambda o, t: roc_auc_score(t, o.sigmoid().float()),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_value_is_that_of_the_whole_data_on_any_number_of_ranks(case: str) -> None:
    metric, outputs, target, whole = CASES[case]
    wanted = float(whole(outputs, target))
    for size in SIZES:
        assert over(size, metric, outputs, target) == {"m": pytest.approx(wanted, rel=1e-6)}, size


def test_gathered_rows_come_in_the_order_of_the_data_from_streams_too() -> None:
    def in_order(y_true: Any, y_pred: Any) -> float:
        return float((y_true == np.arange(N)).all() and (y_pred == np.arange(N)).all())

    numbers = torch.arange(N)
    for size in SIZES:
        for streamed in (False, True):
            got = over(size, Gathered(in_order), numbers, numbers, streamed=streamed)
            assert got == {"m": 1.0}, (size, streamed)


def test_padding_and_tokens_count_as_they_should() -> None:
    outputs = torch.randn(9, 5, 7, generator=G)
    target = torch.randint(1, 7, (9, 5), generator=G)
    target[2:, 3:] = 0
    kept = target != 0
    mean = nn.functional.cross_entropy(outputs[kept].double(), target[kept])
    f1 = f1_score(target[kept], outputs.argmax(-1)[kept], average="micro", labels=range(7))
    for size in (1, 2, 3):
        got = over(size, Perplexity(ignore_index=0), outputs, target, batch=2)
        assert got["m"] == pytest.approx(math.exp(mean), rel=1e-6)
        by_channel = over(size, Perplexity(0), outputs.transpose(1, 2), target, batch=2)
        assert by_channel["m"] == pytest.approx(math.exp(mean), rel=1e-6)
        got = over(size, F1("micro", ignore_index=0), outputs, target, batch=2)
        assert got["m"] == pytest.approx(f1, rel=1e-6)


def test_what_is_not_defined_is_nan_and_no_error() -> None:
    assert math.isnan(over(2, AUC(), ONE, TRUE * 0)["m"])
    assert math.isnan(over(2, Perplexity(0), OUTPUTS, TARGET * 0)["m"])
    assert over(2, F1("binary"), ONE - 99, TRUE * 0) == {"m": 0.0}


# -- objects of others --


class States:
    """What torchmetrics calls a metric: states with a default and a function that reduces them."""

    def __init__(self) -> None:
        self._defaults: dict[str, Any] = {}
        self._reductions: dict[str, Any] = {}
        self._update_count, self._computed = 0, None
        self.distributed_available_fn = lambda: True
        for name, default, reduction in (
            ("total", torch.ones(1), dim_zero_sum),
            ("largest", torch.tensor(-torch.inf), dim_zero_max),
            ("smallest", torch.tensor(torch.inf), dim_zero_min),
            ("rows", [], dim_zero_cat),
            ("average", torch.zeros(()), dim_zero_mean),
            ("each", torch.zeros(()), None),
            ("product", torch.ones(()), lambda values: values.prod(0)),
        ):
            self._defaults[name], self._reductions[name] = default, reduction
        self.seen = 0
        self.reset()

    def reset(self) -> None:
        self.seen = 0
        for name, default in self._defaults.items():
            setattr(self, name, [] if isinstance(default, list) else default.clone())

    def update(self, outputs: Tensor, target: Tensor) -> None:
        self._update_count += 1
        n = len(outputs)
        self.total = self.total + outputs[:, 0].sum()
        self.largest = torch.maximum(self.largest, outputs.max())
        self.smallest = torch.minimum(self.smallest, outputs.min())
        self.rows.append(outputs[:, 0])
        mean = outputs[:, 0].double().mean()
        self.average = (self.average * self.seen + mean * n) / (self.seen + n)
        self.each = self.each + n
        self.product = self.product * outputs[:, 0].abs().clamp(min=0.9, max=1.1).prod()
        self.seen += n

    def compute(self) -> dict[str, Any]:
        assert self._update_count and not self.distributed_available_fn()
        return {
            "total": self.total,
            "spread": [self.largest, self.smallest],
            "median": torch.cat(self.rows).median(),
            "average": self.average,
            "each": torch.as_tensor(self.each).sum(),
            "product": self.product,
        }


def dim_zero_sum(values: Tensor) -> Tensor: ...
def dim_zero_max(values: Tensor) -> Tensor: ...
def dim_zero_min(values: Tensor) -> Tensor: ...
def dim_zero_cat(values: Tensor) -> Tensor: ...
def dim_zero_mean(values: Tensor) -> Tensor: ...


def test_states_as_torchmetrics_declares_them_are_merged_by_their_reductions() -> None:
    first = OUTPUTS[:, 0]
    wanted = {
        "m/total": float(first.sum()) + 1,
        "m/spread/0": float(OUTPUTS.max()),
        "m/spread/1": float(OUTPUTS.min()),
        "m/median": float(first.median()),
        "m/average": float(first.mean()),
        "m/each": float(N),
        "m/product": float(first.abs().clamp(min=0.9, max=1.1).prod()),
    }
    for size in SIZES:
        assert over(size, States()) == pytest.approx(wanted, rel=1e-5), size


class Hits:
    """A user's own, with numbers and an array as states."""

    reductions: ClassVar[Mapping[str, str]] = {"hits": "sum", "by_class": "sum", "n": "sum"}

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.hits, self.n, self.by_class = 0.0, 0, np.zeros(3)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        right = outputs.argmax(1) == target
        self.hits, self.n = self.hits + float(right.sum()), self.n + len(target)
        self.by_class = self.by_class + np.bincount(target[right], minlength=3)

    def compute(self) -> dict[str, Any]:
        assert isinstance(self.n, int) and isinstance(self.hits, float)
        return {"share": self.hits / self.n, "class": self.by_class}


class Undeclared(Hits):
    reductions: Any = None  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Hits, Undeclared])
def test_objects_of_ones_own_are_merged_declared_or_not(kind: type[Hits]) -> None:
    right = (OUTPUTS.argmax(1) == TARGET).float()
    wanted = {"m/share": float(right.mean())}
    wanted |= {f"m/class/{i}": float(right[i == TARGET].sum()) for i in range(3)}
    for size in SIZES:
        assert over(size, kind()) == pytest.approx(wanted), size


def test_an_object_of_the_task_is_left_alone() -> None:
    own = Hits()
    over(2, own)
    assert own.n == 0


def test_torchmetrics_as_they_are() -> None:
    tm = pytest.importorskip("torchmetrics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        several = tm.MetricCollection(
            {
                "accuracy": tm.Accuracy("multiclass", num_classes=3),
                "f1": tm.F1Score("multiclass", num_classes=3, average="macro"),
                "auroc": tm.AUROC("multiclass", num_classes=3),
                "each": tm.Precision("multiclass", num_classes=3, average="none"),
            }
        )
        shares = OUTPUTS.softmax(1)
        alone = over(1, several, shares)
        assert alone["m/f1"] == pytest.approx(macro(OUTPUTS, TARGET), rel=1e-6)
        assert {"m/each/0", "m/each/1", "m/each/2"} < alone.keys()
        for size in SIZES:
            assert over(size, several, shares) == pytest.approx(alone, rel=1e-6), size


# -- what is refused, and how --


def test_a_metric_that_fails_is_named_with_the_users_line() -> None:
    def broken(outputs: Tensor, target: Tensor) -> Tensor:
        return outputs.no_such_thing()  # type: ignore[no-any-return]

    metrics = MetricSet({"broken": broken}, CPU)
    with pytest.raises(TaskError) as raised:
        metrics.means(OUTPUTS, TARGET)
    said = str(raised.value)
    assert said.startswith("metric broken failed: AttributeError: 'Tensor' object has no attribute")
    assert re.search(
        r"test_metric_set.py, line \d+, in broken\n    return outputs.no_such_th", said
    )


@pytest.mark.parametrize(
    ("make", "outputs", "target", "says"),
    [
        (lambda: F1(), ONE, TARGET, r"metric m: F1 compares the largest output .* \(37,\)"),
        (lambda: F1(), OUTPUTS, TARGET - 1, r"metric m: F1 got the target -1, but the model has 3"),
        (lambda: F1("binary"), ONE, TARGET, r"F1\('binary'\) is for two classes, but the target"),
        (lambda: AUC(), OUTPUTS, TARGET, r"AUC is for two classes, .* \(37, 3\); give mh.metrics"),
        (lambda: Perplexity(), OUTPUTS, TARGET[:, None], r"Perplexity got outputs of shape"),
        (lambda: Gathered(lambda t, p: "good"), OUTPUTS, TARGET, r"metric m computed a str, but"),
        (lambda: Gathered(lambda t, p: p), OUTPUTS[:, :1].repeat(1, 9), TARGET, r"computes 333 nu"),
    ],
)
def test_what_a_metric_cannot_take_is_said_in_one_line(
    make: Callable[[], Any], outputs: Tensor, target: Tensor, says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        over(1, make(), outputs, target, batch=N)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: F1("all"), r"F1\(.all.\), but .binary., .macro. or .micro."),  # type: ignore
        (lambda: F1(threshold=0.5), r"the threshold has no effect"),
        (lambda: F1("binary", ignore_index=0), r"leave ignore_index out"),
        (lambda: Perplexity("pad"), r"Perplexity\('pad'\), but a class"),  # type: ignore[arg-type]
        (lambda: Gathered(f1_score, "max"), r"y_pred='max'\), but one of argmax, softmax, sigmoid"),
        (lambda: Gathered(F1), r"but a function \(y_true, y_pred\) is needed"),
    ],
)
def test_options_without_a_meaning_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        make()


def test_states_that_cannot_travel_are_named() -> None:
    class Words(Hits):
        def reset(self) -> None:
            super().reset()
            self.n = "none"  # type: ignore[assignment]

        def update(self, outputs: Tensor, target: Tensor) -> None: ...

    with pytest.raises(TaskError, match=r"metric m: the state 'n' of Words is a str, but ranks"):
        over(2, Words())

    class Wrong(Hits):
        reductions: ClassVar[Mapping[str, str]] = {"hits": "add"}

    with pytest.raises(TaskError, match=r"Wrong.reductions has 'hits': 'add', but one of sum"):
        over(2, Wrong())


def test_a_metric_that_cannot_be_copied_is_named() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    class Open(Hits):
        def __init__(self) -> None:
            super().__init__()
            self.kept = numbers()

    with pytest.raises(TaskError, match=r"metric m, a Open, cannot be copied .*; each rank needs"):
        MetricSet({"m": Open()}, CPU)


def test_rows_of_other_lengths_on_other_ranks_are_refused_by_name() -> None:
    class Ragged(Gathered):
        def update(self, outputs: Any, target: Any) -> None:
            super().update(outputs[:, : 1 + int(outputs[0, 0] > 0)], target)

    outputs = torch.ones(4, 3)
    outputs[:2] = -1
    with pytest.raises(TaskError, match=r"metric m: the state 'outputs' of Ragged has rows of the"):
        over(2, Ragged(lambda t, p: 0.0), outputs, TARGET[:4])


def test_vectors_between_ranks_keep_every_bit_of_every_kind() -> None:
    given = [
        [
            torch.tensor([0.1, torch.nan, torch.inf], dtype=d)
            for d in (torch.float32, torch.float64)
        ],
        [],
        [torch.randn(2, 3, generator=G).bfloat16().t(), torch.zeros(0, 4), torch.tensor(True)],
        [torch.randn(6, 3, generator=G)[:1, 0], torch.tensor([[-5]], dtype=torch.int8)],
    ]
    got = unpack(pack(given))
    assert [len(tensors) for tensors in got] == [len(tensors) for tensors in given]
    for sent, found in zip(chain(*given), chain(*got), strict=True):
        assert found.dtype == sent.dtype and found.shape == sent.shape
        assert torch.equal(found.nan_to_num(), sent.nan_to_num())


def test_ready_made_metrics_are_at_hand() -> None:
    assert mh.metrics.F1 is F1 and set(mh.metrics.__all__) == {
        "AUC",
        "F1",
        "Gathered",
        "Perplexity",
    }
