"""A query over obs columns, which is checked here and evaluated by pandas.

pandas gets an expression that is rebuilt from the parsed query, with column numbers in place of
names and with constants folded. It contains no Python names, calls or attributes.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed._lazy import pd
from cellfeed._rows import CategoricalColumn, ObsColumn

_TOKENS = re.compile(
    r"""(?P<triple>'{3}|"{3})|(?P<text>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
    r"""|`(?P<name>[^`]+)`|(?P<at>@)|(?P<and>&)|(?P<or>\|)"""
)
_PLACEHOLDER = re.compile(r"_obs_column_(\d+)_")

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_MEMBERSHIPS = (ast.In, ast.NotIn)
_MOST_POWER = 64
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
        The columns in it, each once, with their numbers in the rebuilt query.

    Raises
    ------
    ParameterError
        It has something other than columns, constants, comparisons, ``and``, ``or``, ``not``,
        ``in`` with lists of constants, and arithmetic; or it has no column.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            msg = f"a query must be text, such as \"cell_type == 'B'\", but got {text!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        shown = text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
        self._called = f"query {shown!r}"
        self._quoted = list[str]()  # names in backticks
        self._conditions = list[str]()  # columns that have to be true or false
        self.columns = dict[str, int]()
        if len(text) > _MOST_CHARACTERS:
            raise self._refused(f"has more than {_MOST_CHARACTERS:,} characters")
        try:
            self._expression = ast.unparse(self._checked(self._parsed(text)))
        except (RecursionError, MemoryError) as error:
            raise self._refused("is nested too deeply; simplify it") from error
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
            if not _are_booleans(columns[name]):
                raise self._refused(
                    f"{name!r} is not true or false; compare it, as in `{name} == 1`"
                )
        named = {_column(number): columns[name] for name, number in self.columns.items()}
        try:
            with np.errstate(all="ignore"):
                found = pd.eval(
                    self._expression,
                    parser="pandas",
                    engine="python",
                    local_dict={},
                    global_dict={},
                    resolvers=[named],
                )
        except Exception as error:  # whatever pandas raises of a dtype
            names = [*self.columns]
            said = _PLACEHOLDER.sub(lambda match: repr(names[int(match[1])]), str(error))
            what = " ".join(said.split()) or type(error).__name__
            raise self._refused(f"pandas cannot evaluate it: {what}") from error
        if not isinstance(found, pd.Series) or not _are_booleans(found):
            raise self._refused("gives values that are not true or false; compare them")
        return found.to_numpy(dtype=bool, na_value=False)

    def _parsed(self, text: str) -> ast.expr:
        python = _TOKENS.sub(self._token, text).strip()
        try:
            return ast.parse(python, mode="eval").body
        except (SyntaxError, ValueError) as error:
            msg = "is not an expression; write, for example, \"cell_type == 'B'\""
            raise self._refused(msg) from error

    def _token(self, match: re.Match[str]) -> str:
        """Return a placeholder for a name in backticks, or pandas' meaning of ``&`` and ``|``."""
        if match["text"]:
            return match["text"]
        if match["triple"] or match["at"]:
            raise self._refused(
                f"{match[0]} is not allowed; write literal values, such as 'B' or 500"
            )
        if match["name"]:
            self._quoted.append(match["name"])
            return f" _quoted_{len(self._quoted) - 1}_ "
        return " and " if match["and"] else " or "

    def _checked(self, node: ast.expr) -> ast.expr:
        """Return a rebuilt expression, if it is allowed."""
        match node:
            case ast.Constant():
                return self._constant(node.value)
            case ast.Name():
                number = self.columns.setdefault(self._column_of(node.id), len(self.columns))
                return ast.Name(_column(number), ast.Load())
            case ast.BoolOp(op=op, values=operands):
                return ast.BoolOp(op, [self._condition(each) for each in operands])
            case ast.UnaryOp():
                return self._unary(node.op, node.operand)
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.Compare():
                return self._comparison(node)
        raise self._refused(
            f"{ast.unparse(node)[:80]!r} is not allowed; use columns, constants, comparisons, "
            "and, or, not, in [...] and arithmetic"
        )

    def _condition(self, node: ast.expr) -> ast.expr:
        """Return an operand of and, or, not; refuse numbers, whose bits would be combined."""
        is_truth = isinstance(node, ast.Compare | ast.BoolOp | ast.Name) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        )
        if not is_truth:
            raise self._refused(
                f"combines {ast.unparse(node)[:80]!r} with and, or, not; compare it, as in `n > 0`"
            )
        checked = self._checked(node)
        if isinstance(node, ast.Name):
            self._conditions.append(self._column_of(node.id))
        return checked

    def _column_of(self, name: str) -> str:
        """Return the column of a name in the syntax tree."""
        quoted = re.fullmatch(r"_quoted_(\d+)_", name)
        if quoted and int(quoted[1]) < len(self._quoted):
            return self._quoted[int(quoted[1])]
        return name

    def _constant(self, value: Any) -> ast.Constant:
        if not isinstance(value, bool | int | float | str):
            raise self._refused(f"{value!r} is not allowed; compare with numbers or text")
        is_huge = isinstance(value, int) and abs(value) > _LARGEST_INTEGER
        if is_huge or (isinstance(value, float) and not math.isfinite(value)):
            raise self._refused("has a number that is too large")
        return ast.Constant(value)

    def _unary(self, sign: ast.unaryop, given: ast.expr) -> ast.expr:
        if isinstance(sign, ast.Not) and not isinstance(given, ast.Constant):
            return ast.UnaryOp(sign, self._condition(given))
        operand = self._checked(given)
        if isinstance(operand, ast.Constant):
            value: Any = operand.value
            if isinstance(value, str) or not isinstance(sign, ast.USub | ast.UAdd):
                raise self._refused("negates a constant; compare a column with it")
            return self._constant(-value if isinstance(sign, ast.USub) else +value)
        return ast.UnaryOp(sign, operand)

    def _arithmetic(self, node: ast.BinOp) -> ast.expr:
        if type(node.op) not in _OPERATORS:
            raise self._refused(
                f"{ast.unparse(node)[:80]!r} is not allowed; the allowed arithmetic is + - * / // "
                "% **"
            )
        left, right = self._checked(node.left), self._checked(node.right)
        constants = [each.value for each in (left, right) if isinstance(each, ast.Constant)]
        if any(isinstance(value, str) for value in constants):
            raise self._refused("calculates with text; compare it instead")
        power: Any = right.value if isinstance(right, ast.Constant) else math.inf
        if isinstance(node.op, ast.Pow) and abs(power) > _MOST_POWER:
            raise self._refused(f"has an exponent that is not a number up to {_MOST_POWER}")
        if len(constants) == 2:  # noqa: PLR2004 - both sides
            try:  # neither is large, so it is quick
                return self._constant(_OPERATORS[type(node.op)](*constants))
            except ArithmeticError as error:
                raise self._refused(f"calculates with constants: {error}") from error
        return ast.BinOp(left, node.op, right)

    def _comparison(self, node: ast.Compare) -> ast.expr:
        operands = [self._checked(node.left)]
        for comparison, operand in zip(node.ops, node.comparators, strict=True):
            if isinstance(comparison, _MEMBERSHIPS):
                operands.append(self._list(operand))
            elif isinstance(comparison, _COMPARISONS):
                operands.append(self._checked(operand))
            else:
                raise self._refused("`is` is not allowed; compare with ==")
        for left, right in pairwise(operands):
            if isinstance(left, ast.List):
                raise self._refused("compares a list; write `column in ['a', 'b']`")
            if isinstance(left, ast.Constant) and isinstance(right, ast.Constant | ast.List):
                raise self._refused("compares two constants; compare a column")
        return ast.Compare(operands[0], node.ops, operands[1:])

    def _list(self, node: ast.expr) -> ast.List:
        if not isinstance(node, ast.List | ast.Tuple) or not node.elts:
            raise self._refused("`in` takes a list of constants, such as ['a', 'b']")
        elements = [self._checked(each) for each in node.elts]
        if not all(isinstance(each, ast.Constant) for each in elements):
            raise self._refused("`in` takes a list of constants, such as ['a', 'b']")
        return ast.List(elements, ast.Load())


