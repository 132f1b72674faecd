"""Sparse embedding tables in a model: the modules, and how their rows are pulled and pushed."""
