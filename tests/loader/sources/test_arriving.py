"""Sources whose rows arrive: they pass the suite, wrong rows are reported, fetches announced."""

import multiprocessing
import pickle
import threading
import time
import weakref
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.loader.matrices import dense
from tests.loader.read_options import parameters_of
from tests.loader.sources.arriving import Arriving, Rows
from tests.loader.sources.expecting import matrix_of
from tests.loader.sources.suites import Suite

from cellfeed import BlockShuffling, CellDataset, Collection, FormatError
from cellfeed.sources import CsrRows, Location, StoredElement, expand


class TestArriving(Suite):
    max_examples = 15

    def stored(self, path, case):
        location = Location(f"memory://case/{path.name}")
        return Arriving(location, {"X": Rows(case.matrix, case.var.index)}, case.obs)


class Wrong(StoredElement):
    shape, dtype, layout = (3, 4), np.dtype("float32"), "csr"

    def __init__(self, rows):
        self._rows = rows

    def read_rows(self, runs):
        return self._rows


ONE = np.ones(1, np.float32)


def of_csr(indptr, indices, data=None):
    data = np.ones(len(indices)) if data is None else np.array(data)
    return CsrRows(np.array(indptr), np.array(indices), data.astype(np.float32), 4)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (of_csr([0, 0, 0, 1], [-1]), r"column index is outside \[0, 4"),
        (of_csr([0, 0, 0, 1], [1 << 40]), r"column index is outside \[0, 4"),
        (of_csr([0, 0, 0, 1], [1.0]), "column indices of dtype float64"),
        (of_csr([0, 0, 0, 2], [0]), r"an array of shape \(1,\) for 2 elements"),
        (of_csr([0, 0, 0, 1], [0], [1, 2]), r"an array of shape \(2,\) for 1 elements"),
        (of_csr([0, 2, 0, 2], [0, 1]), "row pointers that do not ascend from 0"),
        (of_csr([1, 1, 1, 2], [0, 1]), "row pointers that do not ascend from 0"),
        (np.ones((3, 4), np.float32), "ndarray for an element of layout 'csr'"),
        (
            CsrRows(np.array([0, 0]), ONE[:0].astype(int), ONE[:0], 4),
            r"shape \(1, 4\), but \(3, 4\)",
        ),
        (CsrRows(np.array([0, 0, 0, 1]), np.array([4]), ONE, 4), r"column index is outside \[0, 4"),
    ],
)
@pytest.mark.parametrize("beside_dense", [False, True])
def test_wrong_rows(rows, said, beside_dense):
    sources = [Arriving(Location("memory://wrong"), {"X": Wrong(rows)})]
    if beside_dense:  # so that sparse rows are made dense
        sources.append(
            Arriving(Location("memory://b"), {"X": Rows(np.eye(4), ["0", "1", "2", "3"])})
        )
    with pytest.raises(FormatError, match=f"`Wrong` returned wrong rows: .*{said}"):
        Collection(sources)[:3]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([1, 0, 0], "the lengths of rows differ from the stated ones"),
        ([0, 2, -1], "a row of length -1"),
        ([1], r"lengths of shape \(1,\) and dtype int64"),
        ([0.0, 0.0, 1.0], "dtype float64"),
    ],
)
def test_wrong_lengths(lengths, said):
    class Lengths(Wrong):
        def row_lengths(self, runs):
            return np.array(lengths)

    element = Lengths(of_csr([0, 0, 0, 1], [2]))
    with pytest.raises(FormatError, match=f"`Lengths` returned wrong rows: .*{said}"):
        Collection([Arriving(Location("memory://wrong"), {"X": element})])[:3]


class Alone:
    """Counts calls that another one overlaps; mixed into sources and elements."""

    overlaps = 0
    _inside = threading.RLock()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in READING:
            return found

        def call(*arguments):
            if not Alone._inside.acquire(blocking=False):
                Alone.overlaps += 1
                return found(*arguments)
            try:
                time.sleep(0.001)  # another thread runs meanwhile
                return found(*arguments)
            finally:
                Alone._inside.release()

        return call


READING = {"read_rows", "row_lengths", "chunked", "load_tables"} | {
    "read_obs",
    "read_obs_rows",
    "obs_names",
    "plain_obs",
    "read_var",
}


class RowsAlone(Alone, Rows):
    def row_lengths(self, runs):
        return np.diff(self._matrix.indptr)[expand(runs)] if self.layout == "csr" else None


class ArrivingAlone(Alone, Arriving):
    pass


