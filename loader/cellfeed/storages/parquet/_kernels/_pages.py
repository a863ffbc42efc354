"""Compiled: pages of columns of lists in Parquet files, decoded to the values of wanted rows.

Format: https://parquet.apache.org/docs/file-format/data-pages/ and the Thrift definitions in
https://github.com/apache/parquet-format. All functions return a negative number for what they do
not understand, damaged or not; a library then reads it, and names what is wrong. Nothing that a
page says is used as an index or a size before it is compared with what is there.
"""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from cellfeed.decode._kernels import _codecs as codecs
from cellfeed.decode._kernels._fields import Ints
from cellfeed.decode._kernels._native import call, copy_bytes, load_word, pointer
from cellfeed.extending import compiled
from cellfeed.storages.parquet._kernels import _fields as fields
from cellfeed.storages.parquet._kernels import _thrift as thrift
from cellfeed.storages.parquet._kernels._thrift import Bytes as _Bytes
from cellfeed.storages.parquet._kernels._thrift import varint

# Compiled: headers of pages, structs in Thrift's compact protocol.

_ABSENT = -(1 << 62)
_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8  # encodings
# The field in which the header of the first kind of page is, by their number; others follow it.
_OF_KIND = 5
_BASE = 1 << thrift.DIGIT_BITS
_N_HEADER = (_OF_KIND + fields.DATA_2_PAGE + 1) * _BASE


@compiled("int64(uint8[::1], int64, int64[:,::1], int64[::1])", inner=True)
def _read_header(data: _Bytes, i: int, reader: Ints, header: Ints) -> int:
    """Read a header, with its integers by path; return where it ends."""
    for k in range(_N_HEADER):  # becomes one call, unlike a slice
        header[k] = _ABSENT
    thrift.begin(reader, i)
    while True:
        of_type, path, value = thrift.step(data, reader)
        if of_type < 0:
            return -1
        if of_type == thrift.ENDS and path == 0:
            return int(reader[0, thrift.POSITION])
        if 0 < of_type < thrift.DOUBLE and 0 < path < _N_HEADER:
            header[path] = value


@compiled("int64(int64, int64, int64, int64, int64[:,::1])")
def find_pages(  # noqa: PLR0912 - one for each kind
    source: int, n_bytes: int, n_entries: int, most_bytes: int, pages: Ints
) -> int:
    """Find the pages of a column in a row group.

    Parameters
    ----------
    source, n_bytes
        Address of its bytes, from its first page on, and their number.
    n_entries
        Number of its values, and of lists without any.
    most_bytes
        Size of all pages, decompressed, that they must not exceed.
    pages
        Filled with as many pages as it has rows.

    Returns
    -------
    Number of pages.
    """
    data = carray(pointer(source), (n_bytes,), np.uint8)
    header, reader = np.empty(_N_HEADER, np.int64), thrift.new_reader()
    at: Any = 0
    seen: Any = 0
    total = n = 0
    while seen < n_entries:
        at = _read_header(data, at, reader, header)
        if at < 0:
            return -1
        kind, size, stored = header[1], header[2], header[3]
        if size < 0 or stored < 0 or stored > data.size - at or size > most_bytes - total:
            return -1
        total += size
        if not fields.DATA_PAGE <= kind <= fields.DATA_2_PAGE:
            return -1
        own = header[(_OF_KIND + kind) * _BASE :]
        entries, n_rows, encoding, is_compressed = np.int64(0), np.int64(-1), own[2], np.int64(1)
        repetitions = definitions = np.int64(0)
        if kind == fields.DATA_PAGE:
            entries = own[1]
            if own[3] != _RLE or own[4] != _RLE:
                return -1
        elif kind == fields.DICTIONARY_PAGE:
            n_rows = own[1]
            if n_rows < 0 or (encoding not in (_PLAIN, _PLAIN_DICTIONARY)):
                return -1
        elif kind == fields.DATA_2_PAGE:
            entries, n_rows, encoding = own[1], own[3], own[4]
            definitions, repetitions = own[5], own[6]
            is_compressed = np.int64(own[7] != 0)
            if n_rows < 0 or n_rows > entries or definitions < 0 or repetitions < 0:
                return -1
            if repetitions > stored or definitions > min(stored, size) - repetitions:
                return -1
        if entries < 0 or entries > n_entries - seen:
            return -1
        is_indexed = encoding in (_RLE_DICTIONARY, _PLAIN_DICTIONARY)
        if kind in (fields.DATA_PAGE, fields.DATA_2_PAGE) and not is_indexed and encoding != _PLAIN:
            return -1
        if kind != fields.INDEX_PAGE:
            if n < len(pages):
                page = pages[n]
                page[fields.BEGIN], page[fields.STORED] = at, stored
                page[fields.PAGE_SIZE], page[fields.KIND] = size, kind
                page[fields.N_ENTRIES], page[fields.N_PAGE_ROWS] = entries, n_rows
                page[fields.IS_INDEXED] = is_indexed
                page[fields.REPETITIONS], page[fields.DEFINITIONS] = repetitions, definitions
                page[fields.IS_COMPRESSED], page[fields.N_VALUES] = is_compressed, 0
                page[fields.VALUES_BEGIN], page[fields.VALUES_END] = 0, 0
                page[fields.CHECKSUM] = -1 if header[4] == _ABSENT else header[4] & 0xFFFFFFFF
            n += 1
        seen += entries
        at += stored
    return n


