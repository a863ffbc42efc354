"""What is registered can be shuffled, whatever the storage: it is read through `Source` alone."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.storages.arriving import Arriving, Rows

from cellfeed import open_collection, preshuffle
from cellfeed.sources import Storage, register

GENES = ["g0", "g1", "g2", "g3", "g4"]


def counts_of(number):
    return np.random.default_rng(number).poisson(1, (70, 5)).astype(np.float32)


def obs_of(number):
    plate = np.array(["a", "b", None], object)[np.arange(70) % 3]
    return pd.DataFrame({"plate": plate, "number": np.arange(70.0), f"only {number}": 1})


def open_counts(location, elements):
    number = int(location.name)
    counts = counts_of(number)
    matrix = sp.csr_array(counts) if location.scheme == "test-csr" else counts
    return [Arriving(location, {"X": Rows(matrix, GENES)}, obs_of(number))]


@pytest.mark.filterwarnings("ignore:Observation names are not unique:UserWarning")
@pytest.mark.parametrize("scheme", ["test-csr", "test-dense"])
def test_sources_of_another_storage(tmp_path, scheme):
    register(Storage(name=scheme, open=open_counts, schemes=(scheme,)))
    given = [f"{scheme}://cells/1", f"{scheme}://cells/2"]
    out = tmp_path / "out.zarr"
    done = preshuffle(given, out, seed=1, memory=30_000)
    assert (done.n_cells, done.n_parts_written) == (140, done.n_parts)
    assert done.n_parts > 1
    parts = [ad.read_zarr(out / f"dataset_{k}") for k in range(done.n_parts)]
    cells = ad.concat(parts, join="outer")
    assert list(parts[0].var_names) == GENES
    X = sp.csr_array(cells.X).toarray()
    seen = set[tuple[str, int]]()
    for k, (name, row) in enumerate(
        zip(cells.obs["source_file"], cells.obs["source_row"], strict=True)
    ):
        number = int(name)
        expected = obs_of(number).iloc[row]
        found = cells.obs.iloc[k]
        assert np.array_equal(X[k], counts_of(number)[row])
        assert (
            found["plate"] == expected["plate"]
            or pd.isna([found["plate"], expected["plate"]]).all()
        )
        assert found["number"] == expected["number"]
        assert found[f"only {number}"] == 1
        assert pd.isna(found[f"only {3 - number}"])
        assert cells.obs_names[k] == str(row)
        seen.add((name, row))
    assert seen == {(str(number), row) for number in (1, 2) for row in range(70)}
    again = preshuffle(given, out, seed=1, memory=30_000)
    assert again.n_parts_written == 0
    assert len(open_collection(out, obs=["plate"])) == 140
