"""Tracing: the forward pass of a model as a program that can be cut and run in parts.

    trace_model      trace(model, example): chooses leaf modules, traces both modes
    tracer           runs the forward pass on tensors without values and sees every call
    node_writer      turns calls into nodes: references for tensors, formulas for sizes
    program          the traced program, its nodes, and how a node runs
    symbolic_sizes   sizes of the batch as symbols; the guard that a later batch must satisfy
    value_dependent  leaf modules that need real values to run
    isolation        restores the model and torch's settings after a trace
    source_location  the line of the user's code, for errors

Imports go downwards: trace_model -> tracer -> node_writer -> symbolic_sizes -> program.
"""
