"""An archive opened in this process: its tables, the bytes of its cells, and its decoder."""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import (
    ByteStore,
    Identity,
    LastingIdentity,
    Location,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed._bytes._descriptors import closed_with
from cellfeed._errors import CellfeedError, FormatError, PathError, one_line
from cellfeed._sources._base import library

__all__ = ["Archive", "Opened"]

_WHAT = "a cellstream archive"
_PAYLOAD = "x_payload"


Decode = Callable[[NDArray[np.int64], NDArray[Any], NDArray[Any]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """An opened archive, in one process.

    Parameters
    ----------
    packed
        The `cellstream.packed.reader.PackedArchive`, which locates its members.
    shape
        Number of cells and of genes.
    offsets, indptr
        Where the frame of each cell begins, and its elements, int64, shape (n_cells + 1,).
    descriptor, owner
        Descriptor of the file, and the object that closes it.
    first
        Where the frames of the cells begin in the file.
    payload
        These frames, uint8, memory-mapped.
    decode
        cellstream's decoder of rows into memory for values and column indices; None if this version
        of cellstream lacks it, or does not support the archive.
    """

    packed: Any
    shape: tuple[int, int]
    offsets: NDArray[np.int64]
    indptr: NDArray[np.int64]
    descriptor: int
    owner: object
    first: int
    payload: NDArray[np.uint8]
    decode: Decode | None

    @property
    def manifest(self) -> Any:
        """The manifest of the archive."""
        return self.packed.manifest


class Archive(ByteStore):
    """An archive, opened separately in each process that reads it.

    Parameters
    ----------
    location
        A local file.

    Attributes
    ----------
    path
        The file.
    """

    def __init__(self, location: Location) -> None:
        if location.path is None:
            msg = f"{location}: cellstream archives must be local"
            raise PathError(f"{msg}; download it")
        self.location = location
        self.path = location.path.absolute()  # stays valid if the working directory changes
        self._identity: Identity | None = None
        self._opened: tuple[int, Opened] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __call__(self) -> Opened:
        """Return the opened archive."""
        if self._opened is None or self._opened[0] != os.getpid():
            with self.failures_named("archive"):
                self._opened = os.getpid(), self._open()
        return self._opened[1]

    @contextmanager
    def failures_named(self, what: str) -> Iterator[None]:
        """Convert errors of cellstream into an error of one line.

        Raises
        ------
        FormatError
            Replaces any error that it raises.
        """
        try:
            yield
        except CellfeedError:
            raise
        except FileNotFoundError as error:
            raise removed(self.location) from error
        except Exception as error:
            said = one_line(error).removeprefix(f"{self.path}: ")
            msg = f"{self.location}: cellstream cannot read its {what} ({said})"
            raise FormatError(f"{msg}; if it is damaged, copy it again") from error

    def check_unchanged(self) -> None:
        """Check that the path still refers to the file that was opened first.

        The file is memory-mapped: reading a part that no longer exists would kill the process.
        """
        try:
            self._compare(identity(os.stat(self.path)))  # noqa: PTH116 - called often
        except OSError as error:
            raise removed(self.location) from error

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the location of the archive."""
        return self.location

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of the file in bytes."""
        return np.full(len(files), os.fstat(self().descriptor).st_size, np.int64)

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the file."""
        return lasting_identity([("", os.fstat(self().descriptor))])

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return the file descriptor; see `ByteStore`."""
        self.check_unchanged()
        opened = self()
        return np.full(len(files), opened.descriptor, np.int64), opened

    def _open(self) -> Opened:
        cellstream = library("cellstream", self.location, what=_WHAT, extra="cellstream")
        reader = library("cellstream.packed.reader", self.location, what=_WHAT, extra="cellstream")
        packed = reader.PackedArchive(self.path)
        if packed.manifest.get("layout") != "cell":
            msg = f"{self.location}: is a cellstream archive with shards, not with a frame"
            raise FormatError(f'{msg} for each cell; write it with `layout="cell"`')
        with closing(cellstream.CellStore(self.path)) as store:  # which checks its tables
            shape, offsets, indptr = store.shape, store.offsets, store.indptr
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        owner = closed_with(descriptor)
        self._compare(identity(os.fstat(descriptor)))
        _, first, n_bytes = packed.member_location(_PAYLOAD)
        payload = np.empty(0, np.uint8)
        if n_bytes:
            mapped = mmap.mmap(descriptor, n_bytes, offset=first, access=mmap.ACCESS_READ)
            payload = np.frombuffer(mapped, np.uint8)
        decode = _decoder(packed.manifest, payload, offsets, indptr, shape[1])
        return Opened(packed, shape, offsets, indptr, descriptor, owner, first, payload, decode)

    def gather(self, rows: NDArray[np.int64], dtype: np.dtype[Any]) -> Any:
        """Return rows, as CSR of SciPy, by cellstream's own function."""
        cellstream = library("cellstream", self.location, what=_WHAT, extra="cellstream")
        with closing(cellstream.CellStore(self.path)) as store:
            return store.gather_rows(rows, out_dtype=dtype)

    def _compare(self, found: Identity) -> None:
        if self._identity is None:
            self._identity = found
        if self._identity != found:
            raise replaced(self.location)


def _decoder(
    manifest: Any,
    payload: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    indptr: NDArray[np.int64],
    n_genes: int,
) -> Decode | None:
    """Return cellstream's compiled decoder, if it exists and supports the archive.

    cellstream's `gather_rows` calls the same decoder, but allocates memory on each call.
    """
    try:
        dispatch = import_module("cellstream.cell._rust_dispatch")
        decode_cells, is_decodable = dispatch.decode_cells, dispatch.use_rust_for_cell_decode
    except (ImportError, AttributeError):  # of another version
        return None
    codec, dtypes = manifest["codec"], [manifest[f"{k}_dtype_on_disk"] for k in ("index", "value")]
    if not is_decodable(codec, *dtypes, np.float32, np.int32):
        return None
    options = {
        "codec": codec,
        "value_dtype_on_disk": dtypes[1],
        "n_vars": n_genes,
        "allow_lossy": True,  # such as float64 values requested as float32
        "n_threads": 1,
    }

    def decode(rows: NDArray[np.int64], data: NDArray[Any], indices: NDArray[Any]) -> None:
        ends = np.empty(rows.size + 1, np.int64)
        decode_cells(payload, offsets, indptr, rows, data, indices, ends, **options)

    return decode
