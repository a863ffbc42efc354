"""What a comparison ran on: machine, disk, code and versions."""

import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
from bench.here.document import Code, Disk, Environment, Machine, Memory, Processor

from cellfeed.machine import cpu_quota, memory_headroom, usable_cores
from cellfeed_tuner._machine import describe_machine

ROOT = Path(__file__).parents[2]
BUSY_SECONDS = 0.2


def machine_of(folder: Path) -> Machine:
    """Describe the machine, and the disk of a folder."""
    found = describe_machine([folder])
    (storage,) = found.storage
    is_local = storage.kind == "local"
    usage = psutil.disk_usage(str(folder))
    block = _block_device(folder)
    return Machine(
        processor=Processor(
            model=found.cpu.model,
            architecture=found.platform.architecture,
            logical_cores=found.cpu.logical_cores,
            usable_cores=usable_cores(),
            cgroup_quota_cores=cpu_quota(),
        ),
        memory=Memory(
            total_bytes=found.memory.total_bytes,
            available_bytes=found.memory.available_bytes,
            swap_bytes=psutil.swap_memory().total,
            cgroup_left_bytes=memory_headroom(),
        ),
        disk=Disk(
            file_system=storage.file_system,
            kind=storage.kind,
            device=storage.device if is_local else None,
            model=_text(block / "device" / "model") if block else None,
            rotates=_rotates(block),
            total_bytes=usage.total,
            free_bytes=usage.free,
        ),
        system=found.platform.system,
        kernel=f"{platform.system()} {platform.release()}",
    )


def _block_device(folder: Path) -> Path | None:
    """Return what Linux says of the disk of a folder, not of its partition."""
    number = folder.stat().st_dev
    found = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not found.exists():
        return None
    found = found.resolve()
    return found.parent if (found / "partition").exists() else found


def _rotates(block: Path | None) -> bool | None:
    said = _text(block / "queue" / "rotational") if block else None
    return None if said is None else said == "1"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def busy_share() -> float:
    """Return the share of the processors that is busy now, 0 to 1."""
    return psutil.cpu_percent(BUSY_SECONDS) / 100


def code_of(measuring: str, root: Path = ROOT) -> Code:
    """Return the commit of a checkout and what was changed; null where it is none of git."""
    top, commit, status, changes = (
        _git(root, *words)
        for words in (
            ("rev-parse", "--show-toplevel"),
            ("rev-parse", "HEAD"),
            ("status", "--porcelain"),
            ("diff", "HEAD"),
        )
    )
    # A copy without git may lie within another repository.
    is_checkout = top is not None and Path(top.strip()).resolve() == root.resolve()
    if not is_checkout or commit is None or status is None or changes is None:
        return Code(commit=None, dirty=None, changed=[], changes_sha256=None, measuring=measuring)
    return Code(
        commit=commit.strip(),
        dirty=bool(status),
        changed=sorted(line[3:] for line in status.splitlines()),
        changes_sha256=hashlib.sha256(changes.encode()).hexdigest() if changes else None,
        measuring=measuring,
    )


def _git(root: Path, *words: str) -> str | None:
    command = ["git", "-C", root, *words]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return None
    return None if ran.returncode else ran.stdout


def own_environment() -> Environment:
    """Return the versions of everything that is installed beside cellfeed."""
    return Environment(
        name=None,
        python=platform.python_version(),
        packages={each.name: each.version for each in _distributions()},
        failed=None,
    )


def _distributions() -> list[metadata.Distribution]:
    found = {each.name: each for each in metadata.distributions() if each.name}
    return [found[name] for name in sorted(found, key=str.lower)]


_ASK = (
    "import json, platform; from importlib import metadata; "
    "print(json.dumps([platform.python_version(), "
    "{d.name: d.version for d in metadata.distributions() if d.name}]))"
)


def environment_of(name: str, interpreter: Path) -> Environment:
    """Return the versions of everything in an environment of a peer."""
    ran = subprocess.run(
        [interpreter, "-I", "-c", _ASK], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        lines = ran.stderr.splitlines() or [f"exit status {ran.returncode}"]
        return Environment(name=name, python=None, packages={}, failed=lines[-1])
    python, packages = json.loads(ran.stdout)
    ordered = {each: packages[each] for each in sorted(packages, key=str.lower)}
    return Environment(name=name, python=python, packages=ordered, failed=None)
