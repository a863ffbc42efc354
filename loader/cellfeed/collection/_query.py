"""A query over obs columns, which is checked here and evaluated by pandas.

pandas gets an expression that is rebuilt from the parsed query, with column numbers in place of
names. It contains no Python names, calls or attributes.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, one_line
from cellfeed._lazy import pd
from cellfeed.rows import CategoricalColumn, ObsColumn

_TOKENS = re.compile(
    r"""(?P<refused>'{3}|"{3}|@)|(?P<text>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
    r"""|`(?P<name>[^`]+)`|(?P<and>&)|(?P<or>\|)"""
)
_PLACEHOLDER = re.compile(r"_obs_column_(\d+)_")
_CALCULATIONS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.UAdd)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_CONDITIONS = (ast.Compare, ast.BoolOp, ast.Name)
_LARGEST_INTEGER = 2**63
_MOST_CHARACTERS, _MOST_SHOWN = 100_000, 200


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
        It has something other than columns, constants, comparisons, ``and``, ``or``, ``not``,
        ``in`` with lists of constants, and arithmetic (``+ - * / // %``); or it has no column.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            msg = f"a query must be text, such as \"cell_type == 'B'\", but got {text!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        shown = text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
        self._called = f"query {shown!r}"
        self.columns = list[str]()
        self._conditions = list[str]()  # columns that have to be true or false
        if len(text) > _MOST_CHARACTERS:
            raise self._refused(f"has more than {_MOST_CHARACTERS:,} characters")
        try:
            python = _TOKENS.sub(self._token, text).strip()
            self._expression = ast.unparse(self._checked(ast.parse(python, mode="eval").body))
        except (RecursionError, MemoryError) as error:
            raise self._refused("is nested too deeply; simplify it") from error
        except (SyntaxError, ValueError) as error:
            if isinstance(error, ParameterError):
                raise
            msg = "is not an expression; write, for example, \"cell_type == 'B'\""
            raise self._refused(msg) from error
        if not self.columns:
            raise self._refused("has no obs column; compare one")

    def _refused(self, what: str) -> ParameterError:
        return ParameterError(f"{self._called}: {what}")

    def evaluate(self, columns: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Return where the condition holds; False where it is missing.

        Parameters
        ----------
        columns
            Rows of the columns in the query, as pandas series of the same length.

        Raises
        ------
        ParameterError
            pandas cannot compare columns of these dtypes.
        """
        for name in self._conditions:
            if columns[name].dtype.kind != "b":
                raise self._refused(
                    f"{name!r} is not true or false; compare it, as in `{name} == 1`"
                )
        try:
            with np.errstate(all="ignore"):
                found = pd.eval(
                    self._expression,
                    parser="pandas",
                    engine="python",
                    local_dict={},
                    global_dict={},
                    resolvers=[{self._placeholder(name): columns[name] for name in self.columns}],
                )
        except Exception as error:  # whatever pandas raises of a dtype
            what = _PLACEHOLDER.sub(
                lambda match: repr(self.columns[int(match[1])]), one_line(error)
            )
            raise self._refused(f"pandas cannot evaluate it: {what}") from error
        if not isinstance(found, pd.Series) or found.dtype.kind != "b":
            raise self._refused("gives values that are not true or false; compare them")
        return found.to_numpy(dtype=bool, na_value=False)

    def _placeholder(self, column: str) -> str:
        """Return the name of a column in the expression."""
        if column not in self.columns:
            self.columns.append(column)
        return f"_obs_column_{self.columns.index(column)}_"

    def _token(self, match: re.Match[str]) -> str:
        """Return a placeholder for a name in backticks, or pandas' meaning of ``&`` and ``|``."""
        if match["refused"]:
            raise self._refused(
                f"{match[0]} is not allowed; write literal values, such as 'B' or 500"
            )
        if match["name"]:
            return f" {self._placeholder(match['name'])} "
        return match["text"] or (" and " if match["and"] else " or ")

    def _checked(self, node: ast.expr) -> ast.expr:
        """Return a rebuilt expression, if it is allowed."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                is_huge = isinstance(value, int) and abs(value) > _LARGEST_INTEGER
                if is_huge or (isinstance(value, float) and not math.isfinite(value)):
                    raise self._refused("has a number that is too large")
                return node
            case ast.Name(id=name):
                return ast.Name(self._placeholder(self._column(name)), ast.Load())
            case ast.BoolOp(values=operands):
                return ast.BoolOp(node.op, [self._condition(each) for each in operands])
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
                return ast.UnaryOp(node.op, self._condition(operand))
            case ast.UnaryOp() | ast.BinOp() if isinstance(node.op, _CALCULATIONS):
                return self._calculation(node)
            case ast.Compare(left=left, ops=ops, comparators=right):
                return ast.Compare(self._checked(left), ops, list(map(self._compared, ops, right)))
        raise self._refused(
            f"{ast.unparse(node)[:80]!r} is not allowed; use columns, constants, comparisons, "
            "and, or, not, in [...] and arithmetic"
        )

    def _column(self, name: str) -> str:
        """Return the column of a name, which may be the placeholder of one in backticks."""
        match = _PLACEHOLDER.fullmatch(name)
        number = int(match[1]) if match else len(self.columns)
        return self.columns[number] if number < len(self.columns) else name

    def _condition(self, node: ast.expr) -> ast.expr:
        """Return an operand of and, or, not; refuse numbers, whose bits would be combined."""
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert)
        if not is_not and not isinstance(node, _CONDITIONS):
            raise self._refused(
                f"combines {ast.unparse(node)[:80]!r} with and, or, not; compare it, as in `n > 0`"
            )
        if isinstance(node, ast.Name):
            self._conditions.append(self._column(node.id))
        return self._checked(node)

    def _calculation(self, node: ast.UnaryOp | ast.BinOp) -> ast.expr:
        """Return a calculation, which pandas carries out; repeated text could take all memory."""
        given = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        operands = [self._checked(each) for each in given]
        if any(isinstance(getattr(each, "value", None), str) for each in operands):
            raise self._refused("calculates with text; compare it instead")
        if isinstance(node, ast.UnaryOp):
            return ast.UnaryOp(node.op, *operands)
        return ast.BinOp(operands[0], node.op, operands[1])

    def _compared(self, comparison: ast.cmpop, node: ast.expr) -> ast.expr:
        """Return the right side of a comparison: for ``in``, a list of constants."""
        if isinstance(comparison, _COMPARISONS):
            return self._checked(node)
        if not isinstance(comparison, ast.In | ast.NotIn):
            raise self._refused("`is` is not allowed; compare with ==")
        constants = [*map(self._checked, getattr(node, "elts", []))]
        nodes = [each for constant in constants for each in ast.walk(constant)]
        if not nodes or any(isinstance(each, _CONDITIONS) for each in nodes):
            raise self._refused("`in` takes a list of constants, such as ['a', 'b']")
        return ast.List(constants, ast.Load())


# Rows whose obs fulfil a condition.

_ROWS_AT_ONCE = 1 << 18


def rows_where(query: Query, columns: Mapping[str, ObsColumn], n_rows: int) -> NDArray[np.int64]:
    """Return the rows where a condition holds, ascending.

    Parameters
    ----------
    query
        The condition.
    columns
        All rows of the columns in the condition.
    n_rows
        The number of rows.

    Raises
    ------
    ParameterError
        pandas cannot compare columns of these dtypes.
    """
    arrays = {name: _array_of(columns[name]) for name in query.columns}
    found = [np.empty(0, np.int64)]
    for start in range(0, n_rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        holds = query.evaluate({name: _series_of(each[part]) for name, each in arrays.items()})
        found.append(np.flatnonzero(holds) + start)
    return np.concatenate(found)


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


def _series_of(values: Any) -> pd.Series[Any]:
    """Return a series of some rows, whose integers are wide so that results do not wrap."""
    is_narrow = values.dtype.kind in "iu" and values.dtype != np.uint64
    return pd.Series(values.astype(np.int64, copy=False) if is_narrow else values)
