"""A small collection that lies on disk."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

N_CELLS_PER_FILE = 1500


@pytest.fixture(scope="session")
def small_collection(tmp_path_factory):
    """Three files, one plate each, with cells of a type lying together."""
    folder = tmp_path_factory.mktemp("plates")
    rng = np.random.default_rng(0)
    for number in range(3):
        matrix = sp.csr_matrix(rng.poisson(0.2, (N_CELLS_PER_FILE, 50)).astype(np.float32))
        obs = pd.DataFrame(
            {
                "plate": pd.Categorical([f"p{number}"] * N_CELLS_PER_FILE),
                "cell_type": pd.Categorical(
                    np.repeat(["B", "NK", "T"], N_CELLS_PER_FILE // 3).tolist()
                ),
                "constant": "same",
            },
            index=[f"{number}-{cell}" for cell in range(N_CELLS_PER_FILE)],
        )
        adata = ad.AnnData(matrix, obs=obs)
        adata.write_h5ad(folder / f"plate{number}.h5ad", compression="gzip")
    return folder
