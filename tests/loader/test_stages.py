"""The stages of a fetch, each against what h5py and anndata say of the same file."""

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense

from cellfeed import BlockShuffling, EpochPlan, FormatError, open_collection
from cellfeed.stages import FetchStages, Volume

N_ROWS = 300
CHUNK = 64  # elements, about four rows


@pytest.fixture
def file(write_h5ad, replace):
    def chunk(opened):
        for name in ("X/data", "X/indices"):
            replace(opened, name, opened[name][:], chunks=(CHUNK,), compression="gzip")

    rng = np.random.default_rng(0)
    counts = sp.csr_matrix(rng.poisson(0.5, (N_ROWS, 40)).astype(np.float32))
    return write_h5ad(counts, edit=chunk)


@pytest.fixture
def plan():
    return EpochPlan(
        strategy=BlockShuffling(block_size=3), n_rows=N_ROWS, batch_size=10, fetch_factor=4, seed=1
    )


def chunks_of(pointer, rows, n_elements):
    """Return each chunk that holds an element of some rows, and the last of these in it."""
    elements = np.concatenate([np.arange(pointer[row], pointer[row + 1]) for row in rows])
    chunks = np.unique(elements // n_elements)
    return chunks, [int(elements[elements // n_elements == k].max() % n_elements) for k in chunks]


def test_volume_and_bytes_are_those_of_the_chunks_that_rows_lie_in(file, plan):
    fetch = plan.fetch(2)
    n_chunks = decoded = useful = stored = 0
    with h5py.File(file) as opened:
        pointer = opened["X/indptr"][:]
        for name in ("data", "indices"):
            array = opened["X"][name]
            (size,) = array.chunks
            chunks, last = chunks_of(pointer, fetch.rows, size)
            assert len(chunks) > 1
            n_chunks += len(chunks)
            decoded += sum(k + 1 for k in last) * array.dtype.itemsize
            useful += int(np.diff(pointer)[fetch.rows].sum()) * array.dtype.itemsize
            stored += sum(array.id.get_chunk_info_by_coord((k * size,)).size for k in chunks)
    with FetchStages(open_collection(file), batch_size=10) as stages:
        planned = stages.plan(fetch)
        volume = stages.volume(planned)
        n_bytes = stages.read_bytes(planned)
    assert volume == Volume(n_chunks, decoded, useful)
    assert stored <= n_bytes <= file.stat().st_size  # what lies between neighbours is read too


def test_what_is_not_compressed_is_cut_to_what_is_used(write_h5ad, plan):
    X = np.random.default_rng(0).random((N_ROWS, 8), dtype=np.float32)
    with FetchStages(open_collection(write_h5ad(X)), batch_size=10) as stages:
        volume = stages.volume(stages.plan(plan.fetch(0)))
    assert volume is not None
    assert volume.useful_bytes == plan.fetch(0).rows.size * 8 * 4
    # Rows between those that are wanted of one chunk, and no more.
    assert volume.useful_bytes <= volume.decoded_bytes <= X.nbytes


def test_minibatches_are_the_planned_rows(file, plan, in_memory):
    expected = in_memory([file])
    with FetchStages(open_collection(file), batch_size=10) as stages:
        for number in range(3):
            planned = stages.readahead(stages.plan(plan.fetch(number)))
            stages.decompress(planned)  # leaves no trace
            minibatches = stages.to_minibatches(stages.read(planned))
            rows = np.concatenate([np.asarray(minibatch.rows) for minibatch in minibatches])
            assert rows.tolist() == plan.delivered_rows(number)[0].tolist()
            X = np.concatenate([dense(minibatch.X) for minibatch in minibatches])
            assert np.array_equal(X, expected[rows])


def test_only_decompression_sees_damaged_chunks(file, plan):
    with h5py.File(file) as opened:
        places = [opened["X/data"].id.get_chunk_info(k).byte_offset for k in range(5)]
    content = bytearray(file.read_bytes())
    for place in places:
        content[place + 4 : place + 12] = b"\xff" * 8
    file.write_bytes(content)
    rows = EpochPlan(
        strategy=plan.strategy, n_rows=N_ROWS, batch_size=N_ROWS, fetch_factor=1, seed=0
    ).fetch(0)
    with FetchStages(open_collection(file), batch_size=10) as stages:
        planned = stages.plan(rows)
        assert stages.read_bytes(planned) > 0
        with pytest.raises(FormatError, match="damaged"):
            stages.decompress(planned)


def test_only_placing_sees_columns_that_do_not_exist(write_h5ad, plan):
    def garble(opened):
        opened["X/indices"][:] = 1_000

    rng = np.random.default_rng(0)
    counts = sp.csr_matrix(rng.poisson(0.5, (N_ROWS, 40)).astype(np.float32))
    with FetchStages(open_collection(write_h5ad(counts, edit=garble)), batch_size=10) as stages:
        planned = stages.plan(plan.fetch(0))
        stages.decompress(planned)
        with pytest.raises(FormatError):
            stages.read(planned)


def test_what_the_library_reads_has_no_stages_between(tmp_path, plan):
    path = tmp_path / "big_endian.h5ad"
    obs = pd.DataFrame(index=[str(k) for k in range(N_ROWS)])
    ad.AnnData(np.ones((N_ROWS, 3), np.float32), obs=obs).write_h5ad(path)
    with h5py.File(path, "r+") as opened:
        attributes = dict(opened["X"].attrs)
        del opened["X"]
        opened["X"] = np.ones((N_ROWS, 3), ">f4")
        opened["X"].attrs.update(attributes)
    with FetchStages(open_collection(path), batch_size=10) as stages:
        planned = stages.plan(plan.fetch(0))
        assert stages.volume(planned) is None
        assert sum(map(len, stages.to_minibatches(stages.read(planned)))) == 40
