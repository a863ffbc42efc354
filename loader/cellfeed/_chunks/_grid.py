"""The grid of chunks that an array is cut into."""

from collections.abc import Sequence

__all__ = ["chunk_grid"]


def chunk_grid(shape: Sequence[int], chunk_shape: Sequence[int]) -> tuple[int, ...]:
    """Return how many chunks there are along each dimension; those at the border may be partial.

    Examples
    --------
    >>> chunk_grid((10, 4), (3, 4))
    (4, 1)
    """
    return tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))
