"""Metrics of a task: ready-made ones, and how metrics are merged over ranks.

    F1, AUC, Perplexity     accumulate over batches and ranks
    Gathered                a function of all outputs and targets, such as those of scikit-learn

Reading order of the room: `evaluation_pass` (the test data through the model), `metric_set` (all
metrics of a task), `declared_states` (what an accumulating metric holds), `state_exchange` (how
that goes from rank to rank).
"""

from manyhands.metrics.auc import AUC
from manyhands.metrics.f1 import F1
from manyhands.metrics.gathered_function import Gathered
from manyhands.metrics.perplexity import Perplexity

__all__ = ["AUC", "F1", "Gathered", "Perplexity"]
