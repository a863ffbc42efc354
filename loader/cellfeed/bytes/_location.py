"""Locations of stored data: local paths, or URLs."""

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cellfeed._errors import FormatError, PathError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
SCHEMES = ("http", "https", "s3", "gs", "az", "abfs", "abfss")  # of web servers, object stores
_DATABASES = ("postgresql", "postgres")
_HUB = "hf"  # of HuggingFace
# A colon before the @ that ends user and password, or a password in the query.
_WITH_PASSWORD = re.compile(
    r"postgres(ql)?:(//)?([^@]*:.*@|.*password=)", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StorageOptions:
    """Options for reaching a location; never shown, since they include credentials.

    Parameters
    ----------
    values
        Options of obstore for a server, such as ``access_key_id`` or ``client_options``.
    """

    values: Mapping[str, Any] = field(default_factory=dict, repr=False)


_NO_OPTIONS = StorageOptions()


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A path or a URL, as the user gave it; ``str`` returns it.

    A local location can be used as a path, for example with `open`.

    Parameters
    ----------
    text
        The path or URL.
    options
        Options for its server. They are not shown in the repr, and do not affect equality.

    Examples
    --------
    >>> Location("plates/p1.h5ad").path
    PosixPath('plates/p1.h5ad')
    >>> Location("s3://bucket/p1.h5ad").scheme, Location("s3://bucket/p1.h5ad").path
    ('s3', None)
    """

    text: str
    options: StorageOptions = field(default=_NO_OPTIONS, repr=False, compare=False)

    @classmethod
    def of(
        cls, where: "str | os.PathLike[str]", values: Mapping[str, Any] | None = None
    ) -> "Location":
        """Return the location of a path or URL.

        Parameters
        ----------
        where
            The path or URL.
        values
            Values of its options, see `StorageOptions`; None for those that it has.

        Raises
        ------
        PathError
            The URL of a database contains a password, which messages would show.
        """
        if values is not None:
            return cls.of(where).with_options(StorageOptions(dict(values)))
        if isinstance(where, Location):
            return where
        location = cls(os.fspath(where))
        if _WITH_PASSWORD.match(location.text):
            msg = "the URL of a database must not contain a password; give it in `storage_options`"
            raise PathError(f"{msg}, PGPASSWORD or ~/.pgpass")
        return location

    def with_options(self, options: StorageOptions) -> "Location":
        """Return the same location with other options, unless it has options of its own."""
        return self if self.options.values else replace(self, options=options)

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> "Location":
        return replace(self, text=f"{self.text.rstrip('/')}/{name}")

    def __fspath__(self) -> str:
        if self.scheme:
            msg = f"{self}: is not a local file; download it first"
            raise PathError(msg)
        return self.text

    @property
    def scheme(self) -> str:
        """Scheme of a URL, such as ``s3``; empty for a path."""
        found = _SCHEME.match(self.text)
        return found[1].lower() if found else ""

    @property
    def shown(self) -> str:
        """The URL without possible credentials (user and query), or the path."""
        if not self.scheme:
            return self.text
        return re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", self.text)[0])

    @property
    def is_remote(self) -> bool:
        """Whether it is on a server or in an object store, where requests have high latency."""
        return self.scheme in (*SCHEMES, *_DATABASES, _HUB)

    @property
    def path(self) -> Path | None:
        """The local path; None if it is not local."""
        return None if self.scheme else Path(self.text)

    @property
    def name(self) -> str:
        """Name of the file, folder or object: the last part of the path or URL."""
        return self.text.rstrip("/").rpartition("/")[2]


def has_suffix(name: str, *suffixes: str) -> bool:
    """Return whether a name ends with one of some suffixes, in any case: ``.H5AD`` is ``.h5ad``."""
    return name.lower().endswith(tuple(each.lower() for each in suffixes))


# Identities of files, to notice changes after they were opened, and the error messages.

Identity = tuple[int, int]  # bytes, and time of the last change in ns

_SETTLED_NS = 10 * 10**9


def identity(found: os.stat_result) -> Identity:
    """Return the properties of a file that change with its content."""
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class LastingIdentity:
    """An identifier of files with given names that is valid across processes.

    Parameters
    ----------
    digest
        Digest of their names, devices, inodes, sizes and times of change.
    is_settled
        Whether none of them changed in the last ten seconds.
    """

    digest: str
    is_settled: bool


def lasting_identity(found: Iterable[tuple[str, os.stat_result]]) -> LastingIdentity:
    """Return the identity of files.

    In addition to size and modification time (see `identity`), it includes device and inode, so
    that no two files have the same one, and the change time of the inode, which no program can set.
    It therefore notices writes in place and replaced files, even those of the same size with a
    preserved modification time, as by ``cp -p``, ``rsync -t`` and ``tar``, and links that lead
    elsewhere; a file that was only renamed, or whose permissions changed, also counts as another
    one, and so may any file once its file system is mounted again.

    It cannot notice two changes of one file within one tick of the file system's clock, which may
    be a whole second, or while that clock goes back. Therefore a file that has just changed, by
    this machine's clock and whatever its modification time, or has a change time in the future, is
    not settled: it may still be being written. Changes are not noticed if the clock of a server is
    late by more than ten seconds, or if they are made below the file system.

    Parameters
    ----------
    found
        Names and states of files, always in the same order.
    """
    digest, newest = hashlib.blake2b(digest_size=16), 0
    for name, state in found:
        file = f"{state.st_dev} {state.st_ino} {state.st_size}"
        digest.update(f"{name}\0{file} {state.st_mtime_ns} {state.st_ctime_ns}\n".encode())
        newest = max(newest, state.st_mtime_ns, state.st_ctime_ns)
    return LastingIdentity(digest.hexdigest(), time.time_ns() - newest > _SETTLED_NS)


def digest_of(*parts: str) -> str:
    """Return a digest of texts, for `LastingIdentity`."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def digest_of_array(array: "NDArray[Any] | None") -> str:
    """Return a digest of the values of a contiguous array; empty if there is none."""
    return "" if array is None else hashlib.blake2b(array.data, digest_size=16).hexdigest()


def writable_path(where: "str | os.PathLike[str]") -> Path:
    """Return the local path to write to.

    Raises
    ------
    PathError
        It is a URL, of which `Path` would make a folder named ``s3:``.
    """
    location = Location.of(where)
    if location.path is None:
        msg = "is a URL, but only local files are written; give a path, and copy the result there"
        raise PathError(f"{location.shown}: {msg}")
    return location.path


def broken_link(path: Path) -> PathError:
    """Return the error for a link to a file that is missing."""
    return PathError(f"{path}: is a link to {path.readlink()}, which is missing; put it there")


def require_file(path: Path, shown: Path | Location | None = None) -> None:
    """Check that a path leads to a file, since opening a pipe would wait for ever.

    Raises
    ------
    PathError
        There is nothing, or something else.
    """
    shown = shown or path
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PathError(f"{shown}: is a link that leads back to itself; remove it") from None
        if path.is_symlink():
            raise broken_link(path) from None
        raise PathError(f"{shown}: no such file; check the path") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise PathError(f"{shown}: is {what}, not a file; give a file")


def refuse_pipe(path: Path) -> None:
    """Check that a path does not lead to a pipe, since opening it would wait for ever.

    Raises
    ------
    PathError
        It does.
    """
    if path.is_fifo():
        require_file(path)


def removed(path: Path | Location) -> PathError:
    """Return the error for a file that was removed."""
    return PathError(f"{path}: was removed since it was opened; put it back")


def replaced(path: Path | Location) -> FormatError:
    """Return the error for a file that was replaced."""
    return FormatError(f"{path}: was replaced or written to since it was opened; open it again")
