"""Settings by name: equal, ordered, hashable and readable however they were made."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import ParameterError
from cellfeed_tuner import Configuration

SETTINGS = st.dictionaries(
    st.sampled_from(["align", "num_threads", "mode"]),
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["a", "b"]),
)
SIZES = st.fixed_dictionaries(
    {},
    optional={
        "block_size": st.integers(1, 99),
        "fetch_factor": st.integers(1, 99),
        "num_workers": st.integers(0, 9),
    },
)


@given(SIZES, SETTINGS)
def test_it_is_the_mapping_that_it_was_made_of(sizes, others):
    made = Configuration(**sizes, **others)
    usual = {"num_workers": 0}
    if {"block_size", "fetch_factor"} & sizes.keys():
        usual |= {"block_size": 1, "fetch_factor": 1}
    assert dict(made) == usual | sizes | others
    assert (made.block_size, made.fetch_factor) == (
        *(sizes.get(name, 1) for name in ("block_size", "fetch_factor")),
    )
    backwards: dict[str, Any] = dict(reversed(dict(made).items()))
    again = Configuration(**backwards)
    assert again == made
    assert hash(again) == hash(made)
    assert pickle.loads(pickle.dumps(made)) == made
    assert eval(repr(made)) == made


@given(st.lists(st.tuples(SIZES, SETTINGS), max_size=6))
def test_any_can_be_sorted(settings):
    made = [Configuration(**sizes, **others) for sizes, others in settings]
    backwards = made[::-1]
    assert sorted(backwards) == sorted(made)


def test_true_and_one_are_the_same_setting():
    assert Configuration(fast=True) == Configuration(fast=1)
    assert hash(Configuration(fast=True)) == hash(Configuration(fast=1))


def test_it_is_no_other_mapping():
    assert Configuration() != dict(Configuration())


@pytest.mark.parametrize("sizes", [{"block_size": 0}, {"fetch_factor": 0}, {"num_workers": -1}])
def test_sizes_below_the_least_are_refused(sizes):
    with pytest.raises(ParameterError, match="must hold, but got"):
        Configuration(**sizes)
