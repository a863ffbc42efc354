"""Which strategy was searched, in plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cellfeed import SamplingStrategy, sampling

__all__ = ["SearchedStrategy"]

# What a search chooses, and what says which rows are visited, which a result says by itself.
_APART = ("block_size", "indices")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedStrategy:
    """A strategy without its block size, which was searched, and without its rows.

    Parameters
    ----------
    name
        Its class.
    parameters
        What it was made with that has plain values: numbers, text, or several of these.
    arrays
        Parameters of which a result holds nothing but the name, such as weights.
    has_block_size
        Whether it has a block size.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    has_block_size: bool = True

    @classmethod
    def of(cls, strategy: SamplingStrategy) -> "SearchedStrategy":
        """Return the record of a strategy, as the user made it."""
        known = getattr(strategy, "__dataclass_fields__", {}).values()
        given = {each.name: getattr(strategy, each.name) for each in known if each.init}
        defaults = {each.name: each.default for each in known}
        asked = {
            name: value
            for name, value in given.items()
            if name not in _APART and value is not defaults[name]
        }
        plain = {name: value for name, value in asked.items() if _is_plain(value)}
        return cls(
            name=type(strategy).__name__,
            parameters={
                name: list(value) if isinstance(value, tuple) else value
                for name, value in plain.items()
            },
            arrays=tuple(name for name in asked if name not in plain),
            has_block_size="block_size" in given,
        )

    def in_python(self, block_size: int | None = None, rows: str = "") -> str:
        """Return the call that makes it, with a block size if it has one, of some rows in Python.

        Examples
        --------
        >>> strategy = SearchedStrategy(name="GroupedSampling", parameters={"set_size": 16})
        >>> strategy.in_python(4, "train")
        'GroupedSampling(set_size=16, block_size=4, indices=train)'
        """
        arguments = [f"{name}={_in_python(value)}" for name, value in self.parameters.items()]
        arguments += [f"{name}={name}" for name in self.arrays]
        if block_size is not None and self.has_block_size:
            arguments.append(f"block_size={block_size}")
        if rows:
            arguments.append(f"indices={rows}")
        return f"{self.name}({', '.join(arguments)})"

    @property
    def is_made_again(self) -> bool:
        """Whether `cellfeed.CellDataset.from_autotune` makes it by itself."""
        return not self.arrays and self.name in sampling.__all__

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it takes labels from."""
        labels = self.parameters.get("labels", ())
        return (labels,) if isinstance(labels, str) else tuple(labels)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(each, str) for each in value)
    return isinstance(value, bool | int | float | str)


def _in_python(value: Any) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)
