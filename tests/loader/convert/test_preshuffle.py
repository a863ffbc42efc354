"""What `preshuffle` writes, against anndata in memory."""

import json
import shutil
import warnings
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.matrices import dense

from cellfeed import (
    BlockShuffling,
    EpochPlan,
    FormatError,
    MismatchError,
    ParameterError,
    PathError,
    preshuffle,
)
from cellfeed._convert._preshuffle import _part
from cellfeed._convert._preshuffle._inputs import Inputs
from cellfeed._convert._preshuffle._job import FORMAT, OutputFolder
from cellfeed._convert._preshuffle._preshuffle import check_store

FEW_CELLS = 13_000  # bytes of memory that hold a part of some 20 cells of the `plates`


@pytest.fixture(scope="module")
def plates(write_h5ad):
    """Two CSR files of 37 and 26 cells."""
    rng = np.random.default_rng(0)
    return [
        write_h5ad(
            sp.csr_matrix(rng.poisson(0.7, (n, 11)).astype("float32")), {"plate": [name] * n}
        )
        for name, n in (("p1", 37), ("p2", 26))
    ]


@pytest.fixture(scope="module")
def finished(plates, new_folder):
    """The plates in three parts; not to be changed."""
    store = new_folder() / "finished.zarr"
    preshuffle(plates, store, memory=FEW_CELLS)
    return store


@pytest.fixture(scope="module")
def begun(plates, new_folder):
    """One of the three parts; not to be changed."""
    store = new_folder() / "begun.zarr"
    interrupted(plates, store, 1)
    return store


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.zarr"


def parts_of(store: Path) -> list[ad.AnnData]:
    n_parts = len(list(store.glob("dataset_*")))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*names are not unique")
        warnings.filterwarnings("ignore", message="Numcodecs codecs are not in")
        return [ad.read_zarr(store / f"dataset_{number}") for number in range(n_parts)]


def digest(store: Path) -> dict[str, str]:
    files = [path for path in store.rglob("*") if path.is_file()]
    return {str(path.relative_to(store)): sha256(path.read_bytes()).hexdigest() for path in files}


def content(store: Path) -> list[tuple[Any, Any]]:
    """Values and obs of each part; in a shard, chunks lie in any order."""
    return [(dense(part.X).tolist(), part.obs.to_dict()) for part in parts_of(store)]


def rows_of(part: ad.AnnData, files: list[ad.AnnData], names: list[str]) -> Any:
    starts = dict(zip(names, np.cumsum([0, *(file.n_obs for file in files)]), strict=False))
    first = part.obs["source_file"].map(starts).to_numpy(dtype=np.int64)
    return first + part.obs["source_row"].to_numpy()


def check_against_memory(store: Path, paths: list[Path], *, element: str = "X") -> None:
    """Every row once, with its own values, name and numbers."""
    files = [ad.read_h5ad(path) for path in paths]
    layer = element.removeprefix("layers/")
    X = np.vstack([dense(file.X if element == "X" else file.layers[layer]) for file in files])
    index = np.concatenate([file.obs_names for file in files])
    seen = []
    for part in parts_of(store):
        rows = rows_of(part, files, [path.name for path in paths])
        np.testing.assert_array_equal(dense(part.X), X[rows])
        np.testing.assert_array_equal(part.obs_names, index[rows])
        pd.testing.assert_frame_equal(part.var, files[0].var)
        seen.append(rows)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(len(X)))


def test_every_row_once_with_its_values(plates, out):
    done = preshuffle(plates, out, memory=FEW_CELLS)
    assert done.n_parts == done.n_parts_written > 2
    assert done.n_cells == 63
    check_against_memory(out, plates)
    sizes = [part.n_obs for part in parts_of(out)]
    assert max(sizes) - min(sizes) < done.n_parts  # evenly divided
    assert done.n_bytes == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


