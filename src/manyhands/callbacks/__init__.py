"""Callbacks: early stopping, averages of the weights, the best model; and how they are called.

early_stopping    EarlyStopping: end the run when a metric no longer improves
best_model        BestModel: leave the model of the best evaluation
ema, swa          EMA, SWA: averages of the weights, which are evaluated and saved
hooks             calls the hooks of a run's callbacks
stop_request      `run.stop(reason)`, agreed on by all ranks
shown_model       what is evaluated and saved, where that is not what trains
"""

from manyhands.callbacks.best_model import BestModel
from manyhands.callbacks.early_stopping import EarlyStopping
from manyhands.callbacks.ema import EMA
from manyhands.callbacks.swa import SWA

__all__ = ["BestModel", "EMA", "EarlyStopping", "SWA"]
