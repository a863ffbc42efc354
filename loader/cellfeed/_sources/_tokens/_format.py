"""The files of a shard, and its header; docs/how-to/tokens.md describes the format."""

import errno
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cellfeed._errors import CellfeedError, FormatError, ParameterError, PathError

__all__ = [
    "BLOCK",
    "DOCUMENTS",
    "HEADER",
    "INDEX",
    "METADATA",
    "SPANS",
    "SPAN_RECORD",
    "SUFFIX",
    "TOKENS",
    "UNFINISHED",
    "ShardHeader",
    "ShardObs",
    "dtype_of",
    "read_header",
    "require_dtype",
    "require_name",
    "shown_dtype",
    "unreadable",
    "write_header",
]

SUFFIX = ".tokens"  # name of a shard's folder
UNFINISHED = ".unfinished"  # name of an unfinished shard's folder, which begins with a dot
HEADER = "shard.json"
TOKENS, DOCUMENTS = "tokens.bin", "documents.bin"
INDEX, SPANS, METADATA = "index.bin", "spans.bin", "metadata.bin"
BLOCK = 4096  # default number of tokens in a block of spans

SPAN_RECORD = np.dtype(
    [
        ("start", "<i8"),
        ("stop", "<i8"),
        ("id", "<i8"),
        ("first_byte", "<i8"),
        ("n_bytes", "<i4"),
        ("began_before", "<u4"),
    ]
)
"""A span in a block: its tokens in the shard, the number of its metadata in the shard, the bytes of
these in `METADATA`, and whether the span began in an earlier block, which contains it too."""

_FORMAT = "cellfeed token shard"
_VERSION = 1
_KINDS = "biuf"
_LARGEST_ITEM = 8  # size of a number in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardObs:
    """An attribute of documents: its file, and its categories; None if it is a number."""

    file: str
    categories: list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """The header of a shard.

    Parameters
    ----------
    dtype
        Dtype of the tokens: as NumPy names it, or a list of fields with their dtypes.
    n_tokens, n_documents, longest_document, n_spans
        Counts, and the number of tokens of the longest document; ``n_documents`` is None if the
        shard has no documents.
    block
        Number of tokens in a block of spans.
    encoding
        Encoding of metadata, such as "json".
    obs
        Attributes of documents by name.
    files
        Size in bytes and CRC32 of each file.
    """

    dtype: str | list[list[Any]]
    n_tokens: int
    n_documents: int | None
    longest_document: int
    n_spans: int
    block: int
    encoding: str
    obs: Mapping[str, ShardObs]
    files: Mapping[str, tuple[int, int]]


def require_name(name: str) -> str:
    """Return the name of a shard, which may have letters, digits, ``_``, ``-``, and ``.`` inside.

    Raises
    ------
    ParameterError
        The name is invalid.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        msg = f"`shard` must be letters, digits, '_', '-' and '.', but got {name!r}"
        raise ParameterError(msg)
    return name


def require_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the stored form of a dtype: little-endian, without gaps between fields.

    Raises
    ------
    ParameterError
        It is neither numeric or boolean with at most 8 bytes, nor structured with such fields.
    """
    try:
        given = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        msg = f"`dtype` must be a NumPy dtype, such as 'uint16', but got {dtype!r}"
        raise ParameterError(msg) from error
    parts = {"": given} if given.names is None else {name: given[name] for name in given.names}
    for name, part in parts.items():
        base = part.base
        if base.kind not in _KINDS or base.itemsize > _LARGEST_ITEM or (part.shape and not name):
            msg = (
                "`dtype` must be of integers, floats or booleans of at most 8 bytes, or of "
                f"fields of these, but got {given}; leave out other fields"
            )
            raise ParameterError(msg)
    little = {
        name: np.dtype((part.base.newbyteorder("<"), part.shape)) for name, part in parts.items()
    }
    return little[""] if given.names is None else np.dtype(list(little.items()))


def shown_dtype(dtype: np.dtype[Any]) -> str | list[list[Any]]:
    """Return a dtype in the form of the header."""
    if dtype.names is None:
        return dtype.str
    fields = ((name, dtype[name]) for name in dtype.names)
    return [[name, part.base.str, list(part.shape)] for name, part in fields]


def dtype_of(shown: Any) -> np.dtype[Any]:
    """Return the dtype in a header.

    Raises
    ------
    ParameterError, TypeError, ValueError
        The dtype is invalid.
    """
    if isinstance(shown, str):
        return require_dtype(shown)
    return require_dtype([(str(name), str(base), tuple(shape)) for name, base, shape in shown])


def write_header(folder: Path, header: ShardHeader) -> Path:
    """Write the header of a shard, with its checksum; return the file."""
    fields = {"format": _FORMAT, "version": _VERSION, **asdict(header)}
    path = folder / HEADER
    path.write_text(json.dumps(fields | {"checksum": _checksum(fields)}, indent=1) + "\n")
    return path


def read_header(folder: Path) -> ShardHeader:
    """Read and check the header of a shard, and check the sizes of its files.

    Raises
    ------
    FormatError
        The header is damaged or of a later version, or a file has another size.
    PathError
        The header may not be read, or too many files are open.
    """
    path = folder / HEADER
    try:
        fields = json.loads(path.read_bytes())
        checksum = fields.pop("checksum")
        found, version = fields.pop("format"), fields.pop("version")
        is_whole = checksum == _checksum({"format": found, "version": version, **fields})
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, LookupError, AttributeError) as error:
        raise _damaged(path, f"cannot be read ({type(error).__name__})") from error
    if found == _FORMAT and isinstance(version, int) and version > _VERSION:
        msg = (
            f"{path}: is of version {version}, but this cellfeed reads {_VERSION}; update cellfeed"
        )
        raise FormatError(msg)
    if not is_whole or found != _FORMAT or version != _VERSION:
        raise _damaged(path, "its checksum is wrong")
    fields["obs"] = {name: ShardObs(**each) for name, each in fields["obs"].items()}
    header = ShardHeader(**fields)
    for name, (n_bytes, _) in header.files.items():
        _check_size(folder / name, n_bytes)
    return header


def unreadable(path: Path, error: Exception) -> CellfeedError:
    """Return the error for a file of a shard that could not be read, with the remedy."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        msg = f"{path}: too many files are open; allow more, for example with `ulimit -n 65536`"
        return PathError(msg)
    if isinstance(error, PermissionError):
        return PathError(f"{path}: permission to read is denied; check its permissions")
    return _damaged(path, f"cannot be read ({error})")


def _check_size(path: Path, n_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        msg = f"{path}: is missing; write or copy the shard again"
        raise FormatError(msg) from error
    if found != n_bytes:
        msg = f"{path}: has {found:,} bytes, but {n_bytes:,} were written; copy the shard again"
        raise FormatError(msg)


def _damaged(path: Path, what: str) -> FormatError:
    return FormatError(f"{path}: {what}; the shard is damaged, copy or write it again")


def _checksum(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
