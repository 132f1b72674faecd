"""Stochastic gradient steps: kernels, epochs and conflict-free batches that solvers share."""
