"""How labels are mixed, where blocks may end where chunks end, and where other settings vary."""

from collections.abc import Iterable, Mapping
from typing import Any

from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._entropy._epoch_course import EpochCourse
from cellfeed_tuner._entropy._storage_order import StorageOrder
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._mixing import Mixing
from cellfeed_tuner._progress import Progress
from cellfeed_tuner._results._configuration_result import ConfigurationResult, EntropyBits

__all__ = ["MixingByAlignment"]


class MixingByAlignment:
    """One `Mixing` for each alignment of blocks; what else varies mixes nothing.

    Parameters
    ----------
    mixings
        By the value of ``align``; under None where blocks are not aligned.
    """

    def __init__(self, mixings: Mapping[Setting, Mixing]) -> None:
        self._mixings = dict(mixings)

    def __getitem__(self, settings: tuple[Any, ...]) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, the first first, at `Configuration.plan_settings`."""
        block_size, fetch_factor, *others = settings
        return self._mixings[dict(others).get("align")][block_size, fetch_factor]

    def replay(self, grid: Iterable[Configuration], on_progress: Progress) -> None:
        """Replay the plans of a whole grid."""
        configurations = list(grid)
        for align, mixing in self._mixings.items():
            part = [each for each in configurations if each.others.get("align") == align]
            mixing.replay(part, on_progress)

    def storage_order(self, block_size: int) -> StorageOrder | None:
        """Return the storage order, which is the same for all."""
        return next(iter(self._mixings.values())).storage_order(block_size)

    def judged(
        self, result: ConfigurationResult, fault: str | None, within: Estimate | None
    ) -> ConfigurationResult:
        """Return a result with a verdict on each label; see `Mixing.judged`."""
        return self._of(result.configuration).judged(result, fault, within)

    def over_epoch(self, configuration: Configuration) -> dict[str, EpochCourse]:
        """Return each label's entropy over an epoch; nothing where that is too short."""
        return self._of(configuration).over_epoch(configuration)

    def _of(self, configuration: Configuration) -> Mixing:
        return self._mixings[configuration.others.get("align")]
