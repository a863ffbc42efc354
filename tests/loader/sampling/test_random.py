"""Random words, and permutations made of them: compiled and not."""

import itertools
import sys
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import chi2, chisquare

from cellfeed.sampling import Permutation, _kernels, derive_key, random_below, random_words

keys = st.integers(0, 2**64 - 1)
FIRST_WORDS_OF_SPLITMIX64 = {  # as published with the generator
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
    1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423],
}


class TestRandomWords:
    @pytest.mark.parametrize(("key", "words"), FIRST_WORDS_OF_SPLITMIX64.items())
    def test_is_splitmix64(self, key, words):
        assert random_words(key, np.arange(3)).tolist() == words

    @given(keys, hnp.arrays(np.int64, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)))
    def test_a_word_depends_on_its_number_alone(self, key, counters):
        before = counters.copy()
        words = random_words(key, counters)
        assert words.shape == counters.shape
        assert words.dtype == np.uint64
        assert np.array_equal(counters, before)
        for index in np.ndindex(counters.shape):
            assert words[index] == random_words(key, np.array([counters[index]]))[0]

    @pytest.mark.parametrize("shift", [0, 28, 56])
    def test_bits_are_even(self, shift):
        words = random_words(derive_key(1), np.arange(1 << 16))
        bytes_ = (words >> np.uint64(shift)) & np.uint64(255)
        assert chisquare(np.bincount(bytes_.astype(int), minlength=256)).pvalue > 1e-6


class TestDeriveKey:
    def test_depends_on_every_part_its_sign_its_size_and_the_order(self):
        parts = [(), (0,), (0, 0), (1,), (-1,), (-2,), (1, 0), (0, 1), (2**64,), (2**64 + 1,)]
        parts += [(2**128,), (0, 2**64), (1, 2, 3), (3, 2, 1)]
        assert len({derive_key(*part) for part in parts}) == len(parts)

    @given(st.lists(st.integers(), max_size=4))
    def test_is_a_key(self, parts):
        assert 0 <= derive_key(*parts) < 2**64


class TestRandomBelow:
    @given(keys, st.integers(1, 2**40))
    def test_is_below(self, key, bound):
        assert 0 <= random_below(key, bound) < bound

    @pytest.mark.parametrize("bound", [2, 7, 30])
    def test_is_uniform(self, bound):
        drawn = [random_below(derive_key(number), bound) for number in range(6000)]
        assert chisquare(np.bincount(drawn, minlength=bound)).pvalue > 1e-6


@pytest.mark.parametrize("key", [0, 2**64 - 1])
def test_is_a_bijection(key):
    for n in range(300):
        images = Permutation(n, key)(np.arange(n))
        assert np.array_equal(np.sort(images), np.arange(n)), n


@given(st.integers(0, 2**62 - 1), keys, st.data())
def test_maps_distinct_elements_of_a_large_range_to_distinct_images_in_it(n, key, data):
    """The same where nothing compiled is loaded."""
    drawn = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=100)) if n else []
    elements, permute = np.array(drawn, np.int64), Permutation(n, key)
    images = permute(elements)
    assert images.dtype == np.int64
    assert np.unique(images).size == elements.size
    assert np.all((images >= 0) & (images < n))
    with patch.dict(sys.modules):
        sys.modules.pop(_kernels.__name__, None)
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
