"""Whether a loader delivers the rows of its plan, with the labels of these rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cellfeed import (
    CategoricalColumn,
    Collection,
    EpochPlan,
    Minibatch,
    NumericColumn,
    ParameterError,
)
from cellfeed.machine import usable_cores, usable_memory_bytes
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import WARM_SHARE_OF_MEMORY
from cellfeed_tuner._machine import CacheState
from cellfeed_tuner._subject import codes_of, label_name, label_text

# Limits of sampled cells, which are sent to another process.
_MOST_BYTES, _MOST_CELLS, _LEAST_CELLS = 1 << 20, 64, 2


@dataclass(slots=True)
class Delivered:
    """Rows and labels (obs columns) of all minibatches, None for an absent label.

    Of the last minibatch, everything.
    """

    names: Sequence[str]
    rows: list[NDArray[np.int64]] = field(default_factory=list, init=False)
    labels: list[tuple[Any, ...]] = field(default_factory=list, init=False)
    last: Minibatch | None = field(default=None, init=False)

    def take(self, minibatch: Minibatch | None) -> None:
        """Keep rows and labels of a minibatch; None stands for a missing one."""
        if minibatch is None:
            self.rows.append(np.empty(0, dtype=np.int64))
            self.labels.append((np.empty(0, dtype=np.int64),) * len(self.names))
            return
        self.last = minibatch
        self.rows.append(minibatch.rows.numpy())
        self.labels.append(tuple(minibatch.obs.get(name) for name in self.names))

    def codes(self, collection: Collection) -> dict[str, NDArray[np.integer]]:
        """Return codes of each label as delivered, shape (n_minibatches, batch_size).

        Empty if minibatches lack labels or differ in size.
        """
        found = dict[str, NDArray[np.integer]]()
        for place, name in enumerate(self.names):
            values = [each[place] for each in self.labels]
            if not values or any(each is None or each.shape != values[0].shape for each in values):
                return {}
            found[name] = codes_of(collection.obs[name], np.stack(values))
        return found

    def fault(self, collection: Collection, configuration: Configuration, plan: EpochPlan) -> str:
        """Return the first minibatch with wrong rows or labels, in words, or an empty text."""
        fault = delivery_fault(self.rows, configuration, plan)
        if fault:
            return fault
        for number, (rows, labels) in enumerate(zip(self.rows, self.labels, strict=True)):
            for name, came in zip(self.names, labels, strict=True):
                wrong = _wrong_label(collection.obs[name], rows, came)
                if wrong:
                    return f"{_named(number, configuration, plan)} has {name} {wrong}"
        if self.last is not None and len(self.last.X) != len(self.last.rows):
            named = _named(len(self.rows) - 1, configuration, plan)
            return f"{named} has expression of {len(self.last.X)} cells for {len(self.last.rows)}"
        return ""


def planned_round(plan: EpochPlan, configuration: Configuration, number: int) -> NDArray[np.int64]:
    """Return the rows of one round's minibatches in order, shape (n_minibatches, batch_size).

    Each worker reads its own fetch, and workers take turns in delivering a minibatch.
    """
    n = configuration.fetches_per_round
    by_fetch = plan.delivered_rows(number * n, n).reshape(n, plan.fetch_factor, plan.batch_size)
    return by_fetch.swapaxes(0, 1).reshape(-1, plan.batch_size)


def delivery_fault(
    rows: Sequence[NDArray[np.int64]], configuration: Configuration, plan: EpochPlan
) -> str:
    """Return the first minibatch that differs from the plan, in words; empty if none does.

    ``rows`` are the rows of each minibatch in the order of delivery: all whole rounds of the first
    epoch, whose plan is ``plan``, then of the next epoch, and so on.
    """
    per_round = configuration.minibatches_per_round
    n_rounds = configuration.rounds_per_epoch(plan)
    for start in range(0, len(rows), per_round):
        epochs, number = divmod(start // per_round, n_rounds)
        planned = planned_round(replace(plan, epoch=plan.epoch + epochs), configuration, number)
        came = rows[start : start + per_round]
        for place, (found, expected) in enumerate(zip(came, planned[: len(came)], strict=True)):
            if not np.array_equal(found, expected):
                named = _named(start + place, configuration, plan)
                return f"{named} {_difference(found, expected)}"
    return ""


def _named(number: int, configuration: Configuration, plan: EpochPlan) -> str:
    """Return a name for the minibatch that came after so many others."""
    per_epoch = configuration.rounds_per_epoch(plan) * configuration.minibatches_per_round
    epochs, number_in_epoch = divmod(number, per_epoch)
    return f"minibatch {number_in_epoch} of epoch {plan.epoch + epochs}"


def _difference(came: NDArray[np.int64], planned: NDArray[np.int64]) -> str:
    if came.size != planned.size:
        return f"has {came.size} cells in place of {planned.size}"
    place = int(np.argmax(came != planned))
    return f"has cell {came[place]} where the plan has {planned[place]}"


def _wrong_label(
    column: CategoricalColumn | NumericColumn, rows: NDArray[np.int64], came: Any
) -> str:
    """Return the first label that differs from its row's, in words; empty if none does."""
    if came is None:
        return "for no cell: the column is absent"
    values, expected = np.asarray(came), column.values[rows]
    if values.shape != expected.shape:
        return f"for {values.size} cells in place of {rows.size}"
    # A missing number is NaN, which is not equal to itself.
    missing = (values != values) & (expected != expected)  # noqa: PLR0124
    wrong = np.flatnonzero((values != expected) & ~missing)
    if not wrong.size:
        return ""
    first = wrong[0]
    found, right = (
        label_text(label_name(column, each[first].item())) for each in (values, expected)
    )
    return f"{found} for cell {rows[first]}, which has {right}"


