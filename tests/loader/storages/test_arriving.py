"""Sources whose rows arrive pass the suite, and what is wrong with their rows is reported."""

import itertools

import numpy as np
import pytest
from tests.loader.storages.arriving import Arriving, Rows

from cellfeed import Collection, FormatError
from cellfeed.sources import CsrRows, Location, StoredElement
from cellfeed.testing import SourceConformance


class TestArriving(SourceConformance):
    max_examples = 15

    @pytest.fixture
    def write(self):
        numbers = itertools.count()

        def write(case):
            location = Location(f"memory://case/{next(numbers)}")
            return Arriving(location, {"X": Rows(case.matrix, case.var.index)}, case.obs)

        return write


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
