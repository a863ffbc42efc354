"""What `preshuffle` writes, against anndata in memory."""

import json
import re
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
from tests import commands
from tests.loader.matrices import dense

from cellfeed import (
    BlockShuffling,
    EpochPlan,
    FormatError,
    MismatchError,
    ParameterError,
    open_collection,
    preshuffle,
)
from cellfeed.console import ByteSize

pytestmark = [
    pytest.mark.usefixtures("zarr_in_this_thread"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in"),
]

FEW_CELLS = 13_000  # bytes of memory that hold a part of some 20 cells of the `plates`


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


@pytest.fixture(scope="module")
def written(plates, new_folder):
    """All three parts, which are not checked; not to be changed."""
    store = new_folder() / "written.zarr"

    def stop(stage, done, total):
        if (stage, done) == ("check", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preshuffle(plates, store, memory=FEW_CELLS, on_progress=stop)
    return store


def parts_of(store: Path) -> list[ad.AnnData]:
    n_parts = len(list(store.glob("dataset_*")))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*names are not unique")
        warnings.filterwarnings("ignore", message="Numcodecs codecs are not in")
        return [ad.read_zarr(store / f"dataset_{number}") for number in range(n_parts)]


def digest(store: Path) -> dict[str, str]:
    files = [path for path in store.rglob("*") if path.is_file()]
    return {str(path.relative_to(store)): sha256(path.read_bytes()).hexdigest() for path in files}


def content(store: Path) -> dict[str, str]:
    """All metadata, and the values of all arrays; in a shard, chunks lie in any order."""
    found = {}
    for path in store.rglob("zarr.json"):
        text = path.read_text()
        if json.loads(text)["node_type"] == "array":
            array: Any = zarr.open_array(path.parent, mode="r")
            text += repr(array[...].tolist())
        found[str(path.relative_to(store))] = text
    return found


def rows_of(part: ad.AnnData, files: list[ad.AnnData], names: list[str]) -> Any:
    starts = dict(zip(names, np.cumsum([0, *(file.n_obs for file in files)]), strict=False))
    first = part.obs["source_file"].map(starts).to_numpy(dtype=np.int64)
    return first + part.obs["source_row"].to_numpy()


def check_against_memory(store: Path, paths: list[Path]) -> None:
    """Every row once, with its own values, name and numbers."""
    files = [ad.read_h5ad(path) for path in paths]
    X = np.vstack([dense(file.X) for file in files])
    index = np.concatenate([file.obs_names for file in files])
    seen = []
    for part in parts_of(store):
        rows = rows_of(part, files, [path.name for path in paths])
        np.testing.assert_array_equal(dense(part.X), X[rows])
        np.testing.assert_array_equal(part.obs_names, index[rows])
        pd.testing.assert_frame_equal(part.var, files[0].var)
        seen.append(rows)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(len(X)))


@pytest.mark.slow
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
    done = preshuffle(paths, store, memory=memory, block_size=block_size)
    check_against_memory(store, paths)
    parts = parts_of(store)
    assert {part.X.dtype for part in parts} == {np.dtype(dtype)}
    n_cells = [part.n_obs for part in parts]
    assert done.n_cells == sum(n_cells)
    assert done.n_parts == done.n_parts_written == len(parts)
    assert max(n_cells) - min(n_cells) < done.n_parts  # evenly divided
    assert done.n_bytes == sum(file.stat().st_size for file in store.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def blocks_of_three(plates, new_folder):
    store = new_folder() / "blocks.zarr"
    preshuffle(plates, store, memory=2 * FEW_CELLS, seed=5, block_size=3)
    return store


def test_order_is_that_of_the_plan(plates, blocks_of_three, read_by_anndata):
    parts = parts_of(blocks_of_three)
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


@pytest.mark.slow
def test_content_follows_from_the_parameters(plates, tmp_path, finished):
    for seed in (0, 1):
        preshuffle(plates, tmp_path / str(seed), memory=FEW_CELLS, seed=seed)
    same, other, expected = map(content, (tmp_path / "0", tmp_path / "1", finished))
    assert same == expected
    assert other != expected


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.fixture
def of_first(plates, out):
    """A store of the first plate."""
    return preshuffle(plates[0], out).path


def test_cells_are_appended(plates, of_first, in_memory):
    preshuffle(plates[1], of_first, append=True, mix=1)
    collection = open_collection(of_first, obs=["number"])
    rows = np.asarray(collection.obs["number"].values, int)
    assert sorted(rows) == list(range(63))
    np.testing.assert_array_equal(collection[:].X.toarray(), in_memory(plates)[rows])


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


def test_resumes_with_what_is_missing(plates, written, out, finished):
    shutil.copytree(written, out)
    shutil.rmtree(out / "dataset_1")
    (out / ".cellfeed" / "part-1-of-a-killed-run").mkdir()
    assert preshuffle(plates, out, memory=FEW_CELLS).n_parts_written == 1
    assert content(out / "dataset_1") == content(finished / "dataset_1")
    assert (out / "zarr.json").exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "was begun with seed=0, not with seed=1"),
        ({"block_size": 3}, "was begun with block_size=.*, not with block_size=3"),
        ({"genes": [f"gene{k}" for k in reversed(range(11))]}, "was begun with other genes"),
        ({"rows": [1, 2]}, "was begun with other rows"),
        ({"codec": "annbatch"}, "was begun with codec='delta', not with codec='annbatch'"),
        ({"memory": 2 * FEW_CELLS}, "was begun with memory=13000, not"),
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


def test_record_of_another_version_or_none(plates, begun, out):
    shutil.copytree(begun, out)
    record = out / ".cellfeed" / "job.json"
    record.write_text(re.sub(r"(cellfeed preshuffle )\d+", r"\g<1>0", record.read_text()))
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


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ("X/data/c", "it cannot be read"),
        ("X/indptr", "cannot be read"),
        ("X/indptr/c", "cannot be read"),
        ("obs/plate/codes/c", "it has obs that differs"),
        ("obs/source_row/c", "other cells"),
    ],
)
def test_check_names_what_is_damaged(plates, written, out, damaged, message):
    shutil.copytree(written, out)
    shutil.rmtree(out / "dataset_1" / damaged)
    said = rf"^{re.escape(str(out))}/dataset_1: .*{message}"
    with pytest.raises(FormatError, match=said):
        preshuffle(plates, out, memory=FEW_CELLS)
    assert not (out / "zarr.json").exists()


