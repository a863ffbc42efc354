"""The whole of it: begin or resume, write the parts, check, finish."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cellfeed._collection import open_collection
from cellfeed._errors import ParameterError
from cellfeed._preshuffle._check import check_store
from cellfeed._preshuffle._dask import write_parts_on_dask
from cellfeed._preshuffle._folder import OutputFolder
from cellfeed._preshuffle._job import Job, describe_job
from cellfeed._preshuffle._part import Inputs, peak_memory, token_of, write_part

__all__ = ["Preshuffled", "preshuffle"]

PathLike = str | os.PathLike[str]
Progress = Callable[[str, float, float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preshuffled:
    """A shuffled copy of a collection.

    Attributes
    ----------
    path
        The zarr store.
    n_cells, n_parts
        Cells, and AnnData groups that they are divided among.
    n_parts_written
        Parts that this run wrote; the others were there.
    n_bytes
        Size on disk.
    seconds
        Time that this run took.
    peak_memory_bytes
        The most memory that this process, or a Dask worker, held so far.
    provenance
        Names of the two obs columns that say which file a cell is from, and which row of it.
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

    Blocks of cells are assigned to parts at random, and the cells of a part are shuffled. Each
    part is an AnnData group ``dataset_<number>`` of the store. ``obs`` has the columns of all
    files, with categories unioned and names as they are (they need not be distinct; where a
    cell comes from is), ``var`` is the first file's, ``X`` has the values as they are; nothing
    else is kept.

    A run that was stopped or killed is taken up by the same call: only parts that are missing
    are written. The content depends on the files and on the parameters but ``scheduler``, not
    on who writes it, nor on how often that was interrupted.

    Parameters
    ----------
    paths
        Paths and URLs, as for `open_collection`; all must have the same genes.
    out
        The store, by custom ending in ``.zarr``. It must not exist, unless this call began it.
    element
        What becomes ``X``: ``"X"`` or ``"layers/NAME"``.
    seed
        The order follows from it.
    block_size
        Cells that are read together. Smaller ones mix better and take longer. By default, the
        power of two that is at least 8 chunks of the files long, so that reading parts of
        chunks costs an eighth at most, and 64 at least, unless a part would hold fewer than 64
        blocks.
    memory
        Bytes of the buffers of one process, to which come some 0.4 GB of libraries. A part
        takes three quarters of it, so more memory makes fewer parts, which mix better.
    codec
        How sparse rows are encoded. ``"delta"``: column indices as differences and counts as
        narrow integers, by filters of numcodecs: half the size, and twice as fast to read here.
        zarr, anndata and annbatch read it too, in Python and so slower. ``"annbatch"``: as
        annbatch writes them, which it reads with compiled codecs.
    cells_per_chunk
        What is read at least is a chunk, of so many cells on average. Few make single cells
        fast to read, and the store larger.
    scheduler
        Address of a Dask scheduler, such as ``"tcp://10.0.0.1:8786"``: its workers then write
        the parts, one at a time on each. They must see ``paths`` and ``out`` as this process
        does.
    on_progress
        Called with "write" and numbers of cells, then with "check" and numbers of parts.

    Returns
    -------
    A `Preshuffled`: size, time, memory.

    Raises
    ------
    PathError
        A file is missing, or a Dask worker does not see it.
    FormatError
        A file is damaged, or something was found to be wrong with what was written.
    MismatchError
        The files do not belong to one collection, or changed meanwhile.
    ParameterError
        What is given is no path, ``out`` holds something else or was begun with other
        parameters, a number is out of range, or there is no Dask, scheduler or worker.
    OSError
        The disk is full, or may not be written to.

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
    tell: Progress = on_progress or _silent
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
    if begun is not None:
        _check_same(Path(out), job, begun)
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
            for file in job.inputs:
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
    """Write what is missing; return the most memory that a Dask worker held."""
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


def _check_same(out: Path, job: Job, begun: Job) -> None:
    difference = job.difference(begun)
    if difference is not None:
        msg = f"{out}: was begun {difference}; do the same again, or give another output"
        raise ParameterError(msg)


def _listed(paths: Any) -> list[PathLike]:
    is_several = isinstance(paths, Iterable) and not isinstance(paths, str | os.PathLike)
    given = list(paths) if is_several else [paths]
    for each in given:
        if not isinstance(each, str | os.PathLike):
            msg = f"`preshuffle` takes paths, but got `{type(each).__name__}`"
            raise ParameterError(
                f"{msg}; give the path of what it reads, or write it with `AnnData.write_h5ad`"
            )
    return given


def _check_apart(out: Path, paths: list[PathLike]) -> None:
    """Refuse an output that would be among the inputs when the run is taken up."""
    folders = [Path(path).expanduser().resolve() for path in paths]
    for folder in (out.resolve(), out.resolve().parent):
        if folder in folders and (folder.is_dir() or folder == out.resolve()):
            msg = f"{out}: lies among the inputs; give an output outside of the folder"
            raise ParameterError(msg)


def _silent(stage: str, done: float, total: float) -> None:
    del stage, done, total
