"""Many files as one collection of cells."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._cells import Cells, CsrRows, ObsColumn, RaggedRows
from cellfeed._collection._chunk_starts import StoredRows
from cellfeed._collection._describe import described, slow_names, slow_reading, table_of
from cellfeed._collection._join_elements import join_elements
from cellfeed._collection._join_obs import JoinObs, OpenedObs, read_obs
from cellfeed._collection._join_var import Genes
from cellfeed._collection._query import Query
from cellfeed._collection._rows import known_mean, row_numbers
from cellfeed._collection._where import rows_where
from cellfeed._errors import FormatError
from cellfeed._layouts import Dtypes, Element, Layout, dtypes_of
from cellfeed._reading import Part, Reader, load_tables
from cellfeed._runs import Runs, count_rows, merge_consecutive, split_at
from cellfeed._sources import Source
from cellfeed.sampling import ChunkStarts

__all__ = ["Collection"]

_SAMPLED_ROWS = 10_000
_ROWS_READ = 200  # where lengths are not known before rows are read


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
        self._join_obs: JoinObs = join_obs
        self._obs = OpenedObs(read_obs(self._sources, tuple(obs), join_obs))
        self._has_warned = False

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        elements = ", ".join(
            f"{each.name} ({each.layout} {each.dtype})" for each in self._elements.values()
        )
        files = "1 file" if len(self._sources) == 1 else f"{len(self._sources)} files"
        slow = slow_names(described(self._sources, dtypes_of(self._elements, None)))
        return (
            f"Collection({self._shown_shape}, {files}, "
            f"{elements}, obs={list(self._obs)}{slow and f', read slowly: {slow}'})"
        )

    @property
    def _shown_shape(self) -> str:
        if self.layout == "ragged":
            return f"{len(self):,} rows"
        if self._stored[self._first.name][0].var is None:  # such as windows of tokens, and images
            row_shape = " x ".join(f"{n:,}" for n in self._first.row_shape)
            return f"{len(self):,} rows of {row_shape} values"
        return f"{len(self):,} cells x {self.n_vars:,} genes"

    def __getitem__(self, rows: NDArray[np.integer] | Sequence[int] | slice) -> Cells:
        distinct, order = np.unique(row_numbers(rows, len(self)), return_inverse=True)
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
        """Gene names of the first element, str, shape (n_vars,)."""
        return self._first.column_names

    @property
    def obs(self) -> Mapping[str, ObsColumn]:
        """The obs columns that it was opened with; `ColumnError` names the remedy for others."""
        return MappingProxyType(self._obs)

    def read_obs(self, columns: Sequence[str]) -> Mapping[str, ObsColumn]:
        """Return obs columns, and read those that were not asked for when this was opened.

        These are not kept.

        Raises
        ------
        ColumnError, MismatchError
            As of `open_collection`.
        """
        others = tuple(name for name in columns if name not in self._obs)
        there = self._obs | read_obs(self._sources, others, self._join_obs)
        return {name: there[name] for name in columns}

    def where(self, query: str) -> NDArray[np.int64]:
        """Return the rows whose obs fulfil a condition, ascending.

        It is evaluated by pandas, some rows at a time, and what is missing compares as there.

        Parameters
        ----------
        query
            Comparisons of obs columns with each other and with numbers and text, such as
            ``"cell_type == 'B' and n_counts > 500"``, joined by ``and``, ``or``, ``not``; also
            ``in [...]`` and ``not in [...]``, and arithmetic. A name that is no identifier of
            Python stands in backticks. No functions, attributes or variables. Columns that the
            collection was opened without are read for it.

        Raises
        ------
        ParameterError
            The query is none of this, or compares what pandas cannot compare.
        ColumnError
            There is no such column.

        Examples
        --------
        >>> import anndata, numpy as np, tempfile
        >>> from cellfeed import open_collection
        >>> path = Path(tempfile.mkdtemp()) / "a.h5ad"
        >>> obs = pd.DataFrame({"plate": list("abb")}, index=list("xyz"))
        >>> anndata.AnnData(np.eye(3), obs=obs).write_h5ad(path)
        >>> open_collection(path).where("plate == 'b'")
        array([1, 2])
        """
        asked = Query.of(query)
        return rows_where(asked, self.read_obs(asked.columns), len(self))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values of the first element: one that holds those of every file."""
        return self._first.dtype

    @property
    def layout(self) -> Layout:
        """How the first element is read: "csr" if any file is stored so, "dense" or "ragged"."""
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
    def is_remote(self) -> bool:
        """Whether any of them is on a server or in an object store."""
        return any(location.is_remote for location in self.locations)

    @property
    def direct_io(self) -> bool:
        """Whether files are read past the page cache."""
        return any(location.options.direct for location in self.locations)

    @property
    def can_be_forked(self) -> bool:
        """Whether worker processes may be forked from a process that has read from it."""
        return not self.is_remote and all(source.can_be_forked for source in self._sources)

    @property
    def codecs(self) -> tuple[str, ...]:
        """How the first element in each of the `locations` is compressed, such as "gzip 4"."""
        return tuple(source.elements[self._first.name].codec() for source in self._sources)

    def describe(self) -> pd.DataFrame:
        """Return how each element of each file is stored, and whether it is read fast.

        No values are read for it.

        Returns
        -------
        One row for each element of each of the `locations`, with the columns ``location``,
        ``element``, ``n_cells``, ``layout`` ("csr", "dense" or "ragged"), ``dtype``, ``codec``
        ("gzip 4"), ``chunk_shape`` (of the values; None if they are in one piece),
        ``rows_per_chunk`` (on average), ``is_fast`` (whether chunks are decoded by threads of
        cellfeed) and ``reason`` (why they are not, such as "through h5py: filter blosc2 is not
        supported"; else None).

        Examples
        --------
        >>> import anndata, numpy as np, tempfile
        >>> from cellfeed import open_collection
        >>> path = Path(tempfile.mkdtemp()) / "a.h5ad"
        >>> anndata.AnnData(np.eye(3, dtype=">f4")).write_h5ad(path, compression="gzip")
        >>> open_collection(path).describe()[["element", "codec", "is_fast", "reason"]]
          element   codec  is_fast                                    reason
        0       X  gzip 4    False  through h5py: its numbers are big-endian
        """
        return table_of(described(self._sources, dtypes_of(self._elements, None)))

    def slow_reading(self, dtype: Dtypes = None) -> str | None:
        """Return one line on what is read slowly, why, and what to do; None if nothing is.

        Parameters
        ----------
        dtype
            As of `mean_row_bytes`.
        """
        return slow_reading(described(self._sources, dtypes_of(self._elements, dtype)))

    def warn_if_slow(self, dtype: Dtypes = None) -> None:
        """Warn of what is read slowly as these dtypes, once, also where this is pickled since.

        Parameters
        ----------
        dtype
            As of `mean_row_bytes`.

        Warns
        -----
        UserWarning
            The line of `slow_reading`, if there is one.
        """
        line = None if self._has_warned else self.slow_reading(dtype)
        if line is not None:
            self._has_warned = True
            warnings.warn(line, UserWarning, stacklevel=3)

    @property
    def cells_per_location(self) -> tuple[int, ...]:
        """Number of cells in each of the `locations`."""
        return tuple(np.diff(self._starts).tolist())

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """All files of this machine that hold cells: those given, and those in folders."""
        found = [file for source in self._sources for file in source.files()]
        return tuple(dict.fromkeys(found))

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
            if element.layout == "ragged":
                n_bytes += self.mean_row_lengths[name] * value_dtype.itemsize
            elif dense or element.layout == "dense":
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
        """How many values a cell stores of each sparse or ragged element, by up to 10,000 cells."""
        rows = np.unique(np.linspace(0, len(self) - 1, _SAMPLED_ROWS).astype(np.int64))
        sampled = self.parts(merge_consecutive(rows))
        means = {
            name: known_mean(sampled[name])
            for name, element in self._elements.items()
            if element.layout != "dense"
        }
        if None not in means.values():
            return {name: mean for name, mean in means.items() if mean is not None}
        few = self[rows[:: max(1, rows.size // _ROWS_READ)]]
        return {name: _n_values(few[name]) / len(few) for name in means}

    def row_lengths(self, name: str, runs: Runs) -> NDArray[np.int64]:
        """Return how many values of a sparse or ragged element each row of ``runs`` stores.

        Rows that do not tell before they are read are read for it.

        Parameters
        ----------
        name
            The element.
        runs
            Ascending, disjoint row runs, shape (n, 2), int64.
        """
        lengths = np.empty(count_rows(runs), np.int64)
        for part in self.parts(runs)[name]:
            known = part.stored.row_lengths(part.runs)
            if known is None:
                rows = part.read_rows()
                if isinstance(rows, RaggedRows):
                    known = rows.lengths
                else:
                    is_csr = isinstance(rows, CsrRows)
                    known = np.diff(rows.indptr) if is_csr else np.count_nonzero(rows, axis=1)
            lengths[part.rows] = known
        return lengths

    def parts(self, runs: Runs) -> dict[str, list[Part]]:
        """Return the rows of each element by the source that has them.

        Parameters
        ----------
        runs
            Ascending, disjoint row runs, shape (n, 2), int64.
        """
        parts = {name: list[Part]() for name in self._elements}
        filled = 0
        for k, local in split_at(runs, self._starts):
            stop = filled + count_rows(local)
            for name, element in self._elements.items():
                maps, stored = element.column_maps, self._stored[name][k]
                part = Part(
                    location=self._sources[k].location,
                    stored=stored,
                    runs=local,
                    rows=slice(filled, stop),
                    column_map=None if maps is None else maps[k],
                )
                parts[name].append(part.as_stored(filled))
            filled = stop
        return parts

    def chunk_starts(self) -> ChunkStarts:
        """Return which rows are the first to begin in a chunk of the first element.

        What `BlockShuffling` with ``align="chunks"`` asks for. Row pointers are read for it.
        """
        return ChunkStarts(StoredRows(self._stored[self._first.name], self.is_remote))

    def load_tables(self) -> None:
        """Read row pointers and chunk tables now rather than with the first rows.

        Processes that are forked afterwards share them.
        """
        stored = (each for source in self._sources for each in source.elements.values())
        load_tables([each for each in stored if each.shape[0]], are_remote=self.is_remote)


def _n_values(rows: Any) -> int:
    return int(rows.offsets[-1] if isinstance(rows, RaggedRows) else rows.nnz)
