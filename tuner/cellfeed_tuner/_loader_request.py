"""What ``autotune`` is asked about a loader of any kind, checked before any time is spent."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from cellfeed import ParameterError
from cellfeed_tuner._entropy._label_counts import count_labels
from cellfeed_tuner._loader_mixing import LoaderMixing
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._checks import cells_needed
from cellfeed_tuner._measuring._measure import prepare_cache
from cellfeed_tuner._mixing import Label
from cellfeed_tuner._planning._cost_model import Geometry
from cellfeed_tuner._planning._space import Space
from cellfeed_tuner._ranks._world import Ranks
from cellfeed_tuner._request import AnyMixing, Request, constraints_of
from cellfeed_tuner._results._dataset import Dataset, dataset_of_loader
from cellfeed_tuner._searching._requirements import Requirements
from cellfeed_tuner._subject._tunable import Tunable

__all__ = ["LoaderRequest"]

_LEAST_LABELS = 2
# What there is of each where a loader has no such setting.
_COMMON = {"block_size": 1, "fetch_factor": 1, "num_workers": 0}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoaderRequest(Request):
    """Tune another loader.

    Parameters
    ----------
    tunable
        The loader.
    """

    tunable: Tunable

    @classmethod
    def checked(
        cls,
        tunable: Tunable,
        *,
        budget: float,
        entropy_floor: float,
        memory: int | None,
        need: float | None,
        step_seconds: float | None,
        cache: CacheState | None,
        seed: int,
        ranks: Ranks,
    ) -> "LoaderRequest":
        """Return a request of `autotune`, or raise what that raises for what cannot be done."""
        tunable.check()
        if not tunable.labels:
            msg = f"{tunable.name} has no `labels`; give it one that minibatches are to be mixed by"
            raise ParameterError(msg)
        if cache == "remote" or (cache == "cold" and not tunable.paths):
            msg = f"cache={cache!r} needs `files` of this machine, but {tunable.name} has none"
            raise ParameterError(msg)
        request = cls(
            tunable=tunable,
            labels=[_label(name, values) for name, values in tunable.labels.items()],
            space=_space(tunable),
            constraints=constraints_of(
                entropy_floor,
                memory,
                need,
                step_seconds,
                ranks.n_local * tunable.batch_size,
                budget,
            ),
            cache=cache or ("cold" if tunable.paths else "warm"),
            batch_size=tunable.batch_size,
            budget=budget,
            seed=seed,
            ranks=ranks,
        )
        cells = min(cells_needed(each, tunable.batch_size) for each in request.grid)
        needed = ranks.n_total * cells
        if needed > request.n_rows:
            msg = (
                f"{tunable.name} has {request.n_rows:,} rows, but even the smallest configuration "
                f"needs {needed:,} to be timed; give smaller batch, fetch or worker numbers"
            )
            raise ParameterError(msg)
        return request

    @property
    def n_rows(self) -> int:
        """Rows that an epoch visits."""
        return self.labels[0].codes.size

    @property
    def subject(self) -> Tunable:
        """What the measuring process is to hold."""
        return self.tunable

    @property
    def files(self) -> Sequence[Path]:
        """What is read, of this machine."""
        return self.tunable.paths

    @property
    def geometry(self) -> Geometry:
        """How what is visited lies in storage."""
        return Geometry(
            n_cells=self.n_rows,
            rows_per_chunk=self.tunable.rows_per_chunk,
            n_files=max(1, len(self.files)),
        )

    def mixing(self) -> LoaderMixing:
        """Return what knows how labels are mixed."""
        return LoaderMixing(tunable=self.tunable, labels=self.labels, first=self.grid[0])

    def requirements(self, mixing: AnyMixing) -> Requirements:
        """Return what holds configurations against the constraints."""
        assert isinstance(mixing, LoaderMixing)  # noqa: S101 - what the method above returns
        return Requirements(
            n_cells=self.n_rows // self.ranks.n_total,
            row_bytes=0.0,  # not known before it is measured
            batch_size=self.batch_size,
            constraints=self.constraints,
            entropies=mixing,
            is_planned=mixing.is_planned,
            learn=mixing.learn,
        )

    def described(self) -> Dataset:
        """Return what is read, and how its labels are distributed."""
        return dataset_of_loader(self.tunable, self.counted)

    def prepared(self) -> CacheState | Literal["unknown"]:
        """Bring files into the state that is asked for; return what came of it."""
        return prepare_cache(self.files, self.cache) if self.files else self.cache


def _space(tunable: Tunable) -> Space:
    """Return every combination of its settings."""
    asked = dict[str, Any](tunable.parameters)
    common = [asked.pop(name, (least,)) for name, least in _COMMON.items()]
    return Space.of(*common, **asked)


def _label(name: str, values: ArrayLike) -> Label:
    codes, found = pd.factorize(np.asarray(values))  # what is missing becomes -1
    if len(found) < _LEAST_LABELS:
        msg = (
            f"label {name!r} has {len(found)} value(s), so there is nothing to mix; choose another"
        )
        raise ParameterError(msg)
    if len(found) > codes.size // 2:
        msg = (
            f"label {name!r} has {len(found):,} values in {codes.size:,} rows, so that any order "
            "looks mixed; choose another"
        )
        raise ParameterError(msg)
    return Label(name, codes, count_labels(codes))
