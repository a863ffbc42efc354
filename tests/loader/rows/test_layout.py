"""Where rows go in memory that is not allocated yet: a group and an offset in one word."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import ParameterError
from cellfeed.bytes._buffers import bind, destination, groups_of
from cellfeed.rows import lay_out

REFUSED = r"^a fetch has at most 8,388,608 minibatches of at most .*; give a smaller `fetch_factor`"


@given(group=st.integers(0, 1 << 24), offset=st.integers(0, 1 << 42))
def test_destinations_are_bound_or_refused(group, offset):
    given_ones = np.array([group]), np.array([offset])
    if group >= 1 << 23 or offset >= 1 << 40:
        with pytest.raises(ParameterError, match=REFUSED):
            destination(*given_ones)
        return
    found = destination(*given_ones)
    assert groups_of(found).tolist() == [group]
    bases = np.broadcast_to(np.int64(1 << 44), group + 1)
    assert bind(found, bases).tolist() == [(1 << 44) + offset]


@pytest.mark.parametrize("layout", ["csr", "dense", "ragged"])
@pytest.mark.parametrize("n", [1 << 20, 1 << 38])
def test_a_minibatch_of_terabytes_is_refused(layout, n):
    """Its last rows would lie in the memory of the next one."""
    shape = {"csr": (100,), "dense": (n,), "ragged": ()}[layout]

    def laid_out():
        lengths, bounds = np.full(3, n), np.array([0, 2, 3])
        dtype = np.dtype(np.float64)
        return lay_out(layout, lengths, np.arange(3), bounds, row_shape=shape, dtype=dtype)

    if n < 1 << 38:
        assert len(laid_out()[0]) == 2
        return
    refused = r"non-zeros are too many .* fewer than 2\^31" if layout == "csr" else REFUSED
    with pytest.raises(ParameterError, match=refused):
        laid_out()
