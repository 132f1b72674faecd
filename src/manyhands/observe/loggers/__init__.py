"""Loggers: sinks of the events of a run that write what other tools read; plan word `log=`.

    registry.py      names of the plan word, what each needs installed, and their sinks
    scalars.py       events as named numbers at global steps: what every logger is given
    scalar_sink.py   sink around a logger; what a resumed run needs to go on in the same
    background.py    a thread that writes, so that training waits for no network
    csv_table.py     a file, metrics.csv
    tensorboard.py   TensorBoard files
    wandb_run.py     Weights & Biases
    mlflow_run.py    MLflow

wandb, mlflow and tensorboard are imported inside functions: training must not wait for them.
"""
