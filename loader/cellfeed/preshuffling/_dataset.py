"""One part as an AnnData group of a zarr store, and its matrix in memory."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anndata as ad
import google_crc32c
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from anndata.io import write_elem
from numcodecs import blosc
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec
from zarr.codecs.numcodecs import AsType, Delta

from cellfeed.decode import expect_numcodecs, kernels
from cellfeed.extending import os_errors, usable_cpu_count
from cellfeed.preshuffling._inputs import Inputs, table_of
from cellfeed.preshuffling._job import Job, Matrix


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


def write_dataset(
    folder: Path,
    job: Job,
    inputs: Inputs,
    *,
    matrices: Mapping[str, CsrPart | NDArray[Any]],
    order: NDArray[np.intp],
    obs: pd.DataFrame,
    frames: Mapping[str, pd.DataFrame],
    on_share: Callable[[float], object],
) -> None:
    """Write an AnnData group, or a group of MuData.

    Parameters
    ----------
    folder
        A folder that does not exist yet.
    job, inputs
        The job, which determines chunks and shards, and its inputs.
    matrices, order
        The matrices in storage order, by name, and the order in which their rows are written.
    obs, frames
        The table of the cells, and data frames of ``obsm`` by name, in the order in which they are
        written.
    on_share
        Called with the share of the matrices that is written.
    """
    expect_numcodecs()
    settings: dict[str, Any] = {"allow_write_nullable_strings": True}
    if hasattr(ad.settings, "auto_shard_zarr_v3"):  # later versions do so anyway
        settings["auto_shard_zarr_v3"] = True
    with ad.settings.override(**settings), os_errors(folder):
        root = zarr.create_group(folder)
        if inputs.modalities is None:
            _write_tables(root, "", inputs, obs)
        else:
            _write_mudata(root, inputs, obs)
        for name, frame in frames.items():
            above, _, own_name = name.rpartition("/")
            _write(root.require_group(above), own_name, frame.set_axis(obs.index))
        written = list[tuple[Matrix, CsrPart]]()
        for k, each in enumerate(job.matrices):
            if each.path.endswith("raw/X"):
                raw = root.create_group(each.path[: -len("/X")])
                raw.attrs.update({"encoding-type": "raw", "encoding-version": "0.1.0"})
                _write(raw, "var", inputs.tables[table_of(each.path)])
                _write(raw, "varm", {})
            matrix = matrices[each.name]
            above, _, name = each.path.rpartition("/")
            group = root.require_group(above) if above else root

            def of_all(share: float, k: int = k) -> None:
                on_share((k + share) / len(job.matrices))

            if isinstance(matrix, CsrPart):
                matrix.shuffle(order)
                same = [other for other, part in written if matrix.has_indices_of(part)]
                twin = folder / same[0].path if same else None
                _write_csr(group, name, folder / each.path, job, each, matrix, twin, of_all)
                written.append((each, matrix))
            else:
                _write_dense(group, name, job, each, matrix, order, of_all)


def _write_tables(group: zarr.Group, within: str, inputs: Inputs, obs: pd.DataFrame) -> None:
    """Write an AnnData object without its matrices."""
    group.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    _write(group, "obs", obs)
    _write(group, "var", inputs.tables[f"{within}var"])
    _write(group, "uns", inputs.uns.get(f"{within}uns", {}))
    for name in ("layers", "obsm", "obsp", "varm", "varp"):
        _write(group, name, {})


def _write_mudata(root: zarr.Group, inputs: Inputs, obs: pd.DataFrame) -> None:
    """Write MuData without its matrices; all its modalities have all cells.

    obs of a modality gets the columns that `MuDataSource` names after it, such as ``rna:plate``.
    """
    modalities = inputs.modalities or ()
    root.attrs.update({"encoding-type": "MuData", "encoding-version": "0.1.0", "axis": 0})
    above = root.create_group("mod", attributes={"mod-order": list(modalities)})
    names, first = [inputs.tables[f"mod/{each}/var"].index for each in modalities], 0
    n_vars, varmap = sum(map(len, names)), dict[str, Any]()
    shared = list(obs.columns)
    for modality, own in zip(modalities, names, strict=True):
        prefix = f"{modality}:"
        columns = [name for name in obs.columns if name.startswith(prefix)]
        own_names = [name.removeprefix(prefix) for name in columns]
        shared = [name for name in shared if name not in columns]
        of_modality = obs[columns].rename(columns=dict(zip(columns, own_names, strict=True)))
        _write_tables(above.create_group(modality), f"mod/{modality}/", inputs, of_modality)
        varmap[modality] = np.zeros(n_vars, np.uint32)
        varmap[modality][first : first + len(own)] = np.arange(1, len(own) + 1)
        first += len(own)
    _write(root, "obs", obs[shared])
    index = pd.Index(np.concatenate([each.to_numpy(dtype=object) for each in names]))
    _write(root, "var", pd.DataFrame(index=index))
    _write(
        root, "obsmap", {each: np.arange(1, len(obs) + 1, dtype=np.uint32) for each in modalities}
    )
    _write(root, "varmap", varmap)
    # mudata keeps which cells a modality has, and which genes are of it.
    is_in = {each: np.ones(len(obs), bool) for each in modalities}
    _write(root, "obsm", is_in)
    _write(root, "varm", {name: positions > 0 for name, positions in varmap.items()})
    _write(root, "uns", inputs.uns.get("uns", {}))
    for name in ("obsp", "varp"):
        _write(root, name, {})


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
            overwrite=True,  # of which modality a cell is, where that is a copied element
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
