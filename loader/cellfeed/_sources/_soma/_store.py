"""An experiment opened in this process, and descriptions of tiledbsoma's errors."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cellfeed._bytes import Location
from cellfeed._errors import CellfeedError, FormatError, PathError
from cellfeed._sources._base import library
from cellfeed.machine import threads_per_process

__all__ = ["SomaStore", "first_line"]

_BUFFER_BYTES = 64 << 20  # for each column of a table that tiledbsoma returns; its default is 1 GiB
_BUDGET_BYTES = 4 << 30  # for the decoded tiles of a query; TileDB's default is 10 GiB

# Objects that a fork inherits are never closed: closing waits for their threads, which this
# process does not have.
_of_parents = list[Any]()


class SomaStore:
    """An experiment, opened separately in each process that reads it.

    Parameters
    ----------
    location
        A folder or a URI that tiledbsoma opens.
    config
        Further configuration of TileDB; it may contain credentials.
    """

    def __init__(self, location: Location, config: Mapping[str, str]) -> None:
        self.location = location
        self._config = dict(config)
        self._opened: tuple[int, Any] | None = None
        self._timestamp: int | None = None  # in ms, of the state that every process reads

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __call__(self) -> Any:
        """Return the `tiledbsoma.Experiment`."""
        if self._opened is None or self._opened[0] != os.getpid():
            if self._opened is not None:
                _of_parents.append(self._opened)
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    @property
    def timestamp(self) -> int:
        """The time, in ms, of the state that every process reads."""
        return int(self().tiledb_timestamp_ms)

    def at(self, path: str) -> Any:
        """Return the object at a path of the experiment, such as ``ms/RNA/var``."""
        found = self()
        for name in path.split("/"):
            found = found[name]
        return found

    @contextmanager
    def failures_named(self, what: str) -> Iterator[None]:
        """Convert errors of tiledbsoma into an error of one line.

        Raises
        ------
        FormatError
            Replaces any error that it raises.
        """
        try:
            yield
        except CellfeedError:
            raise
        except Exception as error:
            msg = f"{self.location}: `{what}` cannot be read by tiledbsoma ({first_line(error)})"
            raise FormatError(f"{msg}; {self._remedy()}") from error

    def _remedy(self) -> str:
        if self.location.path is None or self._config:
            return (
                "check the URI and `tiledb_config` (credentials, region); otherwise it may be "
                "damaged"
            )
        return "the experiment may be damaged"

    def _open(self) -> Any:
        tiledbsoma = library("tiledbsoma", self.location, what="TileDB-SOMA", extra="soma")
        from cellfeed._torch import get_worker_info  # noqa: PLC0415 - it imports torch

        worker = get_worker_info()
        threads = threads_per_process(1 if worker is None else worker.num_workers)
        config: dict[str, str | float] = {
            "sm.compute_concurrency_level": str(threads),
            "sm.io_concurrency_level": str(threads),
            "soma.init_buffer_bytes": str(_BUFFER_BYTES),
            "sm.mem.total_budget": str(_BUDGET_BYTES),
            **self._config,
        }
        try:
            context = tiledbsoma.SOMATileDBContext(tiledb_config=config)
            opened = tiledbsoma.open(
                str(self.location), context=context, tiledb_timestamp=self._timestamp
            )
        except tiledbsoma.DoesNotExistError as error:
            msg = f"{self.location}: there is no SOMA experiment; check the path"
            raise PathError(msg) from error
        except Exception as error:
            msg = f"{self.location}: tiledbsoma cannot open it ({first_line(error)})"
            raise FormatError(f"{msg}; {self._remedy()}") from error
        if not isinstance(opened, tiledbsoma.Experiment):
            msg = f"{self.location}: is a SOMA {type(opened).__name__}, not an experiment"
            raise FormatError(f"{msg}; give the experiment that it is part of")
        self._timestamp = opened.tiledb_timestamp_ms
        return opened


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    said = str(error).strip().splitlines()
    return said[0].rstrip(".") if said else type(error).__name__
