import pickle
import zipfile

import datasets
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    FormatError,
    HuggingFaceCells,
    MemoryMappedCells,
    MultiIndexable,
    ParameterError,
    PathError,
)

N_ROWS, N_VARS = 97, 23
COUNTS = np.random.default_rng(0).poisson(0.3, (N_ROWS, N_VARS)).astype(np.float32)
COUNTS[10:14] = 0  # cells of which nothing was counted
X = sp.csr_matrix(COUNTS)
ROWS = st.lists(st.integers(0, N_ROWS - 1), max_size=2 * N_ROWS)


def lists(values):
    """Return a list for each cell, of NumPy's, which Arrow keeps the dtype of."""
    return np.split(values, X.indptr[1:-1])


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mapped")
    sp.save_npz(folder / "X.npz", X, compressed=False)
    with zipfile.ZipFile(folder / "X.npz") as archive:
        archive.extractall(folder)
    return MemoryMappedCells(folder)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hugging_face")
    columns = {"genes": lists(X.indices), "expressions": lists(X.data), "row": np.arange(N_ROWS)}
    datasets.Dataset.from_dict(columns).save_to_disk(folder, num_shards=3)
    return HuggingFaceCells(datasets.load_from_disk(folder), n_vars=N_VARS, obs=["row"])


class TestMemoryMappedCells:
    @given(rows=ROWS)
    def test_rows_in_any_order(self, mapped, rows):
        assert_equal(mapped[rows], X[rows])
        assert_equal(mapped[np.array(rows, dtype=np.int64)], X[rows])

    def test_slices(self, mapped):
        assert_equal(mapped[5:40], X[5:40])
        assert_equal(mapped[-3:], X[-3:])
        assert mapped[4:4].shape == (0, N_VARS)

    def test_a_row_that_is_not_there(self, mapped):
        with pytest.raises(IndexError, match="rows 3 to 97 are asked for, but there are 97"):
            mapped[[3, N_ROWS]]
        with pytest.raises(IndexError, match="rows -1 to 3"):
            mapped[[3, -1]]

    @pytest.mark.parametrize("rows", [3, 2.0, [0.5], [[1, 2]], X.indptr[:-1] > 5], ids=str)
    def test_what_are_no_row_numbers(self, mapped, rows):
        with pytest.raises(IndexError, match="must be a slice, or integers in one dimension"):
            mapped[rows]

    def test_is_pickled_as_its_folder(self, mapped):
        pickled = pickle.dumps(mapped)
        assert len(pickled) < X.data.nbytes
        assert_equal(pickle.loads(pickled)[:], X)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_feeds_a_training(self, mapped, num_workers):
        cells = MultiIndexable(X=mapped, row=np.arange(N_ROWS))
        dataset = CellDataset(cells, BlockShuffling(8), batch_size=10, fetch_factor=3, seed=0)
        delivered = list(dataset.loader(num_workers))
        rows = np.concatenate([batch["row"] for batch in delivered])
        assert sorted(rows) == list(range(N_ROWS))
        assert_equal(sp.vstack([batch["X"] for batch in delivered]), X[rows])

    def test_files_that_are_missing_or_do_not_fit(self, mapped, tmp_path):
        with pytest.raises(PathError, match=r"data\.npy is missing; unzip what"):
            MemoryMappedCells(tmp_path)
        for path in (*mapped.files, mapped.files[0].with_name("shape.npy")):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        assert_equal(MemoryMappedCells(tmp_path)[:], X)
        np.save(tmp_path / "indptr.npy", X.indptr[:-1])
        with pytest.raises(FormatError, match="are not of one CSR matrix; write them again"):
            MemoryMappedCells(tmp_path)
        np.save(tmp_path / "indptr.npy", X.indptr)
        np.save(tmp_path / "indices.npy", X.indices + 1)
        with pytest.raises(FormatError, match="are not of one CSR matrix; write them again"):
            MemoryMappedCells(tmp_path)[:]
        np.save(tmp_path / "format.npy", b"csc")
        with pytest.raises(FormatError, match="are not of one CSR matrix; write them again"):
            MemoryMappedCells(tmp_path)
        (tmp_path / "indptr.npy").write_bytes(mapped.files[2].read_bytes()[:-8])
        with pytest.raises(FormatError, match=r"indptr\.npy is not a whole \.npy file"):
            MemoryMappedCells(tmp_path)


