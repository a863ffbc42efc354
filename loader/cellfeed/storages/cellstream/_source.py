"""Archives of cellstream, decoded by cellstream's own library into cellfeed's minibatches."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import Location, require_file
from cellfeed.extending import PathError, pd
from cellfeed.rows import CsrRows, Layout
from cellfeed.sources import (
    OpenedPerProcess,
    Runs,
    Source,
    Storage,
    StoredElement,
    WatchedFiles,
    as_names,
    as_text,
    expand,
    failures_named,
    library,
    threads_of_process,
)

_MAGIC = b"SHPK"
_LARGEST = 1 << 24  # float32 represents integers up to this exactly


class Archive(OpenedPerProcess):
    """An archive, opened separately in each process that reads it.

    Calling it returns the `cellstream.CellStore`.

    Parameters
    ----------
    location
        A local file.
    """

    def __init__(self, location: Location) -> None:
        if location.path is None:
            msg = f"{location}: cellstream archives must be local"
            raise PathError(f"{msg}; download it")
        self.location = location
        self._path = location.path.absolute()  # stays valid if the working directory changes
        self._watched = WatchedFiles()

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Check before and after that the file is unchanged; name failures of cellstream.

        It is memory-mapped: reading a part that no longer exists would kill the process.
        """
        self._watched.check()
        said = f"{self.location}: cellstream cannot read its {what}"
        with failures_named(said, 'write it with `layout="cell"`, or copy it again'):
            yield
        self._watched.check()

    def table(self, name: Literal["obs", "var"]) -> pd.DataFrame:
        """Return a table of cells or genes."""
        with self.reading(name):
            table: pd.DataFrame = getattr(self(), name)
        return table

    def _open(self) -> Any:
        what = {"what": "a cellstream archive", "extra": "cellstream"}
        cellstream = library("cellstream", self.location, **what)
        require_file(self._path, self.location)
        self._watched.see(self._path, self._path.stat(), self.location)
        with self.reading("archive"):
            store = cellstream.CellStore(self._path)
        weakref.finalize(self, store.close)
        return store


class CellFrames(StoredElement):
    """The matrix, with a frame for each cell, which cellstream decodes in several threads.

    Values are float32, as cellstream returns them, or float64 if float32 may not represent them.
    """

    layout: Layout = "csr"

    def __init__(self, archive: Archive) -> None:
        opened, self._archive = archive(), archive
        stored, self.shape = opened.manifest["value_dtype_on_disk"], opened.shape
        is_wide = stored == "float64" or (
            stored == "uint32" and np.iinfo(opened.manifest["x_data_dtype_min"]).max > _LARGEST
        )
        self.dtype = np.dtype(np.float64 if is_wide else np.float32)

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the genes."""
        return as_names(self._archive.table("var").index)

    def stored_bytes(self) -> int:
        """Return the size in bytes of the frames, and of the tables that locate them."""
        offsets = self._archive().offsets
        return int(offsets[-1] + 2 * offsets.nbytes)

    def codec(self) -> str:
        """Return the compression of frames."""
        return str(self._archive().manifest["codec"])

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of nonzeros of each cell."""
        rows, pointers = expand(runs), self._archive().indptr
        lengths: NDArray[np.int64] = pointers[rows + 1] - pointers[rows]
        return lengths

    def read_rows(self, runs: Runs) -> CsrRows:
        """Return decoded cells."""
        with self._archive.reading(f"cells {runs[:, 0].min()} to {runs[:, 1].max() - 1}"):
            found = self._archive().gather_rows(
                expand(runs), n_threads=threads_of_process(), out_dtype=self.dtype
            )
        return CsrRows(found.indptr, found.indices, found.data, self.shape[1])


class CellstreamSource(Source):
    """Cells of an archive that cellstream wrote with ``layout="cell"``.

    `open_collection` takes its path. cellstream (``pip install 'cellfeed[cellstream]'``) reads it,
    with ``CellStore.gather_rows`` in as many threads as this process may use.

    Parameters
    ----------
    path
        The archive, a local file.

    Attributes
    ----------
    elements
        ``"X"``. Archives have no layers; their obsm is not read.

    Raises
    ------
    FormatError
        The archive cannot be read, or cellstream is not installed.
    """

    def __init__(self, path: str | os.PathLike[str] | Location) -> None:
        self.location = path if isinstance(path, Location) else Location.of(path)
        self._archive = Archive(self.location)
        self.elements = {"X": CellFrames(self._archive)}

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns, without the names of the cells."""
        return [*map(str, self._archive.table("obs"))]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some obs columns."""
        return self._archive.table("obs")[[*columns]].reset_index(drop=True)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return some rows of obs columns, indexed by the names of the cells."""
        found = self._archive.table("obs")[[*columns]].iloc[rows]
        return as_text(found.set_index(found.index.astype(str)))

    def read_var(self) -> pd.DataFrame:
        """Return the table of genes."""
        return self._archive.table("var")


def _is_archive(path: Path) -> bool:
    """Return whether a file begins like an archive, without importing cellstream."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


CELLSTREAM = Storage(
    name="cellstream",
    open=lambda location, _: [CellstreamSource(location)],
    suffixes=(".csad", ".shad"),
    recognizes=_is_archive,
)
