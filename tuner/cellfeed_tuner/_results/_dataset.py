"""What was read: a collection, how its labels are distributed, and the strategy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cellfeed import SamplingStrategy, sampling
from cellfeed_tuner import theory
from cellfeed_tuner._entropy._minibatch_entropy import LabelCounts
from cellfeed_tuner._measuring._checks import bytes_on_disk
from cellfeed_tuner._subject._selected import Selected
from cellfeed_tuner._subject._tunable import Tunable

__all__ = [
    "Dataset", "LabelCensus", "SearchedStrategy", "Selection", "dataset_of_loader",
    "describe_dataset",
]  # fmt: skip

_MOST_LABEL_COUNTS = 1000
# What a search chooses, and what says which rows are visited, which a result says by itself.
_APART = ("block_size", "indices")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelCensus:
    """How an obs column is distributed over all cells.

    Parameters
    ----------
    n_labels, n_missing
        How many values it takes, and how many cells have none.
    label_entropy_bits
        Its entropy.
    """

    n_labels: int
    n_missing: int
    label_entropy_bits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The cells that were visited, where it was not all of them.

    With the mean number of them in a unit of storage that is read as a whole and holds any, and
    the query that they fulfil (`cellfeed.Collection.where`); empty if they were given by number.
    """

    n_cells: int
    rows_per_chunk: float
    where: str = ""

    @property
    def in_words(self) -> str:
        """How many, and by which query."""
        return f"{self.n_cells:,} cells" + (f" where {self.where}" if self.where else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The collection and its labels.

    Parameters
    ----------
    paths
        Its files.
    n_cells, n_vars, layout, dtype
        Its matrix.
    bytes_on_disk
        Size of the files, on this machine or on servers.
    stored_bytes_per_cell
        Mean size of a cell in storage, compressed; of the matrix that is read, and no other.
    rows_per_chunk
        Mean number of rows in a unit of storage that is read as a whole.
    label, n_labels, n_missing
        The first label's obs column, how many values it takes, and how many cells have none.
    label_entropy_bits
        Entropy of the label over all cells.
    batch_size
        Cells of a minibatch.
    further_labels
        The other labels by the names of their obs columns.
    label_counts
        Cells of each value of the first label; empty if it takes very many.
    slow_reading
        What is read slowly, why, and what to do, in one line; empty if nothing is. See
        `cellfeed.Collection.slow_reading`.
    selection
        The cells that were visited, to which labels refer; None if it was all of them.
    has_storage_options
        Whether servers were reached with ``storage_options``, which are kept nowhere.
    cache_bytes
        How much of what servers gave may be kept on this machine's disk, so that it may have been
        read from there; 0 if nothing.
    loader
        What read it, if that was not cellfeed: of that, columns and storage are not known, and are
        0 or empty.
    direct_io
        Whether files were read past the page cache.
    """

    paths: tuple[str, ...]
    n_cells: int
    n_vars: int
    layout: str
    dtype: str
    bytes_on_disk: int
    stored_bytes_per_cell: float
    rows_per_chunk: float
    label: str
    n_labels: int
    n_missing: int
    label_entropy_bits: float
    batch_size: int
    further_labels: Mapping[str, LabelCensus] = field(default_factory=dict)
    label_counts: tuple[int, ...] = ()
    slow_reading: str = ""
    selection: Selection | None = None
    has_storage_options: bool = False
    cache_bytes: int = 0
    loader: str = ""
    direct_io: bool = False

    @property
    def n_visited(self) -> int:
        """How many cells were visited."""
        return self.n_cells if self.selection is None else self.selection.n_cells

    @property
    def visited_per_chunk(self) -> float:
        """Mean number of visited cells in a unit of storage that holds any."""
        return self.rows_per_chunk if self.selection is None else self.selection.rows_per_chunk

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, the first one first."""
        return self.label, *self.further_labels


def describe_dataset(
    selected: Selected, counted: Mapping[str, LabelCounts], batch_size: int
) -> Dataset:
    """Return what was measured, and how its labels are distributed, the first label first."""
    collection = selected.collection
    remote = [each for each in collection.locations if each.is_remote]
    selection = None
    if selected.indices is not None:
        selection = Selection(
            n_cells=len(selected), rows_per_chunk=selected.rows_per_chunk, where=selected.where
        )
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
        cache_bytes=max((each.options.cache_bytes for each in remote), default=0),
        direct_io=collection.direct_io,
        slow_reading=collection.slow_reading() or "",
        selection=selection,
        **_labels(counted),
    )


