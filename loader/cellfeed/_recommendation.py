"""What the data set takes from an ``autotune.json``."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellfeed._errors import (
    FormatError,
    ParameterError,
    PathError,
    require_integer,
    require_positive,
)

__all__ = ["SCHEMA", "Recommendation", "read_recommendation"]

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


def read_recommendation(path: str | os.PathLike[str]) -> Recommendation:
    """Read the recommended settings.

    Raises
    ------
    PathError
        There is no such file.
    FormatError
        The file is not a result of ``autotune``, or recommends nothing.
    """
    if not Path(path).is_file():
        msg = f"{path}: no such file; make it with `autotune PATH... --label COLUMN`"
        raise PathError(msg)
    try:
        result: dict[str, Any] = json.loads(Path(path).read_text())
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
        msg = f"{path}: not a result of autotune (lacks or garbles {error}); run it again"
        raise FormatError(msg) from error
    if schema != SCHEMA:
        msg = f"{path}: has schema {schema!r}, but {SCHEMA!r} is read; run autotune again"
    else:
        msg = f"{path}: recommends nothing, since no configuration was feasible; run autotune again"
    raise FormatError(msg)
