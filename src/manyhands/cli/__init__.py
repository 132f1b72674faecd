"""Command line: `manyhands VERB ...`.

    main.py    parses arguments and calls a verb; each other module is one verb, but
    run_verbs.py parses those of verbs about a run, options.py has arguments of several
    run.py     train a script's task      verify.py  compare a plan with one process
    race/      compare plans              demo.py    train LeNet here
    server.py  start a server             lab.py     simulate several hosts
    trace.py   write a trace file         export.py  write the weights, export_graph.py the model
    doctor/    check this machine         bench.py   run a benchmark

Only `main` is imported here: libraries that one verb needs must not delay the others.
"""

from manyhands.cli.main import main

__all__ = ["main"]
