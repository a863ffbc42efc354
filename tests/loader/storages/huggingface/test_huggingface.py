"""HuggingFace datasets: which genes, which rows, and what is said of others."""

import json
import os
import pickle
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.sources.cells import labels_of
from tests.loader.sources.suites import Suite
from tests.loader.storages.huggingface.arrow_files import dataset_of, write_dataset

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    FormatError,
    HuggingFaceSource,
    MismatchError,
    ParameterError,
    PathError,
    StateError,
    open_collection,
)
from cellfeed.storages.huggingface import _source

datasets = pytest.importorskip("datasets")

N_ROWS, N_VARS = 97, 23
COUNTS = np.random.default_rng(0).poisson(0.3, (N_ROWS, N_VARS)).astype(np.float32)
COUNTS[10:14] = 0  # cells of which nothing was counted
X = sp.csr_matrix(COUNTS)
ROWS = st.lists(st.integers(0, N_ROWS - 1), max_size=2 * N_ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 10)  # rows of a record batch
        where = tmp_path_factory.mktemp("arrow") / "cells"
        return write_dataset(where, X, pd.DataFrame({"row": np.arange(N_ROWS)}), num_shards=3)


@pytest.fixture(scope="module")
def dataset(folder):
    return datasets.load_from_disk(str(folder))


def read(source, rows=slice(None)):
    return open_collection(source)[rows].X.toarray()


@pytest.fixture(scope="module")
def in_memory():
    return dataset_of(X, pd.DataFrame())


def genes_of(ids):
    """Return the parameters for genes that are known, and named, by ids."""
    return {"gene_table": pd.DataFrame({"token_id": ids}, index=[*map(str, ids)])}


@given(rows=ROWS, is_in_memory=st.booleans(), seed=st.integers(0, 9))
def test_genes_are_known_by_their_ids(folder, in_memory, rows, is_in_memory, seed):
    """They are delivered in the order of the table."""
    given, ids = in_memory if is_in_memory else folder, np.random.default_rng(seed).permutation(40)
    padded = np.pad(COUNTS, ((0, 0), (0, 40 - N_VARS)))
    collection = open_collection(HuggingFaceSource(given, **genes_of(ids)))
    assert collection.var_names.tolist() == list(map(str, ids))
    assert np.array_equal(collection[rows].X.toarray(), padded[:, ids][rows])


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """Return cells whose genes are numbered from 3, and which begin with 1: in files, in memory."""
    lists = [np.split(each, X.indptr[1:-1]) for each in (X.indices + 3, X.data)]
    columns = {"genes": [np.append(np.int32(1), each) for each in lists[0]]}
    columns |= {"expressions": [np.append(np.float32(-2), each) for each in lists[1]]}
    made = datasets.Dataset.from_dict(columns)
    where = tmp_path_factory.mktemp("markers") / "cells"
    made.save_to_disk(where)
    return where, made


@given(rows=ROWS, is_in_memory=st.booleans(), seed=st.integers(0, 9))
def test_markers_are_left_out(marked, rows, is_in_memory, seed):
    """All that follows is delivered, whatever order the ids are in."""
    ids = 3 + np.random.default_rng(seed).permutation(N_VARS)
    with_marker = marked[is_in_memory]
    collection = open_collection(HuggingFaceSource(with_marker, **genes_of(ids), n_markers=1))
    assert np.array_equal(collection[rows].X.toarray(), COUNTS[:, ids - 3][rows])
    picked = open_collection(
        HuggingFaceSource(with_marker, **genes_of(ids), n_markers=1), genes=[str(ids[4])]
    )
    assert np.array_equal(picked[rows].X.toarray(), COUNTS[:, ids[4:5] - 3][rows])


def test_numbers_that_are_not_in_the_table(marked):
    said = r"gene number that is not .* larger `n_vars` or a `gene_table` of all, and `n_markers=1`"
    for options in (genes_of(range(3, 12)) | {"n_markers": 1}, genes_of(range(3, 3 + N_VARS))):
        with pytest.raises(FormatError, match=said):
            read(HuggingFaceSource(marked[0], **options))


