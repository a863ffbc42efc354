"""`estimate_sample_size` and `suggest_parameters`: what a first look may know without measuring."""

import itertools
import sys

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ParameterError,
    Streaming,
    open_collection,
)
from cellfeed.scdataset import MultiIndexable, estimate_sample_size, suggest_parameters
from cellfeed_tuner import theory

SIZES = {"conservative": 1.25, "balanced": 1.5, "aggressive": 2.0}


def suggest(collection, batch_size=4, **parameters):
    return suggest_parameters(collection, batch_size, verbose=False, **parameters)


@pytest.fixture
def table():
    return np.zeros((1000, 50), np.float32)


def sparse():
    return sp.csr_array(np.random.default_rng(0).poisson(0.1, (1000, 80)))


def with_obs(table):
    obs = pd.DataFrame({"label": ["a" * 400] * 1000}, index=[f"cell{i}" for i in range(1000)])
    return ad.AnnData(table, obs=obs)


class TestSampleSize:
    def test_of_what_is_in_memory(self, table):
        row, X, text = table[0].nbytes, sparse(), "a" * 3000
        multi = MultiIndexable(X=table, y=np.arange(1000), unstructured={"genes": "any"})
        assert estimate_sample_size(table) == estimate_sample_size(table, n_samples=5000) == row
        assert estimate_sample_size(multi) == row + 8
        assert estimate_sample_size(with_obs(table)) > row + 400
        assert estimate_sample_size(np.array([text] * 10, object)) == 8 + sys.getsizeof(text)
        stored = X.data.nbytes + X.indices.nbytes + X.indptr.nbytes
        assert estimate_sample_size(X, n_samples=1000) == pytest.approx(stored / 1000, abs=1)

    def test_a_collection_is_known_by_its_row_pointers(self, plates):
        collection = open_collection(plates)
        n_bytes = sum(
            minibatch.X.values().nbytes + minibatch.X.col_indices().nbytes
            for minibatch in CellDataset(collection, Streaming(), 8)
        )
        assert estimate_sample_size(collection) == pytest.approx(n_bytes / len(collection), abs=1)

    @pytest.mark.parametrize(
        ("parameters", "factor"),
        [
            ({"fetch_callback": lambda table, rows: table[rows, :10]}, 1 / 5),
            ({"fetch_transform": lambda fetched: fetched.astype(np.float64)}, 2),
            ({"batch_callback": lambda fetched, of: np.hstack([fetched[of]] * 3)}, 3),
            ({"batch_transform": lambda batch: {"X": batch, "same": [batch.copy()]}}, 2),
            ({"batch_transform": lambda batch: torch.from_numpy(batch).to_sparse_csr()}, None),
        ],
    )
    def test_functions_are_applied(self, table, parameters, factor):
        pointers = 17 * 8 / 16  # all that is stored of zeros
        expected = pointers if factor is None else table[0].nbytes * factor
        assert estimate_sample_size(table, **parameters) == round(expected)

    def test_functions_over_a_collection(self, plates, in_memory):
        expected = in_memory(plates)[0].nbytes
        size = estimate_sample_size(
            open_collection(plates), batch_transform=lambda minibatch: minibatch.X.to_dense()
        )
        assert size == expected
        whole = estimate_sample_size(open_collection(plates), batch_transform=lambda each: each)
        cells = estimate_sample_size(open_collection(plates), fetch_transform=lambda each: each)
        assert whole == cells > 8  # with the numbers of the rows

    def test_what_cannot_be_read(self, table):
        with pytest.raises(ParameterError, match="`n_samples >= 1` must hold"):
            estimate_sample_size(table, n_samples=0)
        with pytest.raises(ParameterError, match="cannot be indexed by an array of row numbers"):
            estimate_sample_size([[1.0], [2.0]])


