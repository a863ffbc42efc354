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

    Of parameters that are arrays, such as weights, a result holds nothing but the name; others are
    numbers, text, or several of these.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    has_block_size: bool = True

    @classmethod
    def of(cls, strategy: SamplingStrategy) -> "SearchedStrategy":
        """Return the record of a strategy, as the user made it."""
        known = getattr(strategy, "__dataclass_fields__", {})
        parameters, arrays = dict[str, Any](), list[str]()
        for each in known.values():
            value = getattr(strategy, each.name) if each.init else each.default
            if value is each.default or each.name in _APART:
                continue
            if isinstance(value, tuple) and all(isinstance(name, str) for name in value):
                parameters[each.name] = list(value)
            elif isinstance(value, bool | int | float | str):
                parameters[each.name] = value
            else:
                arrays.append(each.name)
        return cls(
            name=type(strategy).__name__,
            parameters=parameters,
            arrays=tuple(arrays),
            has_block_size="block_size" in known and known["block_size"].init,
        )

    def in_python(self, block_size: int | None = None, rows: str = "") -> str:
        """Return the call that makes it, with a block size if it has one, of some rows in Python.

        Examples
        --------
        >>> strategy = SearchedStrategy(name="GroupedSampling", parameters={"set_size": 16})
        >>> strategy.in_python(4, "train")
        'GroupedSampling(set_size=16, block_size=4, indices=train)'
        """
        arguments = [
            f"{name}={tuple(value) if isinstance(value, list) else value!r}"
            for name, value in self.parameters.items()
        ]
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
