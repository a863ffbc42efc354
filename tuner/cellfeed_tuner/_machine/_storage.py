"""The file systems under the data."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

__all__ = ["Storage", "StorageKind", "describe_storage"]

StorageKind = Literal["local", "network", "memory"]
"""Where a file system keeps its data. FUSE counts as network, since it hides what is below."""

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# fmt: off
_NETWORK = frozenset({
    "9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "fhgfs", "fuse", "glusterfs", "gpfs", "lustre",
    "macfuse", "nfs", "nfs4", "orangefs", "osxfuse", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs",
    "webdav", "wekafs",
})
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The file system under some of the data, None in each field that cannot be had.

    ``file_system`` is its type, such as ``ext4``, ``kind`` whether it lies on this machine's disks,
    behind a network or in memory, and ``device`` a device, or an export of a server.
    """

    mount_point: str | None
    file_system: str | None
    kind: StorageKind | None
    device: str | None


_UNKNOWN = Storage(mount_point=None, file_system=None, kind=None, device=None)


def describe_storage(paths: Sequence[Path]) -> tuple[Storage, ...]:
    """Describe each file system under some files, in the order in which they first lie on it."""
    mounts = _mounts()
    return tuple(dict.fromkeys(_storage_of(path.resolve(), mounts) for path in paths))


def _mounts() -> list[Storage]:
    with contextlib.suppress(OSError):
        return [
            Storage(
                mount_point=row.mountpoint,
                file_system=row.fstype,
                kind=_kind(row.fstype),
                device=row.device or None,
            )
            for row in psutil.disk_partitions(all=True)
        ]
    return []


def _storage_of(path: Path, mounts: Sequence[Storage]) -> Storage:
    """Return the innermost mount above a path; the last of several on one folder hides the rest."""
    above = [each for each in reversed(mounts) if path.is_relative_to(each.mount_point or "")]
    return max(above, key=lambda each: len(Path(each.mount_point or "").parts), default=_UNKNOWN)


def _kind(file_system: str) -> StorageKind:
    family = file_system.lower().partition(".")[0]  # "fuse.sshfs" is of the family "fuse"
    if family in _MEMORY:
        return "memory"
    return "network" if family in _NETWORK else "local"
