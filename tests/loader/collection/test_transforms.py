from functools import partial
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from anndata.experimental import AnnCollection

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    FormatError,
    MultiIndexable,
    ParameterError,
    Streaming,
    adata_to_mindex,
    hf_tahoe_to_tensor,
)

N_ROWS = 24
CELLS: list[dict[str, Any]] = [
    {"genes": [0, 5, 9], "expressions": [1.0, 2.0, 3.0]},
    {"genes": [], "expressions": []},
    {"genes": np.array([4]), "expressions": np.array([7])},
]


@pytest.fixture
def adata():
    X = np.random.default_rng(0).poisson(0.5, (N_ROWS, 7)).astype(np.float32)
    obs = pd.DataFrame(
        {"cell_type": pd.Categorical(["B", "T"] * (N_ROWS // 2)), "number": np.arange(N_ROWS)},
        index=[f"cell{k}" for k in range(N_ROWS)],
    )
    return ad.AnnData(sp.csr_matrix(X), obs=obs)


@pytest.fixture(params=["in memory", "backed", "collection", "dense"])
def stored(request, adata, tmp_path):
    if request.param == "backed":
        adata.write_h5ad(tmp_path / "a.h5ad")
        return ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    if request.param == "collection":
        return AnnCollection([adata[:10].copy(), adata[10:].copy()])
    if request.param == "dense":
        return ad.AnnData(adata.X.toarray(), obs=adata.obs)
    return adata


class TestAdataToMindex:
    def test_rows_come_with_their_obs(self, stored, adata):
        dataset = CellDataset(
            stored,
            BlockShuffling(4),
            batch_size=8,
            fetch_factor=2,
            fetch_transform=partial(adata_to_mindex, columns=["number", "cell_type"]),
            seed=0,
        )
        seen = []
        for minibatch in dataset:
            assert isinstance(minibatch, MultiIndexable)
            assert list(minibatch.keys()) == ["X", "number", "cell_type"]
            rows = minibatch["number"]
            assert type(minibatch["X"]) is np.ndarray
            assert np.array_equal(minibatch["X"], adata.X.toarray()[rows])
            assert minibatch["cell_type"].tolist() == adata.obs["cell_type"].iloc[rows].tolist()
            seen += rows.tolist()
        assert sorted(seen) == list(range(N_ROWS))

    def test_without_columns_there_is_x_alone(self, adata):
        found = adata_to_mindex(adata)
        assert list(found.keys()) == ["X"]
        assert np.array_equal(found["X"], adata.X.toarray())

    @pytest.mark.parametrize(
        ("columns", "error", "said"),
        [
            (["donor"], ColumnError, "^obs has no column 'donor'"),
            (["X"], ParameterError, "^an obs column must not be named 'X'"),
            ("cell_type", ParameterError, r"write \['cell_type'\]$"),
        ],
    )
    def test_mistakes(self, adata, columns, error, said):
        with pytest.raises(error, match=said):
            adata_to_mindex(adata, columns)


class TestHfTahoeToTensor:
    @pytest.mark.parametrize("as_dict", [False, True])
    def test_values_are_where_their_genes_are(self, as_dict):
        by_name = {name: [cell[name] for cell in CELLS] for name in ("genes", "expressions")}
        found = hf_tahoe_to_tensor(by_name if as_dict else CELLS, num_genes=10)
        expected = torch.zeros(3, 10)
        expected[0, [0, 5, 9]] = torch.tensor([1.0, 2.0, 3.0])
        expected[2, 4] = 7
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)

    def test_tahoe_has_62713_genes(self):
        assert hf_tahoe_to_tensor(CELLS[:1]).shape == (1, 62_713)

    def test_a_dataset_of_huggingface_is_read_so(self):
        datasets = pytest.importorskip("datasets")
        columns = {"genes": [[0, 2], [1], [2]], "expressions": [[1.0, 2.0], [3.0], [4.0]]}
        dataset = CellDataset(
            datasets.Dataset.from_dict(columns),
            Streaming(),
            batch_size=2,
            fetch_transform=partial(hf_tahoe_to_tensor, num_genes=3),
        )
        assert torch.cat(list(dataset)).tolist() == [[1, 0, 2], [0, 3, 0], [0, 0, 4]]

    @pytest.mark.parametrize(
        ("batch", "error", "said"),
        [
            ("cells", ParameterError, "must be a dictionary or a list of dictionaries"),
            ({"genes": [[0]], "expressions": [[1, 2]]}, FormatError, "differ in length"),
            ({"genes": [[10]], "expressions": [[1]]}, FormatError, "does not fit num_genes=10"),
            ({"genes": [[-1]], "expressions": [[1]]}, FormatError, "does not fit num_genes=10"),
        ],
    )
    def test_mistakes(self, batch, error, said):
        with pytest.raises(error, match=said):
            hf_tahoe_to_tensor(batch, num_genes=10)
