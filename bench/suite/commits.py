"""The code of a commit, written beside the working tree."""

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import click


def commit_of(name: str, *, root: Path) -> str:
    """Return the hash of a commit, branch or tag.

    Raises
    ------
    click.BadParameter
        There is none with that name.
    """
    ended = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if ended.returncode:
        msg = f"there is no commit, branch or tag `{name}` here"
        raise click.BadParameter(msg)
    return ended.stdout.decode().strip()


def has_changes(*, root: Path) -> bool:
    """Return whether the working tree differs from the last commit."""
    return bool(_git(root, "status", "--porcelain").stdout.strip())


def source_of(commit: str, folder: Path, *, root: Path) -> Path:
    """Write the packages of a commit to a folder, unless they exist.

    Raises
    ------
    click.BadParameter
        The commit has no such packages.
    """
    source, partial = folder / commit, folder / f"{commit}.partial"
    if source.exists():
        return source
    ended = _git(root, "archive", commit, "loader", "tuner")
    if ended.returncode:
        raise click.BadParameter(ended.stderr.decode().strip())
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(ended.stdout)) as packed:
        packed.extractall(partial, filter="data")
    return partial.rename(source)


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
