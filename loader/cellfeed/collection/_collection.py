"""`Collection`: the cells of many files as one."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError, ParameterError
from cellfeed._lazy import pd
from cellfeed._runs import Runs, expand
from cellfeed.bytes import Location, digest_of, digest_of_array
from cellfeed.bytes._remote import outside_lock
from cellfeed.collection._join_elements import Genes, join_elements, join_tables
from cellfeed.collection._join_obs import JoinObs, OpenedObs, names_of_obs, read_obs, rows_where
from cellfeed.collection._loaded import Loaded, load_once, load_rows
from cellfeed.decode import ChunkedArray, SlowRead
from cellfeed.fetch import Part, Reader, load_tables
from cellfeed.rows import (
    Cells,
    CsrChunks,
    CsrRows,
    DenseChunks,
    Dtypes,
    Element,
    Layout,
    ObsColumn,
    RaggedChunks,
    RaggedRows,
    dtypes_of,
)
from cellfeed.sampling import ChunkedRows, ChunkStarts
from cellfeed.sources import Source, StoredElement

if TYPE_CHECKING:
    import torch

    from cellfeed.collection._on_device import DeviceRows


def row_numbers(
    rows: NDArray[np.integer] | Sequence[int] | slice, n_rows: int
) -> NDArray[np.int64]:
    """Return ``np.arange(n_rows)[rows]`` without making numbers for other rows."""
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


# Which rows of a collection are the first to begin in a chunk.


def _rows_in_chunks(
    elements: Sequence[tuple[Source, StoredElement]], *, are_remote: bool
) -> list[ChunkedRows]:
    """Read how the rows of an element are divided into chunks, for each source."""
    load_tables([each for each in elements if each[1].shape[0]], are_remote=are_remote)
    return [_chunked_rows(*each) for each in elements]


def _chunked_rows(source: Source, stored: StoredElement) -> ChunkedRows:
    n_rows = stored.shape[0]
    if n_rows and stored.row_order is None and stored.chunk_starts is not None:
        return _in_groups(stored.chunk_starts)
    # Neighbours among cells that are stored in another order are no neighbours in chunks.
    with source.reading:
        chunks = stored.chunked() if n_rows and stored.row_order is None else None
    match chunks:
        case CsrChunks():
            size = max(_elements_of_chunk(each) for each in (chunks.indices, chunks.data))
            return ChunkedRows(n_rows=n_rows, chunk_size=size, pointer=chunks.indptr)
        case RaggedChunks():
            size = _elements_of_chunk(chunks.values)
            return ChunkedRows(n_rows=n_rows, chunk_size=size, pointer=chunks.indptr)
        case DenseChunks(values=ChunkedArray() as values) if chunks.n_columns:
            row_size = 1 if len(values.shape) > 1 else chunks.n_columns
            size = _elements_of_chunk(values)
            return ChunkedRows(n_rows=n_rows, chunk_size=size, row_size=row_size)
    return ChunkedRows(n_rows=n_rows)


def _in_groups(starts: NDArray[np.int64]) -> ChunkedRows:
    """Return rows in chunks of whole rows, each as if it were as large as the largest."""
    rows, n_rows = np.diff(starts), int(starts[-1])
    largest = int(rows.max())
    if (rows[:-1] == largest).all():
        return ChunkedRows(n_rows=n_rows, chunk_size=largest, row_size=1)
    skipped = np.arange(rows.size) * largest - starts[:-1]
    pointer = np.arange(n_rows + 1) + np.append(np.repeat(skipped, rows), skipped[-1])
    return ChunkedRows(n_rows=n_rows, chunk_size=largest, pointer=pointer)


def _elements_of_chunk(array: ChunkedArray) -> int:
    """Return the size of a chunk, in elements or rows; 0 if parts of chunks can be read."""
    return array.chunk_shape[0] if array.is_decoded_whole else 0


_SAMPLED_ROWS = 10_000
_SAMPLED_TO_LOAD = 512
_ROWS_READ = 200  # where lengths are not known before rows are read


class Collection:
    """Cells of one or several sources with consecutive row numbers, and their obs columns.

    `open_collection` makes a collection. ``collection[rows]`` reads rows, in the given order.

    Parameters
    ----------
    sources
        At least one source, all with the same elements.
    obs
        Names of the obs columns to read.
    genes
        The genes of the collection. If None, the genes of the sources, which must all have the
        same.
    join_obs, obs_names
        See `open_collection`.

    Raises
    ------
    ParameterError
        ``sources`` are none.
    """

    _loaded: Loaded | None = None
    _on_device: DeviceRows | None = None

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        obs: Sequence[str] = (),
        genes: Genes | None = None,
        join_obs: JoinObs = "same",
        obs_names: bool = False,
    ) -> None:
        given: Any = sources
        self._sources: tuple[Source, ...] = tuple(given) if isinstance(given, Sequence) else ()
        if not self._sources or not all(isinstance(each, Source) for each in self._sources):
            msg = f"`sources` must be a list of sources, but got {reprlib.repr(sources)}"
            raise ParameterError(f"{msg}; `open_collection(paths)` opens files")
        self._delivers_obs_names = obs_names
        self._chosen_genes = genes or Genes()
        self._elements = join_elements(self._sources, self._chosen_genes)
        self._stored = {
            name: tuple(source.elements[name] for source in self._sources)
            for name in self._elements
        }
        self._starts = np.cumsum([0, *(source.n_rows for source in self._sources)])
        if len(self) == 0:
            msg = f"{self.locations[0]}: has no cells; give files that have some"
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
        parts = [self._shown_shape, files, elements, f"obs={list(self._obs)}"]
        if self.loaded_bytes:
            where = "" if self.device is None else f" on {self.device}"
            parts.append(f"loaded: {self.loaded_bytes / 1e6:,.0f} MB{where}")
        return f"Collection({', '.join(parts)})"

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
        """The elements that are read, by name; the first is ``minibatch.X``."""
        return MappingProxyType(self._elements)

    def of_element(self, name: str) -> Collection:
        """Return the same cells with one of the elements; nothing is read.

        Raises
        ------
        ParameterError
            The collection was opened without it.
        """
        if name not in self._elements:
            msg = (
                f"the collection has no element {name!r}, only {list(self._elements)}; open it "
                f"with `open_collection(..., elements=[..., {name!r}])`"
            )
            raise ParameterError(msg)
        return self._changed(
            _elements={name: self._elements[name]}, _stored={name: self._stored[name]}
        )

    def _changed(self, **changes: Any) -> Collection:
        changed = object.__new__(Collection)
        computed_again = dict.fromkeys(("mean_row_lengths", "_known_row_lengths"))
        kept = {key: value for key, value in vars(self).items() if key not in computed_again}
        vars(changed).update(kept | changes)
        return changed

    def load(
        self,
        rows: NDArray[np.integer] | Sequence[int] | slice | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Collection:
        """Return the same cells, decoded in memory, from which minibatches are gathered.

        All elements that were opened are read once, as in an epoch, and kept in the narrowest
        dtypes that hold them exactly: column indices as uint16 (int32 above 65,536 columns), values
        as uint8 or uint16 if all of them are such integers, else in the `dtype` of the element.
        Minibatches are the same bit for bit, in the same order and dtypes, and a state that was
        saved with one collection resumes with the other. Names of cells are still read from the
        sources.

        Worker processes share the memory, whether they are forked or spawned, and so do the ranks
        of a machine if torch.distributed is initialised: the first rank to call this loads the
        cells, and those that give the same rows wait and share its memory. No file names this
        memory; the system frees it with the last process that uses it, however that ends.

        With ``device``, cells and obs columns are copied from this memory, which is then freed, and
        minibatches are gathered and made dense on the device: they are those that
        ``minibatch.to(device)`` returns. Each process has cells of its own there, and delivers them
        itself, without worker processes and without ``transform``.

        Parameters
        ----------
        rows
            The rows to load, such as those of a training set; all if None. Other rows are read from
            their sources, as before; with ``device``, a minibatch must have none.
        device
            A device of torch, such as ``"cuda"``. If None, cells stay in memory.

        Raises
        ------
        ParameterError
            The cells do not fit in the memory that this process may take, or on the device, which
            is estimated from 512 of them before the others are read; the system is not Linux; or
            torch does not have the device here, or the dtype of an element.
        ColumnError
            An obs column has numbers above the largest int64, and ``device`` is given.
        FormatError
            A file is truncated or damaged.
        DeliveryError
            The rank that loads the cells for this machine has failed.

        Examples
        --------
        >>> import anndata, numpy as np
        >>> from cellfeed import open_collection
        >>> collection = open_collection(anndata.AnnData(np.eye(3, dtype=np.float32))).load()
        >>> collection.loaded_bytes
        9
        """
        numbers = row_numbers(slice(None) if rows is None else rows, len(self))
        wanted = numbers if rows is None else np.unique(numbers)
        if device is None:
            return self._changed(_loaded=self._load(wanted, lambda _: None), _on_device=None)
        from cellfeed.collection._on_device import (  # noqa: PLC0415 - it imports torch
            DeviceRows,
            device_of,
            require_device_memory,
        )

        target = device_of(device)
        obs_bytes = sum(each.values.itemsize for each in self._obs.values()) * wanted.size

        def require_room(n_bytes: float) -> None:
            require_device_memory(n_bytes + obs_bytes, target)

        loaded = self._load(wanted, require_room)
        require_room(loaded.n_bytes)
        return self._changed(_loaded=None, _on_device=DeviceRows(loaded, self._obs, target))

    def _load(self, rows: NDArray[np.int64], require_room: Callable[[float], None]) -> Loaded:
        """Return ascending rows in shared memory; see `load_rows`."""
        parts = [str((each.location, each.version(), each.selection())) for each in self._sources]
        parts += [repr((each, *each.column_names)) for each in self._elements.values()]

        def load() -> Loaded:
            sample = np.linspace(0, rows.size - 1, min(rows.size, _SAMPLED_TO_LOAD))
            few = self[rows[sample.astype(np.int64)]]
            return load_rows(self, len(self), rows, few, require_room)

        return load_once(digest_of(*parts, digest_of_array(rows)), load)

    @property
    def loaded_bytes(self) -> int:
        """Memory that loaded cells take, on their `device` or here, in bytes; 0 if none are."""
        held = self._loaded or self._on_device
        return 0 if held is None else held.n_bytes

    @property
    def device(self) -> torch.device | None:
        """The device on which cells were loaded; None if they are in memory or in their files."""
        return None if self._on_device is None else self._on_device.device

    @property
    def _is_loaded(self) -> bool:
        """Whether all cells are loaded."""
        return self._loaded is not None and self._loaded.rows.size == len(self)

    @property
    def _first(self) -> Element:
        return next(iter(self._elements.values()))

    @property
    def n_vars(self) -> int:
        """Number of genes, the columns of the first element."""
        return self._first.n_columns

    @property
    def chosen_genes(self) -> Genes:
        """Which genes were chosen when the collection was opened."""
        return self._chosen_genes

    @property
    def var_names(self) -> NDArray[np.object_]:
        """Gene names of the first element, str, shape (n_vars,)."""
        return self._first.column_names

    @property
    def var(self) -> pd.DataFrame:
        """Table of genes, indexed by `var_names`, with a copy for each access; read from all files.

        It has the columns of ``var`` that all files have and that are the same in all of them, for
        each gene that several files have. Values are missing where no file's ``var`` has the gene,
        such as those of ``raw/X``, or where ``var`` has its name twice, in another order of genes.

        Examples
        --------
        >>> import anndata, numpy as np
        >>> from cellfeed import open_collection
        >>> var = pd.DataFrame({"chromosome": ["1", "X"]}, index=["a", "b"])
        >>> collection = open_collection(anndata.AnnData(np.eye(2), var=var), genes=["b"])
        >>> collection.var["chromosome"].to_dict()
        {'b': 'X'}
        """
        tables = list[pd.DataFrame]()
        for source in self._sources:
            with source.reading:
                tables.append(source.read_var())
        return join_tables(self.var_names, tables, self._chosen_genes).copy()

    @property
    def obs(self) -> Mapping[str, ObsColumn]:
        """The obs columns that the collection was opened with; others raise `ColumnError`."""
        return MappingProxyType(self._obs)

    @property
    def obs_columns(self) -> tuple[str, ...]:
        """The names of the obs columns that all sources have, in the order of the first."""
        first, *others = names_of_obs(self._sources)
        return tuple(name for name in first if all(name in names for names in others))

    def read_obs(self, columns: Sequence[str]) -> Mapping[str, ObsColumn]:
        """Return obs columns, also columns that the collection was not opened with.

        The latter are read by each call and not kept.

        Raises
        ------
        ColumnError, MismatchError
            See `open_collection`.
        """
        others = tuple(name for name in columns if name not in self._obs)
        there = self._obs | read_obs(self._sources, others, self._join_obs)
        return {name: there[name] for name in columns}

    @property
    def delivers_obs_names(self) -> bool:
        """Whether minibatches include the names of their cells."""
        return self._delivers_obs_names

    def obs_names(self, rows: NDArray[np.integer] | Sequence[int] | slice) -> NDArray[np.object_]:
        """Return the names of cells, such as those of ``minibatch.rows``, in the given order.

        They are what the source calls its cells: ``obs_names`` of AnnData, ``obs_id`` of
        TileDB-SOMA, or row numbers as text where cells have no names. Only these rows are read.

        Returns
        -------
        str, shape (n_rows,).

        Examples
        --------
        >>> import anndata, numpy as np
        >>> from cellfeed import open_collection
        >>> obs = pd.DataFrame(index=["a", "b", "c"])
        >>> open_collection(anndata.AnnData(np.eye(3), obs=obs)).obs_names([2, 0])
        array(['c', 'a'], dtype=object)
        """
        distinct, order = np.unique(row_numbers(rows, len(self)), return_inverse=True)
        names = [np.empty(0, object)]
        bounds = np.searchsorted(distinct, self._starts)
        for source, start, (first, last) in zip(
            self._sources, self._starts, pairwise(bounds), strict=False
        ):
            if first < last:
                with source.reading:
                    table = outside_lock(
                        partial(source.read_obs_rows, [], distinct[first:last] - start)
                    )
                names.append(table.index.to_numpy(dtype=object))
        found: NDArray[np.object_] = np.concatenate(names)[order]
        return found

    def where(self, query: str) -> NDArray[np.int64]:
        """Return the rows whose obs fulfil a condition, ascending, int64, shape (n_selected,).

        pandas evaluates the condition, and missing values compare as they do in pandas. This takes
        some 10 bytes a row besides the columns.

        Parameters
        ----------
        query
            Comparisons of obs columns with each other, with numbers and with text, such as
            ``"cell_type == 'B' and n_counts > 500"``. They may use ``and``, ``or``, ``not``,
            ``in [...]`` and ``not in [...]``, but no calculations, functions or variables: for
            these, compare `read_obs` with NumPy. Names that are not Python identifiers must be
            quoted in backticks. Columns that the collection was not opened with are read first.

        Raises
        ------
        ParameterError
            The query is not of this form, or pandas cannot compare the values.
        ColumnError
            obs has no such column.

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
        return rows_where(query, self.read_obs)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the first element: what `numpy.result_type` gives for those of its files.

        Integers above 2^53 are rounded if this is float64, as when files have both int64 and
        uint64.
        """
        return self._first.dtype

    @property
    def layout(self) -> Layout:
        """Layout of the first element: "csr" if any file stores it so, else "dense" or "ragged"."""
        return self._first.layout

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the collection, in the order of its rows."""
        return self._sources

    @property
    def locations(self) -> tuple[Location, ...]:
        """The files, stores and URLs of the sources, in the order of their rows."""
        return tuple(source.location for source in self._sources)

    @property
    def is_remote(self) -> bool:
        """Whether cells are read from a server or an object store."""
        return not self._is_loaded and any(each.is_remote for each in self.locations)

    @property
    def can_be_forked(self) -> bool:
        """Whether a process that has read from the collection may fork worker processes."""
        return all(each.can_be_forked and not each.location.is_remote for each in self._sources)

    @property
    def codecs(self) -> tuple[str, ...]:
        """Compression of the first element in each of the `locations`, such as "gzip 4"."""
        return tuple(source.elements[self._first.name].codec() for source in self._sources)

    def describe(self) -> pd.DataFrame:
        """Return a table of how each element of each file is stored, and whether it is read fast.

        This reads no values.

        Returns
        -------
        A data frame with one row for each element of each of the `locations`, and the columns
        ``location``, ``element``, ``n_cells``, ``layout`` ("csr", "dense" or "ragged"), ``dtype``,
        ``codec`` ("gzip 4"), ``chunk_shape`` (of the values; None if they are contiguous),
        ``rows_per_chunk`` (on average), ``is_fast`` (False if cellfeed's threads decode chunks of
        such storage, but not these) and ``reason`` (why, such as "through h5py: filter blosc2 is
        not supported"; else None).

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
        rows = (
            {
                "location": str(source.location),
                "element": name,
                "n_cells": source.n_rows,
                "layout": stored.layout,
                "dtype": str(stored.dtype),
                "codec": stored.codec(),
                "chunk_shape": stored.chunk_shape,
                "rows_per_chunk": stored.rows_per_chunk,
                "is_fast": slow is None,
                "reason": slow and str(slow),
            }
            for source, name, stored, slow in self._described()
        )
        return pd.DataFrame(rows)

    def _described(
        self, dtype: Dtypes = None
    ) -> Iterator[tuple[Source, str, StoredElement, SlowRead | None]]:
        """Yield each element of each source, and why it is read slowly; nothing is read."""
        dtypes = dtypes_of(self._elements, dtype)
        for source in self._sources:
            for name, own_dtype in dtypes.items():
                stored = source.elements[name]
                slow = stored.slow_read(own_dtype) if source.n_rows else None
                yield source, name, stored, slow

    def slow_reading(self, dtype: Dtypes = None) -> str | None:
        """Return one line that says what is read slowly, why, and the remedy; None if nothing is.

        Parameters
        ----------
        dtype
            See `mean_row_bytes`.
        """
        slow = [
            f"{source.location}: `{name}` is read slowly, {why}; {why.remedy}"
            for source, name, _, why in self._described(dtype)
            if why is not None
        ]
        if len(slow) > 1:
            return f"{slow[0]} ({len(slow) - 1} more are: see `collection.describe()`)"
        return slow[0] if slow else None

    def warn_if_slow(self, dtype: Dtypes = None) -> None:
        """Warn if an element is read slowly; once, also across pickled copies.

        Parameters
        ----------
        dtype
            See `mean_row_bytes`.

        Warns
        -----
        UserWarning
            The line of `slow_reading`, if there is one.
        """
        line = None if self._has_warned or self._is_loaded else self.slow_reading(dtype)
        if line is not None:
            self._has_warned = True
            warnings.warn(line, UserWarning, stacklevel=3)

    @property
    def cells_per_location(self) -> tuple[int, ...]:
        """Number of cells in each of the `locations`."""
        return tuple(np.diff(self._starts).tolist())

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """All local files with cells: those that were given, and those in given folders."""
        found = [file for source in self._sources for file in source.files()]
        return tuple(dict.fromkeys(found))

    @property
    def rows_per_chunk(self) -> float:
        """Mean number of rows of the first element in a chunk that is read as a whole."""
        shares = np.diff(self._starts) / len(self)
        return float(shares @ [each.rows_per_chunk for each in self._stored[self._first.name]])

    def mean_row_bytes(self, dtype: Dtypes = None, *, dense: bool = False) -> float:
        """Return the mean size of a cell in memory, in bytes, from cells all over the collection.

        Parameters
        ----------
        dtype
            Dtype of all elements, or dtypes of some by name; those of the collection if None.
        dense
            Whether sparse elements are made dense.
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
        """Return the mean compressed size of a cell in storage, over all its elements, in bytes."""
        parts = (each for stored in self._stored.values() for each in stored)
        return sum(each.stored_bytes() for each in parts) / len(self)

    @cached_property
    def mean_row_lengths(self) -> Mapping[str, float]:
        """Mean number of stored values per cell of each sparse or ragged element.

        It is the mean over up to 10,000 cells.
        """
        known = self._known_row_lengths
        if self.knows_row_lengths:
            return {name: mean for name, mean in known.items() if mean is not None}
        rows = self._sampled_rows
        few = self[rows[:: max(1, rows.size // _ROWS_READ)]]
        return {name: _n_values(few[name]) / len(few) for name in known}

    @property
    def knows_row_lengths(self) -> bool:
        """Whether `mean_row_lengths` is known from tables, without reading rows."""
        return None not in self._known_row_lengths.values()

    @cached_property
    def _known_row_lengths(self) -> Mapping[str, float | None]:
        """Mean row lengths of sparse and ragged elements, from tables; None if unknown."""
        found = dict[str, float | None]()
        for name, parts in self.parts(self._sampled_rows).items():
            if self._elements[name].layout != "dense":
                lengths = [part.row_lengths() if part.keeps_all else None for part in parts]
                known = [each for each in lengths if each is not None]
                is_known = len(known) == len(parts)
                found[name] = float(np.concatenate(known).mean()) if is_known else None
        return found

    @property
    def _sampled_rows(self) -> NDArray[np.int64]:
        return np.unique(np.linspace(0, len(self) - 1, _SAMPLED_ROWS).astype(np.int64))

    def row_lengths(self, name: str, runs: Runs) -> NDArray[np.int64]:
        """Return how many values of a sparse or ragged element each row of ``runs`` stores.

        Rows whose lengths are not known from tables are read.

        Parameters
        ----------
        name
            Name of the element.
        runs
            Ascending, disjoint runs of rows, int64, shape (n, 2).
        """
        rows = expand(runs)
        lengths = np.empty(rows.size, np.int64)
        for part in self.parts(rows)[name]:
            known = part.row_lengths()
            if known is None:
                found = part.read_rows()
                if isinstance(found, RaggedRows):
                    known = found.lengths
                else:
                    is_csr = isinstance(found, CsrRows)
                    known = np.diff(found.indptr) if is_csr else np.count_nonzero(found, axis=1)
            lengths[part.positions] = known
        return lengths

    def parts(self, rows: NDArray[np.int64]) -> dict[str, list[Part]]:
        """Return the rows of each element, by source.

        Parameters
        ----------
        rows
            Distinct rows, ascending, int64, shape (n,).
        """
        if self._loaded is None:
            return self._parts_of_sources(rows)
        places, are_loaded = self._loaded.find(rows)
        loaded, others = np.flatnonzero(are_loaded), np.flatnonzero(~are_loaded)
        parts = {
            name: [replace(each, positions=others[each.positions]) for each in some]
            for name, some in self._parts_of_sources(rows[others]).items()
        }
        for name, some in parts.items() if loaded.size else ():
            part = Part(
                source=self._sources[0],
                stored=self._loaded.elements[name],
                rows=places[loaded],
                positions=loaded,
                column_map=None,
            )
            some.append(part)
        return parts

    def _parts_of_sources(self, rows: NDArray[np.int64]) -> dict[str, list[Part]]:
        parts = {name: list[Part]() for name in self._elements}
        bounds = np.searchsorted(rows, self._starts)
        for k in np.flatnonzero(np.diff(bounds)).tolist():
            positions = slice(int(bounds[k]), int(bounds[k + 1]))
            own = rows[positions] - self._starts[k]
            for name, element in self._elements.items():
                maps, stored = element.column_maps, self._stored[name][k]
                part = Part(
                    source=self._sources[k],
                    stored=stored,
                    rows=own,
                    positions=positions,
                    column_map=None if maps is None else maps[k],
                )
                if stored.row_order is not None:
                    in_storage = stored.row_order[own]
                    order = np.argsort(in_storage)
                    part = replace(part, rows=in_storage[order], positions=positions.start + order)
                parts[name].append(part)
        return parts

    def chunk_starts(self) -> ChunkStarts:
        """Return which rows are the first to begin in a chunk of the first element.

        `BlockShuffling` with ``align="chunks"`` needs these. This reads row pointers.
        """
        elements = [*zip(self._sources, self._stored[self._first.name], strict=True)]
        return ChunkStarts(partial(_rows_in_chunks, elements, are_remote=self.is_remote))

    def load_tables(self) -> None:
        """Read row pointers and chunk tables now, not with the first rows.

        Processes that are forked later share them.
        """
        if self._is_loaded:
            return
        stored = [(each, own) for each in self._sources for own in each.elements.values()]
        load_tables([each for each in stored if each[1].shape[0]], are_remote=self.is_remote)


def _n_values(rows: Any) -> int:
    return int(rows.offsets[-1] if isinstance(rows, RaggedRows) else rows.nnz)
