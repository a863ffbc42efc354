"""Access to elements by name, shared by cells and minibatches."""

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any, NoReturn

from cellfeed._errors import ColumnError, ParameterError

__all__ = ["ByElement", "ObsValues", "refuse_element"]


class ObsValues(dict[str, Any]):
    """Values of obs columns by name, which says how a column is opened."""

    def __missing__(self, name: object) -> NoReturn:
        msg = (
            f"minibatches have no obs column {name!r}, only {list(self)}; open it with "
            f"`open_collection(..., obs=[{name!r}])`"
        )
        raise ColumnError(msg)


class _ElementError(ParameterError, KeyError):
    """A mapping has no such element."""

    __str__ = Exception.__str__  # that of `KeyError` puts quotation marks around a message


def refuse_element(name: object, names: KeysView[str]) -> NoReturn:
    """Raise an error for an element that is not there, or for a minibatch that is unpacked."""
    if isinstance(name, str):
        msg = (
            f"minibatches have no element {name!r}, only {list(names)}; open it with "
            f"`open_collection(..., elements=[..., {name!r}])`, or take `minibatch.obs[{name!r}]` "
            "if it is an obs column"
        )
    else:
        msg = (
            f"a minibatch is no sequence, so it has no {name!r} and cannot be unpacked; take "
            "`minibatch.X` and `minibatch.obs[...]`, or `minibatch.items()` for all elements"
        )
    raise _ElementError(msg)


class ByElement:
    """Elements by name, as in a mapping, except that ``len()`` is the number of cells.

    This is not a `collections.abc.Mapping`, since torch's DataLoader pins and collates mappings
    entry by entry, as dictionaries; nor is it iterable, since ``X, y = minibatch`` would take
    names, and Lightning looks for the batch size in whatever is iterated over.
    """

    __slots__ = ()
    elements: Mapping[str, Any]
    obs: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Let obs say which column is missing."""
        object.__setattr__(self, "obs", ObsValues(self.obs))

    @property
    def X(self) -> Any:  # noqa: N802 - as AnnData has it
        """The first element, shape (n_cells, n_columns)."""
        return next(iter(self.elements.values()))

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
