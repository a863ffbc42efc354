"""Obs columns of Parquet files: each of one kind in all files, of whatever Arrow type it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from cellfeed.extending import ColumnError, MismatchError
from cellfeed.sources import first_line
from cellfeed.sources.arrow import MISSING, kind, values_of


def join_parts(name: str, parts: Sequence[Any], where: Sequence[str]) -> Any:
    """Return a column of some files as one `pyarrow.ChunkedArray`.

    Parameters
    ----------
    name
        Its name, for messages.
    parts
        The column in each file, a `pyarrow.ChunkedArray` whose type has a `kind`. One without a
        type, all of whose values are missing, fits any other.
    where
        The files, for messages.

    Raises
    ------
    MismatchError
        It is of one kind in a file and of another in the next.
    ColumnError
        The common type of its numbers cannot hold one of them.
    """
    import pyarrow as pa  # noqa: PLC0415 - optional

    known = [k for k, part in enumerate(parts) if kind(part.type) != MISSING]
    types = dict.fromkeys(parts[k].type for k in known)
    for k in known:
        found, wanted = parts[k].type, next(iter(types))
        fits = kind(found) == kind(wanted)
        if kind(found) not in ("numbers", "text"):
            fits = found == wanted
        if not fits:
            msg = f"{where[k]}: column {name!r} is of type {values_of(found)}, but of type"
            msg += f" {values_of(wanted)} in {where[known[0]]}"
            raise MismatchError(f"{msg}; write the same kind to all files")
    joint = _joint([*types])
    chunks = list[Any]()
    for part, file in zip(parts, where, strict=True):
        if kind(part.type) == MISSING:
            chunks.append(pa.nulls(len(part), joint))
        elif part.type == joint:
            chunks += part.chunks
        elif kind(joint) == "text":
            chunks += [_as_text(chunk, joint) for chunk in part.chunks]
        else:
            try:
                chunks += part.cast(joint).chunks
            except pa.ArrowInvalid as error:
                msg = f"{file}: column {name!r} has values that {joint}, the common type of the"
                msg = f"{msg} files, cannot hold ({first_line(error)})"
                raise ColumnError(f"{msg}; write it as text") from error
    return pa.chunked_array(chunks, joint)


def _joint(types: Sequence[Any]) -> Any:
    """Return a type of the same kind as all of some, of one kind."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    if len(types) == 1:
        return types[0]
    if not types or kind(types[0]) == "text":
        return pa.dictionary(pa.int32(), pa.large_string())
    dtypes = [np.dtype(each.to_pandas_dtype()) for each in types]
    dtype = np.result_type(*dtypes)
    if dtype.kind == "f" and all(each.kind in "iu" for each in dtypes):
        dtype = np.dtype(np.int64)  # of uint64 and others, as `Collection` joins them
    return pa.from_numpy_dtype(dtype)


def _as_text(chunk: Any, joint: Any) -> Any:
    """Return text, a dictionary or not, as a dictionary of some type."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    if not hasattr(chunk, "dictionary"):
        chunk = chunk.dictionary_encode()
    indices = chunk.indices.cast(joint.index_type)
    return pa.DictionaryArray.from_arrays(indices, chunk.dictionary.cast(joint.value_type))


# Columns that are the names of folders.


def as_column(values: Sequence[str | None]) -> Any:
    """Return values that are text as a `pyarrow.Array`: int32 if all can be, else a dictionary."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    there = [each for each in values if each is not None]
    are_integers = all(re.fullmatch("-?[0-9]{1,10}", each) for each in there)
    if there and are_integers and all(-(1 << 31) <= int(each) < 1 << 31 for each in there):
        return pa.array([None if each is None else int(each) for each in values], pa.int32())
    return pa.array(values, pa.large_string()).dictionary_encode()
