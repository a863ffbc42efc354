"""The AnnData objects in a zarr store: one, or those of a shuffled collection.

annbatch's layout, which `cellfeed.preshuffle` writes too, is a group of groups ``dataset_0``,
``dataset_1`` and so on: https://annbatch.readthedocs.io
"""

from __future__ import annotations

import math
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cellfeed._bytes import (
    NO_OPTIONS,
    ByteStore,
    Identity,
    LastingIdentity,
    Location,
    StorageOptions,
    UnbufferedFiles,
    broken_link,
    digest_of,
    identity,
    removed,
    replaced,
)
from cellfeed._bytes._remote import RemoteObjects, Version, open_object, versions_below, versions_of
from cellfeed._bytes._remote import zarr_store as store_of
from cellfeed._bytes._tables import CachedTables
from cellfeed._decode import (
    ChunkedArray,
    SlowRead,
    ZarrFiles,
    ZarrLayout,
    check_grid,
    chunk_grid,
    expect_numcodecs,
    identity_of_files,
    zarr_array,
    zarr_codec,
    zarr_layout,
)
from cellfeed._errors import FormatError
from cellfeed._lazy import pd, zarr
from cellfeed._storages._anndata._attributes import read_element
from cellfeed._storages._anndata._damage import damage_named, other_format_of

_NODE_METADATA = ("zarr.json", ".zgroup", ".zarray")
COLLECTION = "annbatch-preshuffled"
_DATASET = re.compile(r"dataset_(\d+)")
_UNFINISHED = ".cellfeed"  # what `cellfeed preshuffle` has in its output while it writes


def is_zarr(path: Path) -> bool:
    """Return whether a folder is a zarr store, or a group in one."""
    return metadata_of(path) is not None


def metadata_of(path: Path) -> Path | None:
    """Return the metadata file of a zarr store; None if a folder is not a zarr store."""
    return next((path / name for name in _NODE_METADATA if (path / name).is_file()), None)


def open_group(path: Path, absolute: Path) -> zarr.Group:
    """Open a group for reading.

    Parameters
    ----------
    path
        Its path for messages.
    absolute
        Its absolute path.

    Raises
    ------
    FormatError
        It is not a zarr group, or its metadata is damaged.
    """
    expect_numcodecs()
    try:
        return zarr.open_group(absolute, mode="r")
    except Exception as error:  # zarr has no common base for what it raises
        msg = f"{path}: cannot be opened as a zarr group ({error}); give a zarr store of AnnData"
        raise FormatError(msg) from error


def anndata_groups(path: Path) -> list[Path]:
    """Return the folders of the AnnData groups of a store, in the order of their numbers.

    Raises
    ------
    FormatError
        The store contains something else, or lacks one of its datasets.
    """
    root = open_group(path, path.absolute())
    with damage_named(Location.of(path), "obs"):
        if "obs" in root and "var" in root:
            return [path]
    if (path / _UNFINISHED).is_dir():
        msg = f"{path}: is unfinished; run the same `cellfeed preshuffle` again"
        raise FormatError(msg)
    if root.attrs.get("encoding-type") != COLLECTION:
        other = other_format_of(root)
        if other is not None:
            raise FormatError(f"{path}: is {other}")
        msg = (
            f"{path}: is a zarr group, but neither AnnData (it has no `obs` or no `var`) nor "
            "a shuffled collection; give a store that anndata, annbatch or `cellfeed "
            "preshuffle` wrote"
        )
        raise FormatError(msg)
    matches = [_DATASET.fullmatch(entry.name) for entry in path.iterdir() if is_zarr(entry)]
    numbers = sorted(int(match[1]) for match in matches if match)
    if not numbers or numbers != list(range(len(numbers))):
        found = ", ".join(map(str, numbers)) or "none"
        msg = (
            f"{path}: expected datasets numbered from 0, but found: {found}; copy or "
            "download the store again"
        )
        raise FormatError(msg)
    return [path / f"dataset_{number}" for number in numbers]


# An AnnData group of a zarr store, local or remote: its arrays, and their chunks.


