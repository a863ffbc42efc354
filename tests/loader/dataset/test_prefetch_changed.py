"""What was read of the next epoch is not taken for what is wanted, where that has changed."""

import copy
import gc

import pytest
import scipy.sparse as sp
from tests.loader.dataset.test_prefetch_next_epoch import MATRIX, N_ROWS, dataset_over, rows_of

from cellfeed import CellDataset, Streaming, open_collection


@pytest.fixture(scope="module")
def path(write_h5ad):
    return write_h5ad(sp.csr_matrix(MATRIX))


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 8), ("fetch_factor", 1), ("strategy", Streaming()), ("drop_last", True)],
)
def test_in_the_middle_of_an_epoch(path, name, value):
    changed, without = (
        dataset_over(open_collection(path), prefetch_next_epoch=ahead) for ahead in (True, False)
    )
    for dataset in (changed, without):
        for number, _ in enumerate(dataset, start=1):
            if number == len(dataset):
                setattr(dataset, name, value)
    for _ in range(2):
        assert rows_of(changed) == rows_of(without)


def test_where_the_dataset_that_read_is_gone(path):
    first = dataset_over(open_collection(path))
    other = copy.copy(first)
    assert sorted(rows_of(first)) == list(range(N_ROWS))
    del first
    gc.collect()
    for _ in range(3):
        assert sorted(rows_of(other)) == list(range(N_ROWS))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker:UserWarning")
def test_a_worker_that_has_nothing_of_the_epochs_to_come_does_not_look_for_ever(path):
    """Stopped and gone on, it has what another worker has of a fresh epoch."""

    def over():
        collection = open_collection(path)
        return CellDataset(
            collection, Streaming(), N_ROWS // 4, 3, seed=0, prefetch_next_epoch=True
        )

    loader = over().loader(3, persistent_workers=True)
    minibatches = iter(loader)
    next(minibatches)
    state = loader.state_dict()
    minibatches.close()
    dataset = over()
    dataset.load_state_dict(state)
    loader = dataset.loader(3, persistent_workers=True, timeout=600)
    assert len(rows_of(loader)) == N_ROWS - N_ROWS // 4
    assert sorted(rows_of(loader)) == list(range(N_ROWS))
