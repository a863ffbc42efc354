"""A request to ``autotune``, checked before any time is spent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, Collection, ParameterError, SamplingStrategy
from cellfeed.machine import usable_cpu_count, usable_memory_bytes
from cellfeed_tuner import theory
from cellfeed_tuner._choose import Requirements
from cellfeed_tuner._configuration import SIZES, Configuration, Setting
from cellfeed_tuner._entropy import LabelCounts
from cellfeed_tuner._measuring._page_cache import (
    CacheState,
    bytes_on_disk,
    cache_state,
    prepare_cache,
)
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._results import Constraints, Dataset, LabelCensus, Selection
from cellfeed_tuner._searching._space import Space
from cellfeed_tuner._subject import (
    BlockPlans,
    Label,
    LoaderPlans,
    Plans,
    Selected,
    Tunable,
    names_of,
)

if TYPE_CHECKING:  # they load PyTorch, SciPy and Optuna
    import optuna

    from cellfeed_tuner._measuring._timing import Step
    from cellfeed_tuner._mixing import Mixing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A checked request; fields that are not described here are as in `autotune`.

    Parameters
    ----------
    subject
        What is tuned: rows of a collection, or another loader.
    selected
        The same, if it is rows of a collection.
    dataset
        The collection, and how its labels are distributed.
    plans
        Which rows come together.
    grid
        Configurations of the space that are listed at first.
    n_cells, row_bytes
        Cells of an epoch of a rank, and the mean size of one, with its controls, in the buffers of
        all local ranks; 0 if unknown.
    rank_counts, rank_step_seconds
        Numbers of ranks of which it is asked whether they are fed, ascending, and how long each
        computes on a minibatch; empty and None if that is not asked.
    """

    subject: Selected | Tunable
    selected: Selected | None = None
    dataset: Dataset
    labels: Sequence[Label]
    plans: Plans
    space: Space
    grid: Sequence[Configuration]
    constraints: Constraints
    files: Sequence[Path]
    n_cells: int
    cache: CacheState
    batch_size: int
    budget: float
    seed: int
    study: "str | optuna.Study | None"
    step: "Step | None"
    ranks: Ranks
    rank_counts: Sequence[int] = ()
    rank_step_seconds: float | None = None

    @property
    def row_bytes(self) -> float:
        """Mean size of a cell, with its controls, in the buffers of all local ranks, in bytes.

        0 if unknown.
        """
        if self.selected is None:
            return 0.0
        of_rank = self.selected.rows_per_cell * self.selected.collection.mean_row_bytes()
        return self.ranks.n_local * of_rank

    def with_step(self, seconds: float) -> "Request":
        """Return the request with the time of a training step."""
        if self.rank_counts:
            return replace(self, rank_step_seconds=seconds)
        need = self.ranks.n_local * self.batch_size / seconds
        constraints = replace(self.constraints, step_seconds=seconds, need_cells_per_second=need)
        return replace(self, constraints=constraints)

    def mixing(self) -> "Mixing":
        """Return how well labels are mixed, as planned or as measured."""
        from cellfeed_tuner._mixing import Mixing  # noqa: PLC0415 - it takes long

        return Mixing(self.labels, self.plans, entropy_floor=self.constraints.entropy_floor)

    def requirements(self, mixing: "Mixing") -> Requirements:
        """Return the requirements of the search."""
        return Requirements(
            n_cells=self.n_cells,
            row_bytes=self.row_bytes,
            batch_size=self.batch_size,
            constraints=self.constraints,
            entropies=mixing.__getitem__,
            is_planned=mixing.is_planned(self.grid[0]),
            learn=mixing.learn,
        )

    def prepare_cache(self) -> CacheState | Literal["unknown"]:
        """Bring the page cache into the requested state; return its actual state."""
        if self.selected is None and not self.files:
            return self.cache
        return prepare_cache(self.files, self.cache)


