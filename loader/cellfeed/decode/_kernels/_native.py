# ruff: noqa: ARG001 - numba fixes what such functions take
"""Calling C functions by address from compiled code, and raw memory.

Numbers in memory are read and written through pointers (`elements`, `row_of`). numba compiles these
several times faster than arrays, whose shapes, negative indices and references take code too.
"""

import time
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellfeed._compiled import compiled

_I64 = ir.IntType(64)
_BLOCK = ir.VectorType(_I64, 4)
BLOCK_BYTES = 32
LANES = 16
_LANES_TYPE = ir.VectorType(ir.IntType(16), LANES)


@intrinsic
def call(typingctx: Any, address: Any, arguments: Any) -> Any:
    """``call(address, (a, b, ...))``: call a C function of integers and pointers; returns int64.

    An argument that C declares as int is passed in a register of 64 bits, of which C reads the
    lower half. If C declares the result as int, only its lower half is valid: cast it to int32.
    """
    signature = types.int64(types.int64, arguments)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        target, packed = values
        unpacked = [builder.extract_value(packed, i) for i in range(len(signature.args[1]))]
        function = ir.FunctionType(_I64, [_I64] * len(unpacked))
        return builder.call(builder.inttoptr(target, function.as_pointer()), unpacked)

    return signature, codegen


@intrinsic
def nanoseconds(typingctx: Any, clock: Any) -> Any:
    """Return the time of a monotonic clock; ``clock`` is the address of `CLOCK`."""
    signature = types.int64(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        time_spec = cgutils.alloca_once(builder, _I64, size=2)
        function = ir.FunctionType(ir.IntType(32), [_I64, _I64.as_pointer()])
        target = builder.inttoptr(values[0], function.as_pointer())
        builder.call(target, [ir.Constant(_I64, time.CLOCK_MONOTONIC), time_spec])
        fraction = builder.load(builder.gep(time_spec, [ir.Constant(_I64, 1)]))
        seconds = builder.mul(builder.load(time_spec), ir.Constant(_I64, 1_000_000_000))
        return builder.add(seconds, fraction)

    return signature, codegen


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Return an address as a pointer for `numba.carray`."""
    signature = types.voidptr(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return signature, codegen


@intrinsic
def elements(typingctx: Any, address: Any, dtype: Any) -> Any:
    """Return a pointer to numbers of a dtype; indices are not checked, and cannot be negative."""
    target = types.CPointer(dtype.dtype)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(target))

    return target(types.int64, dtype), codegen


@intrinsic
def pointer_to(typingctx: Any, array: Any) -> Any:
    """Return a pointer to an array's first element."""
    target = types.CPointer(array.dtype)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.bitcast(data, context.get_value_type(target))

    return target(array), codegen


@intrinsic
def address_of(typingctx: Any, place: Any) -> Any:
    """Return the address of an array's first element, or of what a pointer points to."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (of,), (value,) = signature.args, values
        if isinstance(of, types.Array):
            value = context.make_array(of)(context, builder, value).data
        return builder.ptrtoint(value, _I64)

    return types.int64(place), codegen


@intrinsic
def row_of(typingctx: Any, table: Any, k: Any, n_columns: Any) -> Any:
    """Return a pointer to row ``k`` of a table of int64, given the address of the table."""
    target = types.CPointer(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.mul(values[1], values[2])
        return builder.gep(builder.inttoptr(values[0], context.get_value_type(target)), [place])

    return target(types.int64, types.int64, types.int64), codegen


def stack(n: int) -> Callable[[], Any]:
    """Return a function that reserves ``n`` int64 until the compiled function returns."""

    @intrinsic
    def reserve(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return cgutils.alloca_once(builder, _I64, size=n)

        return types.CPointer(types.int64)(), codegen

    reserved: Callable[[], Any] = reserve
    return reserved


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, n: Any) -> Any:
    """Call ``memcpy(target, source, n)`` on addresses."""
    signature = types.void(types.int64, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        to, from_ = (builder.inttoptr(value, cgutils.voidptr_t) for value in values[:2])
        cgutils.raw_memcpy(builder, to, from_, values[2], 1)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    """Return the 8 bytes at an address, which need not be aligned."""
    signature = types.uint64(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], _I64.as_pointer()), align=1)

    return signature, codegen


@intrinsic
def store_word(typingctx: Any, address: Any, word: Any) -> Any:
    """Write 8 bytes to an address, which need not be aligned."""
    signature = types.void(types.int64, types.uint64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        target = builder.inttoptr(values[0], _I64.as_pointer())
        builder.store(values[1], target, align=1)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def clear_bytes(typingctx: Any, target: Any, n: Any) -> Any:
    """Call ``memset(target, 0, n)`` on an address.

    (Assigning to a slice compiles numba's messages about shapes too, which takes seconds.)
    """
    signature = types.void(types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(values[0], cgutils.voidptr_t), values[1], 0)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def stream_blocks(typingctx: Any, target: Any, source: Any, n: Any) -> Any:
    """Copy ``n`` blocks of `BLOCK_BYTES`, bypassing the cache; ``target`` must be aligned to them.

    The writes fill whole cache lines, which therefore need not be read first. Other threads may see
    them out of order until `finish_streams`.
    """
    signature = types.void(types.int64, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        to, from_, n_blocks = values
        streamed = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, n_blocks, intp=_I64) as loop:
            offset = builder.mul(loop.index, ir.Constant(_I64, BLOCK_BYTES))
            into, out_of = (
                builder.inttoptr(builder.add(start, offset), _BLOCK.as_pointer())
                for start in (to, from_)
            )
            block = builder.load(out_of, align=1)
            builder.store(block, into, align=BLOCK_BYTES).set_metadata("nontemporal", streamed)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Begin to load the cache line at an address, and to look up its page; nothing waits for it."""
    signature = types.void(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        flag = ir.IntType(32)
        fnty = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], fnty)
        line = builder.inttoptr(values[0], cgutils.voidptr_t)
        how = [ir.Constant(flag, n) for n in (0, 0, 1)]  # to read, once, of data
        builder.call(function, [line, *how])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def finish_streams(typingctx: Any) -> Any:
    """Wait until this thread's streamed writes are in memory, before announcing them to others.

    That takes as long as copying a hundred elements or so, so it is done once for many streams.
    """
    signature = types.void()

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_up_lanes(typingctx: Any, target: Any, source: Any, before: Any) -> Any:
    """Add up `LANES` integers of 16 bits to what came before them, and return the last sum.

    Sums of 1, 2, 4 and 8 neighbours are computed in parallel, so that none waits for all others.
    """
    signature = types.uint16(types.int64, types.int64, types.uint16)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        to, from_ = (builder.inttoptr(value, _LANES_TYPE.as_pointer()) for value in values[:2])
        sums, zeros = builder.load(from_, align=1), ir.Constant(_LANES_TYPE, None)
        for shift in (1, 2, 4, 8):
            chosen = [lane - shift if lane >= shift else LANES for lane in range(LANES)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), chosen)
            sums = builder.add(sums, builder.shuffle_vector(sums, zeros, mask))
        last = builder.extract_element(sums, ir.Constant(ir.IntType(32), LANES - 1))
        first_lane = ir.Constant(ir.IntType(32), 0)
        single = builder.insert_element(zeros, values[2], first_lane)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
        sums = builder.add(sums, builder.shuffle_vector(single, zeros, everywhere))
        builder.store(sums, to, align=1)
        return builder.add(last, values[2])

    return signature, codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, n: Any) -> Any:
    """Add to the int64 at an address, and return its previous value."""
    signature = types.int64(types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        counter = builder.inttoptr(values[0], _I64.as_pointer())
        return builder.atomic_rmw("add", counter, values[1], "seq_cst")

    return signature, codegen


def _reinterpreted(source: Any, target: Any, of_llvm: ir.Type) -> Any:
    @intrinsic
    def reinterpret(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], of_llvm)

        return target(source), codegen

    return reinterpret


