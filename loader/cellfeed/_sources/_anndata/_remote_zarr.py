"""An AnnData group of a zarr store on a web server or in an object store, unconverted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from cellfeed._bytes import LastingIdentity, Location, digest_of, replaced
from cellfeed._chunks import ZarrLayout, chunk_grid, expect_numcodecs
from cellfeed._errors import FormatError
from cellfeed._lazy import zarr
from cellfeed._remote import RemoteObjects, Version, open_object, versions_below, versions_of
from cellfeed._remote import zarr_store as store_of
from cellfeed._sources._anndata._damage import damage_named
from cellfeed._sources._anndata._zarr_groups import COLLECTION
from cellfeed._sources._anndata._zarr_store import ZarrStore

__all__ = ["RemoteZarrStore", "remote_groups"]

_METADATA = {2: ".zarray", 3: "zarr.json"}
_NO_CHUNKS = {"zarr.json", ".zarray", ".zattrs"}
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
