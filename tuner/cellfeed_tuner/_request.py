"""What ``autotune`` is asked, checked before any time is spent."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, Collection, ParameterError, SamplingStrategy
from cellfeed.machine import usable_memory_bytes
from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._entropy._label_counts import LabelCounts
from cellfeed_tuner._explain._storage_advice import StorageLayout
from cellfeed_tuner._grid import default_workers
from cellfeed_tuner._history._earlier_run import Asked
from cellfeed_tuner._loader_mixing import LoaderMixing
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._checks import cache_state, check_cache, check_labels, check_size
from cellfeed_tuner._measuring._labels import names_of
from cellfeed_tuner._measuring._measure import prepare_cache
from cellfeed_tuner._measuring._selected import Selected
from cellfeed_tuner._mixing import Label, Mixing
from cellfeed_tuner._mixing_by_alignment import MixingByAlignment
from cellfeed_tuner._planning._cost_model import Geometry
from cellfeed_tuner._planning._space import Space
from cellfeed_tuner._ranks._world import Ranks
from cellfeed_tuner._results._dataset import Dataset, describe_dataset
from cellfeed_tuner._results._recommended import Constraints
from cellfeed_tuner._searching._requirements import Requirements
from cellfeed_tuner._subject._tunable import Tunable

__all__ = ["AnyMixing", "CollectionRequest", "Request", "constraints_of"]

AnyMixing = Mixing | MixingByAlignment | LoaderMixing
"""What knows how labels are mixed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request(ABC):
    """What is asked, checked.

    Parameters
    ----------
    labels, within
        What minibatches are to be mixed by, and what the first label is to be mixed within.
    space, constraints
        What may be chosen, and what a choice must meet.
    cache
        State of caches to measure in.
    batch_size, budget, seed
        As in `autotune`.
    ranks
        How many are measured side by side, and divide an epoch.
    """

    labels: Sequence[Label]
    within: Label | None = None
    space: Space
    constraints: Constraints
    cache: CacheState
    batch_size: int
    budget: float
    seed: int
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def grid(self) -> list[Configuration]:
        """What is looked at first."""
        return self.space.coarse_grid() if self.space.is_large else self.space.grid()

    @property
    def counted(self) -> dict[str, LabelCounts]:
        """How often each label occurs, the first label first."""
        return {each.name: each.counted for each in self.labels}

    def with_step(self, seconds: float) -> Self:
        """Return the request with a training step that takes so long on a minibatch."""
        need = self.ranks.n_local * self.batch_size / seconds
        constraints = replace(self.constraints, step_seconds=seconds, need_cells_per_second=need)
        return replace(self, constraints=constraints)

    @property
    @abstractmethod
    def subject(self) -> Selected | Tunable:
        """What the measuring process is to hold."""

    @property
    @abstractmethod
    def files(self) -> Sequence[Path]:
        """What is read, of this machine."""

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """How what is visited lies in storage."""

    @abstractmethod
    def mixing(self) -> AnyMixing:
        """Return what knows how labels are mixed."""

    @abstractmethod
    def requirements(self, mixing: AnyMixing) -> Requirements:
        """Return what holds configurations against the constraints."""

    @abstractmethod
    def described(self) -> Dataset:
        """Return what is read, and how its labels are distributed."""

    @abstractmethod
    def prepared(self) -> CacheState | Literal["unknown"]:
        """Bring files into the state that is asked for; return what came of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectionRequest(Request):
    """Tune cellfeed's own loader.

    Parameters
    ----------
    selected
        What is visited, and how.
    drawn_rows
        Rows that an epoch delivers, where there is a strategy; None without one.
    """

    selected: Selected
    drawn_rows: NDArray[np.int64] | None

    @classmethod
    def checked(
        cls,
        collection: Collection,
        *,
        label: str | Sequence[str],
        given: str | None,
        indices: ArrayLike | str | None,
        strategy: SamplingStrategy | None,
        batch_size: int,
        block_sizes: Sequence[int],
        fetch_factors: Sequence[int],
        workers: Sequence[int] | None,
        num_threads: Sequence[int],
        align: Sequence[Literal["chunks"] | None],
        budget: float,
        entropy_floor: float,
        memory: int | None,
        need: float | None,
        step_seconds: float | None,
        cache: CacheState | None,
        seed: int,
        ranks: Ranks,
    ) -> "CollectionRequest":
        """Return a request of `autotune`, or raise what that raises for what cannot be done."""
        selected = Selected.of(collection, indices, strategy)
        drawn_rows = None if strategy is None else selected.drawn_rows()
        labels, within = _labels(selected, label, given, drawn_rows)
        request = cls(
            selected=selected,
            drawn_rows=drawn_rows,
            labels=labels,
            within=within,
            space=Space.of(
                selected.block_sizes(block_sizes),
                fetch_factors,
                default_workers(collection, ranks.n_local) if workers is None else workers,
                **_further_settings(num_threads, align, strategy),
            ),
            constraints=constraints_of(
                entropy_floor, memory, need, step_seconds, ranks.n_local * batch_size, budget
            ),
            cache=cache_state(collection, cache),
            batch_size=batch_size,
            budget=budget,
            seed=seed,
            ranks=ranks,
        )
        is_whole = selected.indices is None and strategy is None
        whole = collection if is_whole else selected
        check_size(whole, request.grid, batch_size, ranks.n_total)
        check_cache(collection, request.cache)
        return request

    @property
    def subject(self) -> Selected:
        """What the measuring process is to hold."""
        return self.selected

    @property
    def files(self) -> Sequence[Path]:
        """What is read, of this machine."""
        return self.selected.collection.files

    def described(self) -> Dataset:
        """Return what is read, and how its labels are distributed."""
        return describe_dataset(self.selected, self.counted, self.batch_size)

    def prepared(self) -> CacheState | Literal["unknown"]:
        """Bring files into the state that is asked for; return what came of it."""
        return prepare_cache(self.files, self.cache)

    def mixing(self) -> Mixing | MixingByAlignment:
        """Return what replays plans over the labels."""
        if not self.space.others:
            return self._mixing_of(self)
        alignments = self.space.others.get("align", (None,))
        return MixingByAlignment(
            {each: self._mixing_of(self._aligned(each)) for each in alignments}
        )

    def _aligned(self, align: Setting) -> "CollectionRequest":
        """Return the request with blocks that are all aligned."""
        if align is None:
            return self
        strategy = BlockShuffling(1, align="chunks")
        selected = Selected.of(self.selected.collection, self.selected.indices, strategy)
        drawn_rows = selected.drawn_rows()
        within = None if self.within is None else self.within.name
        names = [each.name for each in self.labels]
        labels, given = _labels(selected, names, within, drawn_rows)
        return replace(self, selected=selected, drawn_rows=drawn_rows, labels=labels, within=given)

    def _mixing_of(self, request: "CollectionRequest") -> Mixing:
        has_strategy = request.selected.strategy is not None
        return Mixing(
            request.labels,
            request.within,
            batch_size=self.batch_size,
            seed=self.seed,
            entropy_floor=self.constraints.entropy_floor,
            selected=request.selected if has_strategy else None,
            drawn_rows=request.drawn_rows,
        )

    def requirements(self, mixing: AnyMixing) -> Requirements:
        """Return what holds configurations against the constraints."""
        return Requirements(
            n_cells=self.selected.n_drawn // self.ranks.n_total,
            row_bytes=self.ranks.n_local * self.selected.collection.mean_row_bytes(),
            batch_size=self.batch_size,
            constraints=self.constraints,
            entropies=mixing,
        )

    def asked(self, found_cache: str) -> Asked:
        """Return what is kept of it for later runs."""
        return Asked(
            label=self.labels[0].name,
            further_labels=tuple(each.name for each in self.labels[1:]),
            batch_size=self.batch_size,
            cache=found_cache,
            budget=self.budget,
            entropy_floor=self.constraints.entropy_floor,
            block_sizes=self.space.block_sizes,
            fetch_factors=self.space.fetch_factors,
            workers=self.space.workers,
            others=self.space.others,
            n_ranks=self.ranks.n_local,
        )

    @property
    def geometry(self) -> Geometry:
        """How what is visited lies in storage."""
        return Geometry(
            n_cells=len(self.selected),
            rows_per_chunk=self.selected.rows_per_chunk,
            n_files=len(self.selected.collection.locations),
        )

    def layout(self, *, already_shuffled: bool) -> StorageLayout:
        """Return the same for advice on storage."""
        return StorageLayout(
            n_cells=len(self.selected),
            rows_per_chunk=self.selected.rows_per_chunk,
            batch_size=self.batch_size,
            already_shuffled=already_shuffled,
        )


def _labels(
    selected: Selected,
    label: str | Sequence[str],
    given: str | None,
    drawn_rows: NDArray[np.int64] | None,
) -> tuple[list[Label], Label | None]:
    names = names_of(label)
    if not names:
        msg = "`label` must name at least one obs column, but got none"
        raise ParameterError(msg)
    if given in names:
        msg = f"`given` must be an obs column beside the labels, but got {given!r}, which is one"
        raise ParameterError(msg)
    labels = [Label.of(selected, name, drawn_rows) for name in names]
    within = None if given is None else Label.of(selected, given, drawn_rows)
    for each in [*labels, within]:
        if each is not None:
            check_labels(each.counted, each.name, selected.collection)
            check_labels(each.target, each.name, selected.collection)
    return labels, within


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


def constraints_of(
    entropy_floor: float,
    memory: int | None,
    need: float | None,
    step_seconds: float | None,
    cells_per_step: int,
    budget: float,
) -> Constraints:
    """Return what a choice must meet, or raise what `autotune` raises for what cannot be met."""
    if not 0 <= entropy_floor <= 1:
        msg = f"`0 <= entropy_floor <= 1` must hold, but got entropy_floor={entropy_floor}"
        raise ParameterError(msg)
    if need is not None and step_seconds is not None:
        msg = f"give need={need} or step_seconds={step_seconds}, not both"
        raise ParameterError(msg)
    positive = {"memory": memory, "need": need, "step_seconds": step_seconds, "budget": budget}
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            msg = f"`0 < {name} < infinity` must hold, but got {name}={value}"
            raise ParameterError(msg)
    return Constraints(
        entropy_floor=entropy_floor,
        memory_bytes=usable_memory_bytes() if memory is None else int(memory),
        need_cells_per_second=need if step_seconds is None else cells_per_step / step_seconds,
        step_seconds=step_seconds,
    )
