"""Attributes of documents, written as they come."""

import struct
from collections.abc import Mapping
from numbers import Real
from pathlib import Path

from cellfeed._errors import ParameterError
from cellfeed._sources._tokens._files import WrittenFile
from cellfeed._sources._tokens._format import ShardObs

__all__ = ["DocumentObs"]


class DocumentObs:
    """Columns of a value for each document: codes of text, or numbers.

    Parameters
    ----------
    folder
        Where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._columns: dict[str, _Column] | None = None

    @property
    def files(self) -> list[WrittenFile]:
        """The file of each column."""
        return [each.file for each in (self._columns or {}).values()]

    def append(self, values: Mapping[str, str | float | None], n_before: int) -> None:
        """Append the attributes of a document, of which there were some before.

        Raises
        ------
        ParameterError
            They have other names than those of the first document, or are of another kind.
        """
        if self._columns is None:
            self._columns = {}
            for number, name in enumerate(values):
                self._columns[name] = _Column(name, WrittenFile(self._folder / f"obs-{number}.bin"))
        if set(values) != set(self._columns):
            msg = (
                f"`obs` of document {n_before} has {sorted(values)}, but that of the first "
                f"{sorted(self._columns)}; give all documents the same names, None if missing"
            )
            raise ParameterError(msg)
        codes = {name: each.code_of(values[name]) for name, each in self._columns.items()}
        for name, each in self._columns.items():
            each.file.write(codes[name])

    def described(self) -> dict[str, ShardObs]:
        """Return what the header says of them."""
        return {
            name: ShardObs(
                file=each.file.name,
                categories=None if each.is_number else list(each.categories),
            )
            for name, each in (self._columns or {}).items()
        }


class _Column:
    def __init__(self, name: str, file: WrittenFile) -> None:
        self.name, self.file = name, file
        self.categories = dict[str, int]()
        self.is_number: bool | None = None

    def code_of(self, value: str | float | None) -> bytes:
        """Return a value as it is written, 8 bytes: a number, or the number of a category."""
        if value is None:
            return _MISSING
        is_number = isinstance(value, Real)
        if not (is_number or isinstance(value, str)) or self.is_number not in (None, is_number):
            msg = f"`obs` {self.name!r} must be text or numbers throughout, but got {value!r}"
            raise ParameterError(msg)
        self.is_number = is_number
        if isinstance(value, str):
            return struct.pack("<q", self.categories.setdefault(value, len(self.categories)))
        return struct.pack("<d", value)


_MISSING = struct.pack("<q", -1)  # all bits are set, which is NaN as a float64
