"""Compiled: making tokens of the rows of a minibatch; each thread makes those of whole minibatches.

Most rows are sorted in one of two quick ways, which give the same order as `_sort`:

- values divided by medians seldom are equal (`_rank`): by 20 bits of an approximation, in two
  passes of a radix sort, after which what is closer than its error is compared exactly;
- counts have few distinct values (`_number`), and these are sorted in place of the values.

Loops are short and do one thing each, so that the compiler makes vector instructions of them.
"""

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import register_jitable
from numpy.typing import NDArray

from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import (
    add_unordered,
    bits_of_float,
    call,
    divide,
    float_of_bits,
)
from cellfeed.extending import compiled, compiled_callback
from cellfeed.tokenizers._kernels import _fields as fields

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
Tokens = NDArray[np.int32]
HalfWords = NDArray[np.uint32]

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

# Of the quick ways: bits of a digit; least bits of a key, of which there are at most two digits;
# bits of float32 by which two approximations may be in the wrong order (8, and half of 16); the
# least approximation, which is far from those that have fewer bits; and distinct values.
_SHORT_BITS = 10
_SHORT = 1 << _SHORT_BITS
_LEAST_KEY_BITS = 14
_INEXACT_BITS = 4
_LEAST_APPROXIMATION = 1e-30
_HASH_BITS = 11
_MOST_DISTINCT = 256


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


@compiled(
    "void(boolean[::1], int32[::1], int64, int64, uint64, int64)",
    inner=True,
)
def _choose(
    chosen: NDArray[np.bool_], drawn: Tokens, n: int, n_chosen: int, row_key: Any, stream: int
) -> None:
    """Choose some of n at random, each set with equal probability; ``drawn`` is memory for n.

    This is selection sampling (Knuth, "The Art of Computer Programming" 2, 3.4.2, algorithm S).
    """
    for i in range(n):
        drawn[i] = np.int32((n - i) * _uniform(row_key, stream, i))
    left = np.int32(n_chosen)
    for i in range(n):
        is_chosen = drawn[i] < left
        chosen[i] = is_chosen
        left -= np.int32(is_chosen)


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
    "int64(uint64[::1], int32[::1], int64, uint64[:,::1], int64[:,::1], int64[::1])", inner=True
)
def _sort_all(bits: Words, tokens: Tokens, n: int, keys: Words, order: Ints, counts: Ints) -> int:
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
    "boolean(float64[::1], int32[::1], int32[::1], uint32[::1], int64, int64, float64, "
    "float64[::1], uint32[:,::1], int32[:,::1], int64[::1])",
    inner=True,
)
def _rank(  # noqa: PLR0912 - a row at a time, in the cache
    values: Floats,
    places: Tokens,
    tokens: Tokens,
    weights: HalfWords,
    n: int,
    n_made: int,
    total: float,
    divisors: Floats,
    keys: HalfWords,
    counts: Tokens,
    out: Ints,
) -> bool:
    """Write the tokens with the largest scores, see `RankTokens`; return whether it could.

    It cannot if many scores are nearly equal, or far from 1.

    Parameters
    ----------
    values, places, tokens, weights, n
        Values above 0, their columns and tokens, float32 bits of the reciprocals of divisors, and
        the number of values.
    n_made
        How many tokens to write to ``out``.
    total, divisors
        Total of the row, and the median of each column.
    keys, counts
        Memory.
    """
    if n == 0:
        return True
    low, high = counts[0], counts[1]
    first, second = keys[0], keys[1]
    for i in range(n):
        second[i] = bits_of_float(np.float32(values[i]) * float_of_bits(weights[i]))
    least, most = second[0], second[0]
    for i in range(n):
        least, most = min(least, second[i]), max(most, second[i])
    if not (_LEAST_APPROXIMATION <= float_of_bits(least) <= float_of_bits(most) < np.inf):
        return False
    by_place = np.uint32(_bit_length(np.uint64(n - 1)))
    n_bits = min(np.int64(2 * _SHORT_BITS), 32 - np.int64(by_place))
    if n_bits < _LEAST_KEY_BITS:
        return False
    shift = max(_INEXACT_BITS, _bit_length(np.uint64(most - least)) - n_bits)
    for k in range(_SHORT):
        low[k], high[k] = 0, 0
    for i in range(n):
        first[i] = (((most - second[i]) >> np.uint32(shift)) << by_place) | np.uint32(i)
    of_digit = np.uint32(_SHORT - 1)
    for i in range(n):
        key = first[i] >> by_place
        low[key & of_digit] += 1
        high[key >> np.uint32(_SHORT_BITS)] += 1
    of_low, of_high = np.int32(0), np.int32(0)
    for k in range(_SHORT):  # counts become the places of the first
        count_low, count_high = low[k], high[k]
        low[k], high[k] = of_low, of_high
        of_low, of_high = of_low + count_low, of_high + count_high
    for i in range(n):
        key = first[i]
        digit = np.uint64((key >> by_place) & of_digit)
        place = low[digit]
        low[digit] = place + 1
        second[np.uint64(place)] = key
    for i in range(n):
        key = second[i]
        digit = np.uint64(key >> (by_place + np.uint32(_SHORT_BITS)))
        place = high[digit]
        high[digit] = place + 1
        first[np.uint64(place)] = key
    # Keys that differ by more than 1 are in the right order; others are few.
    n_close = 0
    for i in range(1, n):
        second[n_close] = i
        n_close += (first[i] >> by_place) - (first[i - 1] >> by_place) <= np.uint32(1)
    of_place, n_moves = (np.uint32(1) << by_place) - np.uint32(1), 0
    for k in range(n_close):
        i = np.int64(second[k])  # type: ignore[assignment]
        own, at = first[i], i
        key, place = own >> by_place, own & of_place
        score = _score(values[place], total, divisors[places[place]])
        while at > 0 and key - (first[at - 1] >> by_place) <= np.uint32(1):
            before = first[at - 1] & of_place
            of_before = _score(values[before], total, divisors[places[before]])
            if of_before > score or (of_before == score and tokens[before] < tokens[place]):
                break
            first[at] = first[at - 1]
            at -= 1
        first[at] = own
        n_moves += i - at
        if n_moves > _MOVES_PER_VALUE * n:
            return False
    for i in range(n_made):
        out[i] = tokens[first[i] & of_place]
    return True


