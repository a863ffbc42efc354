"""Labels inside blocks, against a loop over the blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.tuner.entropies import plug_in

from cellfeed_tuner import _entropy as module

labels = hnp.arrays(np.int8, st.integers(1, 60), elements=st.integers(-1, 4))


@given(labels, st.integers(1, 70), st.sampled_from([1, 16, 1 << 17]))
def test_the_entropy_within_blocks_is_that_of_a_loop_over_them(codes, block_size, at_once):
    blocks = [codes[i : i + block_size].tolist() for i in range(0, codes.size, block_size)]
    expected = sum(len(block) * plug_in(block) for block in blocks) / codes.size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS_AT_ONCE", at_once)
        found = module.within_block_bits(codes, block_size)
    assert found == pytest.approx(expected, abs=1e-12)
