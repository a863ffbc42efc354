"""obs of a collection: joining a column over files, and queries over columns."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import filterfalse, starmap
from numbers import Number
from operator import methodcaller
from typing import Any, Literal, NoReturn, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import (
    ColumnError,
    FormatError,
    MismatchError,
    ParameterError,
    one_line,
    require_one_of,
)
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
            source, there = sources[lacking[0]], ", ".join(known[lacking[0]]) or "none"
            msg = f"{source.location}: obs has no column {name!r}; its columns are: {there}"
            raise ColumnError(source.refused_obs(name) or msg)
    names_of = dict(zip(map(id, sources), known, strict=True))

    def read(source: Source) -> dict[str, ObsColumn]:
        asked = [name for name in columns if name in names_of[id(source)]]
        found = dict(source.plain_obs(asked)) if asked else {}
        if others := [name for name in asked if name not in found]:
            table: Any = source.read_obs(others)
            if not isinstance(table, pd.DataFrame):
                raise FormatError(f"{source.location}: `read_obs` must return a data frame")
            if missing := [name for name in others if name not in table]:
                msg = f"{source.location}: `read_obs` returned no column {missing[0]!r}"
                raise FormatError(f"{msg}, which is one of `obs_names`; correct the source")
            found |= {name: _column_of(name, source.location, table[name]) for name in others}
        for each in found.values():
            cells = each.codes if isinstance(each, CategoricalColumn) else each.values
            if (n := len(cells)) != source.n_rows:
                msg = f"{source.location}: obs has {n} rows, but the matrix has {source.n_rows}"
                raise FormatError(f"{msg}; write the file again")
        return found

    parts = list(side_by_side(_alone(read), sources))
    return {
        name: _join(
            name,
            [
                (source.location, own.get(name) or _missing(name, source.n_rows, parts))
                for source, own in zip(sources, parts, strict=True)
            ],
        )
        for name in columns
    }


def _missing(name: str, n_rows: int, parts: Sequence[Mapping[str, ObsColumn]]) -> ObsColumn:
    """Return missing values for a source that lacks a column: NaN beside numbers."""
    known = (each[name] for each in parts if name in each)
    if isinstance(next(filterfalse(_has_no_categories, known), None), NumericColumn):
        return NumericColumn(np.full(n_rows, np.nan, np.float32))
    return CategoricalColumn(np.full(n_rows, -1, np.int8), np.empty(0, object))


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
    return _join(name, [(where, _column_of(name, where, series)) for where, series in parts])


def _column_of(name: str, where: Location, series: pd.Series[Any]) -> ObsColumn:
    """Return a column of one file that pandas has read."""
    is_category = isinstance(series.dtype, pd.CategoricalDtype)
    dtype = series.cat.categories.dtype if is_category else series.dtype
    is_boolean = pd.api.types.is_bool_dtype(dtype)
    is_number = pd.api.types.is_numeric_dtype(dtype) and dtype not in _UNKNOWN_TO_TORCH
    if is_number and not (is_boolean or is_category):
        # Missing ones are NaN, of pandas' nullable integers too.
        is_nullable = _is_nullable(series)
        own = np.dtype(np.float64) if is_nullable else series.to_numpy().dtype.newbyteorder("=")
        return NumericColumn(exact_numbers(name, where, series, own), is_nullable)
    if (
        is_boolean
        or is_number
        or pd.api.types.is_string_dtype(dtype)
        or pd.api.types.is_object_dtype(dtype)
    ):
        column = series.astype("category").cat
        categories = column.categories.to_numpy(dtype=object)
        is_nullable = isinstance(series.dtype, pd.BooleanDtype)
        return CategoricalColumn(np.asarray(column.codes), categories, is_nullable)
    msg = (
        f"{where}: obs column {name!r} has dtype {dtype}, which is neither a "
        "numeric dtype of torch nor categorical; write it as float64 or as text"
    )
    raise ColumnError(msg)


def _join(name: str, parts: Sequence[tuple[Location, ObsColumn]]) -> ObsColumn:
    """Join a column over files; see `join_column`."""
    # Categories of which there are none, since all are missing, fit any others.
    known = [part for part in parts if not _has_no_categories(part[1])] or [*parts[:1]]
    expected = _kind(known[0][1])
    for where, column in parts:
        kind = _kind(column)
        if kind != expected and (expected == "numbers" or not _has_no_categories(column)):
            msg = (
                f"{where}: obs column {name!r} has {kind}, but {expected} in {known[0][0]}; write "
                "the same kind to all files"
            )
            raise MismatchError(msg)
    is_nullable = any(column.is_nullable for _, column in parts)
    numbers = [(where, each.values) for where, each in parts if isinstance(each, NumericColumn)]
    if numbers:
        dtype = np.result_type(*(values.dtype for _, values in numbers))
        if dtype.kind == "f" and all(values.dtype.kind in "iu" for _, values in numbers):
            dtype = np.dtype(np.int64)  # of int64 beside uint64
        exact = [_exact(name, where, values, dtype) for where, values in numbers]
        for (where, _), values in zip(numbers, exact, strict=True):
            require_int64(f"{where}: obs column {name!r}", values)
        return NumericColumn(np.concatenate(exact), is_nullable)
    code_of = dict[Any, int]()  # numbered by first appearance
    texts = [each for _, each in parts if isinstance(each, CategoricalColumn)]
    # The last entry, which code -1 selects, keeps "missing" missing.
    to_joint = [
        np.array([*(code_of.setdefault(e, len(code_of)) for e in each.categories), -1])
        for each in texts
    ]
    small = np.min_scalar_type(-max(1, len(code_of)))
    codes = [new[each.codes].astype(small) for new, each in zip(to_joint, texts, strict=True)]
    return CategoricalColumn(np.concatenate(codes), np.array([*code_of], object), is_nullable)


def _has_no_categories(column: ObsColumn) -> bool:
    return isinstance(column, CategoricalColumn) and not column.categories.size


def _kind(column: ObsColumn) -> str:
    if isinstance(column, NumericColumn):
        return "numbers"
    types = {type(each) for each in column.categories}
    if types and types <= {bool, np.bool_}:
        return "booleans"
    are_numbers = types and all(issubclass(each, Number) for each in types)
    return "categories that are numbers" if are_numbers else "text"


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
    if not _is_nullable(series):
        return _exact(name, where, series.to_numpy(), dtype)
    if series.dtype.kind in "iu":  # older versions of pandas give objects if not asked
        integers = series.dropna().to_numpy(dtype=np.dtype(f"{series.dtype.kind}8"))
        _exact(name, where, integers, dtype)
    values: NDArray[Any] = series.to_numpy(dtype=dtype, na_value=np.nan)
    return values


def _exact(name: str, where: Location, numbers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(invalid="ignore"):
        values = numbers.astype(dtype, copy=False)
    if numbers.dtype.kind in "iu" and numbers.dtype != dtype:
        inexact = numbers[_differ(numbers, dtype)]
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


# Queries: comparisons, which pandas carries out.

_QUOTED = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|`([^`]+)`""")
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda column, values: column.isin(values),
    ast.NotIn: lambda column, values: ~column.isin(values),
}


