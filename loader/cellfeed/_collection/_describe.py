"""How each element of each file is stored, and which are read slowly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cellfeed._chunks import SlowRead
from cellfeed._lazy import pd
from cellfeed._sources import Source, StoredElement

__all__ = ["Described", "described", "slow_names", "slow_reading", "table_of"]

ElementDtypes = Mapping[str, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Described:
    """An element of a source, and the reason if it is read slowly."""

    source: Source
    name: str
    stored: StoredElement
    slow: SlowRead | None


def described(sources: Sequence[Source], dtypes: ElementDtypes) -> Iterator[Described]:
    """Yield each element of each source, for reading as the given dtypes; nothing is read."""
    for source in sources:
        for name, dtype in dtypes.items():
            stored = source.elements[name]
            slow = stored.slow_read(dtype) if source.n_rows else None
            yield Described(source, name, stored, slow)


def table_of(elements: Iterator[Described]) -> pd.DataFrame:
    """Return a row for each element of each source; see `Collection.describe`."""
    rows = (
        {
            "location": str(each.source.location),
            "element": each.name,
            "n_cells": each.source.n_rows,
            "layout": each.stored.layout,
            "dtype": str(each.stored.dtype),
            "codec": each.stored.codec(),
            "chunk_shape": each.stored.chunk_shape,
            "rows_per_chunk": each.stored.rows_per_chunk,
            "is_fast": each.slow is None,
            "reason": each.slow and str(each.slow),
        }
        for each in elements
    )
    return pd.DataFrame(rows)


def slow_reading(elements: Iterator[Described]) -> str | None:
    """Return one line that says what is read slowly, why, and the remedy; None if nothing is."""
    slow = [(each, each.slow) for each in elements if each.slow is not None]
    if not slow:
        return None
    first, why = slow[0]
    line = f"{first.source.location}: `{first.name}` is read slowly, {why}; {why.remedy}"
    n_others = len(slow) - 1
    if n_others:
        others = "1 other is" if n_others == 1 else f"{n_others} others are"
        line += f" ({others} also read slowly: see `collection.describe()`)"
    return line


def slow_names(elements: Iterator[Described]) -> str:
    """Return which elements are read slowly, such as "X of 3 files"; empty if none are."""
    files, slow = defaultdict[str, int](int), defaultdict[str, list[Source]](list)
    for each in elements:
        files[each.name] += 1
        if each.slow is not None:
            slow[each.name].append(each.source)

    def of_files(name: str, sources: Sequence[Source]) -> str:
        if len(sources) == files[name]:
            return name
        where = sources[0].location.name if len(sources) == 1 else f"{len(sources)} files"
        return f"{name} of {where}"

    return ", ".join(of_files(name, sources) for name, sources in slow.items())