# Reinterpret the bits as another type.
bits_of_float = _reinterpreted(types.float32, types.uint32, ir.IntType(32))
float_of_bits = _reinterpreted(types.uint32, types.float32, ir.FloatType())


@intrinsic
def popcount(typingctx: Any, word: Any) -> Any:
    """Return how many bits of an integer of 64 bits are set."""
    signature = types.int64(types.uint64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ctpop(values[0])

    return signature, codegen


@intrinsic
def add_unordered(typingctx: Any, sum_: Any, value: Any) -> Any:
    """Add to a sum whose terms may be added in any order."""
    signature = types.float64(types.float64, types.float64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fadd(*values, flags=("reassoc",))

    return signature, codegen


@intrinsic
def divide(typingctx: Any, dividend: Any, divisor: Any) -> Any:
    """Divide as processors do, without the branch for Python's ZeroDivisionError."""
    signature = types.float64(types.float64, types.float64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fdiv(*values)

    return signature, codegen


@intrinsic
def multiply_add(typingctx: Any, factor: Any, other: Any, summand: Any) -> Any:
    """Return ``factor * other + summand`` in the dtype of ``factor``, rounded once."""
    signature = factor(factor, factor, factor)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return signature, codegen


# Counters that threads and processes update concurrently.


@compiled("void(int64, int64)")
def count(address: int, n: int) -> None:
    """Add to the int64 at an address."""
    atomic_add(address, n)
