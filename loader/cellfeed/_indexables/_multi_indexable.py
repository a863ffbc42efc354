"""Aligned modalities that are indexed together."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError

__all__ = ["MultiIndexable", "count_indexable_rows"]


class MultiIndexable:
    """Several indexables of the same length, such as X and y, or RNA and protein.

    ``multi[rows]`` indexes all of them and returns a `MultiIndexable`; ``multi["X"]`` or
    ``multi[0]`` returns one of them.

    Parameters
    ----------
    *indexables
        Indexables of the same length, or a single dictionary from names to indexables.
    names
        Names of the positional indexables.
    unstructured
        Data that belong to all rows, such as gene names; indexing does not change them.
    **named_indexables
        Indexables by name.

    Raises
    ------
    ParameterError
        There are no indexables, their lengths differ, or ``names`` does not match them.

    Examples
    --------
    >>> multi = MultiIndexable(X=np.eye(4), y=np.array([0, 1, 0, 1]))
    >>> multi[np.array([1, 3])]["y"]
    array([1, 1])
    """

    def __init__(
        self,
        *indexables: Any,
        names: list[str] | None = None,
        unstructured: Mapping[str, Any] | None = None,
        **named_indexables: Any,
    ) -> None:
        if unstructured is not None and not isinstance(unstructured, Mapping):
            msg = f"`unstructured` must be a mapping by name, but got {unstructured!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        by_name = dict(named_indexables)
        if len(indexables) == 1 and isinstance(indexables[0], Mapping):
            by_name = {**indexables[0], **by_name}
            indexables = ()
        if indexables and by_name:
            msg = "indexables must all be named or all be unnamed, but got both"
            raise ParameterError(msg)
        if names is not None and len(names) != len(indexables):
            msg = f"`names` must name each indexable, but got {len(names)} for {len(indexables)}"
            raise ParameterError(msg)
        self.names = list(by_name) if by_name else names
        self.unstructured = dict(unstructured or {})
        self._indexables = tuple(by_name.values()) or indexables
        lengths = {count_indexable_rows(indexable) for indexable in self._indexables}
        if len(lengths) != 1:
            msg = (
                "indexables must have the same length, but got lengths "
                f"{sorted(lengths) or 'of none'}"
            )
            raise ParameterError(msg)
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: int | str | slice | list[int] | NDArray[np.integer]) -> Any:
        if isinstance(key, str):
            if key not in (self.names or ()):
                msg = f"no indexable is named {key!r}; the names are {self.names}"
                raise KeyError(msg)
            return self._indexables[(self.names or []).index(key)]
        if isinstance(key, int | np.integer):
            return self._indexables[key]
        rows = key if isinstance(key, slice) else np.asarray(key)
        selected = MultiIndexable(
            *(indexable[rows] for indexable in self._indexables), unstructured=self.unstructured
        )
        selected.names = self.names
        return selected

    def __iter__(self) -> Iterator[Any]:
        return iter(self._indexables)

    @property
    def count(self) -> int:
        """Number of indexables."""
        return len(self._indexables)

    @property
    def unstructured_keys(self) -> list[str]:
        """Names of the unstructured data."""
        return list(self.unstructured)

    def keys(self) -> list[Any]:
        """Return the names of the indexables, or 0, 1, 2, ... if they have none."""
        return list(range(self.count) if self.names is None else self.names)

    def values(self) -> list[Any]:
        """Return the indexables."""
        return list(self._indexables)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over pairs of key and indexable."""
        return zip(self.keys(), self._indexables, strict=True)

    def __repr__(self) -> str:
        parts = ", ".join(self.names or map(str, range(len(self._indexables))))
        return f"MultiIndexable({parts}; {len(self)} rows)"


def count_indexable_rows(indexable: Any) -> int:
    """Return the number of rows; SciPy's sparse matrices have a shape but no length.

    BioNeMo's `SingleCellMemMapDataset` has a length, and a method ``shape``.

    Raises
    ------
    ParameterError
        The indexable has no length.
    """
    try:
        shape = getattr(indexable, "shape", None)
        return len(indexable) if shape is None or callable(shape) else int(shape[0])
    except (TypeError, IndexError) as error:
        what = "None" if indexable is None else f"one of type {type(indexable).__name__}"
        msg = f"an indexable must have a length, but got {what}; give it `__len__` or a shape"
        raise ParameterError(msg) from error
