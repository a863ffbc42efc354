"""Let the kernel forget what it holds of some files."""

import contextlib
import os
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def drop(folders: list[Path]) -> str:
    """Write everything to disk, forget the pages of all files in some folders, and say how."""
    os.sync()  # a page that is not on disk yet cannot be dropped
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
    with contextlib.suppress(OSError):
        DROP_CACHES.write_text("1")
        return "dropped by posix_fadvise for each file, then by drop_caches"
    return "dropped by posix_fadvise for each file"
