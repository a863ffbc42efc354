"""One part: its matrices in memory, and as an AnnData group of a zarr store."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anndata as ad
import google_crc32c
import numpy as np
import scipy.sparse as sp
import zarr
from anndata.io import write_elem
from numcodecs import blosc
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec
from zarr.codecs.numcodecs import AsType, Delta

from cellfeed.collection import Collection
from cellfeed.decode import expect_numcodecs, kernels
from cellfeed.extending import os_errors, usable_cpu_count
from cellfeed.fetch import PlannedRead, Reader, Stage, in_stages
from cellfeed.preshuffling._inputs import Inputs, table_of
from cellfeed.preshuffling._job import Job, Matrix, OutputFolder
from cellfeed.rows import Cells


class CsrPart:
    """Sparse rows of a part: filled in storage order, and taken out in shuffled order.

    Parameters
    ----------
    n_rows
        Number of rows in the part.
    n_elements
        Estimated number of elements. More fit, at the cost of a copy.
    dtype, index_dtype
        Dtypes of values and of column indices.

    Attributes
    ----------
    dtypes
        Dtypes of ``data`` and ``indices``.
    n_elements
        Number of elements so far.
    largest_count
        The largest value if all are whole numbers from 0 to 65,535, and none is -0; else None.
    pointer
        First element of each row in shuffled order, and the number of elements, int64, shape
        (n_rows + 1,).
    """

    def __init__(
        self,
        n_rows: int,
        n_elements: int,
        dtype: "np.dtype[Any]",
        index_dtype: "np.dtype[np.unsignedinteger]",
    ) -> None:
        self.dtypes: dict[str, np.dtype[Any]] = {"data": dtype, "indices": index_dtype}
        self._lengths = np.empty(n_rows, np.int64)
        self._n_rows = self.n_elements = 0
        self.largest_count: int | None = 0
        # Memory that is not written to is not taken, so there is room to spare.
        self._arrays = self._allocated(n_elements + n_elements // 4 + 1)

    def append(self, rows: sp.csr_array) -> None:
        """Add the next rows in storage order."""
        n_rows, n_elements = self._n_rows + rows.shape[0], self.n_elements + rows.indices.size
        self._lengths[self._n_rows : n_rows] = np.diff(rows.indptr)
        if self._arrays["data"].size < n_elements:
            before, self._arrays = self._arrays, self._allocated(n_elements + n_elements // 4)
            for name, array in before.items():
                self._arrays[name][: self.n_elements] = array[: self.n_elements]
        self._arrays["indices"][self.n_elements : n_elements] = rows.indices
        self._arrays["data"][self.n_elements : n_elements] = rows.data
        if self.largest_count is not None:
            self.largest_count = _largest_count(rows.data, self.largest_count)
        self._n_rows, self.n_elements = n_rows, n_elements

    def _allocated(self, n_elements: int) -> dict[str, NDArray[Any]]:
        return {name: np.empty(n_elements, dtype) for name, dtype in self.dtypes.items()}

    def shuffle(self, order: NDArray[np.intp]) -> None:
        """Put the rows into another order, without a copy of them."""
        self._firsts = (np.cumsum(self._lengths) - self._lengths)[order]
        self.pointer = np.concatenate([[0], np.cumsum(self._lengths[order])])

    @property
    def indices(self) -> NDArray[Any]:
        """Column indices in storage order."""
        return self._arrays["indices"][: self.n_elements]

    def has_indices_of(self, other: "CsrPart") -> bool:
        """Whether both have values at the same places, after the same shuffle."""
        return (
            self.indices.dtype == other.indices.dtype
            and np.array_equal(self.pointer, other.pointer)
            and np.array_equal(self.indices, other.indices)
        )

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return elements ``[start, stop)`` of ``data`` or ``indices`` in shuffled order."""
        first = np.searchsorted(self.pointer, start, side="right") - 1
        last = np.searchsorted(self.pointer, stop, side="left")
        bounds = self.pointer[first : last + 1].clip(start, stop)
        sources = self._firsts[first:last] + bounds[:-1] - self.pointer[first:last]
        array = self._arrays[name]
        elements = np.empty(stop - start, array.dtype)
        kernels.copy_all(
            array.ctypes.data + sources * array.itemsize,
            elements.ctypes.data + (bounds[:-1] - start) * array.itemsize,
            np.diff(bounds) * array.itemsize,
        )
        return elements


