"""What a collection is, for reports."""

from collections.abc import Mapping

from cellfeed import Collection
from cellfeed_tuner import theory
from cellfeed_tuner._entropy._label_counts import LabelCounts
from cellfeed_tuner._measuring._checks import bytes_on_disk
from cellfeed_tuner._result import Dataset, LabelCensus

__all__ = ["describe_dataset"]

_MOST_LABEL_COUNTS = 1000


def describe_dataset(
    collection: Collection, counted: Mapping[str, LabelCounts], batch_size: int
) -> Dataset:
    """Return what was measured, and how its labels are distributed, the first label first."""
    censuses = {name: _census(each) for name, each in counted.items()}
    label, *others = censuses
    return Dataset(
        paths=tuple(str(path) for path in collection.paths),
        n_cells=len(collection),
        n_vars=collection.n_vars,
        layout=collection.layout,
        dtype=str(collection.dtype),
        bytes_on_disk=bytes_on_disk(collection),
        stored_bytes_per_cell=collection.stored_row_bytes(),
        rows_per_chunk=collection.rows_per_chunk,
        label=label,
        n_labels=censuses[label].n_labels,
        n_missing=censuses[label].n_missing,
        label_entropy_bits=censuses[label].label_entropy_bits,
        batch_size=batch_size,
        label_counts=_label_counts(counted[label]),
        further_labels={name: censuses[name] for name in others},
    )


def _census(counted: LabelCounts) -> LabelCensus:
    return LabelCensus(
        n_labels=counted.counts.size,
        n_missing=counted.n_missing,
        label_entropy_bits=theory.entropy_bits(counted.counts),
    )


def _label_counts(counted: LabelCounts) -> tuple[int, ...]:
    counts = counted.counts.tolist()
    return tuple(counts) if len(counts) <= _MOST_LABEL_COUNTS else ()