@dataclass(frozen=True, slots=True, eq=False)
class DeliveredCell:
    """One cell of a minibatch.

    ``columns`` are the columns of its ``values``; None if all ``n_vars`` columns have a value.
    ``labels`` are codes or numbers of obs columns.
    """

    row: int
    columns: NDArray[np.integer] | None
    values: NDArray[Any]
    n_vars: int
    labels: Mapping[str, Any]

    @property
    def expression(self) -> NDArray[Any]:
        """The value of each gene, shape (n_vars,)."""
        if self.columns is None:
            return self.values
        dense = np.zeros(self.n_vars, self.values.dtype)
        np.add.at(dense, self.columns, self.values)
        return dense


def sampled_cells(
    minibatch: Minibatch, labels: Sequence[str], *, seed: int
) -> tuple[DeliveredCell, ...]:
    """Return the first and the last cell of a minibatch, and more in random order.

    All of them if they are few and small.
    """
    rows, X = minibatch.rows.numpy(), minibatch.X
    is_sparse = X.layout == torch.sparse_csr
    parts = (X.crow_indices(), X.col_indices(), X.values()) if is_sparse else (X,)
    n_fitting = _MOST_BYTES * len(rows) // max(1, sum(part.nbytes for part in parts))
    n = min(_MOST_CELLS, max(_LEAST_CELLS, n_fitting))
    inner = 1 + np.random.default_rng(seed).permutation(max(0, len(rows) - 2))
    places = dict.fromkeys([0, len(rows) - 1, *inner.tolist()] if len(rows) else [])
    cells = list[DeliveredCell]()
    for place in list(places)[:n]:
        columns = None
        if is_sparse:
            indptr, indices, data = (part.numpy() for part in parts)
            inside = slice(int(indptr[place]), int(indptr[place + 1]))
            columns, values = indices[inside].copy(), data[inside].copy()
        else:
            values = X[place].reshape(-1).numpy().copy()
        of_cell = {
            name: minibatch.obs[name][place].item() for name in labels if name in minibatch.obs
        }
        cells.append(DeliveredCell(int(rows[place]), columns, values, X.shape[1:].numel(), of_cell))
    return tuple(cells)


# Whether a collection can be measured as requested, checked before any time is spent.

_ROUNDS_PER_EPOCH_WITH_WORKERS = 2
_MOST_WORKERS = 16


