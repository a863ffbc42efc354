"""Tiles of TileDB that are decoded here hold what tiledbsoma reads of them."""

import itertools
import pickle
import shutil
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.loader.storages.soma.written import write_experiment

import cellfeed.storages.soma._tiles
from cellfeed import BlockShuffling, CellDataset, FormatError, SomaSource, open_collection

soma = pytest.importorskip("tiledbsoma")
io = pytest.importorskip("tiledbsoma.io")
arrow = pytest.importorskip("pyarrow")

ARRAY = "ms/RNA/X/data"
ZSTD, GZIP, SHUFFLE = "ZstdFilter", "GzipFilter", "ByteShuffleFilter"


def write(path, matrix, *, create=None, bounds=None):
    """Write an experiment, whose X is written in fragments of rows between bounds."""
    n_rows, n_columns = matrix.shape
    obs = pd.DataFrame({"k": np.arange(n_rows)}, index=[f"c{k}" for k in range(n_rows)])
    var = pd.DataFrame(index=[f"g{k}" for k in range(n_columns)])
    written = matrix if bounds is None else sp.csr_matrix(matrix.shape, dtype=matrix.dtype)
    config = {"tiledb": {"create": create or {}}}
    write_experiment(path, ad.AnnData(written, obs=obs, var=var), platform_config=config)
    for first, stop in bounds or ():
        append(path, matrix[first:stop], first)
    return path


def append(path, matrix, first_row=0, **config):
    """Write the elements of rows as a fragment."""
    found = matrix.tocoo()
    with soma.open(f"{path}/{ARRAY}", "w") as array:
        fields = {
            "soma_dim_0": found.row.astype(np.int64) + first_row,
            "soma_dim_1": found.col.astype(np.int64),
            "soma_data": found.data,
        }
        schema = arrow.schema([(name, array.schema.field(name).type) for name in fields])
        array.write(arrow.table(fields, schema=schema), **config)


def dims(rows, columns, **options):
    return {"soma_dim_0": {"tile": rows, **options}, "soma_dim_1": {"tile": columns, **options}}


def random_matrix(n_rows, n_columns, density, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    values = random.integers(1, 100, (n_rows, n_columns))
    return sp.csr_matrix(values * (random.random((n_rows, n_columns)) < density), dtype=dtype)


def x_of(path, **options):
    return SomaSource(path, **options).elements["X"]


def assert_fast(path, matrix, rows=None):
    """Assert that tiles are decoded here, and what comes of them."""
    stored = x_of(path)
    assert stored.slow_read(matrix.dtype) is None
    assert stored.chunked() is not None
    collection = open_collection(path)
    rows = np.arange(matrix.shape[0]) if rows is None else rows
    found = collection[rows].X
    assert found.has_canonical_format
    assert np.array_equal(found.toarray(), matrix[rows].toarray())
    return collection


FILTERS = st.sampled_from([[], [ZSTD], [GZIP], [SHUFFLE], [SHUFFLE, ZSTD], [SHUFFLE, GZIP]])


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_tiles(tmp_path_factory, data):
    """Whatever their extents, capacity, filters and dtype, and in however many fragments."""
    n_rows, n_columns = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 40))
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "f8", "u1", "i2", "i8"])))
    matrix = random_matrix(
        n_rows, n_columns, data.draw(st.sampled_from([0.05, 0.5, 1.0])), dtype, n_rows
    )
    extents = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 50))
    cuts = sorted(data.draw(st.sets(st.integers(1, n_rows), max_size=3)) | {0, n_rows})
    bounds = [each for each in itertools.pairwise(cuts) if matrix[slice(*each)].nnz]
    create = {
        "capacity": data.draw(st.integers(1, 200)),
        "dims": dims(*extents, filters=data.draw(FILTERS)),
        "attrs": {"soma_data": {"filters": data.draw(FILTERS)}},
        "allows_duplicates": data.draw(st.booleans()),
    }
    bounds = data.draw(st.permutations(bounds))
    path = write(tmp_path_factory.mktemp("tiles") / "e", matrix, create=create, bounds=bounds)
    rows = np.array(data.draw(st.lists(st.integers(0, n_rows - 1), min_size=1)), np.int64)
    if not matrix.nnz:
        assert np.array_equal(open_collection(path)[rows].X.toarray(), matrix[rows].toarray())
        return
    collection = assert_fast(path, matrix, rows)
    pickle.loads(pickle.dumps(collection))[rows]
    genes = data.draw(st.permutations(range(n_columns)))[: data.draw(st.integers(1, n_columns))]
    some = open_collection(path, genes=[f"g{k}" for k in genes])[rows].X
    assert np.array_equal(some.toarray(), matrix[rows][:, genes].toarray())
    assert some.has_canonical_format