def collection_request(
    collection: Collection,
    *,
    label: str | Sequence[str],
    indices: ArrayLike | str | None,
    strategy: SamplingStrategy | None,
    batch_size: int,
    block_sizes: Sequence[int],
    fetch_factors: Sequence[int],
    workers: Sequence[int] | None,
    num_threads: Sequence[int],
    align: Sequence[Literal["chunks"] | None],
    dense: bool,
    cache: CacheState | None,
    ranks: int | Sequence[int] | None,
    **common: Any,
) -> Request:
    """Return a request to tune cellfeed's own loader, or raise what `autotune` raises."""
    selected = Selected.of(collection, indices, strategy)
    others = _further_settings(num_threads, align, strategy)
    drawn_rows = None if strategy is None and not align else selected.drawn_rows()
    labels = _labels(selected, label, drawn_rows)
    what = "the collection" if selected.indices is None else "the selection"
    if strategy is not None:
        what = f"the epoch of {type(strategy).__name__}"
    return _request(
        what,
        selected.n_drawn,
        subject=selected,
        selected=selected,
        dataset=describe_dataset(
            selected, {e.name: e.counted for e in labels}, batch_size, dense=dense
        ),
        labels=labels,
        plans=BlockPlans(
            labels[0].codes.size,
            batch_size=batch_size,
            seed=common["seed"],
            selected=None if drawn_rows is None else selected,
            drawn_rows=drawn_rows,
        ),
        space=Space.of(
            selected.block_sizes(block_sizes),
            fetch_factors,
            default_workers(collection, Ranks.of(ranks).n_local) if workers is None else workers,
            **others,
        ),
        files=collection.files,
        cache=cache_state(collection, cache),
        batch_size=batch_size,
        ranks=ranks,
        **common,
    )


def loader_request(tunable: Tunable, *, cache: CacheState | None, **common: Any) -> Request:
    """Return a request to tune another loader, or raise what `autotune` raises."""
    tunable.check()
    if not tunable.labels:
        msg = f"{tunable.name} has no `labels`; give it one that minibatches are to be mixed by"
        raise ParameterError(msg)
    if cache == "remote" or (cache == "cold" and not tunable.paths):
        msg = f"cache={cache!r} needs `files` of this machine, but {tunable.name} has none"
        raise ParameterError(msg)
    labels = [Label.of_values(name, values) for name, values in tunable.labels.items()]
    n_rows = labels[0].codes.size
    settings: dict[str, Any] = {name: (least,) for name, least in SIZES.items()}
    settings |= tunable.parameters
    return _request(
        tunable.name,
        n_rows,
        subject=tunable,
        dataset=dataset_of_loader(tunable, {each.name: each.counted for each in labels}),
        labels=labels,
        plans=LoaderPlans(tunable),
        space=Space.of(*(settings.pop(name) for name in SIZES), **settings),
        files=tunable.paths,
        cache=cache or ("cold" if tunable.paths else "warm"),
        batch_size=tunable.batch_size,
        **common,
    )


def check_numbers(seed: int, **positive: float | None) -> None:
    """Raise `ParameterError` if a seed is negative, or another number not positive and finite."""
    if seed < 0:
        msg = f"`seed >= 0` must hold, but got seed={seed}"
        raise ParameterError(msg)
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            msg = f"`0 < {name} < infinity` must hold, but got {name}={value}"
            raise ParameterError(msg)


def _request(
    what: str,
    n_drawn: int,
    *,
    entropy_floor: float,
    memory: int | None,
    need: float | None,
    step_seconds: float | None,
    ranks: int | Sequence[int] | None,
    **facts: Any,
) -> Request:
    """Return a request about ``n_drawn`` cells an epoch, or raise if it cannot be met."""
    batch_size, of_training = facts["batch_size"], Ranks.of(ranks)
    rank_counts: Sequence[int] = ()
    if isinstance(ranks, Sequence) and len(ranks) > 1:
        rank_counts = sorted(set(ranks))
    if not 0 <= entropy_floor <= 1:
        msg = f"`0 <= entropy_floor <= 1` must hold, but got entropy_floor={entropy_floor}"
        raise ParameterError(msg)
    check_numbers(
        facts["seed"], budget=facts["budget"], memory=memory, need=need, step_seconds=step_seconds
    )
    if need is not None and step_seconds is not None:
        msg = "give `need` or `step_seconds`, not both"
        raise ParameterError(msg)
    if facts["step"] is not None and (need is not None or step_seconds is not None):
        msg = "give one of `step`, `step_seconds` and `need`"
        raise ParameterError(msg)
    if rank_counts and step_seconds is None and facts["step"] is None:
        msg = (
            "how many of several ranks are fed depends on the time of a training step; give "
            "`step_seconds`, or one number of ranks"
        )
        raise ParameterError(msg)
    constraints = Constraints(
        entropy_floor=entropy_floor,
        memory_bytes=usable_memory_bytes() if memory is None else int(memory),
        need_cells_per_second=need,
    )
    space: Space = facts["space"]
    request = Request(
        constraints=constraints,
        grid=space.coarse_grid() if space.is_large else space.grid(),
        n_cells=n_drawn // of_training.n_total,
        ranks=of_training,
        rank_counts=rank_counts,
        **facts,
    )
    check_size(what, n_drawn, request.grid, batch_size, of_training.n_total)
    return request if step_seconds is None else request.with_step(step_seconds)