def test_genes_that_are_known_by_ids_are_joined_by_names(folder):
    order = np.random.default_rng(0).permutation(N_VARS)
    table = pd.DataFrame({"token_id": order, "length": range(N_VARS)})
    named = table.set_axis([f"gene {k}" for k in order])
    every = pd.DataFrame({"token_id": range(N_VARS)}, index=[f"gene {k}" for k in range(N_VARS)])
    sources = [
        HuggingFaceSource(folder, gene_table=named),
        HuggingFaceSource(folder, gene_table=every),
    ]
    assert sources[0].read_var().equals(named)
    collection = open_collection(sources, genes=["gene 2", "gene 0"])
    wanted = np.vstack([COUNTS[:, [2, 0]]] * 2)
    assert np.array_equal(collection[:].X.toarray(), wanted)
    lacking = table.set_axis([*named.index[1:], None])
    unnamed = HuggingFaceSource(folder, gene_table=lacking)
    with pytest.raises(MismatchError, match="1 gene has no name"):
        open_collection([unnamed, sources[0]], join_vars="outer")


@pytest.mark.parametrize(
    ("choose", "rows"),
    [
        (lambda each: each, np.arange(N_ROWS)),
        (lambda each: each.select([3, 1, 90]), [3, 1, 90]),
        (lambda each: each.select(range(15, 60)), np.arange(15, 60)),
        (lambda each: each.select(range(15, 60)).select([9, 2]), [24, 17]),
        (lambda each: datasets.concatenate_datasets([each, each]), [*range(N_ROWS)] * 2),
        (lambda each: each.rename_columns({"expressions": "genes", "genes": "g"}), range(N_ROWS)),
        (lambda each: each.add_column("plate", [0] * N_ROWS), range(N_ROWS)),
    ],
)  # fmt: skip
def test_rows_and_columns_of_an_object(dataset, choose, rows):
    """They are read from the memory into which the library has mapped files."""
    chosen = choose(dataset)
    genes, values = ("g", "genes") if "g" in chosen.column_names else ("genes", "expressions")
    source = HuggingFaceSource(chosen, n_vars=N_VARS, genes=genes, values=values)
    for each in (source, pickle.loads(pickle.dumps(source))):
        collection = open_collection(each, obs=["row"])
        assert collection.describe()["is_fast"].all()
        assert np.array_equal(collection[:].X.toarray(), COUNTS[rows])
        assert np.array_equal(collection[:].obs["row"], rows)


def test_an_object_whose_file_was_replaced(tmp_path):
    """It has the cells that the library mapped, though the file is as large as before."""
    where, other, obs = tmp_path / "cells", tmp_path / "other", pd.DataFrame({"row": range(N_ROWS)})
    write_dataset(where, X, obs)
    write_dataset(other, X * 2, obs)
    dataset = datasets.load_from_disk(str(where))
    for path in other.glob("*.arrow"):
        path.replace(where / path.name)
    collection = open_collection(HuggingFaceSource(dataset, n_vars=N_VARS))
    assert np.array_equal(collection[:].X.toarray(), COUNTS)


@pytest.mark.parametrize("rows", [range(30), list(range(30, 0, -1))])
def test_states_are_of_the_chosen_rows(dataset, rows):
    def of(rows):
        collection = open_collection(HuggingFaceSource(dataset.select(rows), n_vars=N_VARS))
        return CellDataset(collection, BlockShuffling(4), 8, seed=0)

    iterator = iter(before := of(rows))
    next(iterator)
    of(rows).load_state_dict(before.state_dict())
    for others in (range(30, 60), range(1, 60, 2)):
        with pytest.raises(StateError, match="the state is of other data"):
            of(others).load_state_dict(before.state_dict())


def test_what_is_not_in_files_as_in_memory(tmp_path):
    """Compressed buffers are decompressed into memory by pyarrow."""
    arrow = pytest.importorskip("pyarrow")
    table = dataset_of(X, pd.DataFrame()).data.table
    options = arrow.ipc.IpcWriteOptions(compression="zstd")
    with arrow.ipc.new_stream(tmp_path / "a.arrow", table.schema, options=options) as stream:
        stream.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    (tmp_path / "dataset_info.json").write_text("{}")
    collection = open_collection(tmp_path)
    assert np.array_equal(collection[[5, 3]].X.toarray(), COUNTS[[5, 3]])