@settings(max_examples=8)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    n_vars=st.sampled_from([1, 7, 300]),
    dtype=st.sampled_from(["float32", "float64", "int32", "uint16"]),
    is_dense=st.booleans(),
    memory=st.sampled_from([12_000, 40_000, 10**9]),
    block_size=st.sampled_from([None, 1, 5, 1000]),
)
def test_any_collection(
    write_h5ad, new_folder, data, sizes, n_vars, dtype, is_dense, memory, block_size
):
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    density = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    paths = []
    for n_rows in sizes:
        X = (
            rng.integers(1, 9, (n_rows, n_vars)) * (rng.random((n_rows, n_vars)) < density)
        ).astype(dtype)
        paths.append(write_h5ad(X if is_dense else sp.csr_matrix(X)))
    store = new_folder() / "out.zarr"
    preshuffle(paths, store, memory=memory, block_size=block_size)
    check_against_memory(store, paths)
    assert {part.X.dtype for part in parts_of(store)} == {np.dtype(dtype)}


def test_order_is_that_of_the_plan(plates, out, read_by_anndata):
    preshuffle(plates, out, memory=FEW_CELLS, seed=5, block_size=3)
    parts = parts_of(out)
    plan = EpochPlan(
        strategy=BlockShuffling(block_size=3),
        n_rows=63,
        batch_size=parts[0].n_obs,
        fetch_factor=1,
        seed=5,
    )
    files = [read_by_anndata(path) for path in plates]
    for number, part in enumerate(parts):
        rows = rows_of(part, files, [path.name for path in plates])
        np.testing.assert_array_equal(rows, plan.delivered_rows(number)[0])


def test_content_follows_from_the_parameters(plates, tmp_path, finished):
    for seed in (0, 1):
        preshuffle(plates, tmp_path / str(seed), memory=FEW_CELLS, seed=seed)
    same, other, expected = map(content, (tmp_path / "0", tmp_path / "1", finished))
    assert same == expected
    assert other != expected


def test_layer(write_h5ad, out):
    counts = np.random.default_rng(0).poisson(0.4, (30, 8))
    path = write_h5ad(sp.csr_matrix(counts > 0), layers={"raw": sp.csr_matrix(counts)})
    preshuffle(path, out, element="layers/raw")
    check_against_memory(out, [path], element="layers/raw")


def test_large_column_numbers_and_small_ones(write_h5ad, out, tmp_path):
    for n_vars, dtype in ((256, "uint8"), (257, "uint16"), (65_537, "uint32")):
        path = write_h5ad(sp.random(20, n_vars, density=0.2, format="csr", dtype=np.float32))
        preshuffle(path, tmp_path / dtype)
        assert zarr.open_array(tmp_path / dtype / "dataset_0/X/indices").dtype == dtype
        check_against_memory(tmp_path / dtype, [path])


def test_columns_stored_twice_in_a_row_are_added_up(write_h5ad, replace, out):
    def edit(file):
        replace(file, "X/data", np.array([1, 2, 4, 8], dtype=np.float32))
        replace(file, "X/indices", np.array([2, 0, 2, 1], dtype=np.int32))
        replace(file, "X/indptr", np.array([0, 3, 3, 4], dtype=np.int32))

    path = write_h5ad(sp.csr_matrix(np.zeros((3, 5), dtype=np.float32)), edit=edit)
    preshuffle(path, out)
    check_against_memory(out, [path])


def test_legacy_file(shared_file, out, read_by_anndata):
    path = shared_file("scgen_valid.h5ad")
    preshuffle(path, out, memory=20_000_000)
    file = read_by_anndata(path)
    for part in parts_of(out):
        rows = part.obs["source_row"].to_numpy()
        np.testing.assert_array_equal(dense(part.X), dense(file.X[rows]))
        for column in file.obs:
            np.testing.assert_array_equal(
                part.obs[column].astype(object), file.obs[column].iloc[rows].astype(object)
            )


