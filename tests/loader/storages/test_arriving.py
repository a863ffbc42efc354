"""Sources whose rows arrive: they pass the suite, wrong rows are reported, fetches announced."""

import threading
import weakref

import numpy as np
import pytest
from tests.loader.matrices import dense
from tests.loader.read_options import parameters_of
from tests.loader.storages.arriving import Arriving, Rows
from tests.loader.storages.expecting import matrix_of
from tests.loader.storages.suites import Suite

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


@pytest.mark.parametrize(
    ("rows", "said"),
    [
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
    with pytest.raises(FormatError, match=f"`Wrong.read_rows` returned wrong rows: .*{said}"):
        Collection(sources)[:3]


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
