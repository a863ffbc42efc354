"""Loaded rows on a torch device, where minibatches are gathered, made dense and transformed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, one_line
from cellfeed._torch import require_torch, torch
from cellfeed.collection._loaded import Loaded
from cellfeed.machine import usable_memory_bytes
from cellfeed.rows import Layout, ObsColumn, require_int64, require_torch_dtype
from cellfeed.rows._minibatch import Minibatch, RaggedTensor, csr_tensor, same_bits
from cellfeed.transforms import Log1p, NormalizeTotal, Transform

_BLOCK = 1 << 24  # elements that are copied or compared at a time
_MOST_INT32 = 2**31 - 1


# The device.


def device_of(device: torch.device | str) -> torch.device:
    """Return a device with its number.

    Raises
    ------
    ParameterError
        torch does not have it here.
    ImportError
        torch is not installed.
    """
    require_torch("`load(device=...)`")
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        msg = f"`device` must be one that torch has here, but got device={device!r}"
        raise ParameterError(
            f"{msg} ({one_line(error)}); leave it out to keep the cells in memory"
        ) from error


def require_device_memory(n_bytes: float, device: torch.device) -> None:
    """Check that a device has room.

    Raises
    ------
    ParameterError
        It does not.
    """
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        module.empty_cache()  # else what torch keeps for reuse counts as used
        available = module.mem_get_info(device)[0]
    else:  # such a device shares the memory of the machine
        available = usable_memory_bytes()
    if n_bytes > available:
        msg = (
            f"these cells take {n_bytes:,.0f} bytes on {device}, but {available:,} are available "
            "there; load fewer `rows`, open fewer elements or genes, or leave out `device`"
        )
        raise ParameterError(msg)


# How minibatches are delivered.


class Delivery(NamedTuple):
    """How minibatches are delivered.

    Parameters
    ----------
    dtypes
        The elements to deliver, and the dtype of each.
    transforms
        Transforms of values, by element.
    dense
        Whether sparse rows are made dense.
    """

    dtypes: Mapping[str, np.dtype[Any]]
    transforms: Mapping[str, Sequence[Any]]
    dense: bool


def _transformed(
    values: torch.Tensor,
    steps: Sequence[Transform],
    row_of: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return values of rows after some steps, each computed in float64 as the compiled ones.

    Parameters
    ----------
    values
        Dense rows, shape (n_rows, n_columns), or values of sparse ones, shape (n_values,).
    steps
        The transforms.
    row_of, lengths
        Of sparse rows: the row of each value, and the number of values of each row.
    """
    dtype = values.dtype
    for each, following in pairwise([*steps, None]):
        wide = values.double()
        match each:
            case NormalizeTotal():
                if row_of is None:
                    totals = wide.sum(1, keepdim=True)
                else:  # in the same order each time, as atomic additions are not
                    sums = torch.segment_reduce(wide, "sum", lengths=lengths, unsafe=True)
                    totals = sums[row_of]
                divisor = torch.where(totals == 0, 1.0, totals / each.target_sum)
                wide = wide * (1 / divisor) if dtype == torch.float32 else wide / divisor
            case Log1p():
                wide = wide.log1p()
        # These two are one step, which does not round in between.
        is_one = isinstance(each, NormalizeTotal) and isinstance(following, Log1p)
        values = wide if is_one else wide.to(dtype)
    return values


# Rows on the device.


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceArray:
    """Rows of an element, in the dtypes in which they are loaded.

    Parameters
    ----------
    layout, row_shape
        See `Element`.
    values
        Values of all rows, concatenated; of dense rows, shape (n_rows, n_columns).
    pointers
        Row pointers, int64, unless rows are dense.
    ends
        The same in memory, from which sizes are known without waiting for the device.
    columns
        Column indices, if rows are sparse.
    """

    layout: Layout
    row_shape: tuple[int, ...]
    values: torch.Tensor
    pointers: torch.Tensor | None = None
    ends: NDArray[np.int64] | None = None
    columns: torch.Tensor | None = None


