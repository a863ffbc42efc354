import itertools
import sys
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare

from cellfeed.sampling import Permutation, _kernels, derive_key


@pytest.mark.parametrize("key", [0, 2**64 - 1])
def test_is_a_bijection(key):
    for n in range(300):
        images = Permutation(n, key)(np.arange(n))
        assert np.array_equal(np.sort(images), np.arange(n)), n


@given(st.integers(1, 2**62 - 1), st.integers(0, 2**64 - 1), st.data())
def test_maps_distinct_elements_of_a_large_range_to_distinct_images_in_it(n, key, data):
    elements = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=20))
    images = Permutation(n, key)(np.array(elements, dtype=np.int64))
    assert images.dtype == np.int64
    assert len(set(images.tolist())) == len(elements)
    assert np.all((images >= 0) & (images < n))


@given(st.integers(0, 2**62 - 1), st.integers(0, 2**64 - 1), st.data())
def test_images_are_the_same_where_nothing_compiled_is_loaded(n, key, data):
    drawn = data.draw(st.lists(st.integers(0, n - 1), max_size=100)) if n else []
    elements, permute = np.array(drawn, dtype=np.int64), Permutation(n, key)
    images = permute(elements)
    with patch.dict(sys.modules):
        del sys.modules[_kernels.__name__]
        assert np.array_equal(permute(elements), images)


def test_an_image_depends_on_its_element_alone():
    permute, elements = Permutation(1000, key=5), np.arange(1000).reshape(10, 2, 50)
    images = permute(elements)
    assert images.shape == elements.shape
    for index in np.ndindex(elements.shape):
        assert images[index] == permute(elements[index][None])[0]


@pytest.mark.parametrize("n", [*range(2, 17), 100])
def test_every_element_goes_everywhere_equally_often(n):
    n_keys = 200
    images = np.array([Permutation(n, derive_key(n, k))(np.arange(n)) for k in range(n_keys)])
    counts = np.array([np.bincount(column, minlength=n) for column in images.T])
    # The counts of n x n places vary in (n - 1)^2 directions, each with variance n_keys / (n - 1).
    statistic = (n - 1) / n_keys * np.sum((counts - n_keys / n) ** 2)
    assert chi2.sf(statistic, (n - 1) ** 2) > 1e-6


@pytest.mark.parametrize("n", [3, 5])
def test_every_order_is_equally_frequent(n):
    drawn = Counter(
        tuple(Permutation(n, derive_key(k))(np.arange(n)).tolist()) for k in range(1200)
    )
    counts = [drawn[order] for order in itertools.permutations(range(n))]
    assert chisquare(counts).pvalue > 1e-6