class ZarrStore(ABC):
    """A read-only AnnData group; zarr v2 or v3.

    The metadata and the shards of a watched array must stay those that existed when `watch` was
    called, in any process.

    Parameters
    ----------
    location
        The group.
    """

    library = "zarr"

    def __init__(self, location: Location) -> None:
        self.location = location
        self._group: zarr.Group | None = None
        self._process = -1
        self._layouts: dict[str, ZarrLayout | SlowRead] = {}
        self._files: dict[str, ByteStore] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_group": None, "_process": -1}

    def __call__(self) -> zarr.Group:
        """Return the group.

        Raises
        ------
        FormatError
            It is not a zarr group.
        """
        if self._group is None or self._process != os.getpid():
            self._group, self._process = self._open(), os.getpid()
        return self._group

    @abstractmethod
    def _open(self) -> zarr.Group:
        """Open the group."""

    @property
    @abstractmethod
    def _lasting_name(self) -> str:
        """Key under which tables of the store are cached."""

    @abstractmethod
    def _watch(self, name: str, zarr_format: int) -> None:
        """Record the metadata of an array, so that changes are noticed."""

    def _check_links(self, name: str) -> None:  # noqa: B027 - not abstract
        """Check that no file of an array is a link to nothing, which zarr would read as zeros.

        Raises
        ------
        PathError
            One is.
        """

    @abstractmethod
    def _files_of(self, name: str, layout: ZarrLayout) -> ByteStore:
        """Return the files of an array."""

    @abstractmethod
    def _identity_of(self, name: str) -> LastingIdentity | None:
        """Return the identity of all files of an array; None if unknown."""

    @abstractmethod
    def stored_bytes(self, name: str) -> int:
        """Return the size of an array's chunks or shards in bytes; 0 if unknown."""

    @abstractmethod
    def n_lost(self, name: str) -> int:
        """Return how many files of chunks or shards of an array are missing."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Check that the metadata has not changed; shards are checked when they are read.

        Raises
        ------
        FormatError
            An array was replaced.
        PathError
            It was removed.
        """

    def watch(self, names: Sequence[str]) -> None:
        """Record metadata and shards of these arrays, so that changes are noticed."""
        for name in names:
            array = self.stored(name)
            itemsize = array.dtype.itemsize
            check_grid(array.shape, array.chunks, itemsize, shard_shape=array.shards)
            self._watch(name, array.metadata.zarr_format)
            layout = self._layouts[name] = zarr_layout(array.metadata.to_dict())
            if isinstance(layout, ZarrLayout):
                self._files[name] = self._files_of(name, layout)
            else:
                self._check_links(name)

    def bring(self, names: Sequence[str]) -> None:  # noqa: B027 - not abstract
        """Do nothing, since zarr reads chunks concurrently; see `AnnDataFile`."""

    def stored(self, name: str) -> Any:
        """Return an array or group."""
        # With zarr's own codecs: those of zarrs are faster, but stop for ever in a forked process
        # once its parent has used them.
        expect_numcodecs()
        return self()[name]

    def read(self, name: str) -> Any:
        """Return an element as anndata reads it."""
        return read_element(self.stored(name))

    def codec(self, name: str) -> str:
        """Return the compression of an array, such as "blosc", "zstd, sharded" or "none"."""
        return zarr_codec(self.stored(name).metadata.to_dict())

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only zarr can read an array; None if cellfeed can."""
        layout = self._layouts[name]
        return layout if isinstance(layout, SlowRead) else None

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason."""
        layout = self._layouts[name]
        if isinstance(layout, SlowRead):
            return None
        return zarr_array(
            layout, self._files[name], name, self.kept_tables(name), lost_is_zero=lost_is_zero
        )

    def kept_tables(self, name: str) -> CachedTables:
        """Return the cache for tables of an array between openings."""
        return CachedTables(self._lasting_name, name, lambda: self._identity_of(name))

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a format that anndata no longer writes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file is old is no news to its reader
            frame: pd.DataFrame = self.read(name)
        return frame


# An AnnData group of a local zarr store.

_METADATA = {2: ".zarray", 3: "zarr.json"}
_NO_CHUNKS = {"zarr.json", ".zarray", ".zattrs"}


