"""Token streams in training: reads of a window, the plan, ranks, workers and resuming."""

import numpy as np
import pytest
from tests.loader.storages.streams import delivered, write_stream

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ClassBalancedSampling,
    TokenStream,
    open_collection,
)
from cellfeed._decode import ChunkReads
from cellfeed._decode._kernels import _fields as fields

ALL = ["X", "spans", "metadata"]


@pytest.fixture(scope="module")
def stream(new_folder):
    random = np.random.default_rng(0)
    lengths = [random.integers(0, 200, 40).tolist() for _ in range(3)]
    return write_stream(new_folder(), lengths=lengths, block=32)


def dataset_of(stream, **options):
    opened = TokenStream(stream.folder, 24)
    collection = open_collection(opened, elements=ALL, obs=["shard"])
    options = {"batch_size": 5, "fetch_factor": 3, "seed": 1} | options
    return CellDataset(collection, BlockShuffling(1), **options), opened


def check(stream, opened, minibatch):
    rows = np.asarray(minibatch.rows)
    np.testing.assert_array_equal(
        np.asarray(minibatch.X), stream.tokens[rows[:, None] * 24 + np.arange(24)]
    )
    for row, spans in zip(rows.tolist(), opened.spans(minibatch), strict=True):
        assert delivered(spans) == stream.overlapping(row * 24, row * 24 + 24)


class Reads:
    """Counts reads of each file, as they are told to the compiled threads."""

    def __init__(self, monkeypatch):
        self.files = dict[str, int]()
        own = ChunkReads.run

        def run(reads, *arguments):
            for array in reads.chunks[:, fields.ARRAY].tolist():
                name = reads.owners[array].name
                self.files[name] = self.files.get(name, 0) + 1
            return own(reads, *arguments)

        monkeypatch.setattr(ChunkReads, "run", run)


@pytest.mark.parametrize("block", [1, 7, 24, 1000])
def test_reads_of_a_window(new_folder, monkeypatch, block):
    """One for tokens, one for spans, one for their metadata, however long the spans are."""
    stream = write_stream(new_folder(), lengths=[[300, 100], [200]], block=block)
    opened = TokenStream(stream.folder, 24)
    collection = open_collection(opened, elements=ALL)
    for row in range(len(collection)):
        reads = Reads(monkeypatch)
        collection[[row]]
        n_shards = 2 if row * 24 < 400 < row * 24 + 24 else 1
        assert reads.files["tokens"] == n_shards
        assert reads.files["spans.bin"] <= n_shards
        assert reads.files["metadata.bin"] <= n_shards
        monkeypatch.undo()


def test_an_epoch_has_each_window_once(stream):
    dataset, opened = dataset_of(stream)
    orders = []
    for _ in range(2):
        rows = []
        for minibatch in dataset:
            check(stream, opened, minibatch)
            rows += minibatch.rows.tolist()
        assert sorted(rows) == list(range(opened.n_rows))
        orders.append(rows)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("documents", [True, False])
def test_resumed_exactly(stream, documents):
    def dataset():
        opened = TokenStream(stream.folder, 24, documents=documents)
        collection = open_collection(opened, elements=ALL)
        return CellDataset(collection, BlockShuffling(1), batch_size=5, fetch_factor=3, seed=1)

    whole = [minibatch.rows.tolist() for minibatch in dataset()]
    first = dataset()
    minibatches = iter(first)
    seen = [next(minibatches).rows.tolist() for _ in range(7)]
    state = first.state_dict()
    minibatches.close()
    resumed = dataset()
    resumed.load_state_dict(state)
    assert seen + [minibatch.rows.tolist() for minibatch in resumed] == whole


def test_ranks_share_the_windows(stream):
    rows = []
    for rank in range(3):
        dataset, opened = dataset_of(stream, rank=rank, world_size=3)
        minibatches = list(dataset)
        assert len(minibatches) == len(dataset)
        for minibatch in minibatches:
            check(stream, opened, minibatch)
            rows += minibatch.rows.tolist()
    assert set(rows) == set(range(opened.n_rows))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_deliver_the_same(stream, method):
    dataset, opened = dataset_of(stream)
    own = [minibatch.rows.tolist() for minibatch in dataset]
    dataset, opened = dataset_of(stream)
    loader = dataset.loader(num_workers=2, multiprocessing_context=method)
    found = []
    for minibatch in loader:
        check(stream, opened, minibatch)
        found.append(minibatch.rows.tolist())
    assert sorted(found) == sorted(own)


def test_documents_by_class(stream):
    opened = TokenStream(stream.folder, documents=True)
    collection = open_collection(opened, obs=["kind"])
    strategy = ClassBalancedSampling(collection.obs["kind"].values)
    kinds = [
        kind
        for minibatch in CellDataset(collection, strategy, batch_size=10, seed=0)
        for kind in minibatch.obs["kind"].tolist()
    ]
    assert min(kinds.count(0), kinds.count(1)) > len(kinds) / 4