@pytest.mark.parametrize("filters", [[ZSTD], [SHUFFLE, ZSTD], [], [SHUFFLE]])
@pytest.mark.parametrize("extents", [(2048, 2048), (128, 100)])
def test_tiles_of_many_chunks(tmp_path, filters, extents):
    """Chunks of 64 KiB, of which the last of a tile is smaller, and tiles that end anywhere."""
    matrix = random_matrix(400, 500, 0.7)
    create = {"dims": dims(*extents, filters=filters)}
    path = write(tmp_path / "e", matrix, create=create)
    collection = assert_fast(path, matrix, np.random.default_rng(1).permutation(400)[:150])
    assert_fast(path, matrix)
    dataset = CellDataset(collection, BlockShuffling(8), batch_size=32, seed=0, as_torch=False)
    for minibatch in dataset:
        expected = matrix[minibatch.rows].toarray()
        assert np.array_equal(minibatch.X.toarray(), expected)


def test_many_fragments_of_several_schemas(tmp_path):
    """As plates are appended: the array is resized, which writes another schema."""
    matrix = random_matrix(90, 30, 0.4)
    path = write(tmp_path / "e", matrix[:30], create={"dims": dims(16, 8)})
    for first in (30, 60):
        obs = pd.DataFrame({"k": np.arange(30)}, index=[f"c{first + k}" for k in range(30)])
        var = pd.DataFrame(index=[f"g{k}" for k in range(30)])
        more = ad.AnnData(matrix[first : first + 30], obs=obs, var=var)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of AnnData's and tiledbsoma's own
            mapping = io.register_anndatas(
                str(path),
                [more],
                measurement_name="RNA",
                obs_field_name="obs_id",
                var_field_name="var_id",
            )
            with soma.open(str(path)) as experiment:
                context = experiment.context
            mapping.prepare_experiment(str(path), context=context)
            io.from_anndata(str(path), more, measurement_name="RNA", registration_mapping=mapping)
    assert len(list((path / ARRAY / "__fragments").iterdir())) == 3
    assert len([*(path / ARRAY / "__schema").glob("__[0-9]*")]) > 1
    assert_fast(path, matrix)


def test_a_path_that_looks_escaped(tmp_path):
    matrix = random_matrix(20, 10, 0.5)
    path = write(tmp_path / "a %41 ü", matrix)
    assert_fast(path, matrix)
    assert x_of(path).stored_bytes() > 0


def test_cells_of_a_query(tmp_path):
    matrix = random_matrix(100, 20, 0.5)
    path = write(tmp_path / "e", matrix, create={"dims": dims(16, 8)})
    source = SomaSource(path, obs_query="k > 30 and k != 50")
    assert source.elements["X"].chunked() is not None
    rows = np.array([k for k in range(31, 100) if k != 50])
    assert np.array_equal(open_collection(source)[:].X.toarray(), matrix[rows].toarray())


def test_runs_are_found_anew_where_they_are_too_many(tmp_path, monkeypatch):
    matrix = random_matrix(300, 20, 0.5)
    path = write(tmp_path / "e", matrix, create={"dims": dims(16, 8)})
    monkeypatch.setattr(cellfeed.storages.soma._tiles, "_BAND_ROWS", 1)
    monkeypatch.setattr(cellfeed.storages.soma._tiles, "_MOST_BANDS", 3)
    collection = open_collection(path)
    for seed in range(3):
        rows = np.random.default_rng(seed).permutation(300)[:100]
        assert np.array_equal(collection[rows].X.toarray(), matrix[rows].toarray())


SLOW = {
    "filter LZ4 is not supported": {"attrs": {"soma_data": {"filters": ["LZ4Filter"]}}},
    "filter BIT_WIDTH_REDUCTION is not supported": {
        "dims": dims(16, 8, filters=["BitWidthReductionFilter", ZSTD])
    },
    "its elements are not in row-major order": {
        "cell_order": "col-major",
        "tile_order": "row-major",
    },
    "its blocks have 70000 rows, above 65535": {"dims": dims(70_000, 8)},
}


@pytest.mark.parametrize("reason", SLOW)
def test_what_is_left_to_tiledbsoma(tmp_path, reason):
    matrix = random_matrix(50, 20, 0.5)
    path = write(tmp_path / "e", matrix, create=SLOW[reason])
    assert_slow(path, matrix, reason)


def assert_slow(path, matrix, reason):
    stored = x_of(path)
    assert stored.chunked() is None
    assert str(stored.slow_read(matrix.dtype)) == f"through tiledbsoma: {reason}"
    assert np.array_equal(open_collection(path)[:].X.toarray(), matrix.toarray())


def test_fragments_of_the_same_rows(tmp_path):
    """An element that is written twice is what was written last."""
    matrix = random_matrix(50, 20, 0.5)
    path = write(tmp_path / "e", matrix)
    other = random_matrix(50, 20, 0.2, seed=1)
    append(path, other[20:30], 20)
    dense = matrix.toarray()
    dense[20:30] = np.where(other[20:30].toarray() != 0, other[20:30].toarray(), dense[20:30])
    assert_slow(path, sp.csr_matrix(dense), "several of its fragments have the same rows")


