"""The chunk grid of an array."""

import math
from collections.abc import Sequence

__all__ = ["check_grid", "chunk_grid", "holds_whole_rows", "in_two_dimensions"]

_LARGEST_BEYOND = 1 << 30  # bytes that a chunk, or a table of chunks, may take beyond its array
_TABLE_BYTES = 16  # of one chunk: where it lies, and how large it is
_TWO = 2
_MOST_BYTES = (1 << 63) - 1  # which addresses count


def chunk_grid(shape: Sequence[int], chunk_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks along each dimension; those at the border may be partial.

    Examples
    --------
    >>> chunk_grid((10, 4), (3, 4))
    (4, 1)
    """
    return tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))


def holds_whole_rows(shape: Sequence[int], chunk_shape: Sequence[int]) -> bool:
    """Return whether chunks contain consecutive whole rows."""
    return tuple(shape[1:]) == tuple(chunk_shape[1:])


def in_two_dimensions(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with all dimensions after the first flattened into one.

    Examples
    --------
    >>> in_two_dimensions((10, 32, 32, 3)), in_two_dimensions((10,))
    ((10, 3072), (10,))
    """
    return tuple(shape) if len(shape) <= _TWO else (shape[0], math.prod(shape[1:]))


def check_grid(
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    itemsize: int,
    *,
    shard_shape: Sequence[int] | None = None,
) -> None:
    """Check that the metadata of an array are possible, before allocating memory for it.

    Chunks may extend beyond the array, since those at the border are stored whole, but the memory
    for one chunk, and for the table of all chunks, must be at most that of the array or 1 GiB.

    Parameters
    ----------
    shape, chunk_shape
        Shapes of the array and of a chunk; Python integers, which cannot overflow.
    itemsize
        Bytes per element.
    shard_shape
        Shape of a shard, a file with many chunks, if there are shards.

    Raises
    ------
    ValueError
        The metadata are impossible.

    Examples
    --------
    >>> check_grid((10, 4), (1000, 4), 4)
    >>> check_grid((10, 4), (1 << 32, 1 << 32), 4)
    Traceback (most recent call last):
    ValueError: chunks of shape (4294967296, 4294967296) take 73786976294838206464 bytes each, ...
    """
    n_bytes = math.prod(shape) * itemsize
    if any(n < 0 for n in shape) or n_bytes > _MOST_BYTES:
        raise ValueError(f"an array cannot have shape {tuple(shape)}")
    if n_bytes == 0:
        return
    for part in (chunk_shape, shard_shape or chunk_shape):
        if len(part) != len(shape) or any(n < 1 for n in part):
            raise ValueError(f"an array of shape {tuple(shape)} cannot have chunks of shape {part}")
    largest = max(n_bytes, _LARGEST_BEYOND)
    chunk_bytes = math.prod(chunk_shape) * itemsize
    if chunk_bytes > largest:
        msg = (
            f"chunks of shape {tuple(chunk_shape)} take {chunk_bytes} bytes each, "
            f"but the array of shape {tuple(shape)} only {n_bytes}"
        )
        raise ValueError(msg)
    n_chunks = math.prod(chunk_grid(shape, chunk_shape))
    if shard_shape is not None:
        if any(n % c for n, c in zip(shard_shape, chunk_shape, strict=True)):
            msg = (
                f"shards of shape {tuple(shard_shape)} are not a multiple of chunks of shape "
                f"{tuple(chunk_shape)}"
            )
            raise ValueError(msg)
        n_chunks = max(n_chunks, math.prod(chunk_grid(shard_shape, chunk_shape)))
    if n_chunks * _TABLE_BYTES > largest:
        msg = (
            f"the table of {n_chunks} chunks takes more bytes than the array of shape "
            f"{tuple(shape)}, which takes {n_bytes}"
        )
        raise ValueError(msg)
