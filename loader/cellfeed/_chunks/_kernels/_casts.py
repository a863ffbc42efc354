"""Compiled conversions of elements from one dtype to another, by address."""

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numba.np.numpy_support import from_dtype

from cellfeed._compiled import compiled, compiled_callback

__all__ = ["cast_address"]

_SIGNATURE = types.void(types.voidptr, types.voidptr, types.int64)
_LARGEST_INT32 = np.iinfo(np.int32).max

# Bits of a float32 without its sign; the last three are bounds of float16.
_INFINITY = 0x7F800000
_TOO_LARGE, _LEAST_NORMAL, _TOO_SMALL = 0x47800000, 0x38800000, 0x33000000

# Casts of floats out of range are undefined in C. NumPy casts via these, and then truncates bits.
_WRAPPED = {
    np.dtype(target): np.dtype(via)
    for target, via in (
        (np.int8, np.int32),
        (np.uint8, np.int32),
        (np.int16, np.int32),
        (np.uint16, np.int32),
        (np.uint32, np.int64),
    )
}


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
        _KEPT.append(_to_half())
        return int(_KEPT[-1].address)
    ins, outs = (from_dtype(_as_number(dtype)) for dtype in (source, target))
    if target == np.bool_:
        function = _to_bool(ins)
    elif of_indices and target == np.int32:
        function = _to_int32(ins)
    elif source.kind == "f" and target in _WRAPPED:
        function = _to_wrapped(ins, from_dtype(_WRAPPED[target]), outs)
    else:
        function = _to_number(ins, outs)
    _KEPT.append(function)
    return int(function.address)


_KEPT: list[Any] = []  # compiled functions live only as long as they are referenced


def _as_number(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint8) if dtype == np.bool_ else dtype


def _to_number(ins: Any, outs: Any) -> Any:
    @compiled_callback(_SIGNATURE, listed=False)
    def cast(source, target, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        values, result = carray(source, (n,), ins), carray(target, (n,), outs)
        for i in range(n):
            result[i] = outs(values[i])

    return cast


def _to_wrapped(ins: Any, via: Any, outs: Any) -> Any:
    @compiled_callback(_SIGNATURE, listed=False)
    def cast(source, target, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        values, result = carray(source, (n,), ins), carray(target, (n,), outs)
        for i in range(n):
            result[i] = outs(via(values[i]))

    return cast


def _to_int32(ins: Any) -> Any:
    @compiled_callback(_SIGNATURE, listed=False)
    def cast(source, target, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        values, result = carray(source, (n,), ins), carray(target, (n,), types.int32)
        for i in range(n):
            fits = 0 <= values[i] <= _LARGEST_INT32
            result[i] = types.int32(values[i]) if fits else types.int32(-1)

    return cast


def _to_bool(ins: Any) -> Any:
    @compiled_callback(_SIGNATURE, listed=False)
    def cast(source, target, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        values, result = carray(source, (n,), ins), carray(target, (n,), types.uint8)
        for i in range(n):
            result[i] = values[i] != 0

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
    @compiled_callback(_SIGNATURE, listed=False)
    def cast(source, target, n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        values, result = carray(source, (n,), types.uint32), carray(target, (n,), types.uint16)
        for i in range(n):
            result[i] = _half(values[i])

    return cast
