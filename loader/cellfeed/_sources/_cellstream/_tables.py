"""Tables of cells and genes in an archive: members of its file, read by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._lazy import ad, pd
from cellfeed._sources._cellstream._archive import Archive

__all__ = ["header", "obs_names", "read_obs", "read_var"]


def obs_names(archive: Archive) -> list[str]:
    """Return the names of the obs columns, without the names of the cells."""
    with archive.failures_named("obs"):
        return list(archive().packed.obs_columns())


def read_obs(
    archive: Archive, columns: Sequence[str], rows: NDArray[np.int64] | None = None
) -> pd.DataFrame:
    """Read obs columns.

    Parameters
    ----------
    archive
        The archive.
    columns
        Names of the columns; may be empty if rows are given.
    rows
        Rows to read, indexed by the names of the cells; if None, all cells, indexed by number.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415 - cellstream needs it

    with archive.failures_named("obs"):
        file = pq.ParquetFile(_member(archive, "obs.parquet"))
        table = file.read(columns=[*columns], use_pandas_metadata=rows is not None)
        some = table if rows is None else table.take(rows)
        found: pd.DataFrame = some.to_pandas(ignore_metadata=rows is None)
    return found


def read_var(archive: Archive) -> pd.DataFrame:
    """Read the table of genes."""
    with header(archive) as file:
        found: pd.DataFrame = ad.io.read_elem(file["var"])
    return found


@contextmanager
def header(archive: Archive) -> Iterator[h5py.File]:
    """Open the rest of an archive, all except the matrix: an AnnData file within its file."""
    with archive.failures_named("header"), h5py.File(_member(archive, "header.h5ad"), "r") as file:
        yield file


def _member(archive: Archive, name: str) -> Any:
    """Return a member of the archive as a memory-mapped file."""
    import pyarrow as pa  # noqa: PLC0415 - cellstream needs it

    _, first, n_bytes = archive().packed.member_location(name)
    archive.check_unchanged()
    with pa.memory_map(str(archive.path)) as whole:
        whole.seek(first)
        return pa.BufferReader(whole.read_buffer(n_bytes))
