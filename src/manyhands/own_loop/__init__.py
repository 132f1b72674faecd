"""Own loop: a training loop that the user writes, with the trainer beside it as a coroutine.

run.py            the handle: prepare, step, sum, merged, log, close
loop_parts.py     models, optimizers and schedules as they are given: one, or dicts of names
preparation.py    model, optimizer and data become a trainer
coroutine.py      trainer and loop take turns: the one asks for a loss, the other hands it over
loop_steps.py     several optimizer steps for one batch, where optimizers are named
given_loss.py     what a step was given: a loss, gradients that are there, a closure, nothing
step_checks.py    what a step is refused for: schedules and batches it would get wrong
loop_data.py      the data: an iteration is an epoch, and every batch wants a step
drawn_steps.py    in its place, where the script draws its own batches
loop_ends.py      ranks whose loops make different numbers of steps
script.py         what the text of the script tells before it gets there
open_runs.py      runs of this process: opened by `join`, closed when the script ends
"""

from manyhands.own_loop.open_runs import (
    close_joined,
    draw_curves,
    joined_runs,
    opened,
)
from manyhands.own_loop.run import Run
from manyhands.own_loop.script import script_text

__all__ = ["Run", "close_joined", "draw_curves", "joined_runs", "opened", "script_text"]
