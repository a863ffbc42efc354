"""Gene names are kept from one opening to the next. The oracle: names as anndata reads them."""

import pickle
import warnings

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import write_elem
from tests.loader.bytes.files import settle
from tests.loader.matrices import replace
from tests.loader.zarr_stores import in_this_thread

from cellfeed import FormatError, open_collection
from cellfeed.bytes import _location

N_GENES = 10_000  # the fewest that are kept
NAMES = np.array([f"gène {k}" for k in range(N_GENES)], object)


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    settle(monkeypatch)
    return tmp_path / "cache" / "tables"


def write_names(var, names, nullable, missing):
    del var["_index"]
    values = names.astype(str).astype(object)
    if nullable:
        values = pd.array(names, dtype="string")
        values[list(missing)] = pd.NA
    with ad.settings.override(allow_write_nullable_strings=True):
        write_elem(var, "_index", values)


def write(path, names=NAMES, *, nullable=False, missing=()):
    """Write a file or store; names as text, or as nullable strings, some of which are missing."""
    X = sp.random(5, len(names), density=0.01, format="csr", dtype=np.float32, random_state=0)
    with warnings.catch_warnings(), in_this_thread():
        warnings.simplefilter("ignore")  # what zarr and anndata say when stores are written
        if path.suffix == ".zarr":
            ad.AnnData(X).write_zarr(path)
            group = zarr.open_group(path, use_consolidated=False)
            write_names(group["var"], names, nullable, missing)
            zarr.consolidate_metadata(path)
        else:
            ad.AnnData(X).write_h5ad(path)
            with h5py.File(path, "r+") as file:
                write_names(file["var"], names, nullable, missing)
    return path


def names_of(*paths, **options):
    return list(open_collection(paths, **options).var_names)


def kept_of(tables):
    return sorted(tables.iterdir(), key=lambda path: path.stat().st_size) if tables.exists() else []


@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize("suffix", ["h5ad", "zarr"])
def test_are_read_once(tmp_path, tables, suffix, nullable, monkeypatch):
    paths = [write(tmp_path / f"{name}.{suffix}", nullable=nullable) for name in "ab"]
    assert names_of(*paths) == NAMES.tolist()
    where = h5py.Dataset if suffix == "h5ad" else zarr.Array
    as_it_was = where.__getitem__

    def read(array, key):
        assert array.shape != (N_GENES,), "names are read"
        return as_it_was(array, key)

    monkeypatch.setattr(where, "__getitem__", read)
    opened = open_collection(paths)
    for each in (opened, pickle.loads(pickle.dumps(opened))):
        assert list(each.var_names) == NAMES.tolist()
    assert len(kept_of(tables)) == 3  # which names each file has, and these names, once


@pytest.mark.parametrize("suffix", ["h5ad", "zarr"])
def test_of_which_one_is_missing_are_not_kept(tmp_path, tables, suffix):
    path = write(tmp_path / f"a.{suffix}", nullable=True, missing=[7])
    for _ in range(2):
        names = names_of(path)
        assert pd.isna(names[7])
        assert names[:7] + names[8:] == [*NAMES[:7], *NAMES[8:]]
    assert not any(NAMES[5].encode() in each.read_bytes() for each in kept_of(tables))


def test_of_files_that_differ(tmp_path):
    other = NAMES[::-1].copy()
    other[0] = "another"
    paths = [write(tmp_path / "a.h5ad"), write(tmp_path / "b.h5ad", other)]
    both = [*NAMES.tolist(), "another"]
    for _ in range(2):
        assert names_of(*paths, join_vars="outer") == both
        assert names_of(*paths, join_vars="inner") == NAMES[:-1].tolist()


@pytest.mark.parametrize("suffix", ["h5ad", "zarr"])
def test_few_are_kept_of_h5ad_only(tmp_path, tables, suffix):
    path = write(tmp_path / f"a.{suffix}", NAMES[:-1])
    for _ in range(2):
        assert names_of(path) == NAMES[:-1].tolist()
        assert len(kept_of(tables)) == (2 if suffix == "h5ad" else 0)


def test_of_a_file_that_has_just_changed_are_not_kept(tmp_path, tables, monkeypatch):
    path = write(tmp_path / "a.h5ad")
    monkeypatch.setattr(_location, "_SETTLED_NS", 1 << 60)
    assert names_of(path) == NAMES.tolist()
    assert len(kept_of(tables)) == 1  # for those that have the same names


def test_of_a_file_that_was_replaced(tmp_path):
    path = write(tmp_path / "a.h5ad")
    assert names_of(path) == NAMES.tolist()
    path.unlink()
    assert names_of(write(path, NAMES[::-1])) == NAMES[::-1].tolist()


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_kept_ones_that_are_damaged_are_read_anew(tmp_path, tables, damage, which):
    path = write(tmp_path / "a.h5ad")
    assert names_of(path) == NAMES.tolist()
    kept = kept_of(tables)[which]
    content = bytearray(kept.read_bytes())
    content[-80] ^= 1
    kept.unlink()
    if damage != "remove":
        kept.write_bytes(content if damage == "flip" else content[:-70])
    assert names_of(path) == NAMES.tolist()


def test_of_zarr_that_hold_what_ends_a_name(tmp_path, tables):
    names = NAMES.copy()
    names[3] = "a\0b"
    path = write(tmp_path / "a.zarr", names)
    for _ in range(2):
        assert names_of(path) == names.tolist()
    assert kept_of(tables) == []


def test_of_a_fixed_length(tmp_path):
    path = write(tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        encoded = np.char.encode(NAMES.astype(str), "utf-8")
        dtype = h5py.string_dtype("utf-8", encoded.dtype.itemsize)
        replace(file, "var/_index", encoded.astype(dtype))
    for _ in range(2):
        assert names_of(path) == NAMES.tolist()


def test_that_are_no_text(tmp_path):
    path = write(tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        file["var/_index"][7] = b"\xff\xfe"
    with pytest.raises(FormatError, match="var"):
        names_of(path)


def test_that_are_numbers_are_the_same_in_files_of_few_and_of_many(tmp_path):
    """Few are not kept, so that both ways of reading have to agree."""
    paths = []
    for n in (N_GENES - 10, N_GENES + 10):
        path = write(tmp_path / f"{n}.h5ad", np.arange(n).astype(object))
        with h5py.File(path, "r+") as file:
            name = file["var"].attrs["_index"]
            replace(file, f"var/{name}", np.arange(n))
            file["var"][name].attrs["encoding-type"] = "array"
        paths.append(path)
    for _ in range(2):
        assert len(names_of(*paths, join_vars="outer")) == N_GENES + 10
        assert len(names_of(*paths, join_vars="inner")) == N_GENES - 10
