"""Solvers of linear models: one algorithm a file; its name is the word in `solver=`.

A solver is a frozen dataclass: its fields are its options (`solver=SDCA(epochs=2)`). `init` makes
its state, `round` computes, exchanges and updates theta. `catalogue.py` says what each can do.
"""