def test_class_labels_are_categories(tmp_path):
    labels = datasets.ClassLabel(names=["b", "a"])
    columns = {"genes": [[0], [1], [1]], "expressions": [[1.0], [2.0], [3.0]], "line": [1, None, 0]}
    cells = datasets.Dataset.from_dict(columns).cast_column("line", labels)
    cells.save_to_disk(tmp_path / "cells")
    for given_as in (tmp_path / "cells", cells):
        collection = open_collection(HuggingFaceSource(given_as), obs=["line"])
        assert labels_of(collection, "line") == ["a", None, "b"]


def test_no_table_of_genes_is_needed(folder):
    assert open_collection(folder).n_vars == 1 + X.indices.max()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"values": "counts"},
            ColumnError,
            "no column 'counts'; give .*, from: genes, expressions",
        ),
        ({"n_vars": 0}, ParameterError, "`n_vars >= 1` must hold"),
        ({"n_vars": 1 << 27}, FormatError, "gene numbers up to 134217727, which are no columns"),
        ({"n_markers": -1}, ParameterError, "`n_markers >= 0` must hold"),
        ({"n_vars": "3"}, ParameterError, "`n_vars` must be"),
        ({"n_markers": "1"}, ParameterError, "`n_markers` must be"),
        ({"n_markers": 1.0}, ParameterError, "`n_markers` must be"),
        (genes_of([3, 1, 3]), FormatError, "'token_id' of the .* must have distinct integers"),
        (genes_of([-1, 1]), FormatError, "'token_id' of the .* must have distinct integers"),
        (genes_of(["a"]), FormatError, "'token_id' of the .* must have distinct integers"),
        (genes_of([3, 1]) | {"n_vars": 3}, ParameterError, "exclude each other; leave one out"),
        ({"gene_table": pd.DataFrame({"id": [3]}, index=["a"])}, ColumnError, "column 'token_id'"),
        ({"gene_table": pd.DataFrame({"token_id": [3]})}, ColumnError, "no column with the names"),
        (
            {"gene_table": [3, 1]},
            ParameterError,
            "must be a data frame, but is of type list",
        ),
        ({"values": "row"}, FormatError, "column 'row' is of type int64, not a list of numbers"),
        ({"genes": "expressions"}, FormatError, "has float32, which are not gene numbers"),
    ],
)
def test_parameters_that_do_not_fit(folder, options, error, said):
    with pytest.raises(error, match=said) as raised:
        HuggingFaceSource(folder, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize(
    ("genes", "values", "message"),
    [
        ([[0, 1], [1]], [[1.0], [1.0, 2.0]], "the lists of a cell differ in length"),
        ([[0, 3]], [[1.0, 2.0]], "column index|a gene number that is not a column"),
        ([[-2, 1]], [[1.0, 2.0]], "column index|a gene number that is not a column"),
        ([[0], None], [[1.0], [2.0]], "'genes': not every cell has a list"),
        ([[0]], [[None]], "'expressions'.* no"),
    ],
)
def test_lists_that_are_no_cells(tmp_path, is_saved, genes, values, message):
    given = datasets.Dataset.from_dict({"genes": genes, "expressions": values})
    if is_saved:
        given.save_to_disk(tmp_path / "cells")
        given = tmp_path / "cells"
    with pytest.raises(FormatError, match=message):
        read(HuggingFaceSource(given, n_vars=3))


@pytest.mark.parametrize("offsets", [[0, 3, 1, 4], [0, -1, 3, 4]])
def test_damaged_offsets(tmp_path, offsets):
    """Nothing is read elsewhere."""
    arrow = pytest.importorskip("pyarrow")
    write_dataset(tmp_path, sp.csr_matrix(np.ones((3, 4), np.float32)), pd.DataFrame())
    where, values = arrow.py_buffer(np.array(offsets, np.int32)), arrow.array([0, 1, 2, 3])
    lists = arrow.ListArray.from_buffers(
        arrow.list_(arrow.int64()), 3, [None, where], children=[values]
    )
    table = arrow.table({"genes": lists, "expressions": lists})
    (path,) = tmp_path.glob("*.arrow")
    with arrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(FormatError, match=r"its lists are damaged .*; copy it again") as raised:
        read(HuggingFaceSource(tmp_path, n_vars=9))
    assert "\n" not in str(raised.value)


def test_float16_is_refused():
    columns = {"genes": [[0, 1], [1]], "expressions": [[1.0, 2.0], [3.0]]}
    values = datasets.Sequence(datasets.Value("float16"))
    given = datasets.Dataset.from_dict(columns).cast_column("expressions", values)
    with pytest.raises(FormatError, match=r"not a list of numbers .*cast float16 to float32"):
        HuggingFaceSource(given)


def test_what_is_no_dataset(folder, dataset, tmp_path):
    with pytest.raises(PathError, match="there is no such folder"):
        HuggingFaceSource(tmp_path / "nowhere")
    with pytest.raises(FormatError, match=r"has no state\.json"):
        HuggingFaceSource(tmp_path)
    splits = datasets.DatasetDict({"train": dataset, "test": dataset.select(range(9))})
    with pytest.raises(ParameterError, match="has several splits; give one of: 'train', 'test'"):
        open_collection(splits)
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(ParameterError, match=r"has several splits; give one of: .*splits/train, "):
        open_collection(tmp_path / "splits")
    assert np.array_equal(read(tmp_path / "splits" / "test"), COUNTS[:9])
    for damaged in ("{", "[]", '{"splits": 3}', '{"splits": [3]}'):
        (tmp_path / "splits" / "dataset_dict.json").write_text(damaged)
        with pytest.raises(FormatError, match=r"dataset_dict\.json does not list the splits"):
            open_collection(tmp_path / "splits")
    with pytest.raises(ParameterError, match=r"cannot be read by row; give a `datasets\.Dataset`"):
        open_collection(dataset.to_iterable_dataset())
    with pytest.raises(ParameterError, match="has a row twice; call its `flatten_indices`"):
        open_collection(dataset.select([1, 1]))


def test_files_that_change_are_not_read(tmp_path):
    """Reading beyond the end of a mapped file would kill the process."""
    where = tmp_path / "cells"
    write_dataset(where, X, pd.DataFrame({"row": np.arange(N_ROWS)}))
    collection = open_collection(where)
    assert np.array_equal(collection[:].X.toarray(), COUNTS)
    for path in where.glob("*.arrow"):
        os.truncate(path, 100)
    for read_it in (lambda: collection[:], lambda: collection.where("row > 3")):
        with pytest.raises(FormatError, match=r"\.arrow: was replaced or written to"):
            read_it()


def test_a_folder_that_is_replaced_while_it_is_opened(tmp_path, monkeypatch):
    one, other, where = (tmp_path / name for name in ("one", "other", "where"))
    for path, values in ((one, X), (other, X * 2)):
        write_dataset(path, values, pd.DataFrame({"row": np.arange(N_ROWS)}))
    shutil.copytree(one, where)
    require_file = _source.require_file

    def replace_first(path):
        require_file(path)
        shutil.rmtree(where)
        shutil.copytree(other, where)

    monkeypatch.setattr(_source, "require_file", replace_first)
    with pytest.raises(FormatError, match="was replaced or written to"):
        open_collection(where)


def test_without_pyarrow(folder, monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    said = "reading an Arrow table requires pyarrow; install it: pip install 'cellfeed[huggingface]"
    with pytest.raises(FormatError, match=rf"^{re.escape(f'{folder}: {said}')}'$"):
        open_collection(folder)


# The suite, in folders and as objects


class TestFolder(Suite):
    layouts = ("csr",)
    max_examples = 8
    decoded_here: bool | None = True

    def storable(self, case):  # there are no numbers of genes without genes, and only Arrow's own
        return replace(case, n_vars=max(1, case.n_vars))

    @pytest.fixture(autouse=True)
    def small_batches(self, monkeypatch):
        monkeypatch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 7)  # rows of a record batch
        datasets.disable_progress_bars()

    def stored(self, path, case):
        write_dataset(path, case, case.obs, num_shards=min(3, case.n_rows))
        return HuggingFaceSource(path, gene_table=case.var.assign(token_id=range(case.n_vars)))


@pytest.mark.slow
class TestObject(TestFolder):
    """In memory."""

    max_examples = 5

    def stored(self, path, case):
        dataset = dataset_of(case, case.obs)
        return HuggingFaceSource(dataset, gene_table=case.var.assign(token_id=range(case.n_vars)))
