"""What all formats of stored AnnData share: attributes, an interface to files, errors of damage.

h5py returns variable-length strings as `str`, but strings of fixed length, as Julia's HDF5 writes
them, as bytes; R writes each as an array of one.
"""

from __future__ import annotations

import contextlib
import errno
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5z

from cellfeed._errors import CellfeedError, FormatError, lacks_threads
from cellfeed._lazy import pd
from cellfeed._runs import Runs
from cellfeed.bytes import LastingIdentity, Location, digest_of, lasting_identity
from cellfeed.bytes._remote import failure, is_of_server
from cellfeed.bytes._tables import CachedTables, Computed, Tables
from cellfeed.decode import ChunkedArray, SlowRead
from cellfeed.decode._array import check_grid
from cellfeed.decode._hdf5 import hdf5_codec
from cellfeed.decode._zarr import zarr_codec
from cellfeed.sources._source import OpenedPerProcess, Source

# Attributes, and elements as anndata reads them.


class StructureError(ValueError):
    """An element is not as anndata writes it, though nothing is damaged."""


def text(element: Any, name: str, default: str = "") -> str:
    """Return an attribute of a group or array as text.

    Raises
    ------
    StructureError
        It is something else.
    """
    values = _plain(element, name) or [default]
    if len(values) > 1 or not isinstance(values[0], str):
        raise StructureError(f"the attribute `{name}` of {element.name} is not text, but {values}")
    return values[0]


def texts(element: Any, name: str) -> tuple[str, ...]:
    """Return an attribute that is a list of texts; empty if there is none."""
    return tuple(map(str, _plain(element, name)))


def flag(element: Any, name: str) -> bool:
    """Return an attribute that is true or false."""
    return any(_plain(element, name))


def index_of(table: Any) -> str:
    """Return the name of the column that is the index of a table.

    Raises
    ------
    StructureError
        The table does not have one.
    """
    index = text(table, "_index")
    if index not in table:
        what = f"a column {index!r}, its index" if index else "an attribute `_index`"
        raise StructureError(f"{table.name} lacks {what}")
    return index


def is_group(element: Any) -> bool:
    """Return whether an element is a group, not an array."""
    return not hasattr(element, "dtype")


def own_members(group: Any) -> dict[str, Any]:
    """Return the arrays and groups in a group of HDF5 or zarr, without links."""
    names = list(group)
    if isinstance(group, h5py.Group):
        names = [n for n in names if isinstance(group.get(n, getlink=True), h5py.HardLink)]
    found = {name: group.get(name) for name in names}
    return {name: each for name, each in found.items() if each is not None}


def _plain(element: Any, name: str) -> list[Any]:
    """Return the values of an attribute, which may be one; empty if there is none."""
    values = np.ravel(np.asarray(element.attrs.get(name, ()), object)).tolist()
    return [each.decode() if isinstance(each, bytes) else each for each in values]


# The interface to file formats: h5ad and zarr differ only in how they implement it.


