"""Attributes of documents, written while documents are appended."""

import struct
from collections.abc import Mapping
from pathlib import Path

from cellfeed._errors import ParameterError
from cellfeed._sources._tokens._files import WrittenFile
from cellfeed._sources._tokens._format import ShardObs

__all__ = ["DocumentObs", "require_kinds"]


class DocumentObs:
    """Columns with one value per document: codes of text, or numbers.

    Parameters
    ----------
    folder
        Folder of the files.
    kinds
        Names of the columns, and ``str`` or ``float``.
    """

    def __init__(self, folder: Path, kinds: Mapping[str, type]) -> None:
        self._columns = {
            name: _Column(name, kind, WrittenFile(folder / f"obs-{number}.bin"))
            for number, (name, kind) in enumerate(kinds.items())
        }

    @property
    def files(self) -> list[WrittenFile]:
        """The file of each column."""
        return [each.file for each in self._columns.values()]

    def append(self, values: Mapping[str, str | float | None]) -> None:
        """Append the attributes of a document; omitted attributes are missing values.

        Raises
        ------
        ParameterError
            There is no such column, or it has values of the other kind.
        """
        for name in values:
            if name not in self._columns:
                there = ", ".join(map(repr, self._columns)) or "none"
                msg = f"`obs` of a document names {name!r}, but the writer's `obs` are: {there}"
                raise ParameterError(msg)
        encoded = [each.encoded(values.get(name)) for name, each in self._columns.items()]
        for file, value in zip(self.files, encoded, strict=True):
            file.write(value)

    def described(self) -> dict[str, ShardObs]:
        """Return the descriptions of the columns for the header."""
        return {
            name: ShardObs(
                file=each.file.name,
                categories=list(each.categories) if each.kind is str else None,
            )
            for name, each in self._columns.items()
        }


def require_kinds(kinds: Mapping[str, type], *, has_documents: bool) -> None:
    """Check that columns are of text or numbers, and that the shard has documents if any are given.

    Raises
    ------
    ParameterError
        A column has another kind, or there are no documents.
    """
    if kinds and not has_documents:
        msg = "`obs` requires documents; give `documents=True` as well"
        raise ParameterError(msg)
    for name, kind in kinds.items():
        if kind not in (str, float):
            msg = f"`obs` must give str or float for each column, but got {kind!r} for {name!r}"
            raise ParameterError(msg)


class _Column:
    def __init__(self, name: str, kind: type, file: WrittenFile) -> None:
        self._name, self.kind, self.file = name, kind, file
        self.categories = dict[str, int]()

    def encoded(self, value: str | float | None) -> bytes:
        """Return the 8 bytes of a value: a number, or the number of a category."""
        if value is None:
            return _MISSING
        if isinstance(value, str) and self.kind is str:
            return struct.pack("<q", self.categories.setdefault(value, len(self.categories)))
        if self.kind is float and not isinstance(value, str):
            return struct.pack("<d", float(value))
        msg = f"`obs` {self._name!r} must be {self.kind.__name__} or None, but got {value!r}"
        raise ParameterError(msg)


_MISSING = struct.pack("<q", -1)  # all bits set, which is NaN as float64
