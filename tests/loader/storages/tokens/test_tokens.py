"""Windows and documents of token streams, with their spans, are those of NumPy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.sources.cells import labels_of
from tests.loader.storages.tokens.written import DTYPES, LENGTHS, delivered, write_stream

from cellfeed import BlockShuffling, CellDataset, ParameterError, TokenStream, open_collection
from cellfeed.decode import ChunkReads
from cellfeed.decode._kernels import _fields as fields
from cellfeed.transforms import Log1p

ALL = ["X", "spans"]


def written(new_folder, data, **options):
    block = data.draw(st.sampled_from([1, 3, 16, 64, 1000]))
    lengths, seed = data.draw(LENGTHS), data.draw(st.integers(0, 99))
    return write_stream(new_folder(), lengths=lengths, block=block, seed=seed, **options)


@given(data=st.data())
def test_windows(new_folder, data):
    stream = written(new_folder, data, dtype=data.draw(st.sampled_from(DTYPES)))
    tokens = stream.tokens
    window, stride = data.draw(st.integers(1, tokens.size)), data.draw(st.integers(1, 40))
    opened = TokenStream(stream.folder, window, stride=stride)
    assert opened.n_tokens == tokens.size
    assert opened.n_rows == len(range(0, tokens.size - window + 1, stride))
    asked = data.draw(st.lists(st.integers(0, opened.n_rows - 1), min_size=1))
    cells = open_collection(opened, elements=ALL)[asked]
    expected = np.stack([tokens[row * stride : row * stride + window] for row in asked])
    assert cells.X.dtype == expected.dtype
    assert cells.X.tobytes() == expected.tobytes()  # NaN are as they were
    for row, spans in zip(asked, opened.spans(cells), strict=True):
        assert delivered(spans) == stream.overlapping(row * stride, row * stride + window)


@settings(max_examples=25)
@given(data=st.data())
def test_documents(new_folder, data):
    stream = written(new_folder, data, dtype=data.draw(st.sampled_from(DTYPES)))
    opened = TokenStream(stream.folder, documents=True)
    n = len(stream.documents)
    assert opened.n_rows == n
    asked = data.draw(st.lists(st.integers(0, n - 1), min_size=1))
    collection = open_collection(opened, elements=ALL, obs=["shard", "kind", "length"])
    cells = collection[asked]
    starts = np.concatenate([[0], np.cumsum([len(each) for each in stream.documents])])
    for k, (row, spans) in enumerate(zip(asked, opened.spans(cells), strict=True)):
        assert cells.X.row(k).tobytes() == stream.documents[row].tobytes()
        assert delivered(spans) == stream.overlapping(starts[row], starts[row + 1])
    shards = labels_of(collection, "shard", cells.obs["shard"])
    assert shards == [f"{stream.shards[row]:03}" for row in asked]
    kinds = labels_of(collection, "kind", cells.obs["kind"])
    assert kinds == ["ab"[row % 2] for row in asked]
    lengths = labels_of(collection, "length", cells.obs["length"])
    expected = [str(len(stream.documents[row])) if row % 3 else None for row in asked]
    assert lengths == expected


@settings(max_examples=15)
@given(data=st.data())
def test_labels_of_windows_are_of_where_they_begin(new_folder, data):
    stream = written(new_folder, data)
    stride = data.draw(st.integers(1, 9))
    opened = TokenStream(stream.folder, 1, stride=stride)
    table = opened.read_obs(["length", "shard", "kind"])
    assert list(table) == ["length", "shard", "kind"]
    document = np.repeat(np.arange(len(stream.documents)), [len(d) for d in stream.documents])
    document = document[::stride]
    assert table["shard"].tolist() == [f"{stream.shards[d]:03}" for d in document]
    assert table["kind"].tolist() == ["ab"[d % 2] for d in document]
    lengths = [str(len(stream.documents[d])) if d % 3 else None for d in document]
    assert table["length"].astype(object).where(table["length"].notna(), None).tolist() == lengths


def dataset_of(folder, *, seed=0, **options):
    collection = open_collection(TokenStream(folder, **options), elements=ALL)
    return CellDataset(collection, BlockShuffling(1), batch_size=4, fetch_factor=3, seed=seed)


@pytest.fixture(scope="module")
def stream(new_folder):
    lengths = [[40, 0, 33], [7], [90, 25]]
    return write_stream(new_folder(), lengths=lengths, dtype=[("token", "u2"), ("time", "f4")])


def test_fields_come_as_tensors(stream):
    pytest.importorskip("torch")
    tokens, opened = stream.tokens, TokenStream(stream.folder, 13)
    for minibatch in dataset_of(stream.folder, window=13):
        rows = np.asarray(minibatch.rows)
        for row, spans in zip(rows.tolist(), opened.spans(minibatch), strict=True):
            assert delivered(spans) == stream.overlapping(row * 13, row * 13 + 13)
        expected = tokens[rows[:, None] * 13 + np.arange(13)]
        assert list(minibatch.keys())[:2] == ["X/token", "X/time"]
        np.testing.assert_array_equal(np.asarray(minibatch["X/token"]), expected["token"])
        np.testing.assert_array_equal(np.asarray(minibatch["X/time"]), expected["time"])


@pytest.mark.slow
def test_ragged_tensors_padded_and_nested(stream):
    pytest.importorskip("torch")
    for minibatch in dataset_of(stream.folder, documents=True):
        tokens = minibatch["X/token"]
        own = [stream.documents[row]["token"] for row in minibatch.rows.tolist()]
        assert tokens.shape == (len(own),)
        assert tokens.lengths.tolist() == [len(each) for each in own]
        padded, nested = tokens.padded(9), tokens.nested().unbind()
        assert padded.shape == (len(own), max(map(len, own)))
        for k, each in enumerate(own):
            assert tokens.row(k).tolist() == nested[k].tolist() == each.tolist()
            width = padded.shape[1] - len(each)
            assert padded[k].tolist() == [*each.tolist(), *[9] * width]


def test_in_numpy_with_a_function_of_the_user_s(stream):
    def turn_twice(cells):
        back = np.arange(len(cells))[::-1]
        return cells[back][back]

    collection = open_collection(TokenStream(stream.folder, documents=True))
    options: Any = {"fetch_transform": turn_twice, "as_torch": False, "seed": 0}
    for cells in CellDataset(collection, BlockShuffling(1), batch_size=2, **options):
        for k, row in enumerate(cells.rows.tolist()):
            assert cells.X.row(k).tobytes() == stream.documents[row].tobytes()
        assert cells.X.padded()["time"].shape[0] == len(cells)


def test_windows_of_a_folder_by_its_path(new_folder):
    folder = new_folder()
    write_stream(folder, lengths=[[5000, 4000]])
    collection = open_collection(folder)
    assert collection.elements["X"].row_shape == (4096,)
    assert len(collection) == 2


def test_a_dtype_is_asked_for(new_folder):
    stream = write_stream(new_folder(), lengths=[[50]])
    collection = open_collection(TokenStream(stream.folder, 10), elements=ALL)
    (minibatch,) = CellDataset(collection, BlockShuffling(1), 64, dtype={"X": "int64"}, seed=0)
    expected = stream.tokens.reshape(5, 10)[np.asarray(minibatch.rows)]
    np.testing.assert_array_equal(np.asarray(minibatch.X), expected.astype("int64"))
    with pytest.raises(ParameterError, match=r"^`dtype` must leave out 'spans', whose values have"):
        CellDataset(collection, BlockShuffling(1), 64, dtype="int64")


def test_transforms_are_for_numbers_in_columns(stream):
    for options, what in (({"window": 4}, "fields"), ({"documents": True}, "rows of any length")):
        collection = open_collection(TokenStream(stream.folder, **options))
        with pytest.raises(ParameterError, match=rf"^'X' has .*{what.split()[0]}"):
            CellDataset(collection, BlockShuffling(1), 4, transform=Log1p())


def test_shown(stream):
    windows = open_collection(TokenStream(stream.folder, 24))
    assert repr(windows).startswith(f"Collection({len(windows):,} rows of 24 values, 1 file, X (")
    documents = open_collection(TokenStream(stream.folder, documents=True))
    assert repr(documents).startswith(f"Collection({len(documents):,} rows, 1 file, X (ragged")


# Reads of a window


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
    """One for tokens and one for spans, however long the spans are."""
    stream = write_stream(new_folder(), lengths=[[300, 100], [200]], block=block)
    opened = TokenStream(stream.folder, 24)
    collection = open_collection(opened, elements=ALL)
    for row in range(len(collection)):
        reads = Reads(monkeypatch)
        collection[[row]]
        n_shards = 2 if row * 24 < 400 < row * 24 + 24 else 1
        assert reads.files["tokens"] == n_shards
        assert reads.files["spans.bin"] <= n_shards
        assert "metadata.bin" not in reads.files
        monkeypatch.undo()
