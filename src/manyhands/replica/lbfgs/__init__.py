"""L-BFGS in deep training: one optimizer step is one iteration over one set of samples.

lbfgs.py                the optimizer: direction, line search, curvature pairs
line_search_step.py     a replica's step that evaluates the same batch several times
balanced_gradient.py    a gradient of which ranks claim small shards, each at its own pace
"""
