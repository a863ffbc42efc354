"""The shards of a folder, opened together."""

import os
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._chunks import FolderFiles
from cellfeed._errors import FormatError, PathError
from cellfeed._mapping import map_or_read
from cellfeed._sources._base import FileNames
from cellfeed._sources._tokens._format import (
    INDEX,
    SUFFIX,
    UNFINISHED,
    ShardHeader,
    dtype_of,
    read_header,
    unreadable,
)

__all__ = ["ShardTables", "Shards"]

_PIECE_BYTES = 1 << 22


class Shards:
    """All finished shards of a folder, by name.

    Parameters
    ----------
    location
        The folder.

    Attributes
    ----------
    names
        Names of the shards.
    headers
        Headers of the shards.
    dtype
        Dtype of the tokens, the same in all shards.
    bounds
        Where each shard begins in the stream, in tokens, int64, shape (n_shards + 1,).

    Raises
    ------
    PathError
        There is no such folder, it may not be read, or too many files are open.
    FormatError
        It has no finished shard, a shard is damaged, or the shards have different dtypes.

    Warns
    -----
    UserWarning
        Some shards are unfinished.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        folder = location.path
        if folder is None or not folder.is_dir():
            raise PathError(f"{location.shown}: no such folder; check the path")
        self._folder = folder.absolute()
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 - only names
        except OSError as error:
            raise unreadable(folder, error) from error
        found = [name for name in names if name.endswith(SUFFIX)]
        unfinished = [each for each in names if each[0] == "." and each.endswith(UNFINISHED)]
        if unfinished:
            n, some = len(unfinished), ", ".join(unfinished[:3])
            msg = f"{folder}: {n} unfinished shards are left out ({some}); finish or remove them"
            warnings.warn(msg, UserWarning, stacklevel=3)
        if not found:
            msg = f"{folder}: has no finished shard; write one with `TokenStreamWriter`"
            raise FormatError(msg)
        self.names = found
        self.headers = [read_header(folder / name) for name in found]
        self.dtype = self._common_dtype()
        sizes = [header.n_tokens for header in self.headers]
        self.bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all shards."""
        return int(self.bounds[-1])

    def verify(self) -> None:
        """Compare all files with their checksums; see `TokenStream.verify`."""
        for shard, header in enumerate(self.headers):
            for name, (_, expected) in header.files.items():
                found = 0
                with (self._folder / self.names[shard] / name).open("rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        found = zlib.crc32(piece, found)
                if found != expected:
                    raise self.damaged(shard, name, "its bytes have changed since it was written")

    def files(self, name: str) -> FolderFiles:
        """Return the files with one name, by shard number."""
        names = FileNames(*(f"{shard}/{name}" for shard in self.names))
        return FolderFiles(self._folder, names, len(self.names))

    def table(self, name: str, dtype: Any) -> "ShardTables":
        """Return the file of each shard as a table with this dtype, mapped when it is used."""
        return ShardTables([self._folder / shard / name for shard in self.names], np.dtype(dtype))

    def index(self) -> "ShardTables":
        """Return the index: where the spans of each block, and their metadata, begin."""
        return self.table(INDEX, ("<i8", 2))

    def damaged(self, shard: int, name: str, what: str) -> FormatError:
        """Return the error for a file with invalid contents."""
        where = self._folder / self.names[shard] / name
        return FormatError(f"{where}: {what}; the shard is damaged, copy it again")

    def _common_dtype(self) -> np.dtype[Any]:
        dtypes = [
            self._dtype_of(name, each) for name, each in zip(self.names, self.headers, strict=True)
        ]
        for name, dtype in zip(self.names, dtypes, strict=True):
            if dtype != dtypes[0]:
                msg = (
                    f"{self._folder / name}: has tokens of {dtype}, but {self.names[0]} of "
                    f"{dtypes[0]}; keep shards of different dtypes in different folders"
                )
                raise FormatError(msg)
        return dtypes[0]

    def _dtype_of(self, name: str, header: ShardHeader) -> np.dtype[Any]:
        try:
            return dtype_of(header.dtype)
        except (TypeError, ValueError) as error:
            msg = (
                f"{self._folder / name}: has tokens of an unknown dtype ({error}); update cellfeed"
            )
            raise FormatError(msg) from error


class ShardTables:
    """One table per shard, memory-mapped when it is first used, in each process separately.

    If too many files are mapped already, the file is read into memory.

    Parameters
    ----------
    paths, dtype
        The files, and the dtype of a row.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype[Any]) -> None:
        self._paths, self._dtype = paths, dtype
        self._mapped = dict[int, NDArray[Any]]()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}

    def of(self, shard: int) -> NDArray[Any]:
        """Return the table of one shard."""
        if shard not in self._mapped:
            path = self._paths[shard]
            try:
                rows = map_or_read(path).view(self._dtype.base)
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from error
            self._mapped[shard] = rows.reshape(-1, *self._dtype.shape)
        return self._mapped[shard]

    def rows(self, shards: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return one row of the table of each given shard; shards may repeat."""
        out = np.zeros((rows.size, *self._dtype.shape), self._dtype.base)
        order = np.argsort(shards, kind="stable")
        bounds = np.flatnonzero(np.diff(shards[order])) + 1
        for some in np.split(order, bounds) if order.size else ():
            out[some] = self.of(int(shards[some[0]]))[rows[some]]
        return out
