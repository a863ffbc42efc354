"""A source whose rows arrive: matrices in memory, at URLs."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellfeed.sources import CsrRows, Location, Source, StoredElement, expand


class Rows(StoredElement):
    """Rows of a SciPy CSR array or of a NumPy array."""

    def __init__(self, matrix, genes):
        self._matrix, self._genes = matrix, genes
        self.shape = matrix.shape
        self.dtype = matrix.dtype
        self.layout = "csr" if sp.issparse(matrix) else "dense"

    def var_names(self):
        return np.array(self._genes, object)

    def read_rows(self, runs):
        if self.layout == "dense":
            return self._matrix[expand(runs)]
        parts = [np.empty(0, np.int64)]
        parts += [np.arange(*self._matrix.indptr[run]) for run in runs]
        elements = np.concatenate(parts)
        lengths = np.diff(self._matrix.indptr)[expand(runs)]
        return CsrRows(
            np.concatenate([[0], np.cumsum(lengths)]),
            self._matrix.indices[elements],
            self._matrix.data[elements],
            self.shape[1],
        )


@dataclass
class Arriving(Source):
    location: Location
    elements: dict[str, StoredElement]
    obs: pd.DataFrame = field(default_factory=pd.DataFrame)

    def obs_names(self):
        return list(self.obs.columns)

    def read_obs(self, columns):
        return self.obs[list(columns)]
