"""The cells that comparisons of loaders are tested on."""

import pytest

from cellfeed.synthetic import write_tahoe_like

N_CELLS = 700


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plates")
    write_tahoe_like(folder, n_cells=N_CELLS, n_genes=300, n_plates=2, n_drugs=8, seed=0)
    return folder