@compiled("float64(float64, float64, float64)", inner=True)
def _score(value: float, total: float, divisor: float) -> float:
    normalized = divide(value, total) * _TARGET_SUM
    return np.float64(divide(normalized, divisor))


@compiled(
    "int64(uint64[::1], int64, uint64[::1], int32[::1], int32[::1], uint64[::1], int64[::1], "
    "int64[:,::1])",
    inner=True,
)
def _number(
    bits: Words,
    n: int,
    slots: Words,
    of_slots: Tokens,
    numbers: Tokens,
    distinct: Words,
    order: Ints,
    counts: Ints,
) -> int:
    """Give distinct values numbers as they come; return how many, or -1 if they are many.

    Parameters
    ----------
    bits, n
        Bits of the values, float64 above 0, and how many there are.
    slots, of_slots
        Memory of a hash table.
    numbers
        The number of each value is written here.
    distinct
        The bits of each number.
    order
        Numbers, from the largest value to the smallest.
    counts
        In the first row, how many values have each number; other rows are memory.
    """
    n_distinct = 0
    for k in range(slots.size):
        slots[k] = 0
    for i in range(n):
        own = bits[i]
        slot = (own * _GOLDEN) >> np.uint64(64 - _HASH_BITS)
        while slots[slot] != own:
            if slots[slot] == 0:
                if n_distinct == _MOST_DISTINCT:
                    return -1
                slots[slot], of_slots[slot] = own, n_distinct
                distinct[n_distinct] = own
                n_distinct += 1
                break
            slot = (slot + np.uint64(1)) & np.uint64(slots.size - 1)
        numbers[i] = of_slots[slot]
    for number in range(n_distinct):
        at, own = number, distinct[number]
        while at > 0 and distinct[order[at - 1]] < own:
            order[at] = order[at - 1]
            at -= 1
        order[at] = number
    # In turns, as counting one number twice in a row takes long.
    n_rows = counts.shape[0]
    for k in range(n_rows):
        for number in range(n_distinct):
            counts[k, number] = 0
    for i in range(n):
        counts[i & (n_rows - 1), numbers[i]] += 1
    for k in range(1, n_rows):
        for number in range(n_distinct):
            counts[0, number] += counts[k, number]
    return n_distinct


