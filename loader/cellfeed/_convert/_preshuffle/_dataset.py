"""One part as an AnnData group of a zarr store."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import zarr
from anndata.io import write_elem
from zarr.codecs import BloscCodec

from cellfeed._convert._preshuffle._elements import Matrix, ShuffledCsr, ShuffledDense
from cellfeed._convert._preshuffle._job import Job, os_errors
from cellfeed._convert._preshuffle._shards import (
    Encoding,
    counts_encoding,
    plain_encoding,
    sums_encoding,
    write_array,
)
from cellfeed._decode import expect_numcodecs
from cellfeed.machine import usable_cpu_count

_OTHER_ELEMENTS = ("layers", "obsm", "obsp", "uns", "varm", "varp")

OnShare = Callable[[float], object]


@contextmanager
def _threaded_codecs() -> Iterator[None]:
    """Make zarrs encode and decode the chunks of a shard in threads, without the GIL."""
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        yield


def write_dataset(
    folder: Path,
    job: Job,
    *,
    matrix: Matrix,
    obs: pd.DataFrame,
    var: pd.DataFrame,
    on_share: OnShare,
) -> None:
    """Write an AnnData group.

    Parameters
    ----------
    folder
        A folder that does not exist yet.
    job
        The job, which determines chunks and shards.
    matrix, obs, var
        Contents of the part.
    on_share
        Called with the share of the matrix that is written.
    """
    expect_numcodecs()
    with _settings(), os_errors(folder):
        group = zarr.create_group(folder)
        group.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        write_elem(group, "obs", obs)
        write_elem(group, "var", var)
        for name in _OTHER_ELEMENTS:
            write_elem(group, name, {})
        if isinstance(matrix, ShuffledCsr):
            _write_csr(group, folder, job, matrix, on_share)
        else:
            with _threaded_codecs():
                _write_dense(group, job, matrix, on_share)


@contextmanager
def _settings() -> Iterator[None]:
    settings: dict[str, Any] = {"allow_write_nullable_strings": True}
    if hasattr(ad.settings, "auto_shard_zarr_v3"):  # later versions do so anyway
        settings["auto_shard_zarr_v3"] = True
    with ad.settings.override(**settings):
        yield


def _write_csr(
    group: zarr.Group, folder: Path, job: Job, matrix: ShuffledCsr, on_share: OnShare
) -> None:
    n_rows, n_elements = matrix.pointer.size - 1, matrix.n_elements
    X = group.create_group("X")
    X.attrs.update(
        {
            "encoding-type": "csr_matrix",
            "encoding-version": "0.1.0",
            "shape": [n_rows, job.n_vars],
        }
    )
    index_dtype = np.int32 if n_elements <= np.iinfo(np.int32).max else np.int64
    X.create_array("indptr", data=matrix.pointer.astype(index_dtype), compressors=_compressor())

    def written(before: int, n: int) -> None:
        on_share((before + n) / (2 * n_elements))

    threads = ThreadPoolExecutor(usable_cpu_count(), thread_name_prefix="cellfeed-encode")
    try:
        for n_before, name in ((0, "indices"), (n_elements, "data")):
            write_array(
                X,
                folder / "X",
                name,
                _encoding(job, matrix, name),
                partial(matrix.elements, name),
                n_elements,
                chunk=job.elements_per_chunk,
                chunks_per_shard=job.chunks_per_shard(matrix.dtype(name)),
                threads=threads,
                on_written=partial(written, n_before),
            )
    finally:
        # Whoever interrupts it need not wait for the rest of a shard.
        threads.shutdown(cancel_futures=True)


def _encoding(job: Job, matrix: ShuffledCsr, name: str) -> Encoding:
    dtype = matrix.dtype(name)
    if job.codec == "annbatch":
        return plain_encoding(dtype)
    if name == "indices":
        return sums_encoding(dtype)
    if matrix.largest_count is None:
        return plain_encoding(dtype)
    narrow = np.dtype(np.min_scalar_type(matrix.largest_count))
    is_narrower = narrow.itemsize < dtype.itemsize and np.can_cast(narrow, dtype)
    return counts_encoding(dtype, narrow if is_narrower else dtype)


def _write_dense(group: zarr.Group, job: Job, matrix: ShuffledDense, on_share: OnShare) -> None:
    n_rows, n_vars = matrix.shape
    chunk = min(job.cells_per_chunk, n_rows)
    shard = chunk * min(job.chunks_per_shard(matrix.dtype), -(-n_rows // chunk))
    array = group.create_array(
        "X",
        shape=(n_rows, n_vars),
        dtype=matrix.dtype,
        chunks=(chunk, n_vars),
        shards=(shard, n_vars),
        compressors=_compressor(),
        attributes={"encoding-type": "array", "encoding-version": "0.2.0"},
    )
    for start in range(0, n_rows, shard):
        stop = min(start + shard, n_rows)
        array[start:stop] = matrix.rows(start, stop)
        on_share(stop / n_rows)


def _compressor() -> Any:
    # annbatch's: about as small as gzip 1, and several times as fast to read and write.
    return BloscCodec(cname="lz4", clevel=3, shuffle="shuffle")
