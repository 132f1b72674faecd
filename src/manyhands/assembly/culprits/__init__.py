"""Culprits of a run: ranks that hang and ranks that are slow, found while the run goes on.

exchange/activity.py      what the training thread is in: attributes that it writes
watcher.py                a thread a rank: posts heartbeats, and the first rank looks at all
observe/stalls.py         from heartbeats to the rank that holds up the others
observe/stragglers.py     from heartbeats to ranks that are slow for a minute
balance.py                straggler=rebalance: shares of the batch by speed
"""
