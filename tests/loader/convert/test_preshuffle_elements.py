"""Everything that `preshuffle` keeps besides X, against anndata and mudata in memory."""

import errno
import itertools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.convert.test_preshuffle import interrupted, parts_of
from tests.loader.matrices import dense

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    MismatchError,
    ParameterError,
    open_collection,
    preshuffle,
)
from cellfeed._convert._preshuffle import _dataset

pytestmark = pytest.mark.usefixtures("zarr_in_this_thread")

N_GENES = 12


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.zarr"


def adata_of(seed: int, n_obs: int, genes: list[str], *, csc: bool = False) -> ad.AnnData:
    """Cells with every kind of element; ``seed`` also names them."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(0.6, (n_obs, len(genes))).astype(np.float32)
    names = [f"{seed}-{number}" for number in range(n_obs)]
    kind = sp.csc_matrix if csc else sp.csr_matrix
    frame = pd.DataFrame(
        {
            "x": rng.normal(size=n_obs),
            "count": np.arange(n_obs, dtype=np.int16),
            "text": [f"text {name}" for name in names],
            "kind": pd.Categorical(np.resize(["a", "b", None], n_obs)),
            "flag": np.arange(n_obs) % 2 == 0,
            "maybe": pd.array(np.resize([1, None], n_obs), dtype="Int32"),
        },
        index=names,
    )
    adata = ad.AnnData(
        kind(counts),
        obs=pd.DataFrame({"plate": [f"p{seed}"] * n_obs}, index=names),
        var=pd.DataFrame({"length": [len(gene) * 10 for gene in genes]}, index=genes),
        layers={"counts": kind(counts), "normal": sp.csr_matrix(np.log1p(counts)), "full": counts},
        obsm={
            "X_pca": rng.normal(size=(n_obs, 3)).astype(np.float32),
            "images": rng.integers(0, 255, (n_obs, 4, 5, 3)).astype(np.uint8),
            "sparse": sp.random(n_obs, 6, 0.4, "csr", np.float64, rng),
            "frame": frame,
        },
        uns={"title": "cells", "nested": {"array": np.arange(4), "of": f"p{seed}"}},
    )
    of_all = ad.AnnData(
        kind(rng.poisson(1, (n_obs, len(genes) + 2)).astype(np.float32)),
        var=pd.DataFrame({"raw length": 1}, index=[*genes, "extra 1", "extra 2"]),
    )
    adata.raw = of_all
    return adata


def write(adata: ad.AnnData, path: Path) -> Path:
    settings = ad.settings.override(allow_write_nullable_strings=True, zarr_write_format=3)
    with warnings.catch_warnings(), settings:
        warnings.simplefilter("ignore")  # of defaults to come
        (adata.write_zarr if path.suffix == ".zarr" else adata.write_h5ad)(path)
    return path


@pytest.fixture(scope="module", params=["csr", "csc"])
def pair(request, new_folder):
    """Two files with the same genes and every kind of element, and what is in them."""
    folder, genes = new_folder(), [f"g{number}" for number in range(N_GENES)]
    adatas = [
        adata_of(seed, n, genes, csc=request.param == "csc") for seed, n in ((1, 41), (2, 30))
    ]
    suffixes = (".h5ad", ".zarr")
    names = [f"{k}{suffix}" for k, suffix in enumerate(suffixes)]
    return [write(each, folder / name) for each, name in zip(adatas, names, strict=True)], adatas


def joined(adatas: list[ad.AnnData], **options: Any) -> ad.AnnData:
    joint: ad.AnnData = ad.concat(adatas, **options)
    # Where genes are missing, anndata 0.13 makes dense values float64.
    joint.X = joint.X.astype(np.result_type(*(each.X.dtype for each in adatas)))
    for name in filter(None, joint.layers):
        dtypes = [each.layers[name].dtype for each in adatas]
        joint.layers[name] = joint.layers[name].astype(np.result_type(*dtypes))
    return joint


def all_parts(store: Path) -> list[ad.AnnData]:
    parts = parts_of(store)
    assert parts
    return parts


def check_rows(part: ad.AnnData, truth: ad.AnnData, *, names: list[str]) -> None:
    """Each named element of a part is that of the same cells in memory."""
    same = truth[part.obs_names]
    for name in names:
        folder, _, key = name.partition("/")
        found, expected = (
            each.X if name == "X" else getattr(each, folder)[key] for each in (part, same)
        )
        if isinstance(expected, pd.DataFrame):
            assert list(found.columns) == list(expected.columns)
            for column in expected:
                left, right = found[column], expected[column]
                assert left.isna().tolist() == right.isna().tolist()
                assert left.dropna().tolist() == right.dropna().tolist()
                assert pd.api.types.is_numeric_dtype(left) == pd.api.types.is_numeric_dtype(right)
        else:
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(dense(found), dense(expected))


MATRICES = [
    "X", "layers/counts", "layers/normal", "layers/full",
    "obsm/X_pca", "obsm/images", "obsm/sparse",
]  # fmt: skip


@pytest.mark.parametrize("codec", ["delta", "annbatch"])
def test_all_elements(pair, out, codec):
    paths, adatas = pair
    with pytest.warns(UserWarning, match="`uns` differs between files, .* without 'nested/of'"):
        done = preshuffle(paths, out, elements="all", memory=30_000, codec=codec)
    assert done.n_parts > 2
    truth = joined(adatas)
    seen = list[str]()
    for part in all_parts(out):
        check_rows(part, truth, names=[*MATRICES, "obsm/frame"])
        assert sorted(filter(None, part.layers)) == ["counts", "full", "normal"]
        assert sorted(part.obsm) == ["X_pca", "frame", "images", "sparse"]
        pd.testing.assert_frame_equal(part.var, adatas[0].var)
        pd.testing.assert_frame_equal(part.raw.var, adatas[0].raw.var)
        raw = np.vstack([dense(each.raw.X) for each in adatas])
        rows = truth.obs_names.get_indexer(part.obs_names)
        np.testing.assert_array_equal(dense(part.raw.X), raw[rows])
        assert part.uns["title"] == "cells"
        np.testing.assert_array_equal(part.uns["nested"]["array"], np.arange(4))
        assert "of" not in part.uns["nested"]
        seen += list(part.obs_names)
    assert sorted(seen) == sorted(truth.obs_names)
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_uns_of_one_file_is_as_it_was(pair, out):
    (path, _), (adata, _) = pair
    preshuffle(path, out, elements=["X", "uns"], memory=20_000)
    for part in all_parts(out):
        assert part.uns.keys() == adata.uns.keys()
        assert part.uns["nested"]["of"] == "p1"


def test_named_elements_alone(pair, out):
    paths, adatas = pair
    preshuffle(paths, out, elements=["layers/counts", "obsm/frame"], memory=20_000)
    for part in all_parts(out):
        assert part.X is None
        assert list(part.layers) == ["counts"]
        assert list(part.obsm) == ["frame"]
        assert part.raw is None
        assert not part.uns
        check_rows(part, joined(adatas), names=["layers/counts", "obsm/frame"])


def test_only_an_array_of_obsm(pair, out):
    paths, adatas = pair
    preshuffle(paths, out, elements=["obsm/images"], memory=20_000)
    for part in all_parts(out):
        pd.testing.assert_frame_equal(part.var, adatas[0].var)
        check_rows(part, joined(adatas), names=["obsm/images"])


def test_minibatches_of_the_copy(pair, out):
    """The whole way: a loader with workers over the copy, resumed in the middle."""
    paths, adatas = pair
    names = ["X", "layers/normal", "obsm/images", "raw/X"]
    preshuffle(paths, out, elements=names, memory=20_000)
    collection = open_collection(out, elements=names, obs=["plate"])
    loader = CellDataset(collection, BlockShuffling(4), 8, seed=3).loader(num_workers=2)
    truth = joined(adatas)
    raw = np.vstack([dense(each.raw.X) for each in adatas])
    seen = list[str]()
    first = list(itertools.islice(loader, 3))
    resumed = CellDataset(collection, BlockShuffling(4), 8, seed=3).loader()
    resumed.load_state_dict(loader.state_dict())
    for minibatch in (*first, *resumed):
        of_cells = collection.obs_names(minibatch.rows.numpy())
        same = truth[of_cells]
        np.testing.assert_array_equal(minibatch.X.to_dense().numpy(), dense(same.X))
        np.testing.assert_array_equal(
            minibatch["layers/normal"].to_dense().numpy(), dense(same.layers["normal"])
        )
        np.testing.assert_array_equal(minibatch["obsm/images"].numpy(), same.obsm["images"])
        rows = truth.obs_names.get_indexer(of_cells)
        np.testing.assert_array_equal(minibatch["raw/X"].to_dense().numpy(), raw[rows])
        seen += list(of_cells)
    assert sorted(seen) == sorted(truth.obs_names)


# Layers that have the same indices as X


@pytest.mark.parametrize("links", [True, False])
def test_layers_share_indices_with_x(write_h5ad, tmp_path, monkeypatch, links):
    counts = sp.csr_matrix(np.random.default_rng(0).poisson(0.4, (90, 40)).astype(np.float32))
    other = sp.csr_matrix(np.random.default_rng(1).poisson(0.4, (90, 40)))
    path = write_h5ad(counts, layers={"normal": counts.log1p(), "other": other})
    if not links:

        def refused(*_):
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(_dataset, "os", SimpleNamespace(link=refused))
    out = tmp_path / "out.zarr"
    names = ["X", "layers/normal", "layers/other"]
    done = preshuffle(path, out, elements=names, memory=30_000)
    assert done.n_parts > 1
    for number, part in enumerate(all_parts(out)):
        rows = part.obs["source_row"]
        for found, expected in (
            (part.X, counts), (part.layers["normal"], counts.log1p()),
            (part.layers["other"], other),
        ):  # fmt: skip
            np.testing.assert_array_equal(dense(found), dense(expected[rows]))
        of_part = out / f"dataset_{number}"
        for array, name in itertools.product(("indices", "indptr"), ("normal", "other")):
            first, second = (
                of_part / matrix / array / "c" / "0" for matrix in ("X", f"layers/{name}")
            )
            assert first.samefile(second) == (links and name == "normal")
    files = [file for file in out.rglob("*") if file.is_file()]
    sizes = {(file.stat().st_dev, file.stat().st_ino): file.stat().st_size for file in files}
    assert done.n_bytes == sum(sizes.values())
    assert (len(sizes) < len(files)) == links


# Genes


@pytest.fixture(scope="module")
def other_genes(new_folder):
    folder = new_folder()
    adatas = [adata_of(1, 25, ["a", "b", "c", "d"]), adata_of(2, 31, ["d", "e", "b"], csc=True)]
    adatas[1].var["only here"] = ["x", "y", "z"]
    return [write(each, folder / f"{k}.h5ad") for k, each in enumerate(adatas)], adatas


@pytest.mark.parametrize("join", ["inner", "outer"])
def test_joined_genes(other_genes, out, join):
    paths, adatas = other_genes
    with pytest.raises(MismatchError, match="has other genes"):
        preshuffle(paths, out)
    preshuffle(paths, out, elements=["X", "layers/full"], join_vars=join, memory=15_000)
    truth = joined(adatas, join=join, fill_value=0)
    for part in all_parts(out):
        assert set(part.var_names) == set(truth.var_names)
        check_rows(part, truth[:, part.var_names], names=["X", "layers/full"])
        of_first = adatas[0].var["length"].reindex(part.var_names).dropna()
        assert part.var["length"][of_first.index].tolist() == of_first.tolist()
    if join == "outer":
        assert part.var["only here"].dropna().to_dict() == {"e": "y"}


def test_chosen_genes(other_genes, out):
    paths, adatas = other_genes
    preshuffle(paths, out, genes=["b", "d"], memory=15_000)
    truth = joined(adatas)
    for part in all_parts(out):
        assert list(part.var_names) == ["b", "d"]
        check_rows(part, truth[:, ["b", "d"]], names=["X"])
    with pytest.raises(ParameterError, match="was begun with other genes"):
        preshuffle(paths, out, genes=["d", "b"], memory=15_000)


# Cells


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    "which",
    [{"where": "number % 3 == 0 and plate == 'p2' or number < 5"}, {"rows": [60, 3, 5]}],
    ids=["where", "rows"],
)
def test_chosen_cells(plates, out, in_memory, which, in_order):
    done = preshuffle(plates, out, memory=6_000, in_order=in_order, elements=["X"], **which)
    collection = open_collection(plates)
    expected = collection.where(which["where"]) if "where" in which else np.array([3, 5, 60])
    truth, starts = in_memory(plates), {plates[0].name: 0, plates[1].name: 37}
    rows = []
    for part in all_parts(out):
        own = part.obs["source_file"].map(starts).astype(int) + part.obs["source_row"]
        np.testing.assert_array_equal(dense(part.X), truth[own])
        rows += own.tolist()
    assert done.n_cells == len(expected)
    assert (rows if in_order else sorted(rows)) == expected.tolist()
    with pytest.raises(ParameterError, match="was begun with other rows"):
        preshuffle(plates, out, memory=6_000, in_order=in_order, elements=["X"], rows=[1, 2, 3])


def test_chosen_cells_are_resumed(plates, tmp_path):
    rows = np.arange(63) % 4 > 0
    whole, out = tmp_path / "whole.zarr", tmp_path / "out.zarr"
    preshuffle(plates, whole, memory=6_000, rows=rows)
    interrupted(plates, out, 1, memory=6_000, rows=rows)
    preshuffle(plates, out, memory=6_000, rows=rows)
    for found, expected in zip(all_parts(out), all_parts(whole), strict=True):
        np.testing.assert_array_equal(dense(found.X), dense(expected.X))
        pd.testing.assert_frame_equal(found.obs, expected.obs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elements": []}, "at least one"),
        ({"elements": ["uns"]}, "at least one matrix"),
        ({"elements": ["pca"]}, "`elements` must be 'X'"),
        ({"elements": ["X", "X"]}, "each once"),
        ({"elements": ["X"], "element": "X"}, "`element` and `elements` cannot be combined"),
        ({"element": "obsm/pca"}, r"give elements=\['obsm/pca'\]"),
        ({"where": "plate == 'none'"}, "no cell fulfils"),
        ({"where": "plate == 'p1'", "rows": [1]}, "cannot be combined"),
        ({"rows": [1, 1]}, "has a row twice"),
        ({"rows": []}, "is empty"),
        ({"rows": [63]}, "row 63 is outside a collection of 63 rows"),
        ({"genes": ["gene1"], "join_vars": "inner"}, "cannot be combined"),
    ],
)
def test_what_cannot_be(plates, out, options, message):
    with pytest.raises(ParameterError, match=message):
        preshuffle(plates, out, **options)
    assert not out.exists()


def test_elements_that_are_not_there(pair, out):
    with pytest.raises(FormatError, match="has no `layers/none`; its layers are: counts"):
        preshuffle(pair[0], out, elements=["X", "layers/none"])
    assert not out.exists()


# MuData


@pytest.fixture(scope="module")
def mudata_file(new_folder):
    mudata = pytest.importorskip("mudata")
    rng = np.random.default_rng(0)
    rna = adata_of(5, 40, ["a", "b", "c"])
    protein = ad.AnnData(
        rng.normal(size=(40, 2)).astype(np.float32),
        obs=pd.DataFrame({"batch": rng.integers(0, 3, 40)}, index=rna.obs_names),
        var=pd.DataFrame(index=["p1", "p2"]),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = mudata.MuData({"rna": rna, "protein": protein[rng.permutation(40)].copy()})
        whole.obs["donor"] = pd.Categorical(np.resize(["d1", "d2"], 40))
        whole.obsm["joint"] = rng.normal(size=(40, 2))
        whole.uns["of all"] = 3
        path = new_folder() / "cells.h5mu"
        with ad.settings.override(allow_write_nullable_strings=True, zarr_write_format=3):
            whole.write(path)
    return path, whole


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_mudata(mudata_file, out):
    import mudata  # noqa: PLC0415 - optional

    path, whole = mudata_file
    done = preshuffle(path, out, elements="all", memory=25_000)
    assert done.n_parts > 1
    seen = list[str]()
    for number in range(done.n_parts):
        part = mudata.read_zarr(out / f"dataset_{number}")
        assert list(part.mod) == list(whole.mod)
        assert part.uns["of all"] == 3
        expected = whole[part.obs_names]
        np.testing.assert_array_equal(part.obsm["joint"], expected.obsm["joint"])
        assert part.obs["donor"].tolist() == expected.obs["donor"].tolist()
        for name in whole.mod:
            own, truth = part[name], expected[name][part.obs_names]
            np.testing.assert_array_equal(own.obs_names, part.obs_names)
            assert list(own.var_names) == list(truth.var_names)
            assert own.var.to_dict() == truth.var.to_dict()
            np.testing.assert_array_equal(dense(own.X), dense(truth.X))
            for column in truth.obs:
                assert own.obs[column].tolist() == truth.obs[column].tolist()
        check_rows(part["rna"], whole["rna"], names=[*MATRICES, "obsm/frame"])
        assert part["rna"].uns["title"] == "cells"
        assert list(part.var_names) == list(whole.var_names)
        seen += list(part.obs_names)
    assert sorted(seen) == sorted(whole.obs_names)
    names = ["mod/rna/X", "mod/protein/X", "obsm/joint"]
    copied = open_collection(out, elements=names, obs=["donor", "rna:plate"])
    cells = copied[[3, 0]]
    found = whole[copied.obs_names([3, 0])]
    np.testing.assert_array_equal(cells["obsm/joint"], found.obsm["joint"])
    np.testing.assert_array_equal(dense(cells["mod/rna/X"]), dense(found["rna"].X))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_one_modality(mudata_file, out):
    import mudata  # noqa: PLC0415 - optional

    path, whole = mudata_file
    preshuffle(path, out, elements=["mod/protein/X"])
    part = mudata.read_zarr(out / "dataset_0")
    assert list(part.mod) == ["protein"]
    truth = whole["protein"][part.obs_names]
    np.testing.assert_array_equal(part["protein"].X, truth.X)


# The command


def test_command(pair, out, tmp_path):
    paths, adatas = pair
    open_collection(paths[0], elements=["layers/normal"])[[0]]  # compiled, which stderr tells
    genes, rows = tmp_path / "genes.txt", tmp_path / "rows.npy"
    genes.write_text("g3\ng1\n", "utf-8-sig")  # as Windows writes it
    np.save(rows, np.arange(0, 71, 2))
    result = commands.cellfeed(
        "preshuffle", *paths, out, "--elements", "X,layers/normal", "--genes", genes,
        "--rows", rows, "--in-order",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    (part,) = all_parts(out)
    truth = joined(adatas)[::2, ["g3", "g1"]]
    assert list(part.obs_names) == list(truth.obs_names)
    check_rows(part, truth, names=["X", "layers/normal"])


def test_command_refuses_in_one_line(plates, out, tmp_path):
    broken = tmp_path / "rows.npy"
    broken.write_text("no array")
    latin = tmp_path / "latin.txt"
    latin.write_text("gène", "latin-1")
    for options, message in (
        (["--rows", broken], "is not an array of NumPy"),
        (["--where", "plate =="], "`where`|condition|query"),
        (["--elements", "pca"], "`elements` must be"),
        (["--genes", tmp_path / "none.txt"], "none.txt"),
        (["--genes", latin], "latin.txt: is not text in UTF-8"),
    ):
        result = commands.cellfeed("preshuffle", *plates, out, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(("Error: ", "Usage: "))
        assert "Traceback" not in result.stderr
        assert re.search(message, result.stderr)
