"""Damage to zarr stores is told in one line that names file, element and bytes."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import write_elem
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec

from cellfeed import FormatError, PathError, open_collection
from cellfeed._decode import ChunkReads

pytestmark = pytest.mark.filterwarnings(
    # What zarr and anndata say when these stores are written.
    "ignore:.*does not have a Zarr V3 specification",
    "ignore:zarr v3 autosharding will be the default",
)

N_ROWS, N_VARS, CHUNK = 40, 12, 16
MATRIX = np.where(
    np.random.default_rng(0).random((N_ROWS, N_VARS)) < 0.5,
    np.random.default_rng(1).integers(1, 99, (N_ROWS, N_VARS)),
    0,
).astype(np.float32)
ZSTD = [ZstdCodec(checksum=True)]


def write_store(path: Path, matrix: Any = MATRIX, **options: Any) -> Path:
    """Write a matrix, dense or CSR; the options are those of its arrays."""
    root = zarr.create_group(path)
    root.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    with ad.settings.override(allow_write_nullable_strings=True):
        for name, n in (("obs", matrix.shape[0]), ("var", matrix.shape[1])):
            write_elem(root, name, pd.DataFrame(index=[f"{name}{i}" for i in range(n)]))
    options = {"compressors": ZSTD, "chunks": (CHUNK,)} | options
    if isinstance(matrix, np.ndarray):
        root.create_array("X", data=matrix, **options | {"chunks": (CHUNK // 2, N_VARS)})
        return path
    X = root.create_group("X")
    X.attrs.update({"encoding-type": "csr_matrix", "shape": list(matrix.shape)})
    X.create_array("indptr", data=matrix.indptr)
    for name in ("indices", "data"):
        X.create_array(name, data=getattr(matrix, name), **options)
    return path


@pytest.fixture
def sharded(tmp_path):
    return write_store(tmp_path / "cells.zarr", sp.csr_matrix(MATRIX), shards=(CHUNK * 3,))


@pytest.fixture
def unsharded(tmp_path):
    return write_store(tmp_path / "cells.zarr", sp.csr_matrix(MATRIX))


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Write into a file, and leave it as old as it was."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class TestShards:
    @pytest.mark.parametrize("name", ["indices", "data"])
    def test_damaged_bytes(self, sharded, name):
        overwrite(sharded / f"X/{name}/c/1", 30, b"\xff" * 8)
        collection = open_collection(sharded)
        problem = rf"c/1: `X/{name}`, elements 48 to 64 \(bytes 0 to \d+\): cannot be decompressed"
        with pytest.raises(FormatError, match=problem):
            collection[:]
        rows = [0, N_ROWS - 1]  # in other shards
        assert np.array_equal(collection[rows].X.toarray(), MATRIX[rows])

    @pytest.mark.parametrize("seed", range(20))
    def test_a_flipped_bit_anywhere_is_told(self, sharded, seed):
        rng = np.random.default_rng(seed)
        files = sorted(sharded.glob("X/[di]*a*/c/*")) + sorted(sharded.glob("X/indices/c/*"))
        path = files[rng.integers(len(files))]
        place = int(rng.integers(path.stat().st_size))
        byte = path.read_bytes()[place]
        overwrite(path, place, bytes([byte ^ 1 << int(rng.integers(8))]))
        with pytest.raises(FormatError, match="; the file is damaged"):
            open_collection(sharded)[:]

    @pytest.mark.parametrize("n_bytes", [0, 3, 40, -1])
    def test_a_truncated_one(self, sharded, n_bytes):
        path = sharded / "X/data/c/0"
        os.truncate(path, n_bytes if n_bytes >= 0 else path.stat().st_size + n_bytes)
        with pytest.raises(FormatError, match=f"^{path}: `X/data`, .*copy or download it again$"):
            open_collection(sharded)[:]

    def test_an_index_without_checksum_that_points_elsewhere(self, tmp_path):
        path = write_store(tmp_path / "cells.zarr", sp.csr_matrix(MATRIX))
        values = sp.csr_matrix(MATRIX).data
        shutil.rmtree(path / "X/data")
        array = zarr.create(
            shape=values.shape,
            dtype=values.dtype,
            store=path / "X/data",
            chunks=(CHUNK * 4,),
            codecs=[ShardingCodec(chunk_shape=(CHUNK,), index_codecs=[BytesCodec()])],
            zarr_format=3,
        )
        array[:] = values
        assert np.array_equal(open_collection(path)[:].X.toarray(), MATRIX)
        overwrite(path / "X/data/c/0", -16, (1 << 62).to_bytes(8, "little"))
        problem = r"c/0: `X/data`, index of the shard \(bytes \d+ to \d+\): has chunks outside"
        with pytest.raises(FormatError, match=problem):
            open_collection(path)[:]

    @pytest.mark.parametrize("name", ["indices", "data"])
    def test_a_missing_one(self, sharded, name):
        (sharded / f"X/{name}/c/1").unlink()
        problem = f"X/{name}/c/1: `X/{name}`, elements 48 to 64: are missing; copy"
        with pytest.raises(FormatError, match=problem):
            open_collection(sharded)[:]

    def test_a_missing_one_of_a_dense_matrix_is_zero(self, tmp_path):
        matrix = MATRIX.copy()
        matrix[16:32] = 0
        path = write_store(tmp_path / "cells.zarr", matrix, shards=(16, N_VARS))
        assert not (path / "X/c/1/0").exists()
        assert np.array_equal(open_collection(path)[:].X, matrix)

    def test_missing_chunks_within_one_are_zero(self, tmp_path):
        matrix = sp.csr_matrix(MATRIX)
        matrix.data[CHUNK : 2 * CHUNK] = 0
        path = write_store(tmp_path / "cells.zarr", matrix, shards=(CHUNK * 3,))
        assert np.array_equal(open_collection(path)[:].X.toarray(), matrix.toarray())


class TestChunksInFiles:
    def test_damaged_bytes(self, unsharded):
        overwrite(unsharded / "X/data/c/2", 30, b"\xff" * 8)
        problem = r"X/data/c/2: `X/data`, elements 32 to 48: cannot be decompressed"
        with pytest.raises(FormatError, match=problem):
            open_collection(unsharded)[:]

    @pytest.mark.parametrize("n_bytes", [0, 20, 1 << 16])
    def test_another_size(self, unsharded, n_bytes):
        os.truncate(unsharded / "X/data/c/2", n_bytes)
        with pytest.raises(FormatError, match=r"X/data/c/2: `X/data`, elements 32 to 48: "):
            open_collection(unsharded)[:]

    def test_another_size_of_one_that_is_not_compressed(self, tmp_path):
        path = write_store(tmp_path / "cells.zarr", sp.csr_matrix(MATRIX), compressors=[])
        os.truncate(path / "X/data/c/2", 20)
        problem = (
            r"c/2: `X/data`, elements 32 to 48 \(bytes 0 to 64\): are beyond the end of the file"
        )
        with pytest.raises(FormatError, match=problem):
            open_collection(path)[:]

    @pytest.mark.parametrize("codecs", [ZSTD, [], [ZstdCodec(), Crc32cCodec()]])
    @pytest.mark.parametrize("name", ["indices", "data"])
    def test_a_missing_one(self, tmp_path, name, codecs):
        matrix = sp.csr_matrix(np.maximum(MATRIX, 1))
        path = write_store(tmp_path / "cells.zarr", matrix, compressors=codecs)
        (path / f"X/{name}/c/2").unlink()
        with pytest.raises(FormatError, match=r"missing; copy or download it again or, if"):
            open_collection(path)[:]

    @pytest.mark.parametrize("codecs", [ZSTD, [ZstdCodec(), Crc32cCodec()]])
    def test_stored_zeros_that_were_never_written_cannot_be_told_from_it(self, tmp_path, codecs):
        matrix = sp.csr_matrix(np.maximum(MATRIX, 1))
        matrix.data[CHUNK : 2 * CHUNK] = 0
        path = write_store(tmp_path / "cells.zarr", matrix, compressors=codecs)
        assert not (path / "X/data/c/1").exists()
        with pytest.raises(FormatError, match=r"if these are zeros .*, write them too$"):
            open_collection(path)[:]

    def test_a_missing_one_of_a_dense_matrix_is_zero(self, tmp_path):
        matrix = MATRIX.copy()
        matrix[8:24] = 0
        path = write_store(tmp_path / "cells.zarr", matrix)
        assert not (path / "X/c/1/0").exists()
        assert np.array_equal(open_collection(path)[:].X, matrix)

    @pytest.mark.parametrize("shards", [None, (CHUNK * 3,)])
    def test_indices_that_are_all_zero_need_no_file(self, tmp_path, shards):
        matrix = MATRIX[:, :1]
        path = write_store(tmp_path / "cells.zarr", sp.csr_matrix(matrix), shards=shards)
        assert not (path / "X/indices/c").exists()
        assert np.array_equal(open_collection(path)[:].X.toarray(), matrix)


class TestChanges:
    @staticmethod
    def touch(path: Path) -> None:
        os.utime(path, ns=(0, 0))

    @pytest.mark.parametrize("name", ["X/data/c/0", "X/indices/c/1", "X/data/zarr.json"])
    @pytest.mark.parametrize("travels", [False, True])
    @pytest.mark.parametrize("was_read", [False, True])
    def test_since_it_was_opened(self, sharded, name, travels, was_read):
        collection = open_collection(sharded)
        if was_read:
            collection[:]
        self.touch(sharded / name)
        if travels:
            collection = pickle.loads(pickle.dumps(collection))
        with pytest.raises(FormatError, match=f"{name}: was replaced or written to since it was"):
            collection[:]

    @pytest.mark.parametrize("name", ["X/data/c/0", "X/indices/zarr.json"])
    def test_while_chunks_are_decoded(self, sharded, name, monkeypatch):
        collection, decode = open_collection(sharded), ChunkReads._work_off

        def change_and_decode(*arguments):
            self.touch(sharded / name)
            return decode(*arguments)

        monkeypatch.setattr(ChunkReads, "_work_off", change_and_decode)
        with pytest.raises(FormatError, match=f"{name}: was replaced or written to since it was"):
            collection[:]

    @pytest.mark.parametrize("name", ["X/data/c/0", "X/data/zarr.json"])
    def test_removed_since_it_was_opened(self, sharded, name):
        collection = open_collection(sharded)
        collection[:]
        (sharded / name).unlink()
        with pytest.raises(PathError, match=f"{name}: was removed since it was opened; put it"):
            collection[:]

    def test_of_shards_that_are_not_read_do_no_harm(self, sharded):
        collection = open_collection(sharded)
        collection[:]
        self.touch(sharded / "X/data/c/0")
        assert np.array_equal(collection[[-1]].X.toarray(), MATRIX[[-1]])


class TestMetadata:
    @pytest.mark.parametrize("name", ["zarr.json", "X/zarr.json", "X/data/zarr.json"])
    def test_that_is_damaged(self, sharded, name):
        overwrite(sharded / name, 0, b"#")
        with pytest.raises(FormatError, match=r"cells\.zarr: "):
            open_collection(sharded)

    def test_blosc_says_another_size(self, tmp_path):
        path = write_store(
            tmp_path / "cells.zarr", sp.csr_matrix(MATRIX), compressors=[BloscCodec()]
        )
        overwrite(path / "X/data/c/1", 4, (63).to_bytes(4, "little"))
        problem = "`X/data`, elements 16 to 32: (cannot be decompressed|decompress to another size)"
        with pytest.raises(FormatError, match=problem):
            open_collection(path)[:]
