"""Atomic instructions for threads that share arrays inside kernels: add, load, store, spin lock.

    atomic_add(array, i, x)       array[i] += x as one step, of integers or floats; the value before
    atomic_load(array, i)         acquire: what its writer wrote before is seen
    atomic_store(array, i, x)     release: what was written before is seen first
    acquire(lock), release(lock)  spin lock: an int64 array whose first element is 0 when free

A thread that waits spins for a moment and then gives its core to others, so more threads than
cores are slow but never stuck. On x86-64 and arm64 an atomic float add is a loop of
compare-and-swap; a plain `array[i] += x` of two threads can lose one of both.
"""

import sys

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from manyhands.kernels.compile import inlined
from manyhands.kernels.instructions import intrinsic

SPINS = 256  # looks at a value before the core is given to another thread


def _element(context, builder, signature, arguments):
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    index = context.cast(builder, arguments[1], signature.args[1], types.intp)
    return builder.gep(data, [index])


@intrinsic
def atomic_add(typing, array, index, value):
    """array[index] += value as one step; returns what was there before."""
    operation = "fadd" if isinstance(array.dtype, types.Float) else "add"

    def generate(context, builder, signature, arguments):
        where = _element(context, builder, signature, arguments)
        added = context.cast(builder, arguments[2], signature.args[2], array.dtype)
        return builder.atomic_rmw(operation, where, added, "acq_rel")

    return array.dtype(array, index, value), generate


@intrinsic
def atomic_load(typing, array, index):
    def generate(context, builder, signature, arguments):
        where = _element(context, builder, signature, arguments)
        size = context.get_abi_sizeof(context.get_data_type(array.dtype))
        return builder.load_atomic(where, "acquire", size)

    return array.dtype(array, index), generate


@intrinsic
def atomic_store(typing, array, index, value):
    def generate(context, builder, signature, arguments):
        where = _element(context, builder, signature, arguments)
        stored = context.cast(builder, arguments[2], signature.args[2], array.dtype)
        size = context.get_abi_sizeof(context.get_data_type(array.dtype))
        builder.store_atomic(stored, where, "release", size)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def _swap_if_zero(typing, array, value):
    """array[0] = value where it is 0; whether it was."""

    def generate(context, builder, signature, arguments):
        zero = context.get_constant(types.intp, 0)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        new = context.cast(builder, arguments[1], signature.args[1], array.dtype)
        where = builder.gep(data, [zero])
        pair = builder.cmpxchg(where, new.type(0), new, "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(array, value), generate


@intrinsic
def give_core(typing):
    """Let the system run another thread on this core."""

    def generate(context, builder, signature, arguments):
        if not sys.platform.startswith("win"):  # there a waiting thread spins on
            kind = ir.FunctionType(ir.IntType(32), [])
            call = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
            builder.call(call, [])
        return context.get_dummy_value()

    return types.void(), generate


@inlined
def acquire(lock):
    spins = 0
    while not _swap_if_zero(lock, 1):
        while atomic_load(lock, 0) != 0:  # a read leaves the cache line with its owner
            spins += 1
            if spins >= SPINS:
                give_core()
                spins = 0


@inlined
def release(lock):
    atomic_store(lock, 0, 0)


@inlined
def wait_for(array, index, least):
    """Return when array[index] >= least."""
    spins = 0
    while atomic_load(array, index) < least:
        spins += 1
        if spins >= SPINS:
            give_core()
            spins = 0
