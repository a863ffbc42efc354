import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense

from cellfeed import open_collection
from cellfeed.sampling import Fetch
from cellfeed.stages import FetchStages


@pytest.fixture(params=["csr", "dense"])
def file(request, write_h5ad):
    counts = np.random.default_rng(0).poisson(1.0, size=(50, 8)).astype(np.float32)
    X = sp.csr_matrix(counts) if request.param == "csr" else counts
    return write_h5ad(X, {"number": np.arange(50.0)})


def read(stages, rows):
    """Read rows; return the groups."""
    fetch = Fetch(rows=rows, order=np.arange(rows.size))
    planned = stages.readahead(stages.plan(fetch))
    return [each.to_scipy() for each in stages.read(planned)]


def test_memory_is_used_again_once_nobody_has_it(file):
    def address(stages):
        (cells,) = read(stages, np.arange(50))
        values = cells.X if isinstance(cells.X, np.ndarray) else cells.X.data
        return int(values.ctypes.data)

    with FetchStages(open_collection(file), batch_size=50) as stages:
        assert address(stages) == address(stages)


def test_what_is_kept_stays_as_it_was(file, in_memory):
    expected = in_memory([file])
    with FetchStages(open_collection(file), batch_size=10) as stages:
        kept = [read(stages, np.arange(start, start + 10)) for start in range(40)]
    for start, (cells,) in enumerate(kept):
        assert np.array_equal(dense(cells.X), expected[start : start + 10])


def test_reads_of_growing_and_shrinking_size_are_right(file, in_memory):
    expected = in_memory([file])
    rng = np.random.default_rng(1)
    with FetchStages(open_collection(file, obs=["number"]), batch_size=50) as stages:
        for n_rows in (3, 40, 1, 0, 50, 20):
            rows = np.sort(rng.permutation(50)[:n_rows])
            (cells,) = read(stages, rows)
            assert np.array_equal(dense(cells.X), expected[rows])
            assert np.array_equal(cells.obs["number"], rows)
            assert np.array_equal(cells.rows, rows)


def test_two_readers_do_not_disturb_each_other(file, in_memory):
    collection, expected = open_collection(file), in_memory([file])
    with (
        FetchStages(collection, batch_size=50) as one,
        FetchStages(collection, batch_size=50) as other,
    ):
        (first,) = read(one, np.arange(10))
        read(other, np.arange(30, 50))
    assert np.array_equal(dense(first.X), expected[:10])