def test_values_that_are_there_twice(tmp_path):
    """They are added up, also where they lie in two tiles."""
    create = {"allows_duplicates": True, "capacity": 7, "dims": dims(16, 8)}
    empty = sp.csr_matrix(np.zeros((30, 20), np.float32))
    path = write(tmp_path / "e", empty, create=create)
    rows, columns = np.random.default_rng(0).integers(0, [[30], [20]], (2, 400))
    append(path, sp.coo_matrix((np.ones(400, np.float32), (rows, columns)), (30, 20)))
    expected = np.zeros((30, 20), np.float32)
    np.add.at(expected, (rows, columns), 1)
    assert_fast(path, sp.csr_matrix(expected))


@pytest.mark.parametrize(
    ("modes", "n_fragments", "reason"),
    [
        (["fragments"], 1, "elements have their own timestamps, or were deleted"),
        (["fragment_meta", "commits"], 2, "it has commits of kind '.con'"),
    ],
)
def test_consolidated(tmp_path, modes, n_fragments, reason):
    matrix = random_matrix(60, 20, 0.5)
    path = write(tmp_path / "e", matrix, bounds=[(0, 30)])
    append(path, matrix[30:], 30)
    with soma.open(f"{path}/{ARRAY}", "w") as array:
        array._handle.consolidate_and_vacuum(modes)
    assert len(list((path / ARRAY / "__fragments").iterdir())) == n_fragments
    assert_slow(path, matrix, reason)


def test_deleted(tmp_path):
    matrix = random_matrix(60, 20, 0.5)
    path = write(tmp_path / "e", matrix)
    with soma.open(f"{path}/{ARRAY}", "d") as array:
        array.delete_cells((slice(10, 19),))
    left = matrix.tolil()
    left[10:20] = 0
    assert_slow(path, left.tocsr(), "it has commits of kind '.del'")


def test_rows_of_a_fragment_that_came_later(tmp_path):
    """They are not there for those who opened it before."""
    matrix = random_matrix(60, 20, 0.5)
    path = write(tmp_path / "e", matrix, bounds=[(0, 30)])
    before = pickle.dumps(open_collection(SomaSource(path)))
    append(path, matrix[30:], 30)
    opened = pickle.loads(before)
    assert np.array_equal(opened[:30].X.toarray(), matrix[:30].toarray())
    assert opened[30:].X.nnz == 0
    assert_fast(path, matrix)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    matrix = random_matrix(300, 200, 0.6)
    create = {"dims": dims(64, 100)}
    return write(tmp_path_factory.mktemp("damage") / "e", matrix, create=create), matrix


def damaged(stored, tmp_path, name, change):
    shutil.copytree(stored[0], tmp_path / "copy")
    (file,) = (tmp_path / "copy" / ARRAY).rglob(name)
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)
    return tmp_path / "copy"


def number_at(position, value):
    def change(content):
        content[position : position + 4] = value.to_bytes(4, "little")

    return change


@pytest.mark.parametrize("name", ["d0.tdb", "d1.tdb", "a0.tdb"])
@pytest.mark.parametrize(
    ("position", "value"),
    [(0, 99), (8, 1), (12, 1 << 30), (12, 5), (16, 3), (20, 9), (32, 7), (32, 1 << 31), (36, 0),
     (40, 1 << 31)],
)  # fmt: skip
def test_damaged_chunks(stored, tmp_path, name, position, value):
    """Numbers in the head of a tile, and of its first chunk, and what begins a frame."""
    path = damaged(stored, tmp_path, name, number_at(position, value))
    with pytest.raises(FormatError, match=rf"{name}: `{ARRAY}/soma_.*copy") as raised:
        open_collection(path)[:]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["d0.tdb", "d1.tdb", "a0.tdb", "__fragment_metadata.tdb"])
def test_truncated(stored, tmp_path, name):
    path = damaged(stored, tmp_path, name, lambda content: content.__delitem__(slice(-9, None)))
    with pytest.raises(FormatError, match=f"^{path}: `ms/RNA/X/data` cannot be read by") as raised:
        open_collection(path)[:]
    assert "\n" not in str(raised.value)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(
        ["d0.tdb", "d1.tdb", "a0.tdb", "__fragment_metadata.tdb", "__schema/__[0-9]*"]
    ),
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_flipped_bits(stored, tmp_path_factory, name, at, bit):
    """Rows come, or an error of one line; TileDB keeps no checksum that would tell which."""

    def change(content):
        content[int(at * len(content))] ^= 1 << bit

    path = damaged(stored, tmp_path_factory.mktemp("flipped"), name, change)
    shape, said = (300, 200), ""
    try:
        if x_of(path).chunked() is not None:
            shape = open_collection(path)[:].X.shape
    except FormatError as error:
        said = str(error)
    assert shape == (300, 200)
    assert "\n" not in said
    shutil.rmtree(path)


def test_replaced_while_it_is_open(stored, tmp_path):
    path = Path(shutil.copytree(stored[0], tmp_path / "copy"))
    collection = open_collection(path)
    (file,) = (path / ARRAY / "__fragments").rglob("a0.tdb")
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(FormatError, match=r"a0\.tdb.* was replaced"):
        collection[:]
