"""Embedding tables in a model: the modules, and how their rows are pulled and pushed.

The way of one batch and its step:

    modules.py      Embedding.forward(ids)            the ids that a batch looks up
    tables.py       EmbeddingTables.lookup            prefetched rows, or a pull of its own
    id_columns.py   IdColumns                         which columns of a later batch hold ids, so
                                                      that `prefetch` can ask for its rows
    distinct.py     distinct(ids)                     each id once, and an index for every id
                    store.pull_async, store.exchange  (server/) rows of the distinct ids
    gather.py       rows_of, bags_of                  out = W[index], or sums by bag
                    loss.backward()                   a hook collects dloss/dW
    tables.py       EmbeddingTables.push              one push a step, for all tables
                    store.push, store.exchange        (server/) the server optimizer makes the step

Beside it: saved_rows.py loads rows of a checkpoint; server_optimizer.py translates a torch
optimizer into the server optimizer of a model's dense parameters.
"""
