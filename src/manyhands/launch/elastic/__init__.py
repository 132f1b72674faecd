"""Elastic runs between ranks, as the launcher sees them.

elastic_launcher   starts the ranks, watches them, and publishes membership epochs
roster             which process sits in which seat, and which epoch follows
replacement        when a process may be started in place of another
liveness           ranks that hang, or are cut off
admission          scale and join, on request (run_requests); ranks from outside
                   (outside_process)
epoch_follower     the rank's side: how it learns of epochs
"""
