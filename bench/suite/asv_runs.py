"""Run asv: on the code of a commit in this environment, or in environments that asv makes."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".asv"
SOME_FAILED = 2  # asv's exit status


@dataclass(frozen=True, kw_only=True)
class Side:
    """Code to measure in this environment, and where its results go.

    Attributes
    ----------
    name
        Name of its folder.
    source
        Folder with ``loader`` and ``tuner``.
    commit
        The commit that results are recorded for.
    """

    name: str
    source: Path
    commit: str

    @property
    def results(self) -> Path:
        """asv's results of this code alone."""
        return FOLDER / self.name / "results"

    def begin(self) -> None:
        """Delete earlier results, and write asv's configuration."""
        shutil.rmtree(self.results.parent, ignore_errors=True)
        self.results.mkdir(parents=True)
        folders = {"repo": ROOT, "benchmark_dir": ROOT / "bench", "results_dir": self.results}
        settings = json.loads((ROOT / "asv.conf.json").read_text())
        settings |= {name: str(path) for name, path in folders.items()}
        self._configuration.write_text(json.dumps(settings))

    def measure(self, *options: str) -> None:
        """Measure this working tree's suite on the code; samples are added to existing ones."""
        asv(
            "run", "--python=same", "--show-stderr", "--append-samples",
            f"--config={self._configuration}", f"--set-commit-hash={self.commit}", *options,
            ASV_PYTHONPATH=os.pathsep.join(str(self.source / each) for each in ("loader", "tuner")),
        )  # fmt: skip

    @property
    def _configuration(self) -> Path:
        return self.results.parent / "asv.conf.json"


def asv(*arguments: str, **variables: str) -> None:
    """Run asv, which reports progress on stderr.

    asv keeps a description of the machine in the home folder, and prompts if there is none; here it
    gets its own home folder with a default description.

    Raises
    ------
    click.ClickException
        It failed before measuring.
    """
    home = Path.home()
    environment = {
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        **os.environ,
        **variables,
        "HOME": str(FOLDER),
    }
    FOLDER.mkdir(exist_ok=True)
    if not (FOLDER / ".asv-machine.json").exists():
        subprocess.run(
            [sys.executable, "-m", "asv", "machine", "--yes"],
            cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "asv", *arguments],
        cwd=ROOT, env=environment, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr,
    )  # fmt: skip
    if ended.returncode not in {0, SOME_FAILED}:
        msg = f"`asv {arguments[0]}` ended with status {ended.returncode}; see above"
        raise click.ClickException(msg)


def commit_of(name: str) -> str:
    """Return the hash of a commit, branch or tag.

    Raises
    ------
    click.BadParameter
        There is none with that name.
    """
    ended = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if ended.returncode:
        msg = f"there is no commit, branch or tag `{name}` here"
        raise click.BadParameter(msg)
    return ended.stdout.decode().strip()


def has_changes() -> bool:
    """Return whether the working tree differs from the last commit."""
    return bool(_git("status", "--porcelain").stdout.strip())


def source_of(commit: str, folder: Path) -> Path:
    """Write the packages of a commit to a folder, unless they exist.

    Raises
    ------
    click.BadParameter
        The commit has no such packages.
    """
    source, partial = folder / commit, folder / f"{commit}.partial"
    if source.exists():
        return source
    ended = _git("archive", commit, "loader", "tuner")
    if ended.returncode:
        raise click.BadParameter(ended.stderr.decode().strip())
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(ended.stdout)) as packed:
        # Python before 3.11.4 has no filters.
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        packed.extractall(partial)
    return partial.rename(source)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