def _are_booleans(series: pd.Series[Any]) -> bool:
    is_category = isinstance(series.dtype, pd.CategoricalDtype)  # which may be of booleans
    return not is_category and pd.api.types.is_bool_dtype(series.dtype)


def _column(number: int) -> str:
    return f"_obs_column_{number}_"


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
    take = {name: _series_of(columns[name]) for name in query.columns}
    found = [np.empty(0, np.int64)]
    for start in range(0, n_rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        holds = query.evaluate({name: series(part) for name, series in take.items()})
        found.append(np.flatnonzero(holds) + start)
    return np.concatenate(found)


def _series_of(column: ObsColumn) -> Callable[[slice], pd.Series[Any]]:
    """Return a function that makes a pandas series of some rows of a column.

    Categories stay codes, except for booleans, unless these are categories with missing values.
    """
    if not isinstance(column, CategoricalColumn):
        numbers = column.values
        if column.is_nullable:
            return lambda part: pd.Series(
                pd.arrays.FloatingArray(numbers[part], np.isnan(numbers[part]))
            )
        is_narrow = numbers.dtype.kind in "iu" and numbers.dtype != np.uint64
        wide = np.dtype(np.int64) if is_narrow else numbers.dtype  # so that results do not wrap
        return lambda part: pd.Series(numbers[part].astype(wide, copy=False))
    codes = column.codes
    has_missing = bool(codes.min(initial=0) < 0)
    kinds = {type(each) for each in column.categories}
    if column.is_nullable or (kinds and kinds <= {bool, np.bool_} and not has_missing):
        values = np.append(column.categories.astype(bool), [False])  # the last is of code -1
        if not has_missing:
            return lambda part: pd.Series(values[codes[part]])
        return lambda part: pd.Series(pd.arrays.BooleanArray(values[codes[part]], codes[part] < 0))
    dtype = pd.CategoricalDtype(pd.Index(column.categories))
    return lambda part: pd.Series(pd.Categorical.from_codes(codes[part], dtype=dtype))
