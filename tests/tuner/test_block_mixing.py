"""Labels inside blocks, against a loop over the blocks and against shuffled rows."""

from collections import Counter
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cellfeed import ParameterError
from cellfeed_tuner import block_mixing
from cellfeed_tuner._entropy import _block_mixing as module
from cellfeed_tuner._entropy._block_mixing import within_block_bits

labels = hnp.arrays(np.int8, st.integers(1, 60), elements=st.integers(-1, 4))


def plug_in(block) -> float:
    known = [label for label in block if label >= 0]
    n = len(known)
    return -sum(c / n * log2(c / n) for c in Counter(known).values()) if n else 0.0


@given(labels, st.integers(1, 70), st.sampled_from([1, 16, 1 << 17]))
def test_the_entropy_within_blocks_is_that_of_a_loop_over_them(codes, block_size, at_once):
    blocks = [codes[i : i + block_size].tolist() for i in range(0, codes.size, block_size)]
    expected = sum(len(block) * plug_in(block) for block in blocks) / codes.size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS_AT_ONCE", at_once)
        (found,) = block_mixing(codes, [block_size])
    assert found.within_bits == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_rows_in_random_order_have_what_random_order_is_expected_to_have(missing):
    rng = np.random.default_rng(0)
    codes = np.where(rng.random(500) < missing, -1, rng.integers(0, 5, 500))
    for found in block_mixing(codes, [3, 64, 150, 600]):
        within = np.array(
            [within_block_bits(rng.permutation(codes), found.block_size) for _ in range(300)]
        )
        error = within.std(ddof=1) / len(within) ** 0.5
        assert within.mean() == pytest.approx(found.random_bits, abs=4 * error + 1e-9)


def test_one_label_to_a_block_is_not_mixed_and_labels_that_take_turns_are_more_than_random():
    homogeneous, turns = np.repeat(np.arange(6), 64), np.tile(np.arange(4), 96)
    assert block_mixing(homogeneous, [64])[0].share_of_random == 0
    assert block_mixing(turns, [64])[0].share_of_random > 1
    assert block_mixing(np.full(10, -1), [4])[0].share_of_random == 1


def test_impossible_input_is_refused():
    with pytest.raises(ParameterError, match="block_size"):
        block_mixing([0, 1], [0])
    with pytest.raises(ParameterError, match="integer codes"):
        block_mixing([0.5], [1])
