"""Whether a loader delivers what its plan says, row by row, with the labels of these rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import CategoricalColumn, Collection, EpochPlan, Minibatch, NumericColumn
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._labels import codes_of, label_name

__all__ = ["Delivered", "delivery_fault", "planned_round"]


@dataclass(slots=True)
class Delivered:
    """What is kept of minibatches until the clock stops: rows and labels, and the last one whole.

    Parameters
    ----------
    names
        Obs columns whose values are kept.

    Attributes
    ----------
    rows
        Rows of each minibatch in the order in which they came.
    labels
        Values of the columns of each, None where it lacks one.
    last
        The last minibatch; None before there is one.
    """

    names: Sequence[str]
    rows: list[NDArray[np.int64]] = field(default_factory=list, init=False)
    labels: list[tuple[Any, ...]] = field(default_factory=list, init=False)
    last: Minibatch | None = field(default=None, init=False)

    def take(self, minibatch: Minibatch | None) -> None:
        """Keep what is needed of a minibatch; None stands for one that did not come."""
        if minibatch is None:
            self.rows.append(np.empty(0, dtype=np.int64))
            self.labels.append((np.empty(0, dtype=np.int64),) * len(self.names))
            return
        self.last = minibatch
        self.rows.append(minibatch.rows.numpy())
        self.labels.append(tuple(minibatch.obs.get(name) for name in self.names))

    def codes(self, collection: Collection) -> dict[str, NDArray[np.integer]]:
        """Return codes of each label as delivered, shape (n_minibatches, batch_size).

        Nothing where minibatches lack labels, or are not all of one size.
        """
        found = dict[str, NDArray[np.integer]]()
        for name in self.names:
            values = self._all_of(name)
            if values is None:
                return {}
            found[name] = codes_of(collection.obs[name], values)
        return found

    def fault(self, collection: Collection, configuration: Configuration, plan: EpochPlan) -> str:
        """Return where rows are not those of the plan, or labels not those of the rows.

        Returns
        -------
        The first minibatch that is not as it should be, in words; empty if all are.
        """
        fault = delivery_fault(self.rows, configuration, plan)
        if fault:
            return fault
        rows = np.stack(self.rows)
        for name in self.names:
            column, values = collection.obs[name], self._all_of(name)
            if values is not None and not _wrong_labels(column, rows, values).size:
                continue
            for number, labels in enumerate(self.labels):
                wrong = _wrong_label(column, rows[number], labels[self.names.index(name)])
                if wrong:
                    return f"{_named(number, configuration, plan)} has {name} {wrong}"
        if self.last is not None and len(self.last.X) != len(self.last.rows):
            named = _named(len(self.rows) - 1, configuration, plan)
            return f"{named} has expression of {len(self.last.X)} cells for {len(self.last.rows)}"
        return ""

    def _all_of(self, name: str) -> NDArray[Any] | None:
        """Return a label's values in all minibatches; None where some lack it, or not all fit."""
        place = self.names.index(name)
        values = [each[place] for each in self.labels]
        whole = all(each is not None and each.shape == values[0].shape for each in values)
        return np.stack(values) if whole and values else None


def planned_round(plan: EpochPlan, configuration: Configuration, number: int) -> NDArray[np.int64]:
    """Return the rows of one round's minibatches, in the order in which they come.

    Each worker reads a fetch of its own, and they take turns in delivering a minibatch.

    Returns
    -------
    Rows, shape (minibatches of a round, batch size).
    """
    n = configuration.fetches_per_round
    by_fetch = plan.delivered_rows(number * n, n).reshape(n, plan.fetch_factor, plan.batch_size)
    return by_fetch.swapaxes(0, 1).reshape(-1, plan.batch_size)


def delivery_fault(
    rows: Sequence[NDArray[np.int64]], configuration: Configuration, plan: EpochPlan
) -> str:
    """Compare minibatches with the plan, and say where they depart from it.

    Parameters
    ----------
    rows
        Rows of each minibatch in the order in which they came: all of an epoch's whole rounds,
        then those of the next epoch, and so on.
    configuration
        What they were read with.
    plan
        The first of these epochs.

    Returns
    -------
    The first minibatch that is not as planned, in words; empty if all are.
    """
    per_round = configuration.minibatches_per_round
    n_rounds = configuration.rounds_per_epoch(plan)
    for start in range(0, len(rows), per_round):
        epochs, number = divmod(start // per_round, n_rounds)
        epoch = replace(plan, epoch=plan.epoch + epochs)
        came = rows[start : start + per_round]
        planned = planned_round(epoch, configuration, number)[: len(came)]
        place = _first_wrong(came, planned)
        if place is not None:
            what = _difference(came[place], planned[place])
            return f"{_named(start + place, configuration, plan)} {what}"
    return ""


def _named(number: int, configuration: Configuration, plan: EpochPlan) -> str:
    """Return what to call the minibatch that came after so many others."""
    per_epoch = configuration.rounds_per_epoch(plan) * configuration.minibatches_per_round
    epochs, number_in_epoch = divmod(number, per_epoch)
    return f"minibatch {number_in_epoch} of epoch {plan.epoch + epochs}"


def _wrong_label(
    column: CategoricalColumn | NumericColumn, rows: NDArray[np.int64], came: Any
) -> str:
    """Return the first label that is not that of its row, in words; empty if there is none."""
    if came is None:
        return "for no cell: the column is absent"
    values = np.asarray(came)
    if values.shape != rows.shape:
        return f"for {values.size} cells in place of {rows.size}"
    wrong = _wrong_labels(column, rows, values)
    if not wrong.size:
        return ""
    row = rows[wrong[0]]
    found, right = (
        label_name(column, each.item()) for each in (values[wrong[0]], column.values[row])
    )
    return f"{_said(found)} for cell {row}, which has {_said(right)}"


def _wrong_labels(
    column: CategoricalColumn | NumericColumn, rows: NDArray[np.int64], values: NDArray[Any]
) -> NDArray[np.intp]:
    """Return where labels are not those of their rows, as places in the flat array."""
    expected = column.values[rows]
    if values.shape != expected.shape:
        return np.arange(expected.size)
    # What is not equal to itself is no number, which is how a number is missing.
    missing = (values != values) & (expected != expected)  # noqa: PLR0124
    return np.flatnonzero((values != expected) & ~missing)


def _said(label: Any) -> str:
    return "missing" if label is None else str(label)


def _first_wrong(came: Sequence[NDArray[np.int64]], planned: NDArray[np.int64]) -> int | None:
    whole = all(each.size == planned.shape[1] for each in came)
    if whole and np.array_equal(np.stack(came), planned):
        return None
    pairs = enumerate(zip(came, planned, strict=True))
    return next(place for place, (one, other) in pairs if not np.array_equal(one, other))


def _difference(came: NDArray[np.int64], planned: NDArray[np.int64]) -> str:
    if came.size != planned.size:
        return f"has {came.size} cells in place of {planned.size}"
    place = int(np.argmax(came != planned))
    return f"has cell {came[place]} where the plan has {planned[place]}"
