"""Learning rate: a task's schedule, the steps it is told, and when it is stepped.

total_steps       optimizer steps of the whole run, under any plan
schedule_setup    makes the schedule and refuses what it cannot follow
schedule_checks   learning rates that its author did not mean
steps_due         how many steps of it are due: by step, by epoch, or by an evaluated metric
"""
