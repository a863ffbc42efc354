# ruff: noqa: ARG001 - numba fixes what such functions take
"""Calling C functions by address from compiled code, and raw memory.

Numbers in memory are read and written through pointers (`elements`, `row_of`). numba compiles these
several times faster than arrays, whose shapes, negative indices and references take code too.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellfeed._compiled import compiled

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BLOCK = ir.VectorType(_I64, 4)
BLOCK_BYTES = 32
LANES = 16
_LANES_TYPE = ir.VectorType(ir.IntType(16), LANES)


def _instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator of a function that writes the instructions of a call in compiled code.

    Parameters
    ----------
    result, arguments
        numba's types. The function takes LLVM's builder, and the values of the arguments.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            found = write(builder, *values)
            return context.get_dummy_value() if result == types.void else found

        @intrinsic
        @wraps(write)
        def typed(*_types: Any) -> Any:
            return result(*arguments), codegen

        return typed

    return decorate


@intrinsic
def call(_context: Any, address: Any, arguments: Any) -> Any:
    """``call(address, (a, b, ...))``: call a C function of integers and pointers; returns int64.

    An argument that C declares as int is passed in a register of 64 bits, of which C reads the
    lower half. If C declares the result as int, only its lower half is valid: cast it to int32.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        target, packed = values
        unpacked = [builder.extract_value(packed, i) for i in range(len(signature.args[1]))]
        function = ir.FunctionType(_I64, [_I64] * len(unpacked))
        return builder.call(builder.inttoptr(target, function.as_pointer()), unpacked)

    return types.int64(types.int64, arguments), codegen


@_instruction(types.voidptr, types.int64)
def pointer(builder: Any, address: Any) -> Any:
    """Return an address as a pointer for `numba.carray`."""
    return builder.inttoptr(address, cgutils.voidptr_t)


@intrinsic
def elements(_context: Any, address: Any, dtype: Any) -> Any:
    """Return a pointer to numbers of a dtype; indices are not checked, and cannot be negative."""
    target = types.CPointer(dtype.dtype)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(target))

    return target(types.int64, dtype), codegen


@intrinsic
def pointer_to(_context: Any, array: Any) -> Any:
    """Return a pointer to an array's first element."""
    target = types.CPointer(array.dtype)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.bitcast(data, context.get_value_type(target))

    return target(array), codegen


