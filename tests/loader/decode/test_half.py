"""float32 becomes the float16 that NumPy makes of it."""

import ctypes

import numpy as np
import pytest

from cellfeed._decode import _kernels as kernels
from cellfeed._decode._kernels._codecs import can_cast


def every_half_and_its_neighbours():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    bits = halves.view(np.uint32).astype(np.int64)
    apart = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF]  # ties and what lies beside them
    near = np.concatenate([bits + sign * each for each in apart for sign in (1, -1)])
    return np.clip(near, 0, (1 << 32) - 1).astype(np.uint32).view(np.float32)


def every_exponent():
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("values", [every_half_and_its_neighbours(), every_exponent()])
def test_it_is_rounded_as_numpy_does(values):
    assert can_cast(values.dtype, np.dtype(np.float16))
    address = kernels.cast_address(values.dtype, np.dtype(np.float16))
    cast = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
    found = np.empty(values.size, np.float16)
    cast(values.ctypes.data, found.ctypes.data, values.size)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = values.astype(np.float16)
    is_nan = np.isnan(values)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan])
