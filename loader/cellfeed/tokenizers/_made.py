"""The tokens of minibatches: how each tokenizer and masking is computed."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import BufferPool
from cellfeed.decode import Counter, Counters
from cellfeed.extending import FormatError
from cellfeed.rows import CsrRows, Element, RaggedRows
from cellfeed.tokenizers import _kernels as kernels

_INT64, _FLOAT32, _BOOL = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)
_ALIGNMENT = 64
_FEW_MEDIANS = 16  # with as few, many genes of a cell are equal


class ElementTokens:
    """Makes tokens of the rows of one element.

    Parameters
    ----------
    tokenizer
        The tokenizer.
    element
        The element.
    counters
        Counters of tokens and of values of unknown genes.

    Raises
    ------
    ParameterError
        The vocabulary has none of the element's genes.
    """

    def __init__(self, tokenizer: Any, element: Element, counters: Counters) -> None:
        self._tokenizer, self._counters, masking = tokenizer, counters, tokenizer.masking
        self._name = element.name
        self._genes = genes_of(tokenizer, element.column_names)
        special = (getattr(tokenizer, name, None) for name in ("cls", "eos"))
        self._cls, self._eos = (
            None if each is None else tokenizer.token_of(each) for each in special
        )
        self._spread = self._known = np.empty(0, np.int32)
        is_known = self._genes.tokens >= 0
        if getattr(tokenizer, "genes", "nonzero") == "all":
            self._spread = np.cumsum(is_known, dtype=np.int32) - np.int32(1)
            self._known = self._genes.tokens[is_known].astype(np.int32)
        self._quantiles = np.linspace(0, 1, getattr(tokenizer, "n_bins", 1) - 1)
        self._parts: dict[str, np.dtype[Any]] = {"tokens": _INT64}
        self._pads: dict[str, Any] = {"tokens": tokenizer.token_of(tokenizer.pad)}
        self._of_special: dict[str, Any] = {}  # what special tokens have
        if tokenizer.has_values:
            self._add("values", _FLOAT32, tokenizer.pad_value, 0.0)
        if masking is not None and masking.masks == "tokens":
            self._add("labels", _INT64, kernels.NO_LABEL, kernels.NO_LABEL)
            shares = masking.fraction, masking.random, masking.kept
            token, replacements = tokenizer.token_of(masking.mask), self._genes.tokens[is_known]
            self._mask: Any = False, *shares, token, replacements
        elif masking is not None:
            self._add("labels", _FLOAT32, tokenizer.pad_value, 0.0)
            shares = masking.fraction, 0.0, 0.0
            self._mask = True, *shares, np.float32(masking.value), np.empty(0, np.float32)
        if masking is not None:
            self._add("masked", _BOOL, False, False)  # noqa: FBT003
        if tokenizer.padding is not None:
            self._add("attention_mask", _BOOL, False, True)  # noqa: FBT003

    def _add(self, name: str, dtype: np.dtype[Any], pad: Any, of_special: Any) -> None:
        self._parts[name], self._pads[name], self._of_special[name] = dtype, pad, of_special

    def __call__(
        self, rows: CsrRows | NDArray[Any], numbers: NDArray[np.int64], key: int, pool: BufferPool
    ) -> dict[str, Any]:
        """Return what a minibatch has in place of the element, by name; see `ReplaceRows`."""
        n_rows, longest = len(numbers), self._tokenizer.max_length
        if isinstance(rows, CsrRows):
            stored = rows.data, rows.indices, rows.indptr.astype(np.int64)
        else:
            n_genes = rows.shape[1]
            columns = np.tile(np.arange(n_genes, dtype=np.int32), n_rows)
            stored = rows.reshape(-1), columns, np.arange(n_rows + 1) * n_genes
        n_before, n_after = (int(each is not None) for each in (self._cls, self._eos))
        room, n_values = longest - n_before - n_after, np.diff(stored[2]).max(initial=0)
        most = max(longest, self._known.size, int(n_values)) + 1
        made = _memory(pool, self._parts, n_rows * longest)
        genes = {name: each[n_before:] for name, each in made.items()}  # after special tokens
        lengths, word = np.zeros(n_rows, np.int64), np.uint64(key)
        to = longest, room, most, lengths, genes["tokens"]
        if self._tokenizer.has_values:
            drawn = numbers, word, self._spread, self._known, self._quantiles
            n_unknown = kernels.bin_rows(*stored, self._genes.table, *to, genes["values"], *drawn)
        else:
            medians = self._genes.divisors, self._genes.has_ties
            n_unknown = kernels.rank_rows(*stored, self._genes.table, *to, *medians)
        if n_unknown < 0:
            msg = (
                f"{self._name}: row {numbers[-1 - n_unknown]:,} of the collection has a value that "
                "is negative or not finite, which has no tokens; read an element with counts, such "
                "as elements=['layers/counts']"
            )
            raise FormatError(msg)
        if self._tokenizer.masking is not None:
            own = (genes[name] for name in (self._tokenizer.masking.masks, "labels", "masked"))
            kernels.mask_rows(*own, numbers, word, longest, lengths, *self._mask)
        if "attention_mask" in made:
            made["attention_mask"].fill(True)  # noqa: FBT003
        firsts = np.arange(n_rows) * longest
        lengths += n_before
        for is_there, token, places in (
            (n_before, self._cls, firsts),
            (n_after, self._eos, firsts + lengths),
        ):
            for name, values in made.items() if is_there else ():
                values[places] = self._of_special.get(name, token)
        lengths += n_after
        self._counters.add(Counter.TOKENS, int(lengths.sum()))
        self._counters.add(Counter.UNKNOWN, n_unknown)
        return self._shaped(made, lengths)

    def _shaped(self, made: dict[str, NDArray[Any]], lengths: NDArray[np.int64]) -> dict[str, Any]:
        """Return rows that are ``max_length`` apart in the shape of delivery."""
        tokenizer, n_rows, found = self._tokenizer, lengths.size, dict[str, Any]()
        if tokenizer.padding is None:
            offsets = np.append(0, np.cumsum(lengths))
        else:
            whole = tokenizer.padding == "max_length"
            width = tokenizer.max_length if whole else int(lengths.max(initial=0))
            offsets = np.arange(n_rows + 1) * width
        for name, values in made.items():
            own = values[: offsets[-1]]
            fill = own.dtype.type(self._pads[name])
            kernels.move_rows(values, tokenizer.max_length, lengths, offsets, fill)
            found[name] = own
        if tokenizer.padding is None:
            found = {name: RaggedRows(offsets, each) for name, each in found.items()}
        else:
            found = {name: each.reshape(n_rows, width) for name, each in found.items()}
        return found | {"lengths": lengths}


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
    tokens, divisors = tokenizer.tokens_of(names), tokenizer.divisors_of(names)
    with np.errstate(over="ignore", under="ignore"):
        weights = (1 / divisors).astype(np.float32)
    has_ties = np.unique(divisors[tokens >= 0]).size < _FEW_MEDIANS
    halves = np.stack([weights.view(np.int32), tokens.astype(np.int32)], axis=1)
    table = halves.view(np.uint64).ravel()
    found = _found[tokenizer] = _Genes(names, tokens, divisors, has_ties, table)
    return found


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
