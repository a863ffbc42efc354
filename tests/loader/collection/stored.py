"""Files whose matrices lie in every way that has been seen, with what is in them, dense."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from hypothesis import strategies as st
from tests.loader.matrices import dense
from tests.loader.zarr_stores import written_at_once

from cellfeed import Collection, open_collection

# Each element, and its number of columns; None stands for one per gene.
COLUMNS = {"X": None, "layers/counts": None, "raw/X": 11, "obsm/X_pca": 3, "obsm/sparse": 5}
DTYPES = ("float32", "float64", "uint8", "int64")
N_ALIKE, N_OTHERS = 7, 9  # files with the same genes, and with some others beside them


@dataclass(frozen=True)
class Storage:
    """How a matrix lies in a file."""

    n_rows: int = 12
    dtype: str = "float32"
    layout: str = "csr"
    density: float = 0.3
    compression: str | None = None
    chunk: int | None = None
    index_dtype: str = "int32"
    big_endian: bool = False
    unsorted: bool = False
    twice: bool = False
    seed: int = 0
    n_vars: int = field(default=9, kw_only=True)
    largest: int = field(default=98, kw_only=True)

    def matrix(self) -> Any:
        rng = np.random.default_rng(self.seed)
        shape = (self.n_rows, self.n_vars)
        values = rng.integers(1, self.largest + 1, shape)
        made = np.where(rng.random(shape) < self.density, values, 0).astype(self.dtype)
        return sp.csr_matrix(made) if self.layout == "csr" else made

    def lay_out(self, file: h5py.File, element: str, rewrite: Callable[..., None]) -> None:
        """Write an element of a file anew, as described."""
        if self.layout != "csr":
            self._relay(file, element, rewrite)
            return
        group = file[element]
        for start, stop in itertools.pairwise(group["indptr"][:]):
            if self.unsorted:
                for name in ("data", "indices"):
                    group[name][start:stop] = group[name][start:stop][::-1]
            if self.twice and stop > start:
                group["indices"][start:stop] = group["indices"][start]
        self._relay(group, "data", rewrite)
        self._relay(group, "indices", rewrite, self.index_dtype)
        self._relay(group, "indptr", rewrite, self.index_dtype)

    def _relay(
        self, group: h5py.Group, name: str, rewrite: Callable[..., None], dtype: Any = None
    ) -> None:
        values = group[name][()]
        stored_as = values.dtype if dtype is None else np.dtype(dtype)
        rows = max(1, min(self.chunk or 1000, len(values)))
        rewrite(
            group,
            name,
            values,
            dtype=stored_as.newbyteorder(">") if self.big_endian else stored_as,
            chunks=(rows, *values.shape[1:]) if self.chunk and values.size else None,
            compression=self.compression if values.size else None,
        )


def write(adata: ad.AnnData, path: Path, compression: Any = None) -> Path:
    """Write an .h5ad or a .zarr, without the warnings of anndata and zarr."""
    settings = ad.settings.override(zarr_write_format=3, allow_write_nullable_strings=True)
    with settings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.suffix == ".zarr":
            with written_at_once(path) as store:
                adata.write_zarr(store)
        else:
            adata.write_h5ad(path, compression=compression)
    return path


def named(what: str, n: int) -> list[str]:
    return [f"{what}{k}" for k in range(n)]


@dataclass(frozen=True)
class File:
    """A file with all of `COLUMNS`."""

    path: Path
    genes: list[str]
    storages: dict[str, Storage]
    arrays: dict[str, np.ndarray] = field(repr=False)


def write_file(
    path: Path,
    genes: Sequence[str],
    storages: dict[str, Storage],
    rewrite: Callable[..., None],
    compression: Any = None,
) -> File:
    storages = {
        name: replace(each, n_vars=COLUMNS[name] or len(genes), seed=each.seed + k)
        for k, (name, each) in enumerate(storages.items())
    }
    made = {name: each.matrix() for name, each in storages.items()}
    n_rows = storages["X"].n_rows
    numbers = np.random.default_rng(n_rows).random(n_rows)
    obs = pd.DataFrame({"number": numbers}, index=named("cell", n_rows))
    adata = ad.AnnData(made["X"], obs=obs, var=pd.DataFrame(index=list(genes)))
    raw_var = pd.DataFrame(index=named("raw", made["raw/X"].shape[1]))
    adata.raw = ad.AnnData(made["raw/X"], obs=obs, var=raw_var)
    adata.layers["counts"] = made["layers/counts"]
    adata.obsm["X_pca"], adata.obsm["sparse"] = made["obsm/X_pca"], made["obsm/sparse"]
    write(adata, path, compression)
    if path.suffix == ".h5ad":
        with h5py.File(path, "r+") as file:
            for name, each in storages.items():
                if each.chunk:
                    each.lay_out(file, name, rewrite)
        stored = {name: _read(path, name) for name in made if not storages[name].big_endian}
        made |= stored  # anndata cannot read big-endian CSR
    return File(path, list(genes), storages, {name: dense(each) for name, each in made.items()})


def _read(path: Path, element: str) -> Any:
    with h5py.File(path) as file:
        return ad.io.read_elem(file[element])


def write_files(
    folder: Path, rewrite: Callable[..., None], *, are_distinct: bool = False
) -> list[File]:
    """Write `N_ALIKE` files with the same genes in any order, and `N_OTHERS` with others, too."""
    rng, files = np.random.default_rng(0), []
    for number in range(N_ALIKE + N_OTHERS):
        n_own = 0 if number < N_ALIKE else rng.integers(6)
        own = rng.permutation(named("own", 6))[:n_own]
        genes = rng.permutation([*named("gene", 7), *own]).tolist()
        suffix = rng.choice(["h5ad", "h5ad", "zarr"])
        compression = [None, "gzip"][rng.integers(2)]
        n_rows = int(rng.integers(1, 25))
        storages = {
            name: Storage(
                n_rows,
                str(rng.choice(DTYPES)),
                str(rng.choice(["csr", "csr", "dense"])),
                0.4,
                [None, "gzip", "lzf"][rng.integers(3)],
                int(rng.choice([0, 1, 4, 11])),
                str(rng.choice(["int32", "int64"])),
                big_endian=(is_big_endian := bool(rng.random() < 0.2)),
                unsorted=bool(rng.random() < 0.5),
                twice=not is_big_endian and bool(rng.random() < 0.3) and not are_distinct,
                seed=number * len(COLUMNS),
                largest=20,  # a row of these, added up, is a uint8
            )
            for name in COLUMNS
        }
        path = folder / f"{number:02}.{suffix}"
        files.append(write_file(path, genes, storages, rewrite, compression))
    return files


def some_of(files: Sequence[File], join: str) -> st.SearchStrategy[list[File]]:
    """One to three of the files, with the same genes if genes are not joined."""
    return st.lists(
        st.sampled_from(files[:N_ALIKE] if join == "same" else files),
        min_size=1,
        max_size=3,
        unique_by=lambda each: each.path,
    )


@st.composite
def collections_of(draw: st.DrawFn, files: Sequence[File], join: Any) -> Collection:
    """Any elements of some of the files, whose genes are joined, or chosen if they can be."""
    some = draw(some_of(files, join))
    elements = draw(st.lists(st.sampled_from([*COLUMNS]), min_size=1, unique=True))
    has_genes = "raw/X" not in elements and elements[0] in ("X", "layers/counts")
    genes: dict[str, Any] = (
        {"genes": ["gene3", "gene0", "gene5"]} if join == "genes" and has_genes else {}
    )
    return open_collection(
        [each.path for each in some],
        elements=elements,
        obs=["number"],
        join_vars="same" if genes else "outer" if join == "genes" else join,
        **genes,
    )
