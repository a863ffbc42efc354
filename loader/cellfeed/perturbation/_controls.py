"""Treated cells, each with control cells that match it."""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.extending import ParameterError, require_list, require_one_of, require_positive
from cellfeed.sampling import (
    ABSENT_BY_DEFAULT,
    EpochOrder,
    MatchedOrder,
    SamplingStrategy,
    WithOthers,
    column_of,
    combined_codes,
    derive_key,
    factorized,
    label_codes,
    n_available,
    permute_within,
    random_words,
    sorted_indices,
)

Redraw = Literal["visit", "never"]
Integers = NDArray[np.int64]

_LEAST_BLOCK = 16  # controls, where treated cells come in smaller blocks
_MOST_SHOWN = 10  # labels in a message

# Purposes of the random streams of one epoch; those of the strategy of treated cells are smaller.
_RUN, _START, _WITHIN_RUN, _ALWAYS = range(1000, 1004)


def named_values(given: Any) -> list[Any]:
    """Return the values of labels that a parameter names: one, or several in a list or array."""
    if isinstance(given, list | tuple | set | frozenset):
        return list(given)
    is_array = np.ndim(given) == 1 and callable(getattr(given, "tolist", None))
    return given.tolist() if is_array else [given]


def unknown(kind: str, labels: Sequence[Any], known: Collection[Any]) -> str:
    """Say that there are no such labels, and which are near to the first."""
    written = {str(each).casefold(): each for each in reversed([*known])}
    near = difflib.get_close_matches(str(labels[0]).casefold(), written, n=3)
    remedy = "there are none"
    if near:
        remedy = f"near: {_listed([written[each] for each in near])}"
    elif known:
        remedy = f"there are: {_listed([*known])}"
    return f"no {kind} {_listed(labels)}; {remedy}"


def _listed(labels: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, labels[:_MOST_SHOWN]))
    n_others = len(labels) - _MOST_SHOWN
    return f"{shown} and {n_others:,} others" if n_others > 0 else shown


