"""The arrays of a folder of memory maps: their files, dtypes and sizes."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError, PathError
from cellfeed._mapping import map_or_read

__all__ = ["FlatArray", "FlatArrays", "arrays_of", "is_npy_folder", "is_scdl"]

_NPY = ("data", "indices", "indptr", "shape")
_SCDL = {"DATA": "data.npy", "COLPTR": "col_ptr.npy", "ROWPTR": "row_ptr.npy"}
_SCDL_DTYPES = {1: "u1", 2: "u2", 3: "u4", 4: "u8", 5: "f2", 6: "f4", 7: "f8"}
_WITHOUT_HEADER = {"DATA": "f4", "COLPTR": "u4", "ROWPTR": "u8"}
_MAGIC, _COUNTS_FROM = b"SCDL", 12


@dataclass(frozen=True, slots=True)
class FlatArray:
    """A one-dimensional array in a file.

    Parameters
    ----------
    path
        The file.
    dtype
        Dtype of its elements, in the file's byte order.
    offset
        First byte of the first element.
    size
        Number of elements.
    """

    path: Path
    dtype: np.dtype[Any]
    offset: int
    size: int

    def mapped(self) -> NDArray[Any]:
        """Return the array, memory-mapped if that is safe."""
        if not self.size:
            return np.empty(0, self.dtype)
        n_bytes = self.size * self.dtype.itemsize
        return map_or_read(self.path)[self.offset : self.offset + n_bytes].view(self.dtype)


@dataclass(frozen=True, slots=True)
class FlatArrays:
    """The three arrays of a CSR matrix.

    Parameters
    ----------
    data, indices, indptr
        Values, column indices and row pointer.
    n_columns
        Number of columns; None if the files do not state it.
    """

    data: FlatArray
    indices: FlatArray
    indptr: FlatArray
    n_columns: int | None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.indptr.size - 1


def is_npy_folder(path: Path) -> bool:
    """Return whether a folder is an unzipped archive of `scipy.sparse.save_npz`."""
    return all((path / f"{name}.npy").is_file() for name in _NPY)


def is_scdl(path: Path) -> bool:
    """Return whether a folder is a BioNeMo SCDL dataset."""
    return all((path / name).is_file() for name in _SCDL.values())


def arrays_of(folder: Location) -> FlatArrays:
    """Return the arrays of a folder.

    Raises
    ------
    PathError
        There is no such folder, or a file is missing.
    FormatError
        The arrays do not form one CSR matrix.
    """
    path = Path(folder)
    if not path.is_dir():
        raise PathError(f"{folder}: there is no such folder; check the path")
    found = _of_scdl(folder, path) if is_scdl(path) else _of_npy(folder, path)
    for array in (found.data, found.indices):
        if not array.dtype.isnative:
            msg = (
                f"{array.path}: its numbers are not in the byte order of this machine "
                f"({array.dtype})"
            )
            raise FormatError(f"{msg}; write it again on this one")
    if found.n_rows < 0 or found.data.size != found.indices.size:
        raise _not_one_matrix(folder)
    pointer = found.indptr.mapped()
    if pointer[0] != 0 or int(pointer[-1]) != found.data.size:
        raise _not_one_matrix(folder)
    return found


def _of_npy(folder: Location, path: Path) -> FlatArrays:
    data, indices, indptr, shape = (_npy(path / f"{name}.npy") for name in _NPY)
    kinds = (data, "biuf"), (indices, "iu"), (indptr, "iu"), (shape, "iu")
    sizes = shape.mapped().tolist()
    is_csr = not (path / "format.npy").exists() or np.load(path / "format.npy") == b"csr"
    fits = len(sizes) == 2 and indptr.size == sizes[0] + 1  # noqa: PLR2004 - rows, columns
    if not (is_csr and fits and all(each.dtype.kind in some for each, some in kinds)):
        raise _not_one_matrix(folder)
    return FlatArrays(data, indices, indptr, int(sizes[1]))


def _npy(path: Path) -> FlatArray:
    try:
        mapped = np.load(path, mmap_mode="r")
    except FileNotFoundError as error:
        msg = (
            f"{path}: is missing; unzip a file that `scipy.sparse.save_npz` wrote with "
            "compressed=False"
        )
        raise PathError(msg) from error
    except (ValueError, EOFError) as error:
        said = str(error).splitlines()[0]
        raise FormatError(
            f"{path}: is not a complete .npy file ({said}); write it again"
        ) from error
    if not isinstance(mapped, np.memmap) or mapped.ndim != 1:
        raise FormatError(f"{path}: is not a one-dimensional array; write it again")
    return FlatArray(path, mapped.dtype, int(mapped.offset), mapped.size)


def _of_scdl(folder: Location, path: Path) -> FlatArrays:
    dtypes = _scdl_dtypes(path / "header.sch")

    def array(name: str) -> FlatArray:
        file = path / _SCDL[name]
        dtype, n_bytes = np.dtype(dtypes[name]), file.stat().st_size
        if n_bytes % dtype.itemsize:
            msg = f"{file}: its {n_bytes} bytes are not a multiple of {dtype}"
            raise FormatError(f"{msg}; copy or write the folder {folder.name} again")
        return FlatArray(file, dtype, 0, n_bytes // dtype.itemsize)

    return FlatArrays(array("DATA"), array("COLPTR"), array("ROWPTR"), None)


def _scdl_dtypes(header: Path) -> dict[str, str]:
    """Return the dtypes in a header; without a header, the dtypes of folders that had none."""
    if not header.exists():
        return _WITHOUT_HEADER
    content = header.read_bytes()
    try:
        return _WITHOUT_HEADER | _parsed(content)
    except (struct.error, KeyError, ValueError, UnicodeDecodeError) as error:
        msg = f"{header}: is not a known header of BioNeMo SCDL ({error})"
        raise FormatError(f"{msg}; write the folder again with another version of it") from error


def _parsed(content: bytes) -> dict[str, str]:
    """Return the dtype of each array; numbers are big-endian, text is preceded by its length."""
    if not content.startswith(_MAGIC):
        raise ValueError("it begins with other bytes")
    at = _COUNTS_FROM

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f">{form}", content, at)
        at += struct.calcsize(f">{form}")
        return value

    take_text: Callable[[], str] = lambda: take(f"{take('I')}s").decode()  # noqa: E731
    found = dict[str, str]()
    for _ in range(take("I")):
        name = take_text()
        take("Q")  # the length of the array, which also follows from the file size
        found[name] = _SCDL_DTYPES[take("I")]
        if take("B"):
            take(f"{4 * take('I')}s")
    return found


def _not_one_matrix(folder: Location) -> FormatError:
    msg = f"{folder}: its arrays do not form one CSR matrix"
    return FormatError(f"{msg}; write them again, in the layout of `scipy.sparse.csr_array`")
