"""The subject of tuning: rows of a collection, or any loader; its labels and plans."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import (
    BlockShuffling,
    CategoricalColumn,
    CellfeedError,
    Collection,
    ColumnError,
    EpochPlan,
    NumericColumn,
    ParameterError,
    SamplingStrategy,
)
from cellfeed_tuner._configuration import SIZES, Configuration, Setting
from cellfeed_tuner._entropy import (
    LabelCounts,
    PlanReplay,
    Statistic,
    count_labels,
    effective_block_size,
    has_random_blocks,
    has_weights,
    replay_plan,
)

# Draws of an epoch that represent all of them. Chosen: frequencies are then known to 0.05 %.
MOST_DRAWS = 1 << 22
# Draws of several epochs where one has fewer. Chosen: frequencies are then known to 0.1 %.
_LEAST_DRAWS = 1 << 18
# Fewest cells per value, on average, for values to be labels and not identifiers; and, for
# fractions, to be labels and not a quantity.
LEAST_CELLS_PER_LABEL, LEAST_CELLS_PER_FRACTION = 2, 10

# The description of any loader, from which the tuner chooses its settings.


class Tunable(ABC):
    """A loader to be tuned by `autotune`, or measured by `measure`.

    A subclass defines `open` and, for `autotune`, ``labels`` and `labels_of`. It is pickled and
    sent to the measuring process, which imports it: define it in a module of its own, not in a
    notebook or in the script that runs.

    Attributes
    ----------
    parameters
        The possible values of each setting, by name: a list, or a `range` of integers. Three names
        have a meaning: ``block_size``, rows that are contiguous and read together;
        ``fetch_factor``, minibatches that are read and shuffled together, which takes memory; and
        ``num_workers``, processes. If the loader calls these differently, translate in `open`; if
        it has none of them, it reads each minibatch separately. All other names are free.
    labels
        For each label, the value of each visited row, shape (n_rows,): any values, None or NaN if
        missing. Entropy is compared with random samples of these. The first label is shown in
        tables.
    batch_size
        Rows of a minibatch.
    files
        The files that the loader reads; folders stand for all files in them. Their pages are
        dropped from the page cache, so that measurements are cold. Without files, nothing is
        dropped.
    rows_per_chunk
        Mean number of rows in a unit of storage that is read as a whole; 1 if rows are read one by
        one.

    Examples
    --------
    >>> class Numbers(Tunable):
    ...     parameters = {"fetch_factor": [1, 4]}
    ...     labels = {"parity": [0, 1] * 500}
    ...     batch_size = 10
    ...
    ...     def open(self, configuration):
    ...         return np.random.permutation(1000).reshape(100, 10)
    ...
    ...     def labels_of(self, minibatch):
    ...         return {"parity": minibatch % 2}
    >>> Numbers().name
    'Numbers'
    """

    parameters: Mapping[str, Sequence[Setting]] = MappingProxyType({})
    labels: Mapping[str, ArrayLike] = MappingProxyType({})
    batch_size: int = 64
    files: Sequence[Path | str] = ()
    rows_per_chunk: float = 1.0

    @abstractmethod
    def open(self, configuration: Configuration) -> Iterable[Any]:
        """Return the loader with these settings.

        The settings are ``configuration.block_size``, ``configuration.fetch_factor``,
        ``configuration.num_workers``, and ``configuration[name]`` for any other name.

        Called in the measuring process, after Python's, NumPy's and PyTorch's global generators
        were seeded: differently each time, so take the loader's seed from them. The loader is
        iterated over in several epochs, and must yield whole minibatches only (``drop_last=True``).
        An epoch has ``len(loader)`` minibatches or, if it has no length, as many as there are rows
        in ``labels``.
        """

    def labels_of(self, minibatch: Any) -> Mapping[str, ArrayLike]:  # noqa: ARG002 - to override
        """Return the labels of a minibatch's rows, by name, each of shape (batch_size,).

        Its time counts, so it should be cheap. Values need not be those of ``labels``, as long as
        equal labels have equal values, such as codes.
        """
        return {}

    def planned_rows(
        self,
        configuration: Configuration,  # noqa: ARG002 - to override
        n_minibatches: int,  # noqa: ARG002 - to override
    ) -> NDArray[np.int64] | None:
        """Return the rows of the first minibatches, if they are known without reading.

        Entropy is then computed before anything is timed, and configurations that mix too little
        are not timed.

        Returns
        -------
        Row numbers in ``labels``, shape (at most n_minibatches, batch_size); None, as here, if they
        are unknown: entropy is then measured.
        """
        return None

    @property
    def name(self) -> str:
        """The name in reports."""
        return type(self).__name__

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files that the loader reads."""
        paths = map(Path, self.files)
        return tuple(
            file
            for path in paths
            for file in ([path] if path.is_file() else sorted(path.rglob("*")))
            if file.is_file()
        )

    def check(self) -> None:
        """Check everything that can be checked without opening the loader.

        Raises
        ------
        ParameterError
            The class is defined in the script that runs; ``batch_size`` is below one; labels
            differ in length; or the values of a setting are not a list of valid values.
        """
        if type(self).__module__ == "__main__":
            msg = (
                f"{self.name} is defined in the script or notebook that is run, which the "
                "measuring process cannot import; move it to a module of its own"
            )
            raise ParameterError(msg)
        for name, values in self.parameters.items():
            _check_values(self.name, name, values)
        if self.batch_size < 1:
            msg = f"`batch_size >= 1` must hold, but {self.name} has {self.batch_size}"
            raise ParameterError(msg)
        sizes = {name: len(np.asarray(values)) for name, values in self.labels.items()}
        if len(set(sizes.values())) > 1:
            msg = f"labels of {self.name} must have a value for each row, but have {sizes} values"
            raise ParameterError(msg)


