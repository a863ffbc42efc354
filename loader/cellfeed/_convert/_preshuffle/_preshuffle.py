"""`preshuffle`: begin or resume, write the parts, check, finish."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, sparse_dataset
from numpy.typing import NDArray

from cellfeed._collection import open_collection
from cellfeed._convert._preshuffle._dask import write_parts_on_dask
from cellfeed._convert._preshuffle._job import Job, OutputFolder, describe_job
from cellfeed._convert._preshuffle._part import Inputs, peak_memory, token_of, write_part
from cellfeed._decode import expect_numcodecs
from cellfeed._errors import FormatError, ParameterError
from cellfeed._runs import merge_consecutive

# Checking the result: every cell once, the numbers of elements, and a sample of values.

_SAMPLED_CELLS = 128


def check_store(
    folder: OutputFolder, job: Job, inputs: Inputs, on_part: Callable[[int], object]
) -> None:
    """Check the written store against the inputs, reading only part of it.

    For every part, the provenance of each cell and the row pointers are checked; for a sample of
    cells, everything.

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
    expect_numcodecs()
    seen = np.zeros(job.n_cells, dtype=bool)
    sampled = -(-_SAMPLED_CELLS // job.n_parts)
    rng = np.random.default_rng(0)
    source_file, source_row = inputs.obs.provenance
    for number in range(job.n_parts):
        path, expected = folder.part(number), job.part(number)
        try:
            group: Any = zarr.open_group(path, mode="r")
            codes = group["obs"][source_file]["codes"][:].astype(np.int64)
            rows = inputs.obs.starts[codes] + group["obs"][source_row][:]
            _require(path, np.array_equal(rows, expected.rows[expected.order]), "other cells")
            seen[rows] = True
            merged = _check_matrix(path, group, job, rows, inputs)
            chosen = rng.choice(rows.size, min(sampled, rows.size), replace=False)
            chosen = np.union1d(chosen, merged[:_SAMPLED_CELLS])
            _check_cells(path, group, inputs, rows, chosen)
        except FormatError:
            raise
        except Exception as error:  # zarr and its codecs have no common base of what they raise
            raise _damaged(path, f"it cannot be read ({error})") from error
        on_part(number + 1)
    if not seen.all():  # parts do not overlap, nor leave out any: a mistake in the plan
        msg = (
            f"{folder.path}: {job.n_cells - int(seen.sum())} cells are missing; remove it, "
            "and report this as a bug of cellfeed"
        )
        raise FormatError(msg)


def _check_matrix(
    path: Path, group: Any, job: Job, rows: NDArray[np.int64], inputs: Inputs
) -> NDArray[np.intp]:
    """Check the shape, and the number of elements of each cell.

    Returns
    -------
    Cells of the part with fewer elements than in the file, which is correct only if the file has
    duplicates, since reading sums them.
    """
    X = group["X"]
    if job.n_elements is None:
        _require(path, X.shape == (rows.size, job.n_vars), f"it has shape {X.shape}")
        return np.empty(0, dtype=np.intp)
    lengths = np.diff(X["indptr"][:].astype(np.int64))
    _require(
        path, lengths.size == rows.size, f"it has {lengths.size} rows, but {rows.size} expected"
    )
    complete = X["data"].shape == X["indices"].shape == (lengths.sum(),)
    _require(path, complete, "its numbers of elements do not match its row pointers")
    order, stored = np.argsort(rows), np.empty(rows.size, dtype=np.int64)
    stored[order] = inputs.collection.row_lengths(job.element, merge_consecutive(rows[order]))
    _require(path, bool(np.all(lengths <= stored)), "it has more elements than the input")
    return np.flatnonzero(lengths < stored)


def _check_cells(
    path: Path, group: Any, inputs: Inputs, rows: NDArray[np.int64], chosen: NDArray[np.intp]
) -> None:
    """Compare the given cells with the input, value by value."""
    order = np.argsort(rows[chosen])
    wanted, places = rows[chosen][order], chosen[order]
    written = group["X"] if hasattr(group["X"], "dtype") else sparse_dataset(group["X"])
    found, expected = _dense(written[chosen])[order], _dense(inputs.collection[wanted].X)
    is_same = np.array_equal(found, expected, equal_nan=True)
    _require(path, is_same, "its values differ from the input")
    obs: pd.DataFrame = read_elem(group["obs"])
    is_same = obs.iloc[places].astype(object).equals(inputs.obs.read(wanted).astype(object))
    _require(path, is_same, "its obs differs from the input")


def _dense(matrix: Any) -> NDArray[Any]:
    dense: NDArray[Any] = matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
    return dense


def _require(path: Path, holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as "require"
    if not holds:
        raise _damaged(path, f"it has {otherwise}")


def _damaged(path: Path, what: str) -> FormatError:
    msg = f"{path}: {what}; remove this folder and run the same command again"
    return FormatError(msg)


PathLike = str | os.PathLike[str]
Progress = Callable[[str, float, float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preshuffled:
    """A shuffled copy of a collection.

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
    peak_memory_bytes
        Peak memory of this process, or of a Dask worker.
    provenance
        Names of the two obs columns with the file of each cell, and its row in that file.
    """

    path: Path
    n_cells: int
    n_parts: int
    n_parts_written: int
    n_bytes: int
    seconds: float
    peak_memory_bytes: int
    provenance: tuple[str, str]


def preshuffle(
    paths: PathLike | Iterable[PathLike],
    out: PathLike,
    *,
    element: str = "X",
    seed: int = 0,
    block_size: int | None = None,
    memory: int = 4_000_000_000,
    codec: Literal["delta", "annbatch"] = "delta",
    cells_per_chunk: int = 64,
    scheduler: str | None = None,
    on_progress: Progress | None = None,
) -> Preshuffled:
    """Write a shuffled copy of a collection, as a zarr store of AnnData groups.

    Blocks of cells are assigned to parts at random, and the cells of each part are shuffled. Each
    part is an AnnData group ``dataset_<number>`` of the store. ``obs`` has the columns of all
    files, with the union of their categories and unchanged cell names (which need not be unique;
    the provenance columns are). ``var`` is from the first file, and ``X`` has unchanged values.
    Nothing else is written.

    To resume a run that was stopped or killed, repeat the same call: only missing parts are
    written. The content depends on the files and on all parameters except ``scheduler``, but not on
    the writing processes or on interruptions.

    Parameters
    ----------
    paths
        Paths and URLs, as for `open_collection`; all must have the same genes.
    out
        Path of the store, usually ending in ``.zarr``. It must not exist, unless this call began
        it.
    element
        The element to write as ``X``: ``"X"`` or ``"layers/NAME"``.
    seed
        Seed of the random order.
    block_size
        Number of cells that are read together. Smaller blocks mix better and take longer. The
        default is the smallest power of two that spans at least 8 chunks of the files, so that
        partially used chunks cost at most an eighth, and at least 64; it is smaller if a part would
        otherwise have fewer than 64 blocks.
    memory
        Bytes for the buffers of one process, in addition to about 0.4 GB for libraries. A part
        takes three quarters of it, so more memory makes fewer parts, which mix better.
    codec
        Encoding of sparse rows. ``"delta"`` stores column indices as differences and counts as
        narrow integers, with filters of numcodecs: half the size, and twice as fast to read
        with cellfeed. zarr, anndata and annbatch also read it, in Python and therefore slower.
        ``"annbatch"`` stores them as annbatch does, which reads them with compiled codecs.
    cells_per_chunk
        Mean number of cells in a chunk, the smallest unit that is read. Smaller chunks make single
        cells faster to read, and the store larger.
    scheduler
        Address of a Dask scheduler, such as ``"tcp://10.0.0.1:8786"``. Its workers then write
        the parts, one at a time each. They must see ``paths`` and ``out`` under the same paths as
        this process.
    on_progress
        Called with "write" and numbers of cells (done and in total), then with "check" and numbers
        of parts.

    Returns
    -------
    A `Preshuffled` with size, time and memory.

    Raises
    ------
    PathError
        A file is missing, or a Dask worker does not see it.
    FormatError
        A file is damaged, or the check of the written store failed.
    MismatchError
        The files cannot form one collection, or changed during the run.
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
    _check_apart(Path(out), paths)
    collection = open_collection(paths, elements=[element])
    job = describe_job(
        collection,
        seed=seed,
        block_size=block_size,
        memory=memory,
        codec=codec,
        cells_per_chunk=cells_per_chunk,
    )
    folder = OutputFolder(Path(out).absolute())
    begun = folder.begun()
    if begun is not None and (difference := job.difference(begun)):
        msg = f"{out}: was begun {difference}; repeat the same call, or give another output"
        raise ParameterError(msg)
    missing = list[int]()
    peak = 0
    inputs = Inputs.open(job, collection)
    if not folder.is_finished():
        folder.begin(job)
        with folder.held():
            folder.remove_leftovers()
            missing = [n for n in range(job.n_parts) if not folder.part(n).exists()]
            peak = _write(folder, job, inputs, missing, scheduler, tell)
            check_store(folder, job, inputs, lambda n: tell("check", n, job.n_parts))
            for file in (*job.inputs, *job.linked):
                file.check()
            folder.finish(job)
    folder.remove_work()
    return Preshuffled(
        path=Path(out),
        n_cells=job.n_cells,
        n_parts=job.n_parts,
        n_parts_written=len(missing),
        n_bytes=folder.n_bytes(),
        seconds=time.perf_counter() - start,
        peak_memory_bytes=max(peak, peak_memory()),
        provenance=inputs.obs.provenance,
    )


def _write(
    folder: OutputFolder,
    job: Job,
    inputs: Inputs,
    missing: list[int],
    scheduler: str | None,
    tell: Progress,
) -> int:
    """Write missing parts; return the peak memory of a Dask worker."""
    done = job.n_cells - sum(map(job.part_size, missing))
    tell("write", done, job.n_cells)
    peak = 0
    if scheduler is None:
        for number in missing:
            before, size = done, job.part_size(number)
            write_part(
                folder, job, inputs, number,
                lambda share, before=before, size=size: tell(  # type: ignore[misc]
                    "write", before + share * size, job.n_cells
                ),
            )  # fmt: skip
            done += size
    elif missing:

        def on_part(number: int, worker_peak: int) -> None:
            nonlocal done, peak
            done, peak = done + job.part_size(number), max(peak, worker_peak)
            tell("write", done, job.n_cells)

        write_parts_on_dask(
            scheduler,
            path=str(folder.path),
            token=token_of(job),
            memory=job.memory,
            numbers=missing,
            on_part=on_part,
        )
    tell("write", job.n_cells, job.n_cells)
    return peak


def _listed(paths: Any) -> list[PathLike]:
    is_several = isinstance(paths, Iterable) and not isinstance(paths, str | os.PathLike)
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
