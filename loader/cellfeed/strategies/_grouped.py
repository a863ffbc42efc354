"""Sets of cells that share a group."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.extending import ParameterError, require_one_of, require_positive
from cellfeed.sampling import (
    EpochOrder,
    Permutation,
    derive_key,
    label_codes,
    n_available,
    permute_within,
    random_words,
    sorted_indices,
)
from cellfeed.strategies._cells import LabelledCells, require_length, sorted_with
from cellfeed.strategies._weighted import EvenMasses, systematic_counts

Leftover = Literal["drop", "pad"]
Integers = NDArray[np.int64]
Rows = NDArray[np.signedinteger[Any]]

# Purposes of the random streams of one epoch.
_SET_ORDER, _GROUPS, _FIRST_CELL, _BLOCK_ORDER = range(4)


@dataclass(frozen=True, eq=False)
class GroupedSampling(LabelledCells):
    """Visit sets of cells that share a group, such as a perturbation in a cell line, or a donor.

    Each ``set_size`` consecutive cells of a minibatch form a set of one group, whatever the number
    of ranks and workers; ``batch_size`` must be a multiple of ``set_size``. Sets come in random
    order, and the cells of a group form other sets in each epoch.

    Parameters
    ----------
    labels
        The group of each cell: numbers, text or categories; cells without a group (NaN, None, or
        the number -1, whatever the dtype) are not visited; other negative numbers are groups. Give
        one label for each row of the collection, or for each of ``indices``; or the name of an obs
        column of the collection; or a tuple of several names, so that each combination of values is
        a group.
    set_size
        Number of cells in a set.
    block_size
        Number of cells in a set that are neighbours, in storage order, among the cells of their
        group; ``set_size`` must be a multiple of it. Larger blocks read faster if the cells of a
        group are scattered.
    indices
        The rows to visit; all rows if None. A row that is given twice counts twice. They are
        sorted, with a warning if they were not.
    leftover
        What to do if the cells of a group do not fill its last set. "drop" leaves them out, other
        cells in each epoch, and with them all groups with fewer than ``set_size`` cells. "pad"
        repeats cells of the group until the last set is full, and no cell comes twice in a set if
        the group has at least ``set_size`` cells.
    weights
        How often groups come. If None, each group comes as often as its cells fill sets. If
        "equal", all groups that fill a set come equally often; one that comes more often than its
        cells fill sets starts over, with other sets.
    n_sets
        Number of sets in an epoch; as many as the cells fill if None. Requires ``weights``.

    Raises
    ------
    ParameterError
        A size is below one or not a multiple, labels or weights cannot be used, or no group fills
        a set.

    Warns
    -----
    UserWarning
        With ``leftover="drop"``, cells are never visited, since their groups have fewer than
        ``set_size``.

    Notes
    -----
    The rows of all groups are kept, at 8 bytes a row, or 4 bytes in a collection of less than 2^31
    rows.

    Examples
    --------
    >>> strategy = GroupedSampling(["a", "b", "a", "b", "a"], set_size=2)
    >>> rows = strategy.epoch_order(n_rows=5, epoch_key=0)(np.arange(4)).reshape(2, 2)
    >>> sorted((rows % 2).tolist())
    [[0, 0], [1, 1]]
    """

    labels: ArrayLike | str | tuple[str, ...]
    set_size: int
    block_size: int = 1
    indices: ArrayLike | None = None
    leftover: Leftover = "drop"
    weights: Literal["equal"] | None = None
    n_sets: int | None = None

    def __post_init__(self) -> None:
        """Check the parameters; find the rows of each group."""
        self._check_sizes()
        if not self.column_names:
            labels = sorted_with(self.indices, label_codes(self.labels))
            object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "indices", sorted_indices(self.indices))
        if not self.column_names:
            _ = self._groups

    @property
    def shuffles_fetch(self) -> bool:
        """Always true: sets are mixed in memory."""
        return True

    @property
    def n_together(self) -> int:
        """Number of cells in a set."""
        return self.set_size

    def n_positions(self, n_rows: int) -> int:
        """Return the number of cells that an epoch visits, including repeated ones."""
        n_available(self.indices, n_rows)
        require_length("labels", self.codes.size, self.indices, n_rows)
        _, _, sets_of_group = self._groups
        return (self.n_sets or int(sets_of_group.sum())) * self.set_size

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Return the sets of one epoch, which keep a number for each group."""
        total = self.n_positions(n_rows) // self.set_size
        rows, starts, sets_of_group = self._groups
        counts = sets_of_group
        if self.weights is not None:
            # How often each group is drawn: its expected number, rounded up or down.
            (drawn,) = np.nonzero(counts)
            masses, counts = EvenMasses(drawn.size), np.zeros_like(counts)
            counts[drawn] = systematic_counts(
                masses.starts(np.arange(drawn.size + 1)), total, derive_key(epoch_key, _GROUPS)
            )
        bounds = np.concatenate([[0], np.cumsum(counts)])  # of the sets of each group
        permute = Permutation(total, derive_key(epoch_key, _SET_ORDER))

        def rows_at(positions: NDArray[np.int64], /) -> NDArray[np.int64]:
            slots, within = np.divmod(positions.ravel(), self.set_size)
            distinct, place = np.unique(slots, return_inverse=True)
            sets = permute(distinct)
            groups = np.searchsorted(bounds[:-1], sets, side="right") - 1
            n_sets = np.maximum(sets_of_group[groups], 1)
            # A group that has come as often as its cells fill sets begins anew.
            times, numbers = np.divmod(sets - bounds[groups], n_sets)
            keys = random_words(derive_key(epoch_key, _BLOCK_ORDER), groups)
            keys = random_words(
                derive_key(epoch_key, _BLOCK_ORDER, 1), keys + times.astype(np.uint64)
            )
            sizes = np.diff(starts)[groups]
            # In the order of blocks, in which those of a set follow each other.
            cells = (numbers * self.set_size)[place] + within
            # What is left of a group after its last whole set, and repeats cells of its first.
            is_padded = (sizes >= self.set_size)[place] & (cells >= sizes[place])
            cells -= np.where(is_padded, sizes[place], 0)
            blocks, in_block = np.divmod(cells, self.block_size)
            blocks_per_set = self.set_size // self.block_size
            n_blocks = np.where(
                sizes >= self.set_size,
                np.minimum(n_sets * blocks_per_set, sizes // self.block_size),
                n_sets * blocks_per_set,
            )[place]
            # A block that the group does not fill is the last.
            is_last = blocks >= n_blocks
            blocks = np.where(
                is_last, blocks, permute_within(np.where(is_last, 0, blocks), n_blocks, keys[place])
            )
            firsts = random_words(derive_key(epoch_key, _FIRST_CELL), keys)
            first = (firsts % sizes.astype(np.uint64)).astype(np.int64)[place]
            cells = first + blocks * self.block_size + in_block
            found: Integers = rows[starts[groups][place] + cells % sizes[place]].astype(np.int64)
            return found.reshape(positions.shape)

        return rows_at

    def _check_sizes(self) -> None:
        for name in ("set_size", "block_size", *(["n_sets"] if self.n_sets is not None else [])):
            object.__setattr__(self, name, require_positive(name, getattr(self, name)))
        if self.set_size % self.block_size:
            msg = (
                "`set_size` must be a multiple of `block_size`, but got "
                f"set_size={self.set_size}, block_size={self.block_size}"
            )
            raise ParameterError(msg)
        require_one_of("leftover", self.leftover, get_args(Leftover))
        if self.weights is not None and not isinstance(self.weights, str):
            msg = (  # type: ignore[unreachable]
                "`weights` must be 'equal' or None, but got those of cells; "
                "`BlockWeightedSampling` draws cells by weight"
            )
            raise ParameterError(msg)
        require_one_of("weights", self.weights, ("equal", None))
        if self.n_sets is not None and self.weights is None:
            msg = (
                f"n_sets={self.n_sets} needs `weights`, since without them each cell comes once; "
                "give weights='equal', or leave out `n_sets`"
            )
            raise ParameterError(msg)

    @cached_property
    def _groups(self) -> tuple[Rows, Integers, Integers]:
        """The groups.

        Returns
        -------
        Rows, group after group, each group in storage order; the start of each group among them,
        shape (n_groups + 1,); and the number of sets that each fills, shape (n_groups,).
        """
        codes = self.codes_of_cells()
        rows = np.arange(codes.size) if self.indices is None else np.asarray(self.indices)
        # 16 bits or less, if there are so few groups, are what NumPy sorts fast.
        numbered = (codes.astype(np.int64) + 1).astype(np.min_scalar_type(int(codes.max()) + 1))
        members = np.argsort(numbered, kind="stable")[np.count_nonzero(codes < 0) :]
        sizes = np.bincount(codes[members])
        n_sets = sizes // self.set_size
        if self.leftover == "pad":
            n_sets = -(-sizes // self.set_size)
        if not n_sets.any():
            msg = (
                f"`set_size <= {sizes.max()}` (cells of the largest group) must hold, but got "
                f"set_size={self.set_size}; or fill sets with leftover='pad'"
            )
            raise ParameterError(msg)
        is_lost = (n_sets == 0) & (sizes > 0)
        if self.leftover == "drop" and is_lost.any():
            groups = "1 group has" if is_lost.sum() == 1 else f"{is_lost.sum():,} groups have"
            msg = (
                f"{groups} fewer cells than set_size={self.set_size}, so that "
                f"{sizes[is_lost].sum():,} of {members.size:,} cells are never visited; give "
                "leftover='pad', or a smaller `set_size`"
            )
            warnings.warn(msg, UserWarning, stacklevel=5)
        dtype = np.int32 if int(rows[-1]) < 1 << 31 else np.int64
        return rows[members].astype(dtype), np.concatenate([[0], np.cumsum(sizes)]), n_sets
