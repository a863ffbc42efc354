"""Everything that `preshuffle` keeps besides X, against anndata in memory."""

import errno
import itertools
import os
import re
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.collection.stored import write
from tests.loader.matrices import dense
from tests.loader.preshuffling.test_preshuffle import parts_of

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    MismatchError,
    ParameterError,
    open_collection,
    preshuffle,
)

pytestmark = pytest.mark.usefixtures("zarr_in_this_thread")

N_GENES = 12


def adata_of(seed: int, n_obs: int, genes: list[str]) -> ad.AnnData:
    """Cells with every kind of element; ``seed`` also names them."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(0.6, (n_obs, len(genes))).astype(np.float32)
    names = [f"{seed}-{number}" for number in range(n_obs)]
    X = sp.csr_matrix(counts)
    adata = ad.AnnData(
        X,
        obs=pd.DataFrame({"plate": [f"p{seed}"] * n_obs}, index=names),
        var=pd.DataFrame({"length": [len(gene) * 10 for gene in genes]}, index=genes),
        layers={"counts": X, "normal": X.log1p(), "full": counts},
        obsm={
            "X_pca": rng.normal(size=(n_obs, 3)).astype(np.float32),
            "images": rng.integers(0, 255, (n_obs, 4, 5, 3)).astype(np.uint8),
            "sparse": sp.random(n_obs, 6, 0.4, "csr", np.float64, rng),
        },
        uns={"title": "cells"},
    )
    of_all = ad.AnnData(
        sp.csr_matrix(rng.poisson(1, (n_obs, len(genes) + 2)).astype(np.float32)),
        var=pd.DataFrame({"raw length": 1}, index=[*genes, "extra 1", "extra 2"]),
    )
    adata.raw = of_all
    return adata


@pytest.fixture(scope="module")
def pair(new_folder):
    """Two files with the same genes and every kind of element, and what is in them."""
    folder, genes = new_folder(), [f"g{number}" for number in range(N_GENES)]
    adatas = [adata_of(seed, n, genes) for seed, n in ((1, 41), (2, 30))]
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


def check_rows(part: ad.AnnData, truth: ad.AnnData, *, names: list[str]) -> None:
    """Each named element of a part is that of the same cells in memory."""
    same = truth[part.obs_names]
    for name in names:
        found, expected = (named(each, name) for each in (part, same))
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(dense(found), dense(expected))


def named(adata: ad.AnnData, name: str) -> Any:
    """Return an element by its name."""
    folder, _, key = name.partition("/")
    return adata.X if name == "X" else getattr(adata, folder)[key]


MATRICES = [
    "X", "layers/counts", "layers/normal", "layers/full",
    "obsm/X_pca", "obsm/images", "obsm/sparse",
]  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "all": {"elements": "all"},
    "all as annbatch": {"elements": "all", "codec": "annbatch"},
    "some": {"elements": ["layers/counts", "obsm/X_pca"]},
    "images": {"elements": ["obsm/images"]},
    "cells": {"elements": ["X"], "rows": [60, 3, 5]},
    "cells in order": {"in_order": True, "elements": "all", "where": "plate == 'p2'"},
    "genes in order": {"in_order": True, "elements": ["X", "layers/full"], "genes": ["g7", "g2"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for_is_written(pair, out, name):
    """And nothing else; a loader reads the same of the copy."""
    (paths, adatas), options = pair, CASES[name]
    is_all, truth = options["elements"] == "all", joined(adatas)
    names = MATRICES if is_all else options["elements"]
    done = preshuffle(paths, out, memory=30_000, **options)
    rows = sorted(options.get("rows", range(truth.n_obs)))
    if "where" in options:
        rows = np.flatnonzero(truth.obs["plate"] == "p2").tolist()
    truth = truth[:, options.get("genes", truth.var_names)]
    seen, raw = list[str](), np.vstack([dense(each.raw.X) for each in adatas])
    for part in parts_of(out):
        check_rows(part, truth, names=names)
        kept = [f"{of}/{each}" for of in ("layers", "obsm") for each in getattr(part, of)]
        assert sorted(each for each in kept if not each.endswith("/None")) == sorted(
            {*names} - {"X"}
        )
        assert (part.X is not None) == ("X" in names)
        pd.testing.assert_frame_equal(part.var, adatas[0].var.loc[truth.var_names])
        assert (part.raw is not None) == is_all
        if is_all:
            pd.testing.assert_frame_equal(part.raw.var, adatas[0].raw.var)
            own = joined(adatas).obs_names.get_indexer(part.obs_names)
            np.testing.assert_array_equal(dense(part.raw.X), raw[own])
        seen += list(part.obs_names)
    assert done.n_cells == len(rows)
    expected = truth.obs_names[rows].tolist()
    assert (seen if "in_order" in options else sorted(seen)) == (
        expected if "in_order" in options else sorted(expected)
    )
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    collection = open_collection(out, elements=names)
    for minibatch in CellDataset(collection, BlockShuffling(4), 8, seed=3):
        same = truth[collection.obs_names(np.asarray(minibatch.rows))]
        for each in names:
            np.testing.assert_array_equal(dense(minibatch[each]), dense(named(same, each)))


# Layers that have the same indices as X


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
def test_layers_share_indices_with_x(write_h5ad, tmp_path, monkeypatch, links):
    counts = sp.csr_matrix(np.random.default_rng(0).poisson(0.4, (90, 40)).astype(np.float32))
    other = sp.csr_matrix(np.random.default_rng(1).poisson(0.4, (90, 40)))
    path = write_h5ad(counts, layers={"normal": counts.log1p(), "other": other})
    link = os.link

    def refused(source, target, **options):
        if links or str(source).endswith(".partial"):  # as zarr links its own
            return link(source, target, **options)
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    out = tmp_path / "out.zarr"
    names = ["X", "layers/normal", "layers/other"]
    done = preshuffle(path, out, elements=names, memory=30_000)
    assert done.n_parts > 1
    for number, part in enumerate(parts_of(out)):
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
    adatas = [adata_of(1, 25, ["a", "b", "c", "d"]), adata_of(2, 31, ["d", "e", "b"])]
    adatas[1].var["only here"] = ["x", "y", "z"]
    return [write(each, folder / f"{k}.h5ad") for k, each in enumerate(adatas)], adatas


@pytest.mark.slow
@pytest.mark.parametrize("join", ["inner", "outer"])
def test_joined_genes(other_genes, out, join):
    paths, adatas = other_genes
    with pytest.raises(MismatchError, match="has other genes"):
        preshuffle(paths, out)
    preshuffle(paths, out, elements=["X", "layers/full"], join_vars=join, memory=15_000)
    truth = joined(adatas, join=join, fill_value=0)
    for part in parts_of(out):
        assert set(part.var_names) == set(truth.var_names)
        check_rows(part, truth[:, part.var_names], names=["X", "layers/full"])
        of_first = adatas[0].var["length"].reindex(part.var_names).dropna()
        assert part.var["length"][of_first.index].tolist() == of_first.tolist()
    if join == "outer":
        assert part.var["only here"].dropna().to_dict() == {"e": "y"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elements": []}, "at least one"),
        ({"elements": ["uns"]}, "`elements` must be 'X'"),
        ({"elements": ["pca"]}, "`elements` must be 'X'"),
        ({"elements": ["X", "X"]}, "each once"),
        ({"where": "plate == 'none'"}, "no cell fulfils"),
        ({"where": "plate == 'p1'", "rows": [1]}, "cannot be combined"),
        ({"rows": [1, 1]}, "has a row twice"),
        ({"rows": []}, "is empty"),
        ({"rows": [63]}, "row 63 is outside a collection of 63 rows"),
        ({"genes": ["gene1"], "join_vars": "inner"}, "cannot be combined"),
        ({"memory": 0}, "memory >= 1"),
        ({"block_size": 0}, "block_size >= 1"),
        ({"seed": 0.5}, "seed"),
        ({"cells_per_chunk": 0}, "cells_per_chunk"),
        ({"codec": "zip"}, "`codec` must be one of 'delta', 'annbatch'"),
        ({"mix": 2}, "`mix` needs `append`"),
        ({"append": True}, r"is not a complete store .*write it without"),
        ({"group_by": "none"}, "`group_by` names 'none', but the columns of obs are"),
        ({"group_by": "plate", "in_order": True}, "`group_by` cannot be combined with `in_order`"),
        ({"group_by": []}, "`group_by` is empty"),
        ({"group_by": {"plate"}}, "`group_by` must be a list .* set, which has no order"),
    ],
)
def test_what_cannot_be(plates, out, options, message):
    with pytest.raises(ParameterError, match=message):
        preshuffle(plates, out, **options)
    assert not out.exists()


def test_elements_that_are_not_there_and_files_without_an_order(pair, out):
    with pytest.raises(FormatError, match="has no `layers/none`; its layers are: counts"):
        preshuffle(pair[0], out, elements=["X", "layers/none"])
    with pytest.raises(ParameterError, match=r"`paths` must be a list .* set, which has no order"):
        preshuffle({*pair[0]}, out)
    assert not out.exists()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_mudata_is_refused(tmp_path, out):
    mudata = pytest.importorskip("mudata")
    cells = ad.AnnData(np.eye(3, dtype=np.float32))
    mudata.MuData({"rna": cells}).write(tmp_path / "cells.h5mu")
    with pytest.raises(ParameterError, match=r"is MuData, .* `mod/rna/X` is named; write its mod"):
        preshuffle(tmp_path / "cells.h5mu", out, elements=["mod/rna/X"])
    with pytest.raises(
        FormatError, match=r"is MuData, whose .* `mdata\[name\].write_h5ad\(path\)`$"
    ):
        preshuffle(tmp_path / "cells.h5mu", out, elements="all")
    assert not out.exists()


def test_a_data_frame_is_refused(tmp_path, out):
    adata = ad.AnnData(np.eye(3, dtype=np.float32))
    adata.obsm["frame"] = pd.DataFrame({"a": range(3)}, index=adata.obs_names)
    adata.write_h5ad(tmp_path / "cells.h5ad")
    with pytest.raises(
        FormatError, match=r"`obsm/frame` is neither dense nor CSR .*to_numpy\(\)`$"
    ):
        preshuffle(tmp_path / "cells.h5ad", out, elements=["X", "obsm/frame"])
    with pytest.raises(ParameterError, match=r"encoding 'dataframe'\); .* elements=\['X'\]$"):
        preshuffle(tmp_path / "cells.h5ad", out, elements="all")


# The command


def test_command(pair, out):
    paths, adatas = pair
    compiled = open_collection(paths[0], elements=["layers/normal"])
    compiled[[0]]  # which stderr tells
    result = commands.cellfeed(
        "preshuffle", *paths, out, "--elements", "X,layers/normal",
        "--where", "plate == 'p2'", "--in-order",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    (part,) = parts_of(out)
    truth = adatas[1][:, adatas[0].var_names]
    assert list(part.obs_names) == list(truth.obs_names)
    check_rows(part, truth, names=["X", "layers/normal"])


def test_command_refuses_in_one_line(plates, out):
    for options, message in (
        (["--where", "plate =="], "`where`|condition|query"),
        (["--elements", "pca"], "`--elements` must be"),
    ):
        result = commands.cellfeed("preshuffle", *plates, out, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(("Error: ", "Usage: "))
        assert "Traceback" not in result.stderr
        assert re.search(message, result.stderr)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Variable names are not unique:UserWarning")
@pytest.mark.parametrize("as_series", [False, True])
def test_a_mask_of_genes_of_which_two_share_a_name(tmp_path, as_series):
    var = pd.DataFrame({"gene_ids": ["1", "2", "3", "4"]}, index=["TBCE", "MT-ND1", "CD4", "TBCE"])
    cells = ad.AnnData(sp.csr_matrix(np.arange(8, dtype=np.float32).reshape(2, 4)), var=var)
    cells.write_h5ad(tmp_path / "cells.h5ad")
    mask = ~var.index.str.startswith("MT-")
    genes = pd.Series(mask, var.index) if as_series else mask
    for _ in range(2):  # the second call finds the copy complete
        preshuffle([tmp_path / "cells.h5ad"], tmp_path / "copy.zarr", in_order=True, genes=genes)
    copy = open_collection(tmp_path / "copy.zarr")
    assert copy.var["gene_ids"].tolist() == ["1", "3", "4"]
    assert np.array_equal(copy[:].X.toarray(), cells.X.toarray()[:, mask])


def test_all_with_an_element_that_cannot_be_written(tmp_path):
    """The remedy names the others; awkward arrays need not be installed here."""
    path = tmp_path / "a.h5ad"
    adata = ad.AnnData(np.eye(4, dtype=np.float32))
    adata.obsm["pca"] = np.ones((4, 2))
    adata.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file.create_group("obsm/lists").attrs["encoding-type"] = "awkward-array"
    said = r"^`obsm/lists` .*\(encoding 'awkward-array'\); .* elements=\['X', 'obsm/pca'\]$"
    with pytest.raises(ParameterError, match=said):
        preshuffle(path, tmp_path / "out.zarr", elements="all")
