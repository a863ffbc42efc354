"""Compiled: making tokens of the rows of a minibatch; each thread makes those of whole minibatches.

Rows are sorted by radix sort: in passes over digits of 11 bits, of which 3 nearly always suffice.
"""

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import register_jitable
from numpy.typing import NDArray

from cellfeed._compiled import compiled, compiled_callback
from cellfeed._decode._kernels import _fields as fields
from cellfeed._decode._kernels._fields import Ints
from cellfeed._decode._kernels._native import call, divide

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

# Randomness: `word(row_key, stream, i)` is word number `stream * 2^40 + i` of `random_words`, and
# the key of a row is word number `row` of the epoch's key.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_BINS, _SUBSET, _MASKED, _REPLACED = range(4)
_STREAM_BITS = 40

_DIGIT_BITS = 11
_N_VALUES = 1 << _DIGIT_BITS
_FIRST_BITS = 3 * _DIGIT_BITS
_ALL_DIGITS = 6  # 64 bits
_MOVES_PER_VALUE = 4
_TARGET_SUM = 10_000.0


@compiled("uint64(uint64, uint64)", inner=True)
def _word(key: Any, counter: Any) -> Any:
    word = counter * _GOLDEN + (key + _GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * _MULTIPLIER_1
    word = (word ^ (word >> np.uint64(27))) * _MULTIPLIER_2
    return word ^ (word >> np.uint64(31))


@compiled("float64(uint64, int64, int64)", inner=True)
def _uniform(row_key: Any, stream: int, i: int) -> float:
    """Return a number in [0, 1)."""
    word = _word(row_key, np.uint64((stream << _STREAM_BITS) + i))
    return np.float64(word >> np.uint64(11)) * 2.0**-53


@compiled("void(boolean[::1], int64, int64, uint64, int64)", inner=True)
def _choose(chosen: NDArray[np.bool_], n: int, n_chosen: int, row_key: Any, stream: int) -> None:
    """Choose some of n at random, each set with equal probability.

    This is selection sampling (Knuth, "The Art of Computer Programming" 2, 3.4.2, algorithm S).
    """
    for i in range(n):
        chosen[i] = (n - i) * _uniform(row_key, stream, i) < n_chosen
        n_chosen -= chosen[i]


@compiled("int64(uint64)", inner=True)
def _bit_length(word: Any) -> int:
    n = 0
    while word:
        n, word = n + 1, word >> np.uint64(1)
    return n


@compiled("int64(uint64[:,::1], int64[:,::1], int64, int64, int64, int64[::1])", inner=True)
def _radix_sort(keys: Words, order: Ints, n: int, shift: int, n_digits: int, counts: Ints) -> int:
    """Sort keys with their numbers by some digits, stably; return in which half they are."""
    half = 0
    for digit in range(n_digits):
        by = np.uint64(shift + digit * _DIGIT_BITS)
        source, target = keys[half], keys[1 - half]
        source_order, target_order = order[half], order[1 - half]
        for value in range(_N_VALUES):
            counts[value] = 0
        for i in range(n):
            counts[(source[i] >> by) & np.uint64(_N_VALUES - 1)] += 1
        first, most = 0, 0
        for value in range(_N_VALUES):  # counts become the places of the first
            count = counts[value]
            most = max(most, count)
            counts[value] = first
            first += count
        if most == n:
            continue
        for i in range(n):
            digit_value = (source[i] >> by) & np.uint64(_N_VALUES - 1)
            place = np.uint64(counts[digit_value])
            counts[digit_value] += 1
            target[place] = source[i]
            target_order[place] = source_order[i]
        half = 1 - half
    return half


@compiled(
    "int64(uint64[::1], int64[::1], int64, uint64[:,::1], int64[:,::1], int64[::1])", inner=True
)
def _sort(bits: Words, tokens: Ints, n: int, keys: Words, order: Ints, counts: Ints) -> int:
    """Sort values from the largest to the smallest, and equal ones by token.

    Parameters
    ----------
    bits
        Bits of the values, float64 above 0, of which the larger have the larger bits.
    tokens
        Token of each value.
    n
        Number of values.
    keys, counts
        Memory.
    order
        The order is written to one of the halves.

    Returns
    -------
    The half.
    """
    if n == 0:
        return 0
    least, most = bits[0], bits[0]
    for i in range(n):
        least, most = min(least, bits[i]), max(most, bits[i])
    for i in range(n):
        keys[0, i], order[0, i] = most - bits[i], i
    shift = max(0, _bit_length(most - least) - _FIRST_BITS)
    half = _radix_sort(keys, order, n, shift, 3, counts)
    # What the first bits leave in another order is sorted by insertion; it is little or nothing,
    # unless many values are equal.
    n_moves: int = 0
    for i in range(1, n):
        own, at = order[half, i], i
        while at > 0:
            before = order[half, at - 1]
            if bits[before] > bits[own]:
                break
            if bits[before] == bits[own] and tokens[before] < tokens[own]:
                break
            order[half, at] = before
            at -= 1
        order[half, at] = own
        n_moves += i - at
        if n_moves > _MOVES_PER_VALUE * n:
            break
    if n_moves <= _MOVES_PER_VALUE * n:
        return int(half)
    largest = np.uint64(0)
    for i in range(n):
        keys[0, i], order[0, i] = np.uint64(tokens[i]), i
        largest = max(largest, keys[0, i])
    n_digits = -(-_bit_length(largest) // _DIGIT_BITS)
    half = _radix_sort(keys, order, n, 0, n_digits, counts)
    for i in range(n):
        own = order[half, i]
        order[0, i] = own
        keys[0, i] = most - bits[own]
    return int(_radix_sort(keys, order, n, 0, _ALL_DIGITS, counts))


@compiled(
    "void(float64[::1], int64[::1], int64[::1], int64, float64[::1], float64[::1], boolean, "
    "uint64, float64[::1])",
    inner=True,
)
def _bin(
    values: Floats,
    order: Ints,
    places: Ints,
    n: int,
    quantiles: Floats,
    edges: Floats,
    are_narrow: bool,  # noqa: FBT001
    row_key: Any,
    out: Floats,
) -> None:
    """Write the bin of each value, between quantiles of all of them; see `BinnedValues`.

    Parameters
    ----------
    values, order, n
        Values, their order from the largest to the smallest, and their number, above 0.
    places
        Place of each value in ``out``.
    quantiles, edges
        Quantiles, and memory for as many values there.
    are_narrow
        Whether values are float32, of which NumPy takes differences in float32.
    """
    for k in range(quantiles.size):
        place = (n - 1) * quantiles[k]
        before = np.int64(place)
        after: Any = min(before + 1, n - 1)
        low, high = values[order[n - 1 - before]], values[order[n - 1 - after]]
        step = np.float64(np.float32(high - low)) if are_narrow else high - low
        part = place - before
        edges[k] = low + step * part if part < 0.5 else high - step * (1 - part)
    n_below, n_not_above = 0, 0
    for i in range(n - 1, -1, -1):
        value, place_of = values[order[i]], places[order[i]]
        while n_below < edges.size and edges[n_below] < value:
            n_below += 1
        n_not_above = max(n_not_above, n_below)
        while n_not_above < edges.size and edges[n_not_above] <= value:
            n_not_above += 1
        drawn = _uniform(row_key, _BINS, place_of)
        out[place_of] = np.ceil(drawn * (n_below - n_not_above) + n_not_above)


@compiled(
    *(
        f"int64({value}[::1], {index}[::1], int32[:,::1], int64[::1], boolean, int64[::1], "
        "float64[::1], int64[::1], float64[::1])"
        for value in ("float32", "float64")
        for index in ("int32", "int64")
    ),
    inner=True,
)
def _gather(
    values: NDArray[Any],
    columns: NDArray[Any],
    genes: NDArray[np.int32],
    known: Ints,
    are_all: bool,  # noqa: FBT001
    tokens: Ints,
    found: Floats,
    found_columns: Ints,
    totals: Floats,
) -> int:
    """Gather the values of known genes, all or those other than 0; return their number.

    Parameters
    ----------
    values, columns
        A row; columns are empty if it is dense.
    genes
        For each column its token, -1 if unknown, and its place in ``known``, the known columns.
    are_all
        Whether zeros are gathered, too.
    tokens, found, found_columns
        Memory for what is gathered.
    totals
        Set to the sum of all values, and the numbers of those of unknown genes, and of those that
        are negative or not finite.
    """
    total, n_unknown, n_failing, n = 0.0, 0, 0, 0
    of_column, is_sparse = genes[0], columns.size > 0
    if are_all:
        n = known.size
        for k in range(n):
            tokens[k], found[k], found_columns[k] = genes[0, known[k]], 0.0, known[k]
    for i in range(values.size):
        value = np.float64(values[i])
        if value == 0.0:
            continue
        if not 0.0 <= value < np.inf:
            n_failing += 1
            continue
        total += value
        column = np.uint64(columns[i]) if is_sparse else np.uint64(i)
        token = of_column[column]
        if token < 0:
            n_unknown += 1
        elif are_all:
            found[genes[1, column]] = value
        else:
            tokens[n], found[n], found_columns[n] = token, value, np.int64(column)
            n += 1
    totals[0], totals[1], totals[2] = total, n_unknown, n_failing
    return n


def address_of(function: Any) -> tuple[int, Any]:
    """Return the address of a user's function for `tokenize`, and what must exist meanwhile."""
    int64, voidptr = types.int64, types.voidptr
    signature = int64(voidptr, voidptr, int64, int64, voidptr, voidptr, int64)
    function = function if hasattr(function, "py_func") else register_jitable(function)

    def called(tokens, values, n, drawn, out, out_values, length):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba's
        return function(
            carray(tokens, (n,), np.int64),
            carray(values, (n,), np.float64),
            drawn,
            carray(out, (length,), np.int64),
            carray(out_values, (length,), np.float32),
        )

    callback = compiled_callback(signature, listed=False, cached=False)(called)
    return int(callback.address), callback


@compiled(
    "void(int64[::1], int64, int64, int64[::1], float64[::1], uint64, int64[::1], int64[::1], "
    "float32[::1], boolean[::1], boolean[::1])",
    inner=True,
)
def _mask(
    tokens: Ints,
    start: int,
    n: int,
    settings: Ints,
    numbers: Floats,
    row_key: Any,
    replacements: Ints,
    labels: Ints,
    values: NDArray[np.float32],
    masked: NDArray[np.bool_],
    chosen: NDArray[np.bool_],
) -> None:
    """Mask tokens or values from ``start`` on, and write labels of tokens."""
    n_masked = np.int64(n * numbers[fields.MASK_FRACTION])
    _choose(chosen, n, n_masked, row_key, _MASKED)
    for i in range(n):
        masked[start + i] = chosen[i]
        if not chosen[i]:
            continue
        if settings[fields.MASKING] == fields.MASKED_VALUES:
            values[start + i] = numbers[fields.MASK_VALUE]
            continue
        labels[start + i] = tokens[start + i]
        drawn = _uniform(row_key, _REPLACED, 2 * i)
        if drawn < numbers[fields.MASK_RANDOM]:
            place = _uniform(row_key, _REPLACED, 2 * i + 1) * replacements.size
            tokens[start + i] = replacements[np.int64(place)]
        elif drawn >= numbers[fields.MASK_RANDOM] + numbers[fields.MASK_KEPT]:
            tokens[start + i] = settings[fields.MASK_TOKEN]


@compiled(
    *(
        f"void({value}[::1], {index}[::1], {index}[::1], int64[::1], uint64, int32[:,::1], "
        "int64[::1], float64[::1], float64[::1], int64[::1], int64[::1], float64[::1], "
        "int64[::1], float32[::1], int64[::1], float32[::1], boolean[::1], int64[::1], int64[::1])"
        for value in ("float32", "float64")
        for index in ("int32", "int64")
    )
)
def tokenize(  # noqa: PLR0912, PLR0917 - a row at a time, in the cache
    values: NDArray[Any],
    columns: NDArray[Any],
    pointers: NDArray[Any],
    rows: Ints,
    key: Any,
    genes: NDArray[np.int32],
    known: Ints,
    divisors: Floats,
    quantiles: Floats,
    replacements: Ints,
    settings: Ints,
    numbers: Floats,
    out: Ints,
    out_values: NDArray[np.float32],
    labels: Ints,
    value_labels: NDArray[np.float32],
    masked: NDArray[np.bool_],
    lengths: Ints,
    report: Ints,
) -> None:
    """Make the tokens of rows; what is after the end of a row is not written.

    Parameters
    ----------
    values, columns, pointers
        Rows in CSR form, with distinct columns in each; columns are empty if rows are dense.
    rows, key
        Number of each row, and the key of the epoch, for what is drawn.
    genes, known
        See `_gather`.
    divisors, quantiles, replacements
        The median of each column; quantiles that are bounds of bins; tokens that replace others.
        Each is empty if it is not used.
    settings, numbers
        See `fields.TOKENIZER` and the names after it.
    out, out_values, labels, value_labels, masked
        Memory for what is made, shape (n_rows * longest,); the last four may be empty.
    lengths
        Length of each row, shape (n_rows,).
    report
        Numbers of tokens and of values of unknown genes, and the first row that fails, -1 if none,
        with the reason.
    """
    longest = settings[fields.LONGEST]
    kind, are_all = settings[fields.TOKENIZER], settings[fields.ALL_GENES] != 0
    n_before = np.int64(settings[fields.CLS] >= 0)
    n_after = np.int64(settings[fields.EOS] >= 0)
    room = longest - n_before - n_after
    most = known.size + 1
    tokens, found = np.empty(most, np.int64), np.empty(most, np.float64)
    places = np.empty(most, np.int64)
    keys, order = np.empty((2, most), np.uint64), np.empty((2, most), np.int64)
    bits, counts = np.empty(most, np.uint64), np.empty(_N_VALUES, np.int64)
    floats, edges = bits.view(np.float64), np.empty(quantiles.size, np.float64)
    sorted_tokens, bins = np.empty(most, np.int64), np.empty(most, np.float64)
    chosen, totals = np.empty(max(most, longest), np.bool_), np.empty(3, np.float64)
    for row in range(rows.size):
        start, end = np.int64(pointers[row]), np.int64(pointers[row + 1])
        of_row = columns[start:end] if columns.size else columns
        own = values[start:end]
        n = _gather(own, of_row, genes, known, are_all, tokens, found, places, totals)
        report[fields.N_UNKNOWN] += np.int64(totals[1])
        if totals[2] > 0:
            report[fields.FAILED_ROW], report[fields.FAILED_WHY] = row, fields.NOT_COUNTS
            return
        row_key = _word(key, np.uint64(rows[row]))
        first = row * longest
        if n_before:
            out[first] = settings[fields.CLS]
            if out_values.size:
                out_values[first] = 0.0
        start, n_made = first + n_before, min(n, room)
        if kind == fields.RANKED:
            for i in range(n):
                normalized = divide(found[i], totals[0]) * _TARGET_SUM
                floats[i] = divide(normalized, divisors[places[i]])
            half = _sort(bits, tokens, n, keys, order, counts)
            for i in range(n_made):
                out[start + i] = tokens[order[half, i]]
        elif kind == fields.BINNED:
            is_top = n > room and settings[fields.TOP] != 0
            n_nonzero, half = 0, 0
            if quantiles.size or is_top:
                for i in range(n):
                    if found[i] > 0.0:  # zeros are in bin 0
                        floats[n_nonzero], places[n_nonzero] = found[i], i
                        sorted_tokens[n_nonzero] = tokens[i] if is_top else i  # which is faster
                        n_nonzero += 1
                    bins[i] = 0.0
                half = _sort(bits, sorted_tokens, n_nonzero, keys, order, counts)
            if quantiles.size and n_nonzero:
                is_narrow = values.itemsize == 4
                _bin(
                    floats, order[half], places, n_nonzero, quantiles, edges, is_narrow, row_key,
                    bins,
                )  # fmt: skip
            if is_top:
                for i in range(n):
                    chosen[i] = False
                for i in range(min(room, n_nonzero)):
                    chosen[places[order[half, i]]] = True
                n_zeros = room - n_nonzero
                for i in range(n):
                    if n_zeros > 0 and found[i] == 0.0:
                        chosen[i] = True
                        n_zeros -= 1
            elif n > room:
                _choose(chosen, n, room, row_key, _SUBSET)
            made = bins if quantiles.size else found
            at = start
            for i in range(n):
                if n <= room or chosen[i]:
                    out[at], out_values[at] = tokens[i], made[i]
                    at += 1
        else:
            drawn = np.int64(row_key >> np.uint64(1))
            addresses = tokens.ctypes.data, found.ctypes.data, n, drawn
            into = out.ctypes.data + 8 * first, out_values.ctypes.data + 4 * first, longest
            n_made = call(settings[fields.FUNCTION], addresses + into)
            if not 0 <= n_made <= longest:
                report[fields.FAILED_ROW], report[fields.FAILED_WHY] = row, fields.WRONG_LENGTH
                report[fields.N_TOKENS] = n_made
                return
        if n_after:
            out[start + n_made] = settings[fields.EOS]
        length = n_before + n_made + n_after
        lengths[row] = length
        report[fields.N_TOKENS] += length
        if settings[fields.MASKING] == fields.UNMASKED:
            continue
        for i in range(length):
            masked[first + i] = False
            if labels.size:
                labels[first + i] = fields.NO_LABEL
            if value_labels.size:
                value_labels[first + i] = out_values[first + i]
        _mask(
            out, start, n_made, settings, numbers, row_key, replacements, labels, out_values,
            masked, chosen,
        )  # fmt: skip


@compiled(
    "void(int64[::1], int64, int64[::1], int64[::1], int64)",
    "void(float32[::1], int64, int64[::1], int64[::1], float32)",
    "void(boolean[::1], int64, int64[::1], int64[::1], boolean)",
)
def move_rows(values: NDArray[Any], longest: int, lengths: Ints, offsets: Ints, fill: Any) -> None:
    """Move rows, which are ``longest`` apart, to ascending offsets, and fill what is after them.

    Parameters
    ----------
    values
        The rows.
    longest, lengths
        Values between the starts of rows, and length of each row.
    offsets
        New start of each row, none behind the earlier one, and the end of the last.
    fill
        Value of the padding.
    """
    for row in range(lengths.size):
        start, to = row * longest, offsets[row]
        if to != start:
            for i in range(lengths[row]):
                values[to + i] = values[start + i]
        for i in range(to + lengths[row], offsets[row + 1]):
            values[i] = fill