def _check_values(tunable: str, name: str, values: Any) -> None:
    """Refuse invalid values of a setting."""
    if isinstance(values, range):
        return
    kinds = (int,) if name in SIZES else (bool, int, float, str, type(None))
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not all(isinstance(each, kinds) for each in values):
        what = "whole numbers" if name in SIZES else "numbers, words, True, False or None"
        msg = f"parameters[{name!r}] of {tunable} must be a range or a list of {what}"
        raise ParameterError(f"{msg}, but is {values!r}")


# Labels that minibatches should be mixed by, as codes.

_LEAST_LABELS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """A label that minibatches should be mixed by.

    Parameters
    ----------
    codes
        Code of each cell's value in the order of storage, -1 where missing, shape (n_cells,); of
        the visited cells, or of all cells if plans select the visited ones.
    counted
        How often each value occurs among the visited cells.
    drawn
        How often the strategy draws each value; None if as often as it occurs.
    n_epochs
        Number of epochs in ``drawn``.
    """

    name: str
    codes: NDArray[np.integer]
    counted: LabelCounts
    drawn: LabelCounts | None = None
    n_epochs: int = 1

    @classmethod
    def of_values(cls, name: str, values: ArrayLike) -> "Label":
        """Return a label of another loader from its values; refuse one with nothing to mix."""
        codes = _factorized(np.asarray(values))
        label = cls(name, codes, count_labels(codes))
        label.check(f"label {name!r}", error=ParameterError)
        return label

    @property
    def target(self) -> LabelCounts:
        """How often each value is drawn."""
        return self.counted if self.drawn is None else self.drawn

    @property
    def n_per_epoch(self) -> int:
        """Cells that an epoch delivers."""
        return self.target.n_rows // self.n_epochs

    def check(
        self,
        what: str,
        where: str = "",
        *,
        has_fractions: bool = False,
        error: type[CellfeedError] = ColumnError,
    ) -> None:
        """Refuse a label with nothing to mix, or with nearly as many values as cells."""
        for each, n_epochs in ((self.counted, 1), (self.target, self.n_epochs)):
            n_labels, n_labelled = each.counts.size, int(each.counts.sum()) // n_epochs
            if n_labels < _LEAST_LABELS:
                msg = (
                    f"{what} has {n_labels} value(s){where}, so there is nothing to mix; choose a "
                    "label with at least two, such as the plate or the cell type"
                )
                raise error(msg)
            least = LEAST_CELLS_PER_FRACTION if has_fractions else LEAST_CELLS_PER_LABEL
            if n_labelled < least * n_labels:
                remedy = "make bins of it (pandas.cut), or " if has_fractions else ""
                msg = (
                    f"{what} has {n_labels:,} values in {n_labelled:,} cells, so that hardly two "
                    f"cells of a minibatch have the same and any order looks mixed; {remedy}choose "
                    "a label such as the plate or the cell type"
                )
                raise error(msg)


def names_of(label: str | Sequence[str]) -> tuple[str, ...]:
    """Return one label or several as a tuple without duplicates.

    Examples
    --------
    >>> names_of("plate"), names_of(["plate", "drug", "plate"])
    (('plate',), ('plate', 'drug'))
    """
    return (label,) if isinstance(label, str) else tuple(dict.fromkeys(label))


