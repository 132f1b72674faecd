"""Elastic runs between ranks, as the launcher sees them.

elastic_launcher   starts the ranks, watches them, and publishes membership epochs
rank_starter       starts processes; one that has loaded everything waits on standby
roster             which process sits in which seat, and which epoch follows
loss_policy        what follows the loss of a process: another one, or the end of the run
liveness           ranks that hang, or are cut off
admission          scale and join, on request (run_requests); ranks from outside
                   (outside_process)
epoch_follower     the rank's side: how it learns of epochs
worker_replacements    of runs over servers, whose workers join by the servers' coordinator
"""