# Compiled: levels, in runs of equal ones and of some that are packed into bits.


@compiled("int64(uint8[::1], int64, int64, int64, int64[::1])", inner=True)
def _row_starts(data: _Bytes, i: int, stop: int, n: int, starts: Ints) -> int:
    """Write which entries begin a row, those whose repetition level is 0; return their number."""
    k = count = 0
    while k < n:
        head, i = varint(data, i, stop)
        if i < 0:
            return -1
        n_bytes = head >> 1
        if head & 1:
            if n_bytes == 0 or n_bytes > stop - i:
                return -1
            n_here = min(n_bytes * 8, n - k)
            for j in range(0, n_here, 8):
                byte = data[np.uint64(i + (j >> 3))]
                if byte == 255:
                    continue
                for bit in range(min(8, n_here - j)):
                    if not (byte >> bit) & 1:
                        starts[count] = k + j + bit
                        count += 1
            i += n_bytes
        else:
            n_here = min(head >> 1, n - k)
            if n_here == 0 or i >= stop or data[np.uint64(i)] > 1:
                return -1
            if data[np.uint64(i)] == 0:
                for j in range(n_here):
                    starts[count + j] = k + j
                count += n_here
            i += 1
        k += n_here
    return count if i == stop else -1


@compiled("int64(uint8[::1], int64, int64, int64, int64, uint8[::1])", inner=True)
def _definitions(data: _Bytes, i: int, stop: int, n: int, most: int, levels: _Bytes) -> int:
    """Write the definition level of each entry, unless all are ``most``: then return 1."""
    head, at = varint(data, i, stop)
    if at >= 0 and head & 1 == 0 and head >> 1 >= n and at == stop - 1 and data[at] == most:
        return 1
    width, k = 1 if most == 1 else 2, 0
    while k < n:
        head, i = varint(data, i, stop)
        if i < 0:
            return -1
        n_groups = head >> 1
        if head & 1:
            if n_groups == 0 or n_groups > (stop - i) // width:
                return -1
            n_here = min(n_groups * 8, n - k)
            for j in range(n_here):
                bit = j * width
                levels[k + j] = (data[np.uint64(i + (bit >> 3))] >> (bit & 7)) & ((1 << width) - 1)
            i += n_groups * width
        else:
            n_here = min(n_groups, n - k)
            if n_here == 0 or i >= stop:
                return -1
            for j in range(n_here):
                levels[k + j] = data[np.uint64(i)]
            i += 1
        k += n_here
    return 0 if i == stop else -1


