"""Observation: every rank appends events to its own file; texts, pictures, traces read those.

    events.py            the recorder of a rank, its event file, and reading all files of a run
    server_events.py     the counters of parameter servers as events
    progress.py          sink: the live line of a terminal, or plain lines
    sinks.py             the sinks of a run: the display, and loggers
    loggers/             sinks of the plan word log=: CSV, TensorBoard, wandb, MLflow
    curves.py            picture: loss and metrics of a run over epochs
    chrome_trace.py      trace file of all ranks for ui.perfetto.dev
    pipeline_trace.py    the pipelines of a run, and the events of their stages
    pipeline_picture.py  picture: one step of a pipeline
    bubble.py            idle share of a pipeline
    graph_picture.py     picture: a graph of nodes partitioned over ranks
    memory_peak.py       the memory that a rank used at most, and what its host has left
    race/                results, table, picture, page and live view of a race
    text.py              numbers as text

matplotlib, rich and tensorboard are imported inside functions: training must not wait for them.
"""