class AnnDataFile(OpenedPerProcess):
    """A stored AnnData object, opened lazily in each process, and never for writing.

    Calling it returns the group that contains ``X``, ``obs`` and ``var``. h5py and zarr have groups
    and arrays with the same interface, so these are not wrapped.

    Parameters
    ----------
    location
        The file, folder or URL.
    lasting_name
        Its absolute path or its URL, under which tables are cached.

    Attributes
    ----------
    library
        The library that reads arrays that cellfeed does not decode: ``"h5py"`` or ``"zarr"``.
    linked_files
        Other local files that its elements are linked to, as far as they have been read.
    """

    library: str
    linked_files: Sequence[Path] = ()

    def __init__(self, location: Location, lasting_name: str) -> None:
        self.location, self.lasting_name = location, lasting_name

    @abstractmethod
    def watch(self, names: Sequence[str]) -> None:
        """Record where these arrays are stored, so that changes are noticed.

        Raises
        ------
        ValueError
            An array is impossible: its chunks take more memory than it could need.
        """

    def check_unchanged(self) -> None:
        """Check that the storage has not changed since it was first opened in any process.

        Rows of another file would not match the plan and the labels. By default, nothing is
        checked: each answer of a server is.

        Raises
        ------
        FormatError
            It was replaced or written to.
        PathError
            It was removed.
        """

    @abstractmethod
    def stored(self, name: str) -> Any:
        """Return an array or group.

        Raises
        ------
        FormatError
            It is a link to nothing, or its values lie where cellfeed does not read them.
        KeyError
            There is no such element.
        """

    @abstractmethod
    def stored_bytes(self, name: str) -> int | None:
        """Return the compressed size of an array in bytes; None if unknown."""

    def bytes_there(self, name: str) -> int | None:
        """Return about how many bytes an array has in storage, which may take a request.

        None if unknown.
        """
        return self.stored_bytes(name)

    def check_texts(self, name: str) -> None:
        """Check the lengths of the texts of an array, for which memory is allocated.

        Raises
        ------
        FormatError
            One is impossible.
        """

    def codec(self, name: str) -> str:
        """Return the compression of an array, such as "gzip 4", "zstd, sharded" or "none"."""
        stored = self.stored(name)
        if isinstance(stored, h5py.Dataset):
            return hdf5_codec(stored)
        return zarr_codec(stored.metadata.to_dict())

    @abstractmethod
    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only the format's own library can read an array; None if cellfeed can."""

    @abstractmethod
    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array, or their files, are missing; 0 if unknown.

        Libraries read their elements as zeros or empty text, which may be correct, since chunks of
        zeros need not be written.
        """

    @abstractmethod
    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason.

        Parameters
        ----------
        name
            Path of the array in the group.
        lost_is_zero
            See `ChunkedArray`.
        """

    def are_same(self, name: str, other: str) -> bool:  # noqa: ARG002 - unless it is known to be
        """Return whether two arrays are one, by links; False if it is unknown."""
        return False

    def recorded(self, what: str, compute: Callable[[], Computed]) -> Computed | Tables:  # noqa: ARG002 - for subclasses
        """Return what was computed from a single file when it was first opened, or compute it.

        Parameters
        ----------
        what, compute
            See `FileRecord.get`.
        """
        return compute()

    def table_cache(self, name: str) -> CachedTables:
        """Return the cache for tables of an array between openings."""
        return CachedTables(self.lasting_name, name, partial(self._identity_of, name))

    def _identity_of(self, name: str) -> LastingIdentity | None:  # noqa: ARG002 - for stores
        """Return the identity of all files of an array; None if it is unknown."""
        return self.identity()

    def prefetch(self, names: Sequence[str]) -> None:
        """Prefetch arrays and tables that are about to be read completely, if worthwhile."""

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the file; None if it is unknown, or there are many files."""
        return None

    def read_oldest_frame(self, name: str) -> pd.DataFrame:
        """Read a table in the format of anndata before 0.7, if it is local HDF5.

        Raises
        ------
        FormatError
            It is not.
        """
        msg = f"{self.location}: `{name}` is in the format of anndata before 0.7"
        raise FormatError(f"{msg}; download the file, or write it again with anndata")


class FileSource(Source):
    """Base class of sources whose cells lie in one file or store.

    Parameters
    ----------
    file
        The file or store.
    """

    def __init__(self, file: AnnDataFile) -> None:
        self._file = file
        self.location = file.location

    def version(self) -> str | None:
        """Return a digest that changes when its file is replaced; None if there is none."""
        found = self._file.identity()
        linked = [(str(each), each.stat()) for each in self.linked_files()]
        if found is None or not linked:
            return None if found is None else found.digest
        return digest_of(found.digest, lasting_identity(linked).digest)

    def linked_files(self) -> Sequence[Path]:
        """Return local files elsewhere to which its elements are linked."""
        return self._file.linked_files

    @abstractmethod
    def stored_elements(self) -> dict[str, str]:
        """Return the encoding of each element in the file, also of those that were not opened."""


# HDF5 filters from hdf5plugin, such as ``hdf5plugin.FILTERS["zstd"]``.
#
# anndata applies them to all arrays that it compresses, including names and columns of obs, which
# only HDF5 can read. hdf5plugin registers its filters when it is imported, in each process.

with contextlib.suppress(ImportError):
    import hdf5plugin  # noqa: F401 - registers its filters

_REMEDY = "install it with `pip install hdf5plugin`"
_OTHER_REMEDY = "write the file with another compression, such as gzip"


def lacking_filter(path: Path | None, element: str) -> str | None:
    """Return why HDF5 cannot decompress an element, and the remedy; None if it can.

    Parameters
    ----------
    path
        The file, or a zarr store, which has no such filters; None for a URL.
    element
        Path of a dataset or a group in it.
    """
    # The caller already has an error; it is raised if the file cannot be opened either.
    with contextlib.suppress(Exception):
        if path is not None and path.is_file():
            with h5py.File(path, "r") as file:
                return _lacking_filter(file[element])
    return None


def _lacking_filter(element: Any) -> str | None:
    if isinstance(element, h5py.Group):
        return next(filter(None, map(_lacking_filter, own_members(element).values())), None)
    created = element.id.get_create_plist()
    for number, _, _, name in (created.get_filter(k) for k in range(created.get_nfilters())):
        if not h5z.filter_avail(number):
            words = name.decode(errors="replace").split(";")[0] or "a filter"
            if sys.modules.get("hdf5plugin") is None:
                return f"{words} ({number}), which HDF5 only reads with hdf5plugin; {_REMEDY}"
            return (
                f"{words} ({number}), which neither HDF5 nor hdf5plugin supports; {_OTHER_REMEDY}"
            )
    return None


# What the machine lacks, not the file.
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@contextmanager
def damage_named(
    location: Location, element: str, runs: Runs | None = None, *, writer: str = "anndata"
) -> Iterator[None]:
    """Convert errors of h5py, zarr and anndata into one line with the location.

    They mean damage, unless HDF5 lacks the filter that compressed the file, or an element is there
    but is not as its ``writer`` writes it.
    """
    try:
        yield
    except CellfeedError:
        raise
    except MemoryError as error:
        words = " ".join(str(error).split())
        msg = (
            f"{location}: `{element}` takes more memory than is available "
            f"({words or 'of unknown size'}); read fewer rows at a time or, if it should be "
            "small, copy or download the file again"
        )
        raise FormatError(msg) from error
    except Exception as error:  # they have no common base, nor a list of what they raise
        if getattr(error, "errno", None) in _LACKING or lacks_threads(error):
            raise
        if is_of_server(error):
            raise failure(error, location) from None
        compression = lacking_filter(location.path, element)
        if compression is not None:
            msg = f"{location}: `{element}` is compressed with {compression}"
            raise FormatError(msg) from error
        rows = "" if runs is None or not len(runs) else f", rows {runs[0, 0]} to {runs[-1, 1]}"
        words = " ".join(str(error).split()) or type(error).__name__  # some are of several lines
        if _is_odd(error):
            msg = (
                f"{location}: `{element}`{rows} is not as {writer} writes it ({words}); write the "
                f"file again with {writer}"
            )
        else:
            msg = (
                f"{location}: `{element}`{rows} cannot be read ({words}); "
                "the file is damaged, copy or download it again"
            )
        raise FormatError(msg) from error


def _is_odd(error: BaseException) -> bool:
    """Return whether an error is of something that is missing or of another kind, not of damage."""
    if type(error).__name__ == "AnnDataReadError" and error.__cause__ is not None:
        error = error.__cause__
    is_missing = isinstance(error, KeyError) and (
        "doesn't exist" in str(error) or "can't locate attribute" in str(error)
    )
    if type(error).__name__ == "IORegistryError":  # anndata knows no such encoding
        return True
    return is_missing or isinstance(error, StructureError | TypeError | AttributeError)


def other_format_of(root: Any) -> str | None:
    """Return which other format of single-cell data a file has, and what to do; None if unknown."""
    for members, what in _OTHERS:
        if all(each in root for each in members):
            return what
    groups = {name: each for name, each in own_members(root).items() if is_group(each)}
    within = [name for name, group in groups.items() if "obs" in group and "var" in group]
    if within:
        return (
            f"a file with AnnData in `{within[0]}`; write that as a file of its own, with anndata"
        )
    return None


_OTHERS = (
    (
        ("matrix", "row_attrs", "col_attrs"),
        "a loom file; read it with `anndata.io.read_loom`, and write it as .h5ad",
    ),
    (("tables",), "SpatialData; give a table in it, such as tables/table"),
)


# Sizes in the metadata of tables, checked before memory is allocated for them.
#
# A table takes memory for the rows of its matrix, or for its bytes in the file, but not for the
# sizes that its metadata state: chunks that do not exist are read as zeros or empty text, however
# many they are.

_ALWAYS = 1 << 26  # bytes in memory that any array may take
_BYTES_PER_ROW = 16  # that a column may take; complex numbers have as many
_OLD_CATEGORIES = "__categories"  # of all columns, in anndata before 0.8
_COMPRESSION = 4096  # bytes in memory for each in the file; gzip reaches 1,032


def table_length(file: AnnDataFile, name: str) -> int:
    """Return the number of rows of a table such as ``obs``, without reading them."""
    table = file.stored(name)
    if not is_group(table):  # anndata before 0.7
        return _length(table)
    index = file.stored(f"{name}/{index_of(table)}")
    if is_group(index):
        index = index["codes" if "codes" in index else "values"]
    return _length(index)


def check_sizes(file: AnnDataFile, name: str, n_rows: int | None = None) -> None:
    """Check the sizes of an element that is about to be read as a whole.

    Parameters
    ----------
    file, name
        The file, and the path of an array, a table, a column, or a group of these.
    n_rows
        Number of its rows, if that is known: of the table, if it is a column.

    Raises
    ------
    FormatError
        An array has another number of rows, or the file has too few bytes for its size.
    """
    stored = file.stored(name)
    if not is_group(stored):
        _check_array(file, name, stored, n_rows)
        return
    encoding = text(stored, "encoding-type")
    if encoding == "dataframe":
        n_rows = table_length(file, name) if n_rows is None else n_rows
        for column in dict.fromkeys([index_of(stored), *texts(stored, "column-order")]):
            check_sizes(file, f"{name}/{column}", n_rows)
        if _OLD_CATEGORIES in stored:
            check_sizes(file, f"{name}/{_OLD_CATEGORIES}")
    elif encoding == "categorical":
        check_sizes(file, f"{name}/codes", n_rows)
        _check_categories(file, f"{name}/categories", n_rows)
    elif encoding.startswith("nullable-"):
        n_rows = _length(file.stored(f"{name}/mask")) if n_rows is None else n_rows
        for part in ("values", "mask"):
            check_sizes(file, f"{name}/{part}", n_rows)
    else:
        for each in stored:
            check_sizes(file, f"{name}/{each}")


def _check_categories(file: AnnDataFile, name: str, n_rows: int | None) -> None:
    stored = file.stored(name)
    if is_group(stored):  # nullable text
        check_sizes(file, name)
        return
    _check_array(file, name, stored, None, n_rows or 0)
    n_lost = file.n_lost(name)
    if n_lost > 1:  # they would all be the same category
        raise _refused(file, f"`{name}` lacks {n_lost:,} of its chunks")


def _check_array(
    file: AnnDataFile, name: str, stored: Any, n_rows: int | None, n_expected: int = 0
) -> None:
    shape, itemsize = tuple(map(int, stored.shape)), int(stored.dtype.itemsize)
    if n_rows is not None and shape[:1] != (n_rows,):
        n_here = shape[0] if shape else 0
        raise _refused(file, f"`{name}` has {n_here:,} rows, but its table has {n_rows:,}")
    if stored.chunks is not None:
        shards = None if isinstance(stored, h5py.Dataset) else stored.shards
        check_grid(shape, stored.chunks, itemsize, shard_shape=shards)
    n_bytes = math.prod(shape) * itemsize
    if n_bytes > max(_ALWAYS, _BYTES_PER_ROW * (n_rows or n_expected)):
        n_there = file.bytes_there(name)
        compression = 1 if stored.chunks is None else _COMPRESSION
        if n_there is not None and n_bytes > n_there * compression:
            what = f"`{name}` should have {shape} values, for which it has {n_there:,} bytes"
            raise _refused(file, what)
    file.check_texts(name)


def _length(stored: Any) -> int:
    return int(stored.shape[0]) if stored.shape else 0


def _refused(file: AnnDataFile, what: str) -> FormatError:
    return FormatError(f"{file.location}: {what}; copy or download it again, or write it again")