def _labels(
    selected: Selected, label: str | Sequence[str], drawn_rows: NDArray[np.int64] | None
) -> list[Label]:
    names = names_of(label)
    if not names:
        msg = "`label` must name at least one obs column, but got none"
        raise ParameterError(msg)
    return [selected.label(name, drawn_rows) for name in names]


def _further_settings(
    num_threads: Sequence[int],
    align: Sequence[Literal["chunks"] | None],
    strategy: SamplingStrategy | None,
) -> dict[str, Sequence[Setting]]:
    for threads in num_threads:
        if threads < 1:
            msg = f"`num_threads >= 1` must hold, but got {threads}"
            raise ParameterError(msg)
    for each in align:
        BlockShuffling(1, align=each)
    if align and strategy is not None:
        msg = "`align` is of shuffled blocks; leave it out, or give the strategy what it takes"
        raise ParameterError(msg)
    asked: dict[str, Sequence[Setting]] = {"num_threads": num_threads, "align": align}
    return {name: values for name, values in asked.items() if len(values)}


def describe_dataset(
    selected: Selected, counted: Mapping[str, LabelCounts], batch_size: int, *, dense: bool = False
) -> Dataset:
    """Return the record of a collection and its labels, the first label first."""
    collection = selected.collection
    remote = [each for each in collection.locations if each.is_remote]
    selection = None
    if selected.indices is not None:
        selection = Selection(n_cells=len(selected), where=selected.where)
    return Dataset(
        paths=tuple(map(str, collection.locations)),
        n_cells=len(collection),
        n_vars=collection.n_vars,
        layout=collection.layout,
        dtype=str(collection.dtype),
        bytes_on_disk=bytes_on_disk(collection),
        stored_bytes_per_cell=collection.stored_row_bytes(),
        rows_per_chunk=collection.rows_per_chunk,
        batch_size=batch_size,
        has_storage_options=any(each.options.values for each in remote),
        slow_reading=collection.slow_reading() or "",
        selection=selection,
        elements=tuple(collection.elements),
        dense=dense,
        labels=_census(counted),
    )


def dataset_of_loader(tunable: Tunable, counted: Mapping[str, LabelCounts]) -> Dataset:
    """Return the record of what another loader reads, of which less is known."""
    return Dataset(
        loader=tunable.name,
        paths=tuple(map(str, tunable.files)),
        n_cells=next(iter(counted.values())).n_rows,
        bytes_on_disk=sum(path.stat().st_size for path in tunable.paths),
        rows_per_chunk=tunable.rows_per_chunk,
        batch_size=tunable.batch_size,
        labels=_census(counted),
    )


def _census(counted: Mapping[str, LabelCounts]) -> dict[str, LabelCensus]:
    return {
        name: LabelCensus(
            n_labels=each.counts.size,
            n_missing=each.n_missing,
            label_entropy_bits=theory.entropy_bits(each.counts),
        )
        for name, each in counted.items()
    }


_MOST_WORKERS = 16


def check_size(
    what: str, n_cells: int, grid: Sequence[Configuration], batch_size: int, n_ranks: int = 1
) -> None:
    """Raise `ParameterError` if there are too few cells for every configuration of a grid."""
    needed = n_ranks * min(configuration.cells_to_time(batch_size) for configuration in grid)
    if needed > n_cells:
        msg = (
            f"{what} has {n_cells:,} cells, but even the smallest configuration "
            f"needs {needed:,} to be timed{f' on {n_ranks} ranks' if n_ranks > 1 else ''}; give "
            "smaller batch, fetch or worker numbers"
        )
        raise ParameterError(msg)


def default_workers(collection: Collection, n_ranks: int = 1) -> tuple[int, ...]:
    """Return 0 and the powers of two up to a rank's share of the usable cores.

    For files on servers, only 0: one process sends many concurrent requests to hide latency.
    """
    if collection.is_remote:
        return (0,)
    most = min(_MOST_WORKERS, max(1, usable_cpu_count() // n_ranks))
    return (0, *(1 << power for power in range(most.bit_length())))
