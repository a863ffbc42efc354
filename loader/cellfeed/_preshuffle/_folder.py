"""The output folder: its job, its finished parts, and leftovers of a run that was killed.

While it is being written, ``.cellfeed/job.json`` describes the job. A part is written in
``.cellfeed`` and renamed to ``dataset_<number>`` when it is complete, so folders with that name are
always complete. At the end, the description moves into the attributes of the group, which mark the
store as finished, and ``.cellfeed`` is removed.
"""

import contextlib
import errno
import fcntl
import json
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zarr

from cellfeed._errors import ParameterError
from cellfeed._preshuffle._job import Job
from cellfeed._preshuffle._os_errors import os_errors

__all__ = ["OutputFolder"]

_WORK = ".cellfeed"
_RECORD = "job.json"
_ROOT = "zarr.json"
_ATTRIBUTES = {"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"}
_OWN_ATTRIBUTE = "cellfeed"


class OutputFolder:
    """A folder that a shuffled copy is written to.

    Parameters
    ----------
    path
        The folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._work = path / _WORK

    def begun(self) -> Job | None:
        """Return the job that was begun here; None if there is none.

        Raises
        ------
        ParameterError
            The folder contains something else.
        FormatError
            The job is of another version of cellfeed.
        """
        if self.is_finished():
            return Job.from_json(self._root()["attributes"][_OWN_ATTRIBUTE])
        record = self._work / _RECORD
        if record.exists():
            return Job.from_json(record.read_text())
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            msg = f"{self.path}: contains something else; give an output that does not exist yet"
            raise ParameterError(msg)
        return None

    def is_finished(self) -> bool:
        """Whether the store is complete and was checked."""
        return _OWN_ATTRIBUTE in self._root().get("attributes", {})

    def begin(self, job: Job) -> None:
        """Record the job."""
        self._work.mkdir(parents=True, exist_ok=True)
        _write_whole(self._work / _RECORD, job.to_json())

    def part(self, number: int) -> Path:
        """Return the path of a complete part."""
        return self.path / f"dataset_{number}"

    @contextmanager
    def new_part(self, number: int) -> Iterator[Path]:
        """Provide a path for writing a part, which becomes the part if nothing fails."""
        place = self._work / f"part-{number}-{uuid.uuid4().hex}"
        place.mkdir()
        # A run that resumes removes what it finds, and zarr would make folders anew for whoever
        # is still writing; what is not there any more then is this mark.
        mark = place / "begun"
        mark.touch()
        try:
            yield place / "dataset"
            if mark.exists():
                _rename_unless_there(place / "dataset", self.part(number))
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove incomplete parts of a run that was killed."""
        for place in self._work.glob("part-*"):
            doomed = place.with_name(f"removed-{uuid.uuid4().hex}")
            with contextlib.suppress(FileNotFoundError):
                place.rename(doomed)
        for doomed in self._work.glob("removed-*"):
            shutil.rmtree(doomed, ignore_errors=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the output against other runs.

        Raises
        ------
        ParameterError
            Another run is writing to it.
        """
        with (self._work / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                msg = f"{self.path}: another run is writing it; wait for it to end, or stop it"
                raise ParameterError(msg) from error
            except OSError as error:  # a file system without locks
                if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:
                    raise
            yield

    def finish(self, job: Job) -> None:
        """Mark the store as finished, in one step."""
        with os_errors(self.path / _ROOT), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that zarr does not know .cellfeed
            if not self._root():
                zarr.create_group(self.path)
            zarr.consolidate_metadata(self.path)
        root = self._root()
        root["attributes"] = _ATTRIBUTES | {_OWN_ATTRIBUTE: job.to_json()}
        _write_whole(self.path / _ROOT, json.dumps(root, indent=1))

    def remove_work(self) -> None:
        """Remove the files that were needed only while the store was being written."""
        shutil.rmtree(self._work, ignore_errors=True)

    def n_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def _root(self) -> dict[str, Any]:
        try:
            root = json.loads((self.path / _ROOT).read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return root if isinstance(root, dict) else {}


def _rename_unless_there(made: Path, name: Path) -> None:
    try:
        made.rename(name)
    except OSError as error:
        # Someone else, who was taken for dead, has completed the same part meanwhile.
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(text)
    temporary.replace(path)
