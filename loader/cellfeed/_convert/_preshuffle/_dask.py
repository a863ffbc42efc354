"""Writing parts on the workers of a Dask cluster."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from cellfeed._convert._preshuffle._part import write_part_of
from cellfeed._errors import ParameterError
from cellfeed.console import format_bytes

# A worker that dies, or a file system that falters, costs a part that is begun again.
_RETRIES = 3
_SECONDS_TO_CONNECT = 20


def write_parts_on_dask(
    address: str,
    *,
    path: str,
    token: str,
    memory: int,
    numbers: Sequence[int],
    on_part: Callable[[int, int], object],
) -> None:
    """Write parts on the workers of a cluster, one at a time on each.

    Parameters
    ----------
    address
        Address of the scheduler.
    path, token
        Path of the output on every worker, and a token that identifies it.
    memory
        Bytes for buffers that each worker needs.
    numbers
        Numbers of the parts.
    on_part
        Called with the number of each completed part, and the worker's peak memory.

    Raises
    ------
    ParameterError
        Dask is not installed, there is no scheduler, or the memory limit of a worker is too low.
    PathError
        A worker does not see the files.
    """
    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        msg = "`scheduler` needs Dask; install it with `pip install 'cellfeed[dask]'`"
        raise ParameterError(msg) from error
    try:
        client = distributed.Client(address, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        msg = f"no Dask scheduler answers at {address}; start one with `dask scheduler`"
        raise ParameterError(msg) from error
    with client:
        _check_workers(client, memory)
        n, loop = len(numbers), client.loop
        futures = client.map(
            write_part_of, [path] * n, [token] * n, numbers, pure=False, retries=_RETRIES
        )
        number_of = {future.key: number for future, number in zip(futures, numbers, strict=True)}
        try:
            for future, peak in distributed.as_completed(futures, with_results=True, loop=loop):
                on_part(number_of[future.key], peak)
        except distributed.KilledWorker as error:
            msg = (
                "several Dask workers died while writing the same part; give less `memory`, or "
                "give the workers more"
            )
            raise ParameterError(msg) from error


def _check_workers(client: Any, memory: int) -> None:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        msg = "the Dask scheduler has no workers; start some with `dask worker ADDRESS`"
        raise ParameterError(msg)
    for address, worker in workers.items():
        limit = worker["memory_limit"]
        if limit and limit < memory:
            msg = (
                f"the Dask worker {address} may use {format_bytes(limit)}, less than the "
                f"{format_bytes(memory)} of `memory`; give less `memory`, or give the workers more"
            )
            raise ParameterError(msg)
