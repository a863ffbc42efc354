"""A query over obs columns: comparisons, which pandas carries out for some rows at a time."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, one_line
from cellfeed._lazy import pd
from cellfeed.rows import CategoricalColumn, ObsColumn

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
_ROWS_AT_ONCE = 1 << 18
_MOST_SHOWN = 200


class Query:
    """A condition on obs columns, such as ``"cell_type == 'B' and n_counts > 500"``.

    Parameters
    ----------
    text
        The text of the query.

    Attributes
    ----------
    columns
        The columns in it, each once.

    Raises
    ------
    ParameterError
        It is not an expression.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            msg = f"a query must be text, such as \"cell_type == 'B'\", but got {text!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        self._called = repr(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "...")
        quoted = dict[str, str]()  # names in backticks, by placeholder

        def placed(match: re.Match[str]) -> str:
            if match[1]:  # text, which may have backticks
                return match[1]
            placeholder = f"_quoted_{len(quoted)}_"
            quoted[placeholder] = match[2]
            return f" {placeholder} "

        try:
            self._tree = ast.parse(_QUOTED.sub(placed, text).strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            msg = "is not an expression, or too long; write, for example, \"cell_type == 'B'\""
            raise self._refused(msg) from error
        names = [node for node in ast.walk(self._tree) if isinstance(node, ast.Name)]
        for node in names:
            node.id = quoted.get(node.id, node.id)
        self.columns = tuple(dict.fromkeys(node.id for node in names))

    def rows(self, columns: Mapping[str, ObsColumn], n_rows: int) -> NDArray[np.int64]:
        """Return the rows where the condition holds, ascending; where it is missing, it does not.

        Parameters
        ----------
        columns
            All rows of the columns in the query.
        n_rows
            The number of rows.

        Raises
        ------
        ParameterError
            The query has something other than columns, constants, comparisons, ``and``, ``or``,
            ``not`` and ``in`` with lists of constants; or pandas cannot compare the columns.
        """
        arrays = {name: _array_of(columns[name]) for name in self.columns}
        found = [np.empty(0, np.int64)]
        for start in range(0, n_rows, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            some = {name: pd.Series(each[part]) for name, each in arrays.items()}
            try:
                holds = self._where(self._tree, some).to_numpy(dtype=bool, na_value=False)
            except ParameterError:
                raise
            except Exception as error:  # whatever pandas raises of a dtype
                raise self._refused(f"pandas cannot evaluate it: {one_line(error)}") from error
            found.append(np.flatnonzero(holds) + start)
        return np.concatenate(found)

    def _refused(self, what: str) -> ParameterError:
        return ParameterError(f"query {self._called}: {what}")

    def _where(self, node: ast.expr, columns: Mapping[str, Any]) -> Any:
        """Return where an expression is true, a series of booleans."""
        match node:
            case ast.BoolOp(op=op, values=operands):
                join = operator.and_ if isinstance(op, ast.And) else operator.or_
                return reduce(join, (self._where(each, columns) for each in operands))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._where(operand, columns)
            case ast.Name(id=name):
                if columns[name].dtype.kind != "b":
                    msg = f"{name!r} is not true or false; compare it, as in `{name} == 1`"
                    raise self._refused(msg)
                return columns[name]
            case ast.Compare(left=left, ops=ops, comparators=right):
                pairs = zip(ops, pairwise([left, *right]), strict=True)
                return reduce(operator.and_, (self._compared(*each, columns) for each in pairs))
        raise self._not_allowed(node)

    def _compared(
        self, sign: ast.cmpop, sides: tuple[ast.expr, ast.expr], columns: Mapping[str, Any]
    ) -> Any:
        """Return where a comparison of two expressions holds."""
        values = list[Any]()
        for node in sides:
            if isinstance(node, ast.Name):
                values.append(columns[node.id])
                continue
            try:
                values.append(ast.literal_eval(node))
            except ValueError as error:
                raise self._not_allowed(node) from error
        are_columns = [isinstance(each, pd.Series) for each in values]
        if isinstance(sign, ast.In | ast.NotIn):
            if not are_columns[0] or not isinstance(values[1], list | tuple):
                msg = "`in` takes a column and a list of constants, such as ['a', 'b']"
                raise self._refused(msg)
            constants = values[1]
        else:
            constants = [each for each in values if not isinstance(each, pd.Series)]
        is_known = all(isinstance(each, bool | int | float | str) for each in constants)
        if type(sign) not in _COMPARISONS or not is_known or not any(are_columns):
            raise self._not_allowed(ast.Compare(sides[0], [sign], [sides[1]]))
        return _COMPARISONS[type(sign)](*values)

    def _not_allowed(self, node: ast.expr) -> ParameterError:
        return self._refused(
            f"{ast.unparse(node)[:80]!r} is not allowed; use comparisons of columns with columns "
            "and constants, and, or, not, in [...]; for others, compare `read_obs` with NumPy"
        )


def _array_of(column: ObsColumn) -> Any:
    """Return a column as NumPy or pandas represents it; categories stay codes.

    Booleans are categories only if some that are not pandas' NA are missing.
    """
    if not isinstance(column, CategoricalColumn):
        values = column.values
        return pd.arrays.FloatingArray(values, np.isnan(values)) if column.is_nullable else values
    are_missing = column.codes < 0
    kinds = {type(each) for each in column.categories}
    if column.is_nullable or (kinds and kinds <= {bool, np.bool_} and not are_missing.any()):
        values = np.append(column.categories.astype(bool), [False])  # the last is of code -1
        return pd.arrays.BooleanArray(values[column.codes], are_missing)
    return pd.Categorical.from_codes(column.codes, pd.Index(column.categories))
