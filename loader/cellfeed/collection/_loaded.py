"""Rows of a collection that stay in memory, decoded, which the processes of a machine share."""

import math
import mmap
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from cellfeed._errors import DeliveryError, ParameterError, one_line
from cellfeed._progress import ProgressLine
from cellfeed.bytes import Location
from cellfeed.bytes._buffers import SharedFile, can_lend
from cellfeed.decode import ChunkedArray, Counters, can_cast
from cellfeed.fetch import Readable, Reader, fetches_of
from cellfeed.machine import usable_cpu_count, usable_memory_bytes
from cellfeed.rows import (
    Cells,
    Chunks,
    CsrChunks,
    DenseChunks,
    Layout,
    RaggedChunks,
    RaggedRows,
)
from cellfeed.sampling import EpochPlan, Streaming
from cellfeed.sources._in_memory import array_in_memory
from cellfeed.sources._source import ChunkedElement

_FETCH_BYTES = 32 << 20  # of rows that are read together
_REQUESTED_BYTES = 256 << 20  # of stored rows that are requested from servers at a time
_PREFETCH = 2
_TASK, _BLOCK = 1 << 20, 1 << 16  # elements that a thread writes; and narrows, in its cache
_PAUSE = 0.1  # seconds between two looks at whether another rank is done


# Arrays in shared memory.


class SharedArray:
    """A one-dimensional array in a file in memory, which the system frees with its last process.

    A pickled copy refers to the same memory: another process of this machine opens the file of the
    process that pickled it.

    Parameters
    ----------
    file
        The file.
    dtype, size
        Dtype and number of the elements.
    """

    def __init__(self, file: SharedFile, dtype: np.dtype[Any], size: int) -> None:
        self._file = file
        mapped = mmap.mmap(file.descriptor, max(1, size * dtype.itemsize), prot=mmap.PROT_READ)
        self.values: NDArray[Any] = np.frombuffer(mapped, dtype, size)

    def __reduce__(self) -> tuple[Any, ...]:
        descriptor = self._file.descriptor
        file = os.getpid(), descriptor, os.fstat(descriptor).st_ino
        return self._attached, (*file, self.values.dtype, self.values.size)

    @classmethod
    def _attached(
        cls, process: int, descriptor: int, inode: int, dtype: np.dtype[Any], size: int
    ) -> Self:
        with suppress(OSError):
            path = f"/proc/{process}/fd/{descriptor}"
            own = SharedFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            if os.fstat(own.descriptor).st_ino == inode:
                return cls(own, dtype, size)
        msg = f"the loaded cells are gone, since process {process} has ended or released them"
        raise DeliveryError(f"{msg}; keep its collection, or load the cells again")

    def chunked(self) -> ChunkedArray:
        """Return the elements as chunks that need no reading."""
        return array_in_memory(Location("memory://loaded"), "loaded", self.values)


class _GrowingArray:
    """Elements in shared memory, in the first of some dtypes that holds all of them exactly.

    Parameters
    ----------
    dtypes
        Dtypes, each wider than the one before; the last holds any element.
    expected
        Expected number of elements.
    """

    def __init__(self, dtypes: Sequence[np.dtype[Any]], expected: int) -> None:
        self._dtypes, self._expected, self.size = list(dtypes), expected, 0
        self._file = SharedFile(label="cellfeed-loaded")

    @property
    def expected_bytes(self) -> int:
        """Expected size in bytes."""
        return self._expected * self._dtypes[0].itemsize

    def append(self, elements: NDArray[Any], threads: Executor) -> None:
        """Append elements."""
        tasks = range(0, elements.size, _TASK)
        while not all(list(threads.map(self._write, repeat(elements), tasks))):
            self._widen()
        self.size += elements.size

    def _write(self, elements: NDArray[Any], first: int) -> bool:
        """Write the elements of a task, and return whether the dtype holds them exactly."""
        dtype, is_last = self._dtypes[0], len(self._dtypes) == 1
        for begin in range(first, min(first + _TASK, elements.size), _BLOCK):
            given = elements[begin : begin + _BLOCK]
            block = given.astype(dtype, copy=False) if is_last else _as_exactly(given, dtype)
            if block is None:
                return False
            _write(self._file.descriptor, block, (self.size + begin) * dtype.itemsize)
        return True

    def _widen(self) -> None:
        """Rewrite all elements in the next dtype, in place, from the last to the first."""
        narrow, wide = self._dtypes[0], self._dtypes[1]
        _require_memory(self._expected * wide.itemsize - self.size * narrow.itemsize)
        for first in reversed(range(0, self.size, _BLOCK)):
            size = min(_BLOCK, self.size - first) * narrow.itemsize
            block = np.frombuffer(
                os.pread(self._file.descriptor, size, first * narrow.itemsize), narrow
            )
            _write(self._file.descriptor, block.astype(wide), first * wide.itemsize)
        del self._dtypes[0]

    def finished(self) -> SharedArray:
        """Return the array."""
        os.ftruncate(self._file.descriptor, max(1, self.size * self._dtypes[0].itemsize))
        return SharedArray(self._file, self._dtypes[0], self.size)


