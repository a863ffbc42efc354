"""Compiled: casting elements, and transforming values of rows in place."""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import (
    add_unordered,
    address_of,
    atomic_add,
    bits_of_float,
    call,
    divide,
    elements,
    float_of_bits,
    multiply_add,
    pointer_to,
    row_of,
)

# Compiled conversions of elements from one dtype to another, by address.

_SIGNATURE = "void(int64, int64, int64)"
_LARGEST_INT32 = np.iinfo(np.int32).max

# Bits of a float32 without its sign; the last three are bounds of float16.
_INFINITY = 0x7F800000
_TOO_LARGE, _LEAST_NORMAL, _TOO_SMALL = 0x47800000, 0x38800000, 0x33000000


@cache
def cast_address(source: np.dtype[Any], target: np.dtype[Any], *, of_indices: bool = False) -> int:
    """Return the address of a C function ``cast(source, target, n)``; 0 if none is needed.

    Parameters
    ----------
    source, target
        Native dtypes for which `can_cast` holds.
    of_indices
        Whether the elements are indices, of which those out of range become -1.
    """
    if source == target:
        return 0
    if target == np.float16:
        return int(_to_half().address)
    ins, outs = (from_dtype(_as_number(dtype)) for dtype in (source, target))
    if of_indices and target == np.int32:
        function = _to_int32(ins)
    else:
        # Casts of floats out of range are undefined in C; NumPy truncates the bits of integers.
        is_wrapped = source.kind == "f" and target.kind in "iu" and target.itemsize < 8
        function = _to_number(ins, types.int64 if is_wrapped else ins, outs)
    return int(function.address)


def _as_number(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint8) if dtype == np.bool_ else dtype


