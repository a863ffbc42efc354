"""Many files as one collection of cells."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import Cells, ObsColumn
from cellfeed._chunks import ChunkReads
from cellfeed._collection._element_names import require_elements
from cellfeed._collection._join_elements import join_elements
from cellfeed._collection._join_obs import JoinObs, read_obs
from cellfeed._collection._join_var import Genes, JoinVars
from cellfeed._collection._locations import PathLike, open_sources_of
from cellfeed._errors import FormatError, ParameterError
from cellfeed._layouts import Dtypes, Element, Layout, RowTarget, dtypes_of
from cellfeed._reading import OtherRead, Reader, RowReads, load_tables
from cellfeed._runs import Runs, count_rows, split_at
from cellfeed._sources import Source

__all__ = ["Collection", "open_collection"]

_SAMPLED_ROWS = 10_000


def open_collection(
    paths: PathLike | Iterable[PathLike],
    *,
    obs: Sequence[str] = (),
    elements: Sequence[str] = ("X",),
    join_vars: JoinVars = "same",
    genes: Sequence[str] | None = None,
    join_obs: JoinObs = "same",
) -> "Collection":
    """Open one or many ``.h5ad`` files or zarr stores as one collection.

    Parameters
    ----------
    paths
        An ``.h5ad`` file, a zarr store of AnnData (format v2 or v3) or one that annbatch or
        `preshuffle` wrote, a pattern such as ``"plates/*.h5ad"``, a folder (all its ``.h5ad``
        files and ``.zarr`` stores, by name), or several of these. Also whatever other packages
        open, by suffix or URL; see `cellfeed.sources.Storage`.
    obs
        The obs columns that minibatches carry. Others are not read.
    elements
        What minibatches carry, all of the same cells: ``"X"``, ``"layers/NAME"``, ``"raw/X"``
        (with the genes of ``raw``), ``"obsm/NAME"``. The first is ``minibatch.X``; each is
        ``minibatch[name]``.
    join_vars
        Which genes: those of the first file, which all have, in whatever order ("same"), those
        that every file has ("inner"), or those that any has ("outer"; zero where a file lacks
        one). All that has genes is joined so, ``raw/X`` by its own.
    genes
        The names of the genes to read, in this order, in place of all.
    join_obs
        Whether every file must have each column of ``obs`` ("same"), or those of files that lack
        one are missing: code -1 or NaN ("outer").

    Raises
    ------
    PathError
        A path is missing or matches no file, or nothing is known that opens such a URL.
    FormatError
        A file is truncated, is nothing that can be opened, or lacks an element.
    ParameterError
        An element is named in another way, or twice, or there is none; or ``join_vars``,
        ``genes`` or ``join_obs`` is not what it may be.
    MismatchError
        The files do not have the same genes, or lack one of ``genes``, or have two of one name
        where genes are told apart by it; an ``obsm`` array has more
        columns in one than in another, or an obs column is numeric in one and categorical in
        another.
    ColumnError
        A file lacks an obs column, or, with ``join_obs="outer"``, all files do.

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
    names, joint_genes = require_elements(elements), Genes(join_vars, genes)
    sources = open_sources_of(paths, names)
    return Collection(sources, obs=obs, genes=joint_genes, join_obs=join_obs)


