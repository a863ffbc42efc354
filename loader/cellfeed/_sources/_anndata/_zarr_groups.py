"""The AnnData objects in a zarr store: one, or those of a shuffled collection.

annbatch's layout, which `cellfeed.preshuffle` writes too, is a group of groups ``dataset_0``,
``dataset_1`` and so on: https://annbatch.readthedocs.io
"""

from __future__ import annotations

import re
from pathlib import Path

from cellfeed._bytes import Location
from cellfeed._chunks import expect_numcodecs
from cellfeed._errors import FormatError
from cellfeed._lazy import zarr
from cellfeed._sources._anndata._damage import damage_named, other_format_of

__all__ = ["COLLECTION", "anndata_groups", "is_zarr", "metadata_of", "open_group"]

_METADATA = ("zarr.json", ".zgroup", ".zarray")
COLLECTION = "annbatch-preshuffled"
_DATASET = re.compile(r"dataset_(\d+)")
_UNFINISHED = ".cellfeed"  # what `cellfeed preshuffle` has in its output while it writes


def is_zarr(path: Path) -> bool:
    """Return whether a folder is a zarr store, or a group in one."""
    return metadata_of(path) is not None


def metadata_of(path: Path) -> Path | None:
    """Return the metadata file of a zarr store; None if a folder is not a zarr store."""
    return next((path / name for name in _METADATA if (path / name).is_file()), None)


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
