"""Access to elements by name, shared by cells and minibatches."""

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

__all__ = ["ByElement"]


class ByElement:
    """Elements by name, as in a mapping, except that ``len()`` is the number of cells.

    This is not a `collections.abc.Mapping`, since torch's DataLoader pins and collates mappings
    entry by entry, as dictionaries.
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
        """Return the names of the elements, in order."""
        return self.elements.keys()

    def values(self) -> ValuesView[Any]:
        """Return the elements, in order."""
        return self.elements.values()

    def items(self) -> ItemsView[str, Any]:
        """Return pairs of name and element, in order."""
        return self.elements.items()
