"""What is compressed to LZ4 here comes back by Blosc itself, and is no larger than by LZ4HC."""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc
from tests.loader.convert.test_preshuffle_codecs import check

from cellfeed import preshuffle
from cellfeed._convert._preshuffle import _shards
from cellfeed._convert._preshuffle._shards import _BLOCK_ELEMENTS, compress

pytestmark = pytest.mark.filterwarnings(
    "ignore:Numcodecs codecs are not in the Zarr version 3 specification"
)

KINDS = {
    "counts": lambda rng, n: 1 + rng.geometric(0.6, n),
    "noise": lambda rng, n: rng.integers(0, 65_536, n),
    "zeros": lambda rng, n: np.zeros(n, int),
    "runs": lambda rng, n: np.repeat(rng.integers(0, 300, n // 20 + 1), 20)[:n],
    "one in many": lambda rng, n: np.where(rng.random(n) < 0.01, rng.integers(0, 65_536, n), 1),
    "a period": lambda rng, n: np.arange(n) % int(rng.integers(1, 70_000)),
}


def check_chunks(chunks):
    for chunk, compressed in zip(chunks, compress(chunks), strict=True):
        assert blosc.decompress(compressed) == chunk.tobytes()
        assert len(compressed) <= chunk.nbytes + 16  # as Blosc promises
    return sum(map(len, compress(chunks)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("kind", KINDS)
def test_comes_back(kind, dtype):
    @given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.integers(1, 3))
    def of_any_length(seed, n, n_chunks):
        rng = np.random.default_rng(seed)
        check_chunks(KINDS[kind](rng, n * n_chunks).astype(dtype).reshape(n_chunks, n))

    of_any_length()
    for n in (*range(1, 40), 127, 128, 129, 70_000):
        of_kind = KINDS[kind](np.random.default_rng(n), n)
        check_chunks(of_kind.astype(dtype)[None])
    for n in (_BLOCK_ELEMENTS - 1, _BLOCK_ELEMENTS, _BLOCK_ELEMENTS + 1, 2 * _BLOCK_ELEMENTS + 100):
        check_chunks(KINDS[kind](np.random.default_rng(n), n).astype(dtype)[None])


def test_what_any_bytes_are():
    @given(st.binary(min_size=1, max_size=300))
    def check_bytes(content):
        check_chunks(np.frombuffer(bytearray(content), np.uint8)[None])

    check_bytes()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("n", [_shards._LEAST_COMPRESSED_HERE, 1 << 17])
def test_is_no_larger_than_lz4hc(dtype, n):
    rng = np.random.default_rng(0)
    # Means of genes differ, so that counts do more than those of one distribution.
    counts = 1 + rng.poisson(rng.gamma(0.3, 2, (4, n))).astype(dtype)
    by_lz4hc = sum(len(blosc.compress(each, b"lz4hc", 7, blosc.SHUFFLE)) for each in counts)
    assert check_chunks(counts) <= 1.01 * by_lz4hc


def test_is_what_large_chunks_of_a_store_are(write_h5ad, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    X = sp.csr_matrix((rng.random((400, 300)) < 0.5) * (1.0 + rng.poisson(0.6, (400, 300))))
    X = X.astype(np.float32)
    asked = list[int]()

    def noted(chunks):
        asked.append(chunks.shape[1])
        return compress(chunks)

    monkeypatch.setattr(_shards, "compress", noted)
    preshuffle(write_h5ad(X), tmp_path / "out.zarr", cells_per_chunk=150)
    assert asked
    assert min(asked) >= _shards._LEAST_COMPRESSED_HERE
    check(tmp_path / "out.zarr", X)