def label_codes(collection: Collection, label: str) -> NDArray[np.integer]:
    """Return a code for each cell's label, -1 where it is missing, shape (n_cells,).

    Each number of a numeric column is a label. Raises `ColumnError` if the column was not opened.
    """
    column = opened_column(collection, label)
    return codes_of(column, column.values)


def opened_column(collection: Collection, name: str) -> CategoricalColumn | NumericColumn:
    """Return an obs column, or raise `ColumnError` if it was not opened."""
    if name not in collection.obs:
        msg = f"the collection was opened without the obs column {name!r}; open it with `obs`"
        raise ColumnError(msg)
    return collection.obs[name]


def codes_of(
    column: CategoricalColumn | NumericColumn, values: NDArray[Any]
) -> NDArray[np.integer]:
    """Return codes for a column's values in minibatches, of the same shape.

    Equal values have equal codes. ``values`` are codes of categories, or numbers; codes of numbers
    are comparable within one call only.
    """
    if isinstance(column, CategoricalColumn):
        return values
    return _factorized(values.ravel()).reshape(values.shape)


def _factorized(values: NDArray[Any]) -> NDArray[np.integer]:
    import pandas as pd  # noqa: PLC0415 - categories need none

    codes: NDArray[np.integer] = pd.factorize(values)[0]  # missing values become -1
    return codes


def label_name(column: CategoricalColumn | NumericColumn, value: Any) -> Any:
    """Return the label that a code or number stands for, None if it is missing."""
    if not isinstance(column, CategoricalColumn):
        return None if np.isnan(value) else value
    if not 0 <= value < len(column.categories):
        return None if value < 0 else f"of code {value}, which there is not"
    return column.categories[value]


def label_text(label: Any) -> str:
    """Return a label as text."""
    return "missing" if label is None else str(label)


# A collection, and the rows of it that are visited.