@compiled(
    "int64(int64[::1], int64, int64, uint8[::1], int64, int64[::1], int64, int64[:,::1],"
    " int64, int64[::1], int64[:,::1], int64)",
    inner=True,
)
def _find_pieces(
    starts: Ints,
    n_starts: int,
    n: int,
    levels: _Bytes,
    are_values: int,
    column: Ints,
    row: int,
    runs: Ints,
    first_run: int,
    lengths: Ints,
    pieces: Ints,
    n_pieces: int,
) -> int:
    """Write which values of a page belong to wanted rows, and add to the lengths of these rows.

    Parameters
    ----------
    starts, n_starts, n
        Entries that begin a row, their number, and the number of all entries.
    levels, are_values
        Definition levels of entries; 1 if all are values, so that there are no levels, else 0.
    column
        The description of the column.
    row
        Number of rows that began before the page.
    runs, first_run
        The wanted rows, and the first run that may be in the page.
    lengths
        Number of values of each wanted row so far.
    pieces, n_pieces
        The table of pieces, to which those of this page are added, and how many it has.

    Returns
    -------
    Number of pieces, -1 if a list lacks a value, or is missing.
    """
    leading = starts[0] if n_starts else n
    passed = n_passed = 0  # entries, and the values among them
    before = 0  # wanted rows of the earlier runs
    for r in range(first_run):
        before += runs[r, 1] - runs[r, 0]
    for r in range(first_run, len(runs)):
        first, stop = runs[r, 0], runs[r, 1]
        low, high = max(first, row - 1 if leading else row), min(stop, row + n_starts)
        if first >= row + n_starts:
            break
        for k in range(low, high):
            entry = starts[k - row] if k >= row else 0
            end = starts[k + 1 - row] if k + 1 - row < n_starts else n
            n_values = end - entry
            if are_values:
                n_passed = entry
            else:
                while passed < entry:
                    n_passed += levels[passed] == column[fields.MOST]
                    passed += 1
                if n_values == 1 and k >= row and levels[entry] == column[fields.EMPTY]:
                    n_values = 0
                for e in range(entry, entry + n_values):
                    if levels[e] != column[fields.MOST]:
                        return -1
            if n_values:
                if n_pieces == len(pieces):
                    return -1
                piece = pieces[n_pieces]
                piece[fields.ROW], piece[fields.FIRST] = before + k - first, n_passed
                piece[fields.N_ELEMENTS] = n_values
                lengths[before + k - first] += n_values
                n_pieces += 1
            n_passed += n_values
            passed = end
        before += stop - first
    return n_pieces


# Compiled: values.

_WORDS = "uint32", "uint64"


@compiled("int64(int64, int64, int32[::1])", inner=True)
def _number_at(address: int, itemsize: int, numbers: NDArray[np.int32]) -> int:
    """Return the integer at an address, or the column it stands for, if there are numbers."""
    value: Any
    if itemsize == 4:
        value = np.int64(carray(pointer(address), (1,), np.int32)[0])
    else:
        value = carray(pointer(address), (1,), np.int64)[0]
    if numbers.size:
        value = np.int64(numbers[min(value, numbers.size - 1)]) if value >= 0 else np.int64(-1)
    return int(value)


@compiled(*(f"void(int64, int64, int64, int32[::1], {word}[::1])" for word in _WORDS), inner=True)
def _take(
    address: int, n: int, itemsize: int, numbers: NDArray[np.int32], out: NDArray[Any]
) -> None:
    """Write plain values, or the columns that numbers stand for."""
    if numbers.size == 0:
        copy_bytes(np.int64(out.ctypes.data), address, n * itemsize)
        return
    for k in range(n):
        out[k] = out.dtype.type(_number_at(address + k * itemsize, itemsize, numbers))


@compiled(
    *(f"uint64(int64, int64, int64, int64, {w}[::1], {w}[::1], int64)" for w in _WORDS), inner=True
)
def _unpack(
    address: int,
    width: int,
    first: int,
    n: int,
    dictionary: NDArray[Any],
    out: NDArray[Any],
    o: int,
) -> Any:
    """Write the values of indices that are packed into bits; return the largest index.

    The dictionary has a value for each index of this width.
    """
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    bit, largest = first * width, np.uint64(0)
    for k in range(n):
        word = load_word(address + (bit >> 3))
        index = (word >> np.uint64(bit & 7)) & mask
        largest = max(largest, index)
        out[np.uint64(o + k)] = dictionary[index]
        bit += width
    return largest


