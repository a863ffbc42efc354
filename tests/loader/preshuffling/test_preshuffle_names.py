"""Names of columns and elements: `preshuffle` writes what zarr can store, and refuses the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import read_elem, write_elem
from tests.loader.preshuffling.test_preshuffle import parts_of

from cellfeed import FormatError, ParameterError, open_collection, preshuffle
from cellfeed.preshuffling import _inputs

pytestmark = [
    pytest.mark.usefixtures("zarr_in_this_thread"),
    pytest.mark.filterwarnings(
        "ignore:Element .* was written without encoding metadata",
        "ignore:zarr v3 autosharding will be the default",
        "ignore:Forward slashes will be disallowed",
        "ignore:Numcodecs codecs are not in",
        "ignore:Object at .* is not recognized as a component of a Zarr hierarchy",
    ),
]

PLAIN = ["é", "e\u0301", " ", "a ", "...", "a:b", "a*?", 'a"b', "a\nb", "c", "index", "0"]
ODD = ["__categories", "__x", ".zarray", ".zgroup", ".cellfeed", "column-order", "x" * 255]
SLASHES = ["a/b", "/a", "a/", "a//b", "a\\b"]
OTHERS = ["", ".", "..", "zarr.json", "x" * 256, "é" * 128, "a\0b", "\ud800"]


@pytest.mark.parametrize("name", [*PLAIN, *ODD, *SLASHES, *OTHERS], ids=ascii)
def test_names_are_refused_that_zarr_cannot_store(tmp_path, name):
    """The oracle: a dictionary with this name is written and read by anndata."""
    group = zarr.create_group(tmp_path / "store")
    try:
        write_elem(group, "uns", {name: np.arange(2)})
        is_stored = list(read_elem(zarr.open_group(tmp_path / "store", mode="r")["uns"])) == [name]
    except (ValueError, OSError, AttributeError):
        is_stored = False
    assert (_inputs._why_not_stored(name) is None) == is_stored


X = sp.csr_matrix(np.eye(4, 3, dtype=np.float32))


def cells(**parts: Any) -> ad.AnnData:
    obs = pd.DataFrame(parts.pop("obs", {}), index=[f"cell{k}" for k in range(4)])
    var = pd.DataFrame(parts.pop("var", {}), index=[f"gene{k}" for k in range(3)])
    return ad.AnnData(X, obs, var, **parts)


def of_obs(name: str) -> ad.AnnData:
    return cells(obs={name: list("abcd"), "other": range(4)})


def of_index(name: str) -> ad.AnnData:
    adata = cells()
    adata.obs.index.name = name
    return adata


PLACES: dict[str, tuple[Callable[[str], ad.AnnData], str]] = {
    "obs": (of_obs, "`obs`"),
    "index of obs": (of_index, "`obs`"),
    "var": (lambda name: cells(var={name: range(3)}), "`var`"),
    "layer": (lambda name: cells(layers={name: X}), "`layers`"),
    "obsm": (lambda name: cells(obsm={name: np.ones((4, 2))}), "`obsm`"),
}


def write(adata: ad.AnnData, path: Path) -> Path:
    with h5py.File(path, "w") as file:
        write_elem(file, "/", adata)
    return path


def write_named(make: Callable[[str], ad.AnnData], name: str, path: Path) -> Path:
    """Write `make(name)` as anndata before 0.13 does, which refuses slashes in names."""
    with h5py.File(write(make("renamed"), path), "r+") as file:
        places = list[str]()
        file.visit(places.append)
        for attributes in [file[place].attrs for place in places]:
            columns = list(attributes.get("column-order", ()))
            if "renamed" in columns:
                columns[columns.index("renamed")] = name
                attributes["column-order"] = columns
            if attributes.get("_index") == "renamed":
                attributes["_index"] = name
        for place in places:
            if place.endswith("/renamed"):
                file.move(place, place.removesuffix("renamed") + name)
    return path


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["Age/Sex", "zarr.json"])
def test_nothing_is_written_of_files_with_such_names(tmp_path, out, place, name):
    make, where = PLACES[place]
    whole, odd = write(cells(), tmp_path / "a.h5ad"), write_named(make, name, tmp_path / "b.h5ad")
    elements = "all" if "obsm" in place or place == "layer" else None
    said = rf"b\.h5ad: {where} has the name '{name}', which zarr cannot store, since it "
    if elements == "all" and "/" in name:
        said = r"/Age` cannot be written \(encoding 'unknown'\); name the others: elements=\['X'"
    with pytest.raises((FormatError, ParameterError), match=said):
        preshuffle(odd, out, elements=elements)
    assert not out.exists()
    if place == "obs":
        with pytest.raises(FormatError, match=said):
            preshuffle([whole, odd], out, elements=elements)


@pytest.mark.slow
def test_other_odd_names_are_written(tmp_path, out):
    names = [*PLAIN, *ODD]
    adata = cells(
        obs={name: np.arange(4) + k for k, name in enumerate(names)},
        layers={name: X * (k + 1) for k, name in enumerate(names[:3])},
    )
    path = write(adata, tmp_path / "a.h5ad")
    preshuffle(path, out, elements="all", in_order=True)
    (part,) = parts_of(out)
    pd.testing.assert_frame_equal(part.obs[names], ad.read_h5ad(path).obs)
    found = open_collection(out, obs=names)
    for name in names:
        np.testing.assert_array_equal(found.obs[name].values, adata.obs[name])


@pytest.mark.parametrize("names", [("age", "Age"), ("e\u0301", "é")])
def test_names_that_are_one_on_macos(tmp_path, out, monkeypatch, names):
    path = write(cells(obs=dict.fromkeys(names, range(4))), tmp_path / "a.h5ad")
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(FormatError, match=r"a\.h5ad: `obs` has the names .*, which are one in"):
        preshuffle(path, out)
    assert not out.exists()
    monkeypatch.undo()
    preshuffle(path, out)
    assert {*names} <= {*parts_of(out)[0].obs}