@dataclass(frozen=True)
class Selected:
    """Rows of a collection, in the order of storage; all rows if ``indices`` is None.

    ``where`` is the query that selected them, if there was one. ``strategy`` visits them, with any
    block size; in shuffled blocks if None.
    """

    collection: Collection
    indices: NDArray[np.int64] | None = None
    where: str = ""
    strategy: SamplingStrategy | None = None

    @classmethod
    def of(
        cls,
        subject: "Collection | Selected",
        indices: ArrayLike | str | None = None,
        strategy: SamplingStrategy | None = None,
    ) -> "Selected":
        """Return some rows of a collection, checked and sorted as strategies do.

        ``indices`` may be a query. A `Selected` is returned unchanged.

        Raises
        ------
        ParameterError
            They are not rows of the collection, no row matches the query, or the strategy has
            other rows, or does not fit the collection.
        ColumnError
            The query or the strategy names a column that does not exist.
        """
        if isinstance(subject, Selected):
            return subject
        where = indices if isinstance(indices, str) else ""
        if isinstance(indices, str):
            indices = subject.where(indices)
            if not indices.size:
                msg = f"no cell matches the query {where!r}; compare it with the values of obs"
                raise ParameterError(msg)
        if strategy is not None:
            strategy = _with_rows(strategy, indices).bound_to(subject)
            indices = getattr(strategy, "indices", None)
        rows = BlockShuffling(block_size=1, indices=indices)
        (strategy or rows).n_positions(len(subject))
        return cls(subject, None if indices is None else np.asarray(rows.indices), where, strategy)

    def __len__(self) -> int:
        return len(self.collection) if self.indices is None else self.indices.size

    def blocks(self, block_size: int, align: Setting = None) -> SamplingStrategy:
        """Return the strategy with a block size, if it has blocks."""
        if self.strategy is None:
            return BlockShuffling(
                block_size=block_size, indices=self.indices, align=cast(Any, align)
            )
        if not _has(self.strategy, "block_size"):
            return self.strategy
        resized: SamplingStrategy = replace(cast(Any, self.strategy), block_size=block_size)
        return resized

    def aligned(self, align: Setting) -> "Selected":
        """Return the same rows in blocks that are aligned with chunks, if ``align`` says so."""
        if align is None or self.strategy is not None:
            return self
        strategy = BlockShuffling(1, align=cast(Any, align))
        return Selected.of(self.collection, self.indices, strategy)

    def block_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the possible block sizes, or raise `ParameterError` if there are none.

        For a strategy of sets, sizes that divide a set; for one without blocks, 1.
        """
        if self.strategy is None:
            return sizes
        if not _has(self.strategy, "block_size"):
            return (1,)
        size = self.strategy.n_together
        if size == 1:
            return sizes
        fitting = [each for each in sizes if each < 1 or size % each == 0]
        if not fitting:
            msg = (
                f"a block size must divide the sets of {size} cells, but got {list(sizes)[:9]}; "
                f"choose from {[each for each in range(1, size + 1) if size % each == 0]}"
            )
            raise ParameterError(msg)
        return fitting

    @property
    def rows_per_cell(self) -> int:
        """Rows that are read for each cell: itself, and its controls or neighbours."""
        return 1 if self.strategy is None else 1 + self.strategy.n_companions

    @cached_property
    def n_drawn(self) -> int:
        """Cells that an epoch delivers."""
        return self.blocks(1).n_positions(len(self.collection))

    def drawn_rows(self) -> NDArray[np.int64]:
        """Return the rows of `n_drawn_epochs`, or evenly spaced ones of very many."""
        strategy, n_rows = self.blocks(1), len(self.collection)
        positions = np.arange(0, self.n_drawn, self.rows_per_drawn)
        orders = (
            strategy.epoch_order(n_rows=n_rows, epoch_key=k) for k in range(self.n_drawn_epochs)
        )
        return np.concatenate([order(positions) for order in orders])

    @property
    def n_drawn_epochs(self) -> int:
        """Number of epochs in `drawn_rows`: several where short ones draw other cells each."""
        if self.strategy is None or not has_weights(self.strategy):
            return 1
        return -(-_LEAST_DRAWS // self.n_drawn)

    @property
    def rows_per_drawn(self) -> int:
        """How many rows each of `drawn_rows` represents."""
        return -(-self.n_drawn // MOST_DRAWS)

    def label(
        self,
        name: str,
        drawn_rows: NDArray[np.int64] | None = None,
        column: CategoricalColumn | NumericColumn | None = None,
    ) -> Label:
        """Return an obs column as a label, or raise `ColumnError` if there is nothing to mix.

        With ``drawn_rows``, it has codes of all cells of the collection. A column that was not
        opened is given.
        """
        column = opened_column(self.collection, name) if column is None else column
        of_all, drawn, n_epochs = codes_of(column, column.values), None, 1
        codes = of_all if self.indices is None else of_all[self.indices]
        counted = count_labels(codes)
        if drawn_rows is not None:
            codes = of_all
            if self.strategy is not None:
                found, times = count_labels(codes[drawn_rows]), self.rows_per_drawn
                drawn = LabelCounts(found.counts * times, found.n_missing * times)
                n_epochs = self.n_drawn_epochs
        values = column.values  # noqa: PD011 - of labels
        known = values[np.isfinite(values)] if values.dtype.kind == "f" else values[:0]
        first, *others = self.collection.locations
        label = Label(name, codes, counted, drawn, n_epochs)
        label.check(
            f"obs column {name!r}",
            f" in {first}{' and the other files' if others else ''}",
            has_fractions=bool(np.any(known != np.floor(known))),
        )
        return label


def _has(strategy: SamplingStrategy, name: str) -> bool:
    """Return whether a strategy is a dataclass with a field of this name."""
    return name in getattr(strategy, "__dataclass_fields__", {})


def _with_rows(strategy: SamplingStrategy, indices: ArrayLike | None) -> SamplingStrategy:
    """Return a strategy that visits some rows only."""
    if indices is None:
        return strategy
    if not _has(strategy, "indices") or getattr(strategy, "indices", None) is not None:
        msg = (
            f"`indices` and a {type(strategy).__name__} that has rows of its own do not go "
            "together; give the strategy the indices"
        )
        raise ParameterError(msg)
    selected: SamplingStrategy = replace(cast(Any, strategy), indices=indices)
    return selected


# Plans: which rows are in which minibatch, where it is known without reading.

Settings = tuple[Any, ...]
"""As `Configuration.plan_settings`."""


class Plans(ABC):
    """Plans of a loader for any settings.

    Attributes
    ----------
    batch_size
        Rows of a minibatch.
    has_theory, is_of_sets
        Whether blocks come in random order, so that theory applies, and whether sets do.
    drawn_rows
        Rows that epochs deliver; None if each row is delivered once.
    """

    batch_size: int
    has_theory = is_of_sets = False
    drawn_rows: NDArray[np.int64] | None = None

    @abstractmethod
    def replay(
        self, settings: Settings, statistics: Sequence[Statistic], *, n_rows: int
    ) -> list[PlanReplay] | None:
        """Return statistics of minibatches over so many rows of a plan; None without a plan."""

    def differing(self, settings: Settings) -> Settings:
        """Return the settings that plans depend on."""
        return settings

    def block_size(self, settings: Settings) -> float:
        """Return the effective block size; see `theory`."""
        size: int = settings[0]
        return size


class BlockPlans(Plans):
    """Plans of cellfeed's own loader.

    Parameters
    ----------
    n_rows
        Rows with labels.
    selected, drawn_rows
        The visited rows, and `Selected.drawn_rows`, if there is a strategy or blocks may be
        aligned; None for all rows in shuffled blocks.
    """

    def __init__(
        self,
        n_rows: int,
        *,
        batch_size: int,
        seed: int,
        selected: Selected | None = None,
        drawn_rows: NDArray[np.int64] | None = None,
    ) -> None:
        self.batch_size, self.drawn_rows = batch_size, drawn_rows
        self._n_rows, self._seed, self._selected = n_rows, seed, selected
        # Making a strategy may take long.
        self._aligned = cache(lambda align: None if selected is None else selected.aligned(align))
        self._strategy = lru_cache(4)(self._strategy_of)
        single = self._strategy(1, None)
        self.has_theory, self.is_of_sets = has_random_blocks(single), single.n_together > 1

    def differing(self, settings: Settings) -> Settings:
        """Return the block size, the fetch factor, and how blocks are aligned."""
        block_size, fetch_factor, *others = settings
        return block_size, fetch_factor, *(each for each in others if each[0] == "align")

    def replay(
        self, settings: Settings, statistics: Sequence[Statistic], *, n_rows: int
    ) -> list[PlanReplay]:
        """Return statistics of minibatches over so many rows of a plan."""
        return replay_plan(self._plan(settings), statistics, n_rows=n_rows)

    def block_size(self, settings: Settings) -> float:
        """Return the effective block size; see `theory`."""
        return effective_block_size(self._plan(settings).strategy, self._n_rows)

    def _plan(self, settings: Settings) -> EpochPlan:
        return EpochPlan(
            strategy=self._strategy(settings[0], _align(settings)),
            n_rows=self._n_rows,
            batch_size=self.batch_size,
            fetch_factor=settings[1],
            seed=self._seed,
        )

    def _strategy_of(self, block_size: int, align: Any) -> SamplingStrategy:
        selected = self._aligned(align)
        return BlockShuffling(block_size) if selected is None else selected.blocks(block_size)


class LoaderPlans(Plans):
    """Plans of another loader, if it has any."""

    def __init__(self, tunable: Tunable) -> None:
        self.batch_size, self._tunable = tunable.batch_size, tunable

    def replay(
        self, settings: Settings, statistics: Sequence[Statistic], *, n_rows: int
    ) -> list[PlanReplay] | None:
        """Return statistics of minibatches over so many rows of a plan; None without a plan."""
        block_size, fetch_factor, *others = settings
        configuration = Configuration(
            block_size=block_size, fetch_factor=fetch_factor, **dict(others)
        )
        what = f"`planned_rows` of {self._tunable.name}"
        try:
            planned = self._tunable.planned_rows(configuration, max(1, n_rows // self.batch_size))
        except Exception as error:
            said = " ".join(f"{type(error).__name__} {error}".split())
            msg = f"{what} failed for {configuration}: {said}"
            raise ParameterError(msg) from error
        if planned is None:
            return None
        rows = np.asarray(planned)
        is_whole = rows.shape == (len(rows), self.batch_size) and len(rows) > 0
        if not is_whole or rows.dtype.kind not in "iu":
            msg = (
                f"{what} must give integers of shape (n, {self.batch_size}), but gave {rows.dtype} "
                f"of shape {rows.shape}"
            )
            raise ParameterError(msg)
        low, high = int(rows.min()), int(rows.max())
        n_labelled = min(map(len, map(np.asarray, self._tunable.labels.values())), default=high + 1)
        if low < 0 or high >= n_labelled:
            msg = f"{what} must give rows from 0 to {n_labelled - 1:,}, but gave {low} to {high:,}"
            raise ParameterError(msg)
        return [PlanReplay.of(statistic(rows), fetch_factor) for statistic in statistics]


def _align(settings: Settings) -> Any:
    return dict(settings[2:]).get("align")
