"""A folder of token shards as a source: its windows, or its documents, are the rows."""

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError, ParameterError, require_positive
from cellfeed._sources._base import Source, StoredElement
from cellfeed._sources._tokens._elements import (
    DocumentTokens,
    MetadataElement,
    SpansElement,
    WindowTokens,
)
from cellfeed._sources._tokens._labels import Labels
from cellfeed._sources._tokens._rows import Documents, Windows, require_rows
from cellfeed._sources._tokens._shards import Shards
from cellfeed._sources._tokens._spans import SpanReader

__all__ = ["Span", "TokenStream"]

_DECODER = json.JSONDecoder()
_FIELDS = ("start", "stop", "shard", "id", "n_bytes")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that is said of neighbouring tokens.

    Parameters
    ----------
    start, stop
        The first token and the one after the last, counted from the first of the row: below zero
        where it began before, above the row's length where it goes on.
    metadata
        What is said, decoded.
    shard, id
        The shard, and the number of this span there, which are the same in all rows that it
        overlaps.
    """

    start: int
    stop: int
    metadata: Any
    shard: int
    id: int


class TokenStream(Source):
    """A stream of tokens in a folder, which `open_collection` takes in place of a path.

    `TokenStreamWriter` writes it. Rows are windows of equal length, which go over the borders of
    shards and documents, or the documents. A path alone will do for windows of 4,096 tokens.

    Parameters
    ----------
    folder
        The folder of the shards, read in the order of their names.
    window
        Tokens of a row. A last window that is shorter is left out.
    stride
        Tokens from the start of a row to that of the next; those of a window if None.
    documents
        Whether rows are documents, of any length, in place of windows.
    decoder
        Turns the bytes of metadata into what `spans` returns; ``json.loads`` if None. It is called
        by `spans` alone, and nothing is ever unpickled.

    Attributes
    ----------
    elements
        ``"X"``, the tokens: of windows shape (n_rows, window), of documents `RaggedRows`; where a
        token has fields, of a dtype with fields, of which torch gets ``"X/FIELD"`` each. If there
        are spans: ``"spans"``, which overlap each row, by where they begin, with the fields
        ``start``, ``stop``, ``shard``, ``id`` and ``n_bytes``; and ``"metadata"``, the bytes of
        theirs, one after the other.

    Raises
    ------
    PathError
        There is no such folder.
    FormatError
        It has no finished shard, or one is damaged, or there is no window or document in it.
    ParameterError
        The window or the stride is below one.

    Warns
    -----
    UserWarning
        Some shards are not finished, and left out.

    Examples
    --------
    >>> import tempfile
    >>> from cellfeed import TokenStreamWriter, open_collection
    >>> folder = tempfile.mkdtemp()
    >>> with TokenStreamWriter(folder, "uint16") as writer:
    ...     writer.append(np.arange(10), metadata={"title": "digits"})
    >>> stream = TokenStream(folder, window=4)
    >>> rows = open_collection(stream, elements=["X", "spans", "metadata"])[[1]]
    >>> rows.X
    array([[4, 5, 6, 7]], dtype=uint16)
    >>> stream.spans(rows)
    [[Span(start=-4, stop=6, metadata={'title': 'digits'}, shard=0, id=0)]]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        window: int = 4096,
        *,
        stride: int | None = None,
        documents: bool = False,
        decoder: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.location = Location.of(folder)
        window = require_positive("window", window)
        stride = window if stride is None else require_positive("stride", stride)
        self._decoder = decoder
        self._shards = Shards(self.location)
        self._rows: Documents | Windows
        if documents:
            self._require_documents()
            self._rows = Documents(self._shards)
            require_rows(self._shards, self._rows, None)
            tokens: StoredElement = DocumentTokens(self._shards, self._rows)
        else:
            self._rows = Windows(self._shards, window, stride)
            require_rows(self._shards, self._rows, window)
            tokens = WindowTokens(self._shards, self._rows, window)
        elements = {"X": tokens}
        if any(header.n_spans for header in self._shards.headers):
            reader = SpanReader(self._shards, self._rows)
            elements["spans"] = SpansElement(self._shards, self._rows, reader)
            elements["metadata"] = MetadataElement(self._shards, self._rows, reader)
        self.elements: Mapping[str, StoredElement] = elements
        self._labels = Labels(self._shards, self._rows)
        self._shown_rows = "documents=True" if documents else f"window={window}, stride={stride}"

    def __repr__(self) -> str:
        return f"TokenStream({str(self.location)!r}, {self._shown_rows})"

    def selection(self) -> str:
        """Return what its rows are: windows of a length and stride, or documents."""
        return self._shown_rows

    @property
    def n_tokens(self) -> int:
        """Tokens of all finished shards."""
        return self._shards.n_tokens

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards, in their order: what numbers of shards mean."""
        return tuple(name.rpartition(".")[0] for name in self._shards.names)

    def verify(self) -> None:
        """Read every file whole, and compare it with its checksum.

        Raises
        ------
        FormatError
            A file holds other bytes than were written.
        """
        self._shards.verify()

    def spans(self, rows: Any) -> list[list[Span]]:
        """Return the spans of each row of a minibatch, with their metadata decoded.

        Parameters
        ----------
        rows
            A `Minibatch`, or `Cells`, with the elements ``"spans"`` and ``"metadata"``.

        Raises
        ------
        ParameterError
            It lacks them, or metadata was written by an encoder of the writer's own and this has
            no ``decoder``.
        """
        for name in ("spans", "metadata"):
            if not any(each == name or each.startswith(f"{name}/") for each in rows):
                msg = f"these rows have no {name!r}; open with elements=['X', 'spans', 'metadata']"
                raise ParameterError(msg)
        decode = self._require_decoder()
        start, stop, shard, number, n_bytes = (_field(rows, name) for name in _FIELDS)
        offsets = _numpy((rows["spans"] if "spans" in rows else rows["spans/start"]).offsets)
        encoded = _numpy(rows["metadata"].values).tobytes()
        ends = np.concatenate([[0], np.cumsum(n_bytes)]).tolist()
        keys = list(zip(shard, number, strict=True))
        distinct = {key: encoded[a:b] for key, a, b in zip(keys, ends, ends[1:], strict=False)}
        decoded = dict(zip(distinct, map(decode, distinct.values()), strict=True))
        found = list(map(Span, start, stop, map(decoded.__getitem__, keys), shard, number))
        bounds = offsets.tolist()
        return [found[a:b] for a, b in itertools.pairwise(bounds)]

    def obs_names(self) -> list[str]:
        """Return the obs columns: ``shard``, and the attributes of documents."""
        return self._labels.names()

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read columns of all rows: of the shard, and of the document, that each begins in."""
        return self._labels.read(columns, np.arange(self.n_rows))

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read columns of some rows, which are named by their numbers."""
        table = self._labels.read(columns, rows)
        return table.set_index(pd.Index([str(row) for row in rows.tolist()], dtype=object))

    def _require_documents(self) -> None:
        for name, header in zip(self._shards.names, self._shards.headers, strict=True):
            if header.n_documents is None:
                msg = f"{self.location}/{name}: was written without documents; leave out"
                raise FormatError(f"{msg} `documents`, or write it with documents=True")

    def _require_decoder(self) -> Callable[[bytes], Any]:
        if self._decoder is not None:
            return self._decoder
        for name, header in zip(self._shards.names, self._shards.headers, strict=True):
            if header.encoding != "json":
                msg = f"{self.location}/{name}: metadata is encoded as {header.encoding!r}"
                raise ParameterError(f"{msg}; give its `decoder` to `TokenStream`")
        return _from_json


def _from_json(encoded: bytes) -> Any:
    return _DECODER.decode(encoded.decode())  # `json.loads` first finds out the encoding


def _field(rows: Any, name: str) -> list[int]:
    if "spans" in rows:
        values = _numpy(rows["spans"].values)[name]
    else:
        values = _numpy(rows[f"spans/{name}"].values)
    numbers: list[int] = values.tolist()
    return numbers


def _numpy(values: Any) -> NDArray[Any]:
    """Return an array or a tensor, on whatever device, as an array."""
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()
