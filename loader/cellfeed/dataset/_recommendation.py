"""The settings of a dataset from a result of ``autotune``."""

import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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


class Recommendation:
    """The settings that ``autotune`` chose.

    Parameters
    ----------
    result
        Path of a result, or an object whose ``to_json()`` returns it.

    Attributes
    ----------
    settings
        ``block_size``, ``fetch_factor``, ``num_workers`` and ``batch_size``; ``align``,
        ``num_threads`` and ``prefetch``, which are None if they were not tuned; and the
        description of the tuned ``strategy``, None for shuffled blocks.

    Raises
    ------
    PathError
        There is no such file.
    FormatError
        The file is not a result of ``autotune``, or the result recommends nothing.
    ParameterError
        ``result`` is neither.
    """

    def __init__(self, result: Any) -> None:
        content: Any = None
        self._name = "the result"
        if isinstance(result, str | os.PathLike):
            self._name = str(result)
            # Not `Path.is_file`, which fails if the path is too long, as JSON in its place is.
            if not os.path.isfile(self._name):  # noqa: PTH113
                msg = f"{self._name}: no such file; make it with `autotune PATH... --label COLUMN`"
                raise PathError(msg)
            with suppress(ValueError, RecursionError):
                content = json.loads(Path(self._name).read_text("utf-8"))
        elif hasattr(result, "to_json"):
            content = result.to_json()
        else:
            msg = (
                "`result` must be the path of an autotune.json or a result, but got one of type "
                f"{type(result).__name__}"
            )
            raise ParameterError(msg)
        self._result = content
        try:
            if not isinstance(content, dict):
                why = "not a result of autotune (no JSON object); give the file that it wrote"
            elif (schema := content["schema"]) != SCHEMA:
                why = f"has schema {schema!r}, but {SCHEMA!r} is needed; run autotune again"
            elif loader := content["dataset"].get("loader"):
                why = f"is of {loader}, whose settings do not apply here; run autotune again"
            elif fault := content.get("loader_fault"):
                why = f"recommends nothing, since wrong data were delivered: {fault}"
            elif content["recommended"] is None:
                why = "recommends nothing, since no configuration was feasible; run autotune again"
            else:
                self.settings = _settings(content)
                return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
            why = f"not a result of autotune ({why}); give the file that it wrote"
            raise FormatError(f"{self._name}: {why}") from error
        raise FormatError(f"{self._name}: {why}")

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
                f"{self._name}: is of {name}, but does not contain the {' and '.join(missing)} of "
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
            msg = (
                f"{self._name}: the strategy {name} in it is damaged ({error}); run autotune again"
            )
            raise FormatError(msg) from error
        return strategy

    def warn_of_differences(
        self, collection: Any, batch_size: int, strategy: sampling.SamplingStrategy
    ) -> None:
        """Warn if the settings were measured in other conditions, as far as the result has them."""
        is_ours = hasattr(collection, "elements")
        here = {
            "dataset.n_cells": count_indexable_rows(collection),
            "dataset.n_vars": getattr(collection, "n_vars", None),
            "dataset.layout": getattr(collection, "layout", None),
            "dataset.dtype": str(collection.dtype) if is_ours else None,
            "dataset.elements": list(collection.elements) if is_ours else None,
            "dataset.batch_size": batch_size,
            "machine.platform.architecture": platform.machine(),
            "machine.cpu.usable_cores": usable_cores(),
            "strategy.name": type(strategy).__name__,
        }
        differences = list[str]()
        for path, value in here.items():
            measured: Any = self._result
            for name in path.split("."):
                measured = measured.get(name) if isinstance(measured, Mapping) else None
            if value is not None and measured not in (None, [], "unknown", value):
                shown = path.removeprefix("dataset.")
                differences.append(f"{shown}={measured}, but it is {value} here")
        if differences:
            warnings.warn(
                f"{self._name}: was measured with {'; '.join(differences)}; its settings may be "
                "far from the best, so run autotune again",
                UserWarning,
                stacklevel=3,
            )


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a result, checked; see `Recommendation`.

    Raises
    ------
    KeyError, TypeError, AttributeError, ParameterError
        One is missing, is of another kind, or is out of range.
    """
    recommended, strategy = result["recommended"], result.get("strategy")
    sizes = recommended["configuration"]
    settings = {name: sizes[name] for name in ("block_size", "fetch_factor")}
    settings["batch_size"] = result["dataset"]["batch_size"]
    tuned = {"num_threads": sizes.get("num_threads"), "prefetch": recommended.get("prefetch")}
    for name, value in (settings | {name: tuned[name] or 1 for name in tuned}).items():
        require_positive(name, value)
    if strategy is not None:
        kinds = {"name": str, "parameters": dict, "arrays": list}
        strategy = {name: kind(strategy[name]) for name, kind in kinds.items()}
    workers = require_not_negative("num_workers", sizes["num_workers"])
    others = {"align": sizes.get("align"), "strategy": strategy, "num_workers": workers}
    return settings | tuned | others
