"""Writing a shard of a token stream."""

import json
import os
import re
import shutil
import uuid
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.bytes import writable_path
from cellfeed.extending import ParameterError, PathError, os_errors, require_positive
from cellfeed.sources import expand
from cellfeed.storages.tokens import _shards as shards

_BUFFER_BYTES = 1 << 20
_MOST_METADATA = 1 << 20  # bytes of a span's metadata


def _by_block(
    added: NDArray[np.int64], n_tokens: int, block: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the spans of a shard by blocks of tokens, so that the spans of a window are adjacent.

    A block lists the spans that overlap it: those that began before it, and those that begin in it.
    So a window needs one range of records, however long the spans that reach into it, and an index
    with the first record of each block locates this range.

    Parameters
    ----------
    added
        First token, end, and size of the metadata of each span, in the order in which they were
        added, shape (n_spans, 3).
    n_tokens, block
        Number of tokens of the shard, and of a block.

    Returns
    -------
    The index, shape (n_blocks + 1,), and the records.
    """
    spans = np.zeros(len(added), shards.SPAN_RECORD)
    starts, stops, sizes = added.T
    spans["start"], spans["stop"], spans["n_bytes"] = starts, stops, sizes
    spans["first_byte"] = np.cumsum(sizes) - sizes
    spans["id"] = np.arange(len(added))
    # Each span with each block that it overlaps, by block and start.
    order = np.argsort(starts, kind="stable")
    first, stop = starts[order] // block, (stops[order] - 1) // block + 1
    blocks = expand(np.stack([first, stop], axis=1))
    by_block = np.argsort(blocks, kind="stable")
    records, blocks = spans[np.repeat(order, stop - first)[by_block]], blocks[by_block]
    records["began_before"] = records["start"] < blocks * block
    return np.searchsorted(blocks, np.arange(-(-n_tokens // block) + 1)), records


class TokenStreamWriter:
    """Write one shard of a token stream; a context manager that finishes the shard at its exit.

    Any number of processes may write shards to the same folder independently. A shard becomes
    visible only when it is finished. If an exception leaves the block, the shard is removed; a
    process that is killed leaves a hidden folder, which is not read. Until the shard is finished,
    8 bytes for each document and attribute, and 24 for each span, are in memory.

    Parameters
    ----------
    folder
        Folder of the stream, created if needed.
    dtype
        Dtype of a token: numeric, or structured with numeric fields if tokens have several values.
    shard
        Name of the shard; shards are read in the order of their names. A random name if None.
    documents
        Whether each call of `append` is a document.
    obs
        Names of attributes of documents, which become obs columns of text.
    block
        Number of tokens in a block of spans. A span is stored in each block that it overlaps.

    Raises
    ------
    ParameterError
        The dtype or the name is invalid, or a shard of this name exists.
    PathError
        The folder cannot be written to, or is a URL.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with TokenStreamWriter(folder, "uint16", documents=True) as writer:
    ...     writer.append([5, 3, 8], metadata={"title": "one"})
    ...     writer.append([1, 2])
    ...     writer.add_span(4, 5, {"gene": "TP53"})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        dtype: Any,
        *,
        shard: str | None = None,
        documents: bool = False,
        obs: Sequence[str] = (),
        block: int = shards.BLOCK,
    ) -> None:
        if obs and not documents:
            raise ParameterError("`obs` requires documents; give `documents=True` as well")
        if isinstance(obs, str) or not all(isinstance(each, str) for each in obs):
            raise ParameterError(f"`obs` must be a list of names, but got {obs!r}")
        self._dtype = shards.require_dtype(dtype)
        self._block = require_positive("block", block)
        name = uuid.uuid4().hex if shard is None else shard
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
            msg = f"`shard` must be letters, digits, '_', '-' and '.', but got {name!r}"
            raise ParameterError(msg)
        where = writable_path(folder)
        self._finished = where / f"{name}{shards.SUFFIX}"
        self._folder = where / f".{name}{shards.UNFINISHED}"
        self._files = dict[str, BinaryIO]()
        self._n_tokens = 0
        self._spans = array("q")
        self._ends = array("q", [0]) if documents else None  # of documents
        self._obs = {each: (array("q"), dict[str, int]()) for each in obs}  # codes, categories
        if self._finished.exists():
            msg = f"{self._finished}: exists already; give another `shard` than {name!r}"
            raise ParameterError(msg)
        try:
            where.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir()
        except FileExistsError as error:
            msg = f"{self._folder}: is being written, or was left by a process that was killed"
            raise ParameterError(f"{msg}; give another `shard`, or remove it") from error
        except OSError as error:
            msg = f"{self._folder}: cannot be created ({error.strerror}); check the path"
            raise PathError(msg) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:  # a finished shard is in another folder
            for each in self._files.values():
                with suppress(OSError):
                    each.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def n_tokens(self) -> int:
        """Number of tokens appended so far."""
        return self._n_tokens

    def append(
        self,
        tokens: ArrayLike,
        *,
        metadata: Any = None,
        obs: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        """Append tokens to the stream, as one document if the shard has documents.

        Parameters
        ----------
        tokens
            Tokens, shape (n,), of the shard's dtype or of one that NumPy casts to it without loss
            of kind.
        metadata
            Metadata of a span over all these tokens, which JSON can hold; no such span if None.
        obs
            Attributes of the document by name; omitted attributes, and None, are missing values.

        Raises
        ------
        ParameterError
            The tokens, the metadata or an attribute is invalid.
        """
        values = np.asarray(tokens)
        if values.ndim != 1 or (values.size and not _can_hold(self._dtype, values)):
            msg = f"tokens must have one dimension and fit into {self._dtype}, but got shape"
            raise ParameterError(f"{msg} {values.shape} of {values.dtype}; cast them first")
        encoded = b"" if metadata is None else _encoded(metadata)
        for name, value in obs.items():
            if name not in self._obs:
                there = ", ".join(map(repr, self._obs)) or "none"
                msg = f"`obs` of a document names {name!r}, but the writer's `obs` are: {there}"
                raise ParameterError(msg)
            if not isinstance(value, str | None):
                raise ParameterError(f"`obs` {name!r} must be text or None, but got {value!r}")
        # Nothing is written before everything is validated.
        self._write(shards.TOKENS, values.astype(self._dtype).data)
        first, self._n_tokens = self._n_tokens, self._n_tokens + len(values)
        if self._ends is not None:
            self._ends.append(self._n_tokens)
        for name, (codes, known) in self._obs.items():
            value = obs.get(name)
            codes.append(-1 if value is None else known.setdefault(value, len(known)))
        if metadata is not None and len(values):
            self._write_span(first, self._n_tokens, encoded)

    def add_span(self, start: int, stop: int, metadata: Any) -> None:
        """Add a span over tokens that were appended earlier.

        Parameters
        ----------
        start, stop
            First token, and the one after the last, relative to the first token of the shard.
        metadata
            Metadata of the span, which JSON can hold.

        Raises
        ------
        ParameterError
            There are no such tokens, or the metadata cannot be encoded or takes more than 1 MiB.
        """
        if not 0 <= start < stop <= self._n_tokens:
            msg = f"a span must have 0 <= start < stop <= {self._n_tokens}, but got"
            raise ParameterError(f"{msg} ({start}, {stop})")
        self._write_span(start, stop, _encoded(metadata))

    def _write_span(self, start: int, stop: int, encoded: bytes) -> None:
        self._write(shards.METADATA, encoded)
        self._spans.extend((start, stop, len(encoded)))

    def _write(self, name: str, data: bytes | memoryview) -> None:
        """Append bytes to a file of the shard."""
        path = self._folder / name
        with os_errors(path):
            if name not in self._files:
                self._files[name] = path.open("xb", _BUFFER_BYTES)
            self._files[name].write(data)

    def _finish(self) -> None:
        """Write the tables, and make the shard visible after all of it is on disk."""
        ends = self._ends
        columns = enumerate(self._obs.values())
        tables = {f"obs-{number}.bin": np.array(codes) for number, (codes, _) in columns}
        if ends is not None:
            tables[shards.DOCUMENTS] = np.array(ends)
        if self._spans:
            added = np.array(self._spans).reshape(-1, 3)
            tables[shards.INDEX], records = _by_block(added, self._n_tokens, self._block)
            self._write(shards.SPANS, records.data)
        for name, table in tables.items():
            self._write(name, table.astype("<i8").data)
        header = shards.ShardHeader(
            dtype=self._dtype,
            n_tokens=self._n_tokens,
            n_documents=None if ends is None else len(ends) - 1,
            longest_document=int(np.diff(ends or []).max(initial=0)),
            n_spans=len(self._spans) // 3,
            block=self._block,
            obs={name: [*known] for name, (_, known) in self._obs.items()},
            files={name: each.tell() for name, each in self._files.items()},
        )
        self._write(shards.HEADER, shards.encoded_header(header))
        for name, each in self._files.items():
            with os_errors(self._folder / name):
                each.flush()
                os.fsync(each.fileno())
        self._folder.rename(self._finished)


def _encoded(metadata: Any) -> bytes:
    try:
        encoded = json.dumps(metadata, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        msg = f"metadata cannot be encoded as JSON ({error}); convert it to text first"
        raise ParameterError(msg) from error
    if len(encoded) > _MOST_METADATA:
        msg = f"metadata of a span must take at most 1 MiB, but takes {len(encoded):,} bytes"
        raise ParameterError(f"{msg}; store larger metadata elsewhere")
    return encoded


def _can_hold(dtype: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Return whether a cast to this dtype keeps values, or only rounds them if both are floats."""
    if {values.dtype.kind, dtype.kind} <= {*"iuf"} and values.dtype.kind != "f":
        return bool((values.astype(dtype).astype(values.dtype) == values).all())
    return values.dtype.names == dtype.names and np.can_cast(values.dtype, dtype, "same_kind")
