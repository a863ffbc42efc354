"""HuggingFace datasets pass the suite, in folders and as objects."""

import itertools
from dataclasses import replace

import pytest

from cellfeed import HuggingFaceSource
from cellfeed.testing import SourceConformance

datasets = pytest.importorskip("datasets")

from tests.loader.storages.arrow_files import dataset_of, write_dataset  # noqa: E402


class TestFolder(SourceConformance):
    layouts = ("csr",)
    max_examples = 8

    def cases(self, **options):
        def storable(case):  # there are no numbers of genes without genes, and only Arrow's own
            return replace(case, n_vars=max(1, case.n_vars))

        return super().cases(**options).map(storable)

    def is_decoded_here(self, case):
        return True

    @pytest.fixture
    def write(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 7)  # rows of a record batch
        datasets.disable_progress_bars()
        numbers = itertools.count()

        def write(case):
            folder = tmp_path / f"{next(numbers)}"
            write_dataset(folder, case, case.obs, num_shards=min(3, case.n_rows))
            return HuggingFaceSource(folder, n_vars=case.n_vars, var_names=case.var.index)

        return write


class TestObject(TestFolder):
    """In memory, which pyarrow reads."""

    max_examples = 5

    def is_decoded_here(self, case):
        return None

    @pytest.fixture
    def write(self):
        def write(case):
            dataset = dataset_of(case, case.obs)
            return HuggingFaceSource(dataset, n_vars=case.n_vars, var_names=case.var.index)

        return write
