"""Sorting gives what NumPy gives, compiled and not."""

import sys
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from cellfeed.sampling import _kernels
from cellfeed.sampling._plan import distinct, sorted_order

SHAPES = of_numpy.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=40)
FEW = st.sampled_from([0, 1, 1 << 8, 1 << 40, 2**64 - 1])  # which repeat


@pytest.fixture(params=["compiled", "not compiled"], autouse=True, scope="module")
def is_compiled(request):
    with patch.dict(sys.modules):
        if request.param == "not compiled":
            del sys.modules[_kernels.__name__]
        yield


@given(of_numpy.arrays(np.uint64, SHAPES, elements=FEW | st.integers(0, 2**64 - 1)))
def test_equal_words_stay_in_order(words):
    found = sorted_order(words)
    assert found.dtype == np.intp
    np.testing.assert_array_equal(found, np.argsort(words, axis=1, kind="stable"))


def test_words_of_many_rows_of_which_only_some_are_contiguous():
    words = np.random.default_rng(0).integers(0, 2**64, (3, 5_000), np.uint64)
    for some in (words, words[:, ::2], words[::2], words % 100):
        np.testing.assert_array_equal(sorted_order(some), np.argsort(some, axis=1, kind="stable"))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@given(st.data())
def test_distinct_rows(dtype, data):
    some = st.sampled_from([-1, 0, 1, 256, 1 << 30])
    drawn = data.draw(st.lists(some | st.integers(-1000, 1000), max_size=60))
    rows = np.array(drawn, dtype)
    found, expected = distinct(rows), np.unique(rows, return_inverse=True)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(own, other)
