"""Processor instructions that numba does not offer, for any processor that LLVM supports."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, types
from numba.core import cgutils

intrinsic: Any = extending.intrinsic  # its types know the generator, not what is called


@intrinsic
def prefetch(typing, array, index, line):
    """Prefetch the cache line of array[index], or the `line`-th line after it.

    It goes into the second-level cache, which can wait for more lines at a time than the first.
    """

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        step = 64 // context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        index = builder.add(arguments[1], builder.mul(arguments[2], arguments[2].type(step)))
        where = builder.bitcast(builder.gep(data, [index]), ir.IntType(8).as_pointer())
        second_level = 2
        _call_prefetch(builder, where, second_level)
        return context.get_dummy_value()

    return types.void(array, index, line), generate


@intrinsic
def prefetch_once(typing, array, index):
    """Prefetch the cache line of array[index], which is read once: it pushes no other line out."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        where = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        _call_prefetch(builder, where, 0)
        return context.get_dummy_value()

    return types.void(array, index), generate


def _call_prefetch(builder, where, level):
    byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, data_not_code = i32(0), i32(1)
    builder.call(call, [where, read, i32(level), data_not_code])


@intrinsic
def copy(typing, to, at, source, start, count):
    """to[at : at + count] = source[start : start + count], which do not overlap."""

    def generate(context, builder, signature, arguments):
        (a, b), (i, j) = arguments[::2][:2], arguments[1::2]
        to = builder.gep(context.make_array(signature.args[0])(context, builder, a).data, [i])
        source = builder.gep(context.make_array(signature.args[2])(context, builder, b).data, [j])
        size = context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        cgutils.raw_memcpy(builder, to, source, arguments[4], size)
        return context.get_dummy_value()

    return types.void(to, at, source, start, count), generate


@intrinsic
def match(typing, entries, bucket, wanted):
    """Compare an id with the four entries of a bucket: equal ones set bits 0, 2, 4 and 6."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        line = ir.VectorType(i64, 8)
        here = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), line.as_pointer()))
        here.align = 8
        one = builder.insert_element(ir.Constant(line, ir.Undefined), arguments[2], i32(0))
        all_ = builder.shuffle_vector(
            one, ir.Constant(line, ir.Undefined), ir.Constant(ir.VectorType(i32, 8), [0] * 8)
        )
        equal = builder.bitcast(builder.icmp_unsigned("==", here, all_), i8)
        return builder.zext(builder.and_(equal, i8(0x55)), i64)

    return types.uint64(entries, bucket, wanted), generate


@intrinsic
def lowest(typing, bits):
    """The number of the lowest bit that is set; at least one must be."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.uint64(bits), generate


@intrinsic
def fma(typing, x, y, z):
    """x * y + z rounded once, as torch's loops do it."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return x(x, x, x), generate
