"""Compiled: making tokens of the rows of a minibatch; each thread makes those of whole minibatches.

Most rows are sorted in one of two quick ways, which give the same order as a sort by value:

- values divided by medians seldom are equal (`_rank_quickly`): by 20 bits of an approximation, in
  two passes of a radix sort, after which what is closer than its error is compared exactly;
- counts have few distinct values (`_distinct`), and these are sorted in place of the values.

Loops are short and do one thing each, so that the compiler makes vector instructions of them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import add_unordered, bits_of_float, divide, float_of_bits
from cellfeed.extending import compiled

NO_LABEL = -100  # which cross entropy in torch leaves out

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

_TARGET_SUM = 10_000.0
_DIGIT_BITS = 11
_N_DIGITS = 1 << _DIGIT_BITS

# Of the quick ways: bits of a digit; least bits of a key, of which there are at most two digits;
# bits of float32 by which two approximations may be in the wrong order (8, and half of 16); the
# least approximation, which is far from those that have fewer bits; moves of a value that is not
# in its place; and distinct values.
_SHORT_BITS = 10
_SHORT = 1 << _SHORT_BITS
_LEAST_KEY_BITS = 14
_INEXACT_BITS = 4
_LEAST_APPROXIMATION = 1e-30
_MOVES_PER_VALUE = 4
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


@compiled("void(boolean[::1], int64, uint64, int64)", inner=True)
def _choose(chosen: NDArray[np.bool_], n_chosen: int, row_key: Any, stream: int) -> None:
    """Choose some of several at random, each set with equal probability.

    This is selection sampling (Knuth, "The Art of Computer Programming" 2, 3.4.2, algorithm S).
    """
    n = chosen.size
    drawn = np.empty(n, np.int32)
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


@compiled(
    "boolean(float64[::1], int32[::1], int32[::1], uint32[::1], int64, float64, float64[::1], "
    "int64[::1])",
    inner=True,
)
def _rank_quickly(  # noqa: PLR0912 - a row at a time, in the cache
    values: Floats,
    places: Tokens,
    tokens: Tokens,
    weights: HalfWords,
    n: int,
    total: float,
    divisors: Floats,
    out: Ints,
) -> bool:
    """Write the tokens with the largest scores, see `RankTokens`; return whether it could.

    It cannot if many scores are nearly equal, or far from 1.

    Parameters
    ----------
    values, places, tokens, weights, n
        Values above 0, their columns and tokens, float32 bits of the reciprocals of divisors, and
        the number of values.
    total, divisors
        Total of the row, and the median of each column.
    out
        As many tokens as it has places are written here.
    """
    if n == 0:
        return True
    first, second = np.empty(n, np.uint32), np.empty(n, np.uint32)
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
    for i in range(n):
        first[i] = (((most - second[i]) >> np.uint32(shift)) << by_place) | np.uint32(i)
    for bits_before in (0, _SHORT_BITS):
        low = np.uint32(by_place + np.uint32(bits_before))
        starts, start = np.zeros(_SHORT, np.int32), np.int32(0)
        for i in range(n):
            starts[(first[i] >> low) & np.uint32(_SHORT - 1)] += 1
        for digit in range(_SHORT):  # counts become the places of the first
            count = starts[digit]
            starts[digit] = start
            start += count
        for i in range(n):
            digit = (first[i] >> low) & np.uint32(_SHORT - 1)
            start = starts[digit]
            starts[digit] = start + np.int32(1)
            second[np.uint64(start)] = first[i]
        first, second = second, first
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
    for i in range(out.size):
        out[i] = tokens[first[i] & of_place]
    return True


@compiled("float64(float64, float64, float64)", inner=True)
def _score(value: float, total: float, divisor: float) -> float:
    normalized = divide(value, total) * _TARGET_SUM
    return np.float64(divide(normalized, divisor))


@compiled("int64[::1](uint64[::1])", inner=True)
def _order(keys: Words) -> Ints:
    """Return the order that sorts keys, ascending and stable: a radix sort."""
    order, differing = np.arange(keys.size), np.uint64(0)
    for key in keys:
        differing |= key ^ keys[0]
    for shift in range(0, 64, _DIGIT_BITS):
        by, of_digit = np.uint64(shift), np.uint64(_N_DIGITS - 1)
        if (differing >> by) & of_digit == 0:
            continue
        places, place = np.zeros(_N_DIGITS, np.int64), 0
        for key in keys:
            places[(key >> by) & of_digit] += 1
        for digit in range(_N_DIGITS):  # counts become the places of the first
            count = places[digit]
            places[digit] = place
            place += count
        before, order = order, np.empty(keys.size, np.int64)
        for i in before:
            digit = (keys[i] >> by) & of_digit
            order[places[digit]] = i
            places[digit] += 1
    return order


@compiled("Tuple((int32[::1], float64[::1], int64[::1], int64[::1]))(float64[::1])", inner=True)
def _distinct(values: Floats) -> tuple[Tokens, Floats, Ints, Ints]:
    """Return the number of each value, distinct values by number, their order, and their counts.

    Values are at least 0. If there are many distinct ones, each is one of its own, and equal ones
    are in the order of their places.
    """
    n = values.size
    bits, n_distinct = values.view(np.uint64), 0
    slots, of_slots = np.zeros(1 << _HASH_BITS, np.uint64), np.empty(1 << _HASH_BITS, np.int32)
    numbers, distinct = np.empty(n, np.int32), np.empty(_MOST_DISTINCT, np.float64)
    for i in range(n):
        own = bits[i] + np.uint64(1)  # 0 is an empty slot
        slot = (own * _GOLDEN) >> np.uint64(64 - _HASH_BITS)
        while slots[slot] != own:
            if slots[slot] == 0:
                if n_distinct == _MOST_DISTINCT:
                    every = np.arange(n).astype(np.int32)
                    return every, values, _order(bits), np.ones(n, np.int64)
                slots[slot], of_slots[slot] = own, n_distinct
                distinct[n_distinct] = values[i]
                n_distinct += 1
                break
            slot = (slot + np.uint64(1)) & np.uint64(slots.size - 1)
        numbers[i] = of_slots[slot]
    # In turns, as counting one number twice in a row takes long.
    counts = np.zeros((4, n_distinct), np.int64)
    for i in range(n):
        counts[i & 3, numbers[i]] += 1
    distinct = distinct[:n_distinct]
    return numbers, distinct, np.argsort(distinct), counts.sum(axis=0)


@compiled("void(float64[::1], int32[::1], int64[::1])", inner=True)
def _rank_ties(scores: Floats, tokens: Tokens, out: Ints) -> None:
    """Write the tokens with the largest scores, of equal ones the smallest, as many as fit."""
    by_token = _order(tokens.astype(np.uint64))[::-1].copy()  # since scores ascend until the end
    numbers, _, order, counts = _distinct(scores[by_token])
    firsts, first = np.empty(order.size, np.int64), 0
    for number in order:
        firsts[number] = first
        first += counts[number]
    ascending = np.empty(scores.size, np.int32)
    for i in range(scores.size):
        place = firsts[numbers[i]]
        ascending[place] = tokens[by_token[i]]
        firsts[numbers[i]] = place + 1
    for i in range(out.size):
        out[i] = ascending[scores.size - 1 - i]


@compiled(
    "void(float64[::1], int32[::1], int64, float64[::1], boolean, uint64)",
    inner=True,
)
def _bin(
    values: Floats,
    places: Tokens,
    n: int,
    quantiles: Floats,
    are_narrow: bool,  # noqa: FBT001
    row_key: Any,
) -> None:
    """Replace each value by its bin, between quantiles of all of them; see `BinnedValues`.

    Parameters
    ----------
    values, places, n
        Values, the number by which the bin of each is drawn, and how many there are, above 0.
    quantiles
        Quantiles, ascending from 0 to 1.
    are_narrow
        Whether values are float32, of which NumPy takes differences in float32.
    row_key
        The key of the row.
    """
    numbers, distinct, order, counts = _distinct(values[:n])
    edges = np.empty(quantiles.size, np.float64)
    at_low = at_high = 0
    end_low = end_high = counts[order[0]]
    for k in range(quantiles.size):
        place = (n - 1) * quantiles[k]
        before = np.int64(place)
        after = min(before + 1, n - 1)
        while end_low <= before:
            at_low += 1
            end_low += counts[order[at_low]]
        while end_high <= after:
            at_high += 1
            end_high += counts[order[at_high]]
        low, high = distinct[order[at_low]], distinct[order[at_high]]
        step = np.float64(np.float32(high - low)) if are_narrow else high - low
        part = place - before
        edges[k] = low + step * part if part < 0.5 else high - step * (1 - part)
    first, width = np.empty(order.size, np.float64), np.empty(order.size, np.float64)
    n_below, n_not_above = 0, 0
    for number in order:
        value = distinct[number]
        while n_below < edges.size and edges[n_below] < value:
            n_below += 1
        n_not_above = max(n_not_above, n_below)
        while n_not_above < edges.size and edges[n_not_above] <= value:
            n_not_above += 1
        first[number], width[number] = n_not_above, n_below - n_not_above
    for i in range(n):
        values[i] = _uniform(row_key, _BINS, places[i])
    for i in range(n):
        number = np.uint64(numbers[i])
        values[i] = np.ceil(values[i] * width[number] + first[number])


@compiled(
    *(
        f"Tuple((int64, int64, float64))({value}[::1], int32[::1], uint64[::1], float64[::1], "
        "int32[::1], int32[::1], uint32[::1])"
        for value in ("float32", "float64")
    ),
    inner=True,
)
def _gather(
    values: NDArray[Any],
    columns: Tokens,
    table: Words,
    found: Floats,
    places: Tokens,
    tokens: Tokens,
    weights: HalfWords,
) -> tuple[int, int, float]:
    """Gather the values other than 0 of known genes, with what the table has for each.

    Parameters
    ----------
    values, columns
        A row, and its columns.
    table
        See `rank_rows`.
    found, places, tokens, weights
        Memory for the values, their columns, and the halves of their words of the table.

    Returns
    -------
    The number of these values; that of values other than 0 of unknown genes, -1 if a value is
    negative or not finite; and the sum of all values.
    """
    n, n_failing, total = values.size, 0, 0.0
    for i in range(n):
        found[i], places[i] = values[i], columns[i]
    for i in range(n):
        n_failing += not ((found[i] >= 0.0) & (found[i] < np.inf))
        total = add_unordered(total, found[i])
    if n_failing:
        return 0, -1, total
    for i in range(n):
        entry = table[np.uint64(places[i])]
        tokens[i], weights[i] = np.int32(entry >> np.uint64(32)), np.uint32(entry)
    n_kept, n_unknown = 0, 0
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
    return n_kept, n_unknown, total


_ROWS = [
    f"{value}[::1], int32[::1], int64[::1], uint64[::1], int64, int64, int64, int64[::1], "
    "int64[::1], "
    for value in ("float32", "float64")
]


@compiled(*(f"int64({rows}float64[::1], boolean)" for rows in _ROWS))
def rank_rows(
    values: NDArray[Any],
    columns: Tokens,
    pointers: Ints,
    table: Words,
    longest: int,
    room: int,
    most: int,
    lengths: Ints,
    out: Ints,
    divisors: Floats,
    has_ties: bool,  # noqa: FBT001
) -> int:
    """Make the tokens of rows as `RankTokens` does.

    Parameters
    ----------
    values, columns, pointers
        Rows in CSR form, with distinct columns in each.
    table
        For each column its token, int32, -1 if unknown, in the upper half of a word; and in the
        lower, the bits of the reciprocal of its median, float32.
    longest, room, most
        Places between the starts of rows in ``out``, the largest number of tokens of a row, and a
        number above that of the values and tokens of each row.
    lengths
        Set to the number of tokens of each row, shape (n_rows,).
    out
        The tokens are written here.
    divisors, has_ties
        The median of each column, and whether many scores are likely to be equal.

    Returns
    -------
    The number of values of unknown genes; -1 - row for the first row that has a value which is
    negative or not finite.
    """
    found, places = np.empty(most, np.float64), np.empty(most, np.int32)
    tokens, weights, n_unknown = np.empty(most, np.int32), np.empty(most, np.uint32), 0
    for row in range(lengths.size):
        own = slice(pointers[row], pointers[row + 1])
        n, unknown, total = _gather(
            values[own], columns[own], table, found, places, tokens, weights
        )
        if unknown < 0:
            return -1 - row
        n_unknown += unknown
        lengths[row] = min(n, room)
        to = out[row * longest : row * longest + lengths[row]]
        if has_ties or not _rank_quickly(found, places, tokens, weights, n, total, divisors, to):
            for i in range(n):
                found[i] = _score(found[i], total, divisors[places[i]])
            _rank_ties(found[:n], tokens[:n], to)
    return n_unknown


@compiled(
    *(
        f"int64({rows}float32[::1], int64[::1], uint64, int32[::1], int32[::1], float64[::1])"
        for rows in _ROWS
    )
)
def bin_rows(
    values: NDArray[Any],
    columns: Tokens,
    pointers: Ints,
    table: Words,
    longest: int,
    room: int,
    most: int,
    lengths: Ints,
    out: Ints,
    out_values: NDArray[np.float32],
    rows: Ints,
    key: Any,
    spread: Tokens,
    known: Tokens,
    quantiles: Floats,
) -> int:
    """Make the tokens and values of rows as `BinnedValues` and `GeneSubset` do.

    Parameters
    ----------
    values, columns, pointers, table, longest, room, most, lengths, out
        See `rank_rows`.
    out_values
        Values are written here.
    rows, key
        Number of each row, and the key of the epoch, for what is drawn.
    spread, known
        If all known columns have tokens in each row: the number of each column among them, and
        their tokens. Otherwise empty.
    quantiles
        Quantiles that are the edges of bins; empty if values stay.

    Returns
    -------
    See `rank_rows`.
    """
    found, places = np.empty(most, np.float64), np.empty(most, np.int32)
    tokens, weights, n_unknown = np.empty(most, np.int32), np.empty(most, np.uint32), 0
    chosen, at = np.empty(most, np.bool_), np.arange(most).astype(np.int32)
    of_all = np.empty(known.size, np.float64)
    for row in range(lengths.size):
        own = slice(pointers[row], pointers[row + 1])
        n, unknown, _ = _gather(values[own], columns[own], table, found, places, tokens, weights)
        if unknown < 0:
            return -1 - row
        n_unknown += unknown
        row_key = _word(key, np.uint64(rows[row]))
        if known.size:
            for i in range(n):
                at[i] = spread[places[i]]
        if quantiles.size and n:
            _bin(found, at, n, quantiles, values.itemsize == 4, row_key)
        n_genes, of_genes, own_values = n, tokens, found
        if known.size:
            n_genes, of_genes, own_values = known.size, known, of_all
            of_all[:] = 0.0
            for i in range(n):
                of_all[at[i]] = found[i]
        n_made = lengths[row] = min(n_genes, room)
        to = slice(row * longest, row * longest + n_made)
        to_out, to_values = out[to], out_values[to]
        if n_genes <= room:
            for i in range(n_genes):
                to_out[i], to_values[i] = of_genes[i], own_values[i]
            continue
        _choose(chosen[:n_genes], room, row_key, _SUBSET)
        made = 0
        for i in range(n_genes):
            if made == room:
                break
            to_out[made], to_values[made] = of_genes[i], own_values[i]
            made += chosen[i]
    return n_unknown


@compiled(
    *(
        f"void({value}[::1], {value}[::1], boolean[::1], int64[::1], uint64, int64, int64[::1], "
        f"boolean, float64, float64, float64, {value}, {value}[::1])"
        for value in ("int64", "float32")
    )
)
def mask_rows(
    values: NDArray[Any],
    labels: NDArray[Any],
    masked: NDArray[np.bool_],
    rows: Ints,
    key: Any,
    longest: int,
    lengths: Ints,
    are_all_labels: bool,  # noqa: FBT001
    fraction: float,
    random: float,
    kept: float,
    mask: Any,
    replacements: NDArray[Any],
) -> None:
    """Mask tokens or values of rows as `MaskTokens` and `MaskValues` do.

    Parameters
    ----------
    values, labels, masked
        The tokens or values; memory for those before, and where they were masked.
    rows, key
        Number of each row, and the key of the epoch, for what is drawn.
    longest, lengths
        Places between the starts of rows, and length of each row.
    are_all_labels
        Whether all values are labels, or those that are masked, with `NO_LABEL` elsewhere.
    fraction, random, kept
        Share of a row that is masked; and shares of these that are replaced at random, and stay.
    mask, replacements
        What the others become, and what is drawn from at random.
    """
    for row in range(rows.size):
        own = slice(row * longest, row * longest + lengths[row])
        of_row, of_labels, chosen = values[own], labels[own], masked[own]
        row_key = _word(key, np.uint64(rows[row]))
        _choose(chosen, np.int64(lengths[row] * fraction), row_key, _MASKED)
        for i in range(chosen.size):
            of_labels[i] = of_row[i] if are_all_labels or chosen[i] else NO_LABEL
        if random + kept == 0:
            for i in range(chosen.size):
                of_row[i] = mask if chosen[i] else of_row[i]
            continue
        which, n_masked = np.empty(chosen.size + 1, np.int32), 0
        for i in range(chosen.size):
            which[n_masked] = i
            n_masked += chosen[i]
        for k in range(n_masked):
            i = np.int64(which[k])  # type: ignore[assignment]
            drawn = _uniform(row_key, _REPLACED, 2 * i)
            if drawn < random:
                place = _uniform(row_key, _REPLACED, 2 * i + 1) * replacements.size
                of_row[i] = replacements[np.int64(place)]
            elif drawn >= random + kept:
                of_row[i] = mask


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
