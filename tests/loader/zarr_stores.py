"""How are small zarr stores written quickly? In memory, and then file by file.

zarr hands each file that it writes to another thread and waits for it, which takes most of the
time of a test that writes many of them. The files are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

__all__ = ["written_at_once"]


@contextmanager
def written_at_once(path: Path) -> Iterator[MemoryStore]:
    """Take a store, and write what it holds then as files in a folder of its own."""
    files = dict[str, Buffer]()
    yield MemoryStore(files)
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.to_bytes())