@compiled("int64(int32[::1], int64, int64)", inner=True)
def _ascend(columns: NDArray[np.int32], n: int, before: int) -> int:
    """Return whether columns ascend strictly, from the one before; -1 if one is negative."""
    n_descents, lowest = np.int64(columns[0] <= before), columns[0]
    for k in range(n - 1):
        n_descents += columns[k + 1] <= columns[k]
        lowest = min(lowest, columns[k + 1])
    if lowest < 0:
        return -1
    return int(n_descents == 0)


@compiled(
    *(
        "int64(uint8[::1], int64[:,::1], int64[::1], int64[:,::1], int64[::1], int32[::1],"
        f" {word}[::1], boolean)"
        for word in _WORDS
    )
)
def write_lists(  # noqa: PLR0912 - each is a check
    memory: _Bytes,
    pages: Ints,
    column: Ints,
    pieces: Ints,
    addresses: Ints,
    numbers: NDArray[np.int32],
    dictionary: NDArray[Any],
    are_columns: bool,  # noqa: FBT001 - compiled
) -> int:
    """Write pieces of lists to their destinations.

    Parameters
    ----------
    memory, pages, column, pieces, numbers, dictionary
        What `open_lists` was given, and filled. Pieces may be shorter, and some of them left out.
    addresses
        Where each piece is written.
    are_columns
        Whether values are columns: they must not be negative.

    Returns
    -------
    Whether columns ascend strictly in each row; negative if pages are not understood.
    """
    start, itemsize = np.int64(memory.ctypes.data), column[fields.LIST_ITEMSIZE]
    p = last_row = np.int64(-1)
    last, ascending = np.int64(-1), np.int64(1)
    i: Any = np.int64(0)  # where in memory; `stop`: where the values of the page end
    stop = n = width = np.int64(0)
    # A run of indices: its first value, their number, of bytes, whether it is packed, its index.
    k = n_run = n_bytes = is_packed = index = np.int64(0)
    for t in range(len(pieces)):
        first, count = pieces[t, fields.FIRST], pieces[t, fields.N_ELEMENTS]
        if count == 0:
            continue
        if pieces[t, fields.IN_PAGE] != p:
            p = pieces[t, fields.IN_PAGE]
            i, stop = pages[p, fields.VALUES_BEGIN], pages[p, fields.VALUES_END]
            n, k, n_run, n_bytes = pages[p, fields.N_VALUES], np.int64(0), np.int64(0), np.int64(0)
            if not pages[p, fields.IS_INDEXED]:
                if stop - i != n * itemsize:
                    return -1
            else:
                if i >= stop or memory[i] > 32:
                    return -1
                width = np.int64(memory[i])
                i += 1
                if np.int64(1) << width > dictionary.size:
                    return -1
        if first < k or first + count > n:
            return -1
        out = carray(pointer(addresses[t]), (count,), dictionary.dtype)
        if not pages[p, fields.IS_INDEXED]:
            _take(start + i + first * itemsize, count, itemsize, numbers, out)
        done = np.int64(0) if pages[p, fields.IS_INDEXED] else count
        while done < count:
            at = first + done
            while at >= k + n_run:
                i += n_bytes
                k += n_run
                head, i = varint(memory, i, stop)
                if i < 0:
                    return -1
                n_run, n_bytes, is_packed = head >> 1, (width + 7) >> 3, head & 1
                if is_packed:
                    if n_run > (n - k + 7) >> 3:
                        return -1
                    n_bytes, n_run = n_run * width, n_run * 8
                n_run = min(n_run, n - k)
                if n_run == 0 or n_bytes > stop - i:
                    return -1
                if not is_packed:
                    index = np.int64(0)
                    for byte in range(n_bytes):
                        index |= np.int64(memory[i + byte]) << (8 * byte)
                    if index >= column[fields.N_DISTINCT]:
                        return -1
            m = min(count - done, k + n_run - at)
            if is_packed:
                largest = _unpack(start + i, width, at - k, m, dictionary, out, done)
                if largest >= np.uint64(column[fields.N_DISTINCT]):
                    return -1
            else:
                value = dictionary[index]
                for j in range(m):
                    out[done + j] = value
            done += m
        if are_columns:
            columns = carray(pointer(addresses[t]), (count,), np.int32)
            goes_on = pieces[t, fields.ROW] == last_row
            ascend = _ascend(columns, count, last if goes_on else np.int64(-1))
            if ascend < 0:
                return -1
            ascending &= ascend
            last_row, last = pieces[t, fields.ROW], np.int64(columns[count - 1])
    return int(ascending)


