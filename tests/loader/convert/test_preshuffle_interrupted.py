"""Ctrl-C ends `preshuffle` wherever it arrives, waits for no work to come, and loses none done."""

import threading
import time

import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.convert.test_preshuffle_codecs import check

from cellfeed import preshuffle
from cellfeed._convert._preshuffle import _dataset
from cellfeed._convert._preshuffle._dataset import CsrPart, Encoding


@pytest.fixture
def matrix():
    rng = np.random.default_rng(0)
    X = sp.csr_matrix(rng.poisson(0.7, (500, 40)).astype(np.float32))
    X.sort_indices()
    return X


def own_threads():
    names = ("cellfeed-encode", "cellfeed-prefetch", "cellfeed-read")
    return [each.name for each in threading.enumerate() if each.name.startswith(names)]


def test_while_a_shard_is_encoded(write_h5ad, tmp_path, matrix, monkeypatch):
    path, out, encode = write_h5ad(matrix), tmp_path / "out.zarr", Encoding.encode
    n_encoded = 0

    def interrupted_at_first(self, elements, chunk):
        nonlocal n_encoded
        n_encoded += 1
        if n_encoded == 1:
            raise KeyboardInterrupt
        time.sleep(0.1)
        return encode(self, elements, chunk)

    monkeypatch.setattr(_dataset, "_ELEMENTS_OF_A_JOB", 1)  # a chunk each, of one cell
    with monkeypatch.context() as patched:
        patched.setattr(Encoding, "encode", interrupted_at_first)
        with pytest.raises(KeyboardInterrupt):
            preshuffle(path, out, cells_per_chunk=1)
    assert n_encoded < 250  # of 500
    check_nothing_is_left(out)
    preshuffle(path, out, cells_per_chunk=1)
    check(out, matrix)


def test_while_pieces_are_read(write_h5ad, tmp_path, matrix, monkeypatch):
    path, out, append = write_h5ad(matrix), tmp_path / "out.zarr", CsrPart.append
    n_appended = 0

    def interrupted_at_second(self, rows):
        nonlocal n_appended
        n_appended += 1
        if n_appended == 2:
            raise KeyboardInterrupt
        append(self, rows)

    with monkeypatch.context() as patched:
        patched.setattr(CsrPart, "append", interrupted_at_second)
        with pytest.raises(KeyboardInterrupt):
            preshuffle(path, out, memory=100_000)
    assert n_appended == 2
    check_nothing_is_left(out)
    preshuffle(path, out, memory=100_000)
    check(out, matrix)


def check_nothing_is_left(out):
    assert not list(out.glob("dataset_*"))
    assert not list((out / ".cellfeed").glob("part-*"))
    assert not own_threads()
