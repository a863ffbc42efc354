"""The settings of a dataset from a result of ``autotune``."""

import json
import math
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil
from numpy.typing import ArrayLike

from cellfeed._collection._indexables import count_indexable_rows
from cellfeed._errors import (
    FormatError,
    ParameterError,
    PathError,
    one_line,
    require_integer,
    require_positive,
)
from cellfeed.machine import usable_cores
from cellfeed.sampling import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    GroupedSampling,
    SamplingStrategy,
    Streaming,
)

SCHEMA = "cellfeed.autotune/3"

_STRATEGIES: dict[str, Any] = {
    each.__name__: each
    for each in (
        BlockShuffling,
        BlockWeightedSampling,
        ClassBalancedSampling,
        GroupedSampling,
        Streaming,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The settings that ``autotune`` chose, and the conditions of its measurements.

    Parameters
    ----------
    block_size, fetch_factor, num_workers, batch_size
        The settings.
    dataset, machine
        The result's description of the collection and of the machine.
    name
        Name of the result.
    strategy
        The result's description of the tuned strategy; None for shuffled blocks.
    prefetch, num_threads
        See `CellDataset`; None if they were not tuned.
    align
        See `BlockShuffling`.
    basis
        What the choice rests on: "compared", "measured" or "predicted"; None if unknown.
    """

    block_size: int
    fetch_factor: int
    num_workers: int
    batch_size: int
    dataset: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    name: str = "the result"
    strategy: Mapping[str, Any] | None = None
    prefetch: int | None = None
    num_threads: int | None = None
    align: Literal["chunks"] | None = None
    basis: str | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("block_size", "fetch_factor", "batch_size"):
            require_positive(name, getattr(self, name))
        for name in ("prefetch", "num_threads"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        if require_integer("num_workers", self.num_workers) < 0:
            msg = f"`num_workers >= 0` must hold, but got num_workers={self.num_workers}"
            raise ParameterError(msg)

    def strategy_of(self, indices: ArrayLike | None) -> SamplingStrategy:
        """Return the tuned strategy, with the recommended block size.

        Parameters
        ----------
        indices
            The rows to visit; all rows if None.

        Raises
        ------
        ParameterError
            The result lacks parameters of the strategy, or the strategy is not from cellfeed.
        FormatError
            The parameters are damaged.
        """
        if self.strategy is None:
            return BlockShuffling(block_size=self.block_size, indices=indices, align=self.align)
        name, missing = self.strategy["name"], self.strategy["arrays"]
        kind = _STRATEGIES.get(name)
        if kind is None or missing:
            what = f"the {' and '.join(missing)}" if kind else "the parameters"
            msg = (
                f"{self.name}: is of {name}, but does not contain {what} of it; give "
                f"strategy={name}(..., block_size={self.block_size})"
            )
            raise ParameterError(msg)
        parameters = {
            each: tuple(value) if isinstance(value, list) else value
            for each, value in self.strategy["parameters"].items()
        }
        if "block_size" in kind.__dataclass_fields__:
            parameters["block_size"] = self.block_size
        try:
            strategy: SamplingStrategy = kind(**parameters, indices=indices)
        except TypeError as error:
            msg = f"{self.name}: the strategy {name} in it is damaged ({error}); run autotune again"
            raise FormatError(msg) from error
        return strategy

    def warn_of_differences(
        self, collection: Any, batch_size: int, strategy: SamplingStrategy
    ) -> None:
        """Warn if the settings are a prediction, or were measured in other conditions.

        Properties that the result does not contain are not compared.
        """
        if self.basis == "predicted":
            warnings.warn(
                f"{self.name}: its settings are predicted, since there was no time to measure "
                "them; run autotune again with a larger budget, or on a machine that does less",
                UserWarning,
                stacklevel=3,
            )
        differences = [*self._of_collection(collection, batch_size), *self._of_machine()]
        searched = (self.strategy or {}).get("name")
        if searched not in (None, type(strategy).__name__):
            differences.append(f"{searched}, but it is {type(strategy).__name__} here")
        if differences:
            warnings.warn(
                f"{self.name}: was measured with {'; '.join(differences)}; its settings may be "
                "far from the best, so run autotune again",
                UserWarning,
                stacklevel=3,
            )

    def _of_collection(self, collection: Any, batch_size: int) -> Iterator[str]:
        here = {
            "n_cells": count_indexable_rows(collection),
            "n_vars": getattr(collection, "n_vars", None),
            "layout": getattr(collection, "layout", None),
            "batch_size": batch_size,
        }
        if here["layout"] is not None:
            here["dtype"] = str(collection.dtype)
            here["elements"] = list(collection.elements)
        for name, value in here.items():
            measured = self.dataset.get(name)
            if measured not in (None, []) and value is not None and measured != value:
                yield f"{name}={measured}, but it is {value} here"

    def _of_machine(self) -> Iterator[str]:
        def measured(subject: str, name: str) -> Any:
            of = self.machine.get(subject)
            return of.get(name) if isinstance(of, dict) else None

        there = measured("platform", "architecture")
        if isinstance(there, str) and there not in ("unknown", platform.machine()):
            yield f"a processor of type {there}, but it is {platform.machine()} here"
        cores, n_bytes = measured("cpu", "usable_cores"), measured("memory", "total_bytes")
        if _differ(cores, usable_cores()):
            yield f"{cores:g} usable cores, but there are {usable_cores():g} here"
        total = psutil.virtual_memory().total
        if _differ(n_bytes, total):
            yield f"{n_bytes / 1e9:.3g} GB of memory, but there are {total / 1e9:.3g} GB here"


class Recommending(Protocol):
    """A result of ``autotune`` in memory."""

    def to_json(self) -> dict[str, Any]:
        """Return the text of an ``autotune.json``."""


def read_recommendation(result: str | os.PathLike[str] | Recommending) -> Recommendation:
    """Read the recommended settings from a file, or take them from a result.

    Raises
    ------
    PathError
        There is no such file.
    FormatError
        The file is not a result of ``autotune``, or the result recommends nothing.
    ParameterError
        ``result`` is neither.
    """
    if isinstance(result, str | os.PathLike):
        return _recommendation(str(result), _parsed(Path(result)))
    if not hasattr(result, "to_json"):
        kind = type(result).__name__
        msg = (
            f"`result` must be the path of an autotune.json or a result, but got one of type {kind}"
        )
        raise ParameterError(msg)
    return _recommendation("the result", result.to_json())


def _parsed(path: Path) -> dict[str, Any]:
    # Not `Path.is_file`, which fails if the path is too long, as JSON in place of a path is.
    if not os.path.isfile(path):  # noqa: PTH113
        msg = f"{path}: no such file; make it with `autotune PATH... --label COLUMN`"
        raise PathError(msg)
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        msg = f"{path}: not a result of autotune (no JSON object); give the file that it wrote"
        raise FormatError(msg)
    return parsed


def _recommendation(name: str, result: Mapping[str, Any]) -> Recommendation:
    try:
        schema, fault = result["schema"], result.get("loader_fault")
        recommended, dataset = result["recommended"], dict(result["dataset"])
        batch_size, loader = dataset["batch_size"], dataset.get("loader")
        if schema != SCHEMA:
            why = f"has schema {schema!r}, but this cellfeed reads {SCHEMA!r}; run autotune again"
        elif loader:
            why = f"is of {loader}, whose settings do not apply to this loader; run autotune again"
        elif fault is not None:
            why = f"recommends nothing, since wrong data were delivered: {fault}"
        elif recommended is None:
            why = "recommends nothing, since no configuration was feasible; run autotune again"
        else:
            sizes = recommended["configuration"]
            machine = result.get("machine")
            return Recommendation(
                block_size=sizes["block_size"],
                fetch_factor=sizes["fetch_factor"],
                num_workers=sizes["num_workers"],
                batch_size=batch_size,
                dataset=dataset,
                machine=machine if isinstance(machine, dict) else {},
                name=name,
                strategy=_strategy(result),
                prefetch=recommended.get("prefetch"),
                num_threads=sizes.get("num_threads"),
                align=sizes.get("align"),
                basis=recommended.get("basis"),
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        msg = f"{name}: not a result of autotune ({why}); give the file that it wrote"
        raise FormatError(msg) from error
    msg = f"{name}: {why}"
    raise FormatError(msg)


def _strategy(result: Mapping[str, Any]) -> dict[str, Any] | None:
    said = result.get("strategy")
    if said is None:
        return None
    parameters, arrays = dict(said["parameters"]), list(said["arrays"])
    return {"name": str(said["name"]), "parameters": parameters, "arrays": arrays}


def _differ(measured: Any, here: float) -> bool:
    """Whether sizes differ by more than the memory that a system reserves."""
    return isinstance(measured, int | float) and not math.isclose(measured, here, rel_tol=0.05)
