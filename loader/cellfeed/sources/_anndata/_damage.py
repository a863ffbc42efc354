"""What is wrong with files that are damaged or of another format: sizes, and error messages."""

import contextlib
import errno
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
from h5py import h5z

from cellfeed._errors import CellfeedError, FormatError, lacks_threads
from cellfeed._runs import Runs
from cellfeed.bytes import Location
from cellfeed.bytes._remote import failure, is_of_server
from cellfeed.decode._array import check_grid
from cellfeed.sources._anndata._file import (
    AnnDataFile,
    StructureError,
    index_of,
    is_group,
    own_members,
    text,
    texts,
)

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
        ("barcode_idx", "feature_idx"),
        "molecule info of 10x Genomics; give the matrix beside it, filtered_feature_bc_matrix.h5",
    ),
    (
        ("matrix", "row_attrs", "col_attrs"),
        "a loom file; read it with `anndata.io.read_loom`, and write it as .h5ad",
    ),
    (
        ("assays", "cell.names"),
        'an h5Seurat file; convert it in R with `SeuratDisk::Convert(path, dest = "h5ad")`',
    ),
    (("tables", "images"), "SpatialData; give a table in it, such as tables/table"),
    (("tables", "shapes"), "SpatialData; give a table in it, such as tables/table"),
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
    n_lost = file.n_absent(name)
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
