"""Token streams with all that they can have, and what is in them, in NumPy."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellfeed import TokenStreamWriter

DTYPES = (
    "uint16",
    "int32",
    "float32",
    "bool",
    [("token", "u2"), ("time", "f4"), ("at", "i1", (2,))],
)


@dataclass
class Written:
    """Tokens of each document, its shard, and spans as (shard, start, stop, metadata)."""

    folder: Path
    documents: list[NDArray[Any]]
    shards: list[int]
    spans: list[tuple[int, int, int, Any]]

    @property
    def tokens(self):
        return np.concatenate(self.documents)

    def firsts(self):
        """Where each shard begins in the stream."""
        sizes = np.zeros(max(self.shards) + 1, np.int64)
        np.add.at(sizes, self.shards, [len(each) for each in self.documents])
        return np.concatenate([[0], np.cumsum(sizes)])

    def overlapping(self, start, stop):
        """Return the spans of a range of the stream, as they are delivered; none if it is empty."""
        firsts = self.firsts()
        found = [
            (first + firsts[shard] - start, last + firsts[shard] - start, shard, metadata)
            for shard, first, last, metadata in self.spans
            if start < stop and first + firsts[shard] < stop and last + firsts[shard] > start
        ]
        return sorted(found, key=lambda span: (span[0], json.dumps(span[3])))


def tokens_of(random, n, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return random.random(n) < 0.5
    return np.frombuffer(random.bytes(n * dtype.itemsize), dtype).copy()


def write_stream(folder, *, lengths, dtype="uint16", block=16, seed=0):
    """Write documents of each shard, each with a span, and others that reach over many of them.

    Parameters
    ----------
    lengths
        Tokens of the documents of each shard.
    """
    random, numbers = np.random.default_rng(seed), itertools.count()
    written = Written(folder, [], [], [])
    for shard, of_shard in enumerate(lengths):
        options = {"documents": True, "obs": ["kind", "length"], "block": block}
        with TokenStreamWriter(folder, dtype, shard=f"{shard:03}", **options) as writer:
            for n in of_shard:
                tokens, number = tokens_of(random, n, dtype), next(numbers)
                inner = sorted(random.integers(0, n + 1, 2).tolist())
                spans = [(*inner, [number, "inner"])] if inner[0] < inner[1] else []
                first = writer.n_tokens
                obs = {"kind": "ab"[number % 2], "length": str(n) if number % 3 else None}
                writer.append(tokens, metadata={"document": number}, obs=obs)
                for start, stop, metadata in spans:
                    writer.add_span(first + start, first + stop, metadata)
                written.documents.append(tokens)
                written.shards.append(shard)
                if n:
                    whole = (0, n, {"document": number})
                    for start, stop, metadata in [whole, *spans]:
                        written.spans.append((shard, first + start, first + stop, metadata))
            for _ in range(2 if writer.n_tokens else 0):
                start, stop = sorted(random.integers(0, writer.n_tokens + 1, 2).tolist())
                if start < stop:
                    writer.add_span(start, stop, "x" * (stop - start))
                    written.spans.append((shard, start, stop, "x" * (stop - start)))
    return written


# Of the documents of each shard; there is at least one token.
LENGTHS = st.lists(st.lists(st.integers(0, 60), max_size=6), min_size=1, max_size=4).map(
    lambda lengths: lengths if any(map(any, lengths)) else [[1], *lengths[1:]]
)


def delivered(spans):
    """Return spans of a row as `Written.overlapping` has them."""
    found = [(each.start, each.stop, each.shard, each.metadata) for each in spans]
    assert [each[0] for each in found] == sorted(each[0] for each in found)
    return sorted(found, key=lambda span: (span[0], json.dumps(span[3])))
