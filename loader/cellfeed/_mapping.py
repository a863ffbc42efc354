"""Memory-mapping files of a cache, so that processes share their memory."""

import mmap
import os
import resource
import sys
import weakref
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

_SHARE_OF_OPEN_FILES = 8  # of what the process may open; a mapping holds one

# Where a file that another machine removes is gone for whoever has mapped it: a crash.
_NOT_MAPPED = {"9p", "afs", "cifs", "fuse.sshfs", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}

_mapped: list[weakref.ref[mmap.mmap]] = []


def map_or_read(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a file, read-only: mapped, or a copy if mapping is not safe.

    Raises
    ------
    OSError, ValueError
        The file cannot be read, or is empty.
    """
    with path.open("rb") as file:
        if not _may_map(path.parent):
            content = np.fromfile(file, np.uint8)
            content.flags.writeable = False
            return content
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _mapped.append(weakref.ref(mapped))
    return np.frombuffer(mapped, np.uint8)


def _may_map(folder: Path) -> bool:
    _mapped[:] = [each for each in _mapped if each() is not None]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = sys.maxsize if limit == resource.RLIM_INFINITY else limit // _SHARE_OF_OPEN_FILES
    return len(_mapped) < most and file_system(folder) not in _NOT_MAPPED


def file_system(path: Path) -> str:
    """Return the type of the file system of a file or folder, such as "ext4"; "" if unknown."""
    resolved = Path(os.path.realpath(path))
    mounted = [
        (len(each.mountpoint), each.fstype)
        for each in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(each.mountpoint)
    ]
    return max(mounted, default=(0, ""))[1]
