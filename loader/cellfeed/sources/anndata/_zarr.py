"""The AnnData objects in a zarr store: one, or those of a shuffled collection.

annbatch's layout, which `cellfeed.preshuffle` writes too, is a group of groups ``dataset_0``,
``dataset_1`` and so on: https://annbatch.readthedocs.io
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from cellfeed import decode
from cellfeed._errors import FormatError
from cellfeed._lazy import zarr
from cellfeed.bytes import (
    ByteStore,
    LastingIdentity,
    Location,
    broken_link,
    digest_of,
    refuse_pipe,
    removed,
    replaced,
)
from cellfeed.bytes._remote import RemoteObjects, Version, open_object, versions_below, versions_of
from cellfeed.bytes._remote import zarr_store as store_of
from cellfeed.bytes._store import FolderFiles, files_below, identity_of_files
from cellfeed.decode._array import check_grid, chunk_grid
from cellfeed.decode._zarr import (
    ZarrLayout,
    zarr_array,
    zarr_layout,
)
from cellfeed.sources._registry import failures_named
from cellfeed.sources._source import WatchedFiles
from cellfeed.sources.anndata._file import AnnDataFile, damage_named, other_format_of

_NODE_METADATA = ("zarr.json", ".zgroup", ".zarray")
COLLECTION = "annbatch-preshuffled"
_DATASET = re.compile(r"dataset_(\d+)")
DATASETS = "cellfeed-datasets"  # the numbers of the datasets of a store that was added to
_UNFINISHED = ".cellfeed"  # what `cellfeed preshuffle` has in its output while it writes


def is_zarr(path: Path) -> bool:
    """Return whether a folder is a zarr store, or a group in one."""
    return any((path / name).is_file() for name in _NODE_METADATA)


def open_group(location: Location, absolute: Path | None = None) -> zarr.Group:
    """Open a group for reading.

    Parameters
    ----------
    location
        The group.
    absolute
        Its absolute path, if it is local; by default, in the current folder.

    Raises
    ------
    FormatError
        It is not a zarr group, or its metadata is damaged.
    """
    decode.expect_numcodecs()
    if location.path is not None:
        what = f"{location}: cannot be opened as a zarr group"
        with failures_named(what, "give a zarr store of AnnData"):
            store = _local_store()(absolute or location.path.absolute(), read_only=True)
            # Arrays may have been written anew since their metadata were consolidated.
            return zarr.open_group(store, mode="r", use_consolidated=False)
    with damage_named(location, "obs"):
        store, path = store_of(location)
        try:
            return zarr.open_group(store, path=path, mode="r")
        except (FileNotFoundError, KeyError) as error:
            raise FormatError(f"{location}: is not a zarr group; check the URL") from error


@cache
def _local_store() -> Any:
    class Files(zarr.storage.LocalStore):
        """Files of a folder, none of which is a pipe, or missing because it is a link to nothing.

        zarr would wait for ever there, or read a chunk of an array as zeros.
        """

        async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
            refuse_pipe(self.root / key)
            found = await super().get(key, *arguments, **options)
            return self._checked(key) if found is None else found

        def get_sync(self, key: str, *arguments: Any, **options: Any) -> Any:
            refuse_pipe(self.root / key)
            found = super().get_sync(key, *arguments, **options)
            return self._checked(key) if found is None else found

        def _checked(self, key: str) -> None:
            _check_links(self.root / key)

    return Files


def _check_links(path: Path) -> None:
    """Check that neither a path nor a folder of it is a link to one that is missing.

    Raises
    ------
    PathError
        One is.
    """
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            raise broken_link(each)


def _no_anndata(location: Location, root: zarr.Group) -> FormatError:
    other = None
    if location.path is not None:
        if (location.path / _UNFINISHED).is_dir():
            msg = f"{location}: is unfinished; run the same `cellfeed preshuffle` again"
            return FormatError(msg)
        for name in ("obs", "var"):
            _check_links(location.path / name)
        other = other_format_of(root)
    msg = other or (
        "a zarr group, but neither AnnData (it has no `obs` or no `var`) nor a shuffled "
        "collection; give a store that anndata, annbatch or `cellfeed preshuffle` wrote"
    )
    return FormatError(f"{location}: is {msg}")


def anndata_groups(location: Location) -> list[Location]:
    """Return the AnnData groups of a store, in the order of their numbers.

    Raises
    ------
    FormatError
        The store contains something else, or lacks one of its datasets.
    """
    path = location.path
    text = location.text.rstrip("/") if path is None else str(path)
    location = replace(location, text=text)
    root = open_group(location)
    with damage_named(location, "obs"):
        if "obs" in root and "var" in root:
            return [location]
        if root.attrs.get("encoding-type") != COLLECTION:
            raise _no_anndata(location, root)
        listed: Any = root.attrs.get(DATASETS)
        if not isinstance(listed, list | None):
            msg = f"{location}: `{DATASETS}` of its attributes is no list; copy the store again"
            raise FormatError(msg)
        if path is None:
            numbers = list[int](listed or ())
            while listed is None and f"dataset_{len(numbers)}" in root:
                numbers.append(len(numbers))
        else:
            matches = [_DATASET.fullmatch(entry.name) for entry in path.iterdir() if is_zarr(entry)]
            numbers = sorted(int(match[1]) for match in matches if match)
            if listed is not None:  # the others belong to an append that was stopped
                numbers = [number for number in numbers if number in set(listed)]
    if not numbers or numbers != (list(range(len(numbers))) if listed is None else listed):
        found = ", ".join(map(str, numbers)) or "none"
        wanted = "datasets numbered from 0" if listed is None else f"{len(listed)} datasets"
        msg = f"{location}: expected {wanted}, but found: {found}"
        remedy = "upload" if path is None else "copy or download"
        raise FormatError(f"{msg}; {remedy} the store again")
    return [location / f"dataset_{number}" for number in numbers]


# An AnnData group of a zarr store, local or remote: its arrays, and their chunks.


class ZarrStore(AnnDataFile):
    """A read-only AnnData group; zarr v2 or v3; calling it returns the `zarr.Group`.

    The metadata and the shards of a watched array must stay those that existed when `watch` was
    called, in any process.
    """

    library = "zarr"

    def __init__(self, location: Location, lasting_name: str) -> None:
        super().__init__(location, lasting_name)
        self._layouts: dict[str, ZarrLayout | decode.SlowRead] = {}
        self._files: dict[str, ByteStore] = {}

    @abstractmethod
    def _watch(self, name: str, zarr_format: int) -> None:
        """Record the metadata of an array, so that changes are noticed."""

    @abstractmethod
    def _files_of(self, name: str, layout: ZarrLayout) -> ByteStore:
        """Return the files of an array."""

    @abstractmethod
    def _chunk_sizes(self, name: str) -> Iterator[int] | None:
        """Return the sizes of an array's chunks or shards in bytes; None if unknown."""

    def stored_bytes(self, name: str) -> int | None:
        """Return the size of an array's chunks or shards in bytes; None if unknown."""
        sizes = self._chunk_sizes(name)
        return None if sizes is None else sum(sizes)

    def n_lost(self, name: str) -> int:
        """Return how many files of chunks or shards of an array are missing, if known."""
        sizes = self._chunk_sizes(name)
        if sizes is None:
            return 0
        array = self.stored(name)
        n_files = math.prod(chunk_grid(array.shape, array.shards or array.chunks))
        return max(0, n_files - sum(1 for _ in sizes))

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

    def stored(self, name: str) -> Any:
        """Return an array or group."""
        # With zarr's own codecs: those of zarrs are faster, but stop for ever in a forked process
        # once its parent has used them.
        decode.expect_numcodecs()
        return self()[name]

    def slow_read(self, name: str) -> decode.SlowRead | None:
        """Return why only zarr can read an array; None if cellfeed can."""
        layout = self._layouts[name]
        return layout if isinstance(layout, decode.SlowRead) else None

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> decode.ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason."""
        layout = self._layouts[name]
        if isinstance(layout, decode.SlowRead):
            return None
        return zarr_array(
            layout, self._files[name], name, self.table_cache(name), lost_is_zero=lost_is_zero
        )


# An AnnData group of a local zarr store.

_METADATA = {2: ".zarray", 3: "zarr.json"}
_NO_CHUNKS = {"zarr.json", ".zarray", ".zattrs"}
_MOST_COMPARED = 1_000  # files of an array, of which there are many only without shards


class LocalZarrStore(ZarrStore):
    """A group, with the sizes and modification times of its metadata and shards watched.

    Files of single chunks are not watched, since there may be millions.

    Parameters
    ----------
    location
        The folder of the group; its options say whether pages are dropped.
    """

    def __init__(self, location: Location) -> None:
        self._path = Path(location)
        self._absolute = self._path.absolute()  # it stays the same where the working folder changes
        super().__init__(location, str(self._absolute))
        self._metadata = WatchedFiles()
        self._n_lost: dict[str, int] = {}

    def _open(self) -> zarr.Group:
        return open_group(self.location, self._absolute)

    def _watch(self, name: str, zarr_format: int) -> None:
        self._check_folders(name)
        metadata = Path(name, _METADATA[zarr_format])
        path, shown = self._absolute / metadata, self._path / metadata
        try:
            self._metadata.see(path, path.stat(), shown)
        except OSError as error:
            raise removed(shown) from error

    def stored(self, name: str) -> Any:
        """Return an array or group."""
        try:
            return super().stored(name)
        except KeyError:
            self._check_folders(name)
            raise

    def _check_folders(self, name: str) -> None:
        """Check that no folder of an array is a link to one that is missing."""
        _check_links(self._absolute / name / "c")  # in which version 3 has chunks

    def _files_of(self, name: str, layout: ZarrLayout) -> ByteStore:
        n_files = math.prod(layout.file_grid) if layout.sharded else 0
        # A shard is read often; other files are opened for each read.
        return FolderFiles(
            self._path / name,
            layout.file_names,
            n_files,
            stay_open=layout.sharded,
            check=self._metadata.check,
        )

    def _identity_of(self, name: str) -> LastingIdentity | None:
        return identity_of_files(self._absolute / name)

    def check_unchanged(self) -> None:
        """Check that the metadata has not changed; shards are checked when they are read."""
        self._metadata.check()

    def are_same(self, name: str, other: str) -> bool:
        """Return whether two arrays are the same files, by hard links."""
        layout = self._layouts.get(name)
        if not isinstance(layout, ZarrLayout) or layout != self._layouts.get(other):
            return False
        if math.prod(layout.file_grid) > _MOST_COMPARED:
            return False
        return self._inodes(name) == self._inodes(other)

    def _inodes(self, name: str) -> dict[Path, tuple[int, int]]:
        """Return the device and inode of each chunk or shard."""
        found = ((file, file.stat()) for file in self._chunk_files(name))
        folder = self._absolute / name
        return {file.relative_to(folder): (of.st_dev, of.st_ino) for file, of in found}

    def n_lost(self, name: str) -> int:
        """Return how many files of chunks or shards of an array are missing."""
        if name not in self._n_lost:
            self._n_lost[name] = super().n_lost(name)
        return self._n_lost[name]

    def _chunk_sizes(self, name: str) -> Iterator[int]:
        return (file.stat().st_size for file in self._chunk_files(name))

    def _chunk_files(self, name: str) -> Iterator[Path]:
        """Yield the paths of an array's chunks or shards."""
        files = files_below(self._absolute / name)
        return (file for file in files if file.name not in _NO_CHUNKS)


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
        super().__init__(location, str(location))
        self._versions: dict[str, Mapping[str, Version] | None] = {}
        self._metadata: dict[Location, Version] = {}

    def _open(self) -> zarr.Group:
        return open_group(self.location)

    def _watch(self, name: str, zarr_format: int) -> None:
        metadata = self.location / name / _METADATA[zarr_format]
        found = open_object(metadata)
        if self._metadata.setdefault(metadata, found) != found:
            raise replaced(metadata)

    def _files_of(self, name: str, layout: ZarrLayout) -> RemoteObjects:
        folder, n_files = self.location / name, math.prod(layout.file_grid)
        versions = versions_below(folder, _MOST_LISTED) if n_files <= _MOST_LISTED else None
        if versions is None and layout.sharded:
            versions = versions_of(folder, [layout.file_name(file) for file in range(n_files)])
        self._versions[name] = versions
        return RemoteObjects(
            partial(_location_of, folder, layout), partial(_version_of, versions, layout)
        )

    def _identity_of(self, name: str) -> LastingIdentity | None:
        versions = self._versions.get(name)
        if not versions or any(each.etag is None for each in versions.values()):
            return None
        parts = [f"{file} {each.size} {each.etag}" for file, each in sorted(versions.items())]
        return LastingIdentity(digest_of(str(self.location / name), *parts), is_settled=True)

    def bytes_there(self, name: str) -> int | None:
        """Return the bytes of an array; if unknown, as if all were as its last chunk or shard."""
        known = self.stored_bytes(name)
        if known is not None:
            return known
        array = self.stored(name)
        grid = chunk_grid(array.shape, array.shards or array.chunks)
        last = array.metadata.encode_chunk_key(tuple(n - 1 for n in grid))
        found = versions_of(self.location / name, [last])
        return math.prod(grid) * found[last].size if found else 0

    def _chunk_sizes(self, name: str) -> Iterator[int] | None:
        versions = self._versions.get(name)
        if versions is None:
            return None
        return (
            each.size
            for file, each in versions.items()
            if file.rpartition("/")[2] not in _NO_CHUNKS
        )


def _location_of(folder: Location, layout: ZarrLayout, file: int) -> Location:
    return folder / layout.file_name(file)


def _version_of(
    versions: Mapping[str, Version] | None, layout: ZarrLayout, file: int
) -> Version | None:
    """Return the version of a file; None if any is accepted, or there is no such file."""
    return None if versions is None else versions.get(layout.file_name(file))
