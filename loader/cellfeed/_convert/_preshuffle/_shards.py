"""An array of sparse rows as shards of chunks, which threads encode concurrently."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
import zarr
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numcodecs import blosc
from numpy.typing import NDArray
from zarr.codecs import BloscCodec
from zarr.codecs.numcodecs import AsType, Delta

from cellfeed._compiled import compiled

# LZ4 compression, in Blosc's frame, of small numbers that repeat often.
#
# Counts of single cells are mostly 1, 2 and 3. LZ4HC searches for matches by four bytes, which
# occur
# at hundreds of places in its window, and tries only the nearest 64. Here matches are searched for
# by
# eight bytes, which occur rarely, so that the longest match is found in less time.

_HASH_BITS = 15
_WINDOW = 1 << 16
_LONG, _SHORT = 8, 5  # bytes that are hashed to find matches
_ATTEMPTS = 16
_LONG_ENOUGH = 64  # length at which the search stops
_WORTH_A_LITERAL = 3  # bytes by which a match at the next place must be longer
_LONG_ENOUGH_TO_TAKE = 14  # length from which the next place is not tried
_LEAST_MATCH = 4
_LAST_LITERALS, _LAST_MATCH = 5, 12  # bytes at the end that are in no match, and begin none
_MOST_IN_TOKEN, _BYTE = 15, 255

_HEADER_BYTES = 16
_BLOSC_FORMAT, _LZ4_FORMAT = 2, 1
_SHUFFLED, _STORED, _OF_LZ4 = 1, 2, 1 << 5
_LEAST_SPLIT = 128  # elements of a block whose bytes are compressed separately
_BLOCK_ELEMENTS = 1 << 17

_I64 = ir.IntType(64)


def _load_word(typingctx: Any, address: Any) -> Any:  # noqa: ARG001 - numba fixes what it takes
    """Return the eight bytes at an address."""
    signature = types.uint64(types.int64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return builder.load(builder.inttoptr(values[0], _I64.as_pointer()), align=1)

    return signature, codegen


def _count_trailing_zeros(typingctx: Any, word: Any) -> Any:  # noqa: ARG001
    """Return the number of trailing zero bits of a nonzero number."""
    signature = types.int64(types.uint64)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 1))

    return signature, codegen


_word, _trailing_zeros = intrinsic(_load_word), intrinsic(_count_trailing_zeros)


@compiled("int64(uint64, int64)")
def _hash(word: Any, n_bytes: int) -> Any:
    """Return a hash below 2^15 of the first bytes of a word."""
    shifted = word << np.uint64(64 - 8 * n_bytes)
    return np.int64((shifted * np.uint64(0x9E3779B185EBCA87)) >> np.uint64(64 - _HASH_BITS))


@compiled("int64(int64, int64, int64)")
def _common(earlier: int, later: int, end: int) -> Any:
    """Return how many bytes at two addresses agree, up to the end of the later ones."""
    n = 0
    while later + n + 8 <= end:
        difference = _word(earlier + n) ^ _word(later + n)
        if difference:
            return n + (_trailing_zeros(difference) >> 3)
        n += 8
    rest = end - later - n
    if rest > 0:  # bytes after the end do not count
        difference = _word(earlier + n) ^ _word(later + n)
        n += min(rest, _trailing_zeros(difference) >> 3) if difference else rest
    return n


@compiled("int64(uint8[::1], int64, int64)")
def _put_length(out: NDArray[np.uint8], at: int, length: int) -> int:
    """Write the part of a length that does not fit in its token; return where it ends."""
    while length >= _BYTE:
        out[at] = _BYTE
        length -= _BYTE
        at += 1
    out[at] = length
    return at + 1


@compiled("int64(uint8[::1], int64, uint8[::1], int64, int64, int64, int64)")
def _put_sequence(
    out: NDArray[np.uint8],
    at: int,
    source: NDArray[np.uint8],
    anchor: int,
    first: int,
    offset: int,
    length: int,
) -> int:
    """Write literals from ``anchor`` up to ``first``, and a match if it is long; return the end."""
    n_literals = first - anchor
    further = length - _LEAST_MATCH
    token = at
    at += 1
    out[token] = min(n_literals, _MOST_IN_TOKEN) << 4
    if n_literals >= _MOST_IN_TOKEN:
        at = _put_length(out, at, n_literals - _MOST_IN_TOKEN)
    for k in range(n_literals):
        out[at + k] = source[anchor + k]
    at += n_literals
    if length:
        out[at] = offset & 255
        out[at + 1] = offset >> 8
        at += 2
        out[token] |= min(further, _MOST_IN_TOKEN)
        if further >= _MOST_IN_TOKEN:
            at = _put_length(out, at, further - _MOST_IN_TOKEN)
    return at


@compiled("Tuple((int64, int64))(uint8[::1], int64, int64, int64, int32[:,::1], int32[::1])")
def _longest_match(
    source: NDArray[np.uint8],
    n: int,
    i: int,
    least: int,
    heads: NDArray[np.int32],
    earlier: NDArray[np.int32],
) -> Any:
    """Return length and place of the longest match at ``i`` above ``least``; else ``least``."""
    base = source.ctypes.data
    end = base + n - _LAST_LITERALS
    word = _word(base + i)
    length, best = least, -1
    candidate = heads[0, _hash(word, _LONG)]
    for _ in range(_ATTEMPTS):
        if candidate < 0 or i - candidate >= _WINDOW:
            break
        # The last bytes of the longest match so far, and the byte after it, rule out most that are
        # not longer.
        back = min(length, 7)
        later = _word(base + i + length - back)
        difference = _word(base + candidate + length - back) ^ later
        if not difference << np.uint64(8 * (7 - back)):
            found = _common(base + candidate, base + i, end)
            if found > length:
                length, best = found, candidate
                if length >= _LONG_ENOUGH:
                    return length, best
        candidate = earlier[candidate & (_WINDOW - 1)]
    if length < _LONG:
        candidate = heads[1, _hash(word, _SHORT)]
        if candidate >= 0 and i - candidate < _WINDOW:
            found = _common(base + candidate, base + i, end)
            if found > length:
                length, best = found, candidate
    return length, best


@compiled("int64(uint8[::1], int64, int64, int32[:,::1], int32[::1])")
def _note_places(
    source: NDArray[np.uint8],
    first: int,
    stop: int,
    heads: NDArray[np.int32],
    earlier: NDArray[np.int32],
) -> int:
    """Enter places up to ``stop`` in the search tables; return the first place not entered."""
    base = source.ctypes.data
    for place in range(first, stop):
        word = _word(base + place)
        hashed = _hash(word, _LONG)
        earlier[place & (_WINDOW - 1)] = heads[0, hashed]
        heads[0, hashed] = place
        heads[1, _hash(word, _SHORT)] = place
    return max(first, stop)


@compiled("int64(uint8[::1], int64, uint8[::1], int64, int32[:,::1], int32[::1])")
def _lz4(
    source: NDArray[np.uint8],
    n: int,
    out: NDArray[np.uint8],
    start: int,
    heads: NDArray[np.int32],
    earlier: NDArray[np.int32],
) -> Any:
    """Compress the first ``n`` bytes, which eight more must follow; return where the output ends.

    Parameters
    ----------
    source, n
        The input.
    out, start
        The output, with room for incompressible input.
    heads
        Scratch memory for the last place of each hash, of `_LONG` and of `_SHORT` bytes.
    earlier
        Scratch memory for the previous place with the same hash.
    """
    heads[:] = -1
    at, anchor, i, noted = start, 0, 0, 0
    while i <= n - _LAST_MATCH:
        noted = _note_places(source, noted, i, heads, earlier)
        length, match = _longest_match(source, n, i, _LEAST_MATCH - 1, heads, earlier)
        if match < 0:
            i += 1
            continue
        # One more literal takes a byte, which a match longer by `_WORTH_A_LITERAL` saves.
        while length < _LONG_ENOUGH_TO_TAKE and i < n - _LAST_MATCH - length:
            noted = _note_places(source, noted, i + 1, heads, earlier)
            least = length + _WORTH_A_LITERAL - 1
            longer, better = _longest_match(source, n, i + 1, least, heads, earlier)
            if better < 0:
                break
            length, match = longer, better
            i += 1
        at = _put_sequence(out, at, source, anchor, i, i - match, length)
        i += length
        anchor = i
    return _put_sequence(out, at, source, anchor, n, 0, 0)


@compiled("int64(uint8[::1], int64, uint8[::1], int64, int32[:,::1], int32[::1])")
def _stream(
    source: NDArray[np.uint8],
    n: int,
    out: NDArray[np.uint8],
    start: int,
    heads: NDArray[np.int32],
    earlier: NDArray[np.int32],
) -> Any:
    """Write a stream of Blosc: its size, and compressed data, or stored data if not larger."""
    end = _lz4(source, n, out, start + 4, heads, earlier)
    if end - start - 4 >= n:
        out[start + 4 : start + 4 + n] = source[:n]
        end = start + 4 + n
    out[start : start + 4].view(np.int32)[0] = end - start - 4
    return end


_frames = [
    f"int64({word}[::1], uint8[::1], uint8[::1], int32[:,::1], int32[::1])"
    for word in ("uint8", "uint16")
]


@compiled(*_frames)
def _frame(
    elements: Any,
    out: NDArray[np.uint8],
    plane: NDArray[np.uint8],
    heads: NDArray[np.int32],
    earlier: NDArray[np.int32],
) -> Any:
    """Write blocks after the header of a frame; return where they end.

    Bytes of elements are shuffled: the lowest bytes come first. Each byte plane is compressed
    separately, except in a last, shorter block, and in very short blocks.
    """
    itemsize = elements.itemsize
    block = min(elements.size, _BLOCK_ELEMENTS)
    n_blocks = (elements.size + block - 1) // block
    at = _HEADER_BYTES + 4 * n_blocks
    for b in range(n_blocks):
        out[_HEADER_BYTES + 4 * b : _HEADER_BYTES + 4 * b + 4].view(np.int32)[0] = at
        first = b * block
        n = min(block, elements.size - first)
        is_split = n == block and n >= _LEAST_SPLIT
        filled = 0
        for k in range(itemsize):
            for j in range(n):
                plane[filled + j] = (elements[first + j] >> (8 * k)) & 255
            filled += n
            if is_split or k == itemsize - 1:
                at = _stream(plane, filled, out, at, heads, earlier)
                filled = 0
    return at


def compress(chunks: NDArray[np.unsignedinteger[Any]]) -> list[bytes]:
    """Compress chunks as Blosc does with LZ4, for any decompressor of Blosc.

    Parameters
    ----------
    chunks
        uint8 or uint16, shape (n_chunks, n_elements), each of which is less than 1 GiB.
    """
    itemsize, n_bytes = chunks.itemsize, chunks.shape[1] * chunks.itemsize
    block = min(chunks.shape[1], _BLOCK_ELEMENTS) * itemsize
    n_blocks = -(-n_bytes // block)
    room = _HEADER_BYTES + n_bytes + n_bytes // 255 + n_blocks * (4 + itemsize * 24)
    out = np.empty(room, np.uint8)
    plane = np.zeros(block + _LONG, np.uint8)
    heads = np.empty((2, 1 << _HASH_BITS), np.int32)
    earlier = np.empty(_WINDOW, np.int32)
    compressed = list[bytes]()
    for elements in chunks:
        end = _frame(elements, out, plane, heads, earlier)
        flags = _OF_LZ4 | (_SHUFFLED if itemsize > 1 else 0)
        if end >= _HEADER_BYTES + n_bytes:
            flags, end = flags | _STORED, _HEADER_BYTES + n_bytes
            out[_HEADER_BYTES:end] = elements.view(np.uint8)
        out[:4] = _BLOSC_FORMAT, _LZ4_FORMAT, flags, itemsize
        out[4:_HEADER_BYTES].view("<u4")[:] = n_bytes, block, end
        compressed.append(out[:end].tobytes())
    return compressed


Elements = Callable[[int, int], NDArray[Any]]

_ABSENT = np.iinfo(np.uint64).max
_ELEMENTS_OF_A_JOB = 1 << 18  # what a thread holds of them stays in its cache, or nearly
_LEAST_COMPRESSED_HERE = 1 << 14  # elements; of fewer LZ4HC makes less
_SHUFFLES: dict[Literal["shuffle", "bitshuffle"], int] = {
    "shuffle": blosc.SHUFFLE,
    "bitshuffle": blosc.BITSHUFFLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The encoding of chunks of elements: filters of numcodecs, and blosc.

    Parameters
    ----------
    dtype
        Dtype of the array.
    stored
        Dtype to which elements are narrowed, which can hold all of them.
    delta
        Whether each element of a chunk is stored as its difference from the previous one.
    compressor, level, shuffle
        Parameters of blosc.
    """

    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    delta: bool
    compressor: Literal["lz4", "lz4hc"]
    level: int
    shuffle: Literal["shuffle", "bitshuffle"] = "shuffle"

    @property
    def filters(self) -> list[Any]:
        """The filters that zarr decodes after blosc."""
        filters: list[Any] = []
        if self.stored != self.dtype:
            filters.append(AsType(encode_dtype=self.stored.str, decode_dtype=self.dtype.str))
        if self.delta:
            filters.append(Delta(dtype=self.stored.str))
        return filters

    @property
    def blosc(self) -> BloscCodec:
        """The blosc codec, which zarr decodes first."""
        return BloscCodec(
            cname=self.compressor,
            clevel=self.level,
            shuffle=self.shuffle,
            typesize=self.stored.itemsize,
        )

    def encode(self, elements: NDArray[Any], chunk: int) -> list[bytes]:
        """Return the encoded chunks of elements; the last chunk is filled with zeros."""
        n_chunks = -(-elements.size // chunk)
        stored = np.zeros((n_chunks, chunk), self.stored)
        stored.reshape(-1)[: elements.size] = elements
        if self.delta:
            stored[:, 1:] -= stored[:, :-1].copy()
        if self.compressor == "lz4hc" and self._is_compressed_here(chunk):
            return compress(stored)
        name = self.compressor.encode()
        return [blosc.compress(row, name, self.level, _SHUFFLES[self.shuffle]) for row in stored]

    def _is_compressed_here(self, chunk: int) -> bool:
        """Return whether our compressor takes a third of LZ4HC's time, for at most its size."""
        return self.stored.str in ("|u1", "<u2") and chunk >= _LEAST_COMPRESSED_HERE


def plain_encoding(dtype: np.dtype[Any]) -> Encoding:
    """Return annbatch's encoding: about as small as gzip 1, and several times as fast."""
    return Encoding(dtype=dtype, stored=dtype, delta=False, compressor="lz4", level=3)


def sums_encoding(dtype: np.dtype[Any]) -> Encoding:
    """Return the encoding of ascending column indices; see ``docs/explanation/codecs.md``."""
    return Encoding(dtype=dtype, stored=dtype, delta=True, compressor="lz4", level=5)


def counts_encoding(dtype: np.dtype[Any], stored: np.dtype[Any]) -> Encoding:
    """Return the encoding of repetitive counts; see ``docs/explanation/codecs.md``."""
    return Encoding(dtype=dtype, stored=stored, delta=False, compressor="lz4hc", level=7)


def write_array(
    group: zarr.Group,
    folder: Path,
    name: str,
    encoding: Encoding,
    elements: Elements,
    n_elements: int,
    *,
    chunk: int,
    chunks_per_shard: int,
    threads: Executor,
    on_written: Callable[[int], object],
) -> None:
    """Write a one-dimensional array.

    Parameters
    ----------
    group, folder
        The group of the array, and its folder.
    name, encoding
        Name and encoding of the array.
    elements
        Returns elements ``[start, stop)``; called by threads.
    n_elements
        Number of elements.
    chunk, chunks_per_shard
        Number of elements in a chunk, and of chunks in a shard.
    threads
        Threads that encode.
    on_written
        Called with the number of elements that have been written.
    """
    chunk = max(1, min(chunk, n_elements))
    shard = chunk * min(chunks_per_shard, max(1, -(-n_elements // chunk)))
    group.create_array(
        name,
        shape=(n_elements,),
        dtype=encoding.dtype,
        chunks=(chunk,),
        shards=(shard,),
        filters=encoding.filters,
        compressors=encoding.blosc,
    )
    step = chunk * max(1, _ELEMENTS_OF_A_JOB // chunk)

    def encoded(first: int, stop: int) -> list[bytes]:
        return encoding.encode(elements(first, stop), chunk)

    for number, start in enumerate(range(0, n_elements, shard)):
        end = min(start + shard, n_elements)
        jobs = [
            threads.submit(encoded, first, min(first + step, end))
            for first in range(start, end, step)
        ]
        path = folder / name / "c" / str(number)
        path.parent.mkdir(exist_ok=True)
        _write_shard(path, (each for job in jobs for each in job.result()), shard // chunk)
        on_written(end)


def _write_shard(path: Path, chunks: Iterator[bytes], n_chunks: int) -> None:
    """Write chunks one after another, and the index of their positions."""
    index = np.full((n_chunks, 2), _ABSENT, "<u8")
    filled = 0
    with path.open("wb") as file:
        for k, chunk in enumerate(chunks):
            index[k] = filled, len(chunk)
            filled += file.write(chunk)
        file.write(index.tobytes())
        file.write(google_crc32c.value(index.tobytes()).to_bytes(4, "little"))