def check_size(
    what: str, n_cells: int, grid: Sequence[Configuration], batch_size: int, n_ranks: int = 1
) -> None:
    """Raise `ParameterError` if there are too few cells for every configuration of a grid."""
    needed = n_ranks * min(cells_needed(configuration, batch_size) for configuration in grid)
    if needed > n_cells:
        msg = (
            f"{what} has {n_cells:,} cells, but even the smallest configuration "
            f"needs {needed:,} to be timed{f' on {n_ranks} ranks' if n_ranks > 1 else ''}; give "
            "smaller batch, fetch or worker numbers"
        )
        raise ParameterError(msg)


def check_cache(collection: Collection, cache: CacheState) -> None:
    """Raise `ParameterError` if the cache is to be warm but the files do not fit in memory."""
    size, available = bytes_on_disk(collection), usable_memory_bytes()
    if cache == "warm" and size > WARM_SHARE_OF_MEMORY * available:
        msg = (
            f"cache='warm' needs the files in memory, but they have {size / 1e9:.1f} GB "
            f"and {available / 1e9:.1f} GB are available; measure with cache='cold'"
        )
        raise ParameterError(msg)


def bytes_on_disk(collection: Collection) -> int:
    """Return the size of all files of a collection, on this machine or on servers."""
    return sum(source.file_bytes() for source in collection.sources)


def cache_state(collection: Collection, requested: CacheState | None) -> CacheState:
    """Return the cache state to measure in: as requested, or else cold, or remote on servers.

    Caches of servers cannot be dropped or filled from here, so there is nothing to choose. An
    impossible state is a `ParameterError`.
    """
    if not collection.is_remote:
        if requested == "remote":
            msg = (
                f"cache='remote' is for files on servers, but {collection.locations[0]} is on this "
                "machine; give 'cold' or 'warm'"
            )
            raise ParameterError(msg)
        if requested == "warm" and collection.direct_io:
            msg = f"cache='warm', but {collection.locations[0]} is read past the page cache"
            raise ParameterError(f"{msg}; leave `cache` out, or open it without `direct_io`")
        return requested or "cold"
    if requested in {"cold", "warm"}:
        first = next(each for each in collection.locations if each.is_remote)
        msg = (
            f"cache={requested!r} is for files of this machine, but {first} is read from a server, "
            "whose caches are not under control; leave `cache` out"
        )
        raise ParameterError(msg)
    return "remote"


def cells_needed(configuration: Configuration, batch_size: int) -> int:
    """Return how many cells are needed to time whole fetches."""
    rounds = _ROUNDS_PER_EPOCH_WITH_WORKERS if configuration.num_workers else 1
    return rounds * configuration.minibatches_per_round * batch_size


def default_workers(collection: Collection, n_ranks: int = 1) -> tuple[int, ...]:
    """Return 0 and the powers of two up to a rank's share of the usable cores.

    For files on servers, only 0: one process sends many concurrent requests to hide latency.
    """
    if collection.is_remote:
        return (0,)
    most = min(_MOST_WORKERS, max(1, int(usable_cores()) // n_ranks))
    return (0, *(1 << power for power in range(most.bit_length())))


def obstacle(
    configuration: Configuration,
    *,
    n_cells: int,
    batch_size: int,
    row_bytes: float,
    memory_bytes: int,
) -> tuple[Literal["too few cells", "over memory"], str] | None:
    """Return why a configuration cannot run, as a status and a note; None if it can.

    The buffers of all fetches in memory, with rows of ``row_bytes`` on average, may take
    ``memory_bytes``.
    """
    if configuration.block_size > n_cells:
        return "too few cells", f"a block has more than the {n_cells:,} cells there are"
    needed = cells_needed(configuration, batch_size)
    if needed > n_cells:
        return "too few cells", f"whole fetches need {needed:,} cells"
    buffers = configuration.minibatches_in_memory * batch_size * row_bytes
    if buffers > memory_bytes:
        return "over memory", f"its buffers alone take {buffers / 1e6:,.0f} MB"
    return None
