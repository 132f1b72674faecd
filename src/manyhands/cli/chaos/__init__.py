"""`manyhands chaos`: breaks a run on purpose, and proves that nothing was lost.

faults          what to break and when, as given
run_processes   which processes belong to the run
injector        breaks them at their time
ledger          what was computed, acknowledged and applied, against the undisturbed run
report          the tables and chaos.json
command         the undisturbed run, the disturbed run, the verdict
"""
