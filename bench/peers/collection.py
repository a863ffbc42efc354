"""The cells that every loader has to deliver: where they are, and how to recognise them."""

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from cellfeed import ParameterError

CELLS_PER_READ = 5_000
DECIMALS = 3  # sums in another order differ beyond this


@dataclass(frozen=True)
class Collection:
    """A folder of plates.

    Attributes
    ----------
    folder, plates
        The folder and its ``.h5ad`` files.
    label
        Column of ``obs`` that loaders deliver with every minibatch.
    n_cells, n_genes, n_nonzero, n_bytes
        Size of all plates together.
    fingerprints
        Number of non-zeros and total count of each cell, shape (n_cells, 2).
    """

    folder: Path
    plates: tuple[Path, ...]
    label: str
    n_cells: int
    n_genes: int
    n_nonzero: int
    n_bytes: int
    fingerprints: np.ndarray

    @property
    def identity(self) -> list:
        """Name, size and time of every plate: a store made from others is rebuilt."""
        return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in self.plates]

    def describe(self) -> str:
        """Describe the collection in one line."""
        return (
            f"{self.n_cells:,} cells x {self.n_genes:,} genes in {len(self.plates)} plates, "
            f"{self.n_nonzero / self.n_cells:,.0f} non-zeros per cell, {self.n_bytes / 1e9:.2f} GB"
        )


def open_collection(folder: Path, label: str) -> Collection:
    """Open a folder of plates, and compute the fingerprint of each cell.

    Raises
    ------
    ParameterError
        The folder cannot be used for a comparison.
    """
    plates = tuple(sorted(folder.resolve().glob("*.h5ad")))
    if not plates:
        raise ParameterError(f"a folder of .h5ad files is needed, but there is none in `{folder}`")
    fingerprints, genes = [], set()
    for plate in plates:
        with h5py.File(plate, "r") as file:
            X = file["X"]
            if X.attrs.get("encoding-type") != "csr_matrix":
                raise ParameterError(f"`X` of every plate must be CSR, but not so in `{plate}`")
            if label not in file["obs"]:
                raise ParameterError(
                    f"`obs` must have the column `{label}`, but not so in `{plate}`"
                )
            genes.add(int(X.attrs["shape"][1]))
            fingerprints.append(_fingerprints(X))
    if len(genes) > 1:
        raise ParameterError(f"plates must have the same genes, but got {sorted(genes)} genes")
    cells = np.concatenate(fingerprints)
    return Collection(
        folder=folder.resolve(),
        plates=plates,
        label=label,
        n_cells=len(cells),
        n_genes=genes.pop(),
        n_nonzero=int(cells[:, 0].sum()),
        n_bytes=sum(plate.stat().st_size for plate in plates),
        fingerprints=cells,
    )


def _fingerprints(X: h5py.Group) -> np.ndarray:
    indptr = X["indptr"][:]
    fingerprints = np.empty((indptr.size - 1, 2))
    for start in range(0, len(fingerprints), CELLS_PER_READ):
        ends = indptr[start : start + CELLS_PER_READ + 1]
        values = X["data"][ends[0] : ends[-1]].astype(np.float64)
        sums = np.concatenate([[0], np.cumsum(values)])[ends - ends[0]]
        here = slice(start, start + ends.size - 1)
        fingerprints[here, 0] = np.diff(ends)
        fingerprints[here, 1] = np.diff(sums)
    return fingerprints


def what_is_wrong(
    collection: Collection, delivered: np.ndarray, seen: dict, *, batch_size: int, output: str
) -> str | None:
    """Return what is wrong with the minibatches of a loader, or None.

    Parameters
    ----------
    collection
        The cells.
    delivered
        Number of non-zeros and total count of each delivered cell, shape (n, 2).
    seen
        Shapes and kinds of the minibatches.
    batch_size
        Cells that a minibatch must have, except one at the end of the epoch.
    output
        "CSR" or "dense".
    """
    layout = "torch.sparse_csr" if output == "CSR" else "torch.strided"
    if seen["kinds"] != [[layout, "torch.float32"]]:
        return f"minibatches must be {layout} of float32, but are {seen['kinds']}"
    if seen["columns"] != [collection.n_genes]:
        return f"minibatches must have {collection.n_genes} columns, but have {seen['columns']}"
    odd = [rows for rows in seen["rows"] if rows != batch_size]
    if len(odd) > 1 or any(rows > batch_size for rows in odd):
        return f"minibatches must have {batch_size} rows, but {len(odd)} have {sorted(set(odd))}"
    return _unknown_cells(collection.fingerprints, delivered)


def _unknown_cells(known: np.ndarray, delivered: np.ndarray) -> str | None:
    cells, n_known = np.unique(known.round(DECIMALS), axis=0, return_counts=True)
    expected = dict(zip(map(tuple, cells.tolist()), n_known.tolist(), strict=True))
    cells, n_delivered = np.unique(delivered.round(DECIMALS), axis=0, return_counts=True)
    for cell, count in zip(map(tuple, cells.tolist()), n_delivered.tolist(), strict=True):
        if cell not in expected:
            return f"a cell came with {cell[0]:.0f} non-zeros and total {cell[1]:g}: there is none"
        if count > expected[cell]:
            return f"cells with {cell[0]:.0f} non-zeros and total {cell[1]:g} came more than once"
    return None
