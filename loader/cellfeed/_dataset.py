"""The data set that a training loop iterates over."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import DTypeLike, NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cellfeed._collection import Collection
from cellfeed._epochs import EpochCounter
from cellfeed._errors import ParameterError, require_integer, require_positive
from cellfeed._memory import MemoryPool
from cellfeed._minibatch import Cells, require_torch_dtype
from cellfeed._multi_indexable import MultiIndexable, count_indexable_rows
from cellfeed._plan import EpochPlan
from cellfeed._prefetch import one_ahead
from cellfeed._reader import PlannedRead, Reader
from cellfeed._recommendation import Recommending, read_recommendation
from cellfeed._strategies import BlockShuffling, SamplingStrategy
from cellfeed.machine import threads_per_process

__all__ = ["CellDataset"]

# What waits in a worker that reads ahead by itself: enough to even out a slow step.
_MINIBATCHES_AHEAD = 8
# Each takes a file descriptor while it waits, of which a process often has 1024.
_MOST_MINIBATCHES_AHEAD = 512


class CellDataset(IterableDataset[Any]):
    """Minibatches of a collection in the order of a sampling strategy.

    Each fetch reads ``batch_size * fetch_factor`` rows in storage order, shuffles them in memory
    and deals them out as minibatches. Every iteration is another epoch; epoch number and
    ``seed`` fix its order. Works in a plain loop, and in a `torch.utils.data.DataLoader` with
    ``batch_size=None`` and any number of workers: each worker takes every n-th fetch, so that
    minibatches have the same rows whatever the number of workers, and come in an order that
    depends on it. `loader` makes such a DataLoader.

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
        ``collection[rows]``.
    fetch_transform
        ``fetch_transform(fetched)`` changes a whole fetch. Over a `Collection` it gets `Cells`
        that are valid until the next fetch.
    batch_callback
        ``batch_callback(transformed, indices)`` takes a minibatch out of a fetch in place of
        ``transformed[indices]``.
    batch_transform
        ``batch_transform(batch)`` changes a minibatch.
    rank, world_size
        This process and the number of processes that train together; asked of
        torch.distributed if None, where it is initialised.
    seed
        Fixes the order of all epochs. If None, one is drawn, and with several ranks the first
        rank's is used by all.
    dense
        Whether minibatches of a `Collection` carry dense ``X`` even if it is stored sparse.
    dtype
        Dtype of ``X`` in minibatches of a `Collection`, such as ``"float32"``; that of the
        collection if None.
    num_threads
        Threads that read and decode a `Collection`, in each process; if None, as many as there
        are processors that this process may use, divided among worker processes.

    Raises
    ------
    ParameterError
        A size is below one, the strategy asks for rows that do not exist, or ``seed`` is None
        with several ranks and torch.distributed is not initialised.

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
        dtype: DTypeLike | torch.dtype | None = None,
        num_threads: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(strategy, SamplingStrategy):
            msg = f"`strategy` must be a SamplingStrategy, but got {strategy!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        self.collection = collection
        self.strategy = strategy
        self.batch_size = require_positive("batch_size", batch_size)
        self.fetch_factor = require_positive("fetch_factor", fetch_factor)
        self.drop_last = drop_last
        self.fetch_callback = fetch_callback
        self.fetch_transform = fetch_transform
        self.batch_callback = batch_callback
        self.batch_transform = batch_transform
        self.dense = dense
        self.dtype = None if dtype is None else _numpy_dtype(dtype)
        if isinstance(collection, Collection) and fetch_callback is None:
            require_torch_dtype(collection.dtype if self.dtype is None else self.dtype)
        self.num_threads = (
            None if num_threads is None else require_positive("num_threads", num_threads)
        )
        self.num_workers = 0
        self.rank, self.world_size = _ranks(rank, world_size)
        self.seed = _common_seed(seed, self.world_size)
        self._n_rows = _n_rows(collection)
        self._epochs = EpochCounter()
        self._pool = MemoryPool()  # for all epochs, so that memory is new to the system only once
        if self.plan(epoch=0).n_minibatches == 0:
            msg = (
                f"nothing is left of {self._n_rows:,} rows, since `drop_last` drops what does not "
                "fill a minibatch or a block; use smaller sizes, or keep what is left over"
            )
            raise ParameterError(msg)
        if isinstance(collection, Collection) and fetch_callback is None:
            collection.load_tables()  # once, for all worker processes that are forked

    @classmethod
    def from_autotune(
        cls, collection: Any, result: str | os.PathLike[str] | Recommending, **parameters: Any
    ) -> "CellDataset":
        """Make a data set with the configuration that ``autotune`` recommended.

        Parameters
        ----------
        collection
            What is read; see the class.
        result
            The ``autotune.json``, or what `cellfeed_tuner.autotune` returned. Its block size,
            batch size, fetch factor and, for `loader`, number of workers are used.
        **parameters
            Other parameters of the class, such as ``seed``.

        Raises
        ------
        PathError
            There is no such file.
        FormatError
            The file is not a result of ``autotune``, or the result recommends nothing.
        """
        recommended = read_recommendation(result)
        strategy = BlockShuffling(block_size=recommended.block_size)
        sizes = {
            "batch_size": recommended.batch_size,
            "fetch_factor": recommended.fetch_factor,
        }
        dataset = cls(collection, strategy, **(sizes | parameters))
        dataset.num_workers = recommended.num_workers
        return dataset

    def __len__(self) -> int:
        """Return the number of minibatches that an epoch delivers to this rank."""
        return self.plan(epoch=0).n_minibatches

    def __iter__(self) -> Iterator[Any]:
        # The epoch is claimed here and not in the generator, which starts at its first use.
        plan = self.plan(epoch=self._epochs.claim())
        worker = get_worker_info()
        if worker is None:
            return self._minibatches(plan, range(plan.n_fetches))
        return self._minibatches(plan, range(worker.id, plan.n_fetches, worker.num_workers))

    @property
    def buffer_bytes(self) -> int:
        """Memory that minibatches of a `Collection` take in each process that reads, in bytes.

        Two fetches: one is dealt out while the next is read. It is kept from epoch to epoch, as
        long as the data set lives. Computed from the mean size of a
        cell, so that it holds for blocks of usual cells; dense minibatches that are made of
        sparse ones ahead come on top.
        """
        return int(
            2 * self.batch_size * self.fetch_factor * self.collection.mean_row_bytes(self.dtype)
        )

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch, as after a restart.

        Not needed otherwise: every iteration is the next epoch by itself.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer.
        """
        self._epochs.next_epoch = require_integer("epoch", epoch)

    def plan(self, *, epoch: int) -> EpochPlan:
        """Return the plan of an epoch: which rows come when."""
        return EpochPlan(
            strategy=self.strategy,
            n_rows=self._n_rows,
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            drop_last=self.drop_last,
            seed=self.seed,
            epoch=epoch,
            rank=self.rank,
            world_size=self.world_size,
        )

    def loader(self, num_workers: int | None = None, **options: Any) -> DataLoader[Any]:
        """Return a DataLoader that passes minibatches on as they are.

        Workers read one fetch ahead by themselves. Where a function of yours works on a whole
        fetch, or reads it, as many minibatches wait as a fetch has, so that the training loop
        goes on meanwhile.

        Parameters
        ----------
        num_workers
            Worker processes; what ``autotune`` recommended if None (0 if it was not asked).
        **options
            Other parameters of `torch.utils.data.DataLoader`.
        """
        workers = self.num_workers if num_workers is None else num_workers
        if workers:
            ahead = _MINIBATCHES_AHEAD if self._is_placed else self.fetch_factor + 1
            most = max(2, _MOST_MINIBATCHES_AHEAD // workers)
            options.setdefault("prefetch_factor", min(ahead, self.fetch_factor + 1, most))
        return DataLoader(self, batch_size=None, num_workers=workers, **options)

    @property
    def _is_read_ahead(self) -> bool:
        """Whether fetches are read here, by threads, rather than by a function or an indexable."""
        return isinstance(self.collection, Collection) and self.fetch_callback is None

    @property
    def _is_placed(self) -> bool:
        """Whether rows go straight into the minibatches that they leave in."""
        is_transformed = self.fetch_transform is not None or self.batch_callback is not None
        return self._is_read_ahead and not is_transformed

    def _minibatches(self, plan: EpochPlan, fetch_numbers: range) -> Iterator[Any]:
        """Deal out an epoch's minibatches."""
        if self._is_placed:
            return self._from_collection(plan, fetch_numbers)
        if self._is_read_ahead:
            return self._from_transformed(plan, fetch_numbers)
        return self._from_indexable(plan, fetch_numbers)

    def _from_collection(self, plan: EpochPlan, fetch_numbers: range) -> Iterator[Any]:
        """Rows go straight into the minibatches that they leave in."""
        with self._reader() as reader, self._fetched(reader, plan, fetch_numbers) as fetches:
            for groups in fetches:
                for cells in reader.densified(groups) if self.dense else groups:
                    batch = cells.to_torch()
                    del cells  # so that the memory is free as soon as the consumer drops it
                    yield batch if self.batch_transform is None else self.batch_transform(batch)

    def _from_transformed(self, plan: EpochPlan, fetch_numbers: range) -> Iterator[Any]:
        """Whole fetches go through the user's functions, which take minibatches out of them."""
        orders = (plan.fetch(number).order for number in fetch_numbers)
        with (
            self._reader() as reader,
            self._fetched(reader, plan, fetch_numbers, as_one=True) as fetches,
        ):
            for groups, order in zip(fetches, orders, strict=True):
                yield from self._deal(next(groups).to_scipy(), order)

    @contextmanager
    def _fetched(
        self, reader: Reader, plan: EpochPlan, fetch_numbers: range, *, as_one: bool = False
    ) -> Iterator[Iterator[Iterator[Cells]]]:
        """Read fetches ahead: one is planned while the one before it is read.

        Each comes as minibatches, or as one group of distinct rows, ascending.
        """

        def planned(number: int) -> PlannedRead:
            fetch = plan.fetch(number)
            order, size = fetch.order, self.batch_size
            if as_one:
                order, size = np.arange(fetch.rows.size), fetch.rows.size
            read = reader.plan(fetch.rows, order, size)
            read.announce()  # the system fetches it while the fetch before is decoded
            return read

        with (
            one_ahead(planned, fetch_numbers) as plans,
            one_ahead(reader.read_planned, plans) as fetches,
        ):
            yield fetches

    def _from_indexable(self, plan: EpochPlan, fetch_numbers: range) -> Iterator[Any]:
        read = self._read_function()
        for number in fetch_numbers:
            fetch = plan.fetch(number)
            yield from self._deal(read(fetch.rows), fetch.order)

    def _deal(self, fetched: Any, order: NDArray[np.intp]) -> Iterator[Any]:
        if self.fetch_transform is not None:
            fetched = self.fetch_transform(fetched)
        for start in range(0, order.size, self.batch_size):
            yield self._minibatch(fetched, order[start : start + self.batch_size])

    def _reader(self) -> Reader:
        worker = get_worker_info()
        n_processes = 1 if worker is None else worker.num_workers
        threads = self.num_threads or threads_per_process(n_processes)
        return Reader(self.collection, dtype=self.dtype, num_threads=threads, pool=self._pool)

    def _read_function(self) -> Callable[[NDArray[Any]], Any]:
        collection, callback = self.collection, self.fetch_callback
        if callback is not None:
            return lambda rows: callback(collection, rows)
        return lambda rows: _in_memory(collection[rows])

    def _minibatch(self, fetched: Any, indices: NDArray[Any]) -> Any:
        if self.batch_callback is not None:
            batch = self.batch_callback(fetched, indices)
        else:
            batch = fetched[indices]
        if isinstance(batch, Cells):
            batch = batch.to_torch(dense=self.dense)
        return batch if self.batch_transform is None else self.batch_transform(batch)


