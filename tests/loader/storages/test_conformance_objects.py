"""AnnData objects pass the suite: in memory, and backed by a file."""

import itertools

import anndata as ad
import pytest
from tests.loader.matrices import adata_of

from cellfeed import open_collection
from cellfeed.testing import SourceConformance


def source_of(adata, element):
    (source,) = open_collection(adata, elements=[element]).sources
    return source


class TestInMemory(SourceConformance):
    elements = ("X", "layers/counts", "raw/X")
    max_examples = 15

    @pytest.fixture
    def write(self):
        return lambda case: source_of(adata_of(case), case.element)


class TestBacked(SourceConformance):
    max_examples = 4

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            path = tmp_path / f"{next(numbers)}.h5ad"
            adata_of(case).write_h5ad(path)
            return source_of(ad.read_h5ad(path, backed="r"), case.element)

        return write
