import multiprocessing
import pickle

import numpy as np
import pytest

from cellfeed._storages._anndata._local_h5file import LocalH5File


@pytest.fixture
def file(write_h5ad):
    return LocalH5File(write_h5ad(np.eye(2, dtype=np.float32)))


def tell_whether_inherited(file: LocalH5File, inherited, connection) -> None:
    connection.send(file() is inherited)


def test_is_opened_once_in_a_process(file):
    assert file() is file()
    assert file().mode == "r"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_is_opened_anew_after_a_fork(file):
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=tell_whether_inherited, args=(file, file(), sending))
    process.start()
    assert receiving.recv() is False
    process.join()
    assert process.exitcode == 0


def test_is_opened_anew_after_a_pickle(file):
    opened = file()
    copy = pickle.loads(pickle.dumps(file))
    assert copy() is not opened
    assert copy()["X"].shape == (2, 2)
