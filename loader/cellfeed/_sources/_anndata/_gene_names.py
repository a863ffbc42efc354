"""Gene names: tens of thousands in each file, but usually shared by all files of an atlas."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import LastingIdentity
from cellfeed._lazy import pd
from cellfeed._sources._anndata._attributes import is_group, text
from cellfeed._sources._anndata._file import AnnDataFile
from cellfeed._tables import KeptTables, Tables

__all__ = ["as_names", "read_names"]

_FEWEST = 10_000  # names that are kept from one opening to the next; fewer are read in 4 ms
_END = b"\0"
_SAME = WeakValueDictionary[str, "NDArray[np.object_]"]()  # names of the files that are open


def read_names(file: AnnDataFile, path: str) -> NDArray[np.object_]:
    """Return the names in an array or another element, str, shape (n,), read-only if it is large.

    Numbers become text, as in anndata, and missing names None.
    Names that files share are kept once in memory, and once in the cache folder.
    """
    stored = file.stored(_text(file, path))
    if is_group(stored) or stored.ndim != 1 or stored.shape[0] < _FEWEST:
        return _read(file, path)
    n, content = stored.shape[0], list[bytes]()

    def contents() -> Tables | None:
        joined = _joined(file, path)
        if joined is None or joined.count(_END) != n - 1:
            return None  # they are no text, or what ends a name is part of one
        content[:] = [joined]
        return {"digest": np.frombuffer(_digest(joined), np.uint8)}

    found = file.kept_tables(path).get("digest of names", n, contents, fewest=_FEWEST)
    if found is None:
        return _read(file, path)
    digest = found["digest"].tobytes().hex()
    known = _SAME.get(digest)
    if known is not None:
        return known

    def names() -> Tables | None:
        joined = content[0] if content else _joined(file, path)
        if joined is None or _digest(joined).hex() != digest:
            return None  # the file was replaced meanwhile
        return {"names": np.frombuffer(joined, np.uint8)}

    shared = KeptTables("gene names", digest, lambda: LastingIdentity(digest, is_settled=True))
    kept = shared.get("names", n, names, fewest=_FEWEST)
    if kept is None:
        return _read(file, path)
    own = np.array(kept["names"].tobytes().decode().split("\0"), dtype=object)
    own.flags.writeable = False
    return _SAME.setdefault(digest, own)


def _text(file: AnnDataFile, path: str) -> str:
    """Return the path of the array of an element's text.

    With pandas 3, anndata writes names as nullable strings: an array of text and a mask.
    """
    encoding = text(file.stored(path), "encoding-type")
    return f"{path}/values" if encoding == "nullable-string-array" else path


def _read(file: AnnDataFile, path: str) -> NDArray[np.object_]:
    """Return names as anndata reads them."""
    file.bring([path])
    stored = file.stored(path)
    if isinstance(stored, h5py.Dataset) and stored.ndim == 1 and _is_text(stored):
        return np.array(stored.asstr()[()], dtype=object)
    return as_names(pd.Index(file.read(path)))


def _is_text(stored: h5py.Dataset) -> bool:
    """Return whether an array is of text of any length, in UTF-8."""
    text = h5py.check_string_dtype(stored.dtype)
    return text is not None and text.length is None and text.encoding == "utf-8"


def as_names(index: pd.Index[Any]) -> NDArray[np.object_]:
    """Return an index as text, None where it is missing."""
    names = index.astype(object).to_numpy(copy=True)
    missing = pd.isna(names)
    if not all(isinstance(name, str) for name in names):
        names = index.astype(str).astype(object).to_numpy(copy=True)
    names[missing] = None
    return names


def _digest(joined: bytes) -> bytes:
    return blake2b(joined, digest_size=16).digest()


def _joined(file: AnnDataFile, path: str) -> bytes | None:
    """Return concatenated names in UTF-8; None if one is missing or not text.

    Names in HDF5 are used in their stored form, which is faster.
    """
    file.bring([path])
    text_path = _text(file, path)
    if text_path != path and file.stored(f"{path}/mask")[:].any():
        return None
    stored = file.stored(text_path)
    if not isinstance(stored, h5py.Dataset) or not _is_text(stored):
        names = list(file.read(text_path))
        are_text = all(isinstance(name, str) for name in names)
        return _END.join(name.encode() for name in names) if are_text else None
    joined: bytes = _END.join(stored[()].tolist())
    joined.decode()  # which raises where it is no text
    return joined
