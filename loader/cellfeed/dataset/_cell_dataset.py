"""`CellDataset`, which a training loop iterates over."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

import cellfeed.sampling._kernels  # noqa: F401 - plans use compiled code if this is loaded
from cellfeed._errors import ParameterError, require_positive
from cellfeed._lazy import sp
from cellfeed._torch import HAS_TORCH, get_worker_info
from cellfeed.collection import Collection, count_rows, in_memory
from cellfeed.collection._on_device import Delivery, DeviceRows
from cellfeed.dataset import _parameters
from cellfeed.dataset._parameters import AnyDtype, AnyTransform, ReadOptions
from cellfeed.dataset._ranks import CommonSeed, Ranks
from cellfeed.dataset._recommendation import Recommendation
from cellfeed.dataset._resumable import ResumableDataset
from cellfeed.dataset._run import Beginning
from cellfeed.dataset._state import as_json, data_identity, read_identity, strategy_identity
from cellfeed.dataset._workers import start_here
from cellfeed.decode import Counter
from cellfeed.fetch import (
    Pools,
    Reader,
    Transforms,
    fetches_of,
    prefetched,
    split_steps,
)
from cellfeed.machine import threads_per_process
from cellfeed.rows import Cells, dtypes_of, require_torch_dtype
from cellfeed.sampling import (
    EpochPlan,
    Fetch,
    SamplingStrategy,
    Share,
    derive_key,
)

if TYPE_CHECKING:
    from cellfeed.rows._minibatch import Minibatch

Minibatches: TypeAlias = Generator[Any, None, None]
_Cells = TypeVar("_Cells", bound="Cells | Minibatch")

# Over a network: what arrives while one is decoded is less than what a round trip takes.
_REMOTE_PREFETCH = 8
# What is drawn in an epoch, after the purposes of its plan.
_TOKENS = 2


class CellDataset(ResumableDataset):
    """Iterate over minibatches of a collection, in the order of a sampling strategy.

    Each fetch reads ``batch_size * fetch_factor`` rows in storage order, shuffles them in memory
    and delivers them as minibatches. Each iteration is a new epoch, whose order follows from
    the epoch number, ``seed`` and these parameters. A dataset works in a plain loop, and `loader`
    makes a DataLoader of it with any number of workers, which do not change the order.

    What an iteration yields depends on the collection:

    - A `Collection` yields a `Minibatch`: ``X`` is a torch tensor, sparse CSR or dense as it is
      stored, ``obs`` has a tensor for each column, and ``rows`` has the row numbers.
    - With a ``fetch_transform``, a `Collection` passes `Cells` in NumPy and SciPy to this function.
      If it returns `Cells`, minibatches of these are yielded as a `Minibatch`; what is indexed in
      anything else is yielded unchanged.
    - Anything else yields what indexing it returns: NumPy arrays for a NumPy array, SciPy CSR for
      SciPy CSR, AnnData in memory for AnnData. Only a DataLoader turns NumPy arrays into tensors,
      as it does for any dataset; `loader` does so unless ``as_torch=False``.

    A ``batch_transform`` is applied last, and its result is yielded. With ``as_torch=False``, or
    if torch is not installed, `Cells` in NumPy and SciPy replace `Minibatch`.

    Parameters
    ----------
    collection
        A `Collection`, or any object with ``len()`` that can be indexed with an array of ascending
        row numbers: NumPy arrays, memory maps, SciPy CSR, AnnData (in memory or backed),
        AnnCollection. `cellfeed.scdataset.scDataset` reads with functions of yours.
    strategy
        Which rows an epoch visits, and in which order.
    batch_size
        Number of rows in a minibatch. If an epoch has fewer, all of them are one minibatch.
    fetch_factor
        Number of minibatches in a fetch. A larger factor takes more memory, reads faster and mixes
        better, up to the size of an epoch. Two fetches must fit in the memory of this machine.
    drop_last
        What to do if the rows do not divide evenly; see `EpochPlan`.
    fetch_transform
        ``fetch_transform(fetched)`` changes a whole fetch. With a `Collection` it gets `Cells`
        that are valid until the next fetch.
    batch_transform
        ``batch_transform(batch)`` changes a minibatch. Each worker applies it to the minibatches
        that it delivers; without workers it runs in the training loop. If workers are spawned,
        the function must be picklable.
    rank, world_size
        The rank of this process, and the number of processes that train together. If None, both
        are taken from torch.distributed when an epoch begins; if that is not initialised, this
        process reads everything. Beginning an epoch is then collective, as a barrier is: all ranks
        iterate, and what differs between them is an error on all. Look at minibatches of one rank
        with `peek`. Given values are not compared: ``rank=0, world_size=1`` reads everything, for a
        dataset that one rank uses by itself. Ranks with the same values, such as those of one
        tensor-parallel group, get identical minibatches.
    streams
        Divide an epoch into so many streams, a multiple of the number of ranks; if None, one for
        each rank. A rank joins the minibatches of its streams, so all ranks together deliver the
        same cells in each step, however many they are; and a run that was stopped goes on with
        another number of ranks. ``batch_size`` is that of a stream.
    seed
        Determines the order of all epochs; at least 0. If None, one is drawn when the first epoch
        begins, by the first rank for all; until then `seed` is None.
    dense
        Whether to make the sparse elements of a `Collection` dense in minibatches. Many operations
        of torch do not take sparse ones ("Sparse CSR tensors do not have strides", "Only batched
        sparse compressed (non-block) tensors are supported").
    dtype
        Dtype of all elements in minibatches of a `Collection`, such as ``"float32"``, or a
        mapping with the dtypes of some elements, such as ``{"X": "float32"}``. If None, the
        dtypes of the collection. SciPy has no float16: sparse rows with ``as_torch=False``, and all
        that a ``fetch_transform`` returns, are float32 then.
    transform
        One or several of `cellfeed.transforms`, such as ``[NormalizeTotal(1e4), Log1p()]``, applied
        in this order to the values of the first element of a `Collection`; or a mapping from names
        of elements to their transforms. The decoding threads apply them when they write rows into
        minibatches, before any of your functions runs. Values are then float32, or float64 if they
        are stored as float64 or ``dtype`` asks for it. At the end may be one of
        `cellfeed.tokenizers`.
    transform_threads
        Number of threads in each process that run ``batch_transform``, on as many minibatches
        ahead. This pays off if the function releases the GIL, as NumPy and torch do. If 0,
        it runs where the minibatches are requested.
    read_options
        How each process reads a `Collection`: threads, fetches ahead, and how often chunks are
        checked. Changes neither minibatches nor their order.
    as_torch
        Whether minibatches are torch tensors. If not, they are in NumPy and SciPy, for JAX or
        scikit-learn, also from a `loader`.

    Raises
    ------
    ParameterError
        A size is below one; ``seed`` is negative; fetches of a `Collection` would take more memory
        than this machine has; the strategy asks for rows that do not exist; ``rank`` and
        ``world_size`` are invalid; ``dense``, ``dtype``, ``transform`` or ``read_options`` is given
        but does not apply to this collection; a function, a tokenizer or ``as_torch=False`` needs
        cells in memory, but they were loaded on a device; ``transform`` does not fit an element or
        its dtype; or ``seed`` is None where ``world_size`` is given. Also when an epoch begins:
        ranks begin different epochs, or ``streams`` is no multiple of their number. And where an
        attribute is set, since all are fixed.
    DeliveryError
        When an epoch begins: a rank does not come.

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
    >>> dataset  # doctest: +ELLIPSIS
    CellDataset(ndarray, BlockShuffling(block_size=2, ...), batch_size=4, fetch_factor=16, ...)
    >>> sorted(np.concatenate(list(dataset)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    _latest_plan: tuple[Beginning, EpochPlan] | None = None

    def __init__(
        self,
        collection: Any,
        strategy: SamplingStrategy,
        batch_size: int,
        fetch_factor: int = 16,
        *,
        drop_last: bool = False,
        fetch_transform: Callable[[Any], Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        streams: int | None = None,
        dense: bool = False,
        dtype: "AnyDtype | Mapping[str, AnyDtype] | None" = None,
        transform: AnyTransform | None = None,
        transform_threads: int = 0,
        as_torch: bool = True,
        read_options: ReadOptions | None = None,
    ) -> None:
        n_rows = count_rows(collection, is_indexed=self._is_indexed)
        super().__init__(Ranks(rank, world_size), streams)
        if not isinstance(strategy, SamplingStrategy):
            msg = f"`strategy` must be a SamplingStrategy, but got {strategy!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        self.collection = collection
        self.strategy = strategy.bound_to(collection)
        self.batch_size = require_positive("batch_size", batch_size)
        self.fetch_factor = require_positive("fetch_factor", fetch_factor)
        self.drop_last = drop_last
        self._n_rows = n_rows
        self._seed = CommonSeed(seed, self._ranks)
        # Arrays are hashed, and files looked at, once.
        self._known_identity: dict[str, Any] | None = None
        self.plan_on(*self._ranks.look())  # which refuses what cannot be
        _parameters.require_callables(
            fetch_transform=fetch_transform, batch_transform=batch_transform
        )
        self.fetch_transform = fetch_transform
        self.batch_transform = batch_transform
        self.dense = dense
        self.as_torch = as_torch
        self.dtype = _parameters.numpy_dtypes(dtype)
        self.transform: Transforms = {}
        if self._is_read_ahead:
            elements = collection.elements
            self.transform = _parameters.transforms_of(
                transform, elements, are_placed=self._is_placed
            )
            self.dtype = _parameters.float_dtypes(elements, self.dtype, self.transform)
            for each in dtypes_of(elements, self.dtype).values() if as_torch else ():
                require_torch_dtype(each)
        else:
            self._require_not_given(dense=dense, transform=transform, read_options=read_options)
        self._require_gathered()
        if self.strategy.n_companions and not (self._is_read_ahead and self._is_taken_here):
            msg = (
                "controls and neighbours come beside the cells of a Collection, which cellfeed "
                f"reads and takes minibatches from, but got a {type(collection).__name__}; open it "
                "with `open_collection`, and change minibatches in `batch_transform`"
            )
            raise ParameterError(msg)
        if not isinstance(read_options, ReadOptions | None):
            msg = f"`read_options` must be ReadOptions, but got {read_options!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        self.read_options = ReadOptions() if read_options is None else read_options
        self.transform_threads = (
            require_positive("transform_threads", transform_threads) if transform_threads else 0
        )
        # For all epochs, so that memory is new to the system only once.
        self._pools = Pools()
        if self._is_read_ahead and self._on_device is None:
            collection.warn_if_slow(self.dtype)
            collection.load_tables()  # once, for all worker processes that are forked
            if collection.knows_row_lengths:
                n_of_epoch = self.strategy.n_positions(n_rows)
                delivered = self.minibatch_bytes * min(1.0, n_of_epoch / self.batch_size)
                _parameters.check_memory(self.buffer_bytes + delivered)
        self._is_made = True

    def __repr__(self) -> str:
        of = self.collection
        shown = repr(of) if isinstance(of, Collection) else type(of).__name__
        with np.printoptions(threshold=4, edgeitems=1):  # strategies may have weights of all cells
            parts = [shown, repr(self.strategy)]
        parts += [
            f"{name}={getattr(self, name)}" for name in ("batch_size", "fetch_factor", "dense")
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def from_autotune(
        cls,
        collection: Any,
        result: Any,
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
            The dataset takes its block size, batch size and fetch factor, its ``align``, its
            ``prefetch`` and ``num_threads`` as `ReadOptions` if it has them, and the number of
            workers for `loader`.
        strategy
            Replaces the strategy that was tuned (`BlockShuffling` unless another was given) with
            the recommended block size. Required if that strategy was made with arrays, such as
            weights, since a result does not contain them.
        indices
            The rows to visit, such as those of a training set, in blocks of the recommended
            size; all rows if None.
        **parameters
            Other parameters of the class, such as ``seed``. What `ReadOptions` leave open is as
            recommended.

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
        recommended = Recommendation(result)
        settings = recommended.settings
        if strategy is None:
            strategy = recommended.strategy_of(indices)
        sizes: dict[str, Any] = {name: settings[name] for name in ("batch_size", "fetch_factor")}
        if isinstance(collection, Collection) and (settings["prefetch"] or settings["num_threads"]):
            given = parameters.pop("read_options", None) or ReadOptions()
            sizes["read_options"] = replace(
                given,
                num_threads=given.num_threads or settings["num_threads"],
                prefetch=given.prefetch or settings["prefetch"],
            )
        dataset = cls(collection, strategy, **(sizes | parameters))
        recommended.warn_of_differences(collection, dataset.batch_size, strategy)
        dataset._num_workers = settings["num_workers"]
        return dataset

    @property
    def fetch_size(self) -> int:
        """Number of rows in a fetch, ``batch_size * fetch_factor`` for each stream of this rank."""
        return self.batch_size * self.fetch_factor * self._streams_per_rank

    @property
    def _streams_per_rank(self) -> int:
        return 1 if self.streams is None else max(1, self.streams // self.world_size)

    @property
    def buffer_bytes(self) -> int:
        """Estimated memory for minibatches in each reading process, in bytes; 0 if unknown.

        This is the size of two fetches of a `Collection`, or of an epoch if that is smaller: one
        fetch is delivered while the next is read.
        The memory is kept for all epochs, as long as the dataset exists. The estimate uses the mean
        size of a cell, so blocks of unusually large cells take more. It excludes dense minibatches
        that are made from sparse ones ahead of time, and up to ``prefetch_bytes`` that come from a
        server.
        """
        if not isinstance(self.collection, Collection) or self._on_device is not None:
            return 0
        n_rows = min(2 * self.fetch_size, self.strategy.n_positions(self._n_rows))
        row_bytes = self.collection.mean_row_bytes(self.dtype)
        return int(n_rows * (1 + self.strategy.n_companions) * row_bytes)

    @property
    def _length(self) -> int:
        return self.plan_on(*self._ranks.now()).n_minibatches

    @property
    def seed(self) -> int | None:
        """The seed, which determines the order of all epochs; None until it is fixed.

        A seed that was not given is fixed when the first epoch begins, on all ranks as that of the
        first; a single process also fixes it for `plan`, `peek` and `state_dict`.
        """
        return self._seed.fixed

    def plan(self, *, epoch: int) -> EpochPlan:
        """Return the plan of an epoch: which rows this rank delivers, and in which order.

        Raises
        ------
        ParameterError
            ``epoch`` is not an integer, or ``seed`` was not given and ranks have not agreed on
            one yet.
        """
        rank, world_size = self._ranks.now()
        return self.plan_on(rank, world_size, seed=self._seed.use(world_size), epoch=epoch)

    def _plan_of(self, beginning: Beginning) -> EpochPlan:
        known = self._latest_plan
        if known is None or known[0] != beginning:
            position, seed = beginning.position, beginning.seeds[0]
            plan = self.plan_on(
                beginning.rank,
                beginning.world_size,
                seed=seed,
                epoch=position.epoch,
                after=position.after,
            )
            self._latest_plan = known = beginning, plan
        return known[1]

    def plan_on(self, rank: int, world_size: int, **of_epoch: Any) -> EpochPlan:
        """Return the plan of an epoch on a rank, with other parameters of `EpochPlan`."""
        plan = EpochPlan(
            strategy=self.strategy,
            n_rows=self._n_rows,
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            drop_last=self.drop_last,
            rank=rank,
            world_size=world_size,
            streams=self.streams,
            **of_epoch,
        )
        if plan.n_minibatches == 0 and not plan.after:
            msg = (
                f"none of {self._n_rows:,} rows is left, since `drop_last` leaves out rows that "
                "do not fill a minibatch or a block; use smaller sizes, or drop_last=False"
            )
            raise ParameterError(msg)
        return plan

    @property
    def minibatch_bytes(self) -> int:
        """Mean size of a minibatch as it is read, in bytes; 0 if unknown."""
        if not isinstance(self.collection, Collection):
            return int(getattr(self.collection, "nbytes", 0) / self._n_rows * self.batch_size)
        n_bytes = self.collection.mean_row_bytes(self.dtype, dense=self.dense)
        for each in self.transform.values():
            of_rows = split_steps(each)[1]
            n_bytes += 0 if of_rows is None else of_rows.row_bytes
        return int(
            self.batch_size * self._streams_per_rank * (1 + self.strategy.n_companions) * n_bytes
        )

    @property
    def _is_read_ahead(self) -> bool:
        """Whether threads of this class read fetches, not a user's function or an indexable."""
        return isinstance(self.collection, Collection) and self._is_indexed

    @property
    def _is_indexed(self) -> bool:
        """Whether rows are read by indexing the collection, or by threads of this class."""
        return True

    @property
    def _is_taken_here(self) -> bool:
        """Whether minibatches are taken from a fetch by indexing it."""
        return True

    def _fetched(self, rows: NDArray[np.int64]) -> Any:
        """Return rows of what threads of this class do not read."""
        return in_memory(self.collection[rows])

    def _taken_from(self, fetched: Any, indices: NDArray[np.intp]) -> Any:
        """Return a minibatch of a fetch."""
        return fetched[indices]

    @property
    def _on_device(self) -> DeviceRows | None:
        """Cells on a device, from which minibatches are gathered."""
        return self.collection._on_device if isinstance(self.collection, Collection) else None  # noqa: SLF001 - ours

    def _require_not_given(self, *, dense: bool, transform: Any, read_options: Any) -> None:
        """Check that no parameter is given that applies only if cellfeed reads a collection."""
        is_ours = isinstance(self.collection, Collection)
        given = {
            # It applies to the cells that scDataset's functions make of a Collection.
            "dense": None if is_ours else dense or None,
            "dtype": None if self.dtype is None else str(self.dtype),
            "transform": transform,
            "read_options": read_options,
        }
        ignored = [f"{name}={each!r}" for name, each in given.items() if each is not None]
        kind = f"an indexable of type {type(self.collection).__name__}"
        kind = "a `fetch_callback`" if is_ours else kind
        if ignored:
            msg = (
                "`dense`, `dtype`, `transform` and `read_options` apply only when cellfeed reads a "
                f"Collection, but got {', '.join(ignored)} with {kind}; leave it out, and convert "
                "in `batch_transform`"
            )
            raise ParameterError(msg)

    def _require_gathered(self) -> None:
        """Check that nothing needs cells in memory, if they are on a device."""
        if self._on_device is None:
            return
        are_tokenized = any(split_steps(each)[1] for each in self.transform.values())
        for what, is_given in (
            ("`fetch_transform`", self.fetch_transform is not None),
            ("a `fetch_callback` or `batch_callback`", not self._is_placed),
            ("a tokenizer in `transform`", are_tokenized),
            ("as_torch=False", not self.as_torch),
        ):
            if is_given:
                msg = (
                    f"{what} needs cells in memory, but they are on {self._on_device.device}; "
                    "change minibatches in `batch_transform`, or load the cells without `device`"
                )
                raise ParameterError(msg)

    @property
    def _can_be_forked(self) -> bool:
        return not isinstance(self.collection, Collection) or self.collection.can_be_forked

    @property
    def _is_placed(self) -> bool:
        """Whether rows are read directly into minibatches."""
        return self._is_read_ahead and self._is_taken_here and self.fetch_transform is None

    @property
    def _seeds(self) -> tuple[CommonSeed, ...]:
        return (self._seed,)

    def _n_left(self, beginning: Beginning) -> int:
        n_delivered = beginning.position.progress.n_minibatches
        return self._plan_of(beginning).n_minibatches - n_delivered

    def _read_identity(self) -> Any:
        return read_identity(self.collection, self.dtype)

    def _identity(self) -> dict[str, Any]:
        if self._known_identity is None:
            own = {
                "batch_size": self.batch_size,
                "fetch_factor": self.fetch_factor,
                "drop_last": bool(self.drop_last),
                "transform": as_json(self.transform),
            }
            if self.streams is not None:
                own["streams"] = self.streams
            of_strategy = strategy_identity(self.strategy)
            # A strategy may have parameters of these names, too.
            others = {
                f"strategy.{name}": of_strategy[name]
                for name in own
                if name in of_strategy and of_strategy[name] != own[name]
            }
            self._known_identity = {
                "data": data_identity(self.collection, self._n_rows),
                "configuration": of_strategy | own | others,
            }
        return self._known_identity

    @property
    def _delivers_sparse(self) -> bool:
        """Whether sparse rows are delivered as they are read."""
        are_others = (
            split_steps(self.transform.get(name, ()))[1] is None
            for name, each in self.collection.elements.items()
            if each.layout == "csr"
        )
        return not self.dense and any(are_others)

    # How minibatches are made.

    def _share(self, beginning: Beginning, first: int = 0, step: int = 1) -> Share:
        n_delivered = beginning.position.progress.n_minibatches
        plan = self._plan_of(beginning)
        return plan.share(first=first, step=step, n_delivered=n_delivered)

    def _sizes(self, beginning: Beginning) -> Iterable[int]:
        share = self._share(beginning)
        return map(share.n_minibatches_of, share.numbers)

    def _sources(self, beginning: Beginning) -> Iterable[int]:
        sizes = self._sizes(beginning)
        return (number for number, n in enumerate(sizes) for _ in range(n))

    def _of_worker(self, beginning: Beginning, first: int, step: int) -> Minibatches:
        return self.delivered(self._share(beginning, first, step))

    def delivered(self, share: Share) -> Minibatches:
        """Deliver a share of an epoch: the minibatches of its fetches."""
        if self._on_device is not None:
            made = self._gathered(share, self._on_device)
        else:
            made = self._read_ahead(share) if self._is_read_ahead else self._indexed(share)
        with closing(made) as minibatches:
            if self.batch_transform is None:
                yield from minibatches
            elif not self.transform_threads:
                yield from map(self._transformed, minibatches)
            else:
                n = self.transform_threads
                with ThreadPoolExecutor(n, thread_name_prefix="cellfeed-transform") as threads:
                    if self._is_placed:  # what the others need may not have been read yet
                        yield from threads.map(self._transformed, islice(minibatches, 1))
                    yield from prefetched(self._transformed, minibatches, threads, n)

    def _read_ahead(self, share: Share) -> Minibatches:
        """Read fetches of a collection, directly into minibatches or for the user's functions."""
        reader, key = self._reader(), derive_key(share.plan.seed, share.plan.epoch, _TOKENS)
        fetches = fetches_of(
            share,
            reader,
            are_whole=not self._is_placed,
            prefetch=self.read_options.prefetch
            or (_REMOTE_PREFETCH if self.collection.is_remote else 1),
            prefetch_bytes=self.read_options.prefetch_bytes,
            counters=self._counters,
        )
        with closing(fetches):
            for fetch, groups in fetches:
                if not self._is_placed:
                    yield from self._taken(next(groups).to_scipy(), fetch, share.plan)
                    continue
                read = reader.finished(groups, dense=self.dense, key=key)
                for cells in self._with_companions(read):
                    # Memory is free, and tensors are gone, as soon as the consumer drops them.
                    delivered = [self._made(cells)]
                    self._counters.add(Counter.CELLS, len(cells.rows))
                    del cells
                    yield delivered.pop()

    def _gathered(self, share: Share, on_device: DeviceRows) -> Minibatches:
        """Gather minibatches from cells on a device."""
        if worker := start_here() or get_worker_info():
            msg = (
                f"`num_workers` must be 0 if cells are on {on_device.device}, where their own "
                f"process gathers minibatches, but got {worker.num_workers}; write "
                "`dataset.loader(num_workers=0)`"
            )
            raise ParameterError(msg)
        dtypes = dtypes_of(self.collection.elements, self.dtype)
        delivery = Delivery(dtypes, self.transform, self.dense)
        for number in share.numbers:
            with self._counters.processor_time(Counter.PLANNING):
                fetch = share.fetch(number)
                order, bounds = fetch.in_groups(share.plan.minibatch_size)
                rows = fetch.rows[order]
            self._counters.add(Counter.FETCHES, 1)
            names = self.collection.obs_names(rows) if self.collection.delivers_obs_names else None
            groups = self._with_companions(on_device.gather(rows, bounds, names, delivery))
            for _ in range(share.n_minibatches_of(number)):
                with self._counters.wall_time(Counter.MAKING_TENSORS):
                    delivered = [next(groups)]
                self._counters.add(Counter.CELLS, len(delivered[0]))
                yield delivered.pop()

    def _with_companions(self, groups: Iterator[_Cells]) -> Iterator[_Cells]:
        """Join each minibatch with the companions of its cells, which follow it, if any."""
        if not self.strategy.n_companions:
            yield from groups
        for cells in groups:
            companions: dict[str, Any] = {self.strategy.companion_name: next(groups)}
            joined = [replace(cells, **companions)]
            del cells, companions
            yield joined.pop()

    def _reader(self) -> Reader:
        """Return a reader with its own threads."""
        start = start_here()
        worker = start or get_worker_info()
        n_processes = 1 if worker is None else worker.num_workers
        # A function of the user might keep the minibatches that it gets.
        is_seen = (
            self.batch_transform is not None or type(self).__iter__ is not CellDataset.__iter__
        )
        lent = None
        if start is not None and start.are_rows_placed and self._is_placed and not is_seen:
            lent = start.pool
        return Reader(
            self.collection,
            dtype=self.dtype,
            num_threads=self.read_options.num_threads or threads_per_process(n_processes),
            pools=self._pools
            if lent is None
            else self._pools.lending(lent, dense=not self._delivers_sparse),
            transforms=self.transform,
            verify=self.read_options.verify,
            counters=self._counters,
        )

    def _indexed(self, share: Share) -> Minibatches:
        """Read fetches with the user's function, or by indexing with row numbers."""
        for number in share.numbers:
            with self._counters.processor_time(Counter.PLANNING):
                fetch = share.whole_fetch(number)
            with self._counters.wall_time(Counter.LIBRARY):
                fetched = self._fetched(fetch.rows)
            self._counters.add(Counter.FETCHES, 1)
            yield from self._taken(fetched, fetch, share.plan)

    def _taken(self, fetched: Any, fetch: Fetch, plan: EpochPlan) -> Iterator[Any]:
        """Take minibatches from a fetch, in the order of delivery."""
        if self.fetch_transform is not None:
            with self._counters.wall_time(Counter.FUNCTIONS):
                fetched = self.fetch_transform(fetched)
        for start in range(0, fetch.order.size, plan.minibatch_size):
            here = slice(start, start + plan.minibatch_size)
            companions = None if fetch.companions is None else fetch.companions[here].ravel()
            # Kept by nobody but the consumer: torch ends the process where a tensor goes with this
            # frame, in a thread of its own, while Python shuts down.
            yield self._minibatch(fetched, fetch.order[here], companions)

    def _minibatch(
        self, fetched: Any, indices: NDArray[np.intp], companions: NDArray[np.intp] | None
    ) -> Any:
        with self._counters.wall_time(
            Counter.PLACING if self._is_taken_here else Counter.FUNCTIONS
        ):
            batch = self._taken_from(fetched, indices)
        if companions is not None:
            if not isinstance(batch, Cells):
                msg = (
                    "`fetch_transform` must return Cells if others come with them, but a minibatch "
                    f"is {type(batch).__name__}; return Cells, or change minibatches in "
                    "`batch_transform`"
                )
                raise ParameterError(msg)
            batch = replace(batch, **{self.strategy.companion_name: fetched[companions]})
        self._counters.add(Counter.CELLS, len(indices))
        return self._made(batch, dense=self.dense) if isinstance(batch, Cells) else batch

    def _made(self, cells: Cells, *, dense: bool = False) -> Any:
        """Return cells as tensors if requested and torch is installed, else in SciPy."""
        with self._counters.wall_time(Counter.MAKING_TENSORS):
            if self.as_torch and HAS_TORCH:
                return cells.to_torch(dense=dense)
            return _made_dense(cells.to_scipy()) if dense else cells.to_scipy()

    def _transformed(self, minibatch: Any) -> Any:
        assert self.batch_transform is not None  # noqa: S101 - asked before
        with self._counters.wall_time(Counter.FUNCTIONS):
            return self.batch_transform(minibatch)


def _made_dense(cells: Cells) -> Cells:
    elements = {
        name: each.toarray() if isinstance(each, sp.csr_array) else each
        for name, each in cells.elements.items()
    }
    companions: dict[str, Any] = {
        name: _made_dense(each) for name, each in cells.companions.items()
    }
    return replace(cells, elements=elements, **companions)