def _write(descriptor: int, block: NDArray[Any], offset: int) -> None:
    content = np.ascontiguousarray(block).view(np.uint8)
    while content.size:
        n = os.pwrite(descriptor, content.data, offset)
        content, offset = content[n:], offset + n


def _as_exactly(elements: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return elements as another dtype; None if that changes one, or the sign of a zero."""
    with np.errstate(invalid="ignore"):
        narrow = elements.astype(dtype)
    again, bits = narrow.astype(elements.dtype), f"u{elements.dtype.itemsize}"
    return narrow if np.array_equal(again.view(bits), elements.view(bits)) else None


def _dtypes_of(sample: NDArray[Any]) -> list[np.dtype[Any]]:
    """Return the dtypes that hold sampled values exactly, the narrowest first, theirs last."""
    dtype = sample.dtype
    narrow = map(np.dtype, ("u1", "u2") if dtype.kind in "iuf" else ())
    fitting = (e for e in narrow if e.itemsize < dtype.itemsize and can_cast(e, dtype))
    return [e for e in fitting if _as_exactly(sample, e) is not None] + [dtype]


# Rows in shared memory.


class LoadedRows(ChunkedElement):
    """Rows of an element of a collection, with its columns.

    Parameters
    ----------
    layout, row_shape
        See `Element`.
    values
        Values of all rows, concatenated.
    pointers, indices
        Row pointers, unless rows are dense, and column indices, if they are sparse.

    Attributes
    ----------
    arrays
        Values, row pointers and column indices in memory; None where rows have none.
    """

    def __init__(
        self,
        layout: Layout,
        row_shape: tuple[int, ...],
        n_rows: int,
        values: SharedArray,
        pointers: SharedArray | None,
        indices: SharedArray | None,
    ) -> None:
        self._given = layout, row_shape, n_rows, values, pointers, indices
        self.arrays = (
            values.values,
            None if pointers is None else pointers.values,
            None if indices is None else indices.values,
        )
        self.layout, self.dtype, self.shape = layout, values.values.dtype, (n_rows, *row_shape)
        self._chunks: Chunks
        if pointers is None:
            self._chunks = DenseChunks(values.chunked(), math.prod(row_shape))
        elif indices is None:
            self._chunks = RaggedChunks(pointers.values, values.chunked())
        else:
            arrays = indices.chunked(), values.chunked()
            self._chunks = CsrChunks(pointers.values, *arrays, row_shape[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given

    def stored_bytes(self) -> int:
        """Return its size in memory, in bytes."""
        return sum(each.nbytes for each in self.arrays if each is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Loaded rows.

    Parameters
    ----------
    elements
        The rows of each element, in their order.
    rows
        Which rows of the collection these are, ascending, int64.
    """

    elements: Mapping[str, LoadedRows]
    rows: NDArray[np.int64]

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where rows are among the loaded ones, and whether they are."""
        places = np.minimum(np.searchsorted(self.rows, rows), self.rows.size - 1)
        return places, self.rows[places] == rows

    @property
    def n_bytes(self) -> int:
        """Memory that they take, in bytes."""
        return sum(each.stored_bytes() for each in self.elements.values())


# Loading.


def load_rows(
    collection: Readable,
    n_rows: int,
    rows: NDArray[np.int64],
    sample: Cells,
    require_room: Callable[[float], None],
) -> Loaded:
    """Decode rows into shared memory.

    Parameters
    ----------
    collection
        The collection.
    n_rows
        Number of its rows.
    rows
        Which of them to load, ascending, int64.
    sample
        Some of these rows, from which the size of all is estimated.
    require_room
        Refuses their estimated size, in bytes, if they will not fit where they are copied to.

    Raises
    ------
    ParameterError
        The rows do not fit in memory, or the system has no memory that processes can share.
    """
    if not can_lend():
        msg = "`load` needs Linux, where processes can share memory that no file names"
        raise ParameterError(f"{msg}; read the files as they are")
    elements, share = collection.elements, rows.size / len(sample)
    values, pointers, indices = (dict[str, _GrowingArray]() for _ in range(3))
    for name, each in elements.items():
        of_sample = _values_of(sample[name]).astype(each.dtype, copy=False)
        expected = math.ceil(of_sample.size * share)
        values[name] = _GrowingArray(_dtypes_of(of_sample), expected)
        if each.layout != "dense":
            pointers[name] = _GrowingArray([np.dtype(np.int64)], rows.size + 1)
        if each.layout == "csr":
            most = {"u2": 1 << 16, "i4": 1 << 31, "i8": 1 << 63}
            kind = next(kind for kind, n in most.items() if each.n_columns <= n)
            indices[name] = _GrowingArray([np.dtype(kind)], expected)
    needed = sum(e.expected_bytes for some in (values, pointers, indices) for e in some.values())
    require_room(needed)
    _require_memory(needed + min(needed, 3 * _FETCH_BYTES))
    plan = EpochPlan(
        strategy=Streaming(rows),
        n_rows=n_rows,
        batch_size=max(1, int(_FETCH_BYTES / max(1.0, needed / rows.size))),
        fetch_factor=1,
        seed=0,
        epoch=0,
    )
    n_done, counters = 0, Counters()
    fetches = fetches_of(
        plan.share(),
        Reader(collection, sum_duplicates=False, counters=counters),
        are_whole=True,
        prefetch=_PREFETCH,
        prefetch_bytes=_REQUESTED_BYTES,
        counters=counters,
    )
    with (
        closing(fetches),
        ThreadPoolExecutor(usable_cpu_count(), thread_name_prefix="cellfeed-load") as threads,
        ProgressLine() as line,
    ):
        for growing in pointers.values():
            growing.append(np.zeros(1, np.int64), threads)
        for cells in (cells for _, groups in fetches for cells in groups):
            for name, own in cells.items():
                if name in indices:
                    indices[name].append(own.indices, threads)
                if name in pointers:
                    ends = own.indptr[1:] if name in indices else own.offsets[1:]
                    pointers[name].append(values[name].size + ends.astype(np.int64), threads)
                values[name].append(_values_of(own), threads)
            n_done += len(cells)
            line.show_share("Loading cells", n_done, rows.size)
    loaded = {
        name: LoadedRows(
            each.layout,
            each.row_shape,
            rows.size,
            values[name].finished(),
            pointers[name].finished() if name in pointers else None,
            indices[name].finished() if name in indices else None,
        )
        for name, each in elements.items()
    }
    return Loaded(loaded, rows)


def _values_of(rows: Any) -> NDArray[Any]:
    """Return the values of rows, one-dimensional."""
    if isinstance(rows, np.ndarray):
        return rows.reshape(-1)
    values: NDArray[Any] = rows.values if isinstance(rows, RaggedRows) else rows.data
    return values


def _require_memory(n_bytes: float) -> None:
    available = usable_memory_bytes()
    if n_bytes > available:
        msg = (
            f"loading these cells takes {n_bytes:,.0f} bytes of memory, but {available:,} are "
            "available; load fewer `rows`, open fewer elements or "
            "genes, or read the files as they are"
        )
        raise ParameterError(msg)


# Ranks of one machine load rows once.


def load_once(key: str, load: Callable[[], Loaded]) -> Loaded:
    """Return what the first rank of this machine to call this loads; others share its memory.

    Without torch.distributed, each process loads for itself.

    Parameters
    ----------
    key
        What identifies the rows.
    load
        Loads them.

    Raises
    ------
    DeliveryError
        The rank that loads them fails, or has ended.
    ParameterError
        PyTorch is too old.
    """
    from cellfeed._torch import HAS_TORCH, dist  # noqa: PLC0415 - opening does not need PyTorch

    if not (HAS_TORCH and dist.is_available() and dist.is_initialized()):
        return load()
    group: Any = dist.group.WORLD
    if not hasattr(group, "get_group_store"):
        msg = (
            "ranks need PyTorch 2.8 or newer to share loaded cells; update it, or load them before"
        )
        raise ParameterError(f"{msg} torch.distributed is initialised, once for each rank")
    store = group.get_group_store()
    # Ranks in another container cannot open files of this one's processes.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    for attempt in count():
        name = f"cellfeed/loaded/{machine}/{key}/{attempt}"
        if store.add(f"{name}/come", 1) == 1:
            store.set(f"{name}/process", str(os.getpid()))
            try:
                loaded = load()
            except BaseException as error:
                store.set(name, pickle.dumps(one_line(error)))
                raise
            store.set(name, pickle.dumps(loaded))
            return loaded
        process = int(store.get(f"{name}/process"))
        while not store.check([name]):
            if not psutil.pid_exists(process):
                msg = f"the rank that loads cells for this machine, process {process}, has ended"
                raise DeliveryError(f"{msg}; start all ranks again")
            time.sleep(_PAUSE)
        try:
            found: Loaded | str = pickle.loads(store.get(name))  # noqa: S301 - of a rank of this run
        except DeliveryError:  # it has released them: the next to come loads them again
            continue
        if isinstance(found, str):
            raise DeliveryError(f"the rank that loads cells for this machine failed: {found}")
        return found
    raise AssertionError
