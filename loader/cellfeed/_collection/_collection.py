"""Many files as one collection of cells."""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import Cells, ObsColumn
from cellfeed._chunks import ChunkReads
from cellfeed._collection._join_obs import join_column
from cellfeed._errors import FormatError, MismatchError, ParameterError, PathError
from cellfeed._layouts import RowTarget
from cellfeed._reading import OtherRead, Reader, RowReads, load_tables
from cellfeed._runs import Runs, count_rows, split_at
from cellfeed._sources import Layout, Source, is_zarr, open_sources

__all__ = ["Collection", "open_collection"]

PathLike = str | os.PathLike[str]

_SAMPLED_ROWS = 10_000


def open_collection(
    paths: PathLike | Iterable[PathLike],
    *,
    obs: Sequence[str] = (),
    layer: str | None = None,
    raw: bool = False,
) -> "Collection":
    """Open one or many ``.h5ad`` files or zarr stores as one collection.

    Parameters
    ----------
    paths
        An ``.h5ad`` file, a zarr store of AnnData (format v2 or v3) or one that annbatch or
        `preshuffle` wrote, a pattern such as ``"plates/*.h5ad"``, a folder (all its ``.h5ad``
        files and ``.zarr`` stores, by name), or several of these.
    obs
        The obs columns that minibatches carry. Others are not read.
    layer
        The layer to read in place of ``X``.
    raw
        Whether to read ``raw`` in place of ``X``, with the genes of ``raw``.

    Raises
    ------
    PathError
        A path is missing, or matches no file.
    FormatError
        A file is truncated, is not AnnData, or lacks the layer, or ``raw``.
    ParameterError
        Both ``layer`` and ``raw`` are given.
    MismatchError
        The files do not have the same genes in the same order, or an obs column is numeric
        in one and categorical in another.
    ColumnError
        A file lacks an obs column.

    Examples
    --------
    >>> import anndata, numpy as np, pandas as pd, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in "ab":
    ...     obs = pd.DataFrame({"plate": [name] * 3}, index=list("xyz"))
    ...     anndata.AnnData(np.eye(3, dtype="float32"), obs=obs).write_h5ad(folder / f"{name}.h5ad")
    >>> collection = open_collection(folder, obs=["plate"])
    >>> len(collection), collection.n_vars
    (6, 3)
    >>> collection.obs["plate"].codes
    array([0, 0, 0, 1, 1, 1], dtype=int8)
    """
    if isinstance(obs, str):
        msg = f"`obs` must be a list of column names, but got the text {obs!r}; write [{obs!r}]"
        raise ParameterError(msg)
    if raw and layer is not None:
        msg = f"`raw` has no layers, but got layer={layer!r} and raw=True; give one of them"
        raise ParameterError(msg)
    files = _files(paths)
    return Collection(
        [source for path in files for source in open_sources(path, layer=layer, raw=raw)], obs=obs
    )


