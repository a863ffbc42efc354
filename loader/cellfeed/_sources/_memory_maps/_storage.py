"""Folders of memory maps."""

from collections.abc import Sequence

from cellfeed._bytes import Location
from cellfeed._sources._base import Source, Storage, StorageFacts
from cellfeed._sources._memory_maps._arrays import is_npy_folder, is_scdl
from cellfeed._sources._memory_maps._source import open_memory_maps

__all__ = ["MEMORY_MAPS", "SCDL"]


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has X
    return open_memory_maps(location)


SCDL = Storage(
    name="BioNeMo SCDL",
    open=_open,
    suffixes=(".scdl",),
    recognizes=is_scdl,
    extra="scdl",
    facts=StorageFacts(
        recognized="a folder with `data.npy`, `col_ptr.npy` and `row_ptr.npy`; BioNeMo's object",
        reading="fast: arrays are read directly from the files; float16 by NumPy",
    ),
)
MEMORY_MAPS = Storage(
    name="memory-mapped CSR",
    open=_open,
    recognizes=is_npy_folder,
    facts=StorageFacts(
        recognized="a folder of `scipy.sparse.save_npz`, uncompressed and unzipped",
        reading="fast: arrays are read directly from the files; float16 by NumPy",
        labels="columns of the `obs` given to `MemoryMapSource`",
    ),
)
