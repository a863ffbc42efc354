"""The data set that a training loop iterates over."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike, NDArray

from cellfeed._cells import require_torch_dtype
from cellfeed._chunks import Verify, check_verify
from cellfeed._collection import Collection
from cellfeed._dataset._delivery import (
    Callbacks,
    Delivery,
    IndexedDelivery,
    Minibatches,
    PlacedDelivery,
    TransformedDelivery,
)
from cellfeed._dataset._fetching import CollectionReading, Fetching
from cellfeed._dataset._how_to_read import AnyDtype, numpy_dtypes, require_that_they_apply
from cellfeed._dataset._loader import (
    MinibatchLoader,
    as_it_is,
    context_without_threads,
    n_that_fit,
    sent_whole,
)
from cellfeed._dataset._planned import PlannedDataset
from cellfeed._dataset._recommendation import Recommending, read_recommendation
from cellfeed._dataset._state import as_json
from cellfeed._dataset._transforms import AnyTransform, float_dtypes, transforms_of
from cellfeed._errors import ParameterError, require_positive
from cellfeed._indexables import count_rows
from cellfeed._layouts import dtypes_of
from cellfeed._reading import Pools, Transforms
from cellfeed._torch import HAS_TORCH, require_torch
from cellfeed._workers import pool_of_minibatches
from cellfeed.sampling import SamplingStrategy, Share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CellDataset"]


# What waits in a worker that reads ahead by itself: enough to even out a slow step.
_MINIBATCHES_AHEAD = 8
# Each takes a file descriptor while it waits, of which a process often has 1024.
_MOST_MINIBATCHES_AHEAD = 512
# Over a network: what comes while one is decoded is less than what a round trip takes.
_FETCHES_AHEAD = 8
# What may be set between two epochs, so that what was read ahead is not what is wanted any more.
_READ_WITH = (
    "collection",
    "fetch_transform",
    "batch_callback",
    "batch_transform",
    "dense",
    "dtype",
    "num_threads",
    "transform",
    "verify",
    "prefetch",
    "prefetch_next_epoch",
    "prefetch_bytes",
)


class CellDataset(PlannedDataset):
    """Minibatches of a collection in the order of a sampling strategy.

    Each fetch reads ``batch_size * fetch_factor`` rows in storage order, shuffles them in memory
    and delivers them as minibatches. Every iteration is another epoch; epoch number and
    ``seed`` fix its order. Works in a plain loop, and in a `torch.utils.data.DataLoader` with
    ``batch_size=None`` and any number of workers: each worker takes every n-th fetch, so that
    minibatches have the same rows whatever the number of workers, and come in an order that
    depends on it. `loader` makes such a DataLoader. With ``as_torch=False``, and where torch is not
    installed, `Cells` in NumPy and SciPy come in place of `Minibatch`.

    What an iteration yields depends on what is read:

    - of a `Collection`, a `Minibatch`: ``X`` is a torch tensor, sparse CSR or dense as it is
      stored, ``obs`` has a tensor for each column, and ``rows`` the rows' numbers;
    - of a `Collection` with a ``fetch_transform``, ``batch_callback`` or ``fetch_callback``, which
      get or give `Cells` in NumPy and SciPy: a `Minibatch` of what they return where that is
      `Cells`, and else what they return, as it is;
    - of anything else, what its own brackets give: NumPy arrays of a NumPy array, SciPy CSR of
      SciPy CSR, a `MultiIndexable` of a `MultiIndexable`, AnnData in memory of AnnData. Only a
      DataLoader makes tensors of NumPy arrays, as it does for any data set; `loader` does so
      unless ``as_torch=False``.

    With a ``batch_transform``, what that returns.

    Parameters
    ----------
    collection
        A `Collection`, or anything with ``len()`` that takes an array of ascending row numbers
        in brackets: NumPy arrays, memory maps, SciPy CSR, `MultiIndexable`, AnnData (in memory
        or backed), AnnCollection.
    strategy
        Which rows an epoch visits, and in which order.
    batch_size
        Rows of a minibatch.
    fetch_factor
        Minibatches that are read at once. Memory grows with it, and so do speed and mixing.
    drop_last
        What happens where rows do not divide evenly; see `EpochPlan`.
    fetch_callback
        ``fetch_callback(collection, rows)`` reads rows (ascending, int64) in place of
        ``collection[rows]``, one fetch after the other, with nothing read ahead.
    fetch_transform
        ``fetch_transform(fetched)`` changes a whole fetch. Over a `Collection` it gets `Cells`
        that are valid until the next fetch.
    batch_callback
        ``batch_callback(transformed, indices)`` takes a minibatch out of a fetch in place of
        ``transformed[indices]``.
    batch_transform
        ``batch_transform(batch)`` changes a minibatch: any function, which worker processes that
        are spawned have to be able to pickle. Each worker runs it on the minibatches that it
        delivers; without workers it runs in the training loop.
    rank, world_size
        This process and the number of processes that train together; if None, torch.distributed
        is asked when an epoch begins, and this process is by itself where that is not
        initialised. ``rank=0, world_size=1`` reads everything, whatever the number of ranks.
        All ranks have to begin the same epochs; where one of them looks at a minibatch of its
        own, call `set_epoch` before each epoch on all.
    device_mesh
        The dimension of a `torch.distributed.device_mesh` along which data differ, such as
        ``mesh["dp"]``, in place of ``rank`` and ``world_size``: ranks that differ in other
        dimensions, such as those of one tensor-parallel group, get identical minibatches. All
        processes of torch.distributed make the data set; where only some do, give the other two.
    seed
        Fixes the order of all epochs. If None, one is drawn, and with several ranks the first
        rank's is used by all, as soon as they have met.
    dense
        Whether minibatches of a `Collection` carry dense elements even where they are stored
        sparse.
    dtype
        Dtype of all elements in minibatches of a `Collection`, such as ``"float32"``, or a
        mapping with those of some of them, such as ``{"X": "float32"}``; those of the
        collection if None. A ``fetch_callback`` reads in its own.
    num_threads
        Threads that read and decode a `Collection`, in each process; if None, as many as there
        are processors that this process may use, divided among worker processes and the ranks of
        this machine. A ``fetch_callback`` has threads of its own.
    transform
        What values of a `Collection` go through, one or several of `cellfeed.transforms`, such as
        ``[NormalizeTotal(1e4), Log1p()]``, in this order: those of the first element, or a mapping
        with those of some by name. The threads that decode apply them where rows are placed,
        before any function of yours sees them. Values are then float32, or float64 where these are
        stored or asked for by ``dtype``.
    transform_threads
        Threads that run ``batch_transform``, on as many minibatches ahead, in each process; it
        pays where that function leaves Python to others while it works, as NumPy and torch do.
        If 0, it runs where the minibatches are asked for.
    prefetch
        How far ahead a `Collection` is read: while a fetch is delivered and the next is decoded,
        so many after that are planned and their bytes are on their way. If None, 1 for files of
        this machine, and 8 where any file is on a server or in an object store. Changes neither
        minibatches nor their order.
    prefetch_next_epoch
        Whether the first fetches of the next epoch are read while the last of this one are
        delivered, where an epoch is taken to its end, in worker processes if they are persistent.
        Changes neither minibatches nor states. What was read waits in memory, a fetch of it, until
        the next epoch begins, another is asked for or this data set is dropped; after the last
        epoch it was read for nothing, which is why it has to be asked for.
    prefetch_bytes
        Most compressed bytes that are on their way at once from servers and object stores, in
        each process, whatever ``prefetch`` is; one fetch always is.
    verify
        How often chunks of a `Collection` are decompressed to their end, where checksums are, and
        where it shows that one has its size: ``"first"``, the first time that each process meets
        a chunk (worker processes that are forked go by what others of them have met), and after
        that only as far as its rows are wanted; ``"always"``, each time; or ``"never"``, which is
        the fastest from the first epoch on, and takes what a damaged chunk gives as long as it can
        be decompressed that far.
    as_torch
        Whether minibatches are torch tensors. If not, they are in NumPy and SciPy, for JAX or
        scikit-learn, also from a `loader`.

    Raises
    ------
    ParameterError
        A size is below one, the strategy asks for rows that do not exist, ranks are given that
        cannot be, ``dense``, ``dtype``, ``num_threads``, ``transform``, ``prefetch``,
        ``prefetch_next_epoch`` or ``verify`` are given where they say nothing about what is read,
        ``transform`` does not fit an element or its dtype, or ``seed`` is None with several ranks
        and torch.distributed is not initialised.
        Also when an epoch begins: ranks met, but this process has used a seed that it drew by
        itself.

    Warns
    -----
    UserWarning
        Files of a `Collection` are read slowly; once for each, see `Collection.describe`.

    Examples
    --------
    >>> import numpy as np
    >>> from cellfeed import BlockShuffling
    >>> dataset = CellDataset(np.arange(10), BlockShuffling(block_size=2), batch_size=4, seed=0)
    >>> sorted(np.concatenate(list(dataset)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self,
        collection: Any,
        strategy: SamplingStrategy,
        batch_size: int,
        fetch_factor: int = 16,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - by place, as scDataset has it
        fetch_callback: Callable[[Any, NDArray[Any]], Any] | None = None,
        fetch_transform: Callable[[Any], Any] | None = None,
        batch_callback: Callable[[Any, NDArray[Any]], Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        *,
        dense: bool = False,
        dtype: "AnyDtype | Mapping[str, AnyDtype] | None" = None,
        num_threads: int | None = None,
        transform: AnyTransform | None = None,
        transform_threads: int = 0,
        device_mesh: "DeviceMesh | None" = None,
        as_torch: bool = True,
        prefetch: int | None = None,
        prefetch_next_epoch: bool = False,
        prefetch_bytes: int = 256 * 2**20,
        verify: Verify = "first",
    ) -> None:
        super().__init__(
            collection,
            count_rows(collection, is_indexed=fetch_callback is None),
            strategy,
            batch_size=batch_size,
            fetch_factor=fetch_factor,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            device_mesh=device_mesh,
            seed=seed,
            prefetch_next_epoch=prefetch_next_epoch,
        )
        self.fetch_callback = fetch_callback
        self.fetch_transform = fetch_transform
        self.batch_callback = batch_callback
        self.batch_transform = batch_transform
        self.dense = dense
        self.as_torch = as_torch
        self.dtype = numpy_dtypes(dtype)
        self.transform: Transforms = {}
        if self._is_read_ahead:
            elements = collection.elements
            self.transform = self._transforms(transform)
            self.dtype = float_dtypes(elements, self.dtype, self.transform)
            for each in dtypes_of(elements, self.dtype).values() if as_torch else ():
                require_torch_dtype(each)
        self.num_threads = (
            None if num_threads is None else require_positive("num_threads", num_threads)
        )
        require_that_they_apply(
            collection,
            has_callback=fetch_callback is not None,
            dense=self.dense,
            dtype=self.dtype,
            num_threads=self.num_threads,
            transform=transform,
            prefetch=prefetch,
            prefetch_next_epoch=prefetch_next_epoch,
            verify=verify,
        )
        self.verify = check_verify(verify)
        self.prefetch = None if prefetch is None else require_positive("prefetch", prefetch)
        self.prefetch_bytes = require_positive("prefetch_bytes", prefetch_bytes)
        self.transform_threads = (
            require_positive("transform_threads", transform_threads) if transform_threads else 0
        )
        self.num_workers = 0
        # For all epochs, so that memory is new to the system only once.
        self._pools = Pools()
        if self._is_read_ahead:
            collection.warn_if_slow(self.dtype)
            collection.load_tables()  # once, for all worker processes that are forked

    @classmethod
    def from_autotune(
        cls,
        collection: Any,
        result: str | os.PathLike[str] | Recommending,
        *,
        strategy: SamplingStrategy | None = None,
        indices: ArrayLike | None = None,
        **parameters: Any,
    ) -> "CellDataset":
        """Make a data set with the configuration that ``autotune`` recommended.

        Parameters
        ----------
        collection
            What is read; see the class.
        result
            The ``autotune.json``, or what `cellfeed_tuner.autotune` returned. Its block size,
            batch size, fetch factor, ``prefetch``, ``num_threads`` and ``align`` if it has them
            and, for `loader`, number of workers are used.
        strategy
            A strategy in place of the one that was searched (`BlockShuffling` if none was) with
            the recommended block size. Needed where that was made with arrays, such as weights,
            which a result does not hold.
        indices
            The rows to visit, such as those of a training set, in blocks of the recommended
            size; all rows if None.
        **parameters
            Other parameters of the class, such as ``seed``.

        Raises
        ------
        PathError
            There is no such file.
        FormatError
            The file is not a result of ``autotune``, the result recommends nothing, or it says
            that what it measured was wrong.
        ParameterError
            Both ``strategy`` and ``indices`` are given, or a strategy is needed; and as of the
            class.

        Warns
        -----
        UserWarning
            The result is of another collection, batch size, strategy or machine.
        """
        if strategy is not None and indices is not None:
            msg = "`indices` and `strategy` do not go together; give the strategy the indices"
            raise ParameterError(msg)
        recommended = read_recommendation(result)
        if strategy is None:
            strategy = recommended.strategy_of(indices)
        sizes: dict[str, Any] = {
            "batch_size": recommended.batch_size,
            "fetch_factor": recommended.fetch_factor,
        }
        if isinstance(collection, Collection) and parameters.get("fetch_callback") is None:
            sizes["prefetch"] = recommended.prefetch
            sizes["num_threads"] = recommended.num_threads
        dataset = cls(collection, strategy, **(sizes | parameters))
        recommended.warn_of_differences(collection, dataset.batch_size, strategy)
        dataset.num_workers = recommended.num_workers
        return dataset

    @property
    def fetch_size(self) -> int:
        """Rows that are read at once."""
        return self.batch_size * self.fetch_factor

    @property
    def buffer_bytes(self) -> int:
        """Memory that minibatches of a `Collection` take in each process that reads, in bytes.

        Two fetches: one is delivered while the next is read. It is kept from epoch to epoch, as
        long as the data set lives. Computed from the mean size of a
        cell, so that it holds for blocks of usual cells; dense minibatches that are made of
        sparse ones ahead come on top, and up to ``prefetch_bytes`` that came from a server or by
        direct I/O.
        """
        return int(2 * self.fetch_size * self.collection.mean_row_bytes(self.dtype))

    def loader(self, num_workers: int | None = None, **options: Any) -> MinibatchLoader:
        """Return a DataLoader that passes minibatches on as they are, and has a state.

        Workers read ahead by themselves; see ``prefetch``. Where a function of yours works on a
        whole fetch, or reads it, as many minibatches wait as a fetch has, so that the training
        loop goes on meanwhile. Minibatches lie in memory that a worker lends and uses again once
        nothing refers to them any more; rows are read into it, unless a function of yours changes
        them. Each worker takes `buffer_bytes` of it, and the minibatches that wait and are used.
        It needs no room in ``/dev/shm``. Where a
        `Collection` is on a server, in an object store or an experiment of TileDB-SOMA, workers
        are not forked, since threads of this process may be reading it: the context is
        "forkserver" unless you give another, so that a script needs its
        ``if __name__ == "__main__":``.

        Parameters
        ----------
        num_workers
            Worker processes; what ``autotune`` recommended if None (0 if it was not asked).
        **options
            Other parameters of `torch.utils.data.DataLoader`.

        Raises
        ------
        DeliveryError
            While iterating: workers delivered fewer minibatches than the epoch has.
        ImportError
            torch is not installed.
        """
        require_torch("`loader`")
        if not self.as_torch:
            options.setdefault("collate_fn", as_it_is)
        workers = self.num_workers if num_workers is None else num_workers
        if workers:
            ahead = _MINIBATCHES_AHEAD if self._is_placed else self.fetch_factor + 1
            most = max(2, _MOST_MINIBATCHES_AHEAD // workers)
            fit = n_that_fit(self._minibatch_bytes, workers)
            options.setdefault("prefetch_factor", min(ahead, self.fetch_factor + 1, most, fit))
            options["collate_fn"] = sent_whole(options.get("collate_fn"))
            if not self._can_be_forked:
                options.setdefault("multiprocessing_context", context_without_threads())
        return MinibatchLoader(self, batch_size=None, num_workers=workers, **options)

    @property
    def _minibatch_bytes(self) -> int:
        """Mean size of a minibatch as it is read, in bytes; 0 if that is not known."""
        if not isinstance(self.collection, Collection):
            return int(getattr(self.collection, "nbytes", 0) / self._n_rows * self.batch_size)
        row_bytes = self.collection.mean_row_bytes(self.dtype, dense=self.dense)
        return int(self.batch_size * row_bytes)

    @property
    def _is_read_ahead(self) -> bool:
        """Whether fetches are read here, by threads, rather than by a function or an indexable."""
        return isinstance(self.collection, Collection) and self.fetch_callback is None

    @property
    def _can_be_forked(self) -> bool:
        return not isinstance(self.collection, Collection) or self.collection.can_be_forked

    @property
    def _is_remote(self) -> bool:
        """Whether bytes come from servers or object stores."""
        return isinstance(self.collection, Collection) and self.collection.is_remote

    @property
    def _is_placed(self) -> bool:
        """Whether rows go straight into the minibatches that they leave in."""
        is_transformed = self.fetch_transform is not None or self.batch_callback is not None
        return self._is_read_ahead and not is_transformed

    def _transforms(self, transform: AnyTransform | None) -> Transforms:
        are_made_dense = self.dense and self._is_placed
        return transforms_of(transform, self.collection.elements, are_made_dense=are_made_dense)

    def _minibatches(self, share: Share) -> Minibatches:
        callbacks = Callbacks(
            fetch_transform=self.fetch_transform,
            batch_callback=self.batch_callback,
            batch_transform=self.batch_transform,
            transform_threads=self.transform_threads,
            first_alone=self._is_placed,
            dense=self.dense,
            as_torch=self.as_torch and HAS_TORCH,
            counters=self._counters,
        )
        return callbacks.transformed(self._delivery(callbacks).minibatches(share))

    def _values(self) -> dict[str, Any]:
        return {"transform": as_json(self.transform)}

    def _delivery(self, callbacks: Callbacks) -> Delivery:
        """Return how minibatches come about, with what this data set was given by now."""
        if not self._is_read_ahead:
            return IndexedDelivery(
                collection=self.collection,
                fetch_callback=self.fetch_callback,
                callbacks=callbacks,
            )
        # What a function of the user's gets to see, it might keep.
        is_seen = (
            self.batch_transform is not None or type(self).__iter__ is not CellDataset.__iter__
        )
        is_lent = self._is_placed and not is_seen
        lent = pool_of_minibatches() if is_lent else None
        reading = CollectionReading(
            collection=self.collection,
            dtype=self.dtype,
            num_threads=self.num_threads,
            verify=self.verify,
            pools=self._pools if lent is None else self._pools.lending(lent, dense=self.dense),
            transforms=self._transforms(self.transform),
            prefetch=self.prefetch or (_FETCHES_AHEAD if self._is_remote else 1),
            prefetch_bytes=self.prefetch_bytes,
            counters=self._counters,
        )
        fetching = Fetching(
            reading=reading,
            are_whole=not self._is_placed,
            following=self._following(),
            next_epoch=self._next_epoch,
            settings=tuple(getattr(self, name) for name in _READ_WITH),
        )
        kind = PlacedDelivery if self._is_placed else TransformedDelivery
        return kind(fetching=fetching, callbacks=callbacks)