# Compiled: a column in a row group.


@compiled("int64(uint8[::1], int64[::1], int64[::1], uint8[::1], int64, int64[::1])", inner=True)
def _decompressed(
    data: _Bytes, page: Ints, column: Ints, buffer: _Bytes, wanted: int, states: Ints
) -> int:
    """Decompress a page, at least as many bytes as are wanted; return their number.

    The levels of a page of the second kind stay where they are.
    """
    n_levels = page[fields.REPETITIONS] + page[fields.DEFINITIONS]
    source = np.int64(data.ctypes.data) + page[fields.BEGIN] + n_levels
    stored, target = page[fields.STORED] - n_levels, np.int64(buffer.ctypes.data)
    size = page[fields.PAGE_SIZE] - n_levels
    if size > buffer.size - fields.PADDING:
        return -1
    wanted = min(wanted, size)
    if size == 0:
        return 0
    if column[fields.LIST_DECOMPRESS] == 0 or not page[fields.IS_COMPRESSED]:
        if stored != size:
            return -1
        copy_bytes(target, source, wanted)
        return wanted
    arguments = source, stored, target, size, 0, wanted, states[0], states[1], states[2], 0
    n = call(column[fields.LIST_DECOMPRESS], arguments)
    return int(min(n, wanted))  # what follows them may be wrong


@compiled("boolean(uint8[::1], int64[::1], int64[::1])", inner=True)
def _is_as_written(data: _Bytes, page: Ints, functions: Ints) -> bool:
    """Return whether the bytes of a page have its checksum, if it has one."""
    if page[fields.CHECKSUM] < 0:
        return True
    if functions[codecs.CRC32] == 0:
        return False
    arguments = (0, np.int64(data.ctypes.data) + page[fields.BEGIN], page[fields.STORED])
    return bool(call(functions[codecs.CRC32], arguments) & 0xFFFFFFFF == page[fields.CHECKSUM])


@compiled("Tuple((int64, int64, int64))(uint8[::1], int64)", inner=True)
def _levels_of(buffer: _Bytes, n: int) -> Any:
    """Return where repetition levels end, definition levels begin, and end, in ``n`` bytes.

    The end is -1 if there are more of them.
    """
    if n < 4:
        return 0, 0, -1
    repetitions = np.int64(carray(pointer(np.int64(buffer.ctypes.data)), (1,), np.uint32)[0])
    if repetitions > n - 8:
        return 0, 0, -1
    word = load_word(np.int64(buffer.ctypes.data) + 4 + repetitions)
    definitions = np.int64(word & np.uint64(0xFFFFFFFF))
    if definitions > n - 8 - repetitions:
        return 0, 0, -1
    return 4 + repetitions, 8 + repetitions, 8 + repetitions + definitions


_HEAD_BYTES = 4096  # mostly contain the levels of a page


