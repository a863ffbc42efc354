"""Shards are written whole or not at all, and damage to them is told."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings

import numpy as np
import pytest
from tests import commands
from tests.loader.storages.tokens.written import write_stream

from cellfeed import (
    CellfeedError,
    FormatError,
    ParameterError,
    PathError,
    TokenStream,
    TokenStreamWriter,
    open_collection,
    preshuffle,
)

ALL = ["X", "spans"]


def write(folder, tokens=(1, 2, 3, 4), **options):
    with TokenStreamWriter(folder, "uint16", **options) as writer:
        writer.append(tokens, metadata="m")


def test_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(ParameterError), TokenStreamWriter(tmp_path, "uint16") as writer:
        writer.add_span(0, 1, "of a token that is not there")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [1, 100])  # written at the end, and while tokens are appended
def test_a_disk_that_is_full_leaves_nothing(tmp_path, n):
    def write_many():
        with TokenStreamWriter(tmp_path, "uint16", shard="a") as writer:
            for _ in range(n):
                writer.append(np.zeros(20_000, "uint16"))

    with commands.files_end_after(30_000), pytest.raises(OSError, match="File too large") as raised:
        write_many()
    assert raised.value.filename == f"{tmp_path}/.a.unfinished/tokens.bin"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_of_what_is_refused(tmp_path):
    with TokenStreamWriter(tmp_path, "uint16", documents=True, obs=["kind"]) as writer:
        writer.append([1, 2], obs={"kind": "a"})
        for wrong in (
            {"metadata": object()},
            {"metadata": float("nan")},
            {"obs": {"kind": 1.0}},
            {"obs": {"other": "a"}},
            {"metadata": "x" * 2**21},
        ):
            with pytest.raises(ParameterError) as raised:
                writer.append([3, 4], **wrong)
            assert "\n" not in str(raised.value)
        writer.append([5, 6])
    stream = TokenStream(tmp_path, documents=True)
    cells = open_collection(stream, obs=["kind"])[:]
    assert cells.X.values.tolist() == [1, 2, 5, 6]
    assert cells.obs["kind"].tolist() == [0, -1]
    assert list(stream.elements) == ["X"]


def test_of_a_process_that_was_killed(tmp_path):
    with TokenStreamWriter(tmp_path / "written", "uint16", shard="b") as writer:
        writer.append([7, 8])
        folder = shutil.copytree(tmp_path / "written", tmp_path / "left")  # as it was left
    with (
        pytest.warns(UserWarning, match=r"1 unfinished shards are left out \(\.b\.unfinished\)"),
        pytest.raises(FormatError, match="has no finished shard; write one"),
    ):
        TokenStream(folder)
    write(folder, shard="a")
    with pytest.warns(UserWarning, match="unfinished shards are left out"):
        stream = TokenStream(folder, 2)
    assert stream.n_tokens == 4
    assert stream.shard_names == ("a",)
    with pytest.raises(ParameterError, match="is being written, or was left by a process that was"):
        TokenStreamWriter(folder, "uint16", shard="b")


def test_shards_are_written_beside_each_other(tmp_path):
    with contextlib.ExitStack() as writing:
        writers = [
            writing.enter_context(TokenStreamWriter(tmp_path, "uint16", shard=f"{k}"))
            for k in range(3)
        ]
        for k in (1, 0, 2):
            writers[k].append(np.full(10, k), metadata={"by": k})
    stream = TokenStream(tmp_path, 10)
    cells = open_collection(stream, elements=ALL)[:]
    assert cells.X.tolist() == [[k] * 10 for k in range(3)]
    found = [(span.metadata, span.shard, span.id) for (span,) in stream.spans(cells)]
    assert found == [({"by": k}, k, 0) for k in range(3)]


def test_a_shard_is_there_once(tmp_path):
    write(tmp_path, shard="a")
    with pytest.raises(ParameterError, match=r"a\.tokens: exists already; give another `shard`"):
        TokenStreamWriter(tmp_path, "uint16", shard="a")


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        ("O", {}, "must be of integers, floats or booleans"),
        ([("a", "O")], {}, "must be of integers, floats or booleans"),
        ("S4", {}, "must be of integers, floats or booleans"),
        ("nonsense", {}, "`dtype` must be a NumPy dtype, such as 'uint16', but got 'nonsense'"),
        ([("a",)], {}, "`dtype` must be a NumPy dtype"),
        ("c8", {}, "must be of integers, floats or booleans"),
        ("uint16", {"shard": "../a"}, "`shard` must be letters"),
        ("uint16", {"shard": ".a"}, "`shard` must be letters"),
        ("uint16", {"obs": ["a"]}, "give `documents=True`"),
        ("uint16", {"obs": [dict], "documents": True}, "`obs` must be a list of names, but got"),
        ("uint16", {"obs": "a", "documents": True}, "`obs` must be a list of names, but got 'a'"),
        ("uint16", {"block": 0}, "`block >= 1` must hold"),
    ],
)
def test_what_a_writer_cannot_be(tmp_path, dtype, options, message):
    with pytest.raises(ParameterError, match=message):
        TokenStreamWriter(tmp_path, dtype, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [[-1], [70_000], [1.5], [[1, 2]], ["a"], 3, [None]])
def test_tokens_that_do_not_fit(tmp_path, tokens):
    with pytest.raises(ParameterError, match="tokens must have one dimension and fit into uint16"):
        write(tmp_path, tokens)


def test_big_endian_and_padded_dtypes_are_stored_packed(tmp_path):
    dtype = np.dtype({"names": ["a", "b"], "formats": [">u2", "<f8"], "offsets": [2, 8]})
    tokens = np.array([(1, 0.5), (2, 1.5)], dtype)
    with TokenStreamWriter(tmp_path, dtype) as writer:
        writer.append(tokens)
    (cells,) = open_collection(TokenStream(tmp_path, 2))[:].X
    assert cells.dtype == [("a", "<u2"), ("b", "<f8")]
    assert cells.tolist() == tokens.tolist()


def test_metadata_that_is_no_json(tmp_path):
    """It is never unpickled."""
    write(tmp_path, shard="a")
    (tmp_path / "a.tokens" / "metadata.bin").write_bytes(b"\x80.\xff")
    stream = TokenStream(tmp_path, 2)
    with pytest.raises(
        FormatError, match=r"metadata of spans cannot be read .*; a shard is damaged"
    ):
        stream.spans(open_collection(stream, elements=ALL)[:])


def test_values_with_fields_are_not_preshuffled(tmp_path):
    with TokenStreamWriter(tmp_path / "stream", [("a", "u2"), ("b", "f4")]) as writer:
        writer.append(np.zeros(5000, [("a", "u2"), ("b", "f4")]))
    with pytest.raises(ParameterError, match="read it without preshuffling"):
        preshuffle(tmp_path / "stream", tmp_path / "out")


def test_spans_take_their_elements(tmp_path):
    write(tmp_path)
    stream = TokenStream(tmp_path, 2)
    with pytest.raises(ParameterError, match=r"no 'spans'; open with elements=\['X', 'spans'\]"):
        stream.spans(open_collection(stream)[:])


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(PathError, match="no such folder"):
        TokenStream(tmp_path / "absent")
    with pytest.raises(FormatError, match="has no finished shard"):
        TokenStream(tmp_path)
    write(tmp_path, shard="a")
    said = r"has 4 tokens but no window of 5 tokens; give a smaller"
    with pytest.raises(FormatError, match=said):
        TokenStream(tmp_path, 5)
    with pytest.raises(FormatError, match=r"a\.tokens: was written without documents; leave out"):
        TokenStream(tmp_path, documents=True)
    for options in ({"window": 0}, {"stride": 0}, {"window": 1.5}):
        with pytest.raises(ParameterError):
            TokenStream(tmp_path, **options)
    with TokenStreamWriter(tmp_path, "int32", shard="b") as writer:
        writer.append([1])
    said = r"b\.tokens: has tokens of int32, but a\.tokens of uint16"
    with pytest.raises(FormatError, match=said):
        TokenStream(tmp_path, 2)


@pytest.fixture
def shard(tmp_path):
    write_stream(tmp_path, lengths=[[50, 60]])
    return tmp_path / "000.tokens"


def read_all(folder):
    for options in ({"window": 7}, {"documents": True}):
        stream = TokenStream(folder, **options)
        collection = open_collection(stream, elements=ALL, obs=stream.obs_names())
        stream.spans(collection[:])


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "spans.bin", "index.bin"])
def test_a_file_that_is_cut_or_missing(shard, name):
    size = (shard / name).stat().st_size
    os.truncate(shard / name, size - 1)
    with pytest.raises(FormatError, match=rf"{name}: has {size - 1:,} bytes, but {size:,} were"):
        TokenStream(shard.parent)
    (shard / name).unlink()
    with pytest.raises(FormatError, match=rf"{name}: is missing; the shard is damaged, copy"):
        TokenStream(shard.parent)


def test_a_file_that_is_cut_after_opening(shard):
    collection = open_collection(TokenStream(shard.parent, 7))
    os.truncate(shard / "tokens.bin", 10)
    with pytest.raises(FormatError, match=r"tokens\.bin"):
        collection[[len(collection) - 1]]


def test_a_header_of_which_a_byte_is_another(shard):
    content = bytearray((shard / "shard.json").read_bytes())
    random = np.random.default_rng(0)
    for position in random.integers(0, len(content) - 1, 60).tolist():
        changed = content.copy()
        changed[position] ^= 1 << int(random.integers(8))
        (shard / "shard.json").write_bytes(changed)
        try:
            TokenStream(shard.parent, 7)
        except FormatError as error:
            assert re.search(r"shard\.json: .*(damaged|version)", str(error))  # noqa: PT017
        else:  # white space, say
            assert json.loads(changed) == json.loads(content)


def change_header(shard, **changes):
    """Change fields of a header, whose checksum is right; those that are None are removed."""
    header = json.loads((shard / "shard.json").read_text())
    header = {key: each for key, each in (header | changes).items() if each is not None}
    fields = {key: each for key, each in header.items() if key != "checksum"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    checksum = hashlib.blake2b(text, digest_size=16).hexdigest()  # as the page says
    (shard / "shard.json").write_text(json.dumps(fields | {"checksum": checksum}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 2}, "version 2, not 1"),
        ({"encoding": "json"}, ".*unexpected keyword argument 'encoding'"),
        ({"longest_document": None}, ".*missing .* argument: 'longest_document'"),
        ({"dtype": "<c8"}, ".*must be of integers, floats or booleans.*"),
        ({"dtype": "nonsense"}, ".*nonsense.*"),
        ({"dtype": [["token", "O"]]}, ".*must be of integers, floats or booleans.*"),
        ({"dtype": 3}, ".*"),
        ({"dtype": []}, ".*must be of integers, floats or booleans.*"),
    ],
)
def test_a_header_of_another_version(shard, changes, why):
    change_header(shard)
    assert TokenStream(shard.parent, 7).n_tokens == 110
    change_header(shard, **changes)
    said = rf"shard\.json: was written by another version of cellfeed \({why}\); write the shard"
    with pytest.raises(FormatError, match=rf"{said} again, or update cellfeed$") as raised:
        TokenStream(shard.parent, 7)
    assert "\n" not in str(raised.value)


def test_tables_with_fewer_entries_than_the_header_states(shard):
    for name in ("documents.bin", "index.bin", "obs-0.bin"):
        header, content = (shard / "shard.json").read_bytes(), (shard / name).read_bytes()
        (shard / name).write_bytes(content[:-8])
        files = json.loads(header)["files"]
        change_header(shard, files=files | {name: len(content) - 8})
        with pytest.raises(FormatError, match=rf"{name}: has another number of entries than its"):
            read_all(shard.parent)
        (shard / name).write_bytes(content)
        (shard / "shard.json").write_bytes(header)
    read_all(shard.parent)


def test_a_header_that_is_no_object(shard):
    (shard / "shard.json").write_text("[1]")
    with pytest.raises(FormatError, match=r"shard\.json: cannot be read .*the shard is damaged"):
        TokenStream(shard.parent)


@pytest.mark.parametrize("name", ["documents.bin", "spans.bin", "index.bin", "obs-0.bin"])
def test_numbers_that_cannot_be(shard, name):
    """Whatever is in the files, an error says so, or what comes out has a shape that it may."""
    content = (shard / name).read_bytes()
    random = np.random.default_rng(0)
    for _ in range(25):
        changed = bytearray(content)
        place = int(random.integers(len(content)))
        changed[place] ^= 1 << int(random.integers(8))
        (shard / name).write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                read_all(shard.parent)
            except CellfeedError as error:
                assert "\n" not in str(error)  # noqa: PT017


def test_a_url_is_no_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PathError, match=r"^s3://bucket/tokens: is a URL, but only local files are"):
        TokenStreamWriter("s3://bucket/tokens", "uint16")
    assert not [*tmp_path.iterdir()]