_LARGEST_COUNT = np.iinfo(np.uint16).max
_PIECE = 1 << 16  # elements; a few arrays of as many are in the cache


def _largest_count(values: NDArray[Any], largest: int) -> int | None:
    """Return the largest of values and ``largest``, unless `CsrPart.largest_count` is None."""
    for start in range(0, values.size, _PIECE):
        piece = values[start : start + _PIECE]
        most = piece.max()
        if not 0 <= piece.min() <= most <= _LARGEST_COUNT:  # not if one is NaN
            return None
        if piece.dtype.kind == "f" and (np.signbit(piece) | (np.floor(piece) != piece)).any():
            return None
        largest = max(largest, int(most))
    return largest


# Encoding arrays of sparse rows: shards of chunks, which threads encode concurrently.

_ABSENT = np.iinfo(np.uint64).max
_ELEMENTS_OF_A_JOB = 1 << 18  # what a thread holds of them stays in its cache, or nearly


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The encoding of chunks of elements; see ``docs/explanation/codecs.md``.

    The defaults are annbatch's: about as small as gzip 1, and several times as fast.

    Parameters
    ----------
    dtype
        Dtype of the array.
    stored
        Dtype to which elements are narrowed, which can hold all of them.
    delta
        Whether each element of a chunk is stored as its difference from the previous one.
    compressor, level
        Parameters of blosc.
    """

    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    delta: bool = False
    compressor: Literal["lz4", "lz4hc"] = "lz4"
    level: int = 3

    @classmethod
    def of(cls, job: Job, matrix: CsrPart, name: str) -> "Encoding":
        """Return the encoding of ``data`` or ``indices``."""
        dtype = matrix.dtypes[name]
        if job.codec == "delta" and name == "indices":
            return cls(dtype=dtype, stored=dtype, delta=True, level=5)
        if job.codec == "delta" and matrix.largest_count is not None:
            narrow = np.dtype(np.min_scalar_type(matrix.largest_count))
            is_narrower = narrow.itemsize < dtype.itemsize and np.can_cast(narrow, dtype)
            stored = narrow if is_narrower else dtype
            return cls(dtype=dtype, stored=stored, compressor="lz4hc", level=2)
        return cls(dtype=dtype, stored=dtype)

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
    def compressors(self) -> list[Any]:
        """The codecs of bytes, of which zarr decodes the last one first."""
        compressed = BloscCodec(
            cname=self.compressor,
            clevel=self.level,
            shuffle="shuffle",
            typesize=self.stored.itemsize,
        )
        return [compressed, Crc32cCodec()]

    def encode(self, elements: NDArray[Any], chunk: int) -> list[bytes]:
        """Return the encoded chunks of elements; the last chunk is padded with zeros."""
        stored = np.zeros((-(-elements.size // chunk), chunk), self.stored)
        stored.reshape(-1)[: elements.size] = elements
        if self.delta:
            stored[:, 1:] -= stored[:, :-1].copy()
        name = self.compressor.encode()
        compressed = (blosc.compress(row, name, self.level, blosc.SHUFFLE) for row in stored)
        return [each + _checksum(each) for each in compressed]


# A part: read, shuffled, written, and renamed when it is complete.


def write_part(
    folder: OutputFolder,
    job: Job,
    inputs: Inputs,
    number: int,
    on_share: Callable[[float], object],
) -> None:
    """Write a part as an AnnData group.

    Parameters
    ----------
    folder, job, inputs
        The output, the job, which determines chunks and shards, and its inputs.
    number
        Number of the part.
    on_share
        Called from time to time with the share of the work that is done.
    """
    expect_numcodecs()
    part = inputs.part(job, number)
    obs = inputs.obs.read(part.rows).iloc[part.order]
    matrices = _read(job, inputs.collection, part.rows, lambda share: on_share(share / 2))
    settings: dict[str, Any] = {"allow_write_nullable_strings": True}
    if hasattr(ad.settings, "auto_shard_zarr_v3"):  # later versions do so anyway
        settings["auto_shard_zarr_v3"] = True
    with (
        folder.new_part(job.first_part + number) as place,
        ad.settings.override(**settings),
        os_errors(place),
    ):
        root = zarr.create_group(place)
        root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        _write(root, "obs", obs)
        _write(root, "var", inputs.tables["var"])
        for name in ("uns", "layers", "obsm", "obsp", "varm", "varp"):
            _write(root, name, {})
        written = list[tuple[Matrix, CsrPart]]()
        for k, each in enumerate(job.matrices):
            above, _, name = each.name.rpartition("/")
            group = root.require_group(above) if above else root
            if above == "raw":
                group.attrs.update({"encoding-type": "raw", "encoding-version": "0.1.0"})
                _write(group, "var", inputs.tables[table_of(each.name)])
                _write(group, "varm", {})
            matrix = matrices[each.name]

            def of_all(share: float, k: int = k) -> None:
                on_share((1 + (k + share) / len(job.matrices)) / 2)

            if isinstance(matrix, CsrPart):
                matrix.shuffle(part.order)
                same = [other for other, before in written if matrix.has_indices_of(before)]
                twin = place / same[0].name if same else None
                _write_csr(group, name, place / each.name, job, each, matrix, twin, of_all)
                written.append((each, matrix))
            else:
                _write_dense(group, name, job, each, matrix, part.order, of_all)


def _read(
    job: Job,
    collection: Collection,
    rows: NDArray[np.int64],
    on_share: Callable[[float], object],
) -> dict[str, CsrPart | NDArray[Any]]:
    """Return the matrices of a part by name, in storage order."""
    n_rows = rows.size
    found = dict[str, CsrPart | NDArray[Any]]()
    for each in job.matrices:
        dtype = np.dtype(each.dtype)
        if each.is_sparse:
            n_elements = round(n_rows * each.elements_per_cell)
            found[each.name] = CsrPart(n_rows, n_elements, dtype, each.index_dtype)
        else:
            found[each.name] = np.empty((n_rows, *each.row_shape), dtype)
    n = job.cells_per_piece
    pieces = (rows[start : start + n] for start in range(0, n_rows, n))
    n_read = 0
    with Reader(collection) as reader:

        def planned(rows: NDArray[np.int64]) -> PlannedRead:
            return reader.plan(rows, np.arange(rows.size), rows.size).readahead()

        def read(plan: PlannedRead) -> Cells:
            return next(reader.read_planned(plan)).to_scipy()

        # One is read while the one before it is copied, and the one after it is on its way.
        with in_stages(pieces, [Stage(planned, 1), Stage(read, 1)]) as cells_read:
            for cells in cells_read:
                for name, matrix in found.items():
                    if isinstance(matrix, CsrPart):
                        matrix.append(cells[name])
                    else:
                        matrix[n_read : n_read + len(cells)] = cells[name]
                n_read += len(cells)
                on_share(n_read / n_rows)
    return found


def _write_csr(
    above: zarr.Group,
    name: str,
    folder: Path,
    job: Job,
    matrix: Matrix,
    part: CsrPart,
    twin: Path | None,
    on_share: Callable[[float], object],
) -> None:
    """Write a sparse matrix; with a twin, column indices and row pointers are linked to its."""
    n = part.n_elements
    group = above.create_group(name)
    shape = [part.pointer.size - 1, matrix.n_columns]
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
    if twin is None:
        index_dtype = np.int32 if n <= np.iinfo(np.int32).max else np.int64
        pointer = part.pointer.astype(index_dtype)
        group.create_array("indptr", data=pointer, compressors=_compressors())
    else:
        for array in ("indptr", "indices"):
            shutil.copytree(twin / array, folder / array, copy_function=_link)
    arrays = ("indices", "data") if twin is None else ("data",)
    threads = ThreadPoolExecutor(usable_cpu_count(), thread_name_prefix="cellfeed-encode")
    try:
        for k, array in enumerate(arrays):
            for n_written in _write_array(group, folder, job, matrix, part, array, threads):
                on_share((k + n_written / n) / len(arrays))
    finally:
        # Whoever interrupts it need not wait for the rest of a shard.
        threads.shutdown(cancel_futures=True)


def _link(source: str, target: str) -> None:
    """Make a hard link to a file; copy it where the file system has no such links."""
    try:
        os.link(source, target)
    except OSError:  # which of its errors says so differs between file systems
        shutil.copyfile(source, target)


def _write_array(
    group: zarr.Group,
    folder: Path,
    job: Job,
    matrix: Matrix,
    part: CsrPart,
    name: str,
    threads: Executor,
) -> Iterator[int]:
    """Write ``data`` or ``indices``; yield the number of elements that have been written."""
    n, encoding = part.n_elements, Encoding.of(job, part, name)
    chunk = max(1, min(job.elements_per_chunk(matrix), n))
    n_chunks = min(job.chunks_per_shard(matrix, encoding.dtype), max(1, -(-n // chunk)))
    group.create_array(
        name,
        shape=(n,),
        dtype=encoding.dtype,
        chunks=(chunk,),
        shards=(chunk * n_chunks,),
        filters=encoding.filters,
        compressors=encoding.compressors,
    )
    step = chunk * max(1, _ELEMENTS_OF_A_JOB // chunk)

    def encoded(start: int, stop: int) -> list[bytes]:
        return encoding.encode(part.elements(name, start, stop), chunk)

    for number, start in enumerate(range(0, n, chunk * n_chunks)):
        stop = min(start + chunk * n_chunks, n)
        steps = range(start, stop, step)
        jobs = [threads.submit(encoded, first, min(first + step, stop)) for first in steps]
        path = folder / name / "c" / str(number)
        path.parent.mkdir(exist_ok=True)
        _write_shard(path, (each for job in jobs for each in job.result()), n_chunks)
        yield stop


def _write_shard(path: Path, chunks: Iterable[bytes], n_chunks: int) -> None:
    """Write chunks one after another, and the index of their positions."""
    index = np.full((n_chunks, 2), _ABSENT, "<u8")
    filled = 0
    with path.open("wb") as file:
        for k, chunk in enumerate(chunks):
            index[k] = filled, len(chunk)
            filled += file.write(chunk)
        file.write(index.tobytes() + _checksum(index.tobytes()))


def _write_dense(
    group: zarr.Group,
    name: str,
    job: Job,
    matrix: Matrix,
    rows: NDArray[Any],
    order: NDArray[np.intp],
    on_share: Callable[[float], object],
) -> None:
    n_rows, row_shape = len(rows), rows.shape[1:]
    chunk = min(job.cells_per_chunk, n_rows)
    shard = chunk * min(job.chunks_per_shard(matrix, rows.dtype), -(-n_rows // chunk))
    # zarrs encodes the chunks of a shard in threads, without the GIL.
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        array = group.create_array(
            name,
            shape=rows.shape,
            dtype=rows.dtype,
            chunks=(chunk, *row_shape),
            shards=(shard, *row_shape),
            compressors=_compressors(),
            attributes={"encoding-type": "array", "encoding-version": "0.2.0"},
        )
        for start in range(0, n_rows, shard):
            stop = min(start + shard, n_rows)
            array[start:stop] = rows[order[start:stop]]
            on_share(stop / n_rows)


def _compressors() -> list[Any]:
    # annbatch's: about as small as gzip 1, and several times as fast to read and write.
    return [BloscCodec(cname="lz4", clevel=3, shuffle="shuffle"), Crc32cCodec()]


def _write(group: zarr.Group, name: str, element: Any) -> None:
    """Write an element with anndata; all its arrays have checksums."""
    write_elem(group, name, element, dataset_kwargs={"compressors": [ZstdCodec(), Crc32cCodec()]})


def _checksum(content: bytes) -> bytes:
    """Return the bytes that zarr's codec ``crc32c`` appends."""
    checksum: int = google_crc32c.value(content)
    return checksum.to_bytes(4, "little")
