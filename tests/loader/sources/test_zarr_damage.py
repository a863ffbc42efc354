"""Damage to zarr stores is told in one line that names file, element and bytes."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from tests.loader.matrices import dense
from tests.loader.sources.test_interrupted_epochs import change_while_chunks_are_decoded
from tests.loader.sources.zarr_cells import quiet, write_cells
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

from cellfeed import (
    CellDataset,
    FormatError,
    PathError,
    ReadOptions,
    Streaming,
    open_collection,
)

pytestmark = quiet

N_ROWS, N_VARS, CHUNK = 40, 12, 16
MATRIX = np.where(
    np.random.default_rng(0).random((N_ROWS, N_VARS)) < 0.5,
    np.random.default_rng(1).integers(1, 99, (N_ROWS, N_VARS)),
    0,
).astype(np.float32)
CSR = sp.csr_matrix(MATRIX)
ZSTD = [ZstdCodec(checksum=True)]
SLOW = [Crc32cCodec(), ZstdCodec()]
SHARDS = {"shards": (CHUNK * 3,)}


def write_store(path: Path, matrix: Any = MATRIX, **options: Any) -> Path:
    """Write a matrix, dense or CSR; the options are those of its arrays."""
    options = {"compressors": ZSTD, "chunks": (CHUNK,)} | options
    of_dense = options | {"chunks": (CHUNK // 2, N_VARS)}
    return write_cells(path, matrix, X=of_dense, indices=options, data=options)


@pytest.fixture
def sharded(tmp_path):
    return write_store(tmp_path / "cells.zarr", CSR, **SHARDS)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Write into a file, and leave it as old as it was."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def flip(path: Path, bit: int) -> None:
    """Flip a bit of a file, and leave it as old as it was."""
    byte = path.read_bytes()[bit // 8] ^ (1 << bit % 8)
    overwrite(path, bit // 8, bytes([byte]))


def cut(path: Path, n_bytes: int) -> None:
    os.truncate(path, n_bytes if n_bytes >= 0 else path.stat().st_size + n_bytes)


# Options, the file, what happens to it, and what is said.
ONES, OF_CHUNK = b"\xff" * 8, "elements 32 to 48: "
IN_SHARD = r"elements 48 to 64 \(bytes 0 to \d+\): cannot be decompressed"
MISSING = r"missing; copy or download it again or, if"
BEYOND = r"elements 32 to 48 \(bytes 0 to 64\): are beyond the end of the file"
DAMAGES: dict[str, tuple[dict[str, Any], str, Any, str]] = {
    "columns in a shard": (SHARDS, "indices/c/1", lambda file: overwrite(file, 30, ONES), IN_SHARD),
    "values in a shard": (SHARDS, "data/c/1", lambda file: overwrite(file, 30, ONES), IN_SHARD),
    **{
        f"a shard of {n} bytes": (SHARDS, "data/c/0", lambda file, n=n: cut(file, n), "copy or dow")
        for n in (0, 3, 40, -1)
    },
    "no shard of columns": (SHARDS, "indices/c/1", Path.unlink, "elements 48 to 64: are missing; "),
    "no shard of values": (SHARDS, "data/c/1", Path.unlink, "elements 48 to 64: are missing; copy"),
    "values": ({}, "data/c/2", lambda file: overwrite(file, 30, ONES), f"{OF_CHUNK}cannot be deco"),
    **{
        f"a chunk of {n} bytes": ({}, "data/c/2", lambda file, n=n: cut(file, n), OF_CHUNK)
        for n in (0, 20, 1 << 16)
    },
    "less, not compressed": ({"compressors": []}, "data/c/2", lambda file: cut(file, 20), BEYOND),
    "blosc of another size": (
        {"compressors": [BloscCodec()]},
        "data/c/1",
        lambda file: overwrite(file, 4, (63).to_bytes(4, "little")),
        "elements 16 to 32: (cannot be decompressed|decompress to another size)",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files(tmp_path, name):
    options, file, damage, said = DAMAGES[name]
    path = write_store(tmp_path / "cells.zarr", CSR, **options)
    damage(path / "X" / file)
    collection = open_collection(path)
    element = f"`X/{file.partition('/')[0]}`, "
    with pytest.raises(FormatError, match=f"^{path / 'X' / file}: {element}.*{said}"):
        collection[:]
    if file.endswith("/1"):
        rows = [0, N_ROWS - 1]  # in other files
        assert np.array_equal(collection[rows].X.toarray(), MATRIX[rows])


COMPRESSORS: dict[str, list[Any]] = {
    "none": [],
    "blosc": [BloscCodec(cname="lz4", shuffle="shuffle")],
    "zstd": [ZstdCodec()],
    "gzip": [GzipCodec()],
}


@pytest.mark.parametrize("shards", [None, CHUNK * 3])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_flipped_bit_where_chunks_have_a_crc32c(tmp_path, name, shards):
    compressors = [*COMPRESSORS[name], Crc32cCodec()]
    options = {"compressors": compressors} | ({"shards": (shards,)} if shards else {})
    path = write_store(tmp_path / "cells.zarr", CSR, **options)
    assert open_collection(path).describe()["is_fast"].all()
    assert np.array_equal(open_collection(path)[:].X.toarray(), MATRIX)
    random = np.random.default_rng(0)
    files = [*path.glob("X/indices/c/*"), *path.glob("X/data/c/*")]
    for _ in range(8):
        file = files[random.integers(len(files))]
        bit = int(random.integers(8 * file.stat().st_size))
        flip(file, bit)
        with pytest.raises(FormatError, match=f"^{file}: .* checksum"):
            open_collection(path)[:]
        flip(file, bit)


def test_when_a_crc32c_is_verified(tmp_path):
    """With each reading, with the first one of a process, or never."""
    path = write_store(tmp_path / "cells.zarr", CSR, compressors=[BloscCodec(), Crc32cCodec()])
    last = path / "X/data/c/1"
    for verify in ("never", "first", "always"):
        options: Any = ReadOptions(verify=verify)
        dataset = CellDataset(
            open_collection(path), Streaming(), batch_size=N_ROWS, read_options=options
        )
        list(dataset)
        flip(last, 8 * last.stat().st_size - 1)  # of the checksum itself
        if verify == "always":
            with pytest.raises(FormatError, match="do not match their checksum"):
                list(dataset)
        else:
            list(dataset)
        flip(last, 8 * last.stat().st_size - 1)


@pytest.mark.parametrize("name", ["zarr.json", "X/zarr.json", "X/data/zarr.json"])
def test_damaged_metadata(sharded, name):
    overwrite(sharded / name, 0, b"#")
    with pytest.raises(FormatError, match=r"cells\.zarr: "):
        open_collection(sharded)


def test_an_index_without_checksum_that_points_elsewhere(tmp_path):
    path = write_store(tmp_path / "cells.zarr", CSR)
    shutil.rmtree(path / "X/data")
    zarr.create_array(
        path / "X/data",
        data=CSR.data,
        chunks=(CHUNK * 4,),
        serializer=ShardingCodec(chunk_shape=(CHUNK,), index_codecs=[BytesCodec()]),
        compressors=None,
    )
    assert np.array_equal(open_collection(path)[:].X.toarray(), MATRIX)
    overwrite(path / "X/data/c/0", -16, (1 << 62).to_bytes(8, "little"))
    problem = r"c/0: `X/data`, index of the shard \(bytes \d+ to \d+\): has chunks outside"
    with pytest.raises(FormatError, match=problem):
        open_collection(path)[:]


class TestMissingFiles:
    @pytest.mark.parametrize("codecs", [ZSTD, [], SLOW])
    @pytest.mark.parametrize("name", ["indices", "data"])
    def test_are_damage(self, tmp_path, name, codecs):
        matrix = sp.csr_matrix(np.maximum(MATRIX, 1))
        path = write_store(tmp_path / "cells.zarr", matrix, compressors=codecs)
        (path / f"X/{name}/c/2").unlink()
        with pytest.raises(FormatError, match=MISSING):
            open_collection(path)[:]

    @pytest.mark.parametrize("codecs", [ZSTD, SLOW])
    def test_of_stored_zeros_that_were_never_written_are_too(self, tmp_path, codecs):
        matrix = sp.csr_matrix(np.maximum(MATRIX, 1))
        matrix.data[CHUNK : 2 * CHUNK] = 0
        path = write_store(tmp_path / "cells.zarr", matrix, compressors=codecs)
        assert not (path / "X/data/c/1").exists()
        with pytest.raises(FormatError, match=r"if these are zeros .*, write them too$"):
            open_collection(path)[:]

    @pytest.mark.parametrize("shards", [None, (16, N_VARS)])
    def test_of_a_dense_matrix_are_zero(self, tmp_path, shards):
        matrix = MATRIX.copy()
        matrix[16:32] = 0
        path = write_store(tmp_path / "cells.zarr", matrix, shards=shards)
        assert not (path / f"X/c/{1 if shards else 2}/0").exists()
        assert np.array_equal(open_collection(path)[:].X, matrix)

    def test_chunks_within_a_shard_are_zero(self, tmp_path):
        matrix = CSR.copy()
        matrix.data[CHUNK : 2 * CHUNK] = 0
        path = write_store(tmp_path / "cells.zarr", matrix, **SHARDS)
        assert np.array_equal(open_collection(path)[:].X.toarray(), matrix.toarray())

    @pytest.mark.parametrize("options", [{}, SHARDS])
    def test_of_indices_that_are_all_zero_are_not_needed(self, tmp_path, options):
        path = write_store(tmp_path / "cells.zarr", sp.csr_matrix(MATRIX[:, :1]), **options)
        assert not (path / "X/indices/c").exists()
        assert np.array_equal(dense(open_collection(path)[:].X), MATRIX[:, :1])


class TestChanges:
    """Each file is watched; what happens where all of them change is in the suite for damage."""

    @pytest.mark.parametrize(
        "name", ["X/data/c/0", "X/indices/c/1", "X/data/zarr.json", "X/indices/zarr.json"]
    )
    def test_since_it_was_opened(self, sharded, name, monkeypatch):
        collections = [open_collection(sharded) for _ in range(4)]
        collections[0][:]
        copies = [pickle.dumps(each) for each in collections[:2]]
        *opened, last = collections
        with monkeypatch.context() as patch:
            change_while_chunks_are_decoded(patch, lambda: os.utime(sharded / name, ns=(0, 0)))
            with pytest.raises(FormatError, match=f"{name}: was replaced or written to since it w"):
                last[:]
        for each in [*opened, *map(pickle.loads, copies)]:
            with pytest.raises(FormatError, match=f"{name}: was replaced or written to since it w"):
                each[:]
        if name == "X/data/c/0":  # of shards that are not read, it does no harm
            assert np.array_equal(collections[0][[-1]].X.toarray(), MATRIX[[-1]])
        (sharded / name).unlink()
        with pytest.raises(PathError, match=f"{name}: was removed since it was opened; put it"):
            collections[0][:]
