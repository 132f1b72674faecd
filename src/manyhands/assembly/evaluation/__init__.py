"""Evaluation over ranks: the test data of a task, while it trains and after it.

evaluator     metrics over all ranks             saved_model        weights of a checkpoint
goals         what until=, best= and at= name    prediction         outputs of all samples
rehearsal     one batch before the first step    prediction_file    ... written to a file
"""