class TestHuggingFaceCells:
    @given(rows=ROWS)
    def test_rows_in_any_order(self, hugging_face, rows):
        cells = hugging_face[rows]
        assert_equal(cells["X"], X[rows])
        assert cells["row"].tolist() == rows

    def test_slices(self, hugging_face):
        assert len(hugging_face) == N_ROWS
        assert_equal(hugging_face[30:70]["X"], X[30:70])  # over the border of two files
        assert len(hugging_face[4:4]) == 0

    def test_is_pickled_as_its_files(self, hugging_face):
        assert len(hugging_face.files) == 3
        assert_equal(pickle.loads(pickle.dumps(hugging_face))[:]["X"], X)

    def test_a_selection_is_read_as_it_is_ordered(self, hugging_face):
        order = np.random.default_rng(0).permutation(N_ROWS)[:50]
        folder = hugging_face.files[0].parent
        selected = datasets.load_from_disk(folder).select(order)
        cells = HuggingFaceCells(selected, n_vars=N_VARS)
        assert_equal(cells[7:30]["X"], X[order[7:30]])

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_feeds_a_training(self, hugging_face, num_workers):
        dataset = CellDataset(
            hugging_face, BlockShuffling(8), batch_size=10, fetch_factor=3, seed=0
        )
        delivered = list(dataset.loader(num_workers))
        rows = np.concatenate([batch["row"] for batch in delivered])
        assert sorted(rows) == list(range(N_ROWS))
        assert_equal(sp.vstack([batch["X"] for batch in delivered]), X[rows])

    def test_columns_that_are_not_there(self):
        dataset = datasets.Dataset.from_dict({"genes": [[1]], "counts": [[2.0]]})
        with pytest.raises(ColumnError, match="no column 'expressions'; its columns are: genes, c"):
            HuggingFaceCells(dataset, n_vars=2)
        cells = HuggingFaceCells(dataset, n_vars=2, values="counts")
        assert cells[:]["X"].toarray().tolist() == [[0.0, 2.0]]
        with pytest.raises(ParameterError, match="`n_vars >= 1` must hold"):
            HuggingFaceCells(dataset, n_vars=0, values="counts")
        with pytest.raises(ParameterError, match="give either `n_vars`, the number of genes, or"):
            HuggingFaceCells(dataset, values="counts")
        with pytest.raises(ParameterError, match="`gene_ids` must be distinct integers"):
            HuggingFaceCells(dataset, gene_ids=[3, 1, 3], values="counts")

    @given(ids=st.lists(st.integers(0, 2 * N_VARS), unique=True, min_size=1), rows=ROWS)
    def test_genes_are_known_by_their_ids(self, hugging_face, ids, rows):
        """Only those of the list are delivered, in its order."""
        dataset = datasets.load_from_disk(hugging_face.files[0].parent)
        padded = np.pad(COUNTS, ((0, 0), (0, N_VARS + 1)))
        cells = HuggingFaceCells(dataset, gene_ids=ids)
        assert_equal(cells[rows]["X"], sp.csr_matrix(padded[:, ids])[rows])

    @pytest.mark.parametrize(
        ("genes", "values", "message"),
        [
            ([[0, 1], [1]], [[1.0], [1.0, 2.0]], "the lists of a cell differ in length"),
            ([[0, 3]], [[1.0, 2.0]], "numbers from 0 to 3 do not fit n_vars=3"),
            ([[-2, 1]], [[1.0, 2.0]], "numbers from -2 to 1 do not fit n_vars=3"),
            ([[0], None], [[1.0], [2.0]], "'genes' of the data set: not every cell has a list"),
            ([[0]], [["one"]], "'expressions' of the data set: not every cell has a list of num"),
            ([[0]], [[None]], "'expressions' of the data set: not every cell has a list of num"),
            ([[0.5]], [[1.0]], "'genes' of the data set: not every cell has a list of numbers"),
        ],
    )
    def test_lists_that_are_no_cells(self, genes, values, message):
        dataset = datasets.Dataset.from_dict({"genes": genes, "expressions": values})
        with pytest.raises(FormatError, match=message):
            HuggingFaceCells(dataset, n_vars=3)[:]


def assert_equal(found, wanted):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert np.array_equal(found.toarray(), wanted.toarray())