def test_check_finds_other_values(plates, written, out):
    shutil.copytree(written, out)
    data: Any = zarr.open_array(out / "dataset_1/X/data")
    data[:] = data[:][::-1] + 1
    with pytest.raises(FormatError, match="dataset_1: it has values of `X` that differ from the"):
        preshuffle(plates, out, memory=FEW_CELLS)


@pytest.mark.slow
def test_damaged_parts_are_made_again(plates, written, out, finished):
    """Parts were swapped; the remedy of the message is followed."""
    shutil.copytree(written, out)
    for name, other in (("0", "kept"), ("1", "0"), ("kept", "1")):
        (out / f"dataset_{name}").rename(out / f"dataset_{other}")
    with pytest.raises(FormatError, match="dataset_0: it has other cells; remove this folder and"):
        preshuffle(plates, out, memory=FEW_CELLS)
    for name in ("dataset_0", "dataset_1"):
        shutil.rmtree(out / name)
    assert preshuffle(plates, out, memory=FEW_CELLS).n_parts_written == 2
    assert content(out) == content(finished)


# The command


@pytest.mark.slow
def test_command_reports_one_line(plates, out):
    out.mkdir()  # an empty folder is taken
    result = commands.cellfeed("preshuffle", *plates, out, "--memory", "13kB", "--seed", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{out}: 63 cells in ")
    assert result.stdout.count("\n") == 1
    check_against_memory(out, plates)
    size = commands.cellfeed("preshuffle", *plates, out, "--memory", "much")
    assert size.exit_code == 2
    assert "write 800MB or 8GiB" in size.stderr


def test_command_refuses_in_one_line(plates, begun):
    result = commands.cellfeed("preshuffle", *plates, begun, "--memory", FEW_CELLS, "--seed", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {begun}: was begun with --seed 0, not")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("text", "n_bytes"), [("800MB", 8 * 10**8), ("1 GiB", 2**30), ("7", 7)])
def test_sizes(text, n_bytes):
    assert ByteSize().convert(text, None, None) == n_bytes
