"""Synthetic collections that resemble Tahoe-100M, to try settings, to test and to benchmark.

Nothing is downloaded; the content depends only on the parameters and a seed.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import writable_path
from cellfeed.console import format_bytes
from cellfeed.extending import ParameterError
from cellfeed.synthetic._plates import Experiment, typical_nonzeros, write_plates

__all__ = ["plate_sizes", "write_tahoe_like"]

# Increase it whenever the same parameters give other content.
_GENERATOR = "cellfeed tahoe-like 1"
_MANIFEST = "collection.json"


def write_tahoe_like(
    folder: str | os.PathLike[str],
    *,
    n_cells: int,
    seed: int = 0,
    n_genes: int = 62_710,
    n_plates: int = 14,
    n_cell_lines: int = 50,
    n_drugs: int = 380,
    on_progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write a collection that resembles Tahoe-100M, one h5ad file per plate.

    Cells of one condition (plate, drug, dosage and cell line) are contiguous, and nothing is
    shuffled. Expression depends strongly on the cell line, hierarchically on the drug (broad
    mechanism, fine mechanism, drug; more at higher dosage) and slightly on the plate. Each drug
    occurs on as many plates as it has dosages, so a model can be trained on all plates but one
    and tested on that one. Small collections have fewer cell lines per drug.

    Parameters
    ----------
    folder
        Folder for ``plate01.h5ad``, ``plate02.h5ad`` and so on, created if needed. If it already
        contains the same collection, only missing plates are written.
    n_cells
        Number of cells in the collection, at least 10 per plate. With 14 plates, their shares are
        between 4.7 % and 10.4 %, with an entropy of 3.78 bits; with any other number, the shares
        are equal.
    seed
        The same seed and parameters give the same content, with the same version of NumPy.
    n_genes
        Number of genes, the same in all files. A cell has about 2,230 non-zero counts with the
        default, and fewer if there are fewer genes.
    n_plates, n_cell_lines, n_drugs
        Sizes of the experiment; each drug is given at 0.05, 0.5 and 5 micromolar.
    on_progress
        Called from time to time with the number of cells written so far, and finally with
        ``n_cells``. Not called if nothing needs to be written.

    Returns
    -------
    The paths of the files, in the order of the plates. In each, ``X`` is a gzipped CSR matrix of
    float32 counts; ``obs`` has the categorical columns ``plate``, ``cell_line``, ``drug``,
    ``moa_broad`` and ``moa_fine``, the ``dosage`` in micromolar (float64) and ``n_counts``, the
    cell's sum of counts (float32).

    Raises
    ------
    ParameterError
        A size is out of range, ``seed`` is negative, or ``folder`` contains another collection.
    PathError
        ``folder`` is a URL.
    OSError
        The folder cannot be written to, or the disk has too little space.

    Examples
    --------
    >>> import tempfile
    >>> import anndata
    >>> folder = tempfile.TemporaryDirectory()
    >>> paths = write_tahoe_like(folder.name, n_cells=100, n_genes=500, n_plates=2, n_drugs=4)
    >>> [path.name for path in paths]
    ['plate01.h5ad', 'plate02.h5ad']
    >>> plate = anndata.read_h5ad(paths[0])
    >>> plate.shape
    (50, 500)
    >>> list(plate.obs)
    ['plate', 'cell_line', 'drug', 'dosage', 'moa_broad', 'moa_fine', 'n_counts']
    >>> folder.cleanup()
    """
    experiment = Experiment(
        n_cells=n_cells,
        seed=seed,
        n_genes=n_genes,
        n_plates=n_plates,
        n_cell_lines=n_cell_lines,
        n_drugs=n_drugs,
    )
    folder = writable_path(folder)
    paths = [folder / f"{name}.h5ad" for name in experiment.plate_names]
    manifest = folder / _MANIFEST
    description = json.dumps({"generator": _GENERATOR, **asdict(experiment)}, indent=2, default=int)
    is_claimed = manifest.exists() and manifest.read_bytes() == description.encode()
    # Readers of plate*.h5ad would take any other plate for part of this collection.
    others = [] if is_claimed else sorted(folder.glob("plate*.h5ad"))
    if others:
        msg = f"`{folder}` contains another collection, with `{others[0].name}`"
        raise ParameterError(f"{msg}; choose another folder, or remove its plates")
    missing = {plate: path for plate, path in enumerate(paths) if not path.exists()}
    n_there = n_cells - int(experiment.cells_per_plate()[list(missing)].sum())
    # Before anything is written: a full disk can crash HDF5.
    needed = len(missing) * (100_000 + 40 * n_genes) + (n_cells - n_there) * (
        60 + round(2.5 * typical_nonzeros(n_genes))
    )
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if needed > (free := shutil.disk_usage(existing).free):
        msg = f"about {format_bytes(needed)} are needed, but {format_bytes(free)} are free"
        raise OSError(errno.ENOSPC, msg, str(folder))
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        manifest.write_text(description)
        tell = on_progress or (lambda _: None)
        write_plates(experiment, missing, lambda n: tell(n_there + n))
    return paths


def plate_sizes(n_cells: int, n_plates: int = 14) -> NDArray[np.int64]:
    """Return the number of cells on each plate of such a collection.

    The sizes suffice to study label entropy, which does not depend on counts.

    Parameters
    ----------
    n_cells, n_plates
        See `write_tahoe_like`.

    Returns
    -------
    Number of cells of each plate, in the order of the plates, int64, shape (n_plates,).

    Raises
    ------
    ParameterError
        There are fewer than 10 cells per plate.

    Examples
    --------
    >>> plate_sizes(1_000)
    array([ 76,  54,  82,  65, 104,  59,  72,  47,  78,  68,  89,  62,  74,
            70])
    """
    experiment = Experiment(
        n_cells=n_cells, seed=0, n_genes=1, n_plates=n_plates, n_cell_lines=1, n_drugs=1
    )
    return experiment.cells_per_plate()
