"""`preshuffle`: begin or resume, write the parts, check, finish."""

import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed.bytes import digest_of, writable_path
from cellfeed.collection import Collection, Genes, JoinVars, open_collection, row_numbers
from cellfeed.console import format_bytes
from cellfeed.extending import (
    FormatError,
    MismatchError,
    ParameterError,
    PathError,
    one_line,
    require_list,
    require_not_negative,
)
from cellfeed.preshuffling._dataset import write_part
from cellfeed.preshuffling._inputs import Inputs, names_of, open_parts
from cellfeed.preshuffling._job import (
    InputFile,
    Job,
    Matrix,
    OutputFolder,
    describe_job,
    describe_request,
)
from cellfeed.rows import Cells
from cellfeed.sampling import derive_key, random_words

# Appending cells to a finished store: what has to agree, and which parts they are mixed with.


def describe_extension(
    folder: OutputFolder,
    paths: Any,
    elements: Sequence[str],
    selected: Callable[[Collection], NDArray[np.int64] | None],
    *,
    join_vars: JoinVars,
    mix: int,
    seed: int,
    begun: Job | None,
    **settings: Any,
) -> tuple[Collection, NDArray[np.int64], Job]:
    """Describe how files extend a finished store.

    The first source of the collection is the newest part of the store, whose genes, dtypes and
    categories those of the files are fitted to.

    Parameters
    ----------
    folder, paths, elements
        The store, the files, and the elements to write of them.
    selected
        Returns the rows of the files to write; None for all.
    join_vars
        Which genes the files may have; see `Genes`, ``of_first``.
    mix
        Number of parts of the store with which each new part is merged.
    seed
        Seed of the choice of these parts.
    begun
        The job, if it has been begun.
    **settings
        See `describe_job`.

    Returns
    -------
    The collection of parts of the store and of files, its rows to write, and the job.

    Raises
    ------
    ParameterError
        A file is in the store already, or other elements would be written than the store has.
    MismatchError
        The files have other genes or a wider dtype.
    """
    require_not_negative("mix", mix)
    jobs, numbers = folder.finished(), folder.numbers()
    stored = {each.name: each for each in jobs[0].matrices}
    if {*elements} != {*stored}:
        has, asked = (", ".join(sorted(names)) for names in (stored, elements))
        msg = f"{folder.path}: has the elements {has}, but {asked} would be added"
        raise ParameterError(f"{msg}; give the same `elements`, or leave them out")
    new = open_collection(paths, elements=elements, join_vars="outer")
    there = {path for job in jobs for path in job.paths[job.n_stored :]}
    for location in new.locations:
        if InputFile.of(location).path in there:
            msg = f"{location}: is in {folder.path} already; give files that are not"
            raise ParameterError(msg)
    rows = selected(new)
    rows = np.arange(len(new)) if rows is None else rows
    newest, first_part = numbers[-1], 1 + folder.numbers_on_disk()[-1]

    def described(merged: list[int]) -> tuple[Collection, NDArray[np.int64], Job]:
        parts = [newest, *(number for number in merged if number != newest)]
        sources = open_parts([folder.part(number) for number in parts], elements)
        genes = Genes(join_vars, of_first=True)
        collection = Collection([*sources, *new.sources], genes=genes)
        bounds = np.cumsum([0, *(each.n_rows for each in sources)])
        old = np.arange(0 if newest in merged else bounds[1], bounds[-1])
        written = np.concatenate([old, bounds[-1] + rows])
        job = describe_job(
            collection,
            rows=written,
            join_vars=join_vars,
            seed=seed,
            n_stored=len(parts),
            merged=tuple(merged),
            n_replaced=old.size,
            first_part=first_part if begun is None else begun.first_part,
            **settings,
        )
        fitted = tuple(_fitted(each, stored[each.name], new) for each in job.matrices)
        return collection, written, replace(job, matrices=fitted)

    extension = described([])
    if not mix:
        return extension
    *_, job = extension
    order = np.argsort(random_words(derive_key(job.seed, len(jobs)), np.arange(len(numbers))))
    return described(sorted(numbers[k] for k in order[: mix * job.n_parts]))


