"""Statistics in loggers."""

from typing import Any

import numpy as np
import pytest
from tests.loader.matrices import random_csr

from cellfeed import (
    BlockShuffling,
    CellDataset,
    InterleavedDatasets,
    ParameterError,
    open_collection,
)

torch = pytest.importorskip("torch")
N, BATCH = 400, 20


@pytest.fixture(scope="module")
def file(write_h5ad):
    X = random_csr((N, 200), 0.2, np.random.default_rng(0), np.float32)
    return write_h5ad(X, compression="gzip")


def dataset_of(file, **options: Any):
    return CellDataset(open_collection(file), BlockShuffling(8), BATCH, 4, seed=0, **options)


class Writer:
    """As a SummaryWriter of TensorBoard."""

    def __init__(self):
        self.logged = dict[str, list[int]]()

    def add_scalar(self, name, value, step):
        assert isinstance(value, float)
        self.logged.setdefault(name, []).append(step)


class TestLog:
    @pytest.mark.parametrize("num_workers", [None, 0, pytest.param(2, marks=pytest.mark.process)])
    def test_every_so_many_minibatches(self, file, num_workers):
        dataset, logged = dataset_of(file), list[tuple[dict[str, float], int]]()
        dataset.log_statistics(lambda values, step: logged.append((values, step)), every=8)
        loader = dataset if num_workers is None else dataset.loader(num_workers=num_workers)
        for _ in range(2):
            list(loader)
        assert [step for _, step in logged] == [8, 16, 24, 32, 40]
        for values, _ in logged:
            assert 0 <= values["cellfeed/waiting_share"] <= 1
            assert set(values) >= {"cellfeed/cells_per_second", "cellfeed/planning_us_per_cell"}
        assert sum(values["cellfeed/cells_per_second"] for values, _ in logged) > 0
        assert any(values["cellfeed/decompressing_us_per_cell"] > 0 for values, _ in logged)

    @pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])
    def test_a_minibatch_whose_log_fails_was_not_delivered(self, file, num_workers):
        def log(_values, step):
            if step == 3:
                raise KeyboardInterrupt

        expected = [each.rows.tolist() for each in dataset_of(file)]
        dataset = dataset_of(file)
        dataset.log_statistics(log, every=1)
        loader = dataset.loader(num_workers)
        iterator = iter(loader)
        delivered = [next(iterator).rows.tolist() for _ in range(2)]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        resumed = dataset_of(file)
        resumed.load_state_dict(loader.state_dict())
        assert delivered + [each.rows.tolist() for each in resumed] == expected

    def test_they_are_of_the_work_since_the_last_time(self, file):
        dataset, seen = dataset_of(file), list[Any]()
        before = dataset.statistics()

        def log(values, step):
            seen.append((values, dataset.statistics()))

        dataset.log_statistics(log, every=10)
        list(dataset)
        for (values, now), last in zip(seen, [before, *(each for _, each in seen)], strict=False):
            done = now - last
            share = done.waiting / (done.waiting + done.training)
            assert values["cellfeed/waiting_share"] == pytest.approx(share, rel=0.2)

    def test_by_a_writer_of_tensorboard(self, file):
        dataset, writer = dataset_of(file), Writer()
        for log in (writer, None):  # which logs no more
            dataset.log_statistics(log, every=10)
            list(dataset)
            assert {*map(tuple, writer.logged.values())} == {(10, 20)}
        assert "cellfeed/cells_per_second" in writer.logged

    def test_interleaved_datasets(self, file):
        parts, logged = [dataset_of(file), dataset_of(file)], list[Any]()
        mixed = InterleavedDatasets(parts)
        mixed.log_statistics(lambda values, step: logged.append((step, values)), every=20)
        list(mixed)
        assert [step for step, _ in logged] == [20, 40]
        assert any(values["cellfeed/decompressing_us_per_cell"] > 0 for _, values in logged)

    def test_what_cannot_log_is_refused(self, file):
        with pytest.raises(ParameterError, match="`log` must be a function"):
            dataset_of(file).log_statistics("tensorboard")
        with pytest.raises(ParameterError, match="`every >= 1`"):
            dataset_of(file).log_statistics(print, every=0)
