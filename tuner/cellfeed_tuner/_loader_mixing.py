"""How the labels of rows are mixed in the minibatches that any loader delivers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import MIXING_ROWS
from cellfeed_tuner._entropy._label_counts import count_labels
from cellfeed_tuner._entropy._minibatch_entropy import entropies_of
from cellfeed_tuner._entropy._storage_order import StorageOrder
from cellfeed_tuner._interval import Estimate, mean_with_interval
from cellfeed_tuner._measuring._events import by_round
from cellfeed_tuner._measuring._measure import Measurement
from cellfeed_tuner._mixing import Label
from cellfeed_tuner._progress import Progress
from cellfeed_tuner._results._configuration_result import (
    ConfigurationResult,
    EntropyBits,
    LabelResult,
)
from cellfeed_tuner._subject._tunable import Tunable

__all__ = ["LoaderMixing", "loader_label"]

_LEAST_LABELS = 2

_Settings = tuple[Any, ...]
_Estimates = Mapping[str, Estimate]


def loader_label(name: str, values: ArrayLike) -> Label:
    """Return a label of another loader by its values; refuse one with nothing to mix."""
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


@dataclass(slots=True, kw_only=True)
class LoaderMixing:
    """Entropies of minibatches as the loader plans them, or, without a plan, as they came out.

    Until something was measured of some settings, all that is known is that larger blocks and
    smaller fetches do not mix better: they are taken to mix as well as the worst of those that
    were measured, or as random samples. ``first`` is any configuration, and tells whether there is
    a plan.
    """

    tunable: Tunable
    labels: Sequence[Label]
    first: Configuration
    _random: dict[str, float] = field(init=False)
    _planned: Callable[[_Settings], _Estimates | None] = field(init=False)
    _measured: dict[Configuration, Measurement] = field(default_factory=dict, init=False)
    _delivered: dict[_Settings, _Estimates] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        size = self.tunable.batch_size
        self._planned = cache(self._planned_anew)
        self._random = {each.name: each.counted.random_entropy_bits(size) for each in self.labels}

    def __getitem__(self, settings: _Settings) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, the first first, at `Configuration.plan_settings`."""
        known = self._known(settings) or self._at_most(settings)
        return {
            name: EntropyBits(expected=known[name], random=random)
            for name, random in self._random.items()
        }

    def replay(self, grid: Iterable[Configuration], on_progress: Progress) -> None:
        """Compute the entropies of a whole grid, as far as the loader has a plan."""
        settings = dict.fromkeys(each.plan_settings for each in grid)
        for number, each in enumerate(settings):
            self._planned(each)
            on_progress("entropy", number + 1, len(settings))

    @property
    def is_planned(self) -> bool:
        """Whether entropies are known before anything is measured."""
        return self._planned(self.first.plan_settings) is not None

    def learn(self, found: Measurement) -> bool:
        """Take note of entropies that were measured; return whether they were not planned."""
        settings = found.configuration.plan_settings
        if self._planned(settings) is not None:
            return False
        if all(found.round_entropy_bits.get(name) for name in self._random):
            self._measured[found.configuration] = found
            alike = [e for c, e in self._measured.items() if c.plan_settings == settings]
            self._delivered[settings] = {
                name: _bounded([b for each in alike for b in each.round_entropy_bits[name]], most)
                for name, most in self._random.items()
            }
        return True

    def storage_order(self, block_size: int) -> StorageOrder | None:  # noqa: ARG002
        """Return None: storage order is known of cellfeed's own plans only."""
        return None

    def judged(
        self, result: ConfigurationResult, fault: str | None, within: Estimate | None
    ) -> ConfigurationResult:
        """Return a result with what is known of its entropy by now; nothing is 0 to random's."""
        del fault, within  # of cellfeed's own
        settings = result.configuration.plan_settings
        found = dict(self[settings])
        if self._known(settings) is None:
            found = {
                name: replace(each, expected=Estimate(0.0, 0.0, each.random))
                for name, each in found.items()
            }
        measured = result.entropy_bits.measured
        first, *others = found
        return replace(
            result,
            entropy_bits=replace(found[first], measured=measured),
            further_labels={
                name: LabelResult(
                    entropy_bits=replace(
                        found[name],
                        measured=result.further_labels[name].entropy_bits.measured,
                    )
                )
                for name in others
            },
        )

    def _known(self, settings: _Settings) -> _Estimates | None:
        return self._planned(settings) or self._delivered.get(settings)

    def _planned_anew(self, settings: _Settings) -> _Estimates | None:
        """Return the entropies of a plan, from its first fetches; None if there is no plan."""
        block_size, fetch_factor, *others = settings
        configuration = Configuration(
            block_size=block_size, fetch_factor=fetch_factor, **dict(others)
        )
        tunable = self.tunable
        rows = tunable.planned_rows(configuration, max(1, MIXING_ROWS // tunable.batch_size))
        if rows is None:
            return None
        if rows.shape != (len(rows), tunable.batch_size) or not len(rows):
            msg = (
                f"`planned_rows` of {tunable.name} must give rows of shape (n, "
                f"{tunable.batch_size}), but gave shape {rows.shape}"
            )
            raise ParameterError(msg)
        return {
            each.name: _bounded(
                _by_fetch(entropies_of(each.codes[rows]), configuration), self._random[each.name]
            )
            for each in self.labels
        }

    def _at_most(self, settings: _Settings) -> _Estimates:
        """Return the least entropy of what has no larger blocks and no smaller fetches."""
        block_size, fetch_factor, *others = settings
        better = [
            known
            for (block, fetch, *theirs), known in self._delivered.items()
            if block <= block_size and fetch >= fetch_factor and theirs == others
        ]
        most = {
            name: min([random, *(each[name].value for each in better)])
            for name, random in self._random.items()
        }
        return {name: Estimate(bits, 0.0, bits) for name, bits in most.items()}


def _by_fetch(bits: NDArray[np.float64], configuration: Configuration) -> NDArray[np.float64]:
    """Return means over whole fetches, if there are two: minibatches of one are alike."""
    means = by_round(bits, configuration.fetch_factor)
    return means if means.size > 1 else bits


def _bounded(bits: ArrayLike, most: float) -> Estimate:
    """Return a mean whose interval, if it is infinite, is all that there may be."""
    found = mean_with_interval(bits)
    return Estimate(found.value, max(0.0, found.low), min(max(most, found.value), found.high))
