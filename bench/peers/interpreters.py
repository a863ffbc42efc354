"""A virtual environment for each peer, made on first use from pinned versions."""

import functools
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from failures import FailedError

REQUIREMENTS = Path(__file__).parent / "environments"
DEFAULT_FOLDER = Path(__file__).parents[2] / ".peers"
DEFAULT_PYTHON = "3.11"
PYTHON_OF = {"annbatch": "3.12"}
INSTALL_SECONDS = 3600


class Interpreters:
    """Finds the interpreter of each environment, making the environment if needed.

    Parameters
    ----------
    folder
        Where the environments are.
    pythons
        Where the Python of a version is, as ``{"3.12": path}``; others are searched for.
    say
        Called before steps that take a while.
    """

    def __init__(self, folder: Path, pythons: dict[str, Path], say: Callable[[str], None]):
        self._folder, self._pythons, self._say = folder.resolve(), pythons, say
        self._outcomes: dict[str, Path | FailedError] = {}

    def of(self, environment: str | None) -> Path:
        """Return the interpreter of an environment, None for the project's own.

        Raises
        ------
        FailedError
            It cannot be made. Later calls fail again without another attempt.
        """
        if environment is None:
            return Path(sys.executable)
        if environment not in self._outcomes:
            try:
                self._outcomes[environment] = self._make(environment)
            except FailedError as error:
                self._outcomes[environment] = error
        outcome = self._outcomes[environment]
        if isinstance(outcome, FailedError):
            raise outcome
        return outcome

    def _make(self, environment: str) -> Path:
        requirements = REQUIREMENTS / f"{environment}.txt"
        folder = self._folder / environment
        version = PYTHON_OF.get(environment, DEFAULT_PYTHON)
        stamp = hashlib.sha256(version.encode() + requirements.read_bytes()).hexdigest()
        installed = folder / ".installed"
        if not (installed.exists() and installed.read_text() == stamp):
            python = self._python(version)
            self._say(f"Making the environment {folder} ...")
            shutil.rmtree(folder, ignore_errors=True)
            run([python, "-m", "venv", folder])
            run([folder / "bin" / "python", "-m", "pip", "install", "--quiet",
                 "--disable-pip-version-check", "--requirement", requirements])  # fmt: skip
            installed.write_text(stamp)
        return folder / "bin" / "python"

    def _python(self, version: str) -> Path:
        if version not in self._pythons:
            return find_python(version)
        python = self._pythons[version]
        if version_of(python) != version:
            raise FailedError(f"a Python {version} is required, but `{python}` is none")
        return python


@functools.cache
def find_python(version: str) -> Path:
    """Return a Python of a version such as 3.12, from PATH or from pyenv."""
    on_path = shutil.which(f"python{version}")
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}*/bin/python"))
    for candidate in [*([Path(on_path)] if on_path else []), *of_pyenv]:
        if version_of(candidate) == version:
            return candidate
    raise FailedError(f"Python {version} was found neither on PATH nor by pyenv")


def version_of(python: Path) -> str | None:
    """Return the version of a Python, or None if it does not run: pyenv puts shims on PATH."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def run(command: list) -> None:
    """Run a command that makes an environment."""
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=INSTALL_SECONDS)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason"]
        raise FailedError(f"cannot be installed: {reasons[-1].strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"not installed after {INSTALL_SECONDS} s") from error
