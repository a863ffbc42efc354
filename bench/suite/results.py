"""Read asv's results."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asv.commands.compare import unroll_result
from asv.results import iter_results

COUNTER = "track"  # asv's name for the type of a tracked figure


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of one benchmark with one choice of parameters.

    Attributes
    ----------
    kind
        Type of the benchmark: `COUNTER`, "time" or "peakmemory".
    unit
        Its unit.
    value
        The measured value (the median of times); None if it failed, NaN if it was skipped.
    stats, samples
        asv's statistics of a time, and its samples; None for other types.
    """

    kind: str
    unit: str
    value: float | None
    stats: dict[str, Any] | None = None
    samples: list[float] | None = None

    @property
    def is_measured(self) -> bool:
        """Whether there is a value."""
        return self.value is not None and not math.isnan(self.value)


def read_figures(results: Path) -> dict[str, Figure]:
    """Return the figures of a results folder with one commit in it, by benchmark and parameters."""
    benchmarks = json.loads((results / "benchmarks.json").read_text())
    figures = {}
    for result in iter_results(str(results)):
        for key in result.get_all_result_keys():
            parameters = result.get_result_params(key)
            facts = benchmarks[key]
            for name, value, stats, samples in unroll_result(
                key,
                parameters,
                result.get_result_value(key, parameters),
                result.get_result_stats(key, parameters),
                result.get_result_samples(key, parameters),
            ):
                figures[name] = Figure(
                    kind=facts["type"],
                    unit=facts["unit"],
                    value=value,
                    stats=stats,
                    samples=samples,
                )
    return figures
