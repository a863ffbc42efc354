"""Cells that are appended to a store: all of them once, and the store as before until the end."""

import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from tests import commands
from tests.loader.collection.stored import write
from tests.loader.matrices import dense
from tests.loader.preshuffling.test_preshuffle import digest
from tests.loader.preshuffling.test_preshuffle_elements import adata_of, named

from cellfeed import (
    BlockShuffling,
    EpochPlan,
    FormatError,
    MismatchError,
    ParameterError,
    open_collection,
    preshuffle,
)

pytestmark = [
    pytest.mark.usefixtures("zarr_in_this_thread"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in"),
]

MEMORY = 36_000  # bytes, which hold a part of some 45 of these cells
GENES = [f"g{number}" for number in range(12)]
ELEMENTS = ["X", "layers/counts", "layers/normal", "obsm/X_pca"]


def cells_of(seed: int, n_obs: int, genes: list[str] = GENES, **obs: Any) -> ad.AnnData:
    adata = adata_of(seed, n_obs, genes)
    for name, values in obs.items():
        adata.obs[name] = values
    return adata


@pytest.fixture(scope="module")
def adatas():
    """Cells of four files, of which the first two are in the store."""
    return [
        cells_of(1, 50, kind=pd.Categorical(["b"] * 50, categories=["z", "b"]), depth=7),
        cells_of(2, 40, kind=pd.Categorical(["z"] * 40), depth=8),
        cells_of(3, 33, [*reversed(GENES)], kind=pd.Categorical(["a", "b", "a"] * 11), new=1.5),
        cells_of(4, 61, kind=pd.Categorical(["c"] * 61), depth=9),
    ]


@pytest.fixture(scope="module")
def paths(adatas, new_folder):
    folder = new_folder()
    return [write(each, folder / f"{k}.h5ad") for k, each in enumerate(adatas)]


@pytest.fixture(scope="module")
def finished(paths, new_folder):
    """A store of the first two files; not to be changed."""
    store = new_folder() / "finished.zarr"
    copied(paths[:2], store, elements=ELEMENTS)
    return store


@pytest.fixture
def store(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "store.zarr"))


def copied(*arguments: Any, **options: Any) -> Any:
    return preshuffle(*arguments, memory=MEMORY, **options)


def check(store: Path, adatas: list[ad.AnnData], names: list[str]) -> None:
    """Each cell of the files is there once, with its own values of everything."""
    files = {f"{number}.h5ad": adatas[number] for number in map(int, names)}
    parts = [ad.read_zarr(store / name) for name in groups(store)]
    seen = list[tuple[str, int]]()
    for part in parts:
        assert list(part.var_names) == GENES
        assert list(part.obs.columns[-2:]) == ["source_file", "source_row"]
        for name, of_file in part.obs.groupby("source_file", observed=True):
            own = files[name][of_file["source_row"].to_numpy()][:, GENES]
            found = part[of_file.index]
            assert list(found.obs_names) == list(own.obs_names)
            for element in ELEMENTS:
                values, expected = (dense(named(each, element)) for each in (found, own))
                np.testing.assert_array_equal(values, expected)
            for column in ("plate", "kind", "depth", "new"):
                if column in own.obs:
                    assert list(found.obs[column]) == list(own.obs[column])
                elif column in found.obs:
                    assert found.obs[column].isna().all()
            seen += [(name, row) for row in of_file["source_row"]]
    assert sorted(seen) == [(name, row) for name in files for row in range(files[name].n_obs)]
    collection = open_collection(store, obs=["kind", "source_file"])
    assert len(collection) == len(seen)
    kinds = {name: list(file.obs["kind"]) for name, file in files.items()}
    column, file = (labels(collection.obs[name]) for name in ("kind", "source_file"))
    for name in files:
        own = column[file == name]
        assert sorted(own) == sorted(kinds[name])


def labels(column: Any) -> Any:
    """Return the value of each cell."""
    return column.categories[column.values]  # noqa: PD011 - not pandas'


def groups(store: Path) -> list[str]:
    """Names of the parts, as zarr and annbatch find them."""
    names = [*zarr.open_group(store, mode="r").keys()]
    return sorted(names, key=lambda name: int(name.removeprefix("dataset_")))