def _in_memory(fetched: Any) -> Any:
    """Read now what AnnData (backed) and AnnCollection would read again for each minibatch."""
    if isinstance(fetched, MultiIndexable):
        return MultiIndexable(
            *map(_in_memory, fetched), names=fetched.names, unstructured=fetched.unstructured
        )
    for method in ("to_memory", "to_adata"):
        if hasattr(fetched, method):
            return getattr(fetched, method)()
    return fetched


def _n_rows(collection: Any) -> int:
    if isinstance(collection, str | os.PathLike):
        msg = f"`collection` is the path {str(collection)!r}; open it with `open_collection`"
        raise ParameterError(msg)
    n_rows = count_indexable_rows(collection)
    if n_rows < 1:
        msg = "the collection has no rows; there is nothing to iterate over"
        raise ParameterError(msg)
    return n_rows


def _numpy_dtype(dtype: DTypeLike | torch.dtype) -> np.dtype[Any]:
    try:
        if isinstance(dtype, torch.dtype):
            numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        else:
            numpy_dtype = np.dtype(dtype)
    except TypeError:
        numpy_dtype = np.dtype(object)
    of_torch = numpy_dtype.isnative and numpy_dtype.itemsize <= np.dtype(np.float64).itemsize
    if numpy_dtype.kind not in "biuf" or not of_torch:
        msg = (
            f"`dtype` must be a numeric dtype that torch has, such as 'float32', but got {dtype!r}"
        )
        raise ParameterError(msg)
    return numpy_dtype


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        msg = f"`rank` and `world_size` go together, but got {rank=}, {world_size=}"
        raise ParameterError(msg)
    if rank is not None and world_size is not None:
        return require_integer("rank", rank), require_positive("world_size", world_size)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _common_seed(seed: int | None, world_size: int) -> int:
    if seed is not None:
        return require_integer("seed", seed)
    drawn = [secrets.randbits(63)]
    if world_size > 1:
        if not (dist.is_available() and dist.is_initialized()):
            msg = (
                f"`seed` must be given with {world_size=}, so that all ranks have one order; "
                "or initialise torch.distributed first, and one is shared"
            )
            raise ParameterError(msg)
        dist.broadcast_object_list(drawn, src=0)
    return drawn[0]
