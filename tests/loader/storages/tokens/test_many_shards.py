"""A stream of more shards than a process may open files is read, and what a limit stops says so."""

import os
import resource
from typing import Any

import numpy as np
import psutil
import pytest
from tests.commands import limited
from tests.loader.sources.cells import labels_of

from cellfeed import (
    BlockShuffling,
    CellDataset,
    PathError,
    TokenStream,
    TokenStreamWriter,
    open_collection,
)

N_SHARDS, N_TOKENS, WINDOW = 300, 10, 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for k in range(N_SHARDS):
        options: dict[str, Any] = {"shard": f"{k:04}", "documents": True, "obs": ["kind"]}
        with TokenStreamWriter(folder, "uint16", **options) as writer:
            writer.append(np.full(N_TOKENS, k), metadata={"shard": k}, obs={"kind": f"{k % 3}"})
    return folder


def test_more_shards_than_files_may_be_open(folder):
    with limited(resource.RLIMIT_NOFILE, psutil.Process().num_fds() + 100):
        stream = TokenStream(folder, WINDOW)
        elements = ["X", "spans"]
        collection = open_collection(stream, elements=elements, obs=["kind", "shard"])
        seen = list[int]()
        for cells in CellDataset(collection, BlockShuffling(1), 16, 4, seed=0, as_torch=False):
            kinds = labels_of(collection, "kind", cells.obs["kind"])
            for k, (row, spans) in enumerate(zip(cells.rows, stream.spans(cells), strict=True)):
                shards = np.arange(WINDOW * row, WINDOW * (row + 1)) // N_TOKENS
                assert np.array_equal(cells.X[k], shards)
                assert kinds[k] == str(shards[0] % 3)
                numbers = [{"shard": each} for each in np.unique(shards).tolist()]
                assert [span.metadata for span in spans] == numbers
            seen += cells.rows.tolist()
        assert sorted(seen) == list(range(N_SHARDS * N_TOKENS // WINDOW))
        documents = open_collection(TokenStream(folder, documents=True), obs=["kind"])[:]
        assert np.array_equal(documents.X.values, np.repeat(np.arange(N_SHARDS), N_TOKENS))


def test_no_more_files_may_be_open(folder):
    stream = TokenStream(folder, WINDOW)
    collection = open_collection(stream, elements=["X", "spans"])
    taken = os.open(folder, os.O_RDONLY)
    try:
        with limited(resource.RLIMIT_NOFILE, taken + 1):
            for fails in (lambda: TokenStream(folder, WINDOW), lambda: stream.read_obs(["kind"])):
                with pytest.raises(PathError, match=r"too many files are open; .*`ulimit -n") as e:
                    fails()
                assert "\n" not in str(e.value)
    finally:
        os.close(taken)
    assert len(collection[:]) == stream.n_rows
