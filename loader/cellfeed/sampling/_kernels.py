"""Compiled functions: permuting blocks, sorting, and blocks that begin at chunk boundaries.

Importing this module loads the compiled code, so only processes that read cells import it.
Nothing compiled comes from another folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types, uint64
from numba.extending import intrinsic
from numpy.typing import NDArray

from cellfeed._compiled import compiled
from cellfeed.sampling._base import BlockSizes, ChunkedRows, EpochOrder
from cellfeed.sampling._permutation import Permutation

# ruff: noqa: ARG001 - numba fixes the parameters of an intrinsic

# Where blocks begin.

# Columns of the table of files: number of the first row; address of the row pointer, or 0;
# elements in a row, if all rows have equally many; and elements in a chunk, 0 if every row may
# begin a block. The table has one more row, which only has the number of all rows.
FIRST_ROW, POINTER, ROW, CHUNK, N_COLUMNS = range(5)


def _to_pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), codegen


_integers_at: Any = intrinsic(_to_pointer)  # makes the pointer that `carray` needs


@compiled("int64(int64[:,::1], int64)", inner=True)
def _file_of(files: NDArray[np.int64], row: int) -> int:
    low, high = 0, files.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if files[middle, FIRST_ROW] <= row:
            low = middle
        else:
            high = middle
    return low


@compiled("int64(int64[::1], int64, int64)", inner=True)
def _first_at_least(values: NDArray[np.int64], low: int, least: int) -> int:
    """Return the index of the first of ascending values that is not below ``least``.

    ``values[low]`` is below. The result is probably close, so the search begins there.
    """
    step, high = 1, low + 1
    while high < values.size and values[high] < least:
        low = high
        step *= 2
        high = min(values.size, high + step)
    while high - low > 1:
        middle = (low + high) // 2
        if values[middle] < least:
            low = middle
        else:
            high = middle
    return high


@compiled("int64(int64[:,::1], int64, int64, int64)", inner=True)
def _start_from(files: NDArray[np.int64], number: int, before: int, row: int) -> int:
    """Return ``row`` if it begins in another chunk than ``before``, else the next row that does.

    That is the first row of the file ``number``, after ``row``, that begins in a later chunk than
    ``row``; the end of the file if there is none.
    """
    first, chunk = files[number, FIRST_ROW], files[number, CHUNK]
    if before < first or chunk == 0:
        return row
    n_rows = files[number + 1, FIRST_ROW] - first
    address = files[number, POINTER]
    if address == 0:
        size = files[number, ROW]
        start = (row - first) * size // chunk * chunk
        if (before - first) * size < start:
            return row
        return int(first + min(n_rows, -(-(start + chunk) // size)))
    pointer = carray(_integers_at(address), n_rows)
    start = pointer[row - first] // chunk * chunk
    if pointer[before - first] < start:
        return row
    return int(first + _first_at_least(pointer, row - first, start + chunk))


@compiled("int64(int64[:,::1], int64[::1], int64, int64)")
def bound(files: NDArray[np.int64], indices: NDArray[np.int64], n: int, place: int) -> int:
    """Return the first row of a block, given its first row before alignment.

    Parameters
    ----------
    files
        See the top of this module.
    indices
        The rows to visit, ascending; empty for all rows.
    n
        Number of rows to visit.
    place
        Place of the first row before alignment: a multiple of the block size.
    """
    if place == 0 or place >= n:
        return min(place, n)
    if indices.size == 0:
        return int(_start_from(files, _file_of(files, place), place - 1, place))
    row = indices[place]
    start = _start_from(files, _file_of(files, row), indices[place - 1], row)
    return place if start == row else int(_first_at_least(indices, place, start))


@compiled("Tuple((int64, int64, float64))(int64[:,::1], int64[::1], int64, int64)")
def moments(
    files: NDArray[np.int64], indices: NDArray[np.int64], n: int, block_size: int
) -> tuple[int, int, float]:
    """Return the number of blocks, the largest size, and the sum of squared sizes."""
    n_blocks, largest, squares = 0, 0, 0.0
    begin = 0
    for place in range(block_size, n + block_size, block_size):
        if begin >= place:
            continue
        end = bound(files, indices, n, place)
        if end > begin:
            n_blocks += 1
            largest = max(largest, end - begin)
            squares += float(end - begin) ** 2
        begin = end
    return n_blocks, largest, squares


# A `Permutation` of some elements.

# Constants of SplitMix64; see `random_words`.
_GOLDEN = uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = uint64(0x94D049BB133111EB)


@compiled("uint64(uint64, uint64)", inner=True)
def _word(key: np.uint64, counter: np.uint64) -> np.uint64:
    word = counter * _GOLDEN + (key + _GOLDEN)
    word = (word ^ (word >> uint64(30))) * _MULTIPLIER_1
    word = (word ^ (word >> uint64(27))) * _MULTIPLIER_2
    return np.uint64(word ^ (word >> uint64(31)))


@compiled("void(uint64[::1], int64, uint64[::1], int64[::1], int64)", inner=True)
def _feistel(
    words: NDArray[np.uint64],
    n_words: int,
    keys: NDArray[np.uint64],
    rounds: NDArray[np.int64],
    n_bits: int,
) -> None:
    low_bits = uint64(n_bits // 2)
    low_mask = (uint64(1) << low_bits) - uint64(1)
    high_mask = (uint64(1) << uint64(n_bits - n_bits // 2)) - uint64(1)
    for number in rounds:
        key = keys[number]
        if number % 2:
            for i in range(n_words):
                words[i] ^= _word(key, words[i] >> low_bits) & low_mask
        else:
            for i in range(n_words):
                words[i] ^= (_word(key, words[i] & low_mask) & high_mask) << low_bits


@compiled("void(uint64[::1], int64, uint64[::1], int64[::1], uint64[::1], int64[::1], int64)")
def permute(
    words: NDArray[np.uint64],
    n_words: int,
    walking: NDArray[np.uint64],
    places: NDArray[np.int64],
    keys: NDArray[np.uint64],
    rounds: NDArray[np.int64],
    n: int,
) -> None:
    """Replace each of the first words by its image; see `Permutation`.

    Parameters
    ----------
    words, n_words
        Elements below ``n``, and the number of them to permute.
    walking, places
        Memory to work in, for as many elements; what allocates takes a third longer to compile.
    keys, rounds
        Keys of the rounds, and the order of the rounds; the reverse order gives the inverse.
    n
        Number of elements of the permutation.
    """
    n_bits = 2
    while n > 1 << n_bits:
        n_bits += 1
    _feistel(words, n_words, keys, rounds, n_bits)
    n_outside = 0
    for i in range(n_words):
        if words[i] >= uint64(n):
            walking[n_outside], places[n_outside] = words[i], i
            n_outside += 1
    while n_outside:
        _feistel(walking, n_outside, keys, rounds, n_bits)
        n_left = 0
        for i in range(n_outside):
            if walking[i] >= uint64(n):
                walking[n_left], places[n_left] = walking[i], places[i]
                n_left += 1
            else:
                words[places[i]] = walking[i]
        n_outside = n_left


# Blocks of unequal size in the order of a `Permutation`, by position.

GROUP = 1024  # blocks; only the number of rows of each group is stored
_GROUP_BITS = 10
_AT_ONCE = 64  # blocks that are permuted together, by vector instructions


@compiled("int64[::1](int64[:,::1], int64[::1], int64, int64, uint64[::1])")
def group_sizes(
    files: NDArray[np.int64],
    indices: NDArray[np.int64],
    n: int,
    block_size: int,
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Return the number of rows in each `GROUP` of blocks, in the order of the epoch.

    Blocks are visited in storage order, so that row pointers are read sequentially; the inverse
    permutation gives the group of each block.

    Parameters
    ----------
    files, indices, n
        See `bound`.
    block_size
        Rows in a block before alignment.
    keys
        Keys of the rounds of the permutation of blocks.

    Returns
    -------
    int64, shape (n_groups,).
    """
    n_blocks = (n + block_size - 1) // block_size
    sums = np.zeros((n_blocks + GROUP - 1) // GROUP, np.int64)
    words, sizes = np.empty(_AT_ONCE, np.uint64), np.empty(_AT_ONCE, np.int64)
    walking, places = np.empty(_AT_ONCE, np.uint64), np.empty(_AT_ONCE, np.int64)
    rounds = np.arange(keys.size - 1, -1, -1)
    n_waiting, begin = 0, 0
    for block in range(n_blocks):
        place = (block + 1) * block_size
        if begin < place:
            end = bound(files, indices, n, place)
            words[n_waiting], sizes[n_waiting] = block, end - begin
            n_waiting += end > begin
            begin = end
        if n_waiting == _AT_ONCE or block == n_blocks - 1:
            permute(words, n_waiting, walking, places, keys, rounds, n_blocks)
            for i in range(n_waiting):
                sums[words[i] >> uint64(_GROUP_BITS)] += sizes[i]
            n_waiting = 0
    return sums


@compiled("int64[::1](int64[::1], int64[::1], int64[:,::1], int64[::1], int64, int64, uint64[::1])")
def rows_at(
    positions: NDArray[np.int64],
    group_ends: NDArray[np.int64],
    files: NDArray[np.int64],
    indices: NDArray[np.int64],
    n: int,
    block_size: int,
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Return the rows, or the places among ``indices``, at ascending positions of an epoch.

    Parameters
    ----------
    positions
        Ascending, in [0, n), shape (n_positions,).
    group_ends
        End of each group of blocks, int64, shape (n_groups,).
    files, indices, n, block_size, keys
        See `group_sizes`.

    Raises
    ------
    ValueError
        A position is outside of the epoch.
    """
    n_blocks = (n + block_size - 1) // block_size
    rows = np.empty(positions.size, np.int64)
    words, rounds = np.empty(_AT_ONCE, np.uint64), np.arange(keys.size)
    walking, places = np.empty(_AT_ONCE, np.uint64), np.empty(_AT_ONCE, np.int64)
    slot, end, k = 0, 0, 0  # the next block, and its first position
    while k < positions.size and slot < n_blocks:
        group = np.searchsorted(group_ends, positions[k], side="right")
        if slot // GROUP < group:
            slot, end = group * GROUP, group_ends[group - 1]
        n_words = min(_AT_ONCE, n_blocks - slot)
        for i in range(n_words):
            words[i] = slot + i
        permute(words, n_words, walking, places, keys, rounds, n_blocks)
        slot += n_words
        for i in range(n_words):
            place = np.int64(words[i]) * block_size
            first = bound(files, indices, n, place)
            if first >= place + block_size:
                continue
            start, end = end, end + bound(files, indices, n, place + block_size) - first
            while k < positions.size and positions[k] < end:
                rows[k] = first + positions[k] - start
                k += 1
    if k < positions.size:
        raise ValueError("positions are outside of the epoch, or row pointers have changed")
    return rows


# Sorting words, digit by digit.

_DIGIT_BITS, _N_DIGITS = 8, 8
_N_VALUES = 1 << _DIGIT_BITS


@compiled("int64[:,::1](uint64[:,::1])")
def radix_order(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return ``np.argsort(words, axis=1, kind="stable")``, by radix sort.

    Words are sorted by the lowest digit first. Digits that are the same in all words are skipped.

    Parameters
    ----------
    words
        Shape (n, size).

    Returns
    -------
    int64, shape (n, size).
    """
    n_rows, n = words.shape
    found = np.empty((n_rows, n), np.int64)
    keys, moved_keys = np.empty(n, np.uint64), np.empty(n, np.uint64)
    order, moved_order = np.empty(n, np.int64), np.empty(n, np.int64)
    for row in range(n_rows):
        counts = np.zeros((_N_DIGITS, _N_VALUES), np.int64)
        for i in range(n):
            keys[i], order[i] = words[row, i], i
            for digit in range(_N_DIGITS):
                counts[digit, (keys[i] >> uint64(digit * _DIGIT_BITS)) & uint64(_N_VALUES - 1)] += 1
        for digit in range(_N_DIGITS):
            shift, first, most = uint64(digit * _DIGIT_BITS), 0, 0
            for value in range(_N_VALUES):  # counts become the places of the first
                most = max(most, counts[digit, value])
                counts[digit, value], first = first, first + counts[digit, value]
            if most == n:
                continue
            for i in range(n):
                value = (keys[i] >> shift) & uint64(_N_VALUES - 1)
                place = counts[digit, value]
                moved_keys[place], moved_order[place] = keys[i], order[i]
                counts[digit, value] += 1
            keys, moved_keys = moved_keys, keys
            order, moved_order = moved_order, order
        for i in range(n):  # assigning a row would also compile numba's messages about shapes
            found[row, i] = order[i]
    return found


# Blocks that begin at chunk boundaries, in random order.


@dataclass(frozen=True, eq=False)
class AlignedBlocks:
    """Blocks of equal size, each shifted to the next row that begins a chunk.

    Parameters
    ----------
    files
        The rows of each file.
    indices
        The rows to visit, ascending int64; empty for all rows.
    n
        The number of rows to visit.
    block_size
        Rows in a block before alignment.
    """

    files: Sequence[ChunkedRows]
    indices: NDArray[np.int64]
    n: int
    block_size: int
    _table: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Record the first row of each file, and keep `files`, which owns the memory."""
        firsts = np.cumsum([0, *(each.n_rows for each in self.files)])
        table = np.zeros((len(self.files) + 1, N_COLUMNS), np.int64)
        table[:, FIRST_ROW] = firsts
        for row, each in zip(table, self.files, strict=False):
            row[POINTER] = 0 if each.pointer is None else each.pointer.ctypes.data
            row[ROW], row[CHUNK] = each.row_size, each.chunk_size
        object.__setattr__(self, "_table", table)

    @property
    def n_blocks(self) -> int:
        """Number of blocks, including empty ones."""
        return -(-self.n // self.block_size)

    def sizes(self) -> BlockSizes:
        """Return the sizes of the blocks."""
        n_blocks, largest, squares = moments(self._table, self.indices, self.n, self.block_size)
        return BlockSizes(
            n_blocks=n_blocks, mean=self.n / n_blocks, largest=largest, effective=squares / self.n
        )

    def in_random_order(self, key: int) -> EpochOrder:
        """Return the row numbers below ``n``, with the blocks in random order."""
        keys = np.array(Permutation(self.n_blocks, key).round_keys, np.uint64)
        sizes = group_sizes(self._table, self.indices, self.n, self.block_size, keys)
        group_ends = np.cumsum(sizes)

        def numbers_at(positions: NDArray[np.int64], /) -> NDArray[np.int64]:
            flat = np.ascontiguousarray(positions).reshape(-1)
            order = None if np.all(flat[1:] >= flat[:-1]) else np.argsort(flat)
            ascending = flat if order is None else flat[order]
            found: NDArray[np.int64] = rows_at(
                ascending, group_ends, self._table, self.indices, self.n, self.block_size, keys
            )
            numbers = found
            if order is not None:
                numbers = np.empty_like(found)
                numbers[order] = found
            return numbers.reshape(positions.shape)

        return numbers_at
