"""Choosing among models and solvers: cross-validation, grid search, races.

cross_validation   cross_validate    scores of folds, over one copy of the data
grid_search        GridSearch        ... for all combinations of hyper-parameters
fold_data                            that copy, and the folds as row numbers
fold_scores                          scikit-learn's scorers, without copies of rows
solver_race        race              which solver reaches a duality gap first
"""