@pytest.mark.slow
@pytest.mark.parametrize("mix", [0, 1, 100])
def test_every_cell_once(store, finished, paths, adatas, mix):
    before = digest(finished)
    done = copied(paths[2], store, append=True, mix=mix)
    check(store, adatas, ["0", "1", "2"])
    assert done.n_cells == 123
    assert done.provenance == ("source_file", "source_row")
    names, of_before = groups(store), groups(finished)
    assert done.n_parts == len(names) == len(list(store.glob("dataset_*")))
    assert not (store / ".cellfeed").exists()
    n_kept, n_before = len({*names} & {*of_before}), 2
    assert len(of_before) == n_before
    assert n_kept == {0: n_before, 100: 0}.get(mix, n_kept)
    assert mix != 1 or 0 < n_kept < n_before
    after = digest(store)
    kept = [name for name in before if name.split("/")[0] in names]
    assert all(after[name] == before[name] for name in kept)
    again = copied(paths[2], store, append=True, mix=mix)
    assert (again.n_parts_written, digest(store)) == (0, after)
    # And once more, into parts that were mixed, by the command.
    command = "preshuffle", paths[3], store, "--append", "--mix", 1, "--memory", MEMORY
    result = commands.cellfeed(*command)
    assert (result.exit_code, "184 cells in" in result.output) == (0, True)
    check(store, adatas, ["0", "1", "2", "3"])
    assert copied(paths[:2], store, elements=ELEMENTS).n_parts_written == 0


@pytest.mark.slow
def test_columns_of_obs(store, finished, paths):
    """Old categories keep their codes; what is not everywhere is missing elsewhere."""
    copied(paths[2], store, append=True)
    for name in groups(store):
        path = f"{name}/obs/kind/categories"
        stored: Any = zarr.open_group(store, mode="r")[path]
        categories = stored[:].tolist()
        assert categories == (["z", "b"] if name in groups(finished) else ["z", "b", "a"])
    obs: Any = open_collection(store, obs=["kind", "depth", "new"], join_obs="outer").obs
    assert list(obs["kind"].categories) == ["z", "b", "a"]
    depth, new = (obs[name].values for name in ("depth", "new"))  # noqa: PD011 - not pandas'
    assert sorted(set(depth[np.isfinite(depth)])) == [7, 8]
    assert np.isnan(depth).sum() == 33
    assert np.isnan(new).sum() == 90


@pytest.mark.slow
def test_some_cells(store, paths, adatas):
    copied(paths[2:], store, append=True, where="kind == 'c'", mix=1)
    check(store, adatas, ["0", "1", "3"])


# Given up, or damaged.


@pytest.mark.slow
def test_given_up(store, paths, adatas):
    """What an append that was given up has left is neither read nor taken for another's."""

    def stop(stage, done, total):
        if stage == "check":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copied(paths[3], store, append=True, on_progress=stop)
    check(store, adatas, ["0", "1"])
    shutil.rmtree(store / ".cellfeed")
    copied(paths[2], store, append=True)
    check(store, adatas, ["0", "1", "2"])
    assert len(list(store.glob("dataset_*"))) == len(groups(store))


@pytest.mark.slow
def test_a_part_that_is_missing_is_named(store, paths):
    copied(paths[2], store, append=True, mix=1)
    shutil.rmtree(store / groups(store)[0])
    with pytest.raises(FormatError, match=r"expected \d+ datasets, but found: .* again"):
        open_collection(store)


# What has to agree.


@pytest.mark.parametrize(
    ("cells", "options", "message"),
    [
        ({"genes": GENES[1:]}, {}, "has other genes than .*dataset_.*give join_vars='inner' or j"),
        ({"genes": [*GENES, "more"]}, {}, "has other genes than .*dataset_"),
        (
            {"genes": GENES[1:]},
            {"join_vars": "inner"},
            "lacks 'g0' of the genes of .*dataset_.*; give join_vars='outer'",
        ),
        (
            {"genes": ["ENSG1"]},
            {"join_vars": "outer"},
            "has none of the genes of .*dataset_.*, such as 'g0'",
        ),
        ({}, {"elements": ["X"]}, "has the elements .*, but X would be added; give"),
        ({}, {"mix": -1}, "`mix >= 0` must hold, but got mix=-1"),
        ({}, {"genes": GENES}, "`genes` and `append` cannot be combined"),
        ({"source_row": 1}, {}, "obs has 'source_row', which in the store"),
        ({"depth": "deep"}, {}, "obs column 'depth' has text, but numbers in"),
        ({"dtype": "f8"}, {}, "new.h5ad: `X` is float64, which float32, the dtype"),
    ],
)
def test_refused(store, finished, tmp_path, cells, options, message):
    adata = cells_of(5, 20, **{name: each for name, each in cells.items() if name != "dtype"})
    adata.X = adata.X.astype(cells.get("dtype", "f4"))
    path = write(adata, tmp_path / "new.h5ad")
    with pytest.raises((MismatchError, ParameterError), match=message):
        copied(path, store, append=True, **options)
    assert digest(store) == digest(finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("join_vars", "genes"), [("inner", ["more", *GENES]), ("outer", ["more", *GENES[3:]])]
)
def test_genes_are_those_of_the_store(store, tmp_path, join_vars, genes):
    adata = cells_of(5, 20, genes)
    copied(write(adata, tmp_path / "5.h5ad"), store, append=True, join_vars=join_vars, mix=1)
    collection = open_collection(store, elements=["X", "layers/counts"], obs_names=True)
    assert list(collection.var_names) == GENES
    names = collection.obs_names(slice(None))
    rows = [k for k, name in enumerate(names) if name.startswith("5-")]
    assert len(rows) == 20
    lacking = pd.DataFrame(0.0, adata.obs_names, [name for name in GENES if name not in genes])
    truth = adata.to_df().join(lacking).loc[names[rows], GENES]
    cells = collection[rows]
    np.testing.assert_array_equal(cells.X.toarray(), truth.to_numpy())


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda X: X.toarray(), lambda X: X.astype(np.uint16)])
def test_cells_become_what_the_store_has(store, tmp_path, adatas, change):
    """Dense ones sparse, and narrower ones as wide."""
    adata = cells_of(5, 20)
    adata.X = change(adata.X)
    copied(write(adata, tmp_path / "5.h5ad"), store, append=True)
    newest: Any = zarr.open_group(store / groups(store)[-1], mode="r")["X/data"]
    assert newest.dtype == np.float32
    collection = open_collection(store)
    assert collection.layout == "csr"
    assert collection[:].X.sum() == sum(each.X.sum() for each in [*adatas[:2], adata])


