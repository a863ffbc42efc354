import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import chisquare

from cellfeed.sampling import derive_key, random_below, random_words

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