class LocalZarrStore(ZarrStore):
    """A group, with the sizes and modification times of its metadata and shards watched.

    Files of single chunks are not watched, since there may be millions.

    Parameters
    ----------
    path
        The folder of the group.
    options
        Whether to read chunks with direct I/O.
    """

    def __init__(self, path: Path, options: StorageOptions = NO_OPTIONS) -> None:
        super().__init__(Location.of(path).with_options(options))
        self._path = path
        self._absolute = path.absolute()  # it stays the same where the working folder changes
        self._identities: dict[Path, Identity] = {}
        self._n_lost: dict[str, int] = {}

    def _open(self) -> zarr.Group:
        return open_group(self._path, self._absolute)

    @property
    def _lasting_name(self) -> str:
        return str(self._absolute)

    def _watch(self, name: str, zarr_format: int) -> None:
        self._check_folders(name)
        metadata = Path(name) / _METADATA[zarr_format]
        self._identities[metadata] = self._identity(metadata)

    def stored(self, name: str) -> Any:
        """Return an array or group."""
        try:
            return super().stored(name)
        except KeyError:
            self._check_folders(name)
            raise

    def _check_folders(self, name: str) -> None:
        """Check that no folder of an array is a link to one that is missing."""
        path = self._absolute / name / "c"  # in which version 3 has chunks
        for folder in (path, *path.parents):
            if folder.is_symlink() and not folder.exists():
                raise broken_link(folder)

    def _check_links(self, name: str) -> None:
        """Check that no file of an array is a link to one that is missing; see `ZarrStore`."""
        for file in self._chunk_files(name):
            if file.is_symlink() and not file.exists():
                raise broken_link(file)

    def _files_of(self, name: str, layout: ZarrLayout) -> ByteStore:
        files = ZarrFiles(self._path / name, layout)
        return UnbufferedFiles(files) if self.location.options.unbuffered else files

    def _identity_of(self, name: str) -> LastingIdentity | None:
        return identity_of_files(self._absolute / name)

    def check_unchanged(self) -> None:
        """Check that the metadata has not changed; shards are checked when they are read."""
        for metadata, known in self._identities.items():
            if self._identity(metadata) != known:
                raise replaced(self._path / metadata)

    def stored_bytes(self, name: str) -> int:
        """Return the size of an array's chunks or shards in bytes."""
        return sum(file.stat().st_size for file in self._chunk_files(name))

    def n_lost(self, name: str) -> int:
        """Return how many files of chunks or shards of an array are missing."""
        if name not in self._n_lost:
            array = self.stored(name)
            n_files = math.prod(chunk_grid(array.shape, array.shards or array.chunks))
            self._n_lost[name] = max(0, n_files - sum(1 for _ in self._chunk_files(name)))
        return self._n_lost[name]

    def _chunk_files(self, name: str) -> Iterator[Path]:
        """Yield the paths of an array's chunks or shards."""
        for folder, _, files in os.walk(self._absolute / name, followlinks=True):
            yield from (Path(folder, file) for file in files if file not in _NO_CHUNKS)

    def _identity(self, metadata: Path) -> Identity:
        try:
            return identity((self._absolute / metadata).stat())
        except OSError as error:
            raise removed(self._path / metadata) from error


# An AnnData group of a zarr store on a web server or in an object store, unconverted.

_MOST_LISTED = 20_000  # files of an array; the server lists a thousand at a time