# The store


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
def test_layout_is_annbatchs(finished):
    root = json.loads((finished / "zarr.json").read_text())
    assert root["attributes"]["encoding-type"] == "annbatch-preshuffled"
    assert root["attributes"]["encoding-version"] == "0.1.0"
    assert "dataset_0/X/data" in root["consolidated_metadata"]["metadata"]
    group: Any = zarr.open_group(finished, mode="r", use_consolidated=False)
    assert sorted(group.keys()) == sorted(path.name for path in finished.glob("dataset_*"))
    X = group["dataset_0/X"]
    assert X.attrs["encoding-type"] == "csr_matrix"
    assert X["data"].shards is not None
    assert X["indices"].dtype == np.uint8
    assert not [path for path in finished.iterdir() if path.name.startswith(".")]


def test_finished_store_is_left_alone(plates, finished):
    before = digest(finished)
    again = preshuffle(plates, finished, memory=FEW_CELLS)
    assert again.n_parts_written == 0
    assert digest(finished) == before


# Beginning, resuming, refusing


def interrupted(plates, out, n_parts: int, **options: Any) -> None:
    """Leave a store of which some parts are done."""

    class StopError(Exception):
        pass

    def stop(stage, done, total):
        if len(list(out.glob("dataset_*"))) == n_parts:
            raise StopError

    with pytest.raises(StopError):
        preshuffle(plates, out, on_progress=stop, **{"memory": FEW_CELLS} | options)


def test_resumes_with_what_is_missing(plates, out, finished):
    interrupted(plates, out, 2)
    assert not (out / "zarr.json").exists()
    (out / ".cellfeed" / "part-1-of-a-killed-run").mkdir()
    done = preshuffle(plates, out, memory=FEW_CELLS)
    assert done.n_parts_written == done.n_parts - 2
    assert content(out) == content(finished)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "was begun with seed 0, not with seed 1"),
        ({"block_size": 3}, "was begun with a block size of .*, not with a block size of 3"),
        ({"memory": 2 * FEW_CELLS}, "was begun with a memory of 13.0 kB .13000 bytes., not"),
    ],
)
@pytest.mark.parametrize("store", ["begun", "finished"])
def test_other_parameters_are_refused(plates, request, other, message, store):
    store = request.getfixturevalue(store)
    before = digest(store)
    with pytest.raises(ParameterError, match=message):
        preshuffle(plates, store, **{"memory": FEW_CELLS} | other)
    assert digest(store) == before


def test_other_or_changed_inputs_are_refused(plates, out, tmp_path):
    copies = [Path(shutil.copy(plate, tmp_path)) for plate in plates]
    interrupted(copies, out, 1)
    with pytest.raises(ParameterError, match="of other files: 2 then, 1 now"):
        preshuffle(copies[:1], out, memory=FEW_CELLS)
    with pytest.raises(ParameterError, match=r"of other files: .*, not"):
        preshuffle(copies[::-1], out, memory=FEW_CELLS)
    copies[1].touch()
    with pytest.raises(ParameterError, match=f"before `{copies[1]}` was changed"):
        preshuffle(copies, out, memory=FEW_CELLS)


def test_inputs_that_change_meanwhile(plates, out, tmp_path):
    copies = [Path(shutil.copy(plate, tmp_path)) for plate in plates]

    def touch(at, stage, done, total):
        if stage == at and done == total:
            copies[0].touch()

    # Whoever reads next finds it, or the last look before the store is finished.
    for stage in ("write", "check"):
        with pytest.raises((MismatchError, FormatError), match=r"was replaced|has changed since"):
            preshuffle(copies, out / stage, on_progress=partial(touch, stage))
        assert not (out / stage / "zarr.json").exists()


def test_foreign_output_is_refused(plates, out):
    zarr.create_group(out, attributes={"mine": 1})
    before = digest(out)
    with pytest.raises(ParameterError, match="contains something else"):
        preshuffle(plates, out)
    assert digest(out) == before
    with pytest.raises(ParameterError, match="contains something else"):
        preshuffle(plates[:1], plates[1])