class TestSuggestion:
    @pytest.mark.process
    def test_it_goes_into_a_dataset_and_its_dataloader(self, table):
        suggested = suggest(table)
        strategy = BlockShuffling(suggested["block_size_balanced"])
        dataset = CellDataset(table, strategy, 4, suggested["fetch_factor"])
        options = {name: suggested[name] for name in ("num_workers", "prefetch_factor")}
        assert sum(map(len, DataLoader(dataset, batch_size=None, **options))) == 1000

    def test_a_collection_is_read_by_threads(self, plates):
        collection = open_collection(plates)
        suggested = suggest(collection)
        assert (suggested["num_workers"], suggested["prefetch_factor"]) == (0, None)
        dataset = CellDataset(collection, Streaming(), 4, suggested["fetch_factor"])
        total = suggested["estimated_total_memory_mb"] * 2**20
        assert total == pytest.approx(dataset.buffer_bytes, rel=0.05)
        assert suggest(collection, min_workers=2)["num_workers"] == 2

    @given(
        n_rows=st.integers(1, 10**6),
        n_columns=st.integers(1, 10**5),
        batch_size=st.integers(1, 4096),
        share=st.floats(1e-3, 1),
        workers=st.tuples(st.integers(0, 64), st.integers(0, 64)).map(sorted),
    )
    def test_it_fits_into_memory(self, n_rows, n_columns, batch_size, share, workers):
        rows = np.broadcast_to(np.float32(0), (n_rows, n_columns))  # takes no memory itself
        least, most = workers
        suggested = suggest(
            rows, batch_size, target_ram_fraction=share, min_workers=least, max_workers=most
        )
        assert least <= suggested["num_workers"] <= most
        assert 1 <= suggested["fetch_factor"] <= 256
        free = suggested["system_info"]["available_ram_gb"] * 1024
        fits = suggested["estimated_total_memory_mb"] <= share * free * (1 + 1e-9)
        assert fits or suggested["fetch_factor"] == 1
        sizes = [suggested[f"block_size_{each}"] for each in SIZES]
        assert 1 <= sizes[0] <= sizes[1] <= sizes[2] <= suggested["fetch_factor"]

    def test_each_process_has_a_fetch(self):
        suggested = suggest(np.zeros((100, 3)), 10, min_workers=2, max_workers=2)
        assert suggested["fetch_factor"] == 5

    def test_ranks_of_a_machine_share_it(self, table, monkeypatch):
        alone = suggest(table, min_workers=1, max_workers=1)["system_info"]
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "999999999")
        shared = suggest(table, min_workers=1, max_workers=1)
        assert shared["system_info"]["cpu_count"] == 1
        assert shared["system_info"]["available_ram_gb"] < alone["available_ram_gb"] / 1000
        assert shared["fetch_factor"] == 1

    def test_a_fetch_counts_that_is_larger_than_its_minibatches(self, table):
        small = suggest(table, batch_transform=lambda batch: batch[:, :1])
        assert small["system_info"] | {"available_ram_gb": 0} == suggest(table)["system_info"] | {
            "available_ram_gb": 0
        }

    @pytest.mark.parametrize("n_labels", [2, 14, 50])
    @pytest.mark.parametrize("fetch_factor", [4, 16, 256])
    def test_blocks_lose_at_most_what_is_said(self, n_labels, fetch_factor):
        # Theory is exact where every block has one label.
        rows = np.broadcast_to(np.float32(0), (64 * fetch_factor, 3))
        suggested = suggest(rows, 64, max_workers=0)
        assert suggested["fetch_factor"] == fetch_factor
        p = np.arange(1, n_labels + 1)
        most = theory.entropy_bits(p)
        of_random = most - theory.independent_entropy_bits(p, 64)
        for name, factor in SIZES.items():
            block_size = suggested[f"block_size_{name}"]
            lost = most - theory.expected_entropy_bits(p, 64, block_size, fetch_factor)
            assert of_random < lost * 1.001 <= of_random * factor * 1.01

    def test_it_says_that_nothing_was_measured(self, table, capsys):
        suggested = suggest_parameters(table, 64)
        printed = capsys.readouterr().out
        assert f"fetch_factor={suggested['fetch_factor']}" in printed
        assert "Nothing was measured; `autotune` measures" in printed
        suggest(table)
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"batch_size": 0}, "`batch_size >= 1` must hold"),
            ({"target_ram_fraction": 0}, "`0 < target_ram_fraction <= 1` must hold"),
            ({"target_ram_fraction": 1.5}, "`0 < target_ram_fraction <= 1` must hold"),
            ({"min_workers": 3, "max_workers": 2}, "`0 <= min_workers <= max_workers` must hold"),
            ({"min_workers": -1}, "`0 <= min_workers <= max_workers` must hold"),
            ({"max_workers": 1.5}, "`max_workers` must be an integer"),
        ],
    )
    def test_limits_that_cannot_be(self, table, parameters, message):
        with pytest.raises(ParameterError, match=message):
            suggest(table, **parameters)


def test_fetch_size_is_what_a_fetch_reads(table):
    dataset = CellDataset(table, Streaming(), 8, 4)
    fetches = map(dataset.plan(epoch=0).fetch, itertools.count())
    assert next(fetches).rows.size == dataset.fetch_size == 32
