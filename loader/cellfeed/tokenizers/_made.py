"""The tokens of minibatches: how each tokenizer and masking is computed."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import BufferPool
from cellfeed.decode import Counter, Counters
from cellfeed.extending import FormatError, ParameterError
from cellfeed.rows import CsrRows, Element, RaggedRows
from cellfeed.tokenizers import _kernels as kernels
from cellfeed.tokenizers._kernels import _fields as fields

_INT64, _FLOAT32, _BOOL = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)
_NONE = np.empty(0, np.int64)
_ALIGNMENT = 64
_FEW_MEDIANS = 16  # with as few, many genes of a cell are equal


class ElementTokens:
    """Makes tokens of the rows of one element.

    Parameters
    ----------
    tokenizer, masking
        The tokenizer, and how tokens are masked, if they are.
    element
        The element.
    counters
        Counters of tokens and of values of unknown genes.

    Raises
    ------
    ParameterError
        The vocabulary has none of the element's genes, or lacks the mask.
    """

    def __init__(self, tokenizer: Any, masking: Any, element: Element, counters: Counters) -> None:
        self._tokenizer, self._masking, self._counters = tokenizer, masking, counters
        self._name = element.name
        genes = self._genes = genes_of(tokenizer, element.column_names)
        tokens, known = genes.tokens, np.flatnonzero(genes.tokens >= 0)
        self._known, self._quantiles = np.empty(0, np.int32), np.empty(0)
        settings = self._settings = np.zeros(fields.N_SETTINGS, np.int64)
        numbers = self._numbers = np.zeros(fields.N_NUMBERS)
        settings[fields.LONGEST] = tokenizer.max_length
        settings[[fields.CLS, fields.EOS]] = [_or_none(tokenizer, each) for each in ("cls", "eos")]
        if getattr(tokenizer, "genes", "nonzero") == "all":
            settings[fields.N_KNOWN] = known.size
            numbers_of = np.cumsum(tokens >= 0) - 1
            by_token = np.argsort(tokens[known], kind="stable")
            self._known = np.concatenate([numbers_of, tokens[known], by_token]).astype(np.int32)
        if tokenizer.algorithm == "rank":
            settings[fields.TOKENIZER] = fields.RANKED
            settings[fields.HAS_TIES] = genes.has_ties
        elif tokenizer.algorithm == "bin":
            settings[fields.TOKENIZER] = fields.BINNED
            if hasattr(tokenizer, "n_bins"):
                settings[fields.TOP] = tokenizer.subset == "top"
                self._quantiles = np.linspace(0, 1, tokenizer.n_bins - 1)
        else:
            settings[fields.TOKENIZER] = fields.CALLED
            settings[fields.FUNCTION], self._callback = _compiled(tokenizer.function)
        self._replacements = _NONE
        if masking is None:
            return
        if masking.masks == "tokens":
            settings[fields.MASKING] = fields.MASKED_TOKENS
            mask, vocabulary = masking.mask, tokenizer.vocabulary
            settings[fields.MASK_TOKEN] = vocabulary[mask] if isinstance(mask, str) else mask
            numbers[: fields.MASK_VALUE] = masking.fraction, masking.random, masking.kept
            self._replacements = tokens[known]
        else:
            settings[fields.MASKING] = fields.MASKED_VALUES
            numbers[[fields.MASK_FRACTION, fields.MASK_VALUE]] = masking.fraction, masking.value

    def __call__(
        self, rows: CsrRows | NDArray[Any], numbers: NDArray[np.int64], key: int, pool: BufferPool
    ) -> dict[str, Any]:
        """Return what a minibatch has in place of the element, by name; see `ReplaceRows`."""
        n_rows, longest = len(numbers), self._tokenizer.max_length
        n, masking = n_rows * longest, self._settings[fields.MASKING]
        parts: dict[str, np.dtype[Any]] = {"tokens": _INT64}
        if self._tokenizer.has_values:
            parts["values"] = _FLOAT32
        if masking:
            parts["labels"] = _INT64 if masking == fields.MASKED_TOKENS else _FLOAT32
            parts["masked"] = _BOOL
        if self._tokenizer.padding is not None:
            parts["attention_mask"] = _BOOL
        made = _memory(pool, parts, n)
        lengths, report = np.zeros(n_rows, np.int64), np.zeros(fields.N_TOKEN_REPORTS, np.int64)
        report[fields.FAILED_ROW] = -1
        if isinstance(rows, CsrRows):
            stored = rows.data, rows.indices, rows.indptr
        else:
            pointers = np.arange(n_rows + 1) * rows.shape[1]
            stored = rows.reshape(-1), _NONE, pointers
        values = made.get("values", np.empty(0, np.float32))
        labels = made.get("labels", _NONE)
        of_values = labels.dtype == np.float32
        kernels.tokenize(
            *stored,
            numbers,
            np.uint64(key),
            self._genes.table,
            self._known,
            self._genes.divisors,
            self._quantiles,
            self._replacements,
            self._settings,
            self._numbers,
            made["tokens"],
            values,
            _NONE if of_values else labels,
            labels if of_values else np.empty(0, np.float32),
            made.get("masked", np.empty(0, np.bool_)),
            lengths,
            report,
        )
        if report[fields.FAILED_ROW] >= 0:
            raise self._failure(report, numbers)
        self._counters.add(Counter.TOKENS, int(report[fields.N_TOKENS]))
        self._counters.add(Counter.UNKNOWN, int(report[fields.N_UNKNOWN]))
        return self._shaped(made, lengths)

    def _shaped(self, made: dict[str, NDArray[Any]], lengths: NDArray[np.int64]) -> dict[str, Any]:
        """Return rows that are ``max_length`` apart in the shape of delivery."""
        tokenizer, n_rows, found = self._tokenizer, lengths.size, dict[str, Any]()
        longest = tokenizer.max_length
        if tokenizer.padding is None:
            offsets = np.append(0, np.cumsum(lengths))
        else:
            whole = tokenizer.padding == "max_length"
            width = longest if whole else int(lengths.max(initial=0))
            offsets = np.arange(n_rows + 1) * width
        pads = {"tokens": tokenizer.pad, "values": getattr(tokenizer, "pad_value", 0.0)}
        is_of_values = self._settings[fields.MASKING] == fields.MASKED_VALUES
        pads["labels"] = pads["values"] if is_of_values else fields.NO_LABEL
        for name, values in made.items():
            own = values[: offsets[-1]]
            if name == "attention_mask":
                kernels.mark_rows(own, lengths, width)
            else:
                fill = own.dtype.type(pads.get(name, 0))
                kernels.move_rows(values, longest, lengths, offsets, fill)
            found[name] = own
        if tokenizer.padding is None:
            found = {name: RaggedRows(offsets, each) for name, each in found.items()}
        else:
            found = {name: each.reshape(n_rows, width) for name, each in found.items()}
        return found | {"lengths": lengths}

    def _failure(
        self, report: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> FormatError | ParameterError:
        row = f"row {numbers[report[fields.FAILED_ROW]]:,} of the collection"
        if report[fields.FAILED_WHY] == fields.NOT_COUNTS:
            msg = (
                f"{self._name}: {row} has a value that is negative or not finite, which has no "
                "tokens; read an element with counts, such as elements=['layers/counts']"
            )
            return FormatError(msg)
        msg = (
            f"`function` returned {report[fields.N_TOKENS]:,} tokens for {row}, but must return "
            f"0 to max_length={self._tokenizer.max_length:,}"
        )
        return ParameterError(msg)


@dataclass(frozen=True, slots=True, eq=False)
class _Genes:
    """What a tokenizer knows of the genes of an element, whose names are ``names``."""

    names: NDArray[Any]
    tokens: NDArray[np.int64]
    divisors: NDArray[np.float64]
    has_ties: bool
    table: NDArray[np.uint64]


_found: MutableMapping[Any, _Genes] = WeakKeyDictionary()


def genes_of(tokenizer: Any, names: NDArray[Any]) -> _Genes:
    """Return the tokens and medians of genes; they are looked up once, and not in every epoch.

    Raises
    ------
    ParameterError
        None is known, or two have the same token.
    """
    found = _found.get(tokenizer)
    if found is not None and (found.names is names or np.array_equal(found.names, names)):
        return found
    tokens = tokenizer.tokens_of(names)
    divisors, weights = np.empty(0), np.zeros(tokens.size, np.float32)
    if tokenizer.algorithm == "rank":
        has_medians = tokenizer.medians is not None
        divisors = tokenizer.divisors_of(names) if has_medians else np.ones(tokens.size)
        with np.errstate(over="ignore", under="ignore"):
            weights = (1 / divisors).astype(np.float32)
    has_ties = np.unique(divisors[tokens >= 0]).size < _FEW_MEDIANS if divisors.size else False
    halves = np.stack([weights.view(np.int32), tokens.astype(np.int32)], axis=1)
    table = halves.view(np.uint64).ravel()
    found = _found[tokenizer] = _Genes(names, tokens, divisors, has_ties, table)
    return found


@cache
def _compiled(function: Any) -> tuple[int, Any]:
    """Return the address of a user's function, and what must exist as long as it is used."""
    return kernels.address_of(function)


def _or_none(tokenizer: Any, name: str) -> int:
    token = getattr(tokenizer, name, None)
    return -1 if token is None else int(token)


def _memory(
    pool: BufferPool, parts: Mapping[str, np.dtype[Any]], n: int
) -> dict[str, NDArray[Any]]:
    """Return arrays of n values in the memory of one buffer."""
    starts, end = dict[str, int](), 0
    for name, dtype in parts.items():
        starts[name] = end
        end += -(-n * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    buffer = pool.acquire(end)
    return {name: buffer.array(dtype, n, start=starts[name]) for name, dtype in parts.items()}