@intrinsic
def address_of(_context: Any, place: Any) -> Any:
    """Return the address of an array's first element, or of what a pointer points to."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (of,), (value,) = signature.args, values
        if isinstance(of, types.Array):
            value = context.make_array(of)(context, builder, value).data
        return builder.ptrtoint(value, _I64)

    return types.int64(place), codegen


@_instruction(types.CPointer(types.int64), types.int64, types.int64, types.int64)
def row_of(builder: Any, table: Any, k: Any, n_columns: Any) -> Any:
    """Return a pointer to row ``k`` of a table of int64, given the address of the table."""
    return builder.gep(builder.inttoptr(table, _I64.as_pointer()), [builder.mul(k, n_columns)])


def stack(n: int) -> Any:
    """Return a function that reserves ``n`` int64 until the compiled function returns."""

    @_instruction(types.CPointer(types.int64))
    def reserve(builder: Any) -> Any:
        return cgutils.alloca_once(builder, _I64, size=n)

    return reserve


_seconds_and_nanoseconds = stack(2)


@compiled("int64(int64)", inner=True)
def nanoseconds(clock: int) -> int:
    """Return the time of a monotonic clock; ``clock`` is the address of `CLOCK`."""
    now = _seconds_and_nanoseconds()
    call(clock, (time.CLOCK_MONOTONIC, address_of(now)))
    return int(now[0] * 1_000_000_000 + now[1])


_ADDRESS = types.int64


@_instruction(types.void, _ADDRESS, _ADDRESS, types.int64)
def copy_bytes(builder: Any, target: Any, source: Any, n: Any) -> None:
    """Call ``memcpy(target, source, n)`` on addresses."""
    to, from_ = (builder.inttoptr(each, cgutils.voidptr_t) for each in (target, source))
    cgutils.raw_memcpy(builder, to, from_, n, 1)


@_instruction(types.int64, _ADDRESS)
def int32_at(builder: Any, address: Any) -> Any:
    """Return the int32 at an address, which need not be aligned."""
    return builder.sext(builder.load(builder.inttoptr(address, _I32.as_pointer()), align=1), _I64)


@_instruction(types.uint64, _ADDRESS)
def load_word(builder: Any, address: Any) -> Any:
    """Return the 8 bytes at an address, which need not be aligned."""
    return builder.load(builder.inttoptr(address, _I64.as_pointer()), align=1)


@_instruction(types.void, _ADDRESS, types.uint64)
def store_word(builder: Any, address: Any, word: Any) -> None:
    """Write 8 bytes to an address, which need not be aligned."""
    builder.store(word, builder.inttoptr(address, _I64.as_pointer()), align=1)


@_instruction(types.void, _ADDRESS, types.int64)
def clear_bytes(builder: Any, target: Any, n: Any) -> None:
    """Call ``memset(target, 0, n)`` on an address.

    (Assigning to a slice compiles numba's messages about shapes too, which takes seconds.)
    """
    cgutils.memset(builder, builder.inttoptr(target, cgutils.voidptr_t), n, 0)


@_instruction(types.void, _ADDRESS, _ADDRESS, types.int64)
def stream_blocks(builder: Any, target: Any, source: Any, n: Any) -> None:
    """Copy ``n`` blocks of `BLOCK_BYTES`, bypassing the cache; ``target`` must be aligned to them.

    The writes fill whole cache lines, which therefore need not be read first. Other threads may see
    them out of order until `finish_streams`.
    """
    streamed = builder.module.add_metadata([ir.Constant(_I32, 1)])
    with cgutils.for_range(builder, n, intp=_I64) as loop:
        offset = builder.mul(loop.index, ir.Constant(_I64, BLOCK_BYTES))
        into, out_of = (
            builder.inttoptr(builder.add(start, offset), _BLOCK.as_pointer())
            for start in (target, source)
        )
        block = builder.load(out_of, align=1)
        builder.store(block, into, align=BLOCK_BYTES).set_metadata("nontemporal", streamed)


@_instruction(types.void, _ADDRESS)
def prefetch(builder: Any, address: Any) -> None:
    """Begin to load the cache line at an address, and to look up its page; nothing waits for it."""
    of = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], of)
    how = [ir.Constant(_I32, n) for n in (0, 0, 1)]  # to read, once, of data
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), *how])


@_instruction(types.void)
def finish_streams(builder: Any) -> None:
    """Wait until this thread's streamed writes are in memory, before announcing them to others.

    That takes as long as copying a hundred elements or so, so it is done once for many streams.
    """
    builder.fence("seq_cst")


@_instruction(types.uint16, _ADDRESS, _ADDRESS, types.uint16)
def add_up_lanes(builder: Any, target: Any, source: Any, before: Any) -> Any:
    """Add up `LANES` integers of 16 bits to what came before them, and return the last sum.

    Sums of 1, 2, 4 and 8 neighbours are computed in parallel, so that none waits for all others.
    """
    to, from_ = (builder.inttoptr(each, _LANES_TYPE.as_pointer()) for each in (target, source))
    sums, zeros = builder.load(from_, align=1), ir.Constant(_LANES_TYPE, None)
    for shift in (1, 2, 4, 8):
        chosen = [lane - shift if lane >= shift else LANES for lane in range(LANES)]
        mask = ir.Constant(ir.VectorType(_I32, LANES), chosen)
        sums = builder.add(sums, builder.shuffle_vector(sums, zeros, mask))
    last = builder.extract_element(sums, ir.Constant(_I32, LANES - 1))
    single = builder.insert_element(zeros, before, ir.Constant(_I32, 0))
    everywhere = ir.Constant(ir.VectorType(_I32, LANES), None)
    sums = builder.add(sums, builder.shuffle_vector(single, zeros, everywhere))
    builder.store(sums, to, align=1)
    return builder.add(last, before)


@_instruction(types.int64, _ADDRESS, types.int64)
def atomic_add(builder: Any, address: Any, n: Any) -> Any:
    """Add to the int64 at an address, and return its previous value."""
    counter = builder.inttoptr(address, _I64.as_pointer())
    return builder.atomic_rmw("add", counter, n, "seq_cst")


@_instruction(types.uint32, types.float32)
def bits_of_float(builder: Any, value: Any) -> Any:
    """Return the bits of a float32."""
    return builder.bitcast(value, _I32)


@_instruction(types.float32, types.uint32)
def float_of_bits(builder: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return builder.bitcast(bits, ir.FloatType())


@_instruction(types.int64, types.uint64)
def popcount(builder: Any, word: Any) -> Any:
    """Return how many bits of an integer of 64 bits are set."""
    return builder.ctpop(word)


@_instruction(types.float64, types.float64, types.float64)
def add_unordered(builder: Any, sum_: Any, value: Any) -> Any:
    """Add to a sum whose terms may be added in any order."""
    return builder.fadd(sum_, value, flags=("reassoc",))


@_instruction(types.float64, types.float64, types.float64)
def divide(builder: Any, dividend: Any, divisor: Any) -> Any:
    """Divide as processors do, without the branch for Python's ZeroDivisionError."""
    return builder.fdiv(dividend, divisor)


@_instruction(types.float32, types.float32, types.float32, types.float32)
def multiply_add(builder: Any, factor: Any, other: Any, summand: Any) -> Any:
    """Return ``factor * other + summand`` in float32, rounded once."""
    return builder.fma(factor, other, summand)


# Counters that threads and processes update concurrently.


@compiled("void(int64, int64)")
def count(address: int, n: int) -> None:
    """Add to the int64 at an address."""
    atomic_add(address, n)
