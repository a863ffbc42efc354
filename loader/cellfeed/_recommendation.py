"""What the data set takes from a result of ``autotune``."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cellfeed._errors import (
    FormatError,
    ParameterError,
    PathError,
    require_integer,
    require_positive,
)

__all__ = ["SCHEMA", "Recommendation", "Recommending", "read_recommendation"]

SCHEMA = "cellfeed.autotune/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The settings that ``autotune`` chose."""

    block_size: int
    fetch_factor: int
    num_workers: int
    batch_size: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("block_size", "fetch_factor", "batch_size"):
            require_positive(name, getattr(self, name))
        if require_integer("num_workers", self.num_workers) < 0:
            msg = f"`num_workers >= 0` must hold, but got num_workers={self.num_workers}"
            raise ParameterError(msg)


class Recommending(Protocol):
    """A result of ``autotune`` that is in memory."""

    def to_json(self) -> dict[str, Any]:
        """Return what an ``autotune.json`` has."""


def read_recommendation(result: str | os.PathLike[str] | Recommending) -> Recommendation:
    """Read the recommended settings from a file, or take them from a result.

    Raises
    ------
    PathError
        There is no such file.
    FormatError
        The file is not a result of ``autotune``, or the result recommends nothing.
    """
    if isinstance(result, str | os.PathLike):
        return _recommendation(str(result), lambda: _parsed(Path(result)))
    return _recommendation("the result", result.to_json)


def _parsed(path: Path) -> Any:
    if not path.is_file():
        msg = f"{path}: no such file; make it with `autotune PATH... --label COLUMN`"
        raise PathError(msg)
    return json.loads(path.read_text())


def _recommendation(name: str, load: Callable[[], Any]) -> Recommendation:
    try:
        result: dict[str, Any] = load()
        schema = result["schema"]
        recommended, batch_size = result["recommended"], result["dataset"]["batch_size"]
        if schema == SCHEMA and recommended is not None:
            return Recommendation(
                block_size=recommended["block_size"],
                fetch_factor=recommended["fetch_factor"],
                num_workers=recommended["num_workers"],
                batch_size=batch_size,
            )
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{name}: not a result of autotune (lacks or garbles {error}); run it again"
        raise FormatError(msg) from error
    if schema != SCHEMA:
        msg = f"{name}: has schema {schema!r}, but {SCHEMA!r} is read; run autotune again"
    else:
        msg = f"{name}: recommends nothing, since no configuration was feasible; run autotune again"
    raise FormatError(msg)
