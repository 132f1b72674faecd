"""One rank's batches: data sources, batch iterators, step claims, prefetch.

The way of one batch:

    split.data       which offsets of the epoch's order this rank computes at a step
    step_claims.py   the same for asynchronous ranks, which claim steps from a shared counter
    step_counter.py  that counter, where ranks share memory
    batches.py       the batch iterator: offsets -> indices -> `source.fetch`, by micro-batch
    sources.py       the user's data: gathers or collates samples, moves them to the device
    row_digest.py    compares what ranks read of a stream
    prefetch.py      wraps the iterator where embedding rows are pulled before their batch
"""