def test_one_thread_at_a_time_reads_from_a_source(monkeypatch):
    """Two datasets and the training loop read one source, whose rows are planned ahead."""
    monkeypatch.setattr(Alone, "overlaps", 0)
    genes = [f"gene{k}" for k in range(MATRIX.shape[1])]
    elements: dict[str, StoredElement] = {
        "X": RowsAlone(MATRIX, genes),
        "layers/dense": RowsAlone(DENSE, genes),
    }
    obs = pd.DataFrame({"cell": pd.Categorical(np.arange(len(DENSE)))})
    source = ArrivingAlone(Location("memory://alone"), elements, obs)
    collection = Collection([source], obs=["cell"], obs_names=True)
    assert Alone.overlaps == 0
    datasets = [CellDataset(collection, BlockShuffling(4), 4, 3, seed=k) for k in range(2)]
    collection.load_tables()
    for one, other in zip(*datasets, strict=True):
        assert len(one) == len(other)
        read: Any = collection.read_obs(["cell"])["cell"]
        assert read.codes[one.rows].tolist() == [int(name) for name in one.obs_names]
        assert len(collection.var) == len(genes)
    assert Alone.overlaps == 0


@pytest.mark.process
def test_a_fork_may_read_where_a_thread_of_its_parent_does():
    source = ArrivingAlone(Location("memory://alone"), {"X": RowsAlone(MATRIX, range(5))})
    held = threading.Thread(target=source.reading.__enter__)
    held.start()
    held.join()
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=lambda: source.reading.__enter__())  # noqa: PLW0108 - of the fork
    child.start()
    child.join(60)
    assert child.exitcode == 0
    pickle.loads(pickle.dumps(source)).reading.__enter__()


def test_an_element_that_reads_nothing():
    class Nothing(StoredElement):
        shape, dtype, layout = (3, 4), np.dtype("float32"), "dense"

    with pytest.raises(TypeError, match=r"abstract class Nothing with.*read_rows"):
        Nothing()  # type: ignore[abstract]


MATRIX = matrix_of()
DENSE = MATRIX.toarray()
N_FETCHES, CELLS_PER_FETCH = 8, 12


class Coming:
    """What an element returns; it counts as long as it lives."""


class Expecting(Rows):
    """Rows that keep record of what is expected and read."""

    expected_row_bytes = 10.0

    def __init__(self, matrix):
        super().__init__(matrix, [f"gene{k}" for k in range(matrix.shape[1])])
        self.expected, self.read, self.alive = [], [], []
        self.fails = False
        self.waits_for = 0  # fetches that are expected before the first is read
        self._has_come = threading.Condition()
        self._coming = []

    @property
    def n_coming(self):
        return sum(each() is not None for each in self._coming)

    def expect(self, runs):
        coming = Coming()
        self._coming.append(weakref.ref(coming))
        self.expected.append(expand(runs).tolist())
        self.alive.append(self.n_coming)
        with self._has_come:
            self._has_come.notify_all()
        return coming

    def read_rows(self, runs):
        if self.fails:
            raise OSError("reading failed")
        with self._has_come:
            assert self._has_come.wait_for(lambda: len(self.expected) >= self.waits_for, 60)
        self.read.append(expand(runs).tolist())
        return super().read_rows(runs)


def dataset_over(element, **options):
    collection = Collection([Arriving(Location("postgresql://host/cells"), {"X": element})])
    sizes = {"batch_size": 4, "fetch_factor": 3, "seed": 0}
    return CellDataset(collection, BlockShuffling(4), **parameters_of(sizes | options))


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize(("prefetch", "most"), [(1, 2), (2, 3), (5, 6), (None, 8)])
def test_fetches_are_expected_ahead_and_let_go(layout, prefetch, most):
    element = Expecting(MATRIX if layout == "csr" else DENSE)
    element.waits_for = prefetch or N_FETCHES
    for minibatch in dataset_over(element, prefetch=prefetch):
        rows = np.asarray(minibatch.rows)
        found = dense(minibatch.X)
        assert np.array_equal(found, DENSE[rows])
    assert element.expected == element.read
    assert len(element.expected) == N_FETCHES
    assert (prefetch or N_FETCHES) <= max(element.alive) <= most
    assert element.n_coming == 0


def test_no_more_than_the_budget_is_under_way():
    fetch = CELLS_PER_FETCH * Expecting.expected_row_bytes
    element = Expecting(MATRIX)
    element.waits_for = 2
    for _ in dataset_over(element, prefetch=6, prefetch_bytes=int(2 * fetch)):
        pass
    assert max(element.alive) == 2
    assert element.n_coming == 0


def test_what_is_not_read_is_let_go():
    element = Expecting(MATRIX)
    minibatches = iter(dataset_over(element, prefetch=4))
    next(minibatches)
    minibatches.close()
    assert element.n_coming == 0
    element.fails = True
    with pytest.raises(OSError, match="reading failed"):
        next(iter(dataset_over(element, prefetch=4)))
    assert element.n_coming == 0


def test_an_element_that_expects_nothing_is_not_asked():
    element = Expecting(MATRIX)
    element.expected_row_bytes = 0.0
    assert sum(len(each.rows) for each in dataset_over(element, prefetch=4)) == len(DENSE)
    assert element.expected == []


def test_rows_that_are_read_at_once():
    element = Expecting(MATRIX)
    collection = dataset_over(element).collection
    assert np.array_equal(collection[[5, 1, 5]].X.toarray(), DENSE[[5, 1, 5]])
    assert element.expected == element.read == [[1, 5]]
    assert element.n_coming == 0