class DeviceRows:
    """Rows of a collection on a device, with their obs columns.

    It stays in its process.

    Parameters
    ----------
    loaded
        The rows in memory, which are copied.
    obs
        The obs columns of the collection.
    device
        The device.

    Attributes
    ----------
    n_bytes
        Size of the rows on the device, in bytes, without obs.

    Raises
    ------
    ParameterError
        torch does not have the dtype of an element, or a sparse row has a column twice.
    ColumnError
        An obs column has numbers above the largest int64.
    """

    def __init__(self, loaded: Loaded, obs: Mapping[str, ObsColumn], device: torch.device) -> None:
        self.device, self.n_bytes = device, loaded.n_bytes
        self._loaded = Loaded({}, loaded.rows)  # which of the rows, without their memory
        self._obs = dict[str, torch.Tensor]()
        for name, column in obs.items():
            require_int64(f"obs column {name!r}", column.values)
            self._obs[name] = _copied(column.values[loaded.rows], device)
        self._arrays = dict[str, _DeviceArray]()
        for name, rows in loaded.elements.items():
            values, pointers, columns = rows.arrays
            if values.dtype.names is not None:
                msg = f"`{name}` has records, which torch does not have; load it without `device`"
                raise ParameterError(msg)
            own = _copied(values, device)
            if rows.layout == "dense":
                own = own.view(loaded.rows.size, math.prod(rows.shape[1:]))
            parts: dict[str, Any] = {}
            if pointers is not None:
                parts = {"pointers": _copied(pointers, device), "ends": pointers.copy()}
            if pointers is not None and columns is not None:
                parts["columns"] = _copied(columns, device)
                if not _are_distinct(parts["columns"], pointers):
                    msg = f"`{name}` has a column twice in one row; write it again after "
                    msg += "`sum_duplicates()`, or load the cells without `device`"
                    raise ParameterError(msg)
            self._arrays[name] = _DeviceArray(rows.layout, rows.shape[1:], own, **parts)

    def __reduce__(self) -> NoReturn:
        msg = (
            f"a collection whose cells are on {self.device} stays in its process; load the cells "
            "in each process, or without `device`, which processes share"
        )
        raise ParameterError(msg)

    def gather(
        self,
        rows: NDArray[np.int64],
        bounds: NDArray[np.int64],
        obs_names: NDArray[np.object_] | None,
        delivery: Delivery,
    ) -> Iterator[Minibatch]:
        """Yield minibatches on the device.

        Parameters
        ----------
        rows
            Rows of the collection in the order of delivery, int64, shape (n_rows,).
        bounds
            Where minibatches begin and end, shape (n_minibatches + 1,).
        obs_names
            Names of the rows, if they are delivered.
        delivery
            How they are delivered.

        Raises
        ------
        ParameterError
            A row was not loaded.
        """
        places, are_loaded = self._loaded.find(rows)
        if not are_loaded.all():
            msg = (
                f"row {rows[~are_loaded][0]} is visited, but is not among the "
                f"{self._loaded.rows.size:,} rows on {self.device}; load it, too, or give the "
                "strategy loaded rows only"
            )
            raise ParameterError(msg)
        # Without waiting for kernels that are queued on the device.
        numbers, where = (
            torch.from_numpy(each).to(self.device, non_blocking=True) for each in (rows, places)
        )
        for here in map(slice, bounds[:-1].tolist(), bounds[1:].tolist()):
            elements = {
                name: self._rows(name, where[here], places[here], delivery)
                for name in delivery.dtypes
            }
            obs = {name: _taken(values, where[here]) for name, values in self._obs.items()}
            # torch indexes and counts classes with int64, as in minibatches from files.
            obs = {n: v if v.is_floating_point() else v.to(torch.int64) for n, v in obs.items()}
            names = None if obs_names is None else obs_names[here]
            yield Minibatch(elements, obs, numbers[here], names)

    def _rows(
        self, name: str, where: torch.Tensor, places: NDArray[np.int64], delivery: Delivery
    ) -> Any:
        """Return some rows of an element."""
        n, stored, dtype = len(places), self._arrays[name], _torch_dtype(delivery.dtypes[name])
        steps = delivery.transforms.get(name, ())
        if stored.pointers is None or stored.ends is None:
            values = _cast(_taken(stored.values, where), dtype)
            return _transformed(values, steps).view(n, *stored.row_shape)
        n_values = int((stored.ends[places + 1] - stored.ends[places]).sum())
        starts = stored.pointers[where]
        lengths = stored.pointers[where + 1] - starts
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        count = torch.arange(max(n, n_values), device=self.device)
        row_of = count[:n].repeat_interleave(lengths, output_size=n_values)
        positions = count[:n_values] + (starts - offsets[:-1])[row_of]
        values = _cast(_taken(stored.values, positions), dtype)
        if stored.columns is None:
            return RaggedTensor(offsets, values)
        columns, n_columns = _taken(stored.columns, positions).to(torch.int64), stored.row_shape[0]
        values = _transformed(values, steps, row_of, lengths)
        if not delivery.dense:
            is_small = max(n_values, n_columns) <= _MOST_INT32
            index_dtype = torch.int32 if is_small else torch.int64
            parts = offsets.to(index_dtype), columns.to(index_dtype), values
            return csr_tensor(*parts, (n, n_columns))
        bits = same_bits(dtype)
        rows = torch.zeros(n * n_columns, dtype=bits, device=self.device)
        rows[row_of * n_columns + columns] = values.view(bits)
        return rows.view(dtype).view(n, n_columns)


def _copied(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy one-dimensional values to a device."""
    require_torch_dtype(values.dtype)
    copied = torch.empty(values.size, dtype=_torch_dtype(values.dtype), device=device)
    for first in range(0, values.size, _BLOCK):
        block = values[first : first + _BLOCK].copy()  # torch warns of memory that is read-only
        copied[first : first + _BLOCK] = torch.from_numpy(block)
    return copied


def _are_distinct(columns: torch.Tensor, pointers: NDArray[np.int64]) -> bool:
    """Return whether no row, whose columns ascend, has one twice."""
    bits, n_equal = columns.view(same_bits(columns.dtype)), 0
    for first in range(0, len(bits) - 1, _BLOCK):
        block = bits[first : first + _BLOCK + 1]
        n_equal += int((block[1:] == block[:-1]).sum())
    between = np.unique(pointers[(pointers > 0) & (pointers < len(bits))])
    starts = torch.from_numpy(between).to(columns.device)
    return n_equal == int((bits[starts] == bits[starts - 1]).sum())


# Values.


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _taken(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Index values, also of unsigned dtypes that torch cannot index."""
    return values.view(same_bits(values.dtype))[places].view(values.dtype)


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast values as NumPy does."""
    if values.dtype == torch.float64 and dtype == torch.float16:
        # torch rounds twice, to float32 first. Where that is not exact, its last bit is made 1, so
        # that no value lies in the middle between two of float16.
        single = values.to(torch.float32)
        is_larger, is_rounded = single.abs() > values.abs(), single != values
        values = ((single.view(torch.int32) - is_larger.int()) | is_rounded.int()).view(
            torch.float32
        )
    elif not dtype.is_floating_point and dtype not in (torch.bool, torch.uint64):
        values = values.to(torch.int64)  # so that what is out of range wraps around
    return values.to(dtype)