@compiled(
    "int64(uint8[::1], int64[::1], int64[::1], uint8[::1], int64[::1], int64, int64[:,::1], int64,"
    " int64[::1], int64[:,::1], int64, int64[::1], uint8[::1], int64[::1])",
    inner=True,
)
def _open_page(
    data: _Bytes,
    page: Ints,
    column: Ints,
    memory: _Bytes,
    states: Ints,
    row: int,
    runs: Ints,
    first_run: int,
    lengths: Ints,
    pieces: Ints,
    n_pieces: int,
    starts: Ints,
    levels: _Bytes,
    counts: Ints,
) -> bool:
    """Read the levels of a page, and decompress it if it has values of wanted rows.

    Parameters
    ----------
    data, page, column, states
        The bytes of the column, the row of the page, the description, and addresses for codecs.
    memory
        The memory of the page, and `PADDING`.
    row, runs, first_run, lengths, pieces, n_pieces
        See `_find_pieces`.
    starts, levels
        Memory for the entries that begin a row, and for definition levels.
    counts
        Becomes the number of rows that begin in the page, and of all pieces.

    Returns
    -------
    Whether that could be done.
    """
    n, size, is_partial = page[fields.N_ENTRIES], page[fields.PAGE_SIZE], False
    at, level_bytes = page[fields.BEGIN], data
    end = begin = at + page[fields.REPETITIONS]
    stop = begin + page[fields.DEFINITIONS]
    if page[fields.KIND] == fields.DATA_PAGE:
        n_head = _decompressed(data, page, column, memory, _HEAD_BYTES, states)
        end, begin, stop = _levels_of(memory, n_head)
        is_partial = n_head < size
        if stop < 0 and is_partial:
            if _decompressed(data, page, column, memory, size, states) != size:
                return False
            end, begin, stop = _levels_of(memory, size)
            is_partial = False
        if stop < 0:
            return False
        at, level_bytes = np.int64(4), memory
    n_starts = _row_starts(level_bytes, at, end, n, starts)
    are_values = _definitions(level_bytes, begin, stop, n, column[fields.MOST], levels)
    if n_starts < 0 or are_values < 0 or (n_starts and row + n_starts > column[fields.N_ROWS]):
        return False
    if page[fields.N_PAGE_ROWS] >= 0 and n_starts != page[fields.N_PAGE_ROWS]:
        return False
    if n and row == 0 and (n_starts == 0 or starts[0] > 0):
        return False  # the first value of all belongs to no row
    counts[0] = n_starts
    counts[1] = _find_pieces(
        starts, n_starts, n, levels, are_values, column, row, runs, first_run,
        lengths, pieces, n_pieces,
    )  # fmt: skip
    if counts[1] <= n_pieces:
        return bool(counts[1] == n_pieces)
    page[fields.N_VALUES] = n
    if are_values == 0:
        page[fields.N_VALUES] = 0
        for k in range(n):
            page[fields.N_VALUES] += levels[k] == column[fields.MOST]
    page[fields.VALUES_BEGIN], page[fields.VALUES_END] = stop, size
    if page[fields.KIND] != fields.DATA_PAGE:
        n_values = size - page[fields.REPETITIONS] - page[fields.DEFINITIONS]
        page[fields.VALUES_BEGIN], page[fields.VALUES_END] = 0, n_values
        return bool(_decompressed(data, page, column, memory, n_values, states) == n_values)
    return not is_partial or bool(_decompressed(data, page, column, memory, size, states) == size)


