"""Looking up what earlier runs found, and keeping what this one finds."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cellfeed_tuner._history._earlier_run import Asked, EarlierRun, Key
from cellfeed_tuner._history._fingerprint import (
    data_fingerprint,
    machine_fingerprint,
    versions_fingerprint,
)
from cellfeed_tuner._history._recall import Recollection
from cellfeed_tuner._machine._description import Machine
from cellfeed_tuner._measuring._labels import label_codes
from cellfeed_tuner._measuring._selected import Selected
from cellfeed_tuner._results._recommended import Recommended

if TYPE_CHECKING:
    import optuna

__all__ = ["Notes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What is kept of runs, for one that begins now.

    Parameters
    ----------
    key
        What it runs on.
    asked
        What it is asked for.
    path
        The first of its files, so that people know them again.
    began
        When it began.
    """

    key: Key
    asked: Asked
    path: str
    began: datetime

    @classmethod
    def of(
        cls,
        selected: Selected,
        label: str,
        machine: Machine,
        asked: Asked,
        began: datetime,
    ) -> "Notes":
        """Return the notes for rows of a collection with a label on a machine."""
        collection = selected.collection
        key = Key(
            data=data_fingerprint(
                collection,
                label_codes(collection, label),
                selected.indices,
                selected.strategy,
            ),
            machine=machine_fingerprint(machine),
            versions=versions_fingerprint(),
        )
        return cls(key=key, asked=asked, path=str(collection.locations[0]), began=began)

    def recollection(self) -> Recollection:
        """Return which earlier runs bear on this one."""
        # Not above, since who imports this need not wait for Optuna, which only this needs.
        from cellfeed_tuner._history._study import cache_folder, read_runs  # noqa: PLC0415

        runs = read_runs(cache_folder(), self.key.data.digest)
        return Recollection.of(runs, self.key, self.asked)

    def keep(
        self, study: "optuna.Study", recommended: Recommended | None, *, is_short: bool
    ) -> None:
        """Keep what was measured, and what was recommended, for later runs."""
        from cellfeed_tuner._history._study import cache_folder, record  # noqa: PLC0415 - as above

        run = EarlierRun(
            key=self.key,
            asked=self.asked,
            began=self.began.astimezone(UTC).isoformat(timespec="milliseconds"),
            path=self.path,
            is_short=is_short,
            choice=None if recommended is None else recommended.configuration,
            cells_per_second=None if recommended is None else recommended.cells_per_second,
        )
        record(cache_folder(), run, study)
