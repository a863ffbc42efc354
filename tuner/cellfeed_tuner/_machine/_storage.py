"""The file systems under the data."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

__all__ = ["Storage", "StorageKind", "describe_storage"]

StorageKind = Literal["local", "network", "memory"]
"""Where a file system keeps its data. FUSE counts as network, since it hides what is below."""

_SYS = Path("/sys")

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

    Attributes
    ----------
    mount_point
        Folder on which the file system is mounted.
    file_system
        Its type, such as ``ext4`` or ``lustre``.
    kind
        Whether the data lie on this machine's disks, behind a network, or in memory.
    device
        What is mounted: a device, or an export of a server.
    rotational
        Whether the kernel takes the device for a spinning disk. Virtual disks often say so
        whatever lies below them.
    model
        Model name of the device.
    """

    mount_point: str | None
    file_system: str | None
    kind: StorageKind | None
    device: str | None
    rotational: bool | None
    model: str | None


def describe_storage(paths: Sequence[Path]) -> tuple[Storage, ...]:
    """Describe each file system under some files, in the order in which they first lie on it."""
    return tuple(
        _describe(mount, files[0]) for mount, files in _files_by_mount(paths, _mounts()).items()
    )


# File systems


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """A row of the table of mounted file systems."""

    mount_point: str
    file_system: str
    device: str


def _mounts() -> list[_Mount]:
    with contextlib.suppress(OSError):
        return [
            _Mount(mount_point=row.mountpoint, file_system=row.fstype, device=row.device)
            for row in psutil.disk_partitions(all=True)
        ]
    return []


def _files_by_mount(
    paths: Sequence[Path], mounts: Sequence[_Mount]
) -> dict[_Mount | None, list[Path]]:
    groups: dict[_Mount | None, list[Path]] = {}
    for path in (path.resolve() for path in paths):
        groups.setdefault(_mount_of(path, mounts), []).append(path)
    return groups


def _mount_of(path: Path, mounts: Sequence[_Mount]) -> _Mount | None:
    """Return the innermost mount above a path; the last of several on one folder hides the rest."""
    above = [mount for mount in reversed(mounts) if path.is_relative_to(mount.mount_point)]
    return max(above, key=lambda mount: len(Path(mount.mount_point).parts), default=None)


def _kind(file_system: str) -> StorageKind:
    family = file_system.lower().partition(".")[0]  # "fuse.sshfs" is of the family "fuse"
    if family in _MEMORY:
        return "memory"
    return "network" if family in _NETWORK else "local"


def _describe(mount: _Mount | None, file: Path) -> Storage:
    disk = _disk_folder(file, mount.device if mount else "", _SYS)
    return Storage(
        mount_point=mount.mount_point if mount else None,
        file_system=mount.file_system if mount else None,
        kind=_kind(mount.file_system) if mount else None,
        device=(mount.device or None) if mount else None,
        rotational=_flag(disk / "queue/rotational") if disk else None,
        model=_text(disk / "device/model") if disk else None,
    )


def _disk_folder(path: Path, device: str, sys_root: Path) -> Path | None:
    """Return the folder in which /sys describes the disk below a file."""
    for number in _device_numbers(path, device):
        folder = sys_root / f"dev/block/{os.major(number)}:{os.minor(number)}"
        if folder.exists():
            return _whole_disk(folder.resolve())
    return None


def _device_numbers(path: Path, device: str) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield path.stat().st_dev
    # A file of btrfs, for one, has a device number that belongs to no disk.
    with contextlib.suppress(OSError):
        status = Path(device).stat()
        if stat.S_ISBLK(status.st_mode):
            yield status.st_rdev


def _whole_disk(folder: Path) -> Path:
    """Go from a partition, or a mapped device with one disk below it, to the disk."""
    if (folder / "partition").exists():
        return _whole_disk(folder.parent)
    slaves = folder / "slaves"
    below = list(slaves.iterdir()) if slaves.is_dir() else []
    return _whole_disk(below[0].resolve()) if len(below) == 1 else folder


def _flag(path: Path) -> bool | None:
    return {"0": False, "1": True}.get(_text(path) or "")


def _text(path: Path) -> str | None:
    """Return a file's text without blanks around it, None if it is absent or empty."""
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