@compiled(
    *(
        "int64(uint8[::1], int64[:,::1], int64[::1], int64[:,::1], int64[::1], int64[:,::1],"
        f" int64[::1], uint8[::1], int32[::1], {word}[::1], int64[::1])"
        for word in _WORDS
    ),
    inner=True,
)
def _open_lists(  # noqa: PLR0912 - one loop over pages
    data: _Bytes,
    pages: Ints,
    column: Ints,
    runs: Ints,
    lengths: Ints,
    pieces: Ints,
    functions: Ints,
    memory: _Bytes,
    numbers: NDArray[np.int32],
    dictionary: NDArray[Any],
    states: Ints,
) -> int:
    """Do what `open_lists` does; ``states`` are addresses for the functions of codecs."""
    row, last_row = np.int64(0), runs[-1, 1] - 1
    first_run = n_pieces = at = np.int64(0)
    largest = n_stated = n_unstated = np.int64(0)
    for p in range(len(pages)):
        largest = max(largest, pages[p, fields.N_ENTRIES])
        if pages[p, fields.KIND] == fields.DATA_2_PAGE:
            n_stated += pages[p, fields.N_PAGE_ROWS]
        elif pages[p, fields.KIND] == fields.DATA_PAGE:
            n_unstated += 1
    if n_unstated == 0 and n_stated != column[fields.N_ROWS]:
        return -1  # pages that are passed over would move all rows
    starts, levels = np.empty(largest, np.int64), np.empty(largest, np.uint8)
    counts = np.zeros(2, np.int64)
    for p in range(len(pages)):
        page, size = pages[p], pages[p, fields.PAGE_SIZE]
        own, begin = memory[at : at + size + fields.PADDING], at
        at += size
        if page[fields.KIND] == fields.DICTIONARY_PAGE:
            if not _is_as_written(data, page, functions):
                return -1
            if _decompressed(data, page, column, own, size, states) != size:
                return -1
            n_distinct, itemsize = column[fields.N_DISTINCT], column[fields.LIST_ITEMSIZE]
            _take(np.int64(own.ctypes.data), n_distinct, itemsize, numbers, dictionary)
            continue
        if row > last_row + 1:
            return int(n_pieces)
        while first_run < len(runs) - 1 and runs[first_run, 1] < row:
            first_run += 1
        n_rows = page[fields.N_PAGE_ROWS]
        if n_rows >= 0 and row + n_rows <= runs[first_run, 0]:
            row += n_rows  # none of them is wanted
            continue
        if not _is_as_written(data, page, functions):
            return -1
        if not _open_page(
            data, page, column, own, states, row, runs, first_run,
            lengths, pieces, n_pieces, starts, levels, counts,
        ):  # fmt: skip
            return -1
        row += counts[0]
        for t in range(n_pieces, counts[1]):
            pieces[t, fields.IN_PAGE] = p
        n_pieces = counts[1]
        page[fields.VALUES_BEGIN] += begin
        page[fields.VALUES_END] += begin
    return int(n_pieces) if row == column[fields.N_ROWS] else -1


@compiled(
    *(
        "int64(int64, int64, int64[:,::1], int64[::1], int64[:,::1], int64[::1], int64[:,::1],"
        f" int64[::1], uint8[::1], int32[::1], {word}[::1])"
        for word in _WORDS
    )
)
def open_lists(
    source: int,
    n_bytes: int,
    pages: Ints,
    column: Ints,
    runs: Ints,
    lengths: Ints,
    pieces: Ints,
    functions: Ints,
    memory: _Bytes,
    numbers: NDArray[np.int32],
    dictionary: NDArray[Any],
) -> int:
    """Decompress the pages with values of wanted rows, and find which of them are whose.

    Parameters
    ----------
    source, n_bytes, pages
        Address and number of the bytes of the column in the row group, and the pages that
        `find_pages` has found. Of those with wanted values, it is written where these lie.
    column
        The description of the column.
    runs
        Ascending, disjoint runs of the wanted rows, at least one.
    lengths
        Number of values of each wanted row; these are added to it.
    pieces
        Filled with the values of a row in a page, of all wanted rows; at most as many as there are
        rows and pages.
    functions
        Addresses of the C functions.
    memory
        Memory for all pages, decompressed, and `PADDING`.
    numbers
        If values are gene numbers, the column of each, and at last that of all larger ones; -1 is
        of no gene, as are negative numbers. Empty for other values.
    dictionary
        Filled with the values of the dictionary, or their columns; as many as the power of two that
        holds them.

    Returns
    -------
    Number of pieces.
    """
    data = carray(pointer(source), (n_bytes,), np.uint8)
    states = np.zeros(3, np.int64)
    states[0] = np.int64(functions.ctypes.data)
    if functions[codecs.DEFLATE_NEW]:
        states[1] = call(functions[codecs.DEFLATE_NEW], ())
    if functions[codecs.ZSTD_NEW]:
        states[2] = call(functions[codecs.ZSTD_NEW], ())
    n = _open_lists(
        data, pages, column, runs, lengths, pieces, functions, memory, numbers, dictionary, states
    )
    if states[1]:
        call(functions[codecs.DEFLATE_FREE], (states[1],))
    if states[2]:
        call(functions[codecs.ZSTD_FREE], (states[2],))
    return int(n)
