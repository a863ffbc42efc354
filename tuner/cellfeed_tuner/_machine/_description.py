"""The machine as this process sees it: cores, memory, storage under the data, versions."""

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import h5py
import psutil

from cellfeed.machine import usable_cores, usable_memory_bytes

__all__ = [
    "Cpu", "Machine", "Memory", "Platform", "Storage", "StorageKind", "describe_machine",
    "describe_storage", "package_version",
]  # fmt: skip

StorageKind = Literal["local", "network", "memory"]
"""Where a file system keeps its data. FUSE counts as network, since it may hide one."""

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# fmt: off
_NETWORK = frozenset({
    "9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "fhgfs", "fuse", "glusterfs", "gpfs", "lustre",
    "macfuse", "nfs", "nfs4", "orangefs", "osxfuse", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs",
    "webdav", "wekafs",
})
# fmt: on


_PACKAGES = ("cellfeed", "anndata", "h5py", "numpy", "scipy", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The file system under some of the data, with None for an unknown field.

    ``file_system`` is its type, such as ``ext4``; ``kind`` says whether it is on this machine's
    disks, on a network or in memory; ``device`` is a device, or an export of a server.
    """

    mount_point: str | None
    file_system: str | None
    kind: StorageKind | None
    device: str | None


_UNKNOWN = Storage(mount_point=None, file_system=None, kind=None, device=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processor; ``model`` is None if the system does not report it.

    ``usable_cores`` is the lower of this process's affinity and its control group's quota, which
    may be fractional.
    """

    model: str | None
    logical_cores: int
    usable_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Main memory of the machine, and how much this process can take now.

    That is without swapping or reaching its control group's limit.
    """

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The operating system, its kernel, Python, and the packages that affect speed.

    ``system`` is None if unknown, and so is the version of a package that is not installed.
    """

    system: str | None
    kernel: str
    architecture: str
    python: str
    packages: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All properties of a machine that measured throughput depends on.

    Attributes
    ----------
    cpu
        Processor and usable cores.
    memory
        Total and available memory.
    storage
        Each file system under the data.
    platform
        Operating system and versions.
    """

    cpu: Cpu
    memory: Memory
    storage: tuple[Storage, ...]
    platform: Platform


def describe_machine(paths: Sequence[Path]) -> Machine:
    """Describe the machine, and the file systems under some files.

    Returns
    -------
    Machine
        With None for whatever this system does not report.

    Examples
    --------
    >>> machine = describe_machine([])
    >>> 0 < machine.cpu.usable_cores <= machine.cpu.logical_cores
    True
    """
    return Machine(
        cpu=Cpu(
            model=_cpu_model(),
            logical_cores=psutil.cpu_count(logical=True) or 1,
            usable_cores=usable_cores(),
        ),
        memory=Memory(
            total_bytes=psutil.virtual_memory().total, available_bytes=usable_memory_bytes()
        ),
        storage=describe_storage(paths),
        platform=Platform(
            system=_system(),
            kernel=f"{platform.system()} {platform.release()}",
            architecture=platform.machine(),
            python=platform.python_version(),
            packages={name: package_version(name) for name in _PACKAGES}
            | {"hdf5": h5py.version.hdf5_version},
        ),
    )


def _cpu_model() -> str | None:
    if platform.system() != "Linux":
        return platform.processor() or None
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return None


def _system() -> str | None:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def package_version(distribution: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe_storage(paths: Sequence[Path]) -> tuple[Storage, ...]:
    """Describe each file system under some files, in the order of the files."""
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
