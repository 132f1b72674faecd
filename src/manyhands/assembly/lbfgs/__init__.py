"""L-BFGS in a run (`replica/lbfgs`): what it goes together with, and its line search over ranks.

lbfgs_checks.py     refuses words and tasks under which a step has no single loss
search_setup.py     gives the optimizer its dot products over ranks, the replica its line search
"""
