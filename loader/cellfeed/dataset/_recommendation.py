"""The settings of a dataset from a result of ``autotune``."""

import json
import math
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from numpy.typing import ArrayLike

from cellfeed import sampling
from cellfeed._errors import (
    FormatError,
    ParameterError,
    PathError,
    one_line,
    require_not_negative,
    require_positive,
)
from cellfeed.collection import count_indexable_rows
from cellfeed.machine import usable_cores

SCHEMA = "cellfeed.autotune/4"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The settings that ``autotune`` chose.

    Parameters
    ----------
    name
        Name of the result, for messages.
    result
        The result as JSON values.
    settings
        ``block_size``, ``fetch_factor``, ``num_workers`` and ``batch_size``; ``align``,
        ``num_threads`` and ``prefetch``, which are None if they were not tuned; and the
        description of the tuned ``strategy``, None for shuffled blocks.
    """

    name: str
    result: Mapping[str, Any]
    settings: Mapping[str, Any]

    def strategy_of(self, indices: ArrayLike | None) -> sampling.SamplingStrategy:
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
        tuned, block_size = self.settings["strategy"], self.settings["block_size"]
        if tuned is None:
            align = self.settings["align"]
            return sampling.BlockShuffling(block_size, indices=indices, align=align)
        name = tuned["name"]
        # By its name in the package, since an extension may have it.
        kind: Any = getattr(sys.modules["cellfeed"], name, None)
        missing = tuned["arrays"] if kind else ["parameters"]
        if missing:
            msg = (
                f"{self.name}: is of {name}, but does not contain the {' and '.join(missing)} of "
                f"it; give strategy={name}(..., block_size={block_size})"
            )
            raise ParameterError(msg)
        parameters = {
            each: tuple(value) if isinstance(value, list) else value
            for each, value in tuned["parameters"].items()
        }
        if "block_size" in getattr(kind, "__dataclass_fields__", ()):
            parameters["block_size"] = block_size
        try:
            strategy: sampling.SamplingStrategy = kind(**parameters, indices=indices)
        except TypeError as error:
            msg = f"{self.name}: the strategy {name} in it is damaged ({error}); run autotune again"
            raise FormatError(msg) from error
        return strategy

    def warn_of_differences(
        self, collection: Any, batch_size: int, strategy: sampling.SamplingStrategy
    ) -> None:
        """Warn if the settings are a prediction, or were measured in other conditions.

        Properties that the result does not contain are not compared.
        """
        if self.result["recommended"].get("basis") == "predicted":
            warnings.warn(
                f"{self.name}: its settings are predicted, since there was no time to measure "
                "them; run autotune again with a larger budget, or on a machine that does less",
                UserWarning,
                stacklevel=3,
            )
        here = {
            "n_cells": count_indexable_rows(collection),
            "n_vars": getattr(collection, "n_vars", None),
            "layout": getattr(collection, "layout", None),
            "batch_size": batch_size,
        }
        if here["layout"] is not None:
            here |= {"dtype": str(collection.dtype), "elements": list(collection.elements)}
        of, memory = self._measured, psutil.virtual_memory().total / 1e9
        architecture = of("machine", "platform", "architecture")
        cores, n_bytes = (
            of("machine", "cpu", "usable_cores"),
            of("machine", "memory", "total_bytes"),
        )
        measured = n_bytes / 1e9 if isinstance(n_bytes, int | float) else None
        compared = [
            (f"{k}={{}}, but it is {{}}", of("dataset", k), each) for k, each in here.items()
        ]
        compared += [
            ("a processor of type {}, but it is {}", architecture, platform.machine()),
            ("{:g} usable cores, but there are {:g}", cores, usable_cores()),
            ("{:.3g} GB of memory, but there are {:.3g} GB", measured, memory),
            ("{}, but it is {}", of("strategy", "name"), type(strategy).__name__),
        ]
        differences = [f"{text.format(*both)} here" for text, *both in compared if _differ(*both)]
        if differences:
            warnings.warn(
                f"{self.name}: was measured with {'; '.join(differences)}; its settings may be "
                "far from the best, so run autotune again",
                UserWarning,
                stacklevel=3,
            )

    def _measured(self, *names: str) -> Any:
        """Return a value of the result by the names of its place; None if there is none."""
        value: Any = self.result
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def _differ(measured: Any, here: Any) -> bool:
    """Whether both are known and differ; floats, by more than the memory a system reserves."""
    if isinstance(here, float):
        return isinstance(measured, int | float) and not math.isclose(measured, here, rel_tol=0.05)
    return here is not None and measured not in (None, [], "unknown", here)


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
    content: Any = None
    if isinstance(result, str | os.PathLike):
        name = str(result)
        # Not `Path.is_file`, which fails if the path is too long, as JSON in place of a path is.
        if not os.path.isfile(name):  # noqa: PTH113
            msg = f"{name}: no such file; make it with `autotune PATH... --label COLUMN`"
            raise PathError(msg)
        with suppress(ValueError, RecursionError):
            content = json.loads(Path(name).read_text("utf-8"))
    elif hasattr(result, "to_json"):
        name, content = "the result", result.to_json()
    else:
        kind = type(result).__name__
        msg = (
            f"`result` must be the path of an autotune.json or a result, but got one of type {kind}"
        )
        raise ParameterError(msg)
    try:
        if not isinstance(content, dict):
            why = "not a result of autotune (no JSON object); give the file that it wrote"
        elif content["schema"] != SCHEMA:
            why = f"has schema {content['schema']!r}, but {SCHEMA!r} is needed; run autotune again"
        elif loader := content["dataset"].get("loader"):
            why = f"is of {loader}, whose settings do not apply to this loader; run autotune again"
        elif content.get("loader_fault") is not None:
            why = f"recommends nothing, since wrong data were delivered: {content['loader_fault']}"
        elif content["recommended"] is None:
            why = "recommends nothing, since no configuration was feasible; run autotune again"
        else:
            return Recommendation(name, content, _settings(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        why = f"not a result of autotune ({why}); give the file that it wrote"
        raise FormatError(f"{name}: {why}") from error
    raise FormatError(f"{name}: {why}")


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a result, checked; see `Recommendation`.

    Raises
    ------
    KeyError, TypeError, AttributeError, ParameterError
        One is missing, is of another kind, or is out of range.
    """
    recommended, strategy = result["recommended"], result.get("strategy")
    sizes = recommended["configuration"]
    counts = {name: sizes[name] for name in ("block_size", "fetch_factor")}
    counts["batch_size"] = result["dataset"]["batch_size"]
    tuned = {"num_threads": sizes.get("num_threads"), "prefetch": recommended.get("prefetch")}
    for name, value in (counts | {name: tuned[name] or 1 for name in tuned}).items():
        require_positive(name, value)
    require_not_negative("num_workers", sizes["num_workers"])
    if strategy is not None:
        kinds = {"name": str, "parameters": dict, "arrays": list}
        strategy = {name: kind(strategy[name]) for name, kind in kinds.items()}
    others = {"align": sizes.get("align"), "strategy": strategy}
    return counts | tuned | others | {"num_workers": sizes["num_workers"]}
