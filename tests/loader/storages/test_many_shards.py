"""A stream of more shards than a process may open files is read, and what a limit stops says so."""

import os
import resource
from typing import Any

import numpy as np
import pytest
from tests.warm import python as warm

from cellfeed import PathError, TokenStream, TokenStreamWriter, open_collection

N_SHARDS, N_TOKENS, WINDOW = 300, 10, 15

SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np
from cellfeed import BlockShuffling, CellDataset, TokenStream, open_collection
stream = TokenStream(sys.argv[1], window=15)
collection = open_collection(stream, elements=["X", "spans", "metadata"], obs=["kind", "shard"])
rows = []
for minibatch in CellDataset(collection, BlockShuffling(1), batch_size=16, fetch_factor=4, seed=0):
    kinds = collection.obs["kind"].decode(np.asarray(minibatch.obs["kind"]))
    for k, row in enumerate(minibatch.rows.tolist()):
        shards = np.arange(15 * row, 15 * row + 15) // 10
        assert np.array_equal(np.asarray(minibatch.X[k]), shards)
        assert kinds[k] == str(shards[0] % 3)
        rows.append(row)
    for row, spans in zip(minibatch.rows.tolist(), stream.spans(minibatch), strict=True):
        shards = np.unique(np.arange(15 * row, 15 * row + 15) // 10)
        assert [span.metadata for span in spans] == [{"shard": int(each)} for each in shards]
assert sorted(rows) == list(range(len(collection))) == list(range(200))
documents = open_collection(TokenStream(sys.argv[1], documents=True), obs=["kind"])
cells = documents[:]
assert np.array_equal(cells.X.values, np.repeat(np.arange(300), 10))
print("right")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for k in range(N_SHARDS):
        options: dict[str, Any] = {"shard": f"{k:04}", "documents": True, "obs": {"kind": str}}
        with TokenStreamWriter(folder, "uint16", **options) as writer:
            writer.append(np.full(N_TOKENS, k), metadata={"shard": k}, obs={"kind": f"{k % 3}"})
    return folder


def test_more_shards_than_files_may_be_open(folder):
    assert warm.output_of("-c", SCRIPT, folder) == "right\n"


def test_no_more_files_may_be_open(folder):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    stream = TokenStream(folder, WINDOW)
    collection = open_collection(stream, elements=["X", "spans"])
    taken = os.open(folder, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, limits[1]))
        for fails in (lambda: TokenStream(folder, WINDOW), lambda: stream.read_obs(["kind"])):
            with pytest.raises(PathError, match=r"too many files are open; .*`ulimit -n") as raised:
                fails()
            assert "\n" not in str(raised.value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken)
    assert len(collection[:]) == stream.n_rows
