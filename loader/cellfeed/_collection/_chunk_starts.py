"""Which rows of a collection are the first to begin in a chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

from cellfeed._chunks import ChunkedArray
from cellfeed._layouts import CsrChunks, DenseChunks, RaggedRuns
from cellfeed._reading import load_tables
from cellfeed._sources import StoredElement
from cellfeed.sampling import ChunkedRows

__all__ = ["StoredRows"]


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Reads how the rows of an element are divided into chunks.

    Parameters
    ----------
    elements
        The element of each source.
    are_remote
        Whether any of them is on a server.
    """

    elements: Sequence[StoredElement]
    are_remote: bool

    def __call__(self) -> Sequence[ChunkedRows]:
        """Return the rows of each source."""
        with_rows = [each for each in self.elements if each.shape[0]]
        load_tables(with_rows, are_remote=self.are_remote)
        return [_chunked_rows(each) for each in self.elements]


def _chunked_rows(stored: StoredElement) -> ChunkedRows:
    n_rows = stored.shape[0]
    # Neighbours among cells that are stored in another order are no neighbours in chunks.
    chunks = stored.chunked() if n_rows and stored.row_order is None else None
    match chunks:
        case CsrChunks(row_pieces=None):
            size = max(_elements_of_chunk(each) for each in (chunks.indices, chunks.data))
            return ChunkedRows(n_rows=n_rows, chunk_size=size, pointer=chunks.indptr)
        case RaggedRuns():
            size = _elements_of_chunk(chunks.values)
            return ChunkedRows(n_rows=n_rows, chunk_size=size, pointer=chunks.indptr)
        case DenseChunks(values=ChunkedArray() as values) if chunks.n_columns:
            row_size = 1 if len(values.shape) > 1 else chunks.n_columns
            size = _elements_of_chunk(values)
            return ChunkedRows(n_rows=n_rows, chunk_size=size, row_size=row_size)
    return ChunkedRows(n_rows=n_rows)


def _elements_of_chunk(array: ChunkedArray) -> int:
    """Return the size of a chunk, in elements or rows; 0 if parts of chunks can be read."""
    return array.chunk_shape[0] if array.is_decoded_whole else 0