def test_output_among_the_inputs_is_refused(plates):
    folder = plates[0].parent
    for inputs, out in ((plates, plates[0]), (folder, folder), (folder, folder / "out.zarr")):
        with pytest.raises(ParameterError, match="is among the inputs"):
            preshuffle(inputs, out)


def test_empty_folder_is_taken(plates, out):
    out.mkdir()
    preshuffle(plates, out)
    check_against_memory(out, plates)


def test_record_of_another_version_or_none(plates, begun, out):
    shutil.copytree(begun, out)
    record = out / ".cellfeed" / "job.json"
    record.write_text(record.read_text().replace(FORMAT, "cellfeed preshuffle 0"))
    with pytest.raises(FormatError, match="begun by another version"):
        preshuffle(plates, out)
    record.write_text("{}")
    with pytest.raises(FormatError, match="damaged"):
        preshuffle(plates, out)


def test_two_runs_at_once(plates, out):
    def second(*_):
        with pytest.raises(ParameterError, match="another run is writing it"):
            preshuffle(plates, out)

    preshuffle(plates, out, on_progress=second)


def test_part_written_by_two_at_once(tmp_path):
    folder = OutputFolder(tmp_path)
    (tmp_path / ".cellfeed").mkdir()
    with folder.new_part(0) as first:
        with folder.new_part(0) as second:
            second.mkdir()
            (second / "file").write_text("second")
        first.mkdir()
        (first / "file").write_text("first")
    assert (folder.part(0) / "file").read_text() == "second"
    assert not list((tmp_path / ".cellfeed").iterdir())


def test_one_that_was_taken_for_dead_completes_nothing(tmp_path):
    folder = OutputFolder(tmp_path)
    (tmp_path / ".cellfeed").mkdir()
    with folder.new_part(0) as place:
        place.mkdir()
        folder.remove_leftovers()
        place.mkdir(parents=True)  # as zarr does when it writes another chunk
    assert not folder.part(0).exists()


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ("X/data/c", "it has values of `X` that differ from the input"),
        ("X/indptr", "cannot be read"),
        ("X/indptr/c", "it has numbers of elements of `X` that do not match"),
        ("obs/plate/codes/c", "it has obs that differs"),
        ("obs/source_row/c", "other cells"),
    ],
)
def test_check_names_what_is_damaged(plates, finished, out, damaged, message):
    shutil.copytree(finished, out)
    shutil.rmtree(out / "dataset_1" / damaged)
    folder = OutputFolder(out)
    job = folder.begun()
    assert job is not None
    with pytest.raises(FormatError, match=message) as caught:
        check_store(folder, job, Inputs.open(job, folder), lambda n: None)
    assert str(caught.value).startswith(f"{out / 'dataset_1'}: ")


def test_damaged_part_is_made_again(plates, out, finished):
    """Parts are swapped when all are written; the remedy of the message is followed."""

    def swap(stage, done, total):
        if stage == "write" and done == total and (out / "dataset_2").exists():
            (out / "dataset_0").rename(out / "kept")
            (out / "dataset_1").rename(out / "dataset_0")
            (out / "kept").rename(out / "dataset_1")

    with pytest.raises(FormatError, match="dataset_0: it has other cells"):
        preshuffle(plates, out, memory=FEW_CELLS, on_progress=swap)
    assert not (out / "zarr.json").exists()
    for name in ("dataset_0", "dataset_1"):
        shutil.rmtree(out / name)
    assert preshuffle(plates, out, memory=FEW_CELLS).n_parts_written == 2
    assert content(out) == content(finished)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "memory >= 1"),
        ({"block_size": 0}, "block_size >= 1"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_parameters_out_of_range(plates, out, options, message):
    with pytest.raises(ParameterError, match=message):
        preshuffle(plates, out, **options)
    assert not out.exists()


def test_workers_that_see_another_folder(begun):
    with pytest.raises(PathError, match="is not visible to a Dask worker"):
        _part.write_part_of(str(begun), "another token", 1)
