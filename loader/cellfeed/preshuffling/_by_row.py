"""Matrices that are stored by gene (CSC), rewritten by cell in the work folder of the output.

The matrix is read once, a block of genes at a time. Each block is sorted by bands of cells, which
are consecutive cells that fit into memory, and written to a folder of its own. Then the pieces of
each band are put together, which are in the order of the genes, and sorted by cell. Blocks and
bands that are complete are kept when a run is stopped.
"""

import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.collection import Collection
from cellfeed.decode import SlowRead
from cellfeed.extending import FormatError
from cellfeed.fetch import PlannedRead, Reader, Stage, in_stages
from cellfeed.rows import CsrChunks, CsrRows, Layout
from cellfeed.sources import Runs, Source, StoredElement, count_rows
from cellfeed.sources.anndata import StoredCsc
from cellfeed.storages.memory_maps import MappedCsr, arrays_of

# Bytes in memory for each element: of a block, what is read ahead of it, its order and its copy;
# of a band, its pieces and the rows made of them.
_BYTES_IN_BLOCK = 80
_BYTES_IN_BAND = 48
# Smaller blocks and bands stay in caches; more than so many of each would make tiny pieces.
_ELEMENTS = 1 << 22
_MOST_BLOCKS = 256
_SHAPE = "shape.npy"  # is written when the rest is complete


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
        lengths = genes.row_lengths(np.array([[0, genes.shape[0]]]))
        self.n_elements = int(lengths.sum())
        self.rows_per_chunk = 1.0
        self._rows: MappedCsr | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the columns."""
        return self._genes.var_names()

    def stored_bytes(self) -> int:
        """Return the size of the stored matrix in bytes."""
        return self._genes.stored_bytes()

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why cellfeed does not decode values as this dtype; None if it does."""
        return self._copy().slow_read(dtype) if self.is_rewritten else None

    @property
    def is_rewritten(self) -> bool:
        """Whether the copy is complete."""
        return (self._folder / _SHAPE).exists()

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of non-zeros of each row; their mean before the copy is complete."""
        if self.is_rewritten:
            return self._copy().row_lengths(runs)
        return np.full(count_rows(runs), self.n_elements // max(1, self.shape[0]), np.int64)

    def chunked(self) -> CsrChunks | None:
        """Return the location of the rows in the copy."""
        copy = self._copy()
        return None if copy.slow_read(self.dtype) else copy.chunked()

    def read_rows(self, runs: Runs) -> CsrRows:
        """Read rows of the copy."""
        return self._copy().read_rows(runs)

    def rewrite(self, memory: int, on_elements: Callable[[int], object]) -> None:
        """Write the copy, or what is missing of it.

        Parameters
        ----------
        memory
            Bytes for buffers. A block has at least one gene, and a band at least one cell.
        on_elements
            Called with the number of elements that were read or written: each is once read, and
            once written.

        Raises
        ------
        FormatError
            The file is damaged, or the copy does not have the same elements.
        """
        if self.is_rewritten:
            return
        n_cells, n_genes = self.shape
        genes_of = self._genes.row_lengths(np.array([[0, n_genes]]))
        largest = max(_ELEMENTS, self.n_elements // _MOST_BLOCKS)
        blocks = _cut(genes_of, max(1, min(largest, memory // _BYTES_IN_BLOCK)))
        most = max(1, min(largest, memory // _BYTES_IN_BAND))
        n_bands = min(max(1, n_cells), max(1, -(-self.n_elements // most)))
        band_size = max(1, -(-n_cells // n_bands))
        bounds = np.arange(0, n_cells + band_size, band_size)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sort_by_band(blocks, bounds, on_elements)
        self._write_bands(len(blocks), bounds, most, on_elements)
        np.save(self._folder / "shape-of-copy.npy", np.array(self.shape, np.int64))
        (self._folder / "shape-of-copy.npy").rename(self._folder / _SHAPE)
        for folder in self._folder.glob("block-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _copy(self) -> MappedCsr:
        if self._rows is None:
            folder = Location.of(self._folder)
            arrays = arrays_of(folder)
            self._rows = MappedCsr(folder, arrays, range(self.shape[0]), None, self.shape[1])
        return self._rows

    def _sort_by_band(
        self, blocks: list[slice], bounds: NDArray[np.int64], on_elements: Callable[[int], object]
    ) -> None:
        """Read blocks of genes, and write the elements of each sorted by band of cells."""
        missing = list[tuple[int, slice]]()
        for number, block in enumerate(blocks):
            if (folder := self._folder / f"block-{number}").exists():
                on_elements(np.load(folder / "cells.npy", mmap_mode="r").size)
            else:
                missing.append((number, block))
        band_size = int(bounds[1]) if bounds.size > 1 else 1
        band_dtype = np.min_scalar_type(bounds.size)
        for (number, block), genes in zip(missing, self._read(missing), strict=True):
            first, n_elements = block.start, genes.indices.size
            gene = np.repeat(
                np.arange(first, first + genes.shape[0], dtype=np.int32), np.diff(genes.indptr)
            )
            band = (genes.indices // band_size).astype(band_dtype)
            order = np.argsort(band, kind="stable")
            ends = np.cumsum(np.bincount(band, minlength=bounds.size - 1))
            new = self._folder / f"new-{number}"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            arrays = {
                "cells": genes.indices[order],
                "genes": gene[order],
                "data": genes.data[order],
            }
            for name, array in arrays.items():
                np.save(new / f"{name}.npy", array)
            np.save(new / "ends.npy", np.concatenate([[0], ends]).astype(np.int64))
            np.save(new / "digest.npy", _digest(genes.indices, gene, genes.data))
            new.rename(self._folder / f"block-{number}")
            on_elements(n_elements)

    def _read(self, blocks: list[tuple[int, slice]]) -> Iterator[Any]:
        """Yield blocks of genes, one read while the one before it is sorted."""
        with Reader(Collection([_Genes(self._location, self._genes)])) as reader:

            def planned(block: tuple[int, slice]) -> PlannedRead:
                rows = np.arange(block[1].start, block[1].stop)
                return reader.plan(rows, np.arange(rows.size), rows.size).readahead()

            def read(plan: PlannedRead) -> Any:
                return next(reader.read_planned(plan)).to_scipy().X

            with in_stages(blocks, [Stage(planned, 1), Stage(read, 1)]) as found:
                yield from found

    def _write_bands(
        self,
        n_blocks: int,
        bounds: NDArray[np.int64],
        most: int,
        on_elements: Callable[[int], object],
    ) -> None:
        """Write the rows of each band from its pieces in all blocks."""
        folders = [self._folder / f"block-{number}" for number in range(n_blocks)]
        ends = np.array([np.load(each / "ends.npy") for each in folders]).reshape(n_blocks, -1)
        n_elements = int(ends[:, -1].sum())
        files = self._files(n_elements)
        start, digest = 0, np.uint64(0)
        for band, cells in enumerate(_bands(bounds, self.shape[0])):
            n_in_band = int((ends[:, band + 1] - ends[:, band]).sum())
            done = self._folder / f"band-{band}.npy"
            if not done.exists():
                pieces = [
                    {
                        name: np.load(each / f"{name}.npy", mmap_mode="r")[lo:hi]
                        for name in ("cells", "genes", "data")
                    }
                    for each, (lo, hi) in zip(
                        folders, ends[:, band : band + 2].tolist(), strict=True
                    )
                    if lo < hi
                ]
                of_band = self._write_band(files, pieces, cells, start, most)
                for file in files.values():
                    if isinstance(file, np.memmap):
                        file.flush()
                np.save(self._folder / "new-band.npy", of_band)
                (self._folder / "new-band.npy").rename(done)
            with np.errstate(over="ignore"):
                digest += np.load(done)[()]
            start += n_in_band
            on_elements(n_in_band)
        with np.errstate(over="ignore"):
            expected = sum((np.load(each / "digest.npy")[()] for each in folders), np.uint64(0))
        if digest != expected:
            msg = (
                f"{self._location}: `{self.stored_as}` was not rewritten with the same elements; "
                f"remove {self._folder} and run the same command again"
            )
            raise FormatError(msg)

    def _write_band(
        self,
        files: dict[str, NDArray[Any]],
        pieces: list[dict[str, NDArray[Any]]],
        cells: range,
        start: int,
        most: int,
    ) -> np.uint64:
        """Write consecutive rows, which begin at element ``start``; return their digest."""
        lengths = np.zeros(len(cells), np.int64)
        for piece in pieces:
            lengths += np.bincount(piece["cells"] - cells.start, minlength=len(cells))
        digest = np.uint64(0)
        for group in _cut(lengths, most):  # several only if the band has more than its share
            within = [
                np.flatnonzero((piece["cells"] >= cells.start + group.start)
                               & (piece["cells"] < cells.start + group.stop))
                if group != slice(0, len(cells)) else slice(None)
                for piece in pieces
            ]  # fmt: skip
            found = {
                name: np.concatenate(
                    [files[dtype][:0], *(p[name][w] for p, w in zip(pieces, within, strict=True))]
                )
                for name, dtype in (("cells", "indices"), ("genes", "indices"), ("data", "data"))
            }
            found["cells"] -= found["cells"].dtype.type(cells.start + group.start)
            pointer = np.concatenate(
                [[0], np.cumsum(np.bincount(found["genes"], minlength=self.shape[1]))]
            )
            shape = (group.stop - group.start, self.shape[1])
            rows = sp.csc_array((found["data"], found["cells"], pointer), shape=shape).tocsr()
            stop = start + rows.indices.size
            files["data"][start:stop], files["indices"][start:stop] = rows.data, rows.indices
            own = cells.start + group.start
            files["indptr"][own + 1 : own + shape[0] + 1] = rows.indptr[1:].astype(np.int64) + start
            cell = np.repeat(np.arange(own, own + shape[0]), np.diff(rows.indptr))
            with np.errstate(over="ignore"):
                digest += _digest(cell, rows.indices, rows.data)
            start = stop
        return digest

    def _files(self, n_elements: int) -> dict[str, NDArray[Any]]:
        """Map the arrays of the copy, making them if need be."""
        wanted: dict[str, tuple[np.dtype[Any], int]] = {
            "indptr": (np.dtype(np.int64), self.shape[0] + 1),
            "indices": (np.dtype(np.int32), n_elements),
            "data": (self.dtype, n_elements),
        }
        files = dict[str, NDArray[Any]]()
        for name, (dtype, size) in wanted.items():
            path = self._folder / f"{name}.npy"
            if not size:  # nothing can be mapped
                np.save(path, np.empty(0, dtype))
                files[name] = np.empty(0, dtype)
            elif path.exists():
                files[name] = open_memmap(path, mode="r+")
            else:
                files[name] = open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
        return files


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


def _bands(bounds: NDArray[np.int64], n_cells: int) -> Iterator[range]:
    for first, stop in pairwise(bounds.tolist()):
        yield range(first, min(stop, n_cells))


def _cut(lengths: NDArray[np.int64], most: int) -> list[slice]:
    """Return slices of consecutive lengths that add up to ``most``; longer ones are alone.

    Examples
    --------
    >>> _cut(np.array([3, 3, 9, 1, 1]), 6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    ends, slices, start = np.cumsum(lengths), list[slice](), 0
    while start < lengths.size:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        slices.append(slice(start, stop))
        start = stop
    return slices


_A, _B, _C = (
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
)
_PIECE = 1 << 16


def _digest(cells: NDArray[Any], genes: NDArray[Any], data: NDArray[Any]) -> np.uint64:
    """Return a digest of elements that does not depend on their order.

    It is the sum, modulo 2^64, of a hash of each element's cell, gene and bits.
    """
    total = np.uint64(0)
    words = data.dtype.itemsize if data.dtype.itemsize in (1, 2, 4, 8) else 1
    bits = data.view(f"u{words}").reshape(data.size, data.dtype.itemsize // words)
    with np.errstate(over="ignore"):
        for start in range(0, data.size, _PIECE):
            piece = slice(start, start + _PIECE)
            hashed = cells[piece].astype(np.uint64) * _A + genes[piece].astype(np.uint64) * _B
            for word in bits[piece].T:
                hashed ^= hashed >> np.uint64(29)
                hashed += word
                hashed *= _C
            hashed ^= hashed >> np.uint64(32)
            hashed *= _A
            total += hashed.sum(dtype=np.uint64)
    return total