class Collection:
    """Cells of one or many sources, numbered through, with their obs columns.

    Made by `open_collection`. ``collection[rows]`` reads rows, in the order given.

    Parameters
    ----------
    sources
        At least one, with the same genes.
    obs
        Names of the obs columns to read.
    """

    def __init__(self, sources: Sequence[Source], *, obs: Sequence[str] = ()) -> None:
        self._sources = tuple(sources)
        first = self._sources[0]
        self._var_names = first.var_names()
        for source in self._sources:
            if source is not first:
                _check_same_genes(first.path, self._var_names, source)
            if source.shape[1] != self.n_vars:
                msg = (
                    f"{source.path}: var has {self.n_vars} rows, the matrix {source.shape[1]} "
                    "columns; write the file anew with anndata"
                )
                raise FormatError(msg)
        self._starts = np.cumsum([0, *(source.shape[0] for source in self._sources)])
        if len(self) == 0:
            msg = f"{first.path}: there are no cells in it; give files that have some"
            raise FormatError(msg)
        self._dtype = np.result_type(*(source.dtype for source in self._sources))
        self._obs = self._read_obs(tuple(obs))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        files = "1 file" if len(self._sources) == 1 else f"{len(self._sources)} files"
        return (
            f"Collection({len(self):,} cells x {self.n_vars:,} genes, {files}, "
            f"{self.layout} {self.dtype}, obs={list(self._obs)})"
        )

    def __getitem__(self, rows: NDArray[np.integer] | Sequence[int] | slice) -> Cells:
        distinct, order = np.unique(_row_numbers(rows, len(self)), return_inverse=True)
        with Reader(self) as reader:
            return reader.read(distinct, order)

    @property
    def n_vars(self) -> int:
        """Number of genes."""
        return len(self._var_names)

    @property
    def var_names(self) -> NDArray[np.object_]:
        """Gene names, str, shape (n_vars,)."""
        return self._var_names

    @property
    def obs(self) -> Mapping[str, ObsColumn]:
        """The obs columns that were asked for."""
        return MappingProxyType(self._obs)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values: one that holds those of every file."""
        return self._dtype

    @property
    def layout(self) -> Layout:
        """How rows are read: "csr" if every file is stored so, else "dense"."""
        return "csr" if all(source.layout == "csr" for source in self._sources) else "dense"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files and zarr stores, in the order of their rows."""
        return tuple(source.path for source in self._sources)

    @property
    def elements(self) -> tuple[str, ...]:
        """Which matrix of each of the `paths` is read: ``X``, ``layers/NAME`` or that of raw."""
        return tuple(source.element for source in self._sources)

    @property
    def codecs(self) -> tuple[str, ...]:
        """How the values in each of the `paths` are compressed: "gzip 4", "zstd, sharded", ..."""
        return tuple(source.codec() for source in self._sources)

    @property
    def cells_per_path(self) -> tuple[int, ...]:
        """Number of cells in each of the `paths`."""
        return tuple(np.diff(self._starts).tolist())

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """All files that hold the collection: the paths, or what lies in those that are stores."""
        return tuple(
            file
            for path in self.paths
            for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
            if file.is_file()
        )

    @property
    def rows_per_chunk(self) -> float:
        """Mean number of rows in a unit of storage that is read as a whole."""
        shares = np.diff(self._starts) / len(self)
        return float(shares @ [source.rows_per_chunk for source in self._sources])

    def mean_row_bytes(self, dtype: np.dtype[Any] | None = None) -> float:
        """Return the mean size of a cell in memory, from cells all over the collection.

        Parameters
        ----------
        dtype
            Dtype of the values; that of the collection if None.
        """
        index_bytes = np.dtype(np.int32).itemsize if self.layout == "csr" else 0
        return self._mean_row_length * ((dtype or self.dtype).itemsize + index_bytes)

    def stored_row_bytes(self) -> float:
        """Return the mean size of a cell in storage, compressed."""
        return sum(source.stored_bytes() for source in self._sources) / len(self)

    @cached_property
    def _mean_row_length(self) -> float:
        rows = np.unique(np.linspace(0, len(self) - 1, _SAMPLED_ROWS).astype(np.int64))
        return float(self.row_lengths(np.stack([rows, rows + 1], axis=1)).mean())

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return how many elements each row of ``runs`` has in a buffer.

        Parameters
        ----------
        runs
            Ascending, disjoint row runs, shape (n, 2), int64.
        """
        parts = [self._sources[k].row_lengths(local) for k, local in self._split(runs)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def plan_reads(self, runs: Runs, target: RowTarget) -> RowReads:
        """Return what to read so that the rows of ``runs`` come to where ``target`` says.

        Parameters
        ----------
        runs, target
            Ascending, disjoint row runs, and one place for each of their rows.
        """
        chunk_reads, others = list[ChunkReads](), list[OtherRead]()
        filled = 0
        for k, local in self._split(runs):
            source, stop = self._sources[k], filled + count_rows(local)
            part = target[filled:stop]
            reads = source.chunk_reads(local, part)
            if reads is None:
                others.append(OtherRead(source, local, part))
            else:
                chunk_reads.append(reads)
            filled = stop
        return RowReads(ChunkReads.concatenate(chunk_reads), others)

    def load_tables(self) -> None:
        """Read row pointers and chunk tables now rather than with the first rows.

        Processes that are forked afterwards share them.
        """
        load_tables([source for source in self._sources if source.shape[0]])

    def _split(self, runs: Runs) -> list[tuple[int, Runs]]:
        return list(split_at(runs, self._starts))

    def _read_obs(self, columns: tuple[str, ...]) -> dict[str, ObsColumn]:
        if not columns:
            return {}
        tables = []
        for source in self._sources:
            table = source.read_obs(columns)
            if len(table) != source.shape[0]:
                msg = (
                    f"{source.path}: obs has {len(table)} rows, the matrix {source.shape[0]}; "
                    "write the file anew with anndata"
                )
                raise FormatError(msg)
            tables.append((source.path, table))
        return {
            name: join_column(name, [(path, table[name]) for path, table in tables])
            for name in columns
        }


def _files(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        msg = "no path was given; give .h5ad files or zarr stores, a folder of them, or a pattern"
        raise PathError(msg)
    files = [file for path in given for file in _expand(str(Path(path).expanduser()))]
    seen = set[Path]()
    for file in files:
        resolved = file.resolve()
        if resolved in seen:
            msg = f"{file}: given twice, so that its cells would count twice; give it once"
            raise PathError(msg)
        seen.add(resolved)
    return files


def _expand(path: str) -> list[Path]:
    if Path(path).is_dir() and not is_zarr(Path(path)):
        files = sorted([*Path(path).glob("*.h5ad"), *Path(path).glob("*.zarr")])
        if not files:
            msg = (
                f"{path}: the folder has no .h5ad files and no .zarr stores; "
                "give the folder that holds them"
            )
            raise PathError(msg)
        return files
    if Path(path).exists():
        return [Path(path)]
    matches = [Path(match) for match in sorted(glob.glob(path, recursive=True))]  # noqa: PTH207 - absolute patterns too
    if not matches:
        what = "matches no file" if glob.has_magic(path) else "no such file or folder"
        msg = f"{path}: {what}; check the path"
        raise PathError(msg)
    return matches


def _row_numbers(
    rows: NDArray[np.integer] | Sequence[int] | slice, n_rows: int
) -> NDArray[np.int64]:
    """Return ``np.arange(n_rows)[rows]``, but make no more numbers than are wanted."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(n_rows), dtype=np.int64)
    given = np.atleast_1d(rows)
    if given.dtype.kind == "b" and given.shape == (n_rows,):
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        msg = f"rows must be integers, a slice or a mask of {n_rows} booleans, but got {rows!r}"
        raise IndexError(msg)
    outside = given[(given < -n_rows) | (given >= n_rows)]
    if outside.size:
        msg = f"row {outside[0]} is outside a collection of {n_rows} rows"
        raise IndexError(msg)
    numbers = given.astype(np.int64)
    return np.where(numbers < 0, numbers + n_rows, numbers)


def _check_same_genes(first: Path, expected: NDArray[np.object_], source: Source) -> None:
    genes = source.var_names()
    if np.array_equal(genes, expected):
        return
    if set(genes) == set(expected):
        problem = f"has the genes of {first} in another order"
    else:
        n_shared = len(set(genes) & set(expected))
        problem = f"has other genes than {first} ({n_shared:,} of {len(expected):,} are shared)"
    msg = (
        f"{source.path}: {problem}; write all files with the same genes in the same order, "
        "such as `adata[:, shared_genes]`"
    )
    raise MismatchError(msg)
