import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cellfeed._runs import count_rows, merge_consecutive, split_at
from cellfeed.sources import expand

row_sets = st.sets(st.integers(0, 60)).map(lambda rows: np.array(sorted(rows), dtype=np.int64))


@given(row_sets)
def test_merge_and_expand_are_inverse(rows):
    runs = merge_consecutive(rows)
    assert runs.shape == (len(runs), 2)
    assert runs.dtype == np.int64
    assert np.array_equal(expand(runs), rows)
    assert count_rows(runs) == rows.size


@given(row_sets)
def test_runs_are_as_long_as_they_can_be(rows):
    runs = merge_consecutive(rows)
    assert np.all(runs[:, 1] > runs[:, 0])
    assert np.all(runs[1:, 0] > runs[:-1, 1])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=6))
def test_expand_takes_ranges_that_are_empty_or_overlap(ranges):
    runs = np.array([(start, start + n) for start, n in ranges], dtype=np.int64).reshape(-1, 2)
    expected = [row for start, n in ranges for row in range(start, start + n)]
    assert expand(runs).tolist() == expected


@given(row_sets, st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_split_gives_each_part_its_own_rows(rows, lengths):
    boundaries = np.cumsum([0, *lengths, 61])  # parts may be empty
    parts = list(split_at(merge_consecutive(rows), boundaries))
    expected = {}
    for part, (start, stop) in enumerate(itertools.pairwise(boundaries)):
        inside = rows[(rows >= start) & (rows < stop)] - start
        if inside.size:
            expected[part] = inside.tolist()
    assert [part for part, _ in parts] == list(expected)
    assert {part: expand(local).tolist() for part, local in parts} == expected
