"""`manyhands chaos`: breaks a run on purpose, and proves that nothing was lost.

faults          what to break and when, as given
run_processes   which processes belong to the run
injector        breaks them at their time
rank_faults     slow ranks, hosts that are cut off, what outlives a launcher
ledger          what was computed, acknowledged and applied, against the undisturbed run
rank_history    of runs without servers: the rounds that the model is made of
rank_verdict    those of both runs, against each other
sample_counts   samples that were computed once, twice, never
report          the tables and chaos.json
command         the undisturbed run, the disturbed run, the verdict
"""