@dataclass(frozen=True, eq=False)
class MatchedControls(WithOthers):
    """Visit treated cells, each together with control cells of its own plate, cell line or donor.

    Any strategy chooses the treated cells. Minibatches have them as usual; their controls are in
    ``minibatch.controls``, a `Minibatch` of its own with ``k`` rows for each treated cell: rows
    ``i * k`` to ``i * k + k - 1`` belong to treated cell i. A ``batch_size`` counts treated cells.
    The pairs are the same for any number of ranks and worker processes, and after resuming.

    Parameters
    ----------
    strategy
        Chooses the treated cells. If it has ``indices``, or could have, it visits the treated
        ones among these; any other strategy must visit treated cells only.
    treatment
        The treatment of each cell: the name of an obs column of the collection, or a value for
        each row. Cells without one (NaN, None, or the number -1) are neither treated nor controls.
    control
        The treatment of control cells, such as ``"DMSO"``, 0 or False, or a list of several; it
        must equal a value of the column. Cells with any other treatment are treated.
    within
        What a treated cell and its controls have in common: names of obs columns, or arrays with a
        value for each row. The control cells with one combination of values are a pool, of which
        those that lack one (NaN, None, or the number -1) have none. Equal values are one in all
        files, as those of a donor on several plates: plates of one name in two files need a column
        that tells them apart. If empty, all controls are one pool.
    k
        Number of controls for each treated cell.
    block_size
        Replaces the block size of the strategy, if it has one.
    control_block_size
        About how many controls of a pool are drawn as neighbours. By default, as many as treated
        cells in a block, and at least 16.
    control_indices
        The rows that may be controls, each of which counts once. By default, the ``indices`` that
        the strategy was given, so that the training set has its own controls; or all rows.
    redraw
        When a treated cell gets other controls: at each "visit", or "never", so that a treated cell
        has the same controls in all epochs and for all seeds.
    replace
        Whether the controls of one treated cell are drawn with replacement. If not, they differ.
    unmatched
        What to do with treated cells that lack a value of ``within``, or whose pool has no control,
        or fewer than ``k`` without replacement: "raise" an error, or "drop" these cells. A pool of
        a single cell gives that one each time.
    pools
        Leave this out: `bound_to` sets it, to what obs columns amount to.

    Raises
    ------
    ParameterError
        A size is below one, no cell has the treatment ``control``, no cell is treated, or treated
        cells lack controls. While reading: the strategy visits a cell that is not treated.

    Notes
    -----
    Each control of a pool is equally likely to be drawn, for any treated cell. Draws are not
    independent: the treated cells of one fetch with the same pool get neighbours in that pool, in
    storage order, in blocks of about ``control_block_size`` at random places, so that few chunks
    are decompressed. Within a block, controls are assigned at random, each once. An average over
    the controls of a minibatch therefore varies as one over fewer, independent controls if
    neighbours in storage resemble each other; smaller blocks make them more independent, and read
    more. Blocks may overlap, so that a fetch can deliver a control more than once.

    Rows of controls are kept, at 4 bytes each (8 in a collection of 2^31 rows or more), and the
    pool of each row of the collection, at 1 to 4 bytes.

    Examples
    --------
    >>> from cellfeed import BlockShuffling
    >>> strategy = MatchedControls(
    ...     BlockShuffling(block_size=1), treatment=["a", "DMSO", "a", "DMSO", "b", "DMSO"],
    ...     control="DMSO", within=[[1, 1, 2, 2, 2, 2]],
    ... )
    >>> order = strategy.epoch_order(n_rows=6, epoch_key=0)
    >>> order(np.arange(3))
    array([0, 4, 2])
    >>> order.companions(np.arange(3), together=3)[0]  # of row 0
    array([1])
    """

    strategy: SamplingStrategy
    treatment: ArrayLike | str
    control: Any
    within: Sequence[ArrayLike | str] | str = ()
    k: int = 1
    block_size: int | None = None
    control_block_size: int | None = None
    control_indices: ArrayLike | None = None
    redraw: Redraw = "visit"
    replace: bool = False
    unmatched: Literal["raise", "drop"] = "raise"
    pools: "ControlPools | None" = field(
        default=None, kw_only=True, repr=False, metadata=ABSENT_BY_DEFAULT
    )

    def __post_init__(self) -> None:
        """Check the parameters; find the pools, unless columns are still to be read."""
        given: Any = self.strategy
        if not isinstance(given, SamplingStrategy) or given.n_companions:
            msg = f"`strategy` must be a SamplingStrategy without controls, but got {given}"
            raise ParameterError(msg)
        for name in ("k", "block_size", "control_block_size"):
            if getattr(self, name) is not None:
                self._set(**{name: require_positive(name, getattr(self, name))})
        require_one_of("redraw", self.redraw, get_args(Redraw))
        require_one_of("unmatched", self.unmatched, ("raise", "drop"))
        self._take_block_size()
        within: Any = (self.within,) if isinstance(self.within, str) else self.within
        require_list("within", "columns", within)
        self._set(
            treatment=_as_array(self.treatment),
            within=tuple(map(_as_array, within)),
            control_indices=sorted_indices(self.control_indices),
            _pools=self.pools,
        )
        if self.pools is None:
            if not any(isinstance(each, str) for each in (self.treatment, *self.within)):
                strategy, pools = self._match(self.treatment, self.within)
                # Without rows of its own any more, it does not say where controls may be.
                self._set(strategy=strategy, _pools=pools, control_indices=np.sort(pools.rows))
        elif self.pools.made_for != self._made_for:
            msg = "`pools` were found for another treatment, control, within, k or replace; make a "
            raise ParameterError(msg + "new MatchedControls without `pools`")

    @property
    def n_companions(self) -> int:
        """Number of controls for each treated cell."""
        return self.k

    def n_positions(self, n_rows: int) -> int:
        """Return the number of treated cells that an epoch visits."""
        pools: ControlPools | None = self.__dict__["_pools"]
        if pools is None:
            msg = (
                "`treatment` and `within` name obs columns, which are not read yet; pass the "
                "strategy to a CellDataset, or call bound_to(collection)"
            )
            raise ParameterError(msg)
        if pools.pool_of.size != n_rows:
            msg = (
                f"`treatment` must have one value for each row of the collection ({n_rows:,}), "
                f"but got {pools.pool_of.size:,}"
            )
            raise ParameterError(msg)
        return self.strategy.n_positions(n_rows)

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> MatchedOrder:
        """Return the strategy's order of treated cells, with their controls."""
        block_size = self.control_block_size or max(_LEAST_BLOCK, self.block_size or 0)
        return _Matched(
            given=self,
            n_positions=self.n_positions(n_rows),
            pools=self.__dict__["_pools"],
            order=self.strategy.epoch_order(n_rows=n_rows, epoch_key=epoch_key),
            per_run=max(1, block_size // self.k),
            key=derive_key(_ALWAYS) if self.redraw == "never" else epoch_key,
        )

    def bound_to(self, collection: Any) -> "MatchedControls":
        """Return the strategy with the pools of the obs columns that it names."""

        def read(name: str, each: Any) -> Any:
            return column_of(collection, each, name) if isinstance(each, str) else each

        strategy, pools = self.strategy, self.pools
        if self.__dict__["_pools"] is None:
            within = [read("within", each) for each in self.within]
            strategy, pools = self._match(read("treatment", self.treatment), within)
        # What it knows of the collection may depend on its rows, so they are chosen before.
        strategy = strategy.bound_to(collection)
        if strategy is self.strategy and pools is self.pools:
            return self
        return changed(self, strategy=strategy, pools=pools)

    @property
    def _made_for(self) -> str:
        """What pools depend on, as text, if it is not arrays."""
        return repr((self.treatment, self.control, self.within, self.k, self.replace))

    def _match(
        self, treatment: Any, within: Sequence[Any]
    ) -> tuple[SamplingStrategy, "ControlPools"]:
        """Return the strategy that visits the treated cells with controls only, and the pools."""
        kinds = self._kinds(treatment)
        pool_of = combined_codes([label_codes(each) for each in within] or [0 * kinds])
        if pool_of.size != kinds.size:
            msg = (
                f"`within` must have one value for each of {kinds.size:,} cells, but got "
                f"{pool_of.size:,}"
            )
            raise ParameterError(msg)
        given = self.indices if self.control_indices is None else self.control_indices
        for indices in (given, self.indices):
            n_available(indices, kinds.size)
        controls = np.unique(_those(given, (kinds == 1) & (pool_of >= 0)))
        sizes = np.bincount(pool_of[controls], minlength=int(pool_of.max(initial=0)) + 1)
        is_matched = (pool_of >= 0) & (sizes[pool_of] >= (1 if self.replace else self.k))
        is_visited = (kinds == 0) & is_matched
        visited = _those(self.indices, is_visited)
        alone = _those(self.indices, (kinds == 0) & ~is_matched)
        if not visited.size and not alone.size:
            msg = "none of the cells that are visited is treated; check `control` and `indices`"
            raise ParameterError(msg)
        if not visited.size or (alone.size and self.unmatched == "raise"):
            raise self._refused(alone, within, controls.size)
        by_pool = np.argsort(pool_of[controls], kind="stable")
        pools = ControlPools(
            rows=controls[by_pool].astype(np.int32 if kinds.size < 1 << 31 else np.int64),
            starts=np.concatenate([[0], np.cumsum(sizes)]),
            pool_of=np.where(is_visited, pool_of, -1).astype(pool_of.dtype, copy=False),
            made_for=self._made_for,
        )
        return _visiting(self.strategy, visited, is_visited), pools

    def _kinds(self, treatment: Any) -> NDArray[np.int8]:
        """Return 1 for each control, 0 for each treated cell, and -1 for others."""
        codes, values = factorized(treatment)
        wanted = named_values(self.control)
        for each in wanted or [None]:
            if each not in values:
                name = self.treatment if isinstance(self.treatment, str) else "treatment"
                raise ParameterError(f"`control`: {name} has {unknown('value', [each], values)}")
        kind_of = np.array([1 if each in wanted else -1 if each == -1 else 0 for each in values])
        return np.where(codes < 0, -1, kind_of[codes]).astype(np.int8)

    def _refused(self, alone: Integers, within: Sequence[Any], n_controls: int) -> ParameterError:
        what, remedy = "no control", "use fewer columns"
        if self.k > 1 and not self.replace:
            what, remedy = f"fewer than k={self.k} controls", f"{remedy}, or replace=True"
        if not n_controls and self.indices is not None and self.control_indices is None:
            remedy = "the strategy's `indices` have no controls, so give `control_indices`"
        elif self.unmatched == "raise":
            remedy = f"leave these cells out with unmatched='drop', or {remedy}"
        else:
            remedy = f"none is left to visit: {remedy}"
        first = int(alone[0])
        shown = ", ".join(
            f"{name if isinstance(name, str) else f'within[{number}]'}={_value(each, first)!r}"
            for number, (name, each) in enumerate(zip(self.within, within, strict=True))
        )
        return ParameterError(
            f"{alone.size:,} treated cells have {what} in common `within`, such as row {first} "
            f"({shown or 'all cells'}); {remedy}"
        )


def _value(labels: Any, row: int) -> Any:
    codes, values = factorized(labels)
    return values[codes[row]] if codes[row] >= 0 else None


def _those(indices: ArrayLike | None, are_wanted: NDArray[np.bool_]) -> Integers:
    """Return the rows that are wanted, among all or among ascending indices."""
    if indices is None:
        return np.flatnonzero(are_wanted)
    rows: Integers = np.asarray(indices)
    return rows[are_wanted[rows]]


def _visiting(
    strategy: SamplingStrategy, rows: Integers, is_visited: NDArray[np.bool_]
) -> SamplingStrategy:
    """Return a strategy that visits some of its rows only, if it has ``indices``."""
    names: list[str] = [*getattr(strategy, "__dataclass_fields__", ())]
    before = getattr(strategy, "indices", None)
    if "indices" not in names or (before is not None and before.size == rows.size):
        return strategy
    values: dict[str, Any] = {}
    if before is not None and before.size != is_visited.size:
        # Labels and weights may be those of the indices.
        for name in names:
            value = getattr(strategy, name)
            if isinstance(value, np.ndarray) and value.shape == before.shape:
                values[name] = value[is_visited[before]]
    visiting: SamplingStrategy = changed(cast(Any, strategy), **values | {"indices": rows})
    return visiting


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlPools:
    """Control cells by pool, as a `MatchedControls` that is bound to a collection keeps them.

    Parameters
    ----------
    rows
        Rows of controls, pool after pool, each in storage order.
    starts
        Start of each pool in ``rows``, shape (n_pools + 1,).
    pool_of
        The pool of each treated row that may be visited, -1 for other rows, shape (n_rows,).
    made_for
        The parameters that they depend on, as text.
    """

    rows: NDArray[np.signedinteger[Any]]
    starts: Integers
    pool_of: NDArray[np.signedinteger[Any]]
    made_for: str


def _as_array(labels: Any) -> Any:
    """Return labels as an array, unless they name a column or have a dtype or codes."""
    is_list = isinstance(labels, list | tuple)
    return np.asarray(labels, dtype=object) if is_list else labels


class _Runs(NamedTuple):
    """The run of controls from which each treated cell gets its own, of shape (n_cells,).

    A run is a number of neighbours in a pool, from a random place on.

    Parameters
    ----------
    pool, key
        The pool, and the key of the run.
    slot, n_slots
        Number of the cell among those that share the run, and how many these are.
    draw
        Number of the cell's draws, which tells them from those of other cells.
    """

    pool: Integers
    key: NDArray[np.uint64]
    slot: Integers
    n_slots: Integers
    draw: Integers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Matched:
    """The treated cells of an epoch in order, and their controls.

    Parameters
    ----------
    given
        The strategy, whose parameters say how controls are drawn.
    n_positions, order
        How many treated cells come, and their order.
    pools
        The controls.
    per_run
        About how many cells share a run of controls.
    key
        Key derived from the seed and the epoch, if controls depend on these.
    """

    given: MatchedControls
    n_positions: int
    order: EpochOrder
    pools: ControlPools
    per_run: int
    key: int

    def __call__(self, positions: Integers, /) -> Integers:
        """Return the treated cells at the given positions."""
        return self.order(positions)

    def companions(self, positions: Integers, *, together: int) -> Integers:
        """Return the controls at the given positions; see `MatchedOrder`."""
        k, flat = self.given.k, positions.ravel()
        is_fixed = self.given.redraw == "never"
        runs = self._of_rows(flat) if is_fixed else self._of_visits(flat, together)
        sizes = np.diff(self.pools.starts)[runs.pool]
        lengths = np.minimum(runs.n_slots * k, sizes)[:, None]
        among_k = np.arange(k)
        if self.given.replace:
            draws = runs.draw[:, None] * k + among_k
            words = random_words(derive_key(self.key, _WITHIN_RUN), draws)
            within = (words % lengths.astype(np.uint64)).astype(np.int64)
        else:
            slots = (runs.slot[:, None] * k + among_k) % lengths
            each = [np.repeat(values, k) for values in (lengths.ravel(), runs.key)]
            within = permute_within(slots.ravel(), *each).reshape(slots.shape)
        firsts = random_words(derive_key(self.key, _START), runs.key) % sizes.astype(np.uint64)
        places = (firsts.astype(np.int64)[:, None] + within) % sizes[:, None]
        rows = self.pools.rows[self.pools.starts[runs.pool][:, None] + places]
        return rows.astype(np.int64).reshape(*positions.shape, k)

    def _of_visits(self, positions: Integers, together: int) -> _Runs:
        """Return runs for the cells of a pool among positions that are read together."""
        windows = np.unique(positions // together)
        every = (windows[:, None] * together + np.arange(together)).ravel()
        every = every[every < self.n_positions]
        pools = self._pools_of(self.order(every))
        numbers = every // together
        # The rank of each cell among those of its window and pool, and how many these are.
        joint = numbers * (self.pools.starts.size - 1) + pools
        _, group, counts = np.unique(joint, return_inverse=True, return_counts=True)
        rank = np.empty_like(every)
        rank[np.argsort(group, kind="stable")] = np.arange(every.size) - np.repeat(
            np.cumsum(counts) - counts, counts
        )
        n = counts[group]
        asked = np.searchsorted(every, positions)
        pools, rank, n, numbers = (each[asked] for each in (pools, rank, n, numbers))
        # Runs of nearly equal size, so that none is left with few cells.
        n_runs = np.maximum(1, (2 * n + self.per_run) // (2 * self.per_run))
        run = rank * n_runs // n
        first, stop = -(-run * n // n_runs), -(-(run + 1) * n // n_runs)
        key = derive_key(self.key, _RUN)
        keys = random_words(key, random_words(key, numbers) + pools.astype(np.uint64))
        keys = random_words(key, keys + run.astype(np.uint64))
        return _Runs(pools, keys, rank - first, stop - first, positions)

    def _of_rows(self, positions: Integers) -> _Runs:
        """Return one run for neighbours in storage."""
        rows = self.order(positions)
        pools = self._pools_of(rows)
        blocks, slots = np.divmod(rows, self.per_run)
        key = derive_key(self.key, _RUN)
        keys = random_words(key, random_words(key, blocks) + pools.astype(np.uint64))
        return _Runs(pools, keys, slots, np.full_like(rows, self.per_run), rows)

    def _pools_of(self, rows: Integers) -> Integers:
        pools: Integers = self.pools.pool_of[rows].astype(np.int64)
        if pools.min(initial=0) < 0:
            msg = (
                f"the strategy visits row {rows[np.argmin(pools)]}, which is no treated cell with "
                "controls; give a strategy that has `indices`, or that visits treated cells only"
            )
            raise ParameterError(msg)
        return pools
