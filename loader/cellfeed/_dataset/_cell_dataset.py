"""`CellDataset`, which a training loop iterates over."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike, NDArray

from cellfeed._collection import Collection
from cellfeed._collection._indexables import count_rows
from cellfeed._dataset._fetching import (
    AnyTransform,
    Callbacks,
    CollectionReading,
    Delivery,
    Fetching,
    IndexedDelivery,
    Minibatches,
    PlacedDelivery,
    TransformedDelivery,
    float_dtypes,
    transforms_of,
)
from cellfeed._dataset._loader import (
    MinibatchLoader,
    as_it_is,
    check_loader,
    context_without_threads,
    n_that_fit,
    sent_whole,
    to_be_called,
)
from cellfeed._dataset._planned import (
    AnyDtype,
    PlannedDataset,
    numpy_dtypes,
    require_callables,
    require_that_they_apply,
    warn_if_too_large,
)
from cellfeed._dataset._recommendation import Recommending, read_recommendation
from cellfeed._dataset._state import as_json
from cellfeed._dataset._workers import pool_of_minibatches
from cellfeed._decode import Verify, check_verify
from cellfeed._errors import ParameterError, require_positive
from cellfeed._fetch import Pools, Transforms
from cellfeed._rows import dtypes_of, require_torch_dtype
from cellfeed._torch import HAS_TORCH, require_torch
from cellfeed.sampling import SamplingStrategy, Share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    """Iterate over minibatches of a collection, in the order of a sampling strategy.

    Each fetch reads ``batch_size * fetch_factor`` rows in storage order, shuffles them in memory
    and delivers them as minibatches. Each iteration is a new epoch, whose order follows from
    the epoch number, ``seed`` and these parameters. A dataset works in a plain loop, and `loader`
    makes a DataLoader of it with any number of workers; a `torch.utils.data.DataLoader` with
    ``batch_size=None`` works, too. Each worker takes every n-th fetch, so the number of workers
    changes the order of minibatches but not the rows in each.

    What an iteration yields depends on the collection:

    - A `Collection` yields a `Minibatch`: ``X`` is a torch tensor, sparse CSR or dense as it is
      stored, ``obs`` has a tensor for each column, and ``rows`` has the row numbers.
    - With a ``fetch_transform``, ``batch_callback`` or ``fetch_callback``, a `Collection` passes
      `Cells` in NumPy and SciPy to these functions. If they return `Cells`, these are yielded as a
      `Minibatch`; anything else is yielded unchanged.
    - Anything else yields what indexing it returns: NumPy arrays for a NumPy array, SciPy CSR for
      SciPy CSR, a `MultiIndexable` for a `MultiIndexable`, AnnData in memory for AnnData. Only a
      DataLoader turns NumPy arrays into tensors, as it does for any dataset; `loader` does so
      unless ``as_torch=False``.

    A ``batch_transform`` is applied last, and its result is yielded. With ``as_torch=False``, or
    if torch is not installed, `Cells` in NumPy and SciPy replace `Minibatch`.

    Parameters
    ----------
    collection
        A `Collection`, or any object with ``len()`` that can be indexed with an array of ascending
        row numbers: NumPy arrays, memory maps, SciPy CSR, `MultiIndexable`, AnnData (in memory
        or backed), AnnCollection.
    strategy
        Which rows an epoch visits, and in which order.
    batch_size
        Number of rows in a minibatch.
    fetch_factor
        Number of minibatches in a fetch. A larger factor takes more memory, reads faster and mixes
        better.
    drop_last
        What to do if the rows do not divide evenly; see `EpochPlan`.
    fetch_callback
        ``fetch_callback(collection, rows)`` reads rows (ascending, int64) in place of
        ``collection[rows]``. Fetches are then read one after another, and nothing is read ahead.
    fetch_transform
        ``fetch_transform(fetched)`` changes a whole fetch. With a `Collection` it gets `Cells`
        that are valid until the next fetch.
    batch_callback
        ``batch_callback(transformed, indices)`` takes a minibatch from a fetch, in place of
        ``transformed[indices]``.
    batch_transform
        ``batch_transform(batch)`` changes a minibatch. Each worker applies it to the minibatches
        that it delivers; without workers it runs in the training loop. If workers are spawned,
        the function must be picklable.
    rank, world_size
        The rank of this process, and the number of processes that train together. If None, both
        are taken from torch.distributed when an epoch begins; if that is not initialised, this
        process reads everything. ``rank=0, world_size=1`` always reads everything, whatever the
        number of ranks. One of the ranks may take extra minibatches, for example to inspect them:
        an iteration that it breaks off by itself does not count. If ranks have trained in different
        epochs, all of them raise an error; then call `set_epoch` before each epoch on all ranks.
    device_mesh
        The dimension of a `torch.distributed.device_mesh` along which the data differ, such as
        ``mesh["dp"]``, in place of ``rank`` and ``world_size``. Ranks that differ only in other
        dimensions, such as those of one tensor-parallel group, get identical minibatches. All
        processes of torch.distributed must make the dataset; if only some do, give ``rank`` and
        ``world_size`` instead.
    seed
        Determines the order of all epochs. If None, a seed is drawn; with several ranks, all use
        the seed of the rank that asks first once they have met.
    dense
        Whether to make the sparse elements of a `Collection` dense in minibatches.
    dtype
        Dtype of all elements in minibatches of a `Collection`, such as ``"float32"``, or a
        mapping with the dtypes of some elements, such as ``{"X": "float32"}``. If None, the
        dtypes of the collection. A ``fetch_callback`` chooses its own.
    num_threads
        Number of threads in each process that read and decode a `Collection`. If None, the number
        of processors available to this process, divided among its worker processes and the ranks
        on this machine. A ``fetch_callback`` uses its own threads.
    transform
        One or several of `cellfeed.transforms`, such as ``[NormalizeTotal(1e4), Log1p()]``, applied
        in this order to the values of the first element of a `Collection`; or a mapping from names
        of elements to their transforms. The decoding threads apply them when they write rows into
        minibatches, before any of your functions runs. Values are then float32, or float64 if they
        are stored as float64 or ``dtype`` asks for it.
    transform_threads
        Number of threads in each process that run ``batch_transform``, on as many minibatches
        ahead. This pays off if the function releases the GIL, as NumPy and torch do. If 0,
        it runs where the minibatches are requested.
    prefetch
        How many fetches of a `Collection` are planned and requested beyond the one being decoded,
        which is itself one ahead of the one being delivered. If None, 1 for local files, and 8 if
        any file is on a server or in an object store. Changes neither minibatches nor their order.
    prefetch_next_epoch
        Whether to read the first fetches of the next epoch while the last ones of this epoch are
        delivered, if the epoch is consumed to its end and worker processes, if any, are
        persistent. Changes neither minibatches nor states. The rows that were read, one fetch, stay
        in memory until the next epoch begins, another epoch is requested or this dataset is
        dropped. After the last epoch they were read for nothing, so this is off by default.
    prefetch_bytes
        Maximum number of compressed bytes in flight from servers and object stores, in each
        process, whatever ``prefetch`` is. One fetch may always be in flight.
    verify
        How often to decompress a chunk of a `Collection` to its end, where its checksum is and
        where its size can be checked: ``"first"``, the first time that each process reads the
        chunk (forked workers share what they have checked), and after that only as far as its rows
        are needed; ``"always"``, each time; or ``"never"``, which is fastest from the first epoch
        on, and delivers the contents of a damaged chunk as long as it can be decompressed
        that far.
    as_torch
        Whether minibatches are torch tensors. If not, they are in NumPy and SciPy, for JAX or
        scikit-learn, also from a `loader`.

    Raises
    ------
    ParameterError
        A size is below one; the strategy asks for rows that do not exist; ``rank`` and
        ``world_size`` are invalid; ``dense``, ``dtype``, ``num_threads``, ``transform``,
        ``prefetch``, ``prefetch_next_epoch`` or ``verify`` is given but does not apply to this
        collection; ``transform`` does not fit an element or its dtype; or ``seed`` is None with
        several ranks and torch.distributed is not initialised.
        Also when an epoch begins: the ranks have met, but this process has already used a seed
        that it drew for itself; or ranks have trained in different epochs.

    Warns
    -----
    UserWarning
        A file of a `Collection` is read slowly; once per file, see `Collection.describe`.
        Fetches take more memory than is available.

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
        require_callables(
            fetch_callback=fetch_callback,
            fetch_transform=fetch_transform,
            batch_callback=batch_callback,
            batch_transform=batch_transform,
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
            if collection.knows_row_lengths:
                warn_if_too_large(self._least_bytes)

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
        """Make a dataset with the configuration that ``autotune`` recommended.

        Parameters
        ----------
        collection
            See the class.
        result
            Path of the ``autotune.json``, or the result that `cellfeed_tuner.autotune` returned.
            The dataset takes its block size, batch size and fetch factor, its ``prefetch``,
            ``num_threads`` and ``align`` if it has them, and the number of workers for `loader`.
        strategy
            Replaces the strategy that was tuned (`BlockShuffling` unless another was given) with
            the recommended block size. Required if that strategy was made with arrays, such as
            weights, since a result does not contain them.
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
            The file is not a result of ``autotune``, the result recommends nothing, or it reports
            that the measured loader delivered wrong data.
        ParameterError
            Both ``strategy`` and ``indices`` are given, a strategy is required, or a parameter of
            the class is invalid.

        Warns
        -----
        UserWarning
            The result was measured on another collection, batch size, strategy or machine.
        """
        if strategy is not None and indices is not None:
            msg = "`indices` and `strategy` cannot be combined; pass the indices to the strategy"
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
        """Number of rows in a fetch, ``batch_size * fetch_factor``."""
        return self.batch_size * self.fetch_factor

    @property
    def buffer_bytes(self) -> int:
        """Estimated memory for minibatches of a `Collection` in each reading process, in bytes.

        This is the size of two fetches: one is delivered while the next is read. The memory is
        kept for all epochs, as long as the dataset exists. The estimate uses the mean size of a
        cell, so blocks of unusually large cells take more. It excludes dense minibatches that are
        made from sparse ones ahead of time, and up to ``prefetch_bytes`` that come from a server or
        by direct I/O.
        """
        return int(2 * self.fetch_size * self.collection.mean_row_bytes(self.dtype))

    @to_be_called
    def loader(self, num_workers: int | None = None, **options: Any) -> MinibatchLoader:
        """Return a DataLoader over the minibatches, whose position can be saved and restored.

        Workers read ahead; see ``prefetch``. If one of your functions reads or changes
        whole fetches, as many minibatches are queued as a fetch has, so that the training
        loop continues meanwhile. Workers read rows into memory that they share with this process,
        unless one of your functions changes the rows, and reuse that memory when nothing refers to
        its minibatches any longer. Each worker takes `buffer_bytes`, plus the minibatches that are
        queued or in use. This memory needs no space in ``/dev/shm``. If a `Collection` is on a
        server, in an object store or a TileDB-SOMA experiment, workers are not forked, since
        threads of this process may be reading it: the start method is "forkserver" unless you pass
        another ``multiprocessing_context``, so a script needs ``if __name__ == "__main__":``.

        Parameters
        ----------
        num_workers
            Number of worker processes. If None, the number that ``autotune`` recommended, or 0
            without a recommendation.
        **options
            Other parameters of `torch.utils.data.DataLoader`.

        Raises
        ------
        DeliveryError
            During iteration: the workers delivered fewer minibatches than the epoch has.
        ParameterError
            ``num_workers`` is negative or not an integer, or an option belongs to the dataset.
        ImportError
            torch is not installed.
        """
        require_torch("`loader`")
        if not self.as_torch:
            options.setdefault("collate_fn", as_it_is)
        workers = self.num_workers if num_workers is None else num_workers
        check_loader(workers, options)
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
    def _least_bytes(self) -> float:
        """Estimated memory for fetches of a `Collection`, and a minibatch, in a reading process."""
        n_rows = min(self.fetch_size, self._n_rows)
        n_fetches = 2 if n_rows < self._n_rows else 1
        minibatch_bytes = self._minibatch_bytes * min(1.0, self._n_rows / self.batch_size)
        row_bytes = float(self.collection.mean_row_bytes(self.dtype))
        return n_fetches * n_rows * row_bytes + minibatch_bytes

    @property
    def _minibatch_bytes(self) -> int:
        """Mean size of a minibatch as it is read, in bytes; 0 if unknown."""
        if not isinstance(self.collection, Collection):
            return int(getattr(self.collection, "nbytes", 0) / self._n_rows * self.batch_size)
        row_bytes = self.collection.mean_row_bytes(self.dtype, dense=self.dense)
        return int(self.batch_size * row_bytes)

    @property
    def _is_read_ahead(self) -> bool:
        """Whether threads of this class read fetches, not a user's function or an indexable."""
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
        """Whether rows are read directly into minibatches."""
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
        """Return how to make minibatches, from the current attributes of this dataset."""
        if not self._is_read_ahead:
            return IndexedDelivery(
                collection=self.collection,
                fetch_callback=self.fetch_callback,
                callbacks=callbacks,
            )
        # A function of the user might keep the minibatches that it gets.
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