def dataset_of_loader(tunable: Tunable, counted: Mapping[str, LabelCounts]) -> Dataset:
    """Return the same of what another loader reads, of which less is known."""
    return Dataset(
        loader=tunable.name,
        paths=tuple(map(str, tunable.files)),
        n_cells=next(iter(counted.values())).n_rows,
        n_vars=0,
        layout="",
        dtype="",
        bytes_on_disk=sum(path.stat().st_size for path in tunable.paths),
        stored_bytes_per_cell=0.0,
        rows_per_chunk=tunable.rows_per_chunk,
        batch_size=tunable.batch_size,
        **_labels(counted),
    )


def _labels(counted: Mapping[str, LabelCounts]) -> dict[str, Any]:
    """Return what a data set says of its labels."""
    censuses = {
        name: LabelCensus(
            n_labels=each.counts.size,
            n_missing=each.n_missing,
            label_entropy_bits=theory.entropy_bits(each.counts),
        )
        for name, each in counted.items()
    }
    label, *others = censuses
    counts = counted[label].counts.tolist()
    return {
        "label": label,
        **asdict(censuses[label]),
        "label_counts": tuple(counts) if len(counts) <= _MOST_LABEL_COUNTS else (),
        "further_labels": {name: censuses[name] for name in others},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedStrategy:
    """A strategy without its block size, which was searched, and without its rows.

    Of parameters that are arrays, such as weights, a result holds nothing but the name; others are
    numbers, text, or several of these.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    has_block_size: bool = True

    @classmethod
    def of(cls, strategy: SamplingStrategy) -> "SearchedStrategy":
        """Return the record of a strategy, as the user made it."""
        known = getattr(strategy, "__dataclass_fields__", {})
        parameters, arrays = dict[str, Any](), list[str]()
        for each in known.values():
            value = getattr(strategy, each.name) if each.init else each.default
            if value is each.default or each.name in _APART:
                continue
            if isinstance(value, tuple) and all(isinstance(name, str) for name in value):
                parameters[each.name] = list(value)
            elif isinstance(value, bool | int | float | str):
                parameters[each.name] = value
            else:
                arrays.append(each.name)
        return cls(
            name=type(strategy).__name__,
            parameters=parameters,
            arrays=tuple(arrays),
            has_block_size="block_size" in known and known["block_size"].init,
        )

    def in_python(self, block_size: int | None = None, rows: str = "") -> str:
        """Return the call that makes it, with a block size if it has one, of some rows in Python.

        Examples
        --------
        >>> strategy = SearchedStrategy(name="GroupedSampling", parameters={"set_size": 16})
        >>> strategy.in_python(4, "train")
        'GroupedSampling(set_size=16, block_size=4, indices=train)'
        """
        arguments = [
            f"{name}={tuple(value) if isinstance(value, list) else value!r}"
            for name, value in self.parameters.items()
        ]
        arguments += [f"{name}={name}" for name in self.arrays]
        if block_size is not None and self.has_block_size:
            arguments.append(f"block_size={block_size}")
        if rows:
            arguments.append(f"indices={rows}")
        return f"{self.name}({', '.join(arguments)})"

    @property
    def is_made_again(self) -> bool:
        """Whether `cellfeed.CellDataset.from_autotune` makes it by itself."""
        return not self.arrays and self.name in sampling.__all__

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it takes labels from."""
        labels = self.parameters.get("labels", ())
        return (labels,) if isinstance(labels, str) else tuple(labels)
