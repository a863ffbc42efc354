"""Obs columns of rows: the shard in which a row begins, and attributes of the document there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed._lazy import pd
from cellfeed._sources._tokens._rows import TokenRows
from cellfeed._sources._tokens._shards import Shards

__all__ = ["SHARD", "Labels"]

SHARD = "shard"


class Labels:
    """Reads obs columns.

    Parameters
    ----------
    shards, rows
        The shards of the stream, and its rows.
    """

    def __init__(self, shards: Shards, rows: TokenRows) -> None:
        self._shards, self._rows = shards, rows

    def names(self) -> list[str]:
        """Return the columns: the shard, and the attributes that all shards have."""
        first, *others = (header.obs for header in self._shards.headers)
        return [SHARD, *(name for name in first if all(name in obs for obs in others))]

    def read(self, names: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read columns of ascending rows."""
        shards = self._rows.shards_of(rows)
        columns = dict[str, Any]()
        for name in names:
            if name == SHARD:
                named = [each.rpartition(".")[0] for each in self._shards.names]
                columns[name] = pd.Categorical.from_codes(shards, pd.Index(named, dtype=object))
            else:
                columns[name] = self._column(name, shards, rows)
        return pd.DataFrame(columns, index=pd.RangeIndex(rows.size))

    def _column(self, name: str, shards: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        described = [header.obs[name] for header in self._shards.headers]
        are_numbers = {each.categories is None for each in described}
        if len(are_numbers) > 1:
            msg = f"{self._shards.location}: obs {name!r} is text in some shards and numbers in"
            raise FormatError(f"{msg} others; write the same kind to all shards")
        is_number = are_numbers == {True}
        out: NDArray[Any] = np.empty(rows.size, np.float64 if is_number else np.int64)
        categories = dict[str, int]()
        bounds = np.searchsorted(shards, np.arange(len(described) + 1))
        for shard, each in enumerate(described):
            own = slice(bounds[shard], bounds[shard + 1])
            if own.start == own.stop:
                continue
            stored = self._shards.table(each.file, "<f8" if is_number else "<i8").of(shard)
            values = stored[self._rows.documents_of(shard, rows[own])]
            if not is_number:
                known = each.categories or []
                numbers = [categories.setdefault(text, len(categories)) for text in known]
                if values.size and not -1 <= values.min() <= values.max() < len(known):
                    raise self._shards.damaged(shard, each.file, "has codes without a category")
                values = np.array([*numbers, -1], np.int64)[values]
            out[own] = values
        if is_number:
            return out
        return pd.Categorical.from_codes(out, pd.Index(list(categories), dtype=object))
