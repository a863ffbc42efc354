"""What was read: the collection, the distribution of its labels, and the strategy."""

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
# The block size is searched, and a result has its row selection elsewhere.
_APART = ("block_size", "indices")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelCensus:
    """Distribution of an obs column over all cells.

    Parameters
    ----------
    n_labels, n_missing
        Number of distinct values, and of cells without a value.
    label_entropy_bits
        Entropy of the distribution.
    """

    n_labels: int
    n_missing: int
    label_entropy_bits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The cells that were visited, if not all were.

    ``rows_per_chunk`` is the mean number of them in a chunk that holds any. ``where`` is the query
    that selects them (`cellfeed.Collection.where`); empty if they were given by row number.
    """

    n_cells: int
    rows_per_chunk: float
    where: str = ""

    @property
    def in_words(self) -> str:
        """Their number and query."""
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
        Mean compressed size of a cell in storage, in the matrix that is read.
    rows_per_chunk
        Mean number of rows in a chunk.
    label, n_labels, n_missing
        Obs column of the first label, its number of distinct values, and of cells without one.
    label_entropy_bits
        Entropy of the label over all cells.
    batch_size
        Cells of a minibatch.
    further_labels
        The other labels, by obs column.
    label_counts
        Cells of each value of the first label; empty if there are more than 1,000 values.
    slow_reading
        What is read slowly, why, and the remedy, in one line; empty if nothing is. See
        `cellfeed.Collection.slow_reading`.
    selection
        The cells that were visited, which the labels refer to; None if all were.
    has_storage_options
        Whether servers were reached with ``storage_options``, which are not saved.
    cache_bytes
        Size limit of the cache of remote data on this machine's disk; 0 without one.
    loader
        The loader that read it, if not cellfeed; its number of genes and storage are unknown, and
        given as 0 or empty.
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
        """Number of cells that were visited."""
        return self.n_cells if self.selection is None else self.selection.n_cells

    @property
    def visited_per_chunk(self) -> float:
        """Mean number of visited cells in a chunk that holds any."""
        return self.rows_per_chunk if self.selection is None else self.selection.rows_per_chunk

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, the first one first."""
        return self.label, *self.further_labels


def describe_dataset(
    selected: Selected, counted: Mapping[str, LabelCounts], batch_size: int
) -> Dataset:
    """Return the record of a collection and its labels, the first label first."""
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
    """Return the record of what another loader reads, of which less is known."""
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

    Parameters that are arrays, such as weights, are saved by name only.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    has_block_size: bool = True

    @classmethod
    def of(cls, strategy: SamplingStrategy) -> "SearchedStrategy":
        """Return the record of a strategy."""
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
        """Return the Python expression that makes it.

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
        """Whether `cellfeed.CellDataset.from_autotune` can make it without help."""
        return not self.arrays and self.name in sampling.__all__

    @property
    def columns(self) -> tuple[str, ...]:
        """The obs columns that it takes labels from."""
        labels = self.parameters.get("labels", ())
        return (labels,) if isinstance(labels, str) else tuple(labels)
