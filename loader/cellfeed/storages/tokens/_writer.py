"""Writing a shard of a token stream."""

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.bytes import writable_path
from cellfeed.extending import ParameterError, PathError, require_positive
from cellfeed.sources import expand
from cellfeed.storages.tokens import _shards as shards

_PAIRS_AT_ONCE = 1 << 18
_MOST_METADATA = 1 << 20  # bytes of a span's metadata


def _write_by_block(
    added: NDArray[Any],
    n_tokens: int,
    block: int,
    index: shards.WrittenFile,
    records: shards.WrittenFile,
) -> None:
    """Write the spans of a shard by blocks of tokens, so that the spans of a window are contiguous.

    A block lists the spans that overlap it: those that began before it, and those that begin in it.
    So a window needs one range of records, however long the spans that reach into it, and an index
    with the first record of each block locates this range.

    Parameters
    ----------
    added
        Spans in the order in which they were added, `shards.SPAN_RECORD`.
    n_tokens, block
        Number of tokens of the shard, and of a block.
    index, records
        The files that are written.
    """
    # Each span with each block that it overlaps, by block and start.
    order = np.argsort(added["start"], kind="stable")
    first = added["start"][order] // block
    stop = (added["stop"][order] - 1) // block + 1
    blocks = expand(np.stack([first, stop], axis=1))
    by_block = np.argsort(blocks, kind="stable")
    spans, blocks = np.repeat(order, stop - first)[by_block], blocks[by_block]
    firsts = np.searchsorted(blocks, np.arange(-(-n_tokens // block) + 1))
    index.write(firsts.astype("<i8"))
    for begin in range(0, spans.size, _PAIRS_AT_ONCE):
        some = slice(begin, begin + _PAIRS_AT_ONCE)
        pairs = added[spans[some]]
        pairs["began_before"] = pairs["start"] < blocks[some] * block
        records.write(pairs)


class TokenStreamWriter:
    """Write one shard of a token stream; a context manager that finishes the shard at its exit.

    Any number of processes may write shards to the same folder independently. A shard becomes
    visible only when it is finished. If an exception leaves the block, the shard is removed; a
    process that is killed leaves a hidden folder, which is not read.

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
        self._n_tokens = self._n_documents = self._longest = self._n_spans = 0
        self._make_folder(name)
        self._files = list[shards.WrittenFile]()
        try:
            self._tokens = self._new(shards.TOKENS)
            self._documents = self._new(shards.DOCUMENTS) if documents else None
            self._obs = {each: self._new(f"obs-{number}.bin") for number, each in enumerate(obs)}
            self._categories: dict[str, dict[str, int]] = {each: {} for each in obs}
            self._metadata = self._new(shards.METADATA)
            self._stored = [*self._files]
            self._spans = self._new("added-spans")
            if self._documents is not None:
                self._documents.write(np.zeros(1, "<i8"))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:  # a finished shard is in another folder
            for each in self._files:
                each.discard()
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
        values = self._as_tokens(tokens)
        first, n = self._n_tokens, len(values)
        encoded = b"" if metadata is None else _encoded(metadata)
        for name, value in obs.items():
            if name not in self._obs:
                there = ", ".join(map(repr, self._obs)) or "none"
                msg = f"`obs` of a document names {name!r}, but the writer's `obs` are: {there}"
                raise ParameterError(msg)
            if not isinstance(value, str | None):
                raise ParameterError(f"`obs` {name!r} must be text or None, but got {value!r}")
        # Nothing is written before everything is validated.
        for name, codes in self._categories.items():
            value = obs.get(name)
            code = -1 if value is None else codes.setdefault(value, len(codes))
            self._obs[name].write(np.array([code], "<i8"))
        if self._documents is not None:
            self._n_documents += 1
            self._longest = max(self._longest, n)
            self._documents.write(np.array([first + n], "<i8"))
        self._tokens.write(values)
        self._n_tokens += n
        if metadata is not None and n:
            self._write_span(first, first + n, encoded)

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
        place = self._n_spans, self._metadata.n_bytes, len(encoded)
        self._spans.write(np.array([(start, stop, *place, 0)], shards.SPAN_RECORD))
        self._metadata.write(encoded)
        self._n_spans += 1

    def _finish(self) -> None:
        """Make the shard visible, after all of it is on disk."""
        self._spans.close()
        if self._n_spans:
            index, records = by_block = self._new(shards.INDEX), self._new(shards.SPANS)
            added = np.fromfile(self._spans.path, shards.SPAN_RECORD)
            _write_by_block(added, self._n_tokens, self._block, index, records)
            self._stored += by_block
        self._spans.path.unlink()
        for each in self._stored:
            each.close()
        header = shards.write_header(
            self._folder,
            shards.ShardHeader(
                dtype=np.lib.format.dtype_to_descr(self._dtype),
                n_tokens=self._n_tokens,
                n_documents=None if self._documents is None else self._n_documents,
                longest_document=self._longest,
                n_spans=self._n_spans,
                block=self._block,
                obs={name: [*codes] for name, codes in self._categories.items()},
                files={each.path.name: each.n_bytes for each in self._stored},
            ),
        )
        with header.open("rb") as opened:
            os.fsync(opened.fileno())
        self._folder.rename(self._finished)

    def _make_folder(self, name: str) -> None:
        if self._finished.exists():
            msg = f"{self._finished}: exists already; give another `shard` than {name!r}"
            raise ParameterError(msg)
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir()
        except FileExistsError as error:
            msg = f"{self._folder}: is being written, or was left by a process that was killed"
            raise ParameterError(f"{msg}; give another `shard`, or remove it") from error
        except OSError as error:
            msg = f"{self._folder}: cannot be created ({error.strerror}); check the path"
            raise PathError(msg) from error

    def _new(self, name: str) -> shards.WrittenFile:
        self._files.append(shards.WrittenFile(self._folder / name))
        return self._files[-1]

    def _as_tokens(self, tokens: ArrayLike) -> NDArray[Any]:
        values = np.asarray(tokens)
        n_dimensions = values.ndim
        if not values.size and values.dtype != self._dtype:
            values = np.empty(0, self._dtype)
        if n_dimensions != 1 or not _can_hold(self._dtype, values):
            msg = f"tokens must have one dimension and fit into {self._dtype}, but got shape"
            raise ParameterError(f"{msg} {values.shape} of {values.dtype}; cast them first")
        return values.astype(self._dtype)


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