class Collection:
    """Cells of one or many sources, numbered through, with their obs columns.

    Made by `open_collection`. ``collection[rows]`` reads rows, in the order given.

    Parameters
    ----------
    sources
        At least one, with the same elements.
    obs
        Names of the obs columns to read.
    genes
        Which genes it has; those of all sources, which must have the same, if None.
    join_obs
        See `open_collection`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        obs: Sequence[str] = (),
        genes: Genes | None = None,
        join_obs: JoinObs = "same",
    ) -> None:
        self._sources = tuple(sources)
        self._elements = join_elements(self._sources, genes or Genes())
        self._stored = {
            name: tuple(source.elements[name] for source in self._sources)
            for name in self._elements
        }
        self._starts = np.cumsum([0, *(source.n_rows for source in self._sources)])
        if len(self) == 0:
            msg = f"{self.locations[0]}: there are no cells in it; give files that have some"
            raise FormatError(msg)
        self._obs = read_obs(self._sources, tuple(obs), join_obs)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        elements = ", ".join(
            f"{each.name} ({each.layout} {each.dtype})" for each in self._elements.values()
        )
        files = "1 file" if len(self._sources) == 1 else f"{len(self._sources)} files"
        return (
            f"Collection({len(self):,} cells x {self.n_vars:,} genes, {files}, "
            f"{elements}, obs={list(self._obs)})"
        )

    def __getitem__(self, rows: NDArray[np.integer] | Sequence[int] | slice) -> Cells:
        distinct, order = np.unique(_row_numbers(rows, len(self)), return_inverse=True)
        with Reader(self) as reader:
            return reader.read(distinct, order)

    @property
    def elements(self) -> Mapping[str, Element]:
        """What is read, by name; the first is ``minibatch.X``."""
        return MappingProxyType(self._elements)

    @property
    def _first(self) -> Element:
        return next(iter(self._elements.values()))

    @property
    def n_vars(self) -> int:
        """Number of genes: columns of the first element."""
        return self._first.n_columns

    @property
    def var_names(self) -> NDArray[np.object_]:
        """Gene names, str, shape (n_vars,): those of the first element."""
        return self._first.column_names

    @property
    def obs(self) -> Mapping[str, ObsColumn]:
        """The obs columns that were asked for."""
        return MappingProxyType(self._obs)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values of the first element: one that holds those of every file."""
        return self._first.dtype

    @property
    def layout(self) -> Layout:
        """How the first element is read: "csr" if every file is stored so, else "dense"."""
        return self._first.layout

    @property
    def sources(self) -> tuple[Source, ...]:
        """What the collection is read from, in the order of its rows."""
        return self._sources

    @property
    def locations(self) -> tuple[Location, ...]:
        """The files, stores and URLs, in the order of their rows."""
        return tuple(source.location for source in self._sources)

    @property
    def codecs(self) -> tuple[str, ...]:
        """How the first element in each of the `locations` is compressed, such as "gzip 4"."""
        return tuple(source.elements[self._first.name].codec() for source in self._sources)

    @property
    def cells_per_location(self) -> tuple[int, ...]:
        """Number of cells in each of the `locations`."""
        return tuple(np.diff(self._starts).tolist())

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """All files of this machine that hold cells: those given, and those in folders."""
        return tuple(
            file
            for path in (location.path for location in self.locations)
            if path is not None
            for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
            if file.is_file()
        )

    @property
    def rows_per_chunk(self) -> float:
        """Mean number of rows of the first element in a unit of storage that is read as a whole."""
        shares = np.diff(self._starts) / len(self)
        return float(shares @ [each.rows_per_chunk for each in self._stored[self._first.name]])

    def mean_row_bytes(self, dtype: Dtypes = None, *, dense: bool = False) -> float:
        """Return the mean size of a cell in memory, from cells all over the collection.

        Parameters
        ----------
        dtype
            Dtype of the values of all elements, or of some by name; those of the collection if
            None.
        dense
            Whether elements are made dense that are stored sparse.
        """
        n_bytes, index_bytes = 0.0, np.dtype(np.int32).itemsize
        for name, value_dtype in dtypes_of(self._elements, dtype).items():
            element = self._elements[name]
            if dense or element.layout == "dense":
                n_bytes += element.n_columns * value_dtype.itemsize
            else:
                n_bytes += self.mean_row_lengths[name] * (value_dtype.itemsize + index_bytes)
        return n_bytes

    def stored_row_bytes(self) -> float:
        """Return the mean size of a cell in storage, compressed, with all its elements."""
        parts = (each for stored in self._stored.values() for each in stored)
        return sum(each.stored_bytes() for each in parts) / len(self)

    @cached_property
    def mean_row_lengths(self) -> Mapping[str, float]:
        """How many values a cell stores of each sparse element, by up to 10,000 cells."""
        rows = np.unique(np.linspace(0, len(self) - 1, _SAMPLED_ROWS).astype(np.int64))
        runs = np.stack([rows, rows + 1], axis=1)
        return {
            name: float(self.row_lengths(name, runs).mean())
            for name, element in self._elements.items()
            if element.layout == "csr"
        }

    def sources_of(self, rows: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return which of the sources each row is from."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def row_lengths(self, name: str, runs: Runs) -> NDArray[np.int64]:
        """Return how many values of a sparse element each row of ``runs`` stores.

        Parameters
        ----------
        name
            The element.
        runs
            Ascending, disjoint row runs, shape (n, 2), int64.
        """
        stored = self._stored[name]
        parts = [stored[k].row_lengths(local) for k, local in self._split(runs)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def plan_reads(self, runs: Runs, targets: Mapping[str, RowTarget]) -> RowReads:
        """Return what to read so that the rows of ``runs`` come to where ``targets`` say.

        Parameters
        ----------
        runs, targets
            Ascending, disjoint row runs, and for each element one place for each of their rows.
        """
        chunk_reads, others = list[ChunkReads](), list[OtherRead]()
        filled = 0
        for k, local in self._split(runs):
            stop = filled + count_rows(local)
            for name, target in targets.items():
                stored, part = self._stored[name][k], target[filled:stop]
                if self._elements[name].column_maps is not None:
                    part = replace(part, n_vars=stored.shape[1])
                reads = stored.chunk_reads(local, part)
                if reads is None:
                    others.append(OtherRead(stored, local, part))
                else:
                    chunk_reads.append(reads)
            filled = stop
        return RowReads(ChunkReads.concatenate(chunk_reads), others)

    def load_tables(self) -> None:
        """Read row pointers and chunk tables now rather than with the first rows.

        Processes that are forked afterwards share them.
        """
        stored = (each for source in self._sources for each in source.elements.values())
        load_tables([each for each in stored if each.shape[0]])

    def _split(self, runs: Runs) -> list[tuple[int, Runs]]:
        return list(split_at(runs, self._starts))


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
