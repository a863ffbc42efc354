"""Joining an obs column over the files of a collection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, Literal, NoReturn, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ColumnError, FormatError, MismatchError, require_one_of
from cellfeed._lazy import pd
from cellfeed.bytes import Location
from cellfeed.collection._join_elements import side_by_side
from cellfeed.rows import CategoricalColumn, NumericColumn, ObsColumn, require_int64
from cellfeed.sources import Source

JoinObs = Literal["same", "outer"]
_Read = TypeVar("_Read")

# Where they are the same as shorter ones, torch has these too.
_UNKNOWN_TO_TORCH = {np.dtype(np.longdouble), np.dtype(np.clongdouble)} - {
    np.dtype(np.float64),
    np.dtype(np.complex128),
}


class OpenedObs(dict[str, ObsColumn]):
    """The obs columns that a collection was opened with, by name."""

    def __missing__(self, name: str) -> NoReturn:
        opened = ", ".join(self) or "none"
        msg = f"obs column {name!r} was not opened (opened: {opened})"
        raise ColumnError(f"{msg}; name it in `open_collection(..., obs=[...])`, or use `read_obs`")


def names_of_obs(sources: Sequence[Source]) -> list[Sequence[str]]:
    """Return the names of the obs columns of each source."""
    return list(side_by_side(_alone(methodcaller("obs_names")), sources))


def _alone(read: Callable[[Source], _Read]) -> Callable[[Source], _Read]:
    """Return a function that reads from a source while no other thread does."""

    def read_alone(source: Source) -> _Read:
        with source.reading:
            return read(source)

    return read_alone


def read_obs(
    sources: Sequence[Source], columns: Sequence[str], join_obs: JoinObs
) -> dict[str, ObsColumn]:
    """Read obs columns of the sources of a collection, and join each over the sources.

    Parameters
    ----------
    sources, columns
        The sources, and the names of the columns.
    join_obs
        Whether every source must have each column ("same"), or at least one source ("outer").

    Raises
    ------
    ColumnError
        A column is absent, or `join_column` raises it.
    ParameterError
        ``join_obs`` is something else.
    """
    require_one_of("join_obs", join_obs, get_args(JoinObs))
    if not columns:
        return {}
    known = names_of_obs(sources)
    for name in columns:
        lacking = [k for k, names in enumerate(known) if name not in names]
        if lacking and (join_obs == "same" or len(lacking) == len(sources)):
            raise _lacks(sources[lacking[0]], name, known[lacking[0]])
    names_of = dict(zip(map(id, sources), known, strict=True))

    def wanted(source: Source, others: Iterable[str] = ()) -> list[str]:
        there = set(names_of[id(source)]).difference(others)
        return [name for name in columns if name in there]

    def read_plain(source: Source) -> Mapping[str, ObsColumn]:
        return source.plain_obs(asked) if (asked := wanted(source)) else {}

    read_plainly = list(side_by_side(_alone(read_plain), sources))
    plain = {
        name: joined
        for name in columns
        if (joined := _join_plain(name, sources, [each.get(name) for each in read_plainly]))
    }

    def read(source: Source) -> pd.DataFrame | None:
        return source.read_obs(asked) if (asked := wanted(source, plain)) else None

    tables = []
    for source, table in zip(sources, side_by_side(_alone(read), sources), strict=True):
        if table is not None:
            _check_length(source, len(table))
            if missing := [name for name in wanted(source, plain) if name not in table]:
                msg = f"{source.location}: `read_obs` returned no column {missing[0]!r}"
                raise FormatError(f"{msg}, which is one of `obs_names`; correct the source")
        tables.append(table)
    return {
        name: plain.get(name) or join_column(name, _parts(name, sources, tables))
        for name in columns
    }


def _lacks(source: Source, name: str, known: Sequence[str]) -> ColumnError:
    there = ", ".join(known) or "none"
    msg = f"{source.location}: obs has no column {name!r}; its columns are: {there}"
    return ColumnError(source.refused_obs(name) or msg)


def _check_length(source: Source, n: int) -> None:
    if n != source.n_rows:
        msg = (
            f"{source.location}: obs has {n} rows, but the matrix has {source.n_rows}; write the "
            "file again"
        )
        raise FormatError(msg)


def _join_plain(
    name: str, sources: Sequence[Source], parts: Sequence[ObsColumn | None]
) -> ObsColumn | None:
    """Join a column that is of one dtype or of text in all sources; None for others."""
    for source, part in zip(sources, parts, strict=True):
        if part is not None:
            _check_length(source, len(part.values))
    numbers = [part.values for part in parts if isinstance(part, NumericColumn)]
    if len(numbers) == len(parts) and len({values.dtype for values in numbers}) == 1:
        for source, values in zip(sources, numbers, strict=True):
            require_int64(f"{source.location}: obs column {name!r}", values)
        return NumericColumn(np.concatenate(numbers))
    texts = [part for part in parts if isinstance(part, CategoricalColumn)]
    if len(texts) < len(parts) or not all(part.categories.size for part in texts):
        return None
    return _join_codes([(part.codes, part.categories) for part in texts])


def _parts(
    name: str, sources: Sequence[Source], tables: Sequence[pd.DataFrame | None]
) -> list[tuple[Location, pd.Series[Any]]]:
    """Return a column of each source, with missing values for sources that lack it."""
    own = [None if table is None or name not in table else table[name] for table in tables]
    known = [series for series in own if series is not None and not _has_no_categories(series)]
    are_numbers = bool(known) and not isinstance(known[0].dtype, pd.CategoricalDtype)
    are_numbers = are_numbers and pd.api.types.is_numeric_dtype(known[0].dtype)
    are_numbers = are_numbers and not pd.api.types.is_bool_dtype(known[0].dtype)
    missing = partial(_missing, are_numbers=are_numbers)
    return [
        (source.location, missing(source.n_rows) if series is None else series)
        for source, series in zip(sources, own, strict=True)
    ]


def _missing(n_rows: int, *, are_numbers: bool) -> pd.Series[Any]:
    """Return a column of missing values: NaN, or a categorical without categories."""
    if are_numbers:
        return pd.Series(np.full(n_rows, np.nan, np.float32))
    codes, none = np.full(n_rows, -1, np.int8), pd.Index([], dtype=object)
    return pd.Series(pd.Categorical.from_codes(codes, categories=none))


def join_column(name: str, parts: Sequence[tuple[Location, pd.Series[Any]]]) -> ObsColumn:
    """Join one column over the files of a collection.

    Parameters
    ----------
    name
        Name of the column, for messages.
    parts
        Each file with its column, in the order of the files.

    Raises
    ------
    MismatchError
        The column is numeric in one file and categorical in another, or its categories are
        text in one and numbers in another.
    ColumnError
        The values are neither numbers nor categories, such as dates; or a tensor, or the common
        dtype of the files, cannot hold one of the integers.
    """
    kinds = [_kind(name, where, series) for where, series in parts]
    # Categories of which there are none, since all are missing, fit any others.
    known = [place for place, (_, series) in enumerate(parts) if not _has_no_categories(series)]
    first = known[0] if known else 0
    for (where, series), kind in zip(parts, kinds, strict=True):
        fits = kinds[first] != "numbers" if _has_no_categories(series) else kind == kinds[first]
        if not fits:
            msg = (
                f"{where}: obs column {name!r} has {kind}, but {kinds[first]} in "
                f"{parts[first][0]}; write the same kind to all files"
            )
            raise MismatchError(msg)
    if kinds[first] == "numbers":
        is_nullable = any(_is_nullable(series) for _, series in parts)
        return NumericColumn(_join_numbers(name, parts), is_nullable)
    columns = [series.astype("category").cat for _, series in parts]
    joined = _join_codes(
        [(each.codes.to_numpy(), each.categories.to_numpy(dtype=object)) for each in columns]
    )
    is_nullable = any(isinstance(series.dtype, pd.BooleanDtype) for _, series in parts)
    return replace(joined, is_nullable=is_nullable)


def _kind(name: str, where: Location, series: pd.Series[Any]) -> str:
    values = series.cat.categories if isinstance(series.dtype, pd.CategoricalDtype) else series
    if pd.api.types.is_bool_dtype(values.dtype):
        return "booleans"
    if pd.api.types.is_numeric_dtype(values.dtype) and values.dtype not in _UNKNOWN_TO_TORCH:
        is_category = isinstance(series.dtype, pd.CategoricalDtype)
        return "categories that are numbers" if is_category else "numbers"
    if pd.api.types.is_string_dtype(values.dtype) or values.dtype == object:
        return "text"
    msg = (
        f"{where}: obs column {name!r} has dtype {values.dtype}, which is neither a "
        "numeric dtype of torch nor categorical; write it as float64 or as text"
    )
    raise ColumnError(msg)


def _has_no_categories(series: pd.Series[Any]) -> bool:
    return isinstance(series.dtype, pd.CategoricalDtype) and len(series.cat.categories) == 0


def _join_numbers(name: str, parts: Sequence[tuple[Location, pd.Series[Any]]]) -> NDArray[Any]:
    # Missing ones are NaN, of pandas' nullable integers too.
    own = [
        np.dtype(np.float64) if _is_nullable(series) else np.asarray(series).dtype
        for _, series in parts
    ]
    dtype = np.result_type(*own).newbyteorder("=")
    if all(each.kind in "iu" for each in own) and dtype.kind == "f":  # int64 beside uint64
        dtype = np.dtype(np.int64)
    numbers = [exact_numbers(name, where, series, dtype) for where, series in parts]
    for (where, _), values in zip(parts, numbers, strict=True):
        require_int64(f"{where}: obs column {name!r}", values)
    return np.concatenate(numbers)


def _is_nullable(series: pd.Series[Any]) -> bool:
    return bool(pd.api.types.is_extension_array_dtype(series.dtype))


def exact_numbers(
    name: str, where: Location, series: pd.Series[Any], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return a numeric column as another dtype, with NaN for missing values.

    Parameters
    ----------
    name, where
        The column and its file, for messages.
    series
        Numbers of NumPy or pandas.
    dtype
        The target dtype.

    Raises
    ------
    ColumnError
        ``dtype`` cannot hold one of the integers. Fractions are rounded, as in NumPy.
    """
    values: NDArray[Any]
    if _is_nullable(series):
        values = series.to_numpy(dtype=dtype, na_value=np.nan)
        integers = np.empty(0)
        if series.dtype.kind in "iu":  # older versions of pandas give objects if not asked
            integers = series.dropna().to_numpy(dtype=np.dtype(f"{series.dtype.kind}8"))
    else:
        integers = series.to_numpy()
        with np.errstate(invalid="ignore"):
            values = integers.astype(dtype, copy=False)
    if integers.dtype.kind in "iu" and integers.dtype != dtype:
        inexact = integers[_differ(integers, dtype)]
        if inexact.size:
            msg = (
                f"{where}: obs column {name!r} has {inexact[0]}, which {dtype}, the common dtype "
                "of the files, cannot represent; store it as text or as a category"
            )
            raise ColumnError(msg)
    return values


def _differ(integers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Return which integers ``dtype`` cannot represent exactly."""
    with np.errstate(invalid="ignore"):
        cast = integers.astype(dtype)
        differ: NDArray[np.bool_] = cast.astype(integers.dtype) != integers
    # A wrapped number comes back as it was, and so may the largest that was rounded up.
    differ |= (cast < 0) != (integers < 0)
    if dtype.kind == "f" and integers.itemsize >= dtype.itemsize:
        differ |= integers == np.iinfo(integers.dtype).max
    return differ


def _join_codes(parts: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> CategoricalColumn:
    """Join codes and their categories, which are numbered by first appearance."""
    code_of = dict[Any, int]()
    # The last entry, which code -1 selects, keeps "missing" missing.
    to_joint = [
        np.array([*(code_of.setdefault(each, len(code_of)) for each in categories), -1])
        for _, categories in parts
    ]
    dtype = np.min_scalar_type(-max(1, len(code_of)))
    codes = [new[own].astype(dtype) for new, (own, _) in zip(to_joint, parts, strict=True)]
    return CategoricalColumn(np.concatenate(codes), np.array([*code_of], object))