def _fitted(matrix: Matrix, stored: Matrix, new: Collection) -> Matrix:
    """Return a matrix with the dtype of the store."""
    if matrix.is_sparse != stored.is_sparse:
        kinds = [("sparse" if each.is_sparse else "dense") for each in (matrix, stored)]
        msg = f"`{matrix.name}` is {kinds[0]}, but {kinds[1]} in the store; write it like that"
        raise MismatchError(msg)
    for source in new.sources:
        dtype = source.elements[matrix.name].dtype
        if not np.can_cast(dtype, stored.dtype, "safe"):
            msg = (
                f"{source.location}: `{matrix.name}` is {dtype}, which {stored.dtype}, the dtype "
                "in the store, cannot hold; write it with that dtype"
            )
            raise MismatchError(msg)
    return replace(matrix, dtype=stored.dtype)


# Writing parts on the workers of a Dask cluster. The tasks carry all that a worker needs: the
# output, the job and its opened inputs, pickled. Any worker can write any part, also one that joins
# later.

_RETRIES = 3  # of a part, after an error; Dask counts deaths of workers separately
_SECONDS_TO_CONNECT = 20
_ONE_AT_A_TIME = threading.Lock()  # a process holds the buffers of one part


def write_on_dask(
    address: str,
    folder: OutputFolder,
    job: Job,
    inputs: Inputs,
    numbers: Sequence[int],
    on_part: Callable[[int], object],
) -> None:
    """Write parts on the workers of a Dask cluster, one at a time on each.

    Parameters
    ----------
    address
        Address of the scheduler.
    folder, job, inputs
        The output and the inputs, which workers must see under the same paths, and the job.
    numbers
        Numbers of the parts.
    on_part
        Called with the number of each part when it is complete.

    Raises
    ------
    ParameterError
        Dask is not installed, there is no scheduler, it has no workers, one of them has too little
        memory, several died while writing the same part, or the scheduler ended.
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
    # The rows of a large selection are in the graph on purpose.
    no_warning = {"distributed.admin.large-graph-warning-threshold": "1 TB"}
    with client, import_module("dask").config.set(no_warning):
        workers = client.scheduler_info(n_workers=-1)["workers"]
        if not workers:
            msg = "the Dask scheduler has no workers; start some with `dask worker ADDRESS`"
            raise ParameterError(msg)
        for name, worker in workers.items():
            limit = worker["memory_limit"]
            if limit and limit < job.memory:
                msg = (
                    f"the Dask worker {name} may use {format_bytes(limit)}, less than the "
                    f"{format_bytes(job.memory)} of `memory`; give less `memory`, or give the "
                    "workers more"
                )
                raise ParameterError(msg)
        # A task of its own: workers send it to each other, and repeat it if it is lost.
        pickled = client.submit(bytes, pickle.dumps((folder, job, inputs)), pure=False)
        futures = client.map(
            write_on_worker, numbers, pickled=pickled, pure=False, retries=_RETRIES
        )
        try:
            for future in distributed.as_completed(futures, loop=client.loop):
                on_part(future.result())
        except distributed.CancelledError as error:
            msg = f"the Dask scheduler at {address} ended; start one, and repeat the call to resume"
            raise ParameterError(msg) from error
        except distributed.KilledWorker as error:
            msg = (
                "several Dask workers died while writing the same part; give less `memory`, or "
                "give the workers more"
            )
            raise ParameterError(msg) from error


def write_on_worker(number: int, pickled: bytes) -> int:
    """Write a part, unless it exists, in the process of a Dask worker; return its number."""
    with _ONE_AT_A_TIME:
        folder, job, inputs = _unpickled(pickled)

        def check_record(_: float) -> None:
            # Dask cannot stop a running task, so it checks that its output is still wanted.
            if folder.begun() != job:
                msg = f"{folder.path}: a Dask worker does not see it, or it was begun anew"
                raise PathError(f"{msg}; give an output that all machines share")

        check_record(0)
        for file in (*job.inputs, *job.linked):
            try:
                file.check()
            except PathError as error:
                msg = f"{error} on a Dask worker; give paths that all machines share"
                raise PathError(msg) from error
        # Dask repeats what a worker had completed before it died.
        if not folder.part(job.first_part + number).exists():
            write_part(folder, job, inputs, number, check_record)
    return number


@lru_cache(maxsize=1)
def _unpickled(pickled: bytes) -> tuple[OutputFolder, Job, Inputs]:
    value: tuple[OutputFolder, Job, Inputs] = pickle.loads(pickled)  # noqa: S301 - ours
    return value


# Checking the result: every cell once, and a sample of values.

_SAMPLED_CELLS = 128


def check_store(
    folder: OutputFolder, job: Job, inputs: Inputs, on_part: Callable[[int], object]
) -> None:
    """Check the written store against the inputs, reading only part of it.

    For every part, the provenance of each cell is checked; for a sample of cells, everything.

    Parameters
    ----------
    folder, job, inputs
        The output, and the job and inputs that it must match.
    on_part
        Called with the number of parts that have been checked.

    Raises
    ------
    FormatError
        A part is damaged; the message names it, and the remedy.
    """
    written = np.zeros(len(inputs.collection), dtype=bool)
    rng = np.random.default_rng(0)
    for number in range(job.n_parts):
        path, part = folder.part(job.first_part + number), inputs.part(job, number)
        rows = part.rows[part.order]
        written[rows] = True
        provenance = inputs.obs.read(part.rows, inputs.obs.provenance).iloc[part.order]
        n_sampled = min(-(-_SAMPLED_CELLS // job.n_parts), rows.size)
        chosen = rng.choice(rows.size, n_sampled, replace=False)
        chosen = chosen[np.argsort(rows[chosen])]
        obs, cells = inputs.obs.read(rows[chosen]), inputs.collection[rows[chosen]]
        try:
            difference = _difference(path, provenance, chosen, obs, cells)
        except Exception as error:  # zarr and its codecs have no common base of what they raise
            raise _damaged(path, f"cannot be read ({one_line(error)})") from error
        if difference is not None:
            raise _damaged(path, difference)
        on_part(number + 1)
    n_written = int(np.count_nonzero(written))
    if n_written != job.n_cells:  # parts overlap, or leave out some: a mistake in the plan
        msg = (
            f"{folder.path}: {job.n_cells - n_written} cells are missing; remove it, "
            "and report this as a bug of cellfeed"
        )
        raise FormatError(msg)


def _difference(
    path: Path, provenance: pd.DataFrame, chosen: NDArray[np.intp], obs: pd.DataFrame, cells: Cells
) -> str | None:
    """Return how a part differs from its input; None if it does not.

    Parameters
    ----------
    path
        The part.
    provenance
        The file and the row of each of its cells.
    chosen, obs, cells
        Places of some of its cells, with their obs and their elements.
    """
    [source] = open_parts([path], [*cells.elements])
    file, row = map(str, provenance)
    found = source.read_obs([file, row])
    files, expected_files = (each[file].cat.codes for each in (found, provenance))
    same_files = np.array_equal(files, expected_files)
    if not (same_files and np.array_equal(found[row], provenance[row])):
        return "has other cells"
    places = np.sort(chosen)
    table = source.read_obs_rows([*obs], places).iloc[np.searchsorted(places, chosen)]
    if not table.astype(object).equals(obs.astype(object)):
        return "has obs that differs from the input"
    written = Collection([source])[chosen]
    for name, expected in cells.elements.items():
        one, other = (
            np.asarray(each if isinstance(each, np.ndarray) else each.toarray())
            for each in (written[name], expected)
        )
        if not np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
            return f"has values of `{name}` that differ from the input"
    return None


def _damaged(path: Path, what: str) -> FormatError:
    return FormatError(f"{path}: it {what}; remove this folder and run the same command again")


PathLike = str | os.PathLike[str]
Progress = Callable[[str, float, float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preshuffled:
    """A copy of a collection.

    Attributes
    ----------
    path
        Path of the zarr store.
    n_cells, n_parts
        Number of cells, and of the AnnData groups that they are divided into.
    n_parts_written
        Number of parts that this run wrote; the others existed already.
    n_bytes
        Size on disk, in bytes.
    seconds
        Duration of this run.
    provenance
        Names of the two obs columns with the file of each cell, and its row in that file.
    """

    path: Path
    n_cells: int
    n_parts: int
    n_parts_written: int
    n_bytes: int
    seconds: float
    provenance: tuple[str, str]


def preshuffle(
    paths: PathLike | Iterable[PathLike],
    out: PathLike,
    *,
    elements: Sequence[str] | Literal["all"] | None = None,
    join_vars: JoinVars = "same",
    genes: Sequence[str] | pd.Series | NDArray[np.bool_] | None = None,
    where: str | None = None,
    rows: NDArray[np.integer | np.bool_] | Sequence[int] | None = None,
    in_order: bool = False,
    group_by: str | Sequence[str] | None = None,
    append: bool = False,
    mix: int = 0,
    seed: int = 0,
    block_size: int | None = None,
    memory: int = 4_000_000_000,
    codec: Literal["delta", "annbatch"] | None = None,
    cells_per_chunk: int = 64,
    scheduler: str | None = None,
    on_progress: Progress | None = None,
) -> Preshuffled:
    """Write a copy of a collection, shuffled or in order, as a zarr store of AnnData groups.

    Blocks of cells are assigned to parts at random, and the cells of each part are shuffled. Each
    part is an AnnData group ``dataset_<number>`` of the store. Its obs has the columns of all
    files, with the union of their categories and unchanged cell names (which need not be unique;
    the provenance columns are). Values are unchanged, but for the dtype if files have several; see
    `Collection.dtype`. ``uns``, ``obsp``, ``varm`` and ``varp`` are not written, and MuData is
    refused.

    To resume a run that was stopped or killed, repeat the same call: only missing parts are
    written. The content depends on the files and on all parameters except ``scheduler``, but not on
    the writing processes or on interruptions.

    Parameters
    ----------
    paths
        Paths and URLs, as for `open_collection`.
    out
        Path of the store, usually ending in ``.zarr``. It must not exist, unless this call began
        it.
    elements
        Names of the elements to write, as for `open_collection`; or ``"all"``, for all that AnnData
        files have. The default is ``"X"``, or the elements of the store with ``append``.
    join_vars, genes
        Which genes to write, as for `open_collection`. If files differ, each gene's row of ``var``
        is that of the first file that has it.
    where
        A condition on obs, as for `Collection.where`, which the cells to write fulfil.
    rows
        Rows of the collection to write, distinct, shape (n,), or a mask of booleans, shape
        (n_cells,), in place of ``where``.
    in_order
        Whether to keep the order of the cells. Each part is then a range of them.
    group_by
        Names of obs columns. The cells of each part are then sorted by their values (categories in
        their order, missing values last), and shuffled only within groups, so that
        `GroupedSampling` over these columns reads few chunks. Other strategies need small blocks
        there.
    append
        Whether to add the cells to the store ``out``, which `preshuffle` has written, as new parts,
        shuffled among themselves. The elements are those of the store, and so are the genes:
        ``join_vars`` says whether files may have more ("inner", others are left out) or also fewer
        ("outer", these are zero). Categories of obs are extended, the old ones first. Until all is
        written and checked, the store stays as it was.
    mix
        With ``append``, the number of parts of the store, chosen at random, that are merged with
        each new part: their cells and the new ones are shuffled together into parts that replace
        them. This writes ``1 + mix`` times the new cells, and makes those as well mixed with the
        others as ``1 + mix`` times smaller blocks would.
    seed
        Seed of the random order.
    block_size
        Number of cells that are read together. Smaller blocks mix better and take longer. The
        default is the smallest power of two that spans at least 8 chunks of the files, so that
        partially used chunks cost at most an eighth, and at least 64; it is smaller if a part would
        otherwise have fewer than 64 blocks.
    memory
        Bytes for the buffers, in addition to about 0.4 GB for libraries. A part
        takes three quarters of it, so more memory makes fewer parts, which mix better.
    codec
        Encoding of sparse rows. ``"delta"`` stores column indices as differences and counts as
        narrow integers, with filters of numcodecs: half the size, and twice as fast to read
        with cellfeed. zarr, anndata and annbatch also read it, in Python and therefore slower.
        ``"annbatch"`` stores them as annbatch does, which reads them with compiled codecs. The
        default is ``"delta"``, or that of the store with ``append``.
    cells_per_chunk
        Mean number of cells in a chunk, the smallest unit that is read. Smaller chunks make single
        cells faster to read, and the store larger.
    scheduler
        Address of a Dask scheduler, such as ``"tcp://10.0.0.1:8786"``. Its workers then write
        the parts, one at a time each. They must see ``paths`` and ``out`` under the same paths as
        this process.
    on_progress
        Called with a stage, and what of it is done and in total: "write" and numbers of cells;
        "check" and numbers of parts.

    Returns
    -------
    A `Preshuffled` with size and time.

    Raises
    ------
    PathError
        A file is missing, or a Dask worker does not see it; or ``out`` is a URL.
    FormatError
        A file is damaged, or the check of the written store failed.
    MismatchError
        The files cannot form one collection, or do not fit the store, or changed during the run.
    ParameterError
        ``paths`` has something other than paths, ``out`` contains something else or was begun with
        other parameters, a number is out of range, or Dask, its scheduler or its workers are
        missing.
    OSError
        The disk is full or not writable.

    Examples
    --------
    >>> import tempfile
    >>> from cellfeed.synthetic import write_tahoe_like
    >>> folder = Path(tempfile.mkdtemp())
    >>> paths = write_tahoe_like(folder, n_cells=100, n_genes=500, n_plates=2, n_drugs=4)
    >>> done = preshuffle(paths, folder / "shuffled.zarr", seed=1)
    >>> done.n_cells, done.n_parts, done.provenance
    (100, 1, ('source_file', 'source_row'))
    >>> import anndata
    >>> anndata.read_zarr(done.path / "dataset_0").shape
    (100, 500)
    """
    start = time.perf_counter()
    tell: Progress = on_progress or (lambda *_: None)
    paths = _listed(paths)
    out = writable_path(out)
    _check_apart(out, paths)
    folder = OutputFolder(out.absolute())
    begun, finished = folder.begun(), folder.finished()
    if mix and not append:
        raise ParameterError("`mix` needs `append`; leave it out, or give append=True")
    if append and not finished:
        msg = f"{out}: is not a complete store of `cellfeed preshuffle`"
        raise ParameterError(f"{msg}; write it without `append`")
    settings: dict[str, Any] = {
        "join_vars": join_vars,
        "block_size": block_size,
        "in_order": in_order,
        "group_by": _group_columns(group_by, in_order=in_order),
        "seed": seed,
        "memory": memory,
        "codec": codec or (finished[0].codec if append else "delta"),
        "cells_per_chunk": cells_per_chunk,
    }
    collection = selected = None
    if append:
        begun = None if begun in finished else begun
        asked = (elements, where, None if genes is None else [*genes], mix)
        request = describe_request(paths, asked, rows, settings)
        job = finished[-1]
        if job.request != request:
            if genes is not None:
                raise ParameterError("`genes` and `append` cannot be combined; leave out `genes`")
            collection, selected, job = describe_extension(
                folder,
                paths,
                finished[0].elements if elements is None else names_of(paths, elements),
                lambda new: _selected(new, where, rows),
                mix=mix,
                begun=begun,
                request=request,
                **settings,
            )
    else:
        begun = finished[0] if finished else begun
        names = names_of(paths, ("X",) if elements is None else elements)
        collection = open_collection(paths, elements=names, join_vars=join_vars, genes=genes)
        selected = _selected(collection, where, rows)
        digest = "" if genes is None else _digest_of_genes(genes)
        job = describe_job(collection, rows=selected, genes=digest, **settings)
    if begun is not None and (difference := job.difference(begun)):
        remedy = f"or remove {out}/.cellfeed to give it up" if append else "or give another output"
        msg = f"{out}: was begun {difference}; repeat the same call, {remedy}"
        raise ParameterError(msg)
    n_written = 0
    if collection is not None and job not in finished:
        inputs = Inputs.open(job, collection, selected)
        folder.begin(job)
        n_written = _write_and_check(folder, job, inputs, scheduler, tell)
    folder.clean()
    numbers = folder.numbers()
    [newest] = open_parts([folder.part(numbers[-1])], ())
    source_file, source_row = newest.obs_names()[-2:]
    return Preshuffled(
        path=out,
        n_cells=sum(each.n_cells - each.n_replaced for each in folder.finished()),
        n_parts=len(numbers),
        n_parts_written=n_written,
        n_bytes=folder.n_bytes(),
        seconds=time.perf_counter() - start,
        provenance=(source_file, source_row),
    )


def _write_and_check(
    folder: OutputFolder, job: Job, inputs: Inputs, scheduler: str | None, tell: Progress
) -> int:
    """Write what is missing of a job, check all of it, and finish it; return how many parts."""
    with folder.held():
        if job.n_stored:
            folder.remove_others(job)
        first = job.first_part
        missing = [n for n in range(job.n_parts) if not folder.part(first + n).exists()]
        n_cells = job.n_cells - sum(map(job.part_size, missing))
        tell("write", n_cells, job.n_cells)

        def on_part(number: int) -> None:
            nonlocal n_cells
            n_cells += job.part_size(number)
            tell("write", n_cells, job.n_cells)

        if scheduler is not None and missing:
            write_on_dask(scheduler, folder, job, inputs, missing, on_part)
        else:
            for number in missing:
                size = job.part_size(number)

                def on_share(share: float, size: int = size) -> None:
                    tell("write", n_cells + share * size, job.n_cells)

                write_part(folder, job, inputs, number, on_share)
                on_part(number)
        check_store(folder, job, inputs, lambda n: tell("check", n, job.n_parts))
        for file in (*job.inputs, *job.linked):
            file.check()
        folder.finish(job)
    return len(missing)


def _digest_of_genes(genes: Any) -> str:
    """Return a digest of chosen genes, names or booleans; of a Series, with its index."""
    index = genes.index if isinstance(genes, pd.Series) else ()
    return digest_of(json.dumps([np.asarray(genes).tolist(), [*map(str, index)]]))


def _selected(collection: Collection, where: str | None, rows: Any) -> NDArray[np.int64] | None:
    """Return the rows to write, ascending; None for all."""
    if where is None and rows is None:
        return None
    if where is not None and rows is not None:
        raise ParameterError("`where` and `rows` cannot be combined; leave out one of them")
    if where is not None:
        found = collection.where(where)
        if not found.size:
            raise ParameterError(f"no cell fulfils `where`, {where!r}; check the values")
        return found
    try:
        numbers = row_numbers(rows, len(collection))
    except IndexError as error:
        raise ParameterError(f"`rows`: {error}; give rows of the files together") from error
    found = np.unique(numbers)
    if not found.size or found.size < numbers.size:
        what = "has a row twice" if found.size else "is empty"
        raise ParameterError(f"`rows` {what}; give each row once, and at least one")
    return found


def _group_columns(group_by: str | Sequence[str] | None, *, in_order: bool) -> tuple[str, ...]:
    if group_by is None:
        return ()
    if not isinstance(group_by, str):
        require_list("group_by", "columns", group_by)
    columns = (group_by,) if isinstance(group_by, str) else tuple(group_by)
    if in_order or not columns:
        what = "cannot be combined with `in_order`" if in_order else "is empty"
        raise ParameterError(f"`group_by` {what}; leave one of them out, or name obs columns")
    return columns


def _listed(paths: Any) -> list[PathLike]:
    is_several = isinstance(paths, Iterable) and not isinstance(paths, str | os.PathLike)
    if is_several:
        require_list("paths", "paths", paths)
    given = list(paths) if is_several else [paths]
    for each in given:
        if not isinstance(each, str | os.PathLike):
            msg = f"`preshuffle` takes paths, but got `{type(each).__name__}`"
            raise ParameterError(
                f"{msg}; give the path of its file, or write it with `AnnData.write_h5ad`"
            )
    return given


def _check_apart(out: Path, paths: list[PathLike]) -> None:
    """Refuse an output that would be among the inputs when the run is resumed."""
    folders = [Path(path).expanduser().resolve() for path in paths]
    for folder in (out.resolve(), out.resolve().parent):
        if folder in folders and (folder.is_dir() or folder == out.resolve()):
            msg = f"{out}: is among the inputs; give an output outside of the folder"
            raise ParameterError(msg)