@compiled(
    "int64(uint64[::1], int32[::1], int64, int64, int32[::1], int64[::1], int64[::1], "
    "uint64[:,::1], int64[:,::1], int64[::1])",
    inner=True,
)
def _sort(
    bits: Words,
    tokens: Tokens,
    n: int,
    n_distinct: int,
    numbers: Tokens,
    by_value: Ints,
    ranks: Ints,
    keys: Words,
    order: Ints,
    counts: Ints,
) -> int:
    """Do what `_sort_all` does, by what `_number` found of the values, if it did."""
    if n_distinct < 0:
        return int(_sort_all(bits, tokens, n, keys, order, counts))
    largest = np.int32(0)
    for i in range(n):
        largest = max(largest, tokens[i])
    n_bits = _bit_length(np.uint64(largest))
    for rank in range(n_distinct):
        ranks[by_value[rank]] = rank << n_bits
    for i in range(n):
        keys[0, i], order[0, i] = np.uint64(ranks[numbers[i]] + tokens[i]), i
    n_bits += _bit_length(np.uint64(n_distinct))
    return int(_radix_sort(keys, order, n, 0, -(-n_bits // _DIGIT_BITS), counts))


@compiled(
    "void(float64[::1], int64[::1], int64, int64[::1], int32[::1], int64[::1], int64, "
    "float64[::1], float64[::1], boolean, uint64, float64[:,::1], float64[::1])",
    inner=True,
)
def _bin(
    distinct: Floats,
    order: Ints,
    n_distinct: int,
    counts: Ints,
    numbers: Tokens,
    places: Ints,
    n: int,
    quantiles: Floats,
    edges: Floats,
    are_narrow: bool,  # noqa: FBT001
    row_key: Any,
    bounds: Floats,
    out: Floats,
) -> None:
    """Write the bin of each value, between quantiles of all of them; see `BinnedValues`.

    Parameters
    ----------
    distinct, order, n_distinct
        Distinct values, their order from the largest to the smallest, and their number.
    counts
        How many values equal each.
    numbers, places, n
        For each value which it is, and the number by which its bin is drawn; and how many there
        are, above 0.
    quantiles, edges
        Quantiles, and memory for as many values there.
    are_narrow
        Whether values are float32, of which NumPy takes differences in float32.
    bounds
        Memory.
    """
    at_low = at_high = n_distinct - 1  # from the smallest on
    end_low = end_high = counts[order[n_distinct - 1]]
    for k in range(quantiles.size):
        place = (n - 1) * quantiles[k]
        before = np.int64(place)
        after = min(before + 1, n - 1)
        while end_low <= before:
            at_low -= 1
            end_low += counts[order[at_low]]
        while end_high <= after:
            at_high -= 1
            end_high += counts[order[at_high]]
        low, high = distinct[order[at_low]], distinct[order[at_high]]
        step = np.float64(np.float32(high - low)) if are_narrow else high - low
        part = place - before
        edges[k] = low + step * part if part < 0.5 else high - step * (1 - part)
    n_below, n_not_above = 0, 0
    for at in range(n_distinct - 1, -1, -1):
        number = order[at]
        value = distinct[number]
        while n_below < edges.size and edges[n_below] < value:
            n_below += 1
        n_not_above = max(n_not_above, n_below)
        while n_not_above < edges.size and edges[n_not_above] <= value:
            n_not_above += 1
        bounds[0, number], bounds[1, number] = n_not_above, n_below - n_not_above
    first, width = bounds[0], bounds[1]
    for i in range(n):
        out[i] = _uniform(row_key, _BINS, places[i])
    for i in range(n):
        number = np.uint64(numbers[i])
        out[i] = np.ceil(out[i] * width[number] + first[number])


@compiled(
    *(
        f"int64({value}[::1], {index}[::1], float64[::1], int32[::1])"
        for value in ("float32", "float64")
        for index in ("int32", "int64")
    ),
    inner=True,
)
def _unpack(values: NDArray[Any], columns: NDArray[Any], found: Floats, places: Tokens) -> int:
    """Write a row's values and their columns; of a dense row, without columns, those not 0."""
    if columns.size or not values.size:
        for i in range(values.size):
            found[i], places[i] = values[i], columns[i]
        return values.size
    n = 0
    for i in range(values.size):
        found[n], places[n] = values[i], i
        n += values[i] != 0
    return n


@compiled(
    "int64(float64[::1], int32[::1], int64, uint64[::1], int32[::1], uint32[::1], float64[::1])",
    inner=True,
)
def _gather(
    found: Floats,
    places: Tokens,
    n: int,
    table: Words,
    tokens: Tokens,
    weights: HalfWords,
    totals: Floats,
) -> int:
    """Keep the values other than 0 of known genes; return their number.

    Parameters
    ----------
    found, places, n
        Values, their columns, and how many there are.
    table
        See `tokenize`.
    tokens, weights
        What the table has for each value that is kept.
    totals
        Set to the sum of all values, and the numbers of those of unknown genes, and of those that
        are negative or not finite.
    """
    total, n_kept, n_unknown, n_failing = 0.0, 0, 0, 0
    for i in range(n):
        n_failing += not ((found[i] >= 0.0) & (found[i] < np.inf))
        total = add_unordered(total, found[i])
    for i in range(n):
        entry = table[np.uint64(places[i])]
        tokens[i], weights[i] = np.int32(entry >> np.uint64(32)), np.uint32(entry)
    for i in range(n):
        is_there, is_known = found[i] != 0.0, tokens[i] >= 0
        n_kept += is_there & is_known
        n_unknown += is_there & (not is_known)
    if n_kept < n:
        at = 0
        for i in range(n):
            is_kept = (found[i] != 0.0) & (tokens[i] >= 0)
            found[at], places[at] = found[i], places[i]
            tokens[at], weights[at] = tokens[i], weights[i]
            at += is_kept
    totals[0], totals[1], totals[2] = total, n_unknown, n_failing
    return n_kept


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
    "void(int64[::1], int64, int64[::1], float64[::1], uint64, int64[::1], int64[::1], "
    "float32[::1], boolean[::1], boolean[::1], int32[::1])",
    inner=True,
)
def _mask(
    tokens: Ints,
    n: int,
    settings: Ints,
    numbers: Floats,
    row_key: Any,
    replacements: Ints,
    labels: Ints,
    values: NDArray[np.float32],
    masked: NDArray[np.bool_],
    chosen: NDArray[np.bool_],
    drawn: Tokens,
) -> None:
    """Mask tokens or values of n genes, and write labels of tokens."""
    n_masked = np.int64(n * numbers[fields.MASK_FRACTION])
    _choose(chosen, drawn, n, n_masked, row_key, _MASKED)
    for i in range(n):
        masked[i] = chosen[i]
    if settings[fields.MASKING] == fields.MASKED_VALUES:
        value = np.float32(numbers[fields.MASK_VALUE])
        for i in range(n):
            values[i] = value if chosen[i] else values[i]
        return
    for i in range(n):
        labels[i] = tokens[i] if chosen[i] else fields.NO_LABEL
    n_masked, which = 0, drawn  # type: ignore[assignment]
    for i in range(n):
        which[n_masked] = i
        n_masked += chosen[i]
    for k in range(n_masked):
        i = np.int64(which[k])  # type: ignore[assignment]
        drawn_of = _uniform(row_key, _REPLACED, 2 * i)
        if drawn_of < numbers[fields.MASK_RANDOM]:
            place = _uniform(row_key, _REPLACED, 2 * i + 1) * replacements.size
            tokens[i] = replacements[np.int64(place)]
        elif drawn_of >= numbers[fields.MASK_RANDOM] + numbers[fields.MASK_KEPT]:
            tokens[i] = settings[fields.MASK_TOKEN]


@compiled(
    *(
        f"void({value}[::1], {index}[::1], {index}[::1], int64[::1], uint64, uint64[::1], "
        "int32[::1], float64[::1], float64[::1], int64[::1], int64[::1], float64[::1], "
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
    table: Words,
    known: NDArray[np.int32],
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
    table
        For each column its token, int32, -1 if unknown, in the upper half of a word; and in the
        lower, the bits of the reciprocal of its median, float32.
    known
        If all known columns have tokens in each row: the number of each column among them, after
        these numbers their tokens, and the order that sorts these; see `fields.N_KNOWN`. Otherwise
        empty.
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
    longest, kind = settings[fields.LONGEST], settings[fields.TOKENIZER]
    are_all, are_narrow = known.size > 0, values.itemsize == 4
    n_before = np.int64(settings[fields.CLS] >= 0)
    n_after = np.int64(settings[fields.EOS] >= 0)
    room, n_known = longest - n_before - n_after, settings[fields.N_KNOWN]
    most = max(longest, n_known) if are_all else longest
    for row in range(rows.size):
        most = max(most, np.int64(pointers[row + 1]) - np.int64(pointers[row]))
    most += 1
    found, places = np.empty(most, np.float64), np.empty(most, np.int32)
    tokens, weights = np.empty(most, np.int32), np.empty(most, np.uint32)
    short_keys, short_counts = np.empty((2, most), np.uint32), np.empty((2, _SHORT), np.int32)
    keys, order = np.empty((2, most), np.uint64), np.empty((2, most), np.int64)
    bits, counts = found.view(np.uint64), np.empty(_N_VALUES, np.int64)
    slots, of_slots = np.empty(1 << _HASH_BITS, np.uint64), np.empty(1 << _HASH_BITS, np.int32)
    distinct = np.empty(_MOST_DISTINCT, np.uint64)
    numbered, ranks = np.empty(most, np.int32), np.empty(_MOST_DISTINCT, np.int64)
    by_value, counted = np.empty(most, np.int64), np.empty((4, most), np.int64)
    bounds, edges = np.empty((2, most), np.float64), np.empty(quantiles.size, np.float64)
    spread, at = np.empty(most, np.float64), np.empty(most, np.int64)
    chosen, drawn = np.empty(most, np.bool_), np.empty(most, np.int32)
    totals = np.empty(3, np.float64)
    for row in range(rows.size):
        start, end = np.int64(pointers[row]), np.int64(pointers[row + 1])
        of_row = columns[start:end] if columns.size else columns
        n = _unpack(values[start:end], of_row, found, places)
        n = _gather(found, places, n, table, tokens, weights, totals)
        report[fields.N_UNKNOWN] += np.int64(totals[1])
        if totals[2] > 0:
            report[fields.FAILED_ROW], report[fields.FAILED_WHY] = row, fields.NOT_COUNTS
            return
        row_key = _word(key, np.uint64(rows[row]))
        # Slices, whose indices the compiler knows not to be negative.
        whole, genes = slice(row * longest, (row + 1) * longest), slice(n_before, longest)
        of_out, of_values, of_masked = out[whole], out_values[whole], masked[whole]
        of_labels, of_value_labels = labels[whole], value_labels[whole]
        if n_before:
            of_out[0] = settings[fields.CLS]
            if of_values.size:
                of_values[0] = 0.0
        to_out, to_values = of_out[genes], of_values[genes]
        if kind == fields.RANKED:
            n_made = min(n, room)
            is_ranked = settings[fields.HAS_TIES] == 0 and _rank(
                found, places, tokens, weights, n, n_made, totals[0], divisors, short_keys,
                short_counts, to_out,
            )  # fmt: skip
            if not is_ranked:
                for i in range(n):
                    found[i] = _score(found[i], totals[0], divisors[places[i]])
                n_distinct = _number(
                    bits, n, slots, of_slots, numbered, distinct, by_value, counted
                )
                half = _sort(
                    bits, tokens, n, n_distinct, numbered, by_value, ranks, keys, order, counts
                )
                for i in range(n_made):
                    to_out[i] = tokens[order[half, i]]
        elif kind == fields.BINNED:
            n_genes, own, own_values, by_token = n, tokens, found, known
            for i in range(n):
                at[i] = i
            if are_all:
                n_genes, own_values, by_token = n_known, spread, known[known.size - n_known :]
                own = known[known.size - 2 * n_known : known.size - n_known]
                for i in range(n):
                    at[i] = known[places[i]]
                for i in range(n_genes):
                    spread[i] = 0.0
                for i in range(n):
                    spread[at[i]] = found[i]
            is_top = n_genes > room and settings[fields.TOP] != 0
            n_made, n_distinct, half = min(n_genes, room), 0, 0
            if quantiles.size or is_top:
                n_distinct = _number(
                    bits, n, slots, of_slots, numbered, distinct, by_value, counted
                )
                if is_top or n_distinct < 0:
                    half = _sort(
                        bits, tokens, n, n_distinct, numbered, by_value, ranks, keys, order, counts
                    )
            if is_top:
                n_zeros = room - n
                for i in range(n_genes):
                    place = by_token[i] if are_all else np.int32(i)
                    chosen[place] = (own_values[place] == 0.0) & (n_zeros > 0)
                    n_zeros -= chosen[place]
                for i in range(min(room, n)):
                    chosen[at[order[half, i]]] = True
            elif n_genes > room:
                _choose(chosen, drawn, n_genes, room, row_key, _SUBSET)
            if quantiles.size and n:
                of_distinct, n_of_distinct, by = distinct.view(np.float64), n_distinct, by_value
                if n_distinct < 0:  # each value is one of its own
                    of_distinct, n_of_distinct, by = found, n, order[half]
                    for i in range(n):
                        numbered[i], counted[0, i] = i, 1
                _bin(
                    of_distinct, by, n_of_distinct, counted[0], numbered, at, n, quantiles, edges,
                    are_narrow, row_key, bounds, found,
                )  # fmt: skip
                if are_all:
                    for i in range(n):
                        spread[at[i]] = found[i]
            if n_genes <= room:
                for i in range(n_genes):
                    to_out[i], to_values[i] = own[i], own_values[i]
            else:
                to = 0
                for i in range(n_genes):
                    if to == room:
                        break
                    to_out[to], to_values[to] = own[i], own_values[i]
                    to += chosen[i]
        else:
            for i in range(n):
                order[0, i] = tokens[i]
            addresses = order.ctypes.data, found.ctypes.data, n, np.int64(row_key >> np.uint64(1))
            into = of_out.ctypes.data, of_values.ctypes.data, longest
            n_made = call(settings[fields.FUNCTION], addresses + into)
            if not 0 <= n_made <= longest:
                report[fields.FAILED_ROW], report[fields.FAILED_WHY] = row, fields.WRONG_LENGTH
                report[fields.N_TOKENS] = n_made
                return
        if n_after:
            to_out[n_made] = settings[fields.EOS]
        length = n_before + n_made + n_after
        lengths[row] = length
        report[fields.N_TOKENS] += length
        if settings[fields.MASKING] == fields.UNMASKED:
            continue
        for i in range(length):
            of_masked[i] = False
        if labels.size:
            for i in range(length):
                of_labels[i] = fields.NO_LABEL
        if value_labels.size:
            for i in range(length):
                of_value_labels[i] = of_values[i]
        _mask(
            to_out, n_made, settings, numbers, row_key, replacements, of_labels[genes], to_values,
            of_masked[genes], chosen, drawn,
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


@compiled("void(boolean[::1], int64[::1], int64)")
def mark_rows(marks: NDArray[np.bool_], lengths: Ints, width: int) -> None:
    """Mark the first values of rows, each as many as it is long, and none of the others."""
    for row in range(lengths.size):
        marks_of = marks[row * width : (row + 1) * width]
        for i in range(width):
            marks_of[i] = i < lengths[row]