def _to_number(ins: Any, via: Any, outs: Any) -> Any:
    @compiled(_SIGNATURE, callback=True)
    def cast(source, target, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        values, result = elements(source, ins), elements(target, outs)
        for i in range(n):
            result[i] = outs(via(values[i]))

    return cast


def _to_int32(ins: Any) -> Any:
    @compiled(_SIGNATURE, callback=True)
    def cast(source, target, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        values, result = elements(source, ins), elements(target, types.int32)
        for i in range(n):
            fits = 0 <= values[i] <= _LARGEST_INT32
            result[i] = types.int32(values[i]) if fits else types.int32(-1)

    return cast


@compiled("uint16(uint32)", inner=True)
def _half(bits: Any) -> Any:
    """Return the bits of the nearest float16 of a float32, given by its bits; ties go to even."""
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size > _INFINITY:  # no remaining bits may turn it into an infinity
        return sign | 0x7E00 | ((size >> 13) & 0x1FF)
    if size >= _TOO_LARGE:
        return sign | 0x7C00
    if size >= _LEAST_NORMAL:
        rounded = size + 0xFFF + ((size >> 13) & 1)
        return sign | ((rounded - (112 << 23)) >> 13)
    if size < _TOO_SMALL:
        return sign
    fraction, shift = (size & 0x7FFFFF) | 0x800000, 126 - (size >> 23)
    result, rest, middle = fraction >> shift, fraction & ((1 << shift) - 1), 1 << (shift - 1)
    return sign | (result + (rest > middle or (rest == middle and result & 1)))


def _to_half() -> Any:
    @compiled(_SIGNATURE, callback=True)
    def cast(source, target, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        values, result = elements(source, types.uint32), elements(target, types.uint16)
        for i in range(n):
            result[i] = _half(values[i])

    return cast


# Bounds for float32: for values after division, and for the factor that replaces the division.
_LARGEST_PLAIN, _LARGEST_FACTOR = 2.0**100, 2.0**60
_FLOAT_INFINITY = np.uint32(0x7F800000)
# For float32: bits of the square root of 1/2, of the mantissa, and the bias of the exponent.
_ROOT_BITS = np.uint32(np.float32(math.sqrt(0.5)).view(np.uint32))
_MANTISSA_BITS, _BIAS = np.uint32(23), np.uint32(127)
_ONE, _LN2 = np.float32(1.0), np.float32(math.log(2.0))
# Coefficients of (log(1 + f) - f) / f^2 in powers of f, with 1 + f between the square roots of 1/2
# and 2: fitted by least squares, reweighted to minimize the largest relative error of the
# logarithm, 2^-28.
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (
    np.float32(each)
    for each in (
        -0.5,
        0.33333403,
        -0.25001091,
        0.19998246,
        -0.16613545,
        0.14237872,
        -0.13270701,
        0.12633245,
        -0.07258227,
    )
)


_FLOATS = "float32", "float64"


@compiled(*(f"Tuple((float64, uint32))(CPointer({each}), int64)" for each in _FLOATS), inner=True)
def _total_and_highest(values: NDArray[Any], n: int) -> Any:
    """Return the sum of values, and what `_highest` returns, in one pass."""
    total, highest = 0.0, np.uint32(0)
    for i in range(n):
        total = add_unordered(total, np.float64(values[i]))
        highest = max(highest, bits_of_float(np.float32(values[i])))
    return total, highest


@compiled(*(f"uint32(CPointer({each}), int64)" for each in _FLOATS), inner=True)
def _highest(values: NDArray[Any], n: int) -> Any:
    """Return the largest bit pattern of values as float32.

    Bit patterns of negative numbers are above those of infinity and NaN, and these are above those
    of positive numbers.
    """
    highest = np.uint32(0)
    for i in range(n):
        highest = max(highest, bits_of_float(np.float32(values[i])))
    return highest


@compiled(*(f"int64(CPointer({each}), int64, float64, uint32)" for each in _FLOATS), inner=True)
def _log1p(values: NDArray[Any], n: int, divisor: float, highest: int) -> int:
    """Replace values by the logarithm of 1 + value / ``divisor``; count those that have none.

    Those of float32 that are finite, non-negative, and not huge after multiplication ("plain") are
    computed without branches, so that many are computed at a time: 1 + y is 2^k (1 + f) with 1 + f
    between the square roots of 1/2 and 2, and log(1 + f) is a polynomial. The rounding errors of y
    and of f are carried along, so that the result is off by less than one unit in the last place.
    ``highest`` comes from `_highest`.
    """
    factor, n_undefined = divide(1.0, divisor), 0
    is_usual = 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR
    largest = np.float64(float_of_bits(highest)) * factor
    if highest >= _FLOAT_INFINITY or largest >= _LARGEST_PLAIN or not is_usual:
        for i in range(n):
            scaled = divide(np.float64(values[i]), divisor)
            n_undefined += scaled <= -1.0
            values[i] = math.log1p(scaled)
        return n_undefined
    upper = np.float32(factor)
    lower = np.float32(factor - np.float64(upper))
    for i in range(n):
        value = np.float32(values[i])
        y = value * upper
        rest = multiply_add(value, lower, multiply_add(value, upper, -y))
        # numba computes with 64 bits unless each result is cast back.
        k = np.uint32(np.uint32(bits_of_float(_ONE + y) - _ROOT_BITS) >> _MANTISSA_BITS)
        power = float_of_bits(np.uint32(np.uint32(_BIAS - k) << _MANTISSA_BITS))  # 2^-k
        less = power - _ONE
        f = multiply_add(y, power, less)
        rest = multiply_add(rest, power, multiply_add(y, power, less - f))
        series = multiply_add(f, multiply_add(f, _L8, _L7), _L6)
        series = multiply_add(f, multiply_add(f, series, _L5), _L4)
        series = multiply_add(f, multiply_add(f, series, _L3), _L2)
        series = multiply_add(f, multiply_add(f, series, _L1), _L0)
        rest = multiply_add(f * f, series, multiply_add(-f, rest, rest))
        exponent = np.float32(np.int32(k))
        most = multiply_add(exponent, _LN2, f)
        values[i] = most + (multiply_add(exponent, _LN2, -most) + f + rest)
    return 0


@compiled(
    *(f"void(CPointer({each}), int64, int64, float64, int64, int64, int64)" for each in _FLOATS),
    inner=True,
)
def _apply(
    values: NDArray[Any],
    n: int,
    kind: int,
    target: float,
    non_counts: int,
    step: int,
    itemsize: int,
) -> None:
    """Apply a step, the first one if its number is 0, to a row."""
    divisor = 1.0
    if kind == fields.LOG1P:
        highest = _highest(values, n)
    else:
        total, highest = _total_and_highest(values, n)
        if total != 0.0:  # rows whose sum is 0 are not changed
            divisor = divide(total, target)
        if step == 0 and math.floor(total) != total:
            atomic_add(non_counts + 8, 1)
    if kind != fields.NORMALIZED:
        if itemsize != 4:
            highest = _FLOAT_INFINITY  # so that none counts as plain
        n_undefined = _log1p(values, n, divisor, highest)
        if n_undefined:
            atomic_add(non_counts, n_undefined)
    elif itemsize == 4:
        # The error of a multiplication in float64 is far below float32's.
        factor = divide(1.0, divisor)
        for i in range(n):
            values[i] = np.float64(values[i]) * factor
    else:
        for i in range(n):
            values[i] = divide(np.float64(values[i]), divisor)


def _applies(dtype: Any, itemsize: int) -> Any:
    @compiled("int64(int64, int64, int64)", callback=True)
    def apply(row, n, steps_at):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        """Apply steps, see `_fields`, to a row."""
        values, steps = elements(row, dtype), elements(steps_at, np.int64)
        numbers, non_counts = elements(steps_at, np.float64), steps[fields.NON_COUNTS]
        for k in range(steps[fields.N_STEPS]):
            at = fields.FIRST_STEP + 2 * k
            _apply(values, n, np.int64(numbers[at]), numbers[at + 1], non_counts, k, itemsize)
        return 0

    return apply


_APPLIES = {4: _applies(types.float32, 4), 8: _applies(types.float64, 8)}


def applier(itemsize: int) -> int:
    """Return the address of the function that applies steps to a row of float32 or float64.

    It takes the address of the row, its number of values, and the address of the steps.
    """
    return int(_APPLIES[itemsize].address)


@compiled("void(int64[:,::1], int64, int64[::1], int64, int64)")
def transform_rows(groups: Ints, itemsize: int, steps: Ints, first: int, stop: int) -> None:
    """Transform some rows.

    Parameters
    ----------
    groups
        A table of rows that are stored together: number of the first row, address of the values,
        number of values per row if dense, and address of the int32 row pointer if sparse. The first
        column of an additional last row marks the end.
    itemsize
        Size of a value in bytes.
    steps
        The steps; see `_fields`.
    first, stop
        Number of the first row to transform, and of the one after the last.
    """
    g, groups_at, steps_at = 0, address_of(groups), address_of(steps)
    apply = pointer_to(steps)[fields.APPLY]
    for i in range(first, stop):
        while i >= row_of(groups_at, g + 1, fields.N_GROUP_COLUMNS)[fields.FIRST_ROW]:
            g += 1
        group = row_of(groups_at, g, fields.N_GROUP_COLUMNS)
        number, n = i - group[fields.FIRST_ROW], group[fields.ROW_LENGTH]
        start = number * n
        if group[fields.POINTERS]:
            pointers = elements(group[fields.POINTERS], np.int32)
            start = np.int64(pointers[number])
            n = np.int64(pointers[number + 1]) - start
        call(apply, (group[fields.VALUES] + start * itemsize, n, steps_at))
