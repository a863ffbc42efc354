"""What cells and minibatches share: their elements, by name."""

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

__all__ = ["ByElement"]


class ByElement:
    """Elements by name, as a mapping gives them; but ``len()`` is the number of cells.

    No `collections.abc.Mapping`, for which torch's DataLoader would take it: that pins and
    collates mappings entry by entry, as dictionaries.
    """

    __slots__ = ()
    elements: Mapping[str, Any]

    @property
    def X(self) -> Any:  # noqa: N802 - as AnnData has it
        """The first element, shape (n_cells, n_columns)."""
        return next(iter(self.elements.values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.elements)

    def __contains__(self, name: object) -> bool:
        return name in self.elements

    def keys(self) -> KeysView[str]:
        """Return the names of the elements, in their order."""
        return self.elements.keys()

    def values(self) -> ValuesView[Any]:
        """Return the elements, in their order."""
        return self.elements.values()

    def items(self) -> ItemsView[str, Any]:
        """Return the elements with their names, in their order."""
        return self.elements.items()
