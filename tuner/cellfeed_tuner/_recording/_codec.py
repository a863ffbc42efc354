"""How a collection's values are compressed, in words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import zarr

__all__ = ["codecs"]

_UNKNOWN = "unknown"


def codecs(paths: Sequence[Path]) -> list[str]:
    """Return how the values of X are compressed, each kind once.

    Parameters
    ----------
    paths
        The ``.h5ad`` files and zarr stores of a collection.

    Returns
    -------
    Such as ``["gzip 4"]``, ``["none"]`` or ``["zstd, sharded"]``; "unknown" where X is not found.
    """
    return sorted({_zarr_codec(path) if path.is_dir() else _hdf5_codec(path) for path in paths})


def _hdf5_codec(path: Path) -> str:
    with h5py.File(path) as file:
        values = _values(file)
        if values is None:
            return _UNKNOWN
        level = "" if values.compression_opts is None else f" {values.compression_opts}"
        return f"{values.compression}{level}" if values.compression else "none"


def _zarr_codec(path: Path) -> str:
    values = _values(zarr.open_group(path, mode="r"))
    if values is None:
        return _UNKNOWN
    names = [_zarr_name(each) for each in values.compressors] or ["none"]
    return ", ".join([*names, *(["sharded"] if values.shards else [])])


def _zarr_name(compressor: Any) -> str:
    if hasattr(compressor, "codec_id"):  # format 2
        return str(compressor.codec_id)
    return str(compressor.to_dict()["name"])


def _values(root: Any) -> Any:
    """Return the array that holds the values of X, or None."""
    if "X" not in root:
        return None
    matrix = root["X"]
    if not isinstance(matrix, h5py.Group | zarr.Group):
        return matrix
    return matrix.get("data")
