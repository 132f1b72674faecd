"""Metrics over ranks: digits in dict batches, a step of one's own, metrics of the whole data.

    manyhands run examples/metrics.py
    manyhands run examples/metrics.py data=2                       the same values, over two ranks
    manyhands run examples/metrics.py data=2 merge=local_sgd best=f1 until=auc:0.999

All of them are tried on one batch before training, so a wrong one does not cost an epoch.
"""

import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

import manyhands as mh
from manyhands import datasets
from manyhands.metrics import F1, Gathered, Perplexity

Batch = dict[str, Tensor]


def step(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["pixels"]), batch["digit"])


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What metrics compare: outputs and target."""
    return model(batch["pixels"]), batch["digit"]


class Confused:
    """An object of one's own: how often each digit is taken for another one."""

    reductions = {"wrong": "sum", "seen": "sum"}  # noqa: RUF012  what ranks do with its attributes

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.wrong = self.seen = torch.zeros(10)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        wrong = target[outputs.argmax(1) != target]
        self.wrong = self.wrong + torch.bincount(wrong, minlength=10).cpu()
        self.seen = self.seen + torch.bincount(target, minlength=10).cpu()

    def compute(self) -> dict[str, Tensor]:
        share = self.wrong / self.seen
        return {"most": share.max(), "digit": share.argmax()}


def task() -> mh.Task:
    (x, y), (test_x, test_y) = datasets.digits()
    return mh.Task(
        model=nn.Sequential(
            nn.Flatten(), nn.Linear(x[0].numel(), 64), nn.ReLU(), nn.Linear(64, 10)
        ),
        step=step,
        predict=predict,
        train={"pixels": x, "digit": y},
        test={"pixels": test_x, "digit": test_y},
        metrics={
            "accuracy": mh.accuracy,  # a mean over the samples of a batch
            "f1": F1("macro"),  # accumulates
            "perplexity": Perplexity(),
            "f1_of_sklearn": Gathered(f1_score, "argmax", average="macro"),
            "auc": Gathered(roc_auc_score, "softmax", multi_class="ovr"),
            "confused": Confused(),
        },
        optimizer=lambda p: torch.optim.Adam(p, lr=0.003),
        batch=32,
        epochs=4,
    )


if __name__ == "__main__":
    mh.train(task)
