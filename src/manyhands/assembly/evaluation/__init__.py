"""Evaluation of a run: its test data divided over ranks, goals that name metrics, and a first look.

evaluator    metrics over all ranks          rehearsal    one batch before the first step
goals        what until=, best= and at= name
"""
