"""Deferred initialisation: a model is built without memory, and parameters are made when needed.

    operations        the record of what a model function did to tensors, and its replay
    build_recorder    runs a model function and writes that record
    untouched_memory  addresses that take no memory before they are written
    unmade            parameters that have shapes but no values yet: made one by one, in any order

While it is recorded, every operation that draws random numbers runs for real on memory that is
freed at once, so that the generator advances as in a plain build; its state before is kept. A
parameter's values are made by repeating the operations that they depend on, each with that state.
"""
