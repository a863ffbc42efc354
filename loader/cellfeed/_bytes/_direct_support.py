"""Checking whether a file supports direct I/O, before it is used."""

import errno
import mmap
import os
from pathlib import Path

from cellfeed._bytes._direct import ALIGNMENT, DIRECT
from cellfeed._errors import ParameterError

__all__ = ["check_direct"]

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")  # of which some only seem to take O_DIRECT
_MOUNTS = Path("/proc/self/mountinfo")
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def check_direct(path: Path) -> None:
    """Check that the system and the file system of a file support direct I/O.

    Parameters
    ----------
    path
        A readable file; errors of other files are reported when they are opened.

    Raises
    ------
    ParameterError
        They do not support it.
    """
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        msg = f"{path}: this system does not support direct I/O, which needs Linux"
        raise ParameterError(f"{msg}; open it without `direct_io`")
    kind = _file_system(path)
    if kind in _IN_MEMORY or not _takes_direct_reads(path):
        which = f"its file system ({kind})" if kind else "its file system"
        raise ParameterError(
            f"{path}: {which} does not support direct I/O; open it without `direct_io`"
        )


def _takes_direct_reads(path: Path) -> bool:
    try:
        descriptor = os.open(path, DIRECT)
    except OSError as error:
        return error.errno not in _REFUSED
    try:
        os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT)], 0)
    except OSError as error:
        return error.errno not in _REFUSED
    finally:
        os.close(descriptor)
    return True


def _file_system(path: Path) -> str:
    """Return the type of a file's file system, such as "ext4"; empty if unknown."""
    try:
        device = path.stat().st_dev
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        # Such as "36 35 98:0 /root /mount rw,noatime master:1 - ext4 /dev/sda rw".
        mount, _, what = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            return what.partition(" ")[0]
    return ""