class RemoteZarrStore(ZarrStore):
    """A group whose metadata zarr reads, and whose chunks `RemoteObjects` reads.

    The versions of shards on the server are watched; also those of files of single chunks, if the
    server lists them and there are not too many.

    Parameters
    ----------
    location
        The group.
    """

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._versions: dict[str, Mapping[str, Version] | None] = {}
        self._metadata: dict[Location, Version] = {}
        self._n_files: dict[str, int] = {}

    def _open(self) -> zarr.Group:
        return _open_group(self.location)

    @property
    def _lasting_name(self) -> str:
        return str(self.location)

    def _watch(self, name: str, zarr_format: int) -> None:
        metadata = self.location / name / _METADATA[zarr_format]
        found = open_object(metadata)
        if self._metadata.setdefault(metadata, found) != found:
            raise replaced(metadata)

    def _files_of(self, name: str, layout: ZarrLayout) -> RemoteObjects:
        folder, n_files = self.location / name, math.prod(layout.file_grid)
        names = _Names(folder, layout)
        versions = versions_below(folder, _MOST_LISTED) if n_files <= _MOST_LISTED else None
        if versions is None and layout.sharded:
            versions = versions_of(folder, [names.name(file) for file in range(n_files)])
        self._versions[name] = versions
        self._n_files[name] = n_files
        if versions is None:
            return RemoteObjects(names, _any_version)
        return RemoteObjects(names, _Versions(names, versions))

    def _identity_of(self, name: str) -> LastingIdentity | None:
        versions = self._versions.get(name)
        if not versions or any(each.etag is None for each in versions.values()):
            return None
        parts = [f"{file} {each.size} {each.etag}" for file, each in sorted(versions.items())]
        return LastingIdentity(digest_of(str(self.location / name), *parts), is_settled=True)

    def check_unchanged(self) -> None:
        """Do nothing, since each answer of the server is checked."""

    def stored_bytes(self, name: str) -> int:
        """Return the size of an array's chunks or shards in bytes; 0 if they cannot be listed."""
        return sum(each.size for each in self._chunk_versions(name).values())

    def n_lost(self, name: str) -> int:
        """Return how many files of chunks or shards of an array are missing, if known."""
        if self._versions.get(name) is None:
            return 0
        array = self.stored(name)
        n_files = math.prod(chunk_grid(array.shape, array.shards or array.chunks))
        return max(0, n_files - len(self._chunk_versions(name)))

    def _chunk_versions(self, name: str) -> Mapping[str, Version]:
        versions = self._versions.get(name) or {}
        return {
            file: each
            for file, each in versions.items()
            if file.rpartition("/")[2] not in _NO_CHUNKS
        }


class _Names:
    """Locations of the files of an array; a class, so that it can be pickled."""

    def __init__(self, folder: Location, layout: ZarrLayout) -> None:
        self._folder, self._layout = folder, layout

    def name(self, file: int) -> str:
        return self._layout.file_name(file)

    def __call__(self, file: int) -> Location:
        return self._folder / self.name(file)


class _Versions:
    """Versions of the files of an array."""

    def __init__(self, names: _Names, versions: Mapping[str, Version]) -> None:
        self._names, self._versions = names, versions

    def __call__(self, file: int) -> Version | None:
        return self._versions.get(self._names.name(file))


def _any_version(file: int) -> Version | None:  # noqa: ARG001 - of any file
    return None


def _open_group(location: Location) -> zarr.Group:
    with damage_named(location, "obs"):
        store, path = store_of(location)
        try:
            expect_numcodecs()
            return zarr.open_group(store, path=path, mode="r")
        except (FileNotFoundError, KeyError) as error:
            msg = f"{location}: is not a zarr group; check the URL"
            raise FormatError(msg) from error


def remote_groups(location: Location) -> list[Location]:
    """Return the AnnData groups of a store, in the order of their numbers.

    Raises
    ------
    FormatError
        The store contains something else, or lacks one of its datasets.
    """
    location = replace(location, text=location.text.rstrip("/"))
    root = _open_group(location)
    with damage_named(location, "obs"):
        if "obs" in root and "var" in root:
            return [location]
        if root.attrs.get("encoding-type") != COLLECTION:
            msg = (
                f"{location}: is a zarr group, but neither AnnData (it has no `obs` or no `var`) "
                "nor a shuffled collection; give a store that anndata, annbatch or `cellfeed "
                "preshuffle` wrote"
            )
            raise FormatError(msg)
        n_groups = 0
        while f"dataset_{n_groups}" in root:
            n_groups += 1
    if not n_groups:
        msg = f"{location}: has no `dataset_0`; upload the store again"
        raise FormatError(msg)
    return [location / f"dataset_{number}" for number in range(n_groups)]