def rows_where(
    query: str, read: Callable[[Sequence[str]], Mapping[str, ObsColumn]]
) -> NDArray[np.int64]:
    """Return the rows where a condition holds, ascending; where it is missing, it does not.

    Parameters
    ----------
    query
        The condition, such as ``"cell_type == 'B' and n_counts > 500"``.
    read
        Returns all rows of the columns in it.

    Raises
    ------
    ParameterError
        The query has something other than columns, constants, comparisons, ``and``, ``or``,
        ``not`` and ``in`` with lists of constants; or pandas cannot compare the columns.
    """
    called = f"query {str(query)[:200]!r}"
    quoted = list[str]()  # names in backticks, by placeholder; text may have backticks, too

    def placed(match: re.Match[str]) -> str:
        quoted.extend([match[2]] if match[2] else [])
        return match[1] or f" _quoted_{len(quoted) - 1}_ "

    try:
        tree = ast.parse(_QUOTED.sub(placed, query).strip(), mode="eval").body
    except (TypeError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        msg = "is not an expression, or too long; write text such as \"cell_type == 'B'\""
        raise ParameterError(f"{called}: {msg}") from error
    of_placeholder = {f"_quoted_{k}_": name for k, name in enumerate(quoted)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    for node in names:
        node.id = of_placeholder.get(node.id, node.id)
    columns = read([*dict.fromkeys(node.id for node in names)])
    series = {name: pd.Series(_array_of(each), copy=False) for name, each in columns.items()}
    try:
        holds = _where(tree, series).to_numpy(dtype=bool, na_value=False)
    except Exception as error:  # also whatever pandas raises of a dtype
        reason = "" if isinstance(error, ParameterError) else "pandas cannot evaluate it: "
        raise ParameterError(f"{called}: {reason}{one_line(error)}") from error
    return np.flatnonzero(holds)


def _where(node: ast.expr, columns: Mapping[str, Any]) -> Any:
    """Return where an expression is true, a series of booleans."""
    match node:
        case ast.BoolOp(op=op, values=operands):
            join = operator.and_ if isinstance(op, ast.And) else operator.or_
            return reduce(join, (_where(each, columns) for each in operands))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_where(operand, columns)
        case ast.Name(id=name):
            if columns[name].dtype.kind != "b":
                msg = f"{name!r} is not true or false; compare it, as in `{name} == 1`"
                raise ParameterError(msg)
            return columns[name]
        case ast.Compare(left=left, ops=ops, comparators=right):
            values = [_value(each, columns) for each in (left, *right)]
            compared = [*zip(map(type, ops), values[:-1], values[1:], strict=True)]
            if all(starmap(_may_compare, compared)):
                found = (_COMPARISONS[sign](*sides) for sign, *sides in compared)
                return reduce(operator.and_, found)
    msg = (
        f"{ast.unparse(node)[:80]!r} is not allowed; use comparisons of columns with columns and "
        "constants, and, or, not, in ['a', 'b']; for others, compare `read_obs` with NumPy"
    )
    raise ParameterError(msg)


def _value(node: ast.expr, columns: Mapping[str, Any]) -> Any:
    """Return a column, or a constant or a list of them; None for anything else."""
    if isinstance(node, ast.Name):
        return columns[node.id]
    with suppress(ValueError):
        return ast.literal_eval(node)
    return None


def _may_compare(sign: type[ast.cmpop], left: Any, right: Any) -> bool:
    """Return whether a sign compares columns with each other, constants, or a list of them."""
    is_list = isinstance(right, list | tuple)
    values = [left, *right] if is_list else [left, right]
    constants = [each for each in values if not isinstance(each, pd.Series)]
    return (
        sign in _COMPARISONS
        and is_list == (sign in (ast.In, ast.NotIn))
        and len(constants) < len(values)
        and all(isinstance(each, bool | int | float | str) for each in constants)
    )


def _array_of(column: ObsColumn) -> Any:
    """Return a column as NumPy or pandas represents it; categories stay codes.

    Booleans are categories only if some that are not pandas' NA are missing.
    """
    if not isinstance(column, CategoricalColumn):
        values = column.values
        return pd.arrays.FloatingArray(values, np.isnan(values)) if column.is_nullable else values
    are_missing = column.codes < 0
    if column.is_nullable or (_kind(column) == "booleans" and not are_missing.any()):
        values = np.append(column.categories.astype(bool), [False])  # the last is of code -1
        return pd.arrays.BooleanArray(values[column.codes], are_missing)
    return pd.Categorical.from_codes(column.codes, pd.Index(column.categories))
