"""Counting labels, against a dictionary."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cellfeed_tuner._entropy import count_labels


@given(
    hnp.arrays(
        st.sampled_from([np.int8, np.int16, np.int64]),
        st.integers(0, 50),
        elements=st.integers(-3, 20),
    ),
    st.sampled_from([0, 10**12]),
)
def test_each_label_is_counted(codes, offset):
    codes = np.where(codes < 0, codes, codes.astype(np.int64) + offset)
    expected = Counter(codes.tolist())
    found = count_labels(codes)
    assert found.counts.tolist() == [expected[code] for code in sorted(expected) if code >= 0]
    assert found.n_missing == sum(n for code, n in expected.items() if code < 0)
    assert found.n_rows == codes.size


@pytest.mark.parametrize("n_rows", [(1 << 20) - 1, (1 << 20) + 1])
def test_it_counts_across_the_ends_of_its_parts(n_rows):
    codes = np.arange(n_rows) % 7 - 1
    found = count_labels(codes)
    assert found.n_missing == (codes == -1).sum()
    assert np.array_equal(found.counts, np.bincount(codes[codes >= 0]))