def test_sparse_cells_are_refused_by_a_dense_store(tmp_path):
    paths = list[Path]()
    for seed, kind in ((1, np.asarray), (2, sp.csr_matrix)):
        adata = cells_of(seed, 20)
        adata.X = kind(adata.X.toarray())
        paths.append(write(adata, tmp_path / f"{seed}.h5ad"))
    preshuffle(paths[0], tmp_path / "out.zarr")
    with pytest.raises(MismatchError, match="`X` is sparse, but dense in the store"):
        preshuffle(paths[1], tmp_path / "out.zarr", append=True)


@pytest.mark.slow
def test_same_name_of_another_file(store, tmp_path):
    """Where a cell is from stays clear: files with a known name are written with their path."""
    path = write(cells_of(5, 20), tmp_path / "0.h5ad")
    copied(path, store, append=True)
    files: Any = open_collection(store, obs=["source_file"]).obs["source_file"]
    assert list(files.categories) == ["0.h5ad", "1.h5ad", str(path)]


def test_the_command_refuses_in_one_line(store, paths):
    refused = commands.cellfeed("preshuffle", paths[0], store, "--append")
    assert refused.exit_code == 2
    assert len(refused.output.splitlines()) == 1
    assert "0.h5ad: is in" in refused.output
    assert "already; give files that are not" in refused.output


@pytest.mark.slow
def test_mixing_is_what_theory_says(new_folder):
    """Cells that lie apart mix like blocks; with each part that is merged, like smaller blocks."""
    theory = pytest.importorskip("cellfeed_tuner.theory")
    folder, genes = new_folder(), ["g"]
    n_old, n_new, block, batch, fetch_factor = 9_000, 1_000, 32, 64, 2

    def file_of(name: str, n: int) -> Path:
        X, obs = (
            sp.csr_matrix(np.ones((n, 1), "f4")),
            pd.DataFrame({"run": [name] * n}, pd.Index(map(str, range(n)))),
        )
        return write(ad.AnnData(X, obs, pd.DataFrame(index=genes)), folder / f"{name}.h5ad")

    old, new = file_of("old", n_old), file_of("new", n_new)
    # Parts of about 1,000 cells.
    options: dict[str, Any] = {"memory": 550_000, "block_size": 1}
    before = folder / "before.zarr"
    assert preshuffle(old, before, **options).n_parts == 9
    expected, measured = [], []
    p = np.array([n_old, n_new]) / (n_old + n_new)
    for mix in (0, 1, 100):
        out = Path(shutil.copytree(before, folder / f"{mix}.zarr"))
        done = preshuffle(new, out, append=True, mix=mix, **options)
        assert done.n_parts_written == 1 + min(mix, 9)
        collection = open_collection(out, obs=["run"])
        codes = collection.obs["run"].values  # noqa: PD011 - not pandas'
        entropies = []
        for epoch in range(20):
            plan = EpochPlan(
                strategy=BlockShuffling(block), n_rows=len(collection), batch_size=batch,
                fetch_factor=fetch_factor, seed=epoch,
            )  # fmt: skip
            for rows in plan.delivered_rows(0, plan.n_whole_fetches).reshape(-1, batch):
                share = np.bincount(codes[rows], minlength=2) / batch
                entropies.append(theory.entropy_bits(share))
        measured.append(np.mean(entropies))
        as_blocks = max(1, block / (1 + mix))
        expected.append(theory.expected_entropy_bits(p, batch, as_blocks, fetch_factor))
    assert np.all(np.diff(measured) > 0)
    np.testing.assert_allclose(measured, expected, atol=0.02)
