"""Token streams on servers are those of this machine: rows, spans, minibatches and states."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.bytes.remote.faulty import quick
from tests.loader.storages.tokens.written import DTYPES, LENGTHS, delivered, write_stream
from tests.servers.faults import Status
from tests.servers.web import WebServer

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    ParameterError,
    PathError,
    RemoteError,
    TokenStream,
    open_collection,
)

pytest.importorskip("obstore")

ALL = ["X", "spans"]
OBS = ["shard", "kind", "length"]
LENGTHS_OF_SHARDS = [[40, 0, 33], [7], [90, 25]]
SHARDS = ["000", "001", "002"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    write_stream(root / "stream", lengths=LENGTHS_OF_SHARDS, dtype=DTYPES[-1])
    return root


@pytest.fixture
def server(root):
    with WebServer(root) as server:
        yield server


def assert_same(there, here):
    a, b = (open_collection(each, elements=ALL, obs=OBS) for each in (there, here))
    assert len(a) == len(b)
    for name in OBS:
        assert str(a.obs[name]) == str(b.obs[name])
    order = np.random.default_rng(0).permutation(len(a))
    one, other = a[order], b[order]
    for name in one.keys():  # noqa: SIM118 - it is no mapping
        assert as_bytes(one[name]) == as_bytes(other[name])
    expected = [delivered(spans) for spans in here.spans(other)]
    assert [delivered(spans) for spans in there.spans(one)] == expected
    return a, b


def as_bytes(rows):
    if isinstance(rows, np.ndarray):
        return rows.tobytes()
    return rows.offsets.tobytes(), rows.values.tobytes()


@settings(max_examples=15)
@given(data=st.data())
def test_windows_and_documents(new_folder, url_of, data):
    folder, block = new_folder(), data.draw(st.sampled_from([1, 16, 1000]))
    lengths, dtype = data.draw(LENGTHS), data.draw(st.sampled_from(DTYPES))
    written = write_stream(folder, lengths=lengths, dtype=dtype, block=block)
    names = [f"{k:03}" for k in range(len(lengths))]
    window = data.draw(st.integers(1, written.tokens.size))
    for options in ({"window": window}, {"documents": True}):
        there = TokenStream(url_of(folder), shards=names, **options)
        here = TokenStream(folder, **options)
        assert there.n_tokens == here.n_tokens
        assert there.shard_names == here.shard_names
        if here.elements.keys() == {*ALL}:
            assert_same(there, here)


def dataset_of(collection):
    return CellDataset(collection, BlockShuffling(2), batch_size=2, fetch_factor=2, seed=4)


def numbers(minibatches):
    return [(each.rows.tolist(), {n: str(each[n]) for n in each.keys()}) for each in minibatches]  # noqa: SIM118


@pytest.mark.parametrize("options", [{"window": 11}, {"documents": True}], ids=str)
def test_minibatches_and_states(root, server, options):
    pytest.importorskip("torch")
    there = TokenStream(f"{server.url}/stream", shards=SHARDS[::-1], **options)
    here = TokenStream(root / "stream", **options)
    a, b = map(dataset_of, assert_same(there, here))
    assert a.state_dict() == b.state_dict()
    begun = numbers(itertools.islice(b, 1))
    state = b.state_dict()
    a.load_state_dict(state)  # which was saved where the stream is local
    expected = dataset_of(b.collection)
    assert begun + numbers(a) == numbers(expected)


@pytest.mark.process
def test_workers(root, server):
    there = open_collection(TokenStream(f"{server.url}/stream", 11, shards=SHARDS), elements=ALL)
    here = open_collection(TokenStream(root / "stream", 11), elements=ALL)
    expected = numbers(dataset_of(here).loader(num_workers=2))
    assert numbers(dataset_of(there).loader(num_workers=2)) == expected


def test_ranges_are_requested_once_and_tables_too(root, server):
    there = open_collection(TokenStream(f"{server.url}/stream", 11, shards=SHARDS), elements=ALL)
    dataset = dataset_of(there)
    server.requests.clear()
    for _ in dataset:
        pass
    asked = [(each.path, each.range) for each in server.requests]
    tokens = [each for path, each in asked if path.endswith("tokens.bin")]
    assert len(tokens) == len({*tokens})
    n_tokens = sum(map(sum, LENGTHS_OF_SHARDS))
    n_bytes = sum(stop - first for first, stop in tokens)
    assert n_bytes <= 2 * n_tokens * np.dtype(DTYPES[-1]).itemsize
    tables = [path for path, _ in asked if path.endswith(("documents.bin", "index.bin"))]
    assert not tables  # which the dataset read before


def test_a_web_server_is_told_the_shards(root, server):
    url = f"{server.url}/stream"
    with pytest.raises(PathError, match=rf"^{url}: its shards cannot be listed; name them, as in"):
        TokenStream(url)
    with pytest.raises(PathError, match=rf"^{url}/x\.tokens/shard\.json: no such object; check"):
        TokenStream(url, shards=["000", "x"])
    with pytest.raises(ParameterError, match=r"`shards` must be a list of names, .*'000'"):
        TokenStream(url, shards="000")
    assert TokenStream(url, 11, shards=["000", "000"]).shard_names == ("000",)


def test_some_shards_of_this_machine(root):
    some = TokenStream(root / "stream", documents=True, shards=["002", "000"])
    assert (some.n_rows, some.shard_names) == (5, ("000", "002"))
    assert some.selection() != TokenStream(root / "stream", documents=True).selection()
    every = TokenStream(root / "stream", documents=True, shards=SHARDS)
    assert every.selection() == TokenStream(root / "stream", documents=True).selection()
    with pytest.raises(PathError, match=r"stream: has no finished shard 'x'; check `shards`"):
        TokenStream(root / "stream", shards=["x"])


class TestFaults:
    @pytest.fixture
    def root(self, tmp_path):
        write_stream(tmp_path / "stream", lengths=LENGTHS_OF_SHARDS)
        return tmp_path

    def opened(self, server, **options):
        return TokenStream(f"{server.url}/stream", 11, shards=SHARDS, **options)

    def test_a_file_that_is_cut_missing_or_damaged(self, root, server):
        path = root / "stream/001.tokens/spans.bin"
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(FormatError, match=r"001\.tokens/spans\.bin: has [\d,]+ bytes, but"):
            self.opened(server)
        path.unlink()
        with pytest.raises(FormatError, match=r"001\.tokens/spans\.bin: is missing; the shard"):
            self.opened(server)
        header = root / "stream/001.tokens/shard.json"
        header.write_bytes(header.read_bytes().replace(b"n_spans", b"n_spins"))
        with pytest.raises(FormatError, match=r"001\.tokens/shard\.json: its checksum is wrong"):
            self.opened(server)

    @pytest.mark.parametrize("name", ["tokens.bin", "spans.bin", "metadata.bin"])
    def test_an_object_that_is_replaced(self, root, server, name):
        stream = self.opened(server)
        collection = open_collection(stream, elements=ALL)
        path = root / "stream/000.tokens" / name
        server.replace(f"stream/000.tokens/{name}", path.read_bytes())
        with pytest.raises(FormatError, match=rf"{name}.* was replaced or written to since it was"):
            stream.spans(collection[:])

    def test_a_server_that_fails_for_a_while_and_for_good(self, root, server):
        stream = self.opened(server, storage_options=quick(3))
        expected = open_collection(TokenStream(root / "stream", 11))[:].X
        failures = itertools.count()
        server.answer = lambda _: Status(503) if next(failures) % 2 == 0 else None
        np.testing.assert_array_equal(open_collection(stream)[:].X, expected)
        server.answer = lambda _: Status(503)
        with pytest.raises(RemoteError, match=r"tokens\.bin"):
            open_collection(stream)[:]


@pytest.mark.server
def test_of_an_object_store(root, tmp_path, s3_server):
    pytest.importorskip("torch")
    write_stream(tmp_path / "long", lengths=[[5000], [4000]])
    for folder in (root / "stream", tmp_path / "long"):
        for path in folder.rglob("*.*"):
            if path.is_file():
                s3_server.put(path, f"tokens/{folder.name}/{path.relative_to(folder)}")
    url, options = f"s3://{s3_server.bucket}/tokens", {"storage_options": s3_server.options}
    there = TokenStream(f"{url}/stream", 11, **options)
    here = TokenStream(root / "stream", 11)
    a, b = map(dataset_of, assert_same(there, here))
    assert a.state_dict() == b.state_dict()
    assert numbers(a) == numbers(b)
    assert TokenStream(f"{url}/stream", 7, shards=["001"], **options).n_rows == 1
    for ending in ("", "/"):  # windows of 4,096 tokens
        collection = open_collection(f"{url}/long{ending}", **options)
        expected = open_collection(tmp_path / "long")
        np.testing.assert_array_equal(collection[:].X, expected[:].X)
        assert dataset_of(collection).state_dict() == dataset_of(expected).state_dict()
