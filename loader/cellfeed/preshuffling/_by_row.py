"""Matrices that are stored by gene (CSC), rewritten by cell in the work folder of the output.

The matrix is read once, a block of genes at a time, and each block is written by cell. A row of the
matrix is then read from all blocks. Blocks that are complete are kept when a run is stopped.
"""

import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.collection import Collection
from cellfeed.extending import FormatError
from cellfeed.fetch import PlannedRead, Reader, Stage, in_stages
from cellfeed.rows import CsrRows, Layout
from cellfeed.sources import Runs, Source, StoredElement, count_rows, expand
from cellfeed.sources.anndata import StoredCsc

_BYTES_PER_ELEMENT = 80  # in memory: of a block, what is read ahead of it, and its copy by cell
# Smaller blocks stay in caches; more than so many would make tiny pieces of each row.
_ELEMENTS = 1 << 22
_MOST_BLOCKS = 256
_ARRAYS = ("data", "indices", "indptr")
_COMPLETE = "genes.npy"  # numbers of genes in the blocks; is written when all are


class ByRow(StoredElement):
    """The rows of a matrix that is stored by gene, which are read from a copy by cell.

    Before `rewrite`, only their number, dtype and mean length are known.

    Parameters
    ----------
    location
        The file.
    genes
        The stored matrix: each of its rows is a gene.
    folder
        The folder of the copy.
    """

    layout: Layout = "csr"

    def __init__(self, location: Location, genes: StoredCsc, folder: Path) -> None:
        self._location, self._genes, self._folder = location, genes, folder
        self.shape = (genes.shape[1], genes.shape[0])
        self.dtype, self.var, self.stored_as = genes.dtype, genes.var, genes.stored_as
        self.row_order, genes.row_order = genes.row_order, None
        self._lengths_of_genes = genes.row_lengths(np.array([[0, genes.shape[0]]]))
        self.n_elements = int(self._lengths_of_genes.sum())
        self._opened: list[sp.csr_array] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        return self._genes.var_names()

    def stored_bytes(self) -> int:
        """Return the size of the stored matrix in bytes."""
        return self._genes.stored_bytes()

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of non-zeros of each row; their mean before the copy is complete."""
        if not (self._folder / _COMPLETE).exists():
            return np.full(count_rows(runs), self.n_elements // max(1, self.shape[0]), np.int64)
        rows, lengths = expand(runs), np.zeros(count_rows(runs), np.int64)
        for block in self._blocks():
            lengths += block.indptr[rows + 1] - block.indptr[rows]
        return lengths

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows of the copy."""
        rows = expand(runs)
        found = sp.hstack([block[rows] for block in self._blocks()], format="csr")
        data = found.data.astype(self.dtype, copy=False)
        return CsrRows(found.indptr, found.indices, data, self.shape[1])

    def rewrite(self, memory: int, on_elements: Callable[[int], object]) -> None:
        """Write the copy, or what is missing of it.

        Parameters
        ----------
        memory
            Bytes for buffers. A block has at least one gene.
        on_elements
            Called with the number of elements that were written.

        Raises
        ------
        FormatError
            The file is damaged, or the copy has changed since it was written.
        """
        if (self._folder / _COMPLETE).exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        most = min(max(_ELEMENTS, self.n_elements // _MOST_BLOCKS), memory // _BYTES_PER_ELEMENT)
        blocks = _cut(self._lengths_of_genes, max(1, most))
        missing = list[int]()
        for number, block in enumerate(blocks):
            if self._block(number).exists():
                on_elements(int(self._lengths_of_genes[block.start : block.stop].sum()))
            else:
                missing.append(number)
        with Reader(Collection([_Genes(self._location, self._genes)])) as reader:
            for number, genes in zip(
                missing, _read(reader, [blocks[k] for k in missing]), strict=True
            ):
                rows, new = genes.T.tocsr(), self._folder / "new"
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
                for name in _ARRAYS:
                    np.save(new / f"{name}.npy", getattr(rows, name))
                np.save(new / "digest.npy", _digest(rows))
                new.rename(self._block(number))
                on_elements(genes.nnz)
        sizes = [*map(len, blocks)]
        for number, rows in enumerate(self._open(sizes)):
            if _digest(rows) != np.load(self._block(number) / "digest.npy"):
                msg = f"{self._location}: `{self.stored_as}` was not rewritten with the same"
                remedy = f"remove {self._folder} and run the same command again"
                raise FormatError(f"{msg} elements; {remedy}")
        np.save(self._folder / "new.npy", sizes)
        (self._folder / "new.npy").rename(self._folder / _COMPLETE)

    def _block(self, number: int) -> Path:
        return self._folder / f"block-{number}"

    def _blocks(self) -> list[sp.csr_array]:
        if self._opened is None:
            self._opened = self._open(np.load(self._folder / _COMPLETE).tolist())
        return self._opened

    def _open(self, sizes: Sequence[int]) -> list[sp.csr_array]:
        """Map blocks, whose columns are consecutive genes; there are ``sizes`` of them in each."""
        blocks = list[sp.csr_array]()
        for number, size in enumerate(sizes):
            files = [self._block(number) / f"{name}.npy" for name in _ARRAYS]
            arrays = tuple(np.load(file, mmap_mode="r") for file in files)
            blocks.append(sp.csr_array(arrays, shape=(self.shape[0], size)))
        return blocks


class _Genes(Source):
    """The genes of a matrix that is stored by gene, as the rows of a collection."""

    def __init__(self, location: Location, genes: StoredElement) -> None:
        self.location = location
        self.elements = {"X": genes}

    def obs_names(self) -> tuple[str, ...]:
        """Return no names, since there are no columns."""
        return ()

    def read_obs(self, columns: Any) -> Any:
        """There is nothing to read."""
        raise NotImplementedError(columns)


def _read(reader: Reader, blocks: Sequence[range]) -> Iterator[sp.csr_array]:
    """Yield blocks of genes, one read while the one before it is rewritten."""

    def planned(block: range) -> PlannedRead:
        return reader.plan(
            np.arange(block.start, block.stop), np.arange(len(block)), len(block)
        ).readahead()

    def read(plan: PlannedRead) -> sp.csr_array:
        genes: sp.csr_array = next(reader.read_planned(plan)).to_scipy().X
        return genes

    with in_stages(blocks, [Stage(planned, 1), Stage(read, 1)]) as found:
        yield from found


def _cut(lengths: NDArray[np.int64], most: int) -> list[range]:
    """Return ranges of consecutive lengths that add up to ``most``; longer ones are alone.

    Examples
    --------
    >>> _cut(np.array([3, 3, 9, 1, 1]), 6)
    [range(0, 2), range(2, 3), range(3, 5)]
    """
    ends, ranges, start = np.cumsum(lengths), list[range](), 0
    while start < lengths.size:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        ranges.append(range(start, stop))
        start = stop
    return ranges


def _digest(rows: sp.csr_array) -> int:
    digest = 0
    for name in _ARRAYS:
        digest = zlib.crc32(getattr(rows, name).view(np.uint8), digest)
    return digest
